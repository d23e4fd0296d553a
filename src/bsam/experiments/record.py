"""A record file: JSON with a checksum that says what was run, where, for how long, and with which result.

Old records without a checksum are read without a warning: there are many, and most are under version control, which
notices damage by itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import bsam
from bsam.files import write_text

__all__ = ["environment", "read_json", "to_json", "write_json"]

_FORMAT = "bsam.record"

_PACKAGES = ("torch", "triton", "numpy", "scikit-learn", "ivon-opt")


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Describe what a result depends on beside its settings: code, packages and device (default: the CPU)."""
    commit, changed = _commit()
    known: dict[str, Any] = {
        "bsam": bsam.__version__,
        "commit": commit,
        "changed": changed,  # whether files differed from that commit; null if unknown
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }
    if device is None or device.type != "cuda":
        threads = torch.get_num_threads()
        cpu = f"CPU, {platform.machine()}, {os.cpu_count()} cores, {threads} {'thread' if threads == 1 else 'threads'}"
        return {**known, "device": cpu}
    return {
        **known,
        "device": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "tf32": {"products": torch.backends.cuda.matmul.allow_tf32, "convolutions": torch.backends.cudnn.allow_tf32},
    }


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Write `value` as JSON. JSON has no NaN and no infinity: they become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record with its checksum. An existing file is replaced in one step, or stays as it is."""
    content = {name: value for name, value in record.items() if name not in ("format", "sha256")}
    content = json.loads(to_json({"format": _FORMAT, **content}))  # as it will be read: tuples become lists
    write_text(path, to_json({**content, "sha256": _checksum(content)}, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a record that `write_json` wrote. A record with a wrong checksum is an error."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a record: {error}. Write it again, or take it away.") from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{path} is not a record: it holds a {type(record).__name__}. Write it again, or take it away."
        )
    written = record.pop("sha256", None)
    # The format says that there must be a checksum: without it a damaged name of the checksum would go unnoticed.
    if (written is not None or "format" in record) and written != _checksum(record):
        raise ValueError(
            f"{path} is damaged: its contents do not have the checksum that they were written with. Take a copy of it "
            "that is whole, or write it again."
        )
    record.pop("format", None)
    return record


def _checksum(record: dict[str, Any]) -> str:
    """Return the SHA-256 of a record. The order of its entries and the white space of its file do not matter."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> tuple[str | None, bool | None]:
    """Return the commit of the checkout that this package runs from, and whether files of the package differ from it.

    In a copy without history, the environment variable BSAM_COMMIT names the commit; a + at its end says that files
    differ. Outside of a checkout both are None.
    """
    if named := os.environ.get("BSAM_COMMIT"):
        return named.removesuffix("+"), named.endswith("+")
    folder = Path(__file__).parent
    git = ["git", "-C", str(folder)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return commit.stdout.strip(), bool(changed.stdout.strip())
