"""The entry point of the command `bsam`: it runs the app, and prints an error or a warning as one sentence."""

from __future__ import annotations

import sys
import warnings
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Run `bsam`."""
    try:
        from bsam.experiments.commands import app
        from bsam.experiments.runs import RunInterruptedError
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("bsam"):
            raise
        sys.exit(
            f"The command bsam needs {missing.name}, which is not installed. In the folder of bsam's source, write: "
            "pip install '.[experiments]'"
        )
    if "--debug" not in sys.argv:
        warnings.formatwarning = _warning_sentence
    try:
        app()
    except RunInterruptedError as interrupted:
        print(f"bsam: {interrupted}", file=sys.stderr)
        sys.exit(128 + interrupted.number)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        print(f"bsam: {_sentence(error)}", file=sys.stderr)
        sys.exit(1)


def _warning_sentence(message: Warning | str, *origin: Any, **options: Any) -> str:
    return f"bsam: {message}\n"


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
