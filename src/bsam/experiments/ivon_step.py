"""IVON's step on CUDA: the network compiled, and the whole step captured in a graph.

An eager step launches hundreds of kernels, and the GPU waits for the host. A graph launches them at once. What changes
from step to step has to be in device memory: the batch, the learning rate (IVON takes a tensor for it), and the seed of
the noise, which torch hands to the graph at each replay. IVON divides its momentum by 1 - beta1^t, a number of the
host's: so the step is captured once that is 1 in floating point, after some 350 steps with beta1 = 0.9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bsam.compiler.capture import Captured
from bsam.experiments.ivon import Ivon, Loss

if TYPE_CHECKING:
    from bsam.experiments.trainer import Trainer

__all__ = ["IvonStep", "compile_ivon"]


def compile_ivon(trainers: Sequence[Trainer], x: Tensor, y: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The step of several runs: IVON is not ours to trace, and takes those of each run in turn."""
    optimizers: list[Any] = [trainer.optimizer for trainer in trainers]
    steps = [IvonStep(ivon, trainer.loss) for ivon, trainer in zip(optimizers, trainers, strict=True)]
    return lambda x, y: torch.stack([step(x[i], y[i]) for i, step in enumerate(steps)])


class IvonStep:
    """A step of IVON, captured as soon as that can be done, and on CUDA only.

    Args:
        ivon: The optimizer.
        loss_fn: The mean loss of a batch.
        compile: Whether to compile the loss.
    """

    def __init__(self, ivon: Ivon, loss_fn: Loss, *, compile: bool = True) -> None:
        self.ivon = ivon
        self._loss_fn: Loss = torch.compile(loss_fn, dynamic=False) if compile else loss_fn
        self._plain_loss_fn = loss_fn
        self._shapes: tuple[torch.Size, torch.Size] | None = None
        """Of the batches that the step is compiled for: the first ones."""
        self._captured: Captured | None = None

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Take a step; returns the loss at the sampled weights."""
        self._shapes = self._shapes or (x.shape, y.shape)
        if (x.shape, y.shape) != self._shapes:  # a ragged last batch
            return self.ivon.step(self._plain_loss_fn, x, y)
        if not self.can_be_captured:
            return self.ivon.step(self._loss_fn, x, y)
        if self._captured is None:
            self._captured = self._capture(x, y)
        self._x.copy_(x)
        self._y.copy_(y)
        self._rate.fill_(self.ivon.param_groups[0]["lr"])
        with self.ivon.noise():
            loss: Tensor = self._captured()
        self.ivon.steps_taken += 1
        return loss.clone()

    @property
    def can_be_captured(self) -> bool:
        """Whether the host's part of a step is the same from here on, and the device can capture."""
        return self.ivon.params[0].device.type == "cuda" and self.ivon.momentum_correction == 1.0

    def _capture(self, x: Tensor, y: Tensor) -> Captured:
        """Record a step. It is taken two times to warm up, and put back."""
        (group,) = self.ivon.param_groups
        rate, count = group["lr"], self.ivon.steps_taken
        self._x, self._y = x.clone(), y.clone()
        # In float64, as a number of the host's is: so it is rounded where an eager step rounds it.
        self._rate = torch.tensor(rate, dtype=torch.float64, device=x.device)
        group["lr"] = self._rate
        try:
            with self.ivon.noise():
                step = lambda: self.ivon.unseeded_step(self._loss_fn, self._x, self._y)  # noqa: E731
                return Captured(step, x.device, undo=self.ivon.undo())
        finally:
            group["lr"], self.ivon.steps_taken = rate, count  # the host counted while it recorded
