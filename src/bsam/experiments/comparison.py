"""Our numbers beside the paper's: what was measured, what was printed, and whether they agree.

A cell *matches* if |ours - paper's| <= 2 sqrt(sd_ours^2 + sd_paper^2), and is better or worse otherwise. It is
*reduced*, and never more than that, if it has fewer epochs than the paper's runs or fewer than its five seeds: so one
seed, which has no standard deviation, is always reduced. On the tiny scale the data are others, and there is no
difference to speak of.

A row of ours that the paper does not have is marked as such, and has no difference, unless it stands beside one of the
paper's.

The best of a block are those that a Welch test does not tell from the best mean at 5%. Fewer than three seeds are never
among them: with one there is no test, and one with two tells almost nothing apart. Rows of different scales are not
compared.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from scipy.stats import ttest_ind_from_stats  # type: ignore[import-untyped]

from bsam.experiments.paper.beyond import all_tables, beyond
from bsam.experiments.paper.results import METRICS, PAPER_SEEDS, PaperBlock, PaperRow, Published
from bsam.experiments.recorded import SCALES, Scale, recorded

__all__ = [
    "HIGHER_IS_BETTER",
    "SEEDS",
    "TABLES",
    "Block",
    "Cell",
    "Comparison",
    "Mark",
    "Published",
    "Row",
    "compare",
    "find_table",
    "values_of",
]

Mark = Literal["matches", "better", "worse", "reduced", "missing", "ours"]
HIGHER_IS_BETTER = {"accuracy": True, "nll": False, "ece": False, "auroc": True}
SIGNIFICANCE = 0.05
TESTED_SEEDS = 3
SEEDS: dict[Scale, int] = {"full": PAPER_SEEDS, "reduced": 2, "tiny": 2}
"""How many seeds a scale has if nothing else is said."""

TABLES: dict[str, str] = {name: table.title for name, table in all_tables().items()}
"""The paper's tables of results: name and title."""


@dataclass(frozen=True)
class Cell:
    """One metric of one row."""

    metric: str
    values: tuple[float, ...]
    """Ours, by seed; accuracy in percent."""
    published: Published | None
    difference: float | None = None
    """Ours minus the paper's; None where there is nothing to compare."""
    mark: Mark = "missing"
    best: bool = False

    @property
    def mean(self) -> float | None:
        """Over our seeds."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def sd(self) -> float | None:
        """Over our seeds; one has none."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Row:
    """A row of a table, ours and the paper's."""

    label: str
    preset: str | None
    samples: int
    seeds: int
    epochs: int | None
    scale: str | None
    command: str
    """Runs it again."""
    cells: tuple[Cell, ...]
    seconds: float | None
    """Of training, for one run."""
    ours: bool = False
    """The paper has no such row."""


@dataclass(frozen=True)
class Block:
    """Rows that are compared with each other."""

    name: str
    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Comparison:
    """A table of the paper, and ours."""

    table: str
    title: str
    blocks: tuple[Block, ...]


def find_table(name: str) -> str:
    """`name`, or an error that says which tables there are."""
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}: choose one of {', '.join(TABLES)}.")
    return name


def compare(table: str, records: Path) -> Comparison:
    """A table, filled with what is recorded in a folder.

    Args:
        table: table1 to table6.
        records: Folder of records; rows without one are marked as missing.
    """
    blocks = [
        Block(block.name, block.title, _best_marked([_row(table, block, row, records) for row in block.rows]))
        for block in all_tables()[find_table(table)].blocks
    ]
    return Comparison(table, TABLES[table], tuple(blocks))


def values_of(evaluations: list[dict[str, float | None]], metric: str) -> tuple[float, ...]:
    """A metric of several evaluations as tables show it: accuracy in percent. Left out where it is not defined."""
    found = (evaluation[metric] for evaluation in evaluations)
    return tuple((100 if metric == "accuracy" else 1) * value for value in found if value is not None)


def _row(table: str, block: PaperBlock, row: PaperRow, records: Path) -> Row:
    samples = str(row.samples)
    runs = [run for run in recorded(records, row.preset).values() if samples in run.test]
    scale = runs[0].scale if runs else None
    command = f"bsam reproduce {table} --block {block.name} --methods {row.preset.rpartition('/')[2]}"
    if scale not in (None, "full"):
        command += f" --scale {scale}"
    if scale is not None and len(runs) != SEEDS[scale]:
        command += f" --seeds {len(runs)}"
    cells = [
        _cell(metric, values_of([run.test[samples] for run in runs], metric), published, scale)
        for metric, published in zip(METRICS, row.cells, strict=True)
    ]
    return Row(
        label=row.label,
        preset=row.preset,
        samples=row.samples,
        seeds=len(runs),
        epochs=runs[0].config.total_epochs if runs else None,
        scale=scale,
        command=command,
        cells=tuple(cells),
        seconds=statistics.fmean(run.seconds for run in runs) if runs else None,
        ours=row.preset in beyond(),
    )


def _cell(metric: str, values: tuple[float, ...], published: Published | None, scale: Scale | None) -> Cell:
    cell = Cell(metric, values, published)
    if published is None:
        return replace(cell, mark="ours")
    mean = cell.mean
    if mean is None or math.isnan(mean):
        return cell
    if scale == "tiny":
        return replace(cell, mark="reduced")
    difference = mean - published.mean
    return replace(cell, difference=difference, mark=_mark(cell, published, difference, scale))


def _mark(cell: Cell, published: Published, difference: float, scale: Scale | None) -> Mark:
    if scale != "full" or len(cell.values) < PAPER_SEEDS:
        return "reduced"
    if abs(difference) <= 2 * math.hypot(cell.sd or 0.0, published.sd or 0.0):
        return "matches"
    return "better" if (difference > 0) == HIGHER_IS_BETTER[cell.metric] else "worse"


def _best_marked(rows: list[Row]) -> tuple[Row, ...]:
    """The rows, with the best cells of each metric marked."""
    fullest = next((scale for scale in SCALES if any(row.scale == scale for row in rows)), None)
    cells = [list(row.cells) for row in rows]
    for column, metric in enumerate(METRICS):
        tested = [
            i
            for i, row in enumerate(rows)
            if row.scale == fullest and row.seeds >= TESTED_SEEDS and not _is_nan(cells[i][column])
        ]
        if not tested:
            continue
        sign = 1 if HIGHER_IS_BETTER[metric] else -1
        first = cells[max(tested, key=lambda i: sign * (cells[i][column].mean or 0.0))][column]
        for i in tested:
            if cells[i][column] is first or not _differ(cells[i][column].values, first.values):
                cells[i][column] = replace(cells[i][column], best=True)
    return tuple(replace(row, cells=tuple(row_cells)) for row, row_cells in zip(rows, cells, strict=True))


def _is_nan(cell: Cell) -> bool:
    return cell.mean is None or math.isnan(cell.mean)


def _differ(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Whether a Welch test tells two means apart."""
    statistics_of = [(statistics.fmean(values), statistics.stdev(values), len(values)) for values in (a, b)]
    if statistics_of[0][1] == statistics_of[1][1] == 0.0:
        return statistics_of[0][0] != statistics_of[1][0]
    result = ttest_ind_from_stats(*statistics_of[0], *statistics_of[1], equal_var=False)
    return bool(result.pvalue < SIGNIFICANCE)
