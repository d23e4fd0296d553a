"""Tells gradients that a step left in `.grad` from gradients of other origin, which a step would drop."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from bsam.shards import local, sum_parts
from bsam.torch_private import version_of

__all__ = ["not_left", "note_as_left", "was_left"]

_left: dict[int, tuple[weakref.ref[Tensor], int]] = {}
"""The gradients that steps left, by id, with their versions, which count changes in place.

A weak dictionary would not do: its callbacks run wherever a gradient is freed, and Python drops an interrupt that
arrives in a callback.
"""


def note_as_left(grads: Iterable[Tensor | None]) -> None:
    """Remember the gradients that a step or probe leaves."""
    for key in [key for key, (reference, _) in list(_left.items()) if reference() is None]:
        _left.pop(key, None)
    for grad in grads:
        if grad is not None:
            _left[id(grad)] = weakref.ref(grad), version_of(grad)


def not_left(parameters: list[Tensor]) -> list[int]:
    """Return the positions of parameters with a nonzero `.grad` that no step left there."""
    foreign = [(i, p.grad) for i, p in enumerate(parameters) if p.grad is not None and not was_left(p.grad)]
    if not foreign:
        return []
    device = foreign[0][1].device
    found = [local(grad).any().to(device).float() for _, grad in foreign]
    nonzero = torch.stack(sum_parts(found, [grad for _, grad in foreign])).tolist()
    return [i for (i, _), number in zip(foreign, nonzero, strict=True) if number]


def was_left(grad: Tensor) -> bool:
    """Whether a step or probe left this gradient, and nobody has changed it since."""
    reference, version = _left.get(id(grad), (None, 0))
    return reference is not None and reference() is grad and version == version_of(grad)
