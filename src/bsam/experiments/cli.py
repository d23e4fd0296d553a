"""The entry point of the command `bsam`: it runs the app, and prints an error or a warning as one sentence."""

from __future__ import annotations

import sys
import warnings
from typing import Any

__all__ = ["main"]


_EXTRAS = {"clarabel": "theory", "cvxpy": "theory"}
"""Packages of other extras than `experiments`."""


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


def _warning_sentence(message: Warning | str, *origin: Any, **options: Any) -> str:
    return f"bsam: {message}\n"


def _sentence(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("bsam"):
        return (
            f"The command bsam needs {error.name}, which is not installed. In the folder of bsam's source, write: "
            f"pip install '.[{_EXTRAS.get(error.name, 'experiments')}]'"
        )
    if isinstance(error, OSError) and error.strerror:
        return f"bsam: {error.filename}: {error.strerror}" if error.filename else f"bsam: {error.strerror}"
    return f"bsam: {str(error) or type(error).__name__}"
