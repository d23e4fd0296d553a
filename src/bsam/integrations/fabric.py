"""Fabric: `probe` for an optimizer that `fabric.setup` returned. `optimizer.step()` then is Fabric's own.

Fabric's wrapper of an optimizer keeps attributes of its own, so `optimizer.probe` must be called on the optimizer
inside. And its models refuse a `backward()` that is not `fabric.backward()` under mixed precision, because the loss
might have to be scaled: a probe scales it by itself.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric import Fabric, wrappers
from torch import Tensor

from bsam.modules import LossFunction

__all__ = ["averages_gradients", "probe"]


def probe(fabric: Fabric, optimizer: Any, loss_fn: LossFunction, *batch: Any, **options: Any) -> Tensor:
    """Evaluate the gradients of a micro-batch for the next `optimizer.step()`; see `optimizer.probe`.

    Args:
        fabric: The Fabric, whose precision and ranks are used.
        optimizer: The optimizer that `fabric.setup` returned.
        loss_fn: Returns the mean loss of a part, without `backward()`.
        batch: The micro-batch.
        options: `weight` and `last` of `optimizer.probe`.
    """
    inner = optimizer.optimizer
    averages_gradients(inner, fabric.world_size, has_weight=options.get("weight") is not None)
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    before, wrappers._in_fabric_backward = wrappers._in_fabric_backward, True
    try:
        loss: Tensor = inner.probe(loss_fn, *batch, scaler=scaler, **options)
    finally:
        wrappers._in_fabric_backward = before
    return loss


def averages_gradients(optimizer: Any, world_size: int, *, has_weight: bool) -> bool:
    """Whether DistributedDataParallel averages the gradients of each pass; raise where that would be wrong."""
    averages = world_size > 1 and optimizer.process_group is None
    splits = optimizer.param_groups[0]["splits"]
    if averages and (splits > 1 or optimizer.per_example or has_weight):
        what = f"splits={splits}" if splits > 1 else "weights of micro-batches" if has_weight else "per-example methods"
        raise ValueError(
            f"{world_size} processes and {what} need an optimizer that averages over the ranks itself: make it with "
            "process_group=torch.distributed.group.WORLD. Every rank is then a further split."
        )
    return averages
