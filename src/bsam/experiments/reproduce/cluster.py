"""Ray: the items of a plan are tasks of a cluster. If a worker or a node is lost, its item goes on elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

import bsam
from bsam.experiments.reproduce.storage import Storage
from bsam.experiments.reproduce.workers import (
    Answer,
    Busy,
    Item,
    Work,
    answer,
    available_cores,
    now_and_then,
    stopping,
)
from bsam.experiments.runs import RunInterruptedError

__all__ = ["Cluster", "check_address", "connected", "marked"]

_SECONDS_TO_CONNECT, _SECONDS_TO_LOOK, _SECONDS_TO_SAVE = 5.0, 60.0, 60.0
_SECONDS_BETWEEN_REPORTS = 0.5
_SECONDS_UNTIL_FREE = 2.0
"""Time between two attempts at an item that another process is working on."""


def check_address(on: str) -> None:
    """Raise if `on` is not `ray` or `ray://HOST:PORT`, or if Ray is not installed."""
    try:
        parts = urlsplit(on)
        good = on == "ray" or (parts.scheme == "ray" and parts.hostname and parts.port)
    except ValueError:  # of a port that is no number
        good = False
    if not good:
        raise ValueError(f"--on {on}: write ray for this machine, or ray://HOST:PORT for a cluster.")
    for package in ("ray", "grpc"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"--on {on} needs the package {package}, which is not installed. In the folder of bsam's source, "
                "write: pip install '.[cluster]'"
            )


@contextlib.contextmanager
def marked(*folders: Path) -> Iterator[list[Path]]:
    """Make an empty file in each folder, or in the parent folder that is there, while the block runs.

    Raises:
        OSError: A folder cannot be written.
    """
    there = [next(each for each in (folder, *folder.parents) if each.is_dir()) for folder in folders]
    marks = [folder / f".bsam-{secrets.token_hex(8)}" for folder in dict.fromkeys(there)]
    try:
        for mark in marks:
            _touch(mark)
        yield marks
    finally:
        for mark in marks:
            mark.unlink(missing_ok=True)


@contextlib.contextmanager
def connected(on: str, *, cores: int = 1, gpus: float | None = None, device: str | None = None) -> Iterator[Cluster]:
    """Connect to a cluster, or start Ray on this machine; at the end disconnect, or stop it.

    Args:
        on: `ray` for this machine, or `ray://HOST:PORT` for a cluster.
        cores: Cores per item.
        gpus: GPUs per item, also a fraction. By default one if the cluster has any and `device` is not the CPU.
        device: Where the items are trained.
    """
    check_address(on)
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    start: dict[str, Any] = {"address": "local", "num_cpus": available_cores(), "include_dashboard": False}
    hint = "Is the machine overloaded?"
    if on != "ray":
        parts, start = urlsplit(on), {"address": on}
        hint = "Start the cluster (`ray start --head`), and write the host of its head and the port for clients, 10001."
        try:
            socket.create_connection((parts.hostname or "", parts.port or 0), _SECONDS_TO_CONNECT).close()
        except OSError as error:
            raise ConnectionError(f"--on {on}: nothing answers there ({error.strerror or error}). {hint}") from error
    try:
        ray.init(**start, **quiet)
    except Exception as error:  # a ConnectionError, or another one if the versions differ, or if Ray cannot start
        raise ConnectionError(f"--on {on}: Ray does not answer ({_last_line(error)}). {hint}") from error
    try:
        if gpus is None:
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0
            gpus = float(has_gpus and (device is None or not device.startswith("cpu")))
        cluster = Cluster(ray, cores, gpus)
        cluster.check_resources()
        yield cluster
    finally:
        ray.shutdown()


@dataclass(frozen=True)
class Cluster:
    """A cluster that this process is connected to, and the resources of an item."""

    ray: Any
    """The module."""
    cores: int
    gpus: float

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that are alive, as Ray describes them."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    def check_resources(self) -> None:
        """Raise if no node has the cores and GPUs of an item: Ray would wait for such a node."""
        found = [(node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0)) for node in self.nodes]
        if not any(cores >= self.cores and gpus >= self.gpus for cores, gpus in found):
            there = ", ".join(f"{cores:g} cores and {gpus:g} GPUs" for cores, gpus in sorted(set(found), reverse=True))
            raise ValueError(
                f"--cores {self.cores} --gpus {self.gpus:g}: no node has so many. There are nodes with {there}."
            )

    def check_folders(self, *folders: Path) -> None:
        """Raise if a folder cannot be written, or if a node does not share it. Nothing is left behind."""
        with marked(*folders) as marks:
            self._ask_all(_check_marks, marks)

    def check_storage(self, storage: Storage) -> None:
        """Raise if this process or a node cannot write to the storage."""
        storage.check()
        self._ask_all(Storage.check, storage)

    def _ask_all(self, question: Callable[[Any], None], about: Any) -> None:
        """Ask a question on every node, which also tells whether bsam is there, in the same version."""
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        look = self.ray.remote(_look)
        answers = {}
        for node in self.nodes:
            there = strategy(node["NodeID"], soft=False)
            answers[look.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(question, about)] = node
        for ref, node in answers.items():
            name = f"the node {node['NodeManagerAddress']}"
            try:
                version, problem = self.ray.get(ref, timeout=_SECONDS_TO_LOOK)
            except Exception as error:
                raise ValueError(f"{name} cannot run bsam: {_last_line(error)}. Install it on all nodes.") from error
            if version != bsam.__version__:
                raise ValueError(f"{name} has bsam {version}, and this is {bsam.__version__}: install one version.")
            if problem is not None:
                raise OSError(f"{name}: {problem}")

    def run_all(
        self,
        items: Sequence[Item],
        work: Work[Item],
        *,
        jobs: int | None = None,
        retries: int = 2,
        wait: bool = True,
        on_progress: Callable[[int, float], None] = lambda index, share: None,
        on_end: Callable[[int, str | None], None] = lambda index, error: None,
        on_busy: Callable[[int, str], None] = lambda index, reason: None,
    ) -> dict[int, str]:
        """Work on all items, as `bsam.experiments.reproduce.workers.run_all` does, in tasks of Ray.

        Args:
            items: The items. If a worker or a node is lost, its item is tried again.
            work: As there.
            jobs: The most tasks at a time. By default as many as the nodes have cores and GPUs for.
            retries: How often an item is tried again after a loss.
            wait: Whether to wait for an item that another process is working on, say a task of a command that was
                killed. Otherwise `on_busy` is called.
            on_progress: As there.
            on_end: As there.
            on_busy: As there.

        Returns:
            The errors, by index.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM; each task was asked to stop, and given time to save.
        """
        from ray.util.queue import Queue

        queue = deque(range(len(items)))
        losses = dict.fromkeys(queue, 0)
        later: dict[int, float] = {}
        errors: dict[int, str] = {}
        running: dict[Any, int] = {}
        shares = Queue(actor_options={"num_cpus": 0, "max_restarts": -1})
        task = self.ray.remote(_perform).options(num_cpus=self.cores, num_gpus=self.gpus, max_retries=0)

        def end(index: int, error: str | None) -> None:
            if error is not None:
                errors[index] = error
            on_end(index, error)

        def lost(index: int, reason: str) -> None:
            losses[index] += 1
            if losses[index] <= retries:
                queue.appendleft(index)
            else:
                end(index, f"given up: its worker or node was lost {losses[index]} times. The last time: {reason}")

        try:
            with stopping():
                while queue or running or later:
                    for index in [index for index, due in later.items() if due <= time.monotonic()]:
                        del later[index]
                        queue.append(index)
                    while queue and (jobs is None or len(running) < jobs):
                        index = queue.popleft()
                        running[task.remote(work, items[index], self.cores, index, shares.actor)] = index
                    ready, _ = self.ray.wait(list(running), timeout=_SECONDS_BETWEEN_REPORTS) if running else ([], [])
                    if not running:
                        time.sleep(_SECONDS_BETWEEN_REPORTS)
                    for index, share in self._take(shares):
                        if index in running.values():
                            on_progress(index, share)
                    for ref in ready:
                        index = running.pop(ref)
                        try:
                            found: Answer | _Stopped = self.ray.get(ref)
                        except self.ray.exceptions.RayTaskError as error:  # not of the item: see `answer`
                            end(index, _last_line(error))
                            continue
                        except self.ray.exceptions.RayError as error:
                            lost(index, _first_sentence(error))
                            continue
                        if isinstance(found, _Stopped):
                            lost(index, found.reason)
                        elif not isinstance(found, Busy):
                            end(index, found)
                        elif wait:
                            later[index] = time.monotonic() + _SECONDS_UNTIL_FREE
                        else:
                            on_busy(index, found.reason)
        finally:
            for ref in running:
                self.ray.cancel(ref, force=False)  # as Ctrl-C there: it saves its run first
            if running:
                self.ray.wait(list(running), num_returns=len(running), timeout=_SECONDS_TO_SAVE)
        return errors

    def _take(self, shares: Any) -> list[tuple[int, float]]:
        """Return the progress that was reported since the last call; nothing while the queue's actor is moved."""
        with contextlib.suppress(self.ray.exceptions.RayError):
            found: list[tuple[int, float]] = shares.get_nowait_batch(shares.qsize())
            return found
        return []


