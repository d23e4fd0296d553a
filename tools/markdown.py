"""Tables in Markdown, for README and docs: comparisons, studies, tunings and the demo."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bsam.experiments.comparison import MARKS, Block, Cell, Comparison, Row, best_marked
from bsam.experiments.demo import cells
from bsam.experiments.metric_columns import TITLES
from bsam.experiments.paper.results import margins
from bsam.experiments.reproduce.show import (
    cell_lines,
    counts_sentence,
    improvement_lines,
    point_rows,
    scale_note,
    scale_notes,
    settings_notes,
    tuning_rows,
    tuning_sentence,
)

__all__ = [
    "block_markdown",
    "comparison_markdown",
    "counts_markdown",
    "demo_markdown",
    "margins_markdown",
    "study_markdown",
    "tuning_markdown",
]

_HEAD = (f"| method | {' | '.join(TITLES.values())} |", f"|---{'|---' * len(TITLES)}|")


def comparison_markdown(comparison: Comparison) -> str:
    """Write the blocks of a table; a cell has our number, the paper's, and the difference with its mark."""
    parts = [counts_sentence(comparison.counts)]
    for block in comparison.blocks:
        parts.append(f"**{block.title}**")
        if not any(row.seeds for row in block.rows):
            parts.append(f"Not recorded yet: `bsam reproduce {comparison.table} --block {block.name}`.")
            continue
        lines = [*_HEAD]
        for row in block.rows:
            name = f"{row.label}<br>{_extent(row)}" if row.seeds else row.label
            lines.append(f"| {name} | {' | '.join(_markdown(cell) for cell in row.cells)} |")
        if block.improvement:
            shown = ("<br>".join(improvement_lines(each)) for each in block.improvement)
            lines.append(f"| *improvement* | {' | '.join(shown)} |")
        parts.append("\n".join(lines))
        parts += scale_notes(block) + settings_notes(block)
    return "\n\n".join(parts)


def counts_markdown(comparisons: list[Comparison]) -> str:
    """Write how many numbers of each table, and of all tables, have which mark."""
    names = [f"{comparison.table.replace('table', 'table ')}: {comparison.title}" for comparison in comparisons]
    counts = [comparison.counts for comparison in comparisons]
    total = {mark: sum(each[mark] for each in counts) for mark in MARKS}
    lines = [f"| | numbers | {' | '.join(MARKS)} |", f"|---|---{'|---' * len(MARKS)}|"]
    for name, each in [*zip(names, counts, strict=True), ("all", total)]:
        lines.append(f"| {name} | {sum(each.values())} | {' | '.join(map(str, each.values()))} |")
    return "\n".join(lines)


def margins_markdown(comparisons: list[Comparison]) -> str:
    """Write the margins of each block."""
    lines = [f"| block | {' | '.join(title[:-2] for title in TITLES.values())} |", f"|---{'|---' * len(TITLES)}|"]
    for comparison in comparisons:
        for block in comparison.blocks:
            found = margins()[comparison.table][block.name]
            name = f"{comparison.table.replace('table', 'table ')}, {block.title}"
            lines.append(f"| {name} | {' | '.join(f'{found[metric]:g}' for metric in TITLES)} |")
    return "\n".join(lines)


def block_markdown(block: Block, *, of_the_paper: bool = False) -> str:
    """Write the recorded rows of one block, or only those of the paper; a cell has our number and the paper's."""
    if of_the_paper:
        block = replace(block, rows=best_marked([row for row in block.rows if not row.ours]))
    lines = [*_HEAD]
    for row in block.rows:
        if row.seeds and row.scale == "full":
            cells = [(*cell_lines(cell)[:2], cell.best) for cell in row.cells]
            shown = [f"{f'**{ours}**' if best else ours}<br>*{printed}*" for ours, printed, best in cells]
            lines.append(f"| {row.label} | {' | '.join(shown)} |")
    if len(lines) == len(_HEAD):
        return "Not recorded yet."
    recorded = replace(block, rows=tuple(row for row in block.rows if row.seeds))
    return "\n\n".join(["\n".join(lines), *settings_notes(recorded)])


def _markdown(cell: Cell) -> str:
    ours, *rest = filter(None, cell_lines(cell))
    return "<br>".join([f"**{ours}**" if cell.best else ours, *rest])


def tuning_markdown(record: dict[str, Any]) -> str:
    """Write the tries of `bsam tune`; the chosen one is bold."""
    lines = [f"{tuning_sentence(record)}.", "", f"| settings | {' | '.join(TITLES.values())} |", "|---" * 5 + "|"]
    for i, (settings, row) in enumerate(tuning_rows(record)):
        lines.append(f"| {f'**{settings}**' if i == 0 and record['chosen'] else settings} | {' | '.join(row)} |")
    return "\n".join(lines)


def study_markdown(record: dict[str, Any]) -> str:
    """Write the table of a sweep or an ablation."""
    lines = [f"| | {record['x']} | {' | '.join(TITLES.values())} |", f"|---|---{'|---' * len(TITLES)}|"]
    lines += [f"| {' | '.join([curve['label'], *row])} |" for curve in record["series"] for row in point_rows(curve)]
    note = scale_note(record["scale"])
    return "\n".join([*lines, *(["", note] if note else [])])


def demo_markdown(record: dict[str, Any]) -> str:
    """Write the table of `bsam demo`."""
    return "\n".join([*_HEAD, *(f"| {name} | {' | '.join(row)} |" for name, row in cells(record))])


def _extent(row: Row) -> str:
    if row.members > 1:
        return f"one ensemble, {row.epochs} epochs"
    seeds = f"{row.seeds} seed{'' if row.seeds == 1 else 's'}"
    return f"{seeds}, {row.epochs} epochs" if row.epochs is not None else ""
