"""Checkpoints: nested states as one safetensors file that a kill at any moment leaves whole.

Tensors go into the body of the file, the rest into its JSON header, so that loading one runs no code. A state may
hold dictionaries, lists, tuples, tensors, numbers, strings, booleans and None.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from bsam.files import read_file, write_file

__all__ = ["load_checkpoint", "save_checkpoint"]

_FORMAT, _KIND = "bsam.checkpoint", "run"


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state`; until it is whole and on the disk, the checkpoint that is there stays."""
    tensors: dict[str, Tensor] = {}
    skeleton = _strip(state, "", tensors)
    write_file(path, tensors, format=_FORMAT, kind=_KIND, settings={"state": skeleton})


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote."""
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
    """`value` as JSON, its tensors moved into `tensors`."""
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
    """The inverse of `_strip`."""
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
