"""Hearing of steps that were left out without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Watch"]


class Watch:
    """Raises once the device has counted a step that was left out.

    Args:
        skipped: How many steps of each run were left out so far.
    """

    def __init__(self, skipped: Tensor) -> None:
        cuda = skipped.device.type == "cuda"
        self._known = int(skipped.sum())
        self._seen = torch.zeros(skipped.shape, dtype=skipped.dtype, pin_memory=cuda)
        self._event: Any = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        self._asked = False

    def look(self, skipped: Tensor, *, wait: bool = False) -> None:
        """Ask for the count; with `wait`, and where there is nothing to wait for, raise at once as `check` does."""
        if self._event is None or wait:
            self._seen.copy_(skipped)
            if self._event is not None:
                self._event.record()
                self._event.synchronize()
            self._asked = True
            self.check()
        elif not self._asked:
            self._seen.copy_(skipped, non_blocking=True)
            self._event.record()
            self._asked = True

    def check(self) -> None:
        """Raise if the answer is there, and more steps were left out than before."""
        if not self._asked or (self._event is not None and not self._event.query()):
            return
        self._asked = False
        count = int(self._seen.sum())
        if count > self._known:
            self._known = count
            raise FloatingPointError(
                "a loss or gradient was not finite. Its step was left out: weights and state are as before it. Lower "
                "lr or rho, look at the batches, or leave such steps out with nonfinite='skip'."
            )
