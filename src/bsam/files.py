"""Files of tensors: safetensors with a header that says what is in them, replaced in one go.

Loading one runs no code. They carry `format`, `version` and `kind` as metadata and are written to a temporary file
that then takes the place of the old one, so that a kill at any moment leaves a whole file.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["Settings", "naming", "read_file", "write_file"]

Settings = dict[str, Any]
"""What a file holds beside tensors, as JSON."""

_VERSION = "1"


def write_file(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], *, format: str, kind: str, settings: Settings
) -> None:
    """Write a safetensors file. Until it is whole and on the disk, whatever is at `path` stays."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}. Make it first.")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    metadata = {"format": format, "version": _VERSION, "kind": kind, "settings": json.dumps(settings)}
    try:
        with open(temporary, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode
        save_file(_unshared(tensors), temporary, metadata)
        os.chmod(temporary, mode)  # safetensors leaves a file that only its owner can read
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):  # the new name is on the disk once the folder is; not every system has this
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_file(
    path: str | os.PathLike[str], *, format: str, kinds: Iterable[str]
) -> tuple[str, dict[str, Tensor], Settings]:
    """Read what `write_file` wrote: kind, tensors and settings. Refuses other formats, versions and kinds."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or not a whole one: {error}.") from error
    if metadata.get("format") != format:
        raise ValueError(f"{path} says format={metadata.get('format')!r}: expected {format!r}.")
    if metadata.get("version") != _VERSION:
        raise ValueError(
            f"{path} says version={metadata.get('version')!r}: this bsam reads version {_VERSION!r}. Update bsam?"
        )
    kind, kinds = metadata.get("kind"), list(kinds)
    if kind not in kinds:
        raise ValueError(f"{path} says kind={kind!r}: expected {' or '.join(map(repr, kinds))}.")
    with naming(path):
        settings = json.loads(metadata["settings"])
        if not isinstance(settings, dict):
            raise TypeError(f"settings must be a dictionary, not {type(settings).__name__}")
    return kind, tensors, settings


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what bad contents raise into an error that names the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} has contents that do not make sense: {type(error).__name__}: {error}") from error


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, and no two in the same memory, which safetensors refuses."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return result
