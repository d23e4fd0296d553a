"""Our numbers beside the paper's: the measured number, the printed number, and whether they agree.

A cell is *better*, *worse*, *equal* or *open*, see `bsam.experiments.verdicts`; the margins are in
`bsam.experiments.paper.results`. Two kinds of cells are not judged. A cell that is *not run* has no record. A *reduced*
cell has fewer epochs than the paper's runs, or fewer than three seeds, with which a Welch test finds next to nothing.
The tiny scale uses other data, so no difference is shown. A number that is not defined, like the AUROC of a run without
a mistake, is open. A printed number without a standard deviation would be open, too; the paper has none.

A row of ours has no difference, unless it is compared with a row of the paper. Then it is judged, but it is not among
the paper's 288 numbers, and it has a Holm correction of its own: a row that we add must not change the verdict on a row
of the paper.

Below a block of table 3 the paper prints an improvement: how much better bSAM is with noise than without. Ours stands
beside it, with Welch's 90% interval. It follows from the numbers above it, so it is not judged, and not counted.

The best of a block are the best mean and the means that are not significantly worse (Welch, 5%). Rows with fewer than
three seeds are never among the best. Rows of different scales are not compared.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from bsam.experiments.choices import SCALES, Scale
from bsam.experiments.config import from_mapping
from bsam.experiments.metric_columns import values_of
from bsam.experiments.paper.beyond import all_tables, beyond
from bsam.experiments.paper.results import METRICS, PAPER_SEEDS, PaperBlock, PaperRow, Published, margins
from bsam.experiments.record import read_json
from bsam.experiments.recorded_runs import recorded, same_run
from bsam.experiments.verdicts import SIGNIFICANCE, Case, Difference, Summary, judge, welch

__all__ = [
    "HIGHER_IS_BETTER",
    "MARKS",
    "SEEDS",
    "TABLES",
    "TESTED_SEEDS",
    "Block",
    "Cell",
    "Comparison",
    "Improvement",
    "Mark",
    "Published",
    "Row",
    "best_marked",
    "compare",
    "find_table",
]

Mark = Literal["equal", "better", "worse", "open", "reduced", "not run"]
MARKS: tuple[Mark, ...] = get_args(Mark)
HIGHER_IS_BETTER = {"accuracy": True, "nll": False, "ece": False, "auroc": True}
TESTED_SEEDS = 3
"""Rows with fewer seeds are neither judged nor bold, and so are cells that are defined for fewer."""
SEEDS: dict[Scale, int] = {"full": PAPER_SEEDS, "reduced": 2, "tiny": 2}
"""Default number of seeds per scale."""

TABLES: dict[str, str] = {name: table.title for name, table in all_tables().items()}
"""Name and title of the paper's tables of results."""


@dataclass(frozen=True)
class Cell:
    """One metric of one row."""

    metric: str
    values: tuple[float, ...]
    """Our values, one per seed; accuracy in percent."""
    published: Published | None
    difference: float | None = None
    """Our mean minus the paper's; None if there is nothing to compare."""
    mark: Mark | None = None
    """None if the paper does not print this number."""
    best: bool = False

    @property
    def mean(self) -> float | None:
        """Over our seeds."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def sd(self) -> float | None:
        """Over our seeds; None for a single seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Row:
    """A row of a table: our numbers beside the paper's."""

    label: str
    preset: str | None
    samples: int
    seeds: int
    epochs: int | None
    scale: str | None
    cells: tuple[Cell, ...]
    command: str = ""
    """The command that runs it again."""
    seconds: float | None = None
    """Mean training time of a run."""
    ours: bool = False
    """Whether the row is ours: the paper does not have it."""
    members: int = 1
    """Number of runs in the ensemble; 1 if the row is no ensemble."""


@dataclass(frozen=True)
class Improvement:
    """How much better a metric is in the second row of a block than in the first; a positive number is better."""

    metric: str
    ours: Difference | None
    """None if one of the rows has fewer than three seeds, or if the rows have different scales."""
    printed: str


@dataclass(frozen=True)
class Block:
    """Rows that are compared with each other."""

    name: str
    title: str
    rows: tuple[Row, ...]
    improvement: tuple[Improvement, ...] = ()
    """One per metric, if the paper prints it."""


@dataclass(frozen=True)
class Comparison:
    """A table of the paper with our numbers."""

    table: str
    title: str
    blocks: tuple[Block, ...]

    @property
    def counts(self) -> dict[Mark, int]:
        """Number of the paper's cells per mark; rows of ours are not counted."""
        rows = (row for block in self.blocks for row in block.rows if not row.ours)
        found = Counter(cell.mark for row in rows for cell in row.cells)
        return {mark: found[mark] for mark in MARKS}


def find_table(name: str) -> str:
    """Return `name`, or raise an error that lists the tables."""
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}: choose one of {', '.join(TABLES)}, all or uci.")
    return name


