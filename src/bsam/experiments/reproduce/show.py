"""Comparisons and studies as tables for the terminal."""

from __future__ import annotations

import math
from typing import Any

from rich import box
from rich.table import Table

from bsam.experiments.comparison import Block, Cell, Comparison, Improvement, Mark
from bsam.experiments.metric_columns import DECIMALS, TITLES, mean_and_sd, number, signed, values_of
from bsam.experiments.paper.beyond import settings_line

__all__ = [
    "BEST_NOTE",
    "block_table",
    "cell_lines",
    "counts_sentence",
    "improvement_lines",
    "point_rows",
    "scale_note",
    "scale_notes",
    "settings_notes",
    "study_tables",
    "tuning_rows",
    "tuning_sentence",
    "tuning_table",
]

BEST_NOTE = "Bold: the best, or not significantly worse (Welch, 5%). Rows with fewer than three seeds are not tested."
_ENSEMBLE_NOTE = (
    "Rows with “×” are ensembles: averages of the predictions of that many runs, and of the samples of each run. An "
    "ensemble has one number without a standard deviation, and is never bold."
)
_IMPROVEMENT_NOTE = (
    "Improvement: how much better the second row is than the first, ± half of Welch's 90% interval; below it, the "
    "paper's. A negative number is worse."
)
_NOTES = {
    "full": "",
    "reduced": "Fewer epochs than the paper's runs.",
    "tiny": "Tiny: embedded digits stand in for the paper's data. The numbers say nothing about the paper's.",
}


def scale_note(scale: str | None) -> str:
    """Return the note beside numbers of a scale."""
    return _NOTES[scale or "full"]


def scale_notes(block: Block) -> list[str]:
    """Return the notes about the scales of a block's rows."""
    return [note for scale in sorted({row.scale for row in block.rows if row.scale}) if (note := scale_note(scale))]


def settings_notes(block: Block) -> list[str]:
    """Describe the settings of our rows, except at the tiny scale, where the settings are others."""
    lines = [settings_line(row.preset) for row in block.rows if row.ours and row.preset and row.scale != "tiny"]
    lines += [_ENSEMBLE_NOTE for row in block.rows if row.members > 1]
    lines += [_IMPROVEMENT_NOTE] * bool(block.improvement)
    return list(dict.fromkeys(lines))  # several rows may have the same text


def counts_sentence(counts: dict[Mark, int]) -> str:
    """Say how many of a table's printed numbers have which mark."""
    always = ("equal", "better", "worse", "open", "not run")
    found = [f"{count} {mark}" for mark, count in counts.items() if count or mark in always]
    return f"Of {sum(counts.values())} printed numbers: {', '.join(found)}."


def cell_lines(cell: Cell) -> tuple[str, str, str]:
    """Return our number, the paper's, and the difference with its mark."""
    difference = "" if cell.difference is None else f"{signed(cell.metric, cell.difference)} "
    if cell.published is None:  # a row of ours
        return number(cell.metric, cell.mean, cell.sd), "—", ""
    return number(cell.metric, cell.mean, cell.sd), cell.published.printed, f"{difference}{cell.mark}"


def improvement_lines(improvement: Improvement) -> tuple[str, str]:
    """Return our improvement with its interval, and the paper's."""
    if improvement.ours is None:
        return "-", improvement.printed
    low, high = improvement.ours.interval()
    value, decimals = signed(improvement.metric, improvement.ours.value), DECIMALS[improvement.metric]
    return f"{value} ± {(high - low) / 2:.{decimals}f}", improvement.printed


def block_table(comparison: Comparison, block: Block) -> Table:
    """Make the table of a block, with three lines per row: ours, the paper's, the difference and its mark."""
    table = Table(
        title=f"{comparison.table}: {comparison.title}. {block.title}",
        caption="\n".join(scale_notes(block) + settings_notes(block)) or None,
        box=box.SIMPLE,
        show_edge=False,
        padding=(0, 1, 0, 0),  # fits 80 columns
    )
    table.add_column("ours", no_wrap=True)
    for title in TITLES.values():
        table.add_column(title, justify="right", no_wrap=True)
    for row in block.rows:
        ours, paper, verdicts = zip(*(cell_lines(cell) for cell in row.cells), strict=True)
        bold = [f"[bold]{text}[/bold]" if cell.best else text for text, cell in zip(ours, row.cells, strict=True)]
        table.add_row(row.label, *bold)
        table.add_row("[dim]paper[/dim]", *paper)
        table.add_row(f"[dim]{row.seeds} × {row.epochs} epochs[/dim]" if row.seeds else "", *verdicts, end_section=True)
    if block.improvement:
        ours, paper = zip(*(improvement_lines(each) for each in block.improvement), strict=True)
        table.add_row("improvement", *ours)
        table.add_row("[dim]paper[/dim]", *paper)
    return table


def study_tables(record: dict[str, Any]) -> list[Table]:
    """Make the tables of a sweep or an ablation: one table per series, one row per point."""
    tables = []
    for curve in record["series"]:
        table = Table(title=f"{record['title']}: {curve['label']}", box=box.SIMPLE, padding=(0, 1, 0, 0))
        for title in (record["x"], *TITLES.values()):
            table.add_column(title, justify="right", no_wrap=True)
        for row in point_rows(curve):
            table.add_row(*row)
        tables.append(table)
    return tables


def point_rows(curve: dict[str, Any]) -> list[list[str]]:
    """Return the rows of a curve: the place on the axis, and each metric."""
    metrics = curve["metrics"]
    return [[str(x), *(number(name, *metrics[name][i]) for name in TITLES)] for i, x in enumerate(curve["x"])]


def tuning_table(record: dict[str, Any]) -> Table:
    """Make the table of the tries of `bsam tune`, the best first."""
    table = Table(title=tuning_sentence(record), box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("settings")
    for metric in ("accuracy", "nll"):  # the other metrics are in the record
        table.add_column(TITLES[metric], justify="right", no_wrap=True)
    for settings, (accuracy, nll, *_) in tuning_rows(record):
        table.add_row(settings, accuracy, nll)
    return table


def tuning_rows(record: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Return settings and metrics of each try, the lowest NLL first."""
    rows = []
    for tried in sorted(record["tries"], key=lambda each: math.inf if each["nll"] is None else each["nll"]):
        ended = [word for word in ("diverged", "pruned") if any(word in seed for seed in tried["seeds"])]
        if ended:
            row = ended[:1] * len(TITLES)
        else:
            row = [number(metric, *mean_and_sd(values_of(tried["seeds"], metric))) for metric in TITLES]
        rows.append((", ".join(f"{name} = {value}" for name, value in tried["settings"].items()), row))
    return rows


def tuning_sentence(record: dict[str, Any]) -> str:
    """Say how many settings were tried, and how one was chosen."""
    seeds = len(record["tries"][0]["seeds"])
    size = f"{record['epochs']} epochs, {seeds} seed{'' if seeds == 1 else 's'}"
    part = f"{record['validation']:,} training examples that were held out"
    return f"{len(record['tries'])} settings, each with {size}, rated on {part}; chosen is {record['rule']}"
