"""The paper's results as data: every number of its six tables, as printed, and the margins of its blocks."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = [
    "METRICS",
    "PAPER_SAMPLES",
    "PAPER_SEEDS",
    "PaperBlock",
    "PaperRow",
    "PaperTable",
    "Published",
    "margins",
    "paper_tables",
]

METRICS = ("accuracy", "nll", "ece", "auroc")
"""The metrics, in the order of the tables."""
PAPER_SEEDS = 5
PAPER_SAMPLES = 32
"""Number of posterior samples, if a table does not say another number."""


@dataclass(frozen=True)
class Published:
    """A number of the paper: mean and standard deviation over its seeds, accuracy in percent."""

    mean: float
    sd: float | None
    printed: str
    """The text as printed."""

    @property
    def rounding(self) -> float:
        """Return half a unit of the mean's last printed digit: 0.005 for 86.55."""
        mean, _, _ = self.printed.partition(" ")
        _, _, decimals = mean.partition(".")
        return 0.5 * 10.0 ** -len(decimals)


@dataclass(frozen=True)
class PaperRow:
    """A row of a table: four numbers of one preset."""

    label: str
    preset: str
    samples: int
    cells: tuple[Published | None, ...]
    """In the order of `METRICS`; None in a row of ours, see `bsam.experiments.paper.beyond`."""


@dataclass(frozen=True)
class PaperBlock:
    """Rows that are compared with each other."""

    name: str
    title: str
    rows: tuple[PaperRow, ...]
    improvement: tuple[str, ...] = ()
    """How much better the second row is than the first, as printed, in the order of `METRICS`; only in table 3."""


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper."""

    name: str
    title: str
    blocks: tuple[PaperBlock, ...]


@cache
def paper_tables() -> dict[str, PaperTable]:
    """Return the six tables by name: table1 to table6."""
    content = tomllib.loads((files("bsam.experiments.paper") / "results.toml").read_text())
    return {
        name: PaperTable(
            name,
            table["title"],
            tuple(_block(**block) for block in table["blocks"]),
        )
        for name, table in content.items()
    }


def _block(name: str, title: str, rows: list[list[Any]], improvement: list[str] | None = None) -> PaperBlock:
    return PaperBlock(name, title, tuple(_row(*row) for row in rows), tuple(improvement or ()))


def _row(label: str, preset: str, *rest: Any) -> PaperRow:
    samples, cells = (rest[0], rest[1:]) if isinstance(rest[0], int) else (PAPER_SAMPLES, rest)
    return PaperRow(label, preset, samples, tuple(_published(cell) for cell in cells))


def _published(printed: str) -> Published:
    mean, _, sd = printed.partition(" ")
    return Published(float(mean), float(sd.strip("()")) if sd else None, printed)


@cache
def margins() -> dict[str, dict[str, dict[str, float]]]:
    """Return the margins of `margins.toml` by table, block and metric: differences up to a margin are called equal."""
    return tomllib.loads((files("bsam.experiments.paper") / "margins.toml").read_text(encoding="utf-8"))
