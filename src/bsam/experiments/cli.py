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
    except (ArithmeticError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        if "--debug" in sys.argv:
            raise
        print(f"bsam: {error.strerror if isinstance(error, OSError) and error.strerror else error}", file=sys.stderr)
        sys.exit(1)
