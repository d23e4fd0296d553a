"""Steps of torch's optimizers, one per run, with the gradients of a compiled step; captured on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from bsam.engine.packs import Pack
from bsam.optim.base_step import BaseStep

__all__ = ["BaseSteps", "snapshot"]


class BaseSteps:
    """Steps each run's optimizer.

    Args:
        steps: One step per run.
        packs: The parameters.
        gradients: One tensor (runs, elements) per pack.
        refused: (runs), 1 for the runs whose step is skipped.
        capture: Whether to capture the steps in a CUDA graph, where that is possible.
    """

    def __init__(
        self, steps: Sequence[BaseStep], packs: list[Pack], gradients: list[Tensor], refused: Tensor, *, capture: bool
    ) -> None:
        self._steps, self._packs, self._gradients, self._refused = steps, packs, gradients, refused
        self._capture = capture
        self._captured: tuple[Any, Callable[[], None]] | None = None

    def __call__(self, lr: Tensor) -> None:
        """Take a step of each run; `lr` has the learning rates on the device, (runs, groups)."""
        device = self._refused.device
        signatures = [step.signature(device) for step in self._steps] if self._capture else [None]
        if None in signatures:
            self._each()
            return
        if self._captured is None or self._captured[0] != signatures:
            from bsam.compiler.capture import Captured

            with ExitStack() as stack:
                for step, rates in zip(self._steps, lr, strict=True):
                    stack.enter_context(step.reading(rates))
                written = [t for step in self._steps for t in step.written()]
                self._captured = signatures, Captured(self._each, device, snapshot(written))
        self._captured[1]()

    def _each(self) -> None:
        for run, step in enumerate(self._steps):
            gradients = [
                (slot.parameter, pack.view(gradient, run, place))
                for pack, gradient in zip(self._packs, self._gradients, strict=True)
                for place, slot in enumerate(pack.runs[run])
            ]
            step(gradients, self._refused[run])


def snapshot(tensors: list[Tensor]) -> Callable[[], None]:
    """Copy the tensors' present values; return a function that writes them back."""
    saved = [t.clone() for t in tensors]

    def undo() -> None:
        with torch.no_grad():
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)

    return undo
