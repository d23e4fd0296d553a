"""Accelerate: `probe` takes the place of `accelerator.backward`, everything else in the loop stays.

`accelerator.backward(loss)` computes one gradient, at the present weights. The optimizers here need gradients at other
weights too, so they need the loss as a function. `probe` hands it to the prepared optimizer, with the accelerator's
scaler and its averages over ranks. `accumulate`, `clip_grad_norm_`, `save_state` and `load_state` work as always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bsam.batches import split_batch
from bsam.modules import LossFunction
from bsam.optim.base import ProbingOptimizer

__all__ = ["probe", "unwrap_optimizer"]

_REFUSED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
"""Names of the distributed types that keep weights or gradients where no probe can reach them."""


def probe(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    loss_fn: LossFunction,
    *batch: Any,
    weight: float | Tensor | None = None,
    last: bool = True,
) -> Tensor:
    """Evaluate the gradients of a micro-batch; write this in place of `accelerator.backward(loss)`.

    Call it inside `accelerator.accumulate(model)`, then `accelerator.clip_grad_norm_`, `optimizer.step()` and
    `optimizer.zero_grad()` as always. Micro-batches are further splits: see `probe` of the optimizer.

    Args:
        accelerator: The accelerator.
        model: The prepared model.
        optimizer: The prepared optimizer.
        loss_fn: Returns the mean loss of a micro-batch, or of a part of it. It calls the prepared model.
        batch: The micro-batch, which is handed to `loss_fn`.
        weight: The number of terms in the mean loss, on this rank: by default the number of examples. For language
            models give the number of tokens, which `num_data` then counts too.
        last: False joins the micro-batch with the following ones into one sub-batch. `last=accelerator.sync_gradients`
            gives the whole accumulated batch one noise and one perturbation.

    Returns:
        The mean loss of the first pass over this micro-batch, on this rank, detached.
    """
    own = unwrap_optimizer(optimizer)
    if accelerator.distributed_type.name in _REFUSED:
        raise ValueError(
            f"distributed_type={accelerator.distributed_type.name} keeps weights or gradients in a form of its own, "
            "which no probe can perturb. Start one process per device without it: Accelerate then uses "
            "DistributedDataParallel."
        )
    scaler = accelerator.scaler
    with _averaging(accelerator, model, own) as is_averaging:
        if not is_averaging:
            return own.probe(loss_fn, *batch, weight=weight, last=last, scaler=scaler)
        # DistributedDataParallel counts every rank once. These factors make it count every example, or every token.
        _, num = split_batch(batch, 1, counted=weight is None)[0]
        size = float(num if weight is None else weight)
        sizes: Tensor = accelerator.gather(torch.tensor([[size, num]], device=accelerator.device))
        ranks: list[list[float]] = sizes.tolist()
        if own.param_groups[0]["splits"] > 1 and any(found != num for _, found in ranks):
            raise ValueError(
                f"the ranks have {[int(found) for _, found in ranks]} examples, but their parts are joined, so with "
                f"splits={own.param_groups[0]['splits']} all ranks need the same number: write drop_last=True in the "
                "DataLoader, or splits=1."
            )
        mean = sum(size for size, _ in ranks) / len(ranks)
        share = size / mean

        def shared_loss(*part: Any) -> Tensor | float:
            return loss_fn(*part) * share

        return own.probe(shared_loss, *batch, weight=mean, last=last, scaler=scaler) / share


def unwrap_optimizer(optimizer: Any) -> ProbingOptimizer:
    """Return the optimizer of bsam inside a prepared one."""
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise TypeError(
            f"the optimizer is of type {type(optimizer).__name__} and was not prepared: write "
            "model, optimizer = accelerator.prepare(model, optimizer)."
        )
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, ProbingOptimizer):
        raise TypeError(
            f"{type(optimizer).__name__} has no probe: make an optimizer of bsam, for example "
            "bsam.BSAM(model.parameters(), lr=0.1, num_data=len(train_set)), or call accelerator.backward(loss)."
        )
    return optimizer


@contextlib.contextmanager
def _averaging(accelerator: Accelerator, model: nn.Module, optimizer: ProbingOptimizer) -> Iterator[bool]:
    """Let DistributedDataParallel average the gradients of every pass in the block; say whether it does.

    `accumulate` keeps it from averaging before the last micro-batch. But each micro-batch has a perturbation of its
    own, which needs its averaged gradient.
    """
    wrapper = getattr(model, "_orig_mod", model)  # of torch.compile
    if not isinstance(wrapper, DistributedDataParallel):
        if accelerator.num_processes > 1 and optimizer.process_group is None:
            raise ValueError(
                f"the model is of type {type(model).__name__}, and nothing would average its gradients over the "
                f"{accelerator.num_processes} ranks: write model, optimizer = accelerator.prepare(model, optimizer)."
            )
        yield False
        return
    if optimizer.process_group is not None:
        raise ValueError(
            "process_group= does not go with a prepared model, whose gradients DistributedDataParallel averages: make "
            "the optimizer without process_group=."
        )
    if optimizer.module is wrapper.module:
        optimizer.module = wrapper  # passes under vmap would not be averaged
        optimizer._check_module()
    before, wrapper.require_backward_grad_sync = wrapper.require_backward_grad_sync, True
    try:
        yield True
    finally:
        wrapper.require_backward_grad_sync = before
