"""What a method gets in a step: parameters as slots, a function that returns gradients, and a tally of averages.

A *probe* evaluates one sub-batch: it asks for gradients at weights of its choice, `grad_at(weights)`, and adds results
to a tally. Sub-batches are probed one after the other, with `GradAt` and `Tally`, or all at once, with their
counterparts in `bsam.optim.together`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from bsam.gradients import PerExample, batch_gradient
from bsam.modules import BufferSnapshot, LossFunction
from bsam.shards import local, reshard, whole_norms

__all__ = [
    "SMALLEST_SQUARE",
    "GradAt",
    "Gradients",
    "MeanSnapshot",
    "Prober",
    "Slot",
    "Tally",
    "emptied",
    "matrix_size",
    "share_norms",
]

SMALLEST_SQUARE = 1e-30
"""Least square of a norm by which is divided."""
Result = TypeVar("Result")


@dataclass
class Slot:
    """One trainable parameter during a step."""

    index: int
    """Position among all parameters of all groups; the address of its noise."""
    parameter: Tensor
    group: dict[str, Any]
    mean: Tensor
    """The weights before the step; of a sharded parameter, the part on this rank."""
    state: dict[str, Any]
    """Its state; of a sharded parameter, the parts on this rank."""
    seen: bool = False
    """Whether any pass of the step gave the parameter a gradient."""
    copied: bool = True
    """Whether the mean is a copy. Without it nothing is written to the weights before the last formula."""
    norm: Callable[[], Tensor] | None = None
    """Returns the norm of a sharded parameter's mean, over all ranks."""
    padding: int | None = None
    """The row that stands for padding in an embedding; it has no noise. Of a sharded one, the row on this rank."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of its averages and state: float32 for 16-bit weights."""
        return torch.promote_types(self.parameter.dtype, torch.float32)

    @property
    def weights(self) -> Tensor:
        """The weights that the model holds now; of a sharded parameter, the part on this rank."""
        return local(self.parameter)

    def per_element(self, value: Tensor) -> Tensor:
        """Broadcast a per-parameter scalar to the parameter's elements."""
        return value

    def inverse_mean_square(self) -> Tensor:
        """Return one over the mean square of a matrix of weights; 0 for a vector."""
        norm = torch.linalg.vector_norm(self.mean, dtype=self.dtype) if self.norm is None else self.norm()
        found: Tensor = matrix_size(self.parameter.shape) / norm.square().clamp_min(SMALLEST_SQUARE)
        return found


def matrix_size(shape: torch.Size) -> int:
    """Return the number of elements of a matrix, or of a tensor with more dimensions; 0 for a vector."""
    return shape.numel() if len(shape) > 1 else 0


def share_norms(slots: Sequence[Slot]) -> None:
    """Let sharded slots sum the squares of all their means over the ranks at once, when the first of them is asked."""
    parameters = [slot.parameter for slot in slots]

    @functools.cache
    def norms() -> list[Tensor]:
        return whole_norms([torch.linalg.vector_norm(slot.mean, dtype=slot.dtype) for slot in slots], parameters)

    for i, slot in enumerate(slots):
        slot.norm = functools.partial(lambda i: norms()[i], i)


class MeanSnapshot:
    """The weights before the step, as the slots hold them.

    Args:
        slots: The slots.
        module: The model, if it is known.
    """

    def __init__(self, slots: list[Slot], module: nn.Module | None = None) -> None:
        self._slots, self._module = slots, module

    def restore(self) -> None:
        """Write the weights back into the parameters."""
        reshard(self._module)
        for slot in self._slots:
            slot.weights.copy_(slot.mean)


class Gradients(Protocol):
    """Computes gradients of one sub-batch at given weights: `GradAt` in a loop, `GradAtStack` under vmap."""

    def __call__(self, weights: Iterable[Tensor], /) -> list[Tensor]:
        """The gradients, one per slot."""

    def with_weights(self, weights: Iterable[Tensor], /) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients, and the weights at which they were computed, one tensor per slot each.

        The caller may write to these weights. In a loop they are the model's own: use them before the next pass.
        """

    def moments(self, weights: Iterable[Tensor], /) -> tuple[list[Tensor], list[Tensor]]:
        """Return mean and mean square of the examples' gradients, one tensor per slot each."""

    def per_split(self, function: Callable[..., Any], /) -> Callable[..., Any]:
        """Apply a function of one sub-batch's tensors to each sub-batch, also if tensors are stacked."""


