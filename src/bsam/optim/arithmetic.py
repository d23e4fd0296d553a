"""Arithmetic of the updates: weighted sums in one pass over memory, norms, and writing in place.

The weight of a sum is a number, or in a compiled step (`bsam.TrainStep`) a tensor that is read from the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bsam.shards import whole_norms

__all__ = ["all_finite", "average", "clip_gradient", "plus", "plus_quotient", "total_norm", "write"]


def plus(a: Tensor, b: Tensor, weight: float | Tensor) -> Tensor:
    """a + weight b."""
    return a + weight * b if isinstance(weight, Tensor) else torch.add(a, b, alpha=weight)


def plus_quotient(a: Tensor, b: Tensor, c: Tensor, weight: float | Tensor, *, into_a: bool = False) -> Tensor:
    """a + weight b / c, which may be written into a if the weight is a number."""
    if isinstance(weight, Tensor):
        return a + weight * b / c
    return torch.addcdiv(a, b, c, value=weight, out=a if into_a else None)


def average(a: Tensor, b: Tensor, keep: float | Tensor) -> Tensor:
    """keep a + (1 - keep) b, which may be written into b."""
    return keep * a + (1 - keep) * b if isinstance(keep, Tensor) else b.lerp_(a, keep)


# ------------------------------------------------------------------ of all parameters


def total_norm(tensors: list[Tensor], parameters: Sequence[Tensor] = ()) -> Tensor:
    """The norm of all tensors together, on the first one's device; of the whole ones if the parameters are sharded."""
    if not tensors:
        return torch.zeros(())
    norms = [torch.linalg.vector_norm(t) for t in tensors]  # torch.nn.utils.get_total_norm cannot be vmapped
    norms = whole_norms(norms, parameters)
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    return total


def clip_gradient(gradient: list[Tensor], limit: float | None, parameters: Sequence[Tensor] = ()) -> None:
    """Scale the averaged gradient down to a norm of `limit`, as `torch.nn.utils.clip_grad_norm_` does."""
    if limit is not None and gradient:
        scale = (limit / (total_norm(gradient, parameters) + 1e-6)).clamp(max=1.0)
        for tensor in gradient:
            tensor.mul_(scale.to(tensor.device))


def all_finite(tensors: list[Tensor]) -> Tensor:
    """Return a 0-dim boolean: whether all elements are finite."""
    device = tensors[-1].device
    # A sum of finite terms is finite, unless they are near the largest number of the type. It is one pass over memory;
    # isfinite() takes four, which no CPU vectorises.
    sums = [t.sum(dtype=torch.promote_types(t.dtype, torch.float32)).to(device, torch.float64) for t in tensors]
    return torch.stack(sums).isfinite().all()


def write(target: Tensor, value: Tensor, accept: Tensor | None) -> None:
    """Write `value` into `target` in place, unless `accept` is given and false."""
    target.copy_(value if accept is None else torch.where(accept.to(target.device), value.to(target.dtype), target))
