"""Reports skipped steps without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Watch"]


class Watch:
    """Raises when the device has counted a skipped step.

    Args:
        skipped: Number of skipped steps per run so far.
    """

    def __init__(self, skipped: Tensor) -> None:
        cuda = skipped.device.type == "cuda"
        self._known = int(skipped.sum())
        self._seen = torch.zeros(skipped.shape, dtype=skipped.dtype, pin_memory=cuda)
        self._event: Any = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        self._asked = False

    def look(self, skipped: Tensor, *, wait: bool = False) -> None:
        """Request the count from the device. With `wait`, or on the CPU, `check` it at once."""
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
        """Raise if the count has arrived, and has grown."""
        if not self._asked or (self._event is not None and not self._event.query()):
            return
        self._asked = False
        count = int(self._seen.sum())
        if count > self._known:
            self._known = count
            raise FloatingPointError(
                "a loss or gradient was not finite. Its step was skipped: it changed neither weights nor state. Lower "
                "lr or rho, look at the batches, or skip steps like this one with nonfinite='skip'."
            )
