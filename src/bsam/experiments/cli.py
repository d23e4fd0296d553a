"""The entry point of the command `bsam`: runs it, says what to install, and turns errors into one sentence."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run `bsam`."""
    try:
        from bsam.experiments.commands import app
        from bsam.experiments.runs import RunInterruptedError
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("bsam"):
            raise
        sys.exit(f"The command bsam needs {missing.name}, which is not installed: pip install 'bsam[experiments]'")
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


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
