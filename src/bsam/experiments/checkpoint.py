"""Checkpoints: nested states in one safetensors file. A kill at any moment leaves a complete file.

Tensors are in the body of the file and everything else is in its JSON header, so loading a checkpoint runs no code. A
state may hold dictionaries, lists, tuples, tensors, numbers, strings, booleans and None.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from bsam.files import read_file, write_file

__all__ = ["Checkpoints", "load_checkpoint", "save_checkpoint"]

_FORMAT, _KIND = "bsam.checkpoint", "run"


class Checkpoints:
    """The last checkpoint of a run, at `path`, and the one before it, beside it.

    The one before `checkpoint.safetensors` is `checkpoint.previous.safetensors`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.previous = path.with_name(f"{path.stem}.previous{path.suffix}")
        self._last_is_whole = True
        self._seen = self._identity()

    def load(self) -> tuple[dict[str, Any], Path] | None:
        """Return the state and the file of the last undamaged checkpoint, or None if there is no checkpoint.

        Warns if this is the checkpoint before the last.
        """
        self._seen = self._identity()
        if not self.path.exists() and not self.previous.exists():
            return None
        try:
            return load_checkpoint(self.path), self.path
        except (FileNotFoundError, ValueError) as damage:
            if not self.previous.exists():
                raise ValueError(f"{damage} There is no checkpoint before it: delete it to begin again.") from damage
            try:
                state = load_checkpoint(self.previous)
            except ValueError as also:
                raise ValueError(
                    f"{damage} {also} No checkpoint is whole: delete the folder {self.path.parent}, and start again."
                ) from also
            self._last_is_whole = False
            warnings.warn(f"{damage} The run goes on from the checkpoint before it, {self.previous}.", stacklevel=3)
            return state, self.previous

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint. The last one becomes the one before it, unless it is damaged."""
        save_checkpoint(self.path, state, previous=self.previous if self._last_is_whole else None)
        self._last_is_whole, self._seen = True, self._identity()

    @property
    def changed(self) -> bool:
        """Whether another process has written a checkpoint since this object last read or wrote one."""
        return self._seen != self._identity()

    def remove(self) -> None:
        """Remove both files; a kill in the middle leaves the last one."""
        self.previous.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _identity(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


def save_checkpoint(path: Path, state: dict[str, Any], *, previous: Path | None = None) -> None:
    """Write `state` to `path`; the old checkpoint stays until the new one is complete and on the disk.

    If `previous` is given, the old checkpoint is then kept there.
    """
    tensors: dict[str, Tensor] = {}
    skeleton = _strip(state, "", tensors)
    write_file(path, tensors, format=_FORMAT, kind=_KIND, settings={"state": skeleton}, previous=previous)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint that `save_checkpoint` wrote."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}: has the run saved one yet?")
    _, tensors, settings = read_file(path, format=_FORMAT, kinds=(_KIND,))
    try:
        state = _fill(settings["state"], tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} has contents that do not make sense: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds no state.")
    return state


def _strip(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as JSON, with its tensors moved into `tensors`."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _strip(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_strip(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{name} is of type {type(value).__name__}, which a checkpoint cannot hold.")


def _fill(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Invert `_strip`."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _fill(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_fill(item, tensors) for item in content]
        return tuple(items) if kind == "tuple" else items
    raise ValueError(f"unknown kind {kind!r}")
