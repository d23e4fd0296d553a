"""The choice between vmap and a loop: one policy for the whole package.

The splits of a batch, the gradients of single examples and the samples of a posterior can each be computed together by
`torch.vmap`, or in a loop that gives the same numbers. `vectorise` decides:

| `vectorise` | what happens |
|---|---|
| `True` | together, or an error |
| `False` | in a loop |
| `None` | together where that is faster; if it is not possible or fails, in a loop, with one warning that says why |

If vmap raises, it is tried a second time. If it raises again, the loop is tried. An error in the user's code is raised
in the loop too, and reaches the user from there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bsam.modules import BufferSnapshot, all_buffers
from bsam.torch_private import is_transformed

__all__ = ["Executor", "callers_level", "quiet_vmap", "refuse_under_vmap"]

Result = TypeVar("Result")
_OURS = ("bsam", "torch", "contextlib")


class Executor:
    """Runs a function under vmap or in a loop, and remembers if vmap failed.

    Args:
        vectorise: See above.
        in_a_loop: Begins the warning, like "the splits are computed in a loop".
        module: The model, whose buffers are restored if vmap fails.
        errors: Errors that vmap may cause; other errors are raised at once.
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
        """Why vmap failed, or None. After a failure vmap is not tried again."""

    @staticmethod
    def launch_bound(device: torch.device) -> bool:
        """Whether launching a pass takes longer than running it, so that one vmapped pass is faster than a loop.

        On the CPU, vmap over m items was measured to be twice as fast for a network of 400 weights, no faster for
        500,000 weights, and half as fast for convolutions, with m times the memory.
        """
        return device.type != "cpu"

    def tries_vmap(self, pays: bool) -> bool:
        """Whether vmap will be tried; `pays` says that it is faster."""
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
        """Return the result of one of the two functions.

        Args:
            together: Computes the result by vmap.
            loop: Computes the result in a loop.
            pays: Whether vmap is faster here.
            obstacle: Why vmap is not possible here, or None.
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
        result = loop()  # raises the user's own errors again
        self.failure = failure
        self._warn(failure)
        return result

    def _warn(self, reason: str) -> None:
        if not self._warned:
            warnings.warn(f"{self._in_a_loop}, because {reason}.", stacklevel=callers_level())
            self._warned = True


def callers_level() -> int:
    """Return the `stacklevel` at which a warning names the line of the user's code."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    return level


def _fails_again(attempt: Callable[[], Any], error: Exception, buffers: BufferSnapshot) -> bool:
    """Whether an attempt that raised `error` raises again: only then a loop may help."""
    buffers.restore()
    try:
        attempt()
    except Exception as again:
        return type(again) is type(error)
    finally:
        buffers.restore()
    return False


def quiet_vmap(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Like `torch.vmap`, without its warnings of slow operators, which the user cannot change."""

    def vectorised(*arguments: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return torch.vmap(function, **options)(*arguments)

    return vectorised


def refuse_under_vmap(values: Iterable[Any]) -> None:
    """Raise if one of the values, which are to be logged or counted, is not a plain tensor; a loop may follow."""
    if any(isinstance(value, Tensor) and is_transformed(value) for value in values):
        raise RuntimeError("nothing can be logged or counted under vmap: make the optimizer with vectorise=False")