def compare(table: str, records: Path) -> Comparison:
    """Fill a table, table1 to table6, with the records of a folder; rows without a record are marked "not run"."""
    blocks = []
    for block in all_tables()[find_table(table)].blocks:
        rows = best_marked(_rows(table, block, records))
        blocks.append(Block(block.name, block.title, rows, _improvement(block, rows)))
    return Comparison(table, TABLES[table], _judged(table, blocks))


def _rows(table: str, block: PaperBlock, records: Path) -> list[Row]:
    """Return the rows of a block, and below them the ensembles of the rows whose presets belong to this table."""
    own = [row for row in block.rows if row.preset.startswith(f"{table}/")]
    ensembles = [found for row in own if (found := _ensemble(row, records))]
    return [*(_row(table, block, row, records) for row in block.rows), *ensembles]


def _ensemble(row: PaperRow, records: Path) -> Row | None:
    """Return the ensemble of a row's runs, if it is recorded at the full scale."""
    path = records / same_run(row.preset)[0] / "ensemble.json"
    if not path.is_file():
        return None
    record = read_json(path)
    found = record["evaluations"].get("test", {}).get(str(row.samples))
    if record["scale"] != "full" or found is None:
        return None
    return Row(
        label=f"{record['members']} × " + (f"({row.label})" if "=" in row.label else row.label),
        preset=None,
        samples=row.samples,
        seeds=1,
        epochs=from_mapping(record["config"]).total_epochs,
        scale="full",
        cells=tuple(Cell(metric, values_of([found], metric), None) for metric in METRICS),
        ours=True,
        members=record["members"],
    )


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
    """Make a cell; it is open until `_judged` has seen the whole table."""
    cell = Cell(metric, values, published)
    if published is None:
        return cell
    if scale is None:
        return replace(cell, mark="not run")
    if scale == "tiny":
        return replace(cell, mark="reduced")
    if cell.mean is None or math.isnan(cell.mean):
        return replace(cell, mark="open")
    mark: Mark = "reduced" if scale == "reduced" or len(values) < TESTED_SEEDS else "open"
    return replace(cell, difference=cell.mean - published.mean, mark=mark)


def _improvement(block: PaperBlock, rows: tuple[Row, ...]) -> tuple[Improvement, ...]:
    """Compare the second row with the first, if the paper does."""
    before, after = rows[:2]
    comparable = before.scale == after.scale and min(before.seeds, after.seeds) >= TESTED_SEEDS
    found = []
    for column, printed in enumerate(block.improvement):
        metric, pair = METRICS[column], (after.cells[column].values, before.cells[column].values)
        if HIGHER_IS_BETTER[metric] is False:
            pair = pair[1], pair[0]
        enough = comparable and all(len(values) >= TESTED_SEEDS for values in pair)
        difference = welch(Summary.of(pair[0]), Summary.of(pair[1])) if enough else None
        found.append(Improvement(metric, difference, printed))
    return tuple(found)


def _judged(table: str, blocks: list[Block]) -> tuple[Block, ...]:
    """Add the verdicts to a table; the paper's rows are one family for Holm's correction, and our rows another."""
    families: dict[bool, dict[tuple[str, str, str], Case]] = {False: {}, True: {}}
    for block in blocks:
        for row in block.rows:
            for cell in row.cells:
                if case := _case(cell, margins()[table][block.name][cell.metric]):
                    families[row.ours][block.name, row.label, cell.metric] = case
    verdicts = {
        place: verdict
        for cases in families.values()
        for place, verdict in zip(cases, judge(list(cases.values())), strict=True)
    }

    def judged(block: Block, row: Row) -> Row:
        places = [(block.name, row.label, cell.metric) for cell in row.cells]
        cells = zip(row.cells, places, strict=True)
        return replace(row, cells=tuple(replace(cell, mark=verdicts.get(place, cell.mark)) for cell, place in cells))

    return tuple(replace(block, rows=tuple(judged(block, row) for row in block.rows)) for block in blocks)


def _case(cell: Cell, margin: float) -> Case | None:
    """Return what has to be judged in a cell, or None."""
    if cell.mark != "open" or cell.difference is None or cell.published is None or cell.published.sd is None:
        return None
    difference = welch(Summary.of(cell.values), Summary(cell.published.mean, cell.published.sd, PAPER_SEEDS))
    return Case(difference, cell.published.rounding, margin, HIGHER_IS_BETTER[cell.metric])


def best_marked(rows: list[Row]) -> tuple[Row, ...]:
    """Mark the best cells of each metric, and no others."""
    fullest = next((scale for scale in SCALES if any(row.scale == scale for row in rows)), None)
    cells = [[replace(cell, best=False) for cell in row.cells] for row in rows]
    for column, metric in enumerate(METRICS):
        tested = [
            i
            for i, row in enumerate(rows)
            if row.scale == fullest and len(cells[i][column].values) >= TESTED_SEEDS and not _is_nan(cells[i][column])
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
    """Whether a Welch test finds a difference between two means."""
    return welch(Summary.of(a), Summary.of(b)).p_value() < SIGNIFICANCE
