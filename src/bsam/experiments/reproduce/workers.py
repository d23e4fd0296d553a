"""Worker processes: if a worker dies, a new one takes its item.

`concurrent.futures` gives up all items when one worker dies, and Ray is an extra that needs a cluster of its own.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from bsam.experiments.runs import RunBusyError, RunInterruptedError, handled

__all__ = [
    "Answer",
    "Busy",
    "Item",
    "Report",
    "Work",
    "answer",
    "available_cores",
    "now_and_then",
    "run_all",
    "share_cores",
    "stopping",
]

Item = TypeVar("Item")
Report = Callable[[float], None]
Work = Callable[[Item, Report], None]

_SECONDS_BETWEEN_REPORTS = 0.2
_MOST_BESIDE_ACCELERATOR = 4  # threads: with 16 the metrics of 10,000 predictions take as long, intervals 0.1 s less
_SPAWN = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA


@dataclass(frozen=True)
class Busy:
    """The answer of a worker if another process is working on its item."""

    reason: str


@dataclass(frozen=True)
class _Warned:
    """A warning of a worker."""

    sentence: str


Answer = str | Busy | None
"""The answer of a worker: an error in one sentence, `Busy`, or None if its item is done."""


def run_all(
    items: Sequence[Item],
    work: Work[Item],
    *,
    jobs: int,
    threads: int | None = None,
    retries: int = 2,
    on_progress: Callable[[int, float], None] = lambda index, share: None,
    on_end: Callable[[int, str | None], None] = lambda index, error: None,
    on_busy: Callable[[int, str], None] = lambda index, reason: None,
) -> dict[int, str]:
    """Work on all items in `jobs` worker processes, which take one item after the other.

    Args:
        items: The items. If a worker dies, its item is tried again.
        work: Called in a worker with an item and a function that reports the share that is done. Must be picklable.
        jobs: Number of worker processes.
        threads: Number of torch's threads per worker.
        retries: How often an item is tried again.
        on_progress: Called with an item's index and the share that is done.
        on_end: Called with an item's index and its error, or None.
        on_busy: Called instead of `on_end` with the index of an item that another process is working on, and the
            reason. Before, the item is tried a second time, after all others.

    Returns:
        The errors, by index.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; each worker was asked to stop, and given time to save.
    """
    queue = deque(range(len(items)))
    attempts = dict.fromkeys(queue, 0)
    postponed: set[int] = set()
    errors: dict[int, str] = {}
    warned: set[_Warned] = set()
    busy: dict[Connection, tuple[SpawnProcess, int]] = {}
    idle: list[tuple[Connection, SpawnProcess]] = []

    def end(index: int, error: str | None) -> None:
        if error is not None:
            errors[index] = error
        on_end(index, error)

    try:
        with stopping():
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
                        message: float | _Warned | Answer = connection.recv()
                    except (EOFError, OSError):  # the process died
                        del busy[connection]
                        process.join()
                        if attempts[index] <= retries:
                            queue.appendleft(index)
                        else:
                            status = f"with exit status {process.exitcode}"
                            end(index, f"given up: its worker died {attempts[index]} times, {status}")
                        continue
                    if isinstance(message, _Warned):  # all workers may have the same to say
                        if message not in warned:
                            print(f"bsam: {message.sentence}", file=sys.stderr)
                        warned.add(message)
                        continue
                    if isinstance(message, float):
                        on_progress(index, message)
                        continue
                    del busy[connection]
                    idle.append((connection, process))
                    if not isinstance(message, Busy):
                        end(index, message)
                    elif index in postponed:
                        on_busy(index, message.reason)
                    else:
                        postponed.add(index)
                        queue.append(index)
    finally:
        for connection, process in idle:
            connection.close()  # ends its loop
            process.join()
        for process, _ in busy.values():
            process.terminate()  # saves its run first
        for process, _ in busy.values():
            process.join()
    return errors


def stopping() -> AbstractContextManager[None]:
    """Let SIGTERM raise a KeyboardInterrupt while the block runs, as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    return handled([signal.SIGTERM], stop)


