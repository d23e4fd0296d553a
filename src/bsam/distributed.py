"""Ranks as splits: one all-reduce per step, and one broadcast before the first step.

A rank with `splits=k` holds k sub-batches of a larger step: 2 ranks x 2 splits equal 1 rank x 4 splits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bsam.interrupts import interruptible

__all__ = ["all_equal", "all_reduce_sum", "average_over_ranks", "broadcast", "rank_of"]


def rank_of(group: dist.ProcessGroup) -> int:
    """Return this process's rank in `group`."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not a member of process_group: give each rank a group that contains it.")
    return rank


def average_over_ranks(
    group: dist.ProcessGroup,
    weight: float,
    means: list[Tensor],
    losses: list[Tensor],
    seen: list[bool],
    buffers: list[Tensor],
) -> list[bool]:
    """Turn this rank's means into means over all examples of all ranks, in place, by one all-reduce.

    Args:
        group: The ranks.
        weight: The weight of this rank: its number of examples.
        means: Means over this rank's examples.
        losses: Mean losses over this rank's examples.
        seen: For each parameter, whether a gradient reached it on this rank.
        buffers: Tensors that are summed over the ranks.

    Returns:
        For each parameter, whether a gradient reached it on any rank.
    """
    device = means[0].device if means else losses[0].device
    sums = [mean.mul_(weight) for mean in means]
    total_losses = [loss.to(device) * weight for loss in losses]
    count = torch.tensor([weight], device=device, dtype=sums[0].dtype if sums else None)
    reached = torch.tensor([float(found) for found in seen], device=device)
    all_reduce_sum([*sums, *total_losses, count, reached, *buffers], group)
    for loss, total in zip(losses, total_losses, strict=True):
        loss.copy_(total / count.item())
    for total in sums:
        total.div_(count.item())
    return [found > 0 for found in reached.tolist()]


def all_reduce_sum(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum `tensors` over the ranks in place, in one message."""
    dtype = max((t.dtype for t in tensors), key=lambda d: torch.finfo(d).bits)
    device = tensors[0].device
    flat = torch.cat([t.detach().reshape(-1).to(device, dtype) for t in tensors])
    with interruptible():  # ranks may wait long for each other
        dist.all_reduce(flat, group=group)
    _scatter(flat, tensors)


def all_equal(total: Tensor, total_of_squares: Tensor, world: int) -> list[bool]:
    """Return whether numbers are equal on all ranks, given their sums over the ranks; integers below 2^26 are exact."""
    equal: list[bool] = (world * total_of_squares == total.square()).tolist()
    return equal


def broadcast(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Copy the values of rank 0 of `group` to every rank."""
    values = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    with interruptible():
        for value in values:
            dist.broadcast(value, group=group, group_src=0)
    for tensor, value in zip(tensors, values, strict=True):
        tensor.detach().copy_(value)


def _scatter(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, piece in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))
