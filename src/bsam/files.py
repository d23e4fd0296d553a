"""Writes files that stay complete if the process is killed, and reads them with a check for damage.

A file is written in a hidden folder beside its place, flushed to the disk, and then replaces the old file. Loading a
file runs no code: files are JSON, TOML, or safetensors with `format`, `version`, `kind` and a checksum of all contents
as metadata.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

try:
    import fcntl
except ModuleNotFoundError:
    _HAS_LOCKS = False
else:
    _HAS_LOCKS = True

__all__ = [
    "Settings",
    "checksum",
    "locked",
    "naming",
    "read_file",
    "remove_leftovers",
    "replacing",
    "write_file",
    "write_text",
]

Settings = dict[str, Any]
"""The contents of a file other than tensors, as JSON."""

_VERSION, _BEFORE_CHECKSUMS = "2", "1"


# ------------------------------------------------------------------ writing


def write_file(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    format: str,
    kind: str,
    settings: Settings,
    previous: Path | None = None,
    whole: Callable[[str], Tensor] | None = None,
) -> None:
    """Write a safetensors file with a checksum. A file at `path` stays until the new one is complete on the disk.

    Tensors are brought to the CPU and written one after the other, in the order of their names.

    Args:
        path: The file.
        tensors: Its tensors.
        format: Its format, see `read_file`.
        kind: Its kind within the format.
        settings: Its contents other than tensors.
        previous: Where to keep the file that is at `path` now.
        whole: Returns a tensor by name, where `tensors` have only its type and shape: gathers a sharded tensor.
    """
    metadata = {"format": format, "version": _VERSION, "kind": kind, "settings": json.dumps(settings, sort_keys=True)}
    with replacing(Path(path), previous=previous) as temporary:
        save_file(tensors, temporary, metadata, whole or tensors.__getitem__)


def save_file(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str], whole: Callable[[str], Tensor]
) -> None:
    """Write the safetensors format: the length of the header, the header, and all tensors. See `write_file`.

    safetensors' own function takes all tensors at once, and cannot write a checksum of what it is about to write.
    """
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    # Large types first, so that each tensor begins at a multiple of its type's size.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        if tensor.dtype not in _TYPES:
            raise ValueError(
                f"{name} is of type {tensor.dtype}, which the safetensors format does not have: convert it, or, if it "
                "is a buffer, register it with persistent=False."
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}

    def header(checksum: str) -> bytes:
        text = json.dumps({"__metadata__": {**metadata, "sha256": checksum}, **entries}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    start, summed = len(header("0" * 64)), _Checksum(metadata)  # SHA-256 has 64 digits
    with open(path, "wb") as file:
        for name in sorted(tensors):
            tensor = whole(name).detach().cpu().contiguous()
            summed.add(name, tensor)
            file.seek(start + entries[name]["data_offsets"][0])
            file.write(_bytes(tensor))
        file.seek(0)
        file.write(header(summed.hexdigest()))


_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""The names of types in a safetensors file."""


def write_text(path: str | os.PathLike[str], text: str, *, new: bool = False) -> None:
    """Write a text file. A file at `path` stays until the new one is complete on the disk.

    Args:
        path: The file.
        text: Its text.
        new: Whether to raise a FileExistsError if there is a file at `path`.
    """
    with replacing(Path(path), new=new) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path, *, previous: Path | None = None, new: bool = False) -> Iterator[Path]:
    """Yield a temporary file to write; if the block succeeds, it replaces `path`. See `write_file`.

    A link at `path` is replaced too: the file that it points to does not change.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}. Create it first.")
    with _explained(path):
        remove_leftovers(path.parent, path.name)
        with _room(path) as room:
            temporary = room / path.name
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            if previous is not None:
                _keep_previous(path, previous, room)
            if new:
                _move_new(temporary, path)
            else:
                os.replace(temporary, path)
    if hasattr(os, "O_DIRECTORY"):  # the new name is on the disk once the folder is; not every system has this
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _keep_previous(path: Path, previous: Path, room: Path) -> None:
    """Link the file at `path` to `previous`."""
    if not path.exists():
        return
    try:
        os.link(path, room / "previous")  # not a rename, so that there is always a file at `path`
        os.replace(room / "previous", previous)
    except OSError:  # this disk has no links
        os.replace(path, previous)


def _move_new(temporary: Path, path: Path) -> None:
    """Move a file to `path`; raise if there is a file already."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # this disk has no links
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        os.replace(temporary, path)


# ------------------------------------------------------------------ leftovers of killed processes

_ROOM = re.compile(r"\.(.+)\.[0-9a-f]{16}\.bsam-tmp")


@contextlib.contextmanager
def _room(path: Path) -> Iterator[Path]:
    """Make a hidden folder in which to write `path`. The writer holds a lock in it as long as it lives."""
    lock = None
    while True:
        room = path.with_name(f".{path.name}.{secrets.token_hex(8)}.bsam-tmp")
        room.mkdir()  # a FileNotFoundError ends the loop: some folders, like /proc, take no others
        try:
            lock = _lock(room / "lock", wait=False)
            break
        except (BlockingIOError, FileNotFoundError):  # before the lock was held, another process removed the folder
            if not path.parent.is_dir():
                raise
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)
        if lock is not None:
            lock.close()


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove leftovers of killed writers in `folder`, for all files or for the file `name`.

    Only folders with names of our form are removed, and only if the writer's lock is free: the writer is dead.
    """
    for room in folder.glob(".*.bsam-tmp"):
        found = _ROOM.fullmatch(room.name)
        if found is None or name not in (None, found[1]) or room.is_symlink() or not room.is_dir():
            continue
        try:
            lock = _lock(room / "lock", wait=False)
        except OSError:  # the writer is at work, or another process removes the folder
            continue
        if lock is not None:
            shutil.rmtree(room, ignore_errors=True)
            lock.close()


# ------------------------------------------------------------------ locks


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Allow only one process in the block at a time. The file `path` is the lock, and exists while the block runs.

    If the system or the disk has no locks, the block runs without one.

    Raises:
        BlockingIOError: Another process is in the block, and `wait` is False.
    """
    lock = _lock(path, wait=wait)
    try:
        yield
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            lock.close()


