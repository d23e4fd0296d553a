"""Many of a kind together under vmap, or one after the other in a loop: one policy for all who ask.

The splits of a batch, the gradients of single examples and the samples of a posterior can each be computed together by
`torch.vmap`, or in a loop that gives the same numbers. `vectorise` says which:

| `vectorise` | what happens |
|---|---|
| `True` | together, or an error |
| `False` | in a loop |
| `None` | together where that pays; where it is not possible or fails, in a loop, with one warning that says why |

An error that comes again when vmap is tried a second time is vmap's: then the loop is tried. An error of the user's
code comes in the loop too, and is raised there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from bsam.modules import BufferSnapshot, all_buffers

__all__ = ["Executor", "quiet_vmap"]

Result = TypeVar("Result")
_OURS = ("bsam", "torch", "contextlib")


class Executor:
    """Decides between vmap and a loop, and remembers what it found.

    Args:
        vectorise: See above.
        in_a_loop: What a loop means here, for the warning: "the splits are computed in a loop".
        module: The model, whose buffers are put back if vmap fails.
        errors: The errors that vmap may be to blame for; others are raised at once.
    """

    def __init__(
        self,
        vectorise: bool | None,
        in_a_loop: str,
        module: nn.Module | None,
        errors: type[Exception] = RuntimeError,
    ) -> None:
        self.vectorise, self._in_a_loop, self._module, self._errors = vectorise, in_a_loop, module, errors
        self._warned = False
        self.failure: str | None = None
        """Why vmap failed. It is not tried again."""

    @staticmethod
    def launch_bound(device: torch.device) -> bool:
        """Whether launching a pass takes longer than running it, so that one vmapped pass beats several plain ones.

        On the CPU vmap was measured to be twice as fast for a network of 400 weights, no faster for one of 500,000, and
        half as fast for convolutions, with as many times the memory.
        """
        return device.type != "cpu"

    def tries_vmap(self, pays: bool) -> bool:
        """Whether vmap will be tried, where it is possible; `pays` says that it is faster."""
        wanted = pays if self.vectorise is None else self.vectorise
        return wanted and self.failure is None

    def run(
        self,
        together: Callable[[], Result],
        loop: Callable[[], Result],
        *,
        pays: bool,
        obstacle: str | None = None,
    ) -> Result:
        """The result of one of the two functions.

        Args:
            together: Computes it by vmap.
            loop: Computes it in a loop.
            pays: Whether vmap is faster here.
            obstacle: Why vmap is not possible here, if it is not.
        """
        if not self.tries_vmap(pays):
            return loop()
        if obstacle is not None:
            if self.vectorise:
                raise ValueError(f"vectorise=True is not possible here: {obstacle}.")
            self._warn(obstacle)
            return loop()
        buffers = BufferSnapshot(all_buffers(self._module) if self._module is not None else ())
        try:
            return together()
        except self._errors as error:
            if self.vectorise or not _fails_again(together, error, buffers):
                raise
            failure = f"vmap failed with {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        result = loop()  # a mistake of the user's comes again here
        self.failure = failure
        self._warn(failure)
        return result

    def _warn(self, reason: str) -> None:
        if not self._warned:
            warnings.warn(f"{self._in_a_loop}, because {reason}.", stacklevel=_callers_level())
            self._warned = True


def _callers_level() -> int:
    """The `stacklevel` at which a warning names the line of the user's code."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    return level


def _fails_again(attempt: Callable[[], Any], error: Exception, buffers: BufferSnapshot) -> bool:
    """Whether an attempt that raised `error` raises again: only then vmap is to blame, and a loop may help."""
    buffers.restore()
    try:
        attempt()
    except Exception as again:
        return type(again) is type(error)
    finally:
        buffers.restore()
    return False


def quiet_vmap(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.vmap` without its warnings of slow operators, which are not in the user's hands."""

    def vectorised(*arguments: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return torch.vmap(function, **options)(*arguments)

    return vectorised
