"""Ranks as splits: the one all-reduce of a step, and the one broadcast before the first.

A rank with `splits=k` is k of the sub-batches of a larger step: 2 ranks x 2 splits is 1 rank x 4 splits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bsam.interrupts import interruptible

__all__ = ["all_reduce_sum", "average_over_ranks", "broadcast", "rank_of"]


def rank_of(group: dist.ProcessGroup) -> int:
    """This process's rank in `group`."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not a member of the given process_group: hand each rank a group it is in.")
    return rank


def average_over_ranks(
    group: dist.ProcessGroup,
    size: int,
    means: list[Tensor],
    losses: list[Tensor],
    seen: list[bool],
    buffers: list[Tensor],
) -> list[bool]:
    """Turn this rank's means into means over all examples of all ranks, in place: the one all-reduce of a step.

    Args:
        group: The ranks.
        size: How many examples this rank has.
        means: Over this rank's examples.
        losses: The same of the losses.
        seen: Which parameters a gradient reached on this rank.
        buffers: Summed over the ranks.

    Returns:
        Which parameters a gradient reached on any rank.
    """
    device = means[0].device if means else losses[0].device
    sums = [mean.mul_(size) for mean in means]
    total_losses = [loss.to(device) * size for loss in losses]
    count = torch.tensor([float(size)], device=device)
    reached = torch.tensor([float(found) for found in seen], device=device)
    all_reduce_sum([*sums, *total_losses, count, reached, *buffers], group)
    for loss, total in zip(losses, total_losses, strict=True):
        loss.copy_(total / count.item())
    for total in sums:
        total.div_(count.item())
    return [found > 0 for found in reached.tolist()]


def all_reduce_sum(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum `tensors` over the ranks in place, as one message."""
    dtype = max((t.dtype for t in tensors), key=lambda d: torch.finfo(d).bits)
    device = tensors[0].device
    flat = torch.cat([t.detach().reshape(-1).to(device, dtype) for t in tensors])
    with interruptible():  # ranks may wait for each other for long
        dist.all_reduce(flat, group=group)
    _scatter(flat, tensors)


def broadcast(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank the values that rank 0 of `group` has."""
    values = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    with interruptible():
        for value in values:
            dist.broadcast(value, group=group, group_src=0)
    for tensor, value in zip(tensors, values, strict=True):
        tensor.detach().copy_(value)


def _scatter(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, piece in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))