def _lock(path: Path, *, wait: bool) -> IO[bytes] | None:
    """Open and lock a file, which is created if it does not exist; return None where there are no locks."""
    if not _HAS_LOCKS:
        return None
    while True:
        with _explained(path):
            file = open(path, "ab")  # noqa: SIM115 (the lock lasts as long as the file is open)
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except BaseException as error:
            file.close()
            if isinstance(error, OSError) and error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                return None
            if not isinstance(error, FileNotFoundError):
                raise
        file.close()  # the process that had the lock has removed the file: try again


# ------------------------------------------------------------------ errors of the disk


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn disk errors into messages that say what to do."""
    try:
        yield
    except Exception as error:
        code = _error_number(error)
        if code is None:
            raise
        reason = _REASONS.get(code, f"{os.strerror(code)}. Repair this")
        kept = ". The earlier contents are kept" if os.path.exists(path) else ""
        raise OSError(code, f"{path} could not be written: {reason}{kept}") from error


_REASONS = {
    errno.ENOSPC: "the disk is full. Free some space",
    errno.EDQUOT: "your share of the disk is full. Free some space",
    errno.EFBIG: "it is larger than a file may be here. Raise the limit (ulimit -f), or choose another disk",
    errno.EACCES: "the folder may not be written to. Change its permissions, or choose another",
    errno.EPERM: "the folder may not be written to. Change its permissions, or choose another",
    errno.EEXIST: "there is a file of this name. Choose another",
    errno.ENOENT: "no file can be made in this folder. Choose another",
    errno.EROFS: "the folder is on a read-only disk. Choose another",
}
"""Reasons of disk errors, and what to do."""


def _error_number(error: BaseException) -> int | None:
    """Return the system's number of an error; safetensors has it in its message."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error)) if isinstance(error, SafetensorError) else None
    return int(found[1]) if found else None


# ------------------------------------------------------------------ reading


def read_file(
    path: str | os.PathLike[str], *, format: str, kinds: Iterable[str]
) -> tuple[str, dict[str, Tensor], Settings]:
    """Read kind, tensors and settings of a file that `write_file` wrote.

    Other formats, versions and kinds are refused, and so are contents that do not match the checksum. A file of an
    earlier version of bsam has no checksum: it is read with a warning.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder: name the file in it, such as posterior.safetensors.")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or not a complete one: {error}.") from error
    if metadata.get("format") != format:
        raise ValueError(f"{path} says format={metadata.get('format')!r}: expected {format!r}.")
    version = metadata.get("version")
    if version not in (_VERSION, _BEFORE_CHECKSUMS):
        raise ValueError(f"{path} says version={version!r}: this bsam reads version {_VERSION!r}. Update bsam?")
    kind, kinds = metadata.get("kind"), list(kinds)
    if kind not in kinds:
        raise ValueError(f"{path} says kind={kind!r}: expected {' or '.join(map(repr, kinds))}.")
    if version == _BEFORE_CHECKSUMS and "sha256" not in metadata:
        warnings.warn(
            f"{path} has no checksum, because an earlier version of bsam wrote it: damage cannot be detected. Save it "
            "again to add a checksum.",
            stacklevel=3,
        )
    elif metadata.get("sha256") != checksum(tensors, metadata):
        raise ValueError(
            f"{path} is damaged: its contents do not match its checksum. Use an undamaged copy, or make the file again."
        )
    with naming(path):
        settings = json.loads(metadata["settings"])
        if not isinstance(settings, dict):
            raise TypeError(f"settings must be a dictionary, not {type(settings).__name__}")
    return kind, tensors, settings


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of names, types, shapes and bytes of tensors, and of all metadata except the checksum.

    Equal contents have equal checksums, in any order and at any place in a file.
    """
    summed = _Checksum(metadata)
    for name in sorted(tensors):
        summed.add(name, tensors[name].contiguous())
    return summed.hexdigest()


class _Checksum:
    """The checksum of a file's contents, whose tensors are added one by one, in the order of their names."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self._sha256 = hashlib.sha256()
        self.hexdigest = self._sha256.hexdigest
        for key in sorted(metadata.keys() - {"sha256"}):
            self._add(key.encode())
            self._add(metadata[key].encode())

    def add(self, name: str, tensor: Tensor) -> None:
        self._add(name.encode())
        self._add(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        self._add(_bytes(tensor))

    def _add(self, part: bytes | memoryview) -> None:
        self._sha256.update(len(part).to_bytes(8, "little"))  # so that "ab", "c" is not "a", "bc"
        self._sha256.update(part)


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors caused by bad contents into an error that names the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} has contents that do not make sense: {type(error).__name__}: {error}") from error
