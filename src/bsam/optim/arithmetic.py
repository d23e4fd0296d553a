"""Weighted sums in one pass over memory, where the weight is a number.

In a compiled step (`bsam.TrainStep`) weights are tensors, read from the device, and the compiler fuses the terms.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["average", "plus", "plus_quotient"]


def plus(a: Tensor, b: Tensor, weight: float | Tensor) -> Tensor:
    """a + weight b."""
    return a + weight * b if isinstance(weight, Tensor) else torch.add(a, b, alpha=weight)


def plus_quotient(a: Tensor, b: Tensor, c: Tensor, weight: float | Tensor, *, into_a: bool = False) -> Tensor:
    """a + weight b / c, which may be written into a where the weight is a number."""
    if isinstance(weight, Tensor):
        return a + weight * b / c
    return torch.addcdiv(a, b, c, value=weight, out=a if into_a else None)


def average(a: Tensor, b: Tensor, keep: float | Tensor) -> Tensor:
    """keep a + (1 - keep) b, which may be written into b."""
    return keep * a + (1 - keep) * b if isinstance(keep, Tensor) else b.lerp_(a, keep)
