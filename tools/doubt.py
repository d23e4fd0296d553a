"""Tables of the suites: what doubt is worth, by method, and how far the corruptions are from other packages'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bsam.experiments.doubt_table import COLUMNS, command_for, doubt_rows, score_rows
from bsam.experiments.report.demo_doubt import doubt_lines

__all__ = ["corruptions_markdown", "demo_markdown", "doubt_markdown", "scores_markdown"]

_TABLE, _BLOCK = "table1", "cifar10"


def doubt_markdown(results: Path) -> str:
    """Write one row per method and ensemble, with the numbers of all suites."""
    rows = doubt_rows(results / "runs", _TABLE, _BLOCK)
    if not rows:
        return f"Not recorded yet: `{command_for(_TABLE, _BLOCK)}`."
    lines = [
        f"| method | gradients per step | {' | '.join(column.title for column in COLUMNS)} |",
        f"|---|---{'|---' * len(COLUMNS)}|",
    ]
    for row in rows:
        cells = " | ".join(row.cell(column) for column in COLUMNS)
        lines.append(f"| {row.label}<br>{row.about} | {row.gradients} | {cells} |")
    return "\n".join(lines)


def scores_markdown(results: Path) -> str:
    """Write the AUROC of near and far unknown inputs by each score of doubt."""
    rows = doubt_rows(results / "runs", _TABLE, _BLOCK)
    if not rows:
        return f"Not recorded yet: `{command_for(_TABLE, _BLOCK)}`."
    heads, lines = score_rows(rows)
    head = [f"| method | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    return "\n".join([*head, *(f"| {' | '.join(line)} |" for line in lines)])


def demo_markdown(record: dict[str, Any]) -> str:
    """Write what the methods' doubt is worth on the digits of the demo."""
    if "pairs" not in record:  # a record of an earlier version
        return "Not recorded yet: `bsam demo`."
    heads = ["errors ↓", "of the surest 90% ↓", "mirrored digits, AUROC ↑", "photographs, AUROC ↑"]
    lines = [f"| method | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(row)} |" for name, row in doubt_lines(record))])


def corruptions_markdown(record: dict[str, Any]) -> str:
    """Write the largest mean difference of each kind, beside the smallest change that the corruption makes."""
    lines = ["| corruption | mean difference | largest difference | mean change |", "|---|---|---|---|"]
    for kind, rows in record["kinds"].items():
        mean, largest = max(row["mean"] for row in rows), max(row["largest"] for row in rows)
        changes = [row["change"] for row in rows]
        lines.append(
            f"| {kind.replace('_', ' ')} | {mean:.3f} | {largest} | {min(changes):.1f} to {max(changes):.1f} |"
        )
    return "\n".join(lines)
