"""Storage for runs that nodes do not share as a folder: an address of fsspec, like s3://bucket/runs.

A worker copies the files of its runs into a temporary folder, and copies what changes back: with every checkpoint, and
at the end. The worker that began last owns a run: a worker on a node that was thought dead notices this, and stops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from bsam.experiments.record import read_json, write_json
from bsam.experiments.reproduce.execute import publish
from bsam.experiments.reproduce.plan import Task
from bsam.experiments.runs import RunBusyError

__all__ = ["Storage", "work_in_storage"]

_OWNER, _PART = ".owner", ".part"
_SMALL = (".json", ".jsonl", ".toml")
_SECONDS_BETWEEN_LOOKS = 1.0


class Storage:
    """The files of runs at an address: `NAME/seedK` is the folder of a run, and `NAME/seedK.json` its record."""

    def __init__(self, address: str) -> None:
        self.address = address
        try:
            self._files, self._root = fsspec.core.url_to_fs(address, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"--storage {address}: {error}. Write an address that fsspec knows, like s3://bucket/runs, or a path."
            ) from error

    def __reduce__(self) -> tuple[type[Storage], tuple[str]]:
        return Storage, (self.address,)

    def check(self) -> None:
        """Raise an OSError if nothing can be written here, or read again. Nothing is left behind."""
        name, content = f".bsam-{secrets.token_hex(8)}", b"bsam"
        place = self._root
        with self._explained():
            while not self._files.exists(place) and "/" in place.rstrip("/"):
                place = place.rstrip("/").rpartition("/")[0]  # an object store needs no folders: its bucket is there
            self._files.pipe_file(f"{place}/{name}", content)
            found = self._files.cat_file(f"{place}/{name}")
            self._files.rm_file(f"{place}/{name}")
        if found != content:
            raise OSError(f"--storage {self.address}: what was written is not what is read.")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # every file system has errors of its own
            reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
            raise OSError(f"--storage {self.address} cannot be written ({reason}): choose another, or change it") from (
                error
            )

    def names(self, tasks: Sequence[Task]) -> list[str]:
        """Return the names of the files of these tasks' runs, and of their stacks and ensembles."""
        found: list[str] = []
        for task in tasks:
            own = self._files.find(f"{self._root}/{_folder(task)}")
            beside = self._files.find(f"{self._root}/{task.name}", maxdepth=1)
            wanted = (f"seed{task.seed}.json", "ensemble.json", "pairs.json", "stack.toml", "stack.safetensors")
            found += own + [
                path for path in beside if path.rpartition("/")[2] in (*wanted, "stack.previous.safetensors")
            ]
        names = [str(PurePosixPath(path).relative_to(PurePosixPath(self._root))) for path in dict.fromkeys(found)]
        return [name for name in names if not name.endswith((_OWNER, _PART))]

    def pull(self, name: str, path: Path) -> None:
        """Copy a file to `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._files.get_file(f"{self._root}/{name}", str(path))

    def push(self, path: Path, name: str) -> None:
        """Copy a file from `path`; a kill leaves the old one, or the new one."""
        place = f"{self._root}/{name}"
        self._files.makedirs(place.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(path), place + _PART)
        self._files.mv(place + _PART, place)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._files.rm_file(f"{self._root}/{name}")

    def take(self, task: Task, owner: bytes) -> None:
        """Make `owner` the one that may push the run's files."""
        folder = f"{self._root}/{_folder(task)}"
        self._files.makedirs(folder, exist_ok=True)
        self._files.pipe_file(f"{folder}/{_OWNER}", owner)

    def owns(self, task: Task, owner: bytes) -> bool:
        """Whether `owner` took the run last."""
        return bool(self._files.cat_file(f"{self._root}/{_folder(task)}/{_OWNER}") == owner)

    def fetch(self, tasks: Sequence[Task]) -> None:
        """Copy what is small to the tasks' folders on this machine: settings, logs and records, no weights."""
        for task in tasks:
            for name in self.names([task]):
                if not name.endswith(_SMALL):
                    continue
                of_task = PurePosixPath(name).relative_to(PurePosixPath(task.name))
                path, record = task.folder.parent / of_task, task.record.parent / of_task
                self.pull(name, path)
                if len(of_task.parts) > 1 or of_task.suffix != ".json" or path == record:
                    continue
                content = read_json(path)
                if "members" not in content:
                    publish(content, record)
                elif not record.exists() or read_json(record)["members"] <= content["members"]:
                    record.parent.mkdir(parents=True, exist_ok=True)
                    write_json(record, content)  # an ensemble of more runs stays


def _folder(task: Task) -> str:
    return f"{task.name}/seed{task.seed}"


def work_in_storage(
    tasks: Sequence[Task], report: Callable[[float], None], *, work: Callable[..., None], storage: Storage
) -> None:
    """Do `work` on the tasks in a temporary folder, on copies of the files in the storage."""
    owner = secrets.token_bytes(16)
    for task in tasks:
        storage.take(task, owner)
    with tempfile.TemporaryDirectory(prefix="bsam-") as temporary:
        folder = Path(temporary)
        for name in storage.names(tasks):
            storage.pull(name, folder / name)
        known = _states(folder)
        looked = time.monotonic()

        def push() -> None:
            nonlocal known
            for task in tasks:
                if not storage.owns(task, owner):
                    raise RunBusyError(f"another worker has gone on with {_folder(task)} in {storage.address}.")
            now = _states(folder)
            changed = [name for name, state in now.items() if state != known.get(name)]
            for name in sorted(changed, key=lambda name: now[name][0]):  # in the order in which they were written
                storage.push(folder / name, name)
            for name in known.keys() - now.keys():
                storage.remove(name)
            known = now

        def report_and_push(share: float) -> None:
            nonlocal looked
            if time.monotonic() - looked > _SECONDS_BETWEEN_LOOKS:
                weights = {name: state for name, state in _states(folder).items() if name.endswith(".safetensors")}
                if weights.items() - known.items():
                    push()
                looked = time.monotonic()
            report(share)

        moved = [
            dataclasses.replace(
                task, folder=folder / _folder(task), record=folder / task.name / f"seed{task.seed}.json"
            )
            for task in tasks
        ]
        try:
            work(moved, report_and_push)
        finally:
            push()


def _states(folder: Path) -> dict[str, tuple[int, int]]:
    """Return time and size of each file, by its name in the storage; hidden files belong to the worker alone."""
    found: dict[str, tuple[int, int]] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if not any(part.startswith(".") for part in name.parts) and path.is_file():
            state: Any = path.stat()
            found[name.as_posix()] = state.st_mtime_ns, state.st_size
    return found
