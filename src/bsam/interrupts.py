"""Delivers Ctrl-C at known places only: it never interrupts an update or the restoring of weights.

Python runs the handler of SIGINT between any two instructions of the main thread, and by default that handler raises
`KeyboardInterrupt`: also within an update, within a `finally`, or just before one. Work that must not be interrupted
runs inside `with deferred():`, which replaces the handler by one that notes the signal and delivers it at the end.
Inside, user code and communication between ranks run in `with interruptible():`. A noted interrupt is delivered when
that block begins, and an interrupt that arrives in it is delivered at once. So an interrupt is like any other exception
of the user's code, and clean-up is never interrupted.

Nothing is replaced in other threads, where Python runs no handlers, and if SIGINT has no Python handler. Signals are
not masked: a mask belongs to one thread, and the kernel would deliver the signal to another thread.
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
    """The handler of SIGINT during an outermost `deferred` block."""

    __slots__ = ("noted", "opened", "previous")

    def __init__(self, previous: Callable[[int, FrameType | None], Any]) -> None:
        self.previous = previous
        self.opened = False
        """Whether an interrupt may be delivered now."""
        self.noted = False
        """Whether an interrupt waits."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.opened or (frame is not None and frame.f_code in _closing):
            self.noted = True
            return
        self.opened, self.noted = False, False  # if the handler raises, clean-up follows
        self.previous(number, frame)
        self.opened = True

    def open(self) -> None:
        """Deliver a waiting interrupt, and from now on every interrupt at once."""
        self.opened = True
        if self.noted:
            self(signal.SIGINT, None)


_active: _Guard | None = None
"""The guard of the outermost block: the present handler, unless the user's code sets another."""

_closing: set[CodeType] = set()
"""Code that ends an interruptible block: its first instructions already belong to the clean-up."""


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class deferred:  # noqa: N801  # used like a function
    """Holds back interrupts inside the block until an `interruptible` part begins, or the block ends."""

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
        if callable(handler):  # otherwise it was set in C, or ignores the signal, or ends the process
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
            if present is not guard and present is not None:  # the user's code has set another handler
                signal.signal(signal.SIGINT, present)
        if self._was_open:
            guard.open()  # code that saved the guard as a handler can use it: it passes signals on from now


class interruptible:  # noqa: N801  # used like a function
    """Delivers interrupts inside a part of a `deferred` block; elsewhere it does nothing."""

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
    """Yield the items and let interrupts in while each is read: a data loader is the user's code."""
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
    """Base class of context managers that change a model during the user's block and restore it afterwards.

    A subclass defines `_change` and `_restore`. `_change` stores all that `_restore` needs before it writes anything.
    Interrupts are delivered before the change, in the block, or after everything is restored.
    """

    def _change(self) -> None:
        raise NotImplementedError

    def _restore(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> None:
        # Deferred until the block ends, because Python may run the handler between the end of the block and the first
        # instruction of __exit__.
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
