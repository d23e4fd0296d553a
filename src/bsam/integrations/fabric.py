"""Fabric: `probe` takes the place of `fabric.backward`, everything else in the loop stays.

`fabric.backward(loss)` computes one gradient, at the present weights. The optimizers here need gradients at other
weights too, so they need the loss as a function. `probe` hands it to the optimizer, with Fabric's precision and ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric, wrappers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bsam.batches import split_batch
from bsam.modules import LossFunction
from bsam.optim.base import ProbingOptimizer

__all__ = ["probe", "probe_with"]


def probe(
    fabric: Fabric,
    model: nn.Module,
    optimizer: Any,
    loss_fn: LossFunction,
    *batch: Any,
    weight: float | Tensor | None = None,
    last: bool = True,
) -> Tensor:
    """Evaluate the gradients of a micro-batch; write this in place of `fabric.backward(loss)`.

    Then call `fabric.clip_gradients` and `optimizer.step()` as always. Micro-batches are further splits.

    Args:
        fabric: The Fabric.
        model: The model that `fabric.setup` returned.
        optimizer: The optimizer that `fabric.setup` returned.
        loss_fn: Returns the mean loss of a micro-batch, or of a part of it. It calls the model that was set up.
        batch: The micro-batch, which is handed to `loss_fn`.
        weight: As in `probe` of the optimizer: the number of terms in the mean loss, on this rank.
        last: As in `probe` of the optimizer: False joins the micro-batch with the following ones.

    Returns:
        The mean loss of the first pass over this micro-batch, on this rank, detached.
    """
    own = getattr(optimizer, "optimizer", optimizer)
    averages = getattr(own, "process_group", None) is None
    if averages and fabric.world_size > 1 and not _ddp(model):
        raise ValueError(
            f"the model is of type {type(model).__name__}, and nothing would average its gradients over the "
            f"{fabric.world_size} ranks: write model, optimizer = fabric.setup(model, optimizer)."
        )
    with _averaging(model, averages=averages):
        return probe_with(fabric.strategy, own, loss_fn, *batch, weight=weight, last=last)


def probe_with(
    strategy: Any,
    optimizer: Any,
    loss_fn: LossFunction,
    *batch: Any,
    weight: float | Tensor | None,
    last: bool = True,
) -> Tensor:
    """Probe a micro-batch under a strategy of Fabric or Lightning; other arguments as for `probe`.

    DistributedDataParallel averages the gradients of every pass, and counts every rank once. The loss is multiplied
    by this rank's share, so that every example counts once.
    """
    if not isinstance(optimizer, ProbingOptimizer):
        raise TypeError(
            f"the optimizer is of type {type(optimizer).__name__}: make one optimizer of bsam, for example "
            "bsam.BSAM(model.parameters(), num_data=len(train_set)). In a LightningModule, other optimizers need "
            "self.automatic_optimization = True in __init__()."
        )
    name = type(strategy).__name__
    if name not in ("SingleDeviceStrategy", "DDPStrategy") or getattr(strategy, "_ddp_kwargs", {}).get("static_graph"):
        raise ValueError(f"{name}: use one device, or strategy='ddp' without static_graph.")
    if any(isinstance(each, Iterator) for each in batch):
        raise TypeError("the batch is an iterator, of which each pass would draw other examples: hand the batch over.")
    precision = strategy.precision_plugin if hasattr(strategy, "precision_plugin") else strategy.precision
    scaler = getattr(precision, "scaler", None)
    if name == "SingleDeviceStrategy" or optimizer.process_group is not None:
        return optimizer.probe(loss_fn, *batch, weight=weight, last=last, scaler=scaler)
    splits = optimizer.param_groups[0]["splits"]
    if splits > 1 or optimizer.per_example:
        raise ValueError(
            f"{'per-example gradients' if optimizer.per_example else f'splits={splits}'} on several ranks need an "
            "optimizer that averages over them itself: make it with process_group=torch.distributed.group.WORLD. Every "
            "rank is then a further split."
        )
    own = float(split_batch(batch, 1)[0][1] if weight is None else weight)
    total = torch.tensor(own, dtype=torch.float64, device=strategy.root_device)
    dist.all_reduce(total)
    mean = float(total) / dist.get_world_size()
    share = own / mean

    def shared_loss(*part: Any) -> Tensor | float:
        loss = loss_fn(*part) * share
        if hasattr(strategy, "pre_backward"):  # in Lightning, DistributedDataParallel does not see each forward pass
            strategy.pre_backward(loss)
        return loss

    return optimizer.probe(shared_loss, *batch, weight=mean, last=last, scaler=scaler) / share


@contextlib.contextmanager
def _averaging(model: nn.Module, *, averages: bool) -> Iterator[None]:
    """Say whether DistributedDataParallel averages the gradients of the passes in the block; allow `backward()` there.

    It must do so for every micro-batch, also in `fabric.no_backward_sync`: each has a perturbation of its own. Models
    that were set up refuse a `backward()` that does not scale the loss under mixed precision; a probe scales it.
    """
    ddp = _ddp(model)
    before, wrappers._in_fabric_backward = wrappers._in_fabric_backward, True
    synchronised = [module.require_backward_grad_sync for module in ddp]
    try:
        for module in ddp:
            module.require_backward_grad_sync = averages
        yield
    finally:
        wrappers._in_fabric_backward = before
        for module, value in zip(ddp, synchronised, strict=True):
            module.require_backward_grad_sync = value


def _ddp(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
