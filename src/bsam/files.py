"""Files that a kill at any moment leaves whole: text, and tensors with a header that says what they are.

A file is written under another name in the same folder, put on the disk, and then takes the place of the old one.
Loading one runs no code: they are JSON, TOML, or safetensors that carry `format`, `version` and `kind` as metadata.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["Settings", "naming", "read_file", "remove_leftovers", "write_file", "write_text"]

Settings = dict[str, Any]
"""What a file holds beside tensors, as JSON."""

_VERSION = "1"


def write_file(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], *, format: str, kind: str, settings: Settings
) -> None:
    """Write a safetensors file. Until it is whole and on the disk, whatever is at `path` stays."""
    metadata = {"format": format, "version": _VERSION, "kind": kind, "settings": json.dumps(settings)}
    with _replacing(Path(path)) as temporary:
        mode = temporary.stat().st_mode
        save_file(_unshared(tensors), temporary, metadata)
        os.chmod(temporary, mode)  # safetensors leaves a file that only its owner can read


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file. Until it is whole and on the disk, whatever is at `path` stays."""
    with _replacing(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


def remove_leftovers(folder: Path) -> None:
    """Remove what a kill in the middle of a write has left in `folder`; nobody may be writing there."""
    for temporary in folder.glob(".*.tmp"):
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """An empty file to write to, that takes the place of `path` when the block ends well."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}. Make it first.")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        open(temporary, "xb").close()
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        code = _error_number(error)
        if code is None:
            raise
        reason = _REASONS.get(code, f"{os.strerror(code)}. Mend that")
        raise OSError(code, f"{path} could not be written: {reason}. What was there before is kept") from error
    if hasattr(os, "O_DIRECTORY"):  # the new name is on the disk once the folder is; not every system has this
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


_REASONS = {
    errno.ENOSPC: "the disk is full. Free some space",
    errno.EDQUOT: "your share of the disk is full. Free some space",
    errno.EFBIG: "it is larger than a file may be here. Raise the limit (ulimit -f), or choose another disk",
    errno.EACCES: "the folder may not be written to. Change its permissions, or choose another",
    errno.EPERM: "the folder may not be written to. Change its permissions, or choose another",
    errno.EROFS: "the folder is on a read-only disk. Choose another",
}
"""What to do about the errors of a disk."""


def _error_number(error: BaseException) -> int | None:
    """The system's number of an error; safetensors has it in its text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error)) if isinstance(error, SafetensorError) else None
    return int(found[1]) if found else None


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