# ------------------------------------------------------------------ on the nodes


@dataclass(frozen=True)
class _Stopped:
    """The answer of a task if a signal ended it, say because its node is shut down; its run is saved."""

    reason: str


def _perform(work: Work[Item], item: Item, threads: int, index: int, shares: Any) -> Answer | _Stopped:
    """Work on one item, as a task of Ray. `shares` is the actor of a queue of (index, share)."""
    import ray

    def put(share: float) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            shares.put_nowait.remote((index, float(share)))  # does not wait for the actor

    torch.set_num_threads(threads)
    try:
        return answer(work, item, now_and_then(put, _SECONDS_BETWEEN_REPORTS))
    except RunInterruptedError as stopped:
        return _Stopped(str(stopped))


def _look(question: Callable[[Any], None], about: Any) -> tuple[str, str | None]:
    """Return the version of bsam on this node, and the answer to a question: None, or a problem."""
    try:
        question(about)
    except OSError as error:
        return bsam.__version__, error.strerror or str(error)
    return bsam.__version__, None


def _check_marks(marks: list[Path]) -> None:
    """Raise if a file that the driver made is not here, or if no file can be made beside it."""
    for mark in marks:
        if not mark.exists():
            raise OSError(f"{mark.parent} is not the same folder here: choose one that all nodes share, or --storage")
        own = mark.with_name(f"{mark.name}-{secrets.token_hex(8)}")
        _touch(own)
        own.unlink()


def _touch(path: Path) -> None:
    try:
        path.touch()
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"{path.parent} cannot be written ({reason}): choose another folder, or change it") from error


# ------------------------------------------------------------------ errors of Ray


def _last_line(error: Exception) -> str:
    """Return the last line of a traceback that Ray has put into a message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip().rstrip(".")


def _first_sentence(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0].rstrip(".")
