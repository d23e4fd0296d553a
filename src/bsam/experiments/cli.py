"""The entry point of the command `bsam`: it runs the app, and prints an error or a warning as one sentence."""

from __future__ import annotations

import errno
import sys
import warnings
from typing import Any

__all__ = ["main"]


_EXTRAS = {"clarabel": "theory", "cvxpy": "theory"}
"""Packages of other extras than `experiments`."""
_DISK = {
    errno.ENOENT: "there is no such file or folder. Choose another place",
    errno.ENOTDIR: "a part of this path is a file, and must be a folder. Choose another folder",
    errno.EEXIST: "there is a file in the place of a folder. Choose another folder",
    errno.EISDIR: "this is a folder, and must be a file. Name a file in it",
    errno.EACCES: "this may not be read or written. Change its permissions, or choose another place",
    errno.EPERM: "this may not be read or written. Change its permissions, or choose another place",
    errno.EROFS: "the disk is read-only. Choose another place",
    errno.ENOSPC: "the disk is full. Free some space",
}
"""What an error of the disk means, and what to do, where the system names the file and no advice."""


def main() -> None:
    """Run `bsam`."""
    if "--debug" not in sys.argv:
        warnings.formatwarning = _warning_sentence
    try:
        from bsam.experiments.commands import app

        app()
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        print(_sentence(error), file=sys.stderr)
        sys.exit(getattr(error, "exit_status", 1))  # a run that a signal stopped says which
    except KeyboardInterrupt:  # while modules are imported; the app catches it later
        print("bsam: stopped.", file=sys.stderr)
        sys.exit(130)


def _warning_sentence(message: Warning | str, *origin: Any, **options: Any) -> str:
    return f"bsam: {message}\n"


def _sentence(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("bsam"):
        return (
            f"The command bsam needs {error.name}, which is not installed. In the folder of bsam's source, write: "
            f"pip install '.[{_EXTRAS.get(error.name, 'experiments')}]'"
        )
    if isinstance(error, OSError) and error.strerror:
        if not error.filename:
            return f"bsam: {error.strerror}"
        return f"bsam: {error.filename}: {_DISK.get(error.errno or 0, error.strerror)}."
    return f"bsam: {str(error) or type(error).__name__}"
