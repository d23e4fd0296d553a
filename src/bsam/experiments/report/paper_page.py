"""The page of `bsam report`: the paper's tables beside ours, diagrams, curves, and the figures of the theory.

The page begins with pictures of all numbers. It shows only records, files of `results/`: `runs/PRESET/seedK.json`,
`sweep_*.json`, `ablate_*.json`, `tuning_cifar10.json`, `demo.json` and `figures.json`. A missing record is shown as
missing, with the command that makes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

import bsam
from bsam.experiments import demo
from bsam.experiments.comparison import TABLES, TESTED_SEEDS, Block, Cell, Comparison, Mark, Row, compare
from bsam.experiments.config import from_mapping
from bsam.experiments.methods import METHODS
from bsam.experiments.metric_columns import TITLES, number, signed
from bsam.experiments.paper.presets import preset
from bsam.experiments.paper.results import PAPER_SEEDS
from bsam.experiments.record import read_json
from bsam.experiments.recorded_runs import recorded
from bsam.experiments.report.diagrams import draw_curves, draw_reliability
from bsam.experiments.report.doubt_section import doubt_section
from bsam.experiments.report.overview import draw_panels
from bsam.experiments.report.page import write_page
from bsam.experiments.reproduce.show import (
    improvement_lines,
    scale_note,
    scale_notes,
    settings_notes,
    tuning_rows,
    tuning_sentence,
)
from bsam.experiments.reproduce.studies import ABLATIONS, Study, collect, sweep_rho

__all__ = ["write_paper_page"]

_MARKS: dict[Mark, tuple[str, str]] = {
    "equal": (
        "=",
        "The 90% interval of the difference, widened by the print's rounding, lies inside the block's margin.",
    ),
    "better": ("▲", "Better than the paper's number: Welch's test at 5%, with Holm's correction for the table."),
    "worse": ("▼", "Worse than the paper's number, by the same test."),
    "open": ("?", "Neither: these seeds, ours and the paper's, do not decide it."),
    "reduced": ("◐", "Fewer epochs than the paper's, fewer than three seeds, or (tiny) other data: not judged."),
    "not run": ("–", "We have no run of this number."),
}
"""Symbol and meaning of each mark; `bsam.experiments.comparison` decides which mark a cell has."""


@dataclass(frozen=True)
class _Number:
    """A cell of the page."""

    value: float | None
    """The number to sort by, or None."""
    ours: str
    paper: str = ""
    mark: Mark | None = None
    """None if the paper does not print this number."""
    difference: str = ""
    words: str = ""
    """The mark in words."""
    best: bool = False


@dataclass(frozen=True)
class _Line:
    """A row of the page: numbers, and below them a description of the runs."""

    name: str
    cells: list[_Number]
    about: str = ""
    note: str = ""
    """What it has less than the paper's runs."""
    command: str = ""
    ran: bool = True
    shaded: bool = False
    """Whether it is the paper's method, bSAM."""


def _no_progress(what: str) -> None:
    pass


def write_paper_page(path: Path, records: Path, figures: Path, progress: Callable[[str], None] = _no_progress) -> Path:
    """Write the page.

    Args:
        path: The file to write.
        records: Folder of the runs' records; the other records are beside it, or in it.
        figures: Folder of the theory's figures, as `bsam figure all --out FOLDER` writes them.
        progress: Called with the name of what is read or drawn next.
    """
    from bsam.experiments.report.gallery import gallery  # needs the extra `theory`

    if not records.is_dir():
        raise FileNotFoundError(f"{records} is no folder of records: name one with --records, or run `bsam reproduce`.")
    progress(records.as_posix())
    environments = [read_json(file)["environment"] for file in sorted(records.rglob("seed*.json"))]
    comparisons = [compare(name, records) for name in TABLES]
    total = {mark: sum(comparison.counts[mark] for comparison in comparisons) for mark in _MARKS}
    progress("overview")
    panels = draw_panels(comparisons)
    tables = []
    for comparison in comparisons:
        progress(comparison.table)
        tables.append(_table(comparison, records))
    studies: list[dict[str, Any]] = []
    missing: list[dict[str, Any]] = []
    for study in (sweep_rho("full"), *(make() for make in ABLATIONS.values())):
        progress(study.file)
        found = _study(study, records)
        (studies if found["rows"] else missing).append(found)
    progress("doubt")
    doubt = doubt_section(records)
    progress(path.as_posix())
    return write_page(
        path,
        "paper.html.j2",
        script="sort.js",
        heads=list(TITLES.values()),
        marks=_MARKS,
        records=records.as_posix(),
        panels=panels,
        tables=tables,
        total=total,
        num_judged=sum(count for mark, count in total.items() if mark != "not run"),
        num_runs=len(environments),
        studies=studies,
        missing=missing,
        doubt=doubt,
        tuning=_tuning(_beside(records, "tuning_cifar10.json")),
        demo=_demo(_beside(records, "demo.json")),
        pictures=list(gallery(figures)),
        theory=_theory(_beside(records, "figures.json")),
        machines=Counter(_machine(environment) for environment in environments),
    )


