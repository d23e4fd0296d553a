"""One sub-batch that arrives in micro-batches: one noise and one perturbation for all of them.

`probe(..., last=False)` runs the first pass of a micro-batch and keeps the micro-batch. The probe of the last one adds
its own first pass, and then runs all further passes over all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bsam.modules import LossFunction
from bsam.optim.probing import GradAt, Slot, Tally

__all__ = ["GradAtJoined", "Kept", "MicroBatch"]

Results = tuple[list[Tensor], ...]
"""What a pass returns: gradients, or mean and mean square of the examples' gradients."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch, and the losses of the passes that were run."""

    loss_fn: LossFunction
    part: tuple[Any, ...]
    weight: float
    losses: tuple[Tensor, ...] = ()

    def after(self, losses: Iterable[Tensor]) -> MicroBatch:
        """Return the micro-batch after passes with these losses."""
        return replace(self, losses=tuple(losses))


@dataclass(frozen=True)
class Kept:
    """The micro-batches of one sub-batch so far, and the sum of their first results, weighted by their size."""

    micro_batches: tuple[MicroBatch, ...] = ()
    sums: Results = ()
    seen: tuple[bool, ...] = ()
    """Of each slot, whether a gradient reached it."""

    @property
    def weight(self) -> float:
        """The sum of the micro-batches' weights."""
        return sum(micro_batch.weight for micro_batch in self.micro_batches)

    def plus(self, micro_batch: MicroBatch, results: Results, slots: list[Slot]) -> Kept:
        """Return these micro-batches and one more. The results must not be written to afterwards."""
        sums = tuple([r * micro_batch.weight for r in each] for each in results)
        if self.sums:
            pairs = zip(self.sums, sums, strict=True)
            sums = tuple([new.add_(old) for old, new in zip(*pair, strict=True)] for pair in pairs)
        earlier = self.seen or (False,) * len(slots)
        seen = tuple(slot.seen or before for slot, before in zip(slots, earlier, strict=True))
        return Kept((*self.micro_batches, micro_batch), sums, seen)


class GradAtJoined:
    """`GradAt` for a sub-batch in micro-batches: gradients at the same weights, averaged.

    Args:
        slots: The optimizer's parameters.
        kept: All micro-batches but the last. Their first pass is done, at the weights of the first call.
        all_grad_at: One `GradAt` for each micro-batch, also for the last.
        weight: The weight of the last micro-batch.
    """

    def __init__(self, slots: list[Slot], kept: Kept, all_grad_at: list[GradAt], weight: float) -> None:
        self._slots, self._kept, self._all = slots, kept, all_grad_at
        total = kept.weight + weight
        self._shares = [each.weight / total for each in kept.micro_batches] + [weight / total]
        self._total = total
        for slot, seen in zip(slots, kept.seen, strict=True):
            slot.seen |= seen

    @property
    def losses(self) -> list[Tensor]:
        """One loss per pass: the mean over all micro-batches."""
        of_passes = zip(*(grad_at.losses for grad_at in self._all), strict=True)
        return [
            sum((share * loss for share, loss in zip(self._shares, losses, strict=True)), torch.zeros(()))
            for losses in of_passes
        ]

    def __call__(self, weights: Iterable[Tensor]) -> list[Tensor]:
        """The gradients, one per slot."""
        (gradients,) = self._evaluate(weights, lambda grad_at, weights: (grad_at(weights),))
        return gradients

    def with_weights(self, weights: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients, and the parameters themselves, which hold the weights until the next pass."""
        return self(weights), [slot.weights for slot in self._slots]

    def moments(self, weights: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return mean and mean square of the examples' gradients, one tensor per slot each."""
        mean, mean_square = self._evaluate(weights, GradAt.moments)
        return mean, mean_square

    def per_split(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function itself: there is one sub-batch."""
        return function

    def _evaluate(self, weights: Iterable[Tensor], evaluate: Callable[[GradAt, Iterable[Tensor]], Results]) -> Results:
        """Average the results over the micro-batches."""
        tally = Tally()
        first = not self._all[-1].losses
        for grad_at, share in zip(self._all, self._shares, strict=True):
            if first and grad_at is not self._all[-1]:
                continue  # done when the micro-batch was kept
            tally.weight = share
            for i, results in enumerate(evaluate(grad_at, weights)):
                tally.add(str(i), results)
            weights = [slot.weights for slot in self._slots]  # written by the first evaluation
        if first:
            for name, sums in zip(tally.means, self._kept.sums, strict=True):
                for mean, total in zip(tally.means[name], sums, strict=True):
                    mean.add_(total, alpha=1 / self._total)
        return tuple(tally.means.values())
