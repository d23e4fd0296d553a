"""The entry point of the command `bsam`: runs it, or says what to install."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run `bsam`."""
    try:
        from bsam.experiments.commands import app
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("bsam"):
            raise
        sys.exit(f"The command bsam needs {missing.name}, which is not installed: pip install 'bsam[experiments]'")
    app()
