"""A progress bar for long work on files."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

__all__ = ["ProgressBar"]


class ProgressBar:
    """A bar on stderr while a `with` block runs, if stderr is a terminal. It has the methods that pooch calls.

    Args:
        what: Text beside the bar.
        total: Amount of work; setting it later starts the bar again.
    """

    def __init__(self, what: str, total: float | None = None) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task(what, total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    @property
    def total(self) -> float | None:
        """Amount of work."""
        return self._progress.tasks[0].total

    @total.setter
    def total(self, total: float) -> None:
        self._progress.reset(self._task, total=total)

    def update(self, amount: float = 1) -> None:
        """Add to the work that is done."""
        self._progress.advance(self._task, amount)

    def reset(self) -> None:
        """Set the work that is done to zero."""
        self._progress.reset(self._task)

    def close(self) -> None:
        """Do nothing: pooch calls it, but the bar ends with its `with` block."""
