"""A training step that is called in every pass over its batch, and counts in the first pass only.

A part of a batch is the same object in all passes, so the first call with an object is its first pass.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from bsam.torch_private import is_transformed, pytree

__all__ = ["Passes", "refuse_transformed"]


class Passes:
    """A training step as a loss function. Metrics keep what they counted in the first pass.

    Args:
        training_step: Returns the mean loss of a part, or a dictionary with the key "loss".
        metrics: All metrics that the training step may update.
    """

    def __init__(self, training_step: Callable[[Any], Any], metrics: Sequence[Metric]) -> None:
        self._training_step, self._metrics = training_step, metrics
        self._seen: list[Any] = []  # the parts themselves, so that no new object gets the identity of one
        self.is_first = True
        """Whether the present call is the first one with its part."""
        self.output: Any = None
        """What the training step returned in the very first call."""

    def loss(self, part: Any) -> Tensor:
        """Run the training step, and return its loss."""
        for leaf in pytree.tree_leaves(part) if self._metrics else ():
            refuse_transformed(leaf)
        self.is_first = not any(part is each for each in self._seen)
        with contextlib.nullcontext() if self.is_first else _unchanged(self._metrics):
            output = self._training_step(part)
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
        if self.is_first:
            self.output = output if not self._seen else self.output
            self._seen.append(part)
        return loss


def refuse_transformed(value: Any) -> None:
    """Raise if a value to be logged or counted is not a plain tensor, because the splits are computed under vmap."""
    if isinstance(value, Tensor) and is_transformed(value):
        raise RuntimeError(
            "values cannot be logged under vmap. Make the optimizer with vectorise=False: the splits are then computed "
            "in a loop. Or leave logs and metrics out of training_step."
        )


@contextlib.contextmanager
def _unchanged(metrics: Sequence[Metric]) -> Iterator[None]:
    """Restore the metrics at the end of the block."""
    saved = [{name: _copy(value) for name, value in vars(metric).items()} for metric in metrics]
    try:
        yield
    finally:
        for metric, attributes in zip(metrics, saved, strict=True):
            vars(metric).update(attributes)


def _copy(value: Any) -> Any:
    """Copy what a metric may write into: its tensors, and its lists, whose items it never changes."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict) else value
