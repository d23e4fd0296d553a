"""Ctrl-C at known places only: a step, or the restoring of weights, is never cut in two.

Python runs the handler of SIGINT between any two instructions of the main thread, and by default that handler raises
`KeyboardInterrupt` there: also within an update, within a `finally`, or just before one. Work that must be whole is
done inside `with deferred():`, which exchanges the handler for one that notes the signal and delivers it at the end.
The places inside where the user's code runs, or ranks wait for each other, are `with interruptible():`. An interrupt
that was noted is delivered when such a place begins, and one that arrives there is delivered at once. So an interrupt
is an exception like every other that the user's code may raise, and clean-up never meets one.

In other threads than the main one, where Python runs no handlers, and where SIGINT has no handler in Python, nothing is
exchanged. Signals are not masked: a mask belongs to one thread, and the kernel would hand the signal to another.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

__all__ = ["Restored", "deferred", "interruptible", "reading"]

Item = TypeVar("Item")


class _Guard:
    """The handler of SIGINT for the time of an outermost `deferred` block."""

    __slots__ = ("noted", "opened", "previous")

    def __init__(self, previous: Callable[[int, FrameType | None], Any]) -> None:
        self.previous = previous
        self.opened = False
        """Whether an interrupt may be delivered now."""
        self.noted = False
        """Whether one waits."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.opened or (frame is not None and frame.f_code in _closing):
            self.noted = True
            return
        self.opened, self.noted = False, False  # if the handler raises, clean-up follows
        self.previous(number, frame)
        self.opened = True

    def open(self) -> None:
        """Deliver what waits, and from now on what arrives."""
        self.opened = True
        if self.noted:
            self(signal.SIGINT, None)


_active: _Guard | None = None
"""The guard of the outermost block, which is the handler inside unless the user's code sets another."""

_closing: set[CodeType] = set()
"""Code that ends an interruptible place: its first instructions belong to the clean-up already."""


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class deferred:  # noqa: N801  # used like a function
    """Interrupts that arrive inside the block are delivered in its `interruptible` parts, or when it ends."""

    __slots__ = ("_exchanged", "_guard", "_was_open")

    def __enter__(self) -> None:
        global _active
        self._guard: _Guard | None = None
        if not _in_main_thread():
            return
        self._exchanged = _active is None
        if _active is not None:
            self._guard, self._was_open, _active.opened = _active, _active.opened, False
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):  # else it was set in C, or says to ignore the signal, or to end the process
            guard = _Guard(handler)
            signal.signal(signal.SIGINT, guard)
            self._guard, self._was_open = guard, True
            _active = guard

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        global _active
        guard = self._guard
        if guard is None:
            return
        if self._exchanged:
            _active = None
            present = signal.signal(signal.SIGINT, guard.previous)
            if present is not guard and present is not None:  # the user's code has set another
                signal.signal(signal.SIGINT, present)
        if self._was_open:
            guard.open()  # if somebody kept it, as the handler to return to, it hands all on from now


class interruptible:  # noqa: N801  # used like a function
    """A part of a `deferred` block in which interrupts are delivered; elsewhere it does nothing."""

    __slots__ = ("_guard",)

    def __enter__(self) -> None:
        guard = _active
        self._guard = None if guard is None or guard.opened or not _in_main_thread() else guard
        if self._guard is not None:
            self._guard.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._guard is not None:
            self._guard.opened = False


def reading(items: Iterable[Item]) -> Iterator[Item]:
    """The items, each read interruptibly: a data loader is the user's code."""
    with interruptible():
        iterator = iter(items)
    while True:
        with interruptible():
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


class Restored:
    """Base of context managers that write into a model, for the user's block, and take it out again.

    A subclass gives `_change` and `_restore`; what the latter needs is known before the former writes anything, or it
    raises. Both are whole: an interrupt is delivered before the change, in the block, or after all is restored.
    """

    def _change(self) -> None:
        raise NotImplementedError

    def _restore(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> None:
        # Open until the block ends: the handler stays exchanged, because Python may run it between the end of the
        # block and the first instruction of __exit__.
        self._deferred = deferred()
        self._deferred.__enter__()
        self._window = interruptible()
        try:
            self._change()
            self._window.__enter__()
        except BaseException as error:
            self._end(error)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._window.__exit__(kind, error, at)
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        try:
            self._restore()
        finally:
            self._deferred.__exit__(None, error, None)


_closing |= {interruptible.__exit__.__code__, Restored.__exit__.__code__}
