"""Count of the processes that train on one device at the same time; a record has it beside its seconds."""

from __future__ import annotations

import contextlib
import getpass
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["Neighbours", "neighbours"]


class Neighbours:
    """Counts the processes of this machine that train on a device now, this one included."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.most = 1
        """The largest count so far."""

    def count(self) -> None:
        """Count the processes that are alive now."""
        if os.name != "posix":  # elsewhere a process cannot be asked whether it is alive
            return
        alive = [path for path in self._folder.iterdir() if _is_alive(int(path.name))]
        self.most = max(self.most, len(alive))


@contextlib.contextmanager
def neighbours(device: torch.device) -> Iterator[Neighbours]:
    """Register this process on a device while the block runs, by one temporary file per process."""
    name = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
    folder = Path(tempfile.gettempdir()) / f"bsam-{getpass.getuser()}-on-{name}"
    folder.mkdir(exist_ok=True)
    own = folder / str(os.getpid())
    own.touch()
    found = Neighbours(folder)
    try:
        found.count()
        yield found
        found.count()
    finally:
        own.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is alive, and belongs to another user
    return True