def _beside(records: Path, name: str) -> dict[str, Any] | None:
    """Read another record: beside the folder of the runs as in `results/`, or inside, where --records puts a study."""
    return next((read_json(path) for path in (records / name, records.parent / name) if path.is_file()), None)


# ------------------------------------------------------------------ tables


def _table(comparison: Comparison, records: Path) -> dict[str, Any]:
    return {
        "id": comparison.table,
        "title": f"Table {comparison.table.removeprefix('table')}: {comparison.title}",
        "counts": comparison.counts,
        "blocks": [
            {
                "title": block.title,
                "notes": scale_notes(block),
                "settings": settings_notes(block),
                "rows": [*(_line(row) for row in block.rows), *_improvement(block)],
                "diagrams": list(_diagrams(comparison.table, block, records)),
            }
            for block in comparison.blocks
        ],
    }


def _line(row: Row) -> _Line:
    if not row.seeds:
        cells = [_Number(None, "– not run", _printed(cell)) for cell in row.cells]
        return _Line(row.label, cells, "Not run", command=row.command, ran=False, shaded=_is_bsam(row))
    cells = [_number(cell, "tiny" if row.scale == "tiny" else cell.mark or "") for cell in row.cells]
    if row.members > 1:
        return _Line(row.label, cells, f"One ensemble of {row.members} runs")
    parts = [_count(row.seeds, "seed"), _count(row.epochs, "epoch")]
    if row.preset and not METHODS[preset(row.preset).method].is_point:
        parts.append(_count(row.samples, "posterior sample"))
    if row.seconds is not None:
        parts.append(f"{_duration(row.seconds)} per run")
    return _Line(row.label, cells, ", ".join(parts), _cut(row), row.command, shaded=_is_bsam(row))


def _is_bsam(row: Row) -> bool:
    return row.label == METHODS["bsam"].title


def _improvement(block: Block) -> Iterator[_Line]:
    """Yield the line of the improvement, if the paper prints it and we have it."""
    if any(each.ours for each in block.improvement):
        cells = [_Number(None, *improvement_lines(each)) for each in block.improvement]
        yield _Line("improvement", cells)


def _printed(cell: Cell) -> str:
    return cell.published.printed if cell.published else "—"


def _number(cell: Cell, words: str) -> _Number:
    paper = _printed(cell)
    if cell.mean is None or math.isnan(cell.mean):  # like the AUROC of runs without a mistake
        return _Number(None, "undefined", paper)
    difference = "" if cell.difference is None else signed(cell.metric, cell.difference)
    return _Number(cell.mean, number(cell.metric, cell.mean, cell.sd), paper, cell.mark, difference, words, cell.best)


def _cut(row: Row) -> str:
    """Say what the runs of a row have less than the paper's."""
    if row.scale == "tiny":
        return "Tiny: not the paper's data."
    cuts = []
    if row.scale == "reduced":
        whole = preset(row.preset).total_epochs if row.preset else None
        cuts.append(f"{row.epochs} of {whole} epochs" if row.epochs != whole else "other settings than the preset's")
    if row.seeds < PAPER_SEEDS:
        cuts.append(f"{row.seeds} of {PAPER_SEEDS} seeds")
    reduced = row.scale == "reduced" or row.seeds < TESTED_SEEDS
    return f"{'Reduced: ' if reduced else ''}{' and '.join(cuts)}." if cuts else ""