def answer(work: Work[Item], item: Item, report: Report) -> Answer:
    """Work on an item, in a worker. An interrupt, and the end of a connection, are raised."""
    try:
        work(item, report)
    except (BrokenPipeError, RunInterruptedError):
        raise
    except RunBusyError as busy:
        return Busy(str(busy))
    except Exception as failure:
        return " ".join(str(failure).split()) or type(failure).__name__
    return None


def _ready(connections: Iterable[Connection]) -> list[Connection]:
    """Wait for messages, or for the end of a process; return the connections."""
    return [ready for ready in wait(list(connections)) if isinstance(ready, Connection)]


def _start(work: Work[Item], threads: int | None) -> tuple[Connection, SpawnProcess]:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(theirs, work, threads), daemon=True)
    process.start()
    theirs.close()  # so that the connection ends when the process dies
    return ours, process


def _serve(connection: Connection, work: Work[Item], threads: int | None) -> None:
    """Work on one item after the other in a worker process, until the connection is closed."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C goes to the parent only, which then stops each worker once
    if threads is not None:
        torch.set_num_threads(threads)

    def send(message: Warning | str, *origin: Any, **options: Any) -> None:
        connection.send(_Warned(" ".join(str(message).split())))

    warnings.showwarning = send
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        try:
            connection.send(answer(work, item, _reporter(connection)))
        except (BrokenPipeError, RunInterruptedError):  # the parent died, or stops this process
            return


def _reporter(connection: Connection) -> Report:
    """Return a function that sends an item's progress to the parent, a few times per second."""
    return now_and_then(lambda share: connection.send(float(share)), _SECONDS_BETWEEN_REPORTS)


def now_and_then(report: Report, seconds: float) -> Report:
    """Return a function that calls `report`, but at most once in so many seconds."""
    last = -math.inf

    def rarely(share: float) -> None:
        nonlocal last
        if time.monotonic() - last > seconds:
            report(share)
            last = time.monotonic()

    return rarely


# ------------------------------------------------------------------ cores


def share_cores(jobs: int | None, *, small: bool, accelerated: bool = False) -> tuple[int, int]:
    """Return the number of workers, and the number of threads per worker.

    Args:
        jobs: Number of workers. The default is one worker, or as many as there are cores for if `small`.
        small: Whether the networks are too small for more than one thread.
        accelerated: Whether an accelerator trains and predicts. What is left for the cores, metrics of predictions,
            gains next to nothing from more than a few threads, and several commands on one machine need cores, too.

    OMP_NUM_THREADS, if it is set, is the number of threads.
    """
    cores = available_cores()
    with suppress(KeyError, ValueError):
        threads = max(1, int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
        return jobs or (max(1, cores // threads) if small else 1), threads
    jobs = jobs or (cores if small else 1)
    threads = 1 if small else max(1, cores // jobs)
    return jobs, min(threads, _MOST_BESIDE_ACCELERATOR) if accelerated else threads


def available_cores(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of cores that this process may use, by its affinity and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(quota) for quota in _quotas(cgroups, membership))]))


def _quotas(cgroups: Path, membership: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of this process's control group and of its parent groups, in versions 1 and 2."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        group = Path(path.lstrip("/"))
        for place in (group, *group.parents):
            with suppress(OSError, ValueError, ZeroDivisionError):
                if not controllers:
                    quota, period = (cgroups / place / "cpu.max").read_text().split()
                    yield int(quota) / int(period)  # a ValueError if it is "max"
                elif "cpu" in controllers.split(","):
                    folder = cgroups / (controllers if (cgroups / controllers).is_dir() else "cpu") / place
                    quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                    if int(quota) > 0:  # -1: no limit
                        yield int(quota) / int(period)
