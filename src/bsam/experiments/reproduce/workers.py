"""Worker processes that a crash does not stop: what a worker was doing when it died is given to a new one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import TypeVar

import torch

from bsam.experiments.runs import RunInterruptedError

__all__ = ["run_all"]

Item = TypeVar("Item")
Report = Callable[[float], None]
Work = Callable[[Item, Report], None]

_ATTEMPTS = 3
_SECONDS_BETWEEN_REPORTS = 0.2
_SPAWN = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA


def run_all(
    items: Sequence[Item],
    work: Work[Item],
    *,
    jobs: int,
    threads: int | None = None,
    on_progress: Callable[[int, float], None] = lambda index, share: None,
    on_end: Callable[[int, str | None], None] = lambda index, error: None,
) -> dict[int, str]:
    """Do all of the work, `jobs` items at a time, each in a process of its own that serves several items in turn.

    Args:
        items: What to work on; an item whose worker dies is started again, three times at most.
        work: Called in a worker with an item and a function that reports the share that is done. Must be picklable.
        jobs: Number of worker processes.
        threads: Torch's threads in each of them.
        on_progress: Called with an item's index and the share that is done.
        on_end: Called with an item's index, and with what went wrong or None.

    Returns:
        What went wrong, by index.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; each worker was asked to stop, and given time to save.
    """
    queue = deque(range(len(items)))
    attempts = dict.fromkeys(queue, 0)
    errors: dict[int, str] = {}
    busy: dict[Connection, tuple[SpawnProcess, int]] = {}
    idle: list[tuple[Connection, SpawnProcess]] = []

    def end(index: int, error: str | None) -> None:
        if error is not None:
            errors[index] = error
        on_end(index, error)

    try:
        with _terminable():
            while queue or busy:
                while queue and len(busy) < jobs:
                    connection, process = idle.pop() if idle else _start(work, threads)
                    index = queue.popleft()
                    attempts[index] += 1
                    busy[connection] = process, index
                    connection.send(items[index])
                for connection in _ready(busy):
                    process, index = busy[connection]
                    try:
                        message: float | str | None = connection.recv()
                    except (EOFError, OSError):  # the process died
                        del busy[connection]
                        process.join()
                        if attempts[index] < _ATTEMPTS:
                            queue.appendleft(index)
                        else:
                            end(index, f"its worker died {_ATTEMPTS} times, with exit status {process.exitcode}")
                        continue
                    if isinstance(message, float):
                        on_progress(index, message)
                        continue
                    del busy[connection]
                    idle.append((connection, process))
                    end(index, message)
    finally:
        for connection, process in idle:
            connection.close()  # ends its loop
            process.join()
        for process, _ in busy.values():
            process.terminate()  # saves its run first
        for process, _ in busy.values():
            process.join()
    return errors


def _ready(connections: Iterable[Connection]) -> list[Connection]:
    """Wait for messages, or for the end of a process; return where."""
    return [ready for ready in wait(list(connections)) if isinstance(ready, Connection)]


def _start(work: Work[Item], threads: int | None) -> tuple[Connection, SpawnProcess]:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(theirs, work, threads), daemon=True)
    process.start()
    theirs.close()  # so that its death is seen as the end of the connection
    return ours, process


def _serve(connection: Connection, work: Work[Item], threads: int | None) -> None:
    """What a worker does: an item after the other, until the connection is closed."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C goes to the parent alone, which then asks each worker once
    if threads is not None:
        torch.set_num_threads(threads)
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        error = None
        try:
            work(item, _reporter(connection))
        except (BrokenPipeError, RunInterruptedError):  # the parent is gone, or wants this process to end
            return
        except Exception as failure:
            error = " ".join(str(failure).split()) or type(failure).__name__
        try:
            connection.send(error)
        except BrokenPipeError:
            return


def _reporter(connection: Connection) -> Report:
    """What tells the parent how far an item is, a few times a second."""
    last = 0.0

    def report(share: float) -> None:
        nonlocal last
        if time.monotonic() - last > _SECONDS_BETWEEN_REPORTS:
            connection.send(float(share))
            last = time.monotonic()

    return report


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the work as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread: signals go elsewhere
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