def _count(number: int | None, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _diagrams(table: str, block: Block, records: Path) -> Iterator[tuple[str, str, Markup]]:
    """Draw the reliability diagram of the first seed of each row, if its bins are recorded."""
    for row in block.rows:
        samples = str(row.samples)
        for run in recorded(records, row.preset).values() if row.preset else ():
            if "reliability" in run.test.get(samples, {}):
                bins = bsam.metrics.ReliabilityTable.from_rows(run.test[samples]["reliability"])
                label = f"Reliability diagram of {row.label} in {table}, {block.title}"
                caption = f"The ECE of seed {run.seed} is {run.test[samples]['ece']:.4f}."
                yield row.label, caption, draw_reliability(bins, label=label)
                break


def _demo(record: dict[str, Any] | None) -> list[_Line]:
    """Return the rows of the demo's record."""
    if record is None:
        return []
    lines = []
    for (name, row), result in zip(demo.cells(record), record["methods"].values(), strict=True):
        numbers = [_Number(float(cell.split()[0]), cell) for cell in row]
        seeds, epochs = record["seeds"], from_mapping(result["config"]).total_epochs
        about = f"{_count(seeds, 'seed')}, {_count(epochs, 'epoch')}, {_duration(result['seconds'] / seeds)} per run"
        shaded = result["config"]["method"] == "bsam"
        lines.append(_Line(name, numbers, about, command=f"bsam demo --seeds {seeds}", shaded=shaded))
    return lines


def _tuning(record: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the tries of `bsam tune`, the best first."""
    if record is None:
        return None
    rows = [
        _Line(settings, [_Number(float(cell.split()[0]) if cell[0].isdigit() else None, cell) for cell in cells])
        for settings, cells in tuning_rows(record)
    ]
    about = f"{tuning_sentence(record)}. {_duration(record['seconds'])} of training."
    return {"about": about, "rows": rows, "command": record["command"]}


# ------------------------------------------------------------------ curves


def _study(study: Study, records: Path) -> dict[str, Any]:
    """Return the curves and the numbers of a sweep or an ablation; without its record, those of the runs of tables."""
    record = _beside(records, f"{study.file}.json")
    if record is None:
        record = collect(study, "full", records, study.command)
        if all(len(curve["x"]) < 2 for curve in record["series"]):  # a single point is no curve
            return {"title": study.title, "command": study.command, "rows": []}
    title, x_name = record["title"], record["x"]
    rows = []
    for curve in record["series"]:
        for x, *points in zip(curve["x"], *(curve["metrics"][metric] for metric in TITLES), strict=True):
            cells = [_Number(mean, number(metric, mean, sd)) for metric, (mean, sd) in zip(TITLES, points, strict=True)]
            rows.append(_Line(f"{curve['label']}, {x_name} = {x}", cells))
    return {
        "title": title,
        "note": scale_note(record["scale"]),
        "command": record["command"],
        "x": x_name,
        "diagrams": [(head, draw_curves(record, metric, label=f"{title}: {head}")) for metric, head in TITLES.items()],
        "rows": rows,
    }


# ------------------------------------------------------------------ theory


def _theory(record: dict[str, Any] | None) -> dict[str, list[tuple[str, str]]]:
    """Return the numbers behind the figures: by figure, pairs of name and value."""
    figures = {name: values for name, values in (record or {}).items() if name not in ("seconds", "environment")}
    return {name.replace("_", " "): list(_flat(values)) for name, values in figures.items()}


def _flat(values: dict[str, Any] | list[dict[str, Any]], prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(values, list):
        values = {str(number): value for number, value in enumerate(values, start=1)}
    for name, value in values.items():
        full = prefix + name.replace("_", " ")
        if isinstance(value, dict):
            yield from _flat(value, f"{full}: ")
        else:
            listed = value if isinstance(value, list) else [value]
            yield full, ", ".join("not finite" if x is None else f"{x:g}".replace("-", "−", x < 0) for x in listed)


def _machine(environment: dict[str, Any]) -> str:
    commit = f" at {environment['commit'][:12]}" if environment["commit"] else ""
    device = environment["device"].replace(" 1 threads", " 1 thread")  # as older records have it
    return f"bsam {environment['bsam']}{commit}, torch {environment['packages']['torch']}, {device}"
