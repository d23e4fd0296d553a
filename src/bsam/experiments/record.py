"""Records: one JSON file that says what was run, on what, for how long, and what came out."""

from __future__ import annotations

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

__all__ = ["environment", "to_json", "write_json"]

_PACKAGES = ("torch", "triton", "numpy", "scikit-learn", "ivon-opt")


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """What a result depends on beside its settings: code, packages, device (the CPU if none is named)."""
    commit, changed = _commit()
    known: dict[str, Any] = {
        "bsam": bsam.__version__,
        "commit": commit,
        "changed": changed,  # whether files differed from that commit; null if unknown
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }
    if device is None or device.type != "cuda":
        cpu = f"CPU, {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
        return {**known, "device": cpu}
    return {
        **known,
        "device": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "tf32": {"products": torch.backends.cuda.matmul.allow_tf32, "convolutions": torch.backends.cudnn.allow_tf32},
    }


def to_json(value: Any, *, indent: int | None = None) -> str:
    """`value` as JSON, which knows no NaN and no infinity: they become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record; a file that is there is replaced in one go, or stays."""
    write_text(path, to_json(record, indent=1) + "\n")


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
    """The commit of the checkout this package runs from, and whether files of the package differ from it.

    A copy without its history can be told which commit it is, by the variable BSAM_COMMIT; a + at its end says that
    files differ. Outside of a checkout nothing is known.
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
