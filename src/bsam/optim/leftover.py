"""What trainers that accumulate gradients do behind a step's back: gradients in `.grad`, and parts of a loss.

Gradients that a step left in `.grad` are told from those of other origin, which a step would drop.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from bsam.modules import LossFunction
from bsam.shards import local, sum_parts
from bsam.torch_private import version_of

__all__ = ["not_left", "note_as_left", "refuse_accumulated", "was_left"]

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


def refuse_accumulated(closure: LossFunction) -> None:
    """Raise at the closure of Lightning's automatic optimization, which holds the module, if it has a part of a loss.

    The gradients of earlier micro-batches are refused where they are found. The only batch of an epoch has none.
    """
    for held in getattr(closure, "args", ()):
        number = getattr(getattr(held, "_trainer", None), "accumulate_grad_batches", 1)
        if number > 1:
            raise RuntimeError(
                f"Trainer(accumulate_grad_batches={number}) divides the loss by {number}, and the step would be that "
                "of a part of the loss: leave it out of the Trainer, and train with bsam.integrations.lightning, "
                f"whose LightningModule has accumulate_grad_batches={number}."
            )