class GradAt:
    """Evaluates one sub-batch at given weights, one tensor per slot."""

    def __init__(
        self,
        slots: list[Slot],
        closure: LossFunction,
        part: tuple[Any, ...],
        frozen: Callable[[int], list[tuple[nn.Module, str]]],
        per_example: PerExample | None = None,
        module: nn.Module | None = None,
    ) -> None:
        self._slots, self._closure, self._part, self._module = slots, closure, part, module
        self._frozen = frozen  # maps the number of a pass to the running statistics that it must not move
        self._per_example = per_example
        self.losses: list[Tensor] = []
        """One loss per pass."""

    def __call__(self, weights: Iterable[Tensor]) -> list[Tensor]:
        """The gradients, one per slot."""
        return self._evaluate(weights, self._gradients)

    def with_weights(self, weights: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients, and the parameters themselves, which hold the weights until the next pass."""
        return self(weights), [slot.weights for slot in self._slots]

    def moments(self, weights: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return mean and mean square of the examples' gradients, one tensor per slot each."""
        return self._evaluate(weights, self._moments)

    def per_split(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function itself: there is one sub-batch."""
        return function

    def _evaluate(self, weights: Iterable[Tensor], function: Callable[[], tuple[Result, Tensor]]) -> Result:
        """Write `weights` into the model and return the result of `function` there; keep its loss."""
        reshard(self._module)
        for slot, theta in zip(self._slots, weights, strict=True):
            slot.weights.copy_(theta)
        torch.clear_autocast_cache()  # a surrounding autocast region would keep using the old weights
        frozen_buffers = BufferSnapshot(self._frozen(len(self.losses)))
        result, loss = function()
        frozen_buffers.restore()
        self.losses.append(loss)
        return result

    def _gradients(self) -> tuple[list[Tensor], Tensor]:
        """Compute the gradient of each slot, zero if there is none, and mark the slots that a gradient reached."""
        gradients, loss = batch_gradient([slot.parameter for slot in self._slots], self._closure, self._part)
        taken = []
        for slot, gradient in zip(self._slots, gradients, strict=True):
            slot.seen |= gradient is not None
            taken.append(
                torch.zeros_like(slot.mean, dtype=slot.dtype) if gradient is None else local(gradient).to(slot.dtype)
            )
        return taken, loss

    def _moments(self) -> tuple[tuple[list[Tensor], list[Tensor]], Tensor]:
        assert self._per_example is not None  # the method declared `per_example`
        seen = [slot.seen for slot in self._slots]
        parameters = [slot.parameter for slot in self._slots]
        mean, mean_square, loss = self._per_example.moments(parameters, self._closure, self._part, seen)
        for slot, is_seen in zip(self._slots, seen, strict=True):
            slot.seen = is_seen
        return (mean, mean_square), loss


class Tally:
    """Averages named results over the sub-batches, one tensor per slot each."""

    def __init__(self) -> None:
        self.means: dict[str, list[Tensor]] = {}
        self.weight = 1.0
        """The share of the present sub-batch in the batch."""

    def add(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Add results of the present sub-batch. The caller must not write to the tensors afterwards."""
        if name not in self.means:
            self.means[name] = [t if self.weight == 1 else t * self.weight for t in tensors]
        else:
            for mean, value in zip(self.means[name], tensors, strict=True):
                mean.add_(value, alpha=self.weight)

    def add_abs(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Add absolute values of the present sub-batch's results; the tensors are only read."""
        self.add(name, (tensor.abs() for tensor in tensors))


def emptied(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors and remove each from the list, so that results can reuse its memory."""
    while tensors:
        yield tensors.pop(0)


class Prober(Protocol):
    """An object that probes sub-batches: an optimizer, see `ProbingOptimizer`."""

    def _option(self, name: str) -> Any: ...

    def _theta(self, slot: Slot, split: int) -> Tensor: ...

    def _probe(self, slots: list[Slot], theta: Iterable[Tensor], grad_at: Gradients, tally: Tally) -> None: ...
