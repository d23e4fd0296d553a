"""The report's section on doubt: curves of rejection, unknown inputs and corruptions, and one table of all suites."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes

from bsam.experiments.corruptions import STRENGTHS
from bsam.experiments.doubt_table import COLUMNS, DoubtRow, Suites, command_for, doubt_rows
from bsam.experiments.methods import METHODS
from bsam.experiments.report.diagrams import draw_svg
from bsam.experiments.suites.ratings import COVERAGES, HISTOGRAM

__all__ = ["doubt_section"]

_OURS = METHODS["bsam"].title
_STRENGTH_TITLES = {"accuracy": "accuracy, percent", "nll": "NLL", "ece": "ECE"}


def doubt_section(records: Path) -> dict[str, Any]:
    """Return the values of `doubt.html.j2`; without records, the command that makes them."""
    rows = doubt_rows(records)
    return {
        "command": command_for("table1", "cifar10"),
        "heads": [column.title for column in COLUMNS],
        "rows": [(row.label, row.about, row.gradients, [row.cell(column) for column in COLUMNS]) for row in rows],
        "curves": list(_curves(_drawn(rows))),
        "histograms": [(row.label, _histograms(row)) for row in _drawn(rows) if _all_have(row, "unknown")],
    }


def _drawn(rows: Sequence[DoubtRow]) -> list[DoubtRow]:
    """Return the rows of the figures: all methods, and ensembles of the first one and of bSAM; the table has all."""
    wanted = {rows[0].label, _OURS} if rows else set()
    return [row for row in rows if "×" not in row.label or row.label.partition(" × ")[2] in wanted]


def _all_have(row: DoubtRow, suite: str) -> bool:
    return all(suite in each for each in row.suites)


def _curves(rows: Sequence[DoubtRow]) -> list[tuple[str, Markup]]:
    """Return title and drawing: risk against coverage, then accuracy, NLL and ECE against the strength."""
    rejecting = [row for row in rows if _all_have(row, "rejection")]
    corrupted = [row for row in rows if _all_have(row, "corruptions")]
    curves = []
    if rejecting:
        curves.append(
            (
                "Errors among the accepted predictions, in percent, against the share that is accepted",
                _lines(
                    rejecting,
                    COVERAGES,
                    lambda each: [100 * risk for risk in each["rejection"]["risk"]],
                    ("coverage", "risk, percent"),
                    "Risk against coverage",
                ),
            )
        )
    for metric, title in _STRENGTH_TITLES.items() if corrupted else ():
        factor = 100 if metric == "accuracy" else 1
        curves.append(
            (
                f"Over all 15 corruptions, the mean of: {title}",
                _lines(
                    corrupted,
                    STRENGTHS,
                    lambda each, metric=metric, factor=factor: [  # type: ignore[misc]
                        factor * statistics.fmean(kind[metric][k] for kind in each["corruptions"]["kinds"].values())
                        for k in range(len(STRENGTHS))
                    ],
                    ("strength of the corruption", title),
                    f"{title} against the strength of corruptions",
                ),
            )
        )
    return curves


def _lines(
    rows: Sequence[DoubtRow],
    x: Sequence[float],
    values: Callable[[Suites], list[float]],
    axis_names: tuple[str, str],
    label: str,
) -> Markup:
    """Draw one line per row: the mean over its runs or ensembles. Pairs are dashed, larger ensembles dotted."""

    def draw(axes: Axes) -> None:
        colours: dict[str, str] = {}
        for row in rows:
            size, _, method = row.label.rpartition(" × ")
            colour = colours.setdefault(method, f"C{len(colours) % 10}")
            found = [values(each) for each in row.suites]
            y = [statistics.fmean(column) for column in zip(*found, strict=True)]
            style = {"": "-", "2": "--"}.get(size, ":")
            axes.plot(
                x, y, style, color=colour, linewidth=2 if method == _OURS or style == ":" else 1.2, label=row.label
            )
        axes.set(xlabel=axis_names[0], ylabel=axis_names[1])
        if len(x) == len(STRENGTHS):
            axes.set_xticks(x)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize="x-small")

    return draw_svg(draw, size=(4.6, 3.9), label=label)


def _histograms(row: DoubtRow) -> Markup:
    """Draw the shares of the largest probability: of test images, of near and of far unknown images."""

    def shares(counts: Sequence[Sequence[int]]) -> list[float]:
        totals = [sum(column) for column in zip(*counts, strict=True)]
        return [count / sum(totals) for count in totals]

    def draw(axes: Axes) -> None:
        edges = [k / HISTOGRAM for k in range(HISTOGRAM + 1)]
        found = [each["unknown"] for each in row.suites]
        axes.stairs(
            shares([each["known"]["histogram"] for each in found]), edges, label="test images", fill=True, alpha=0.6
        )
        for kind, colour in (("near", "C1"), ("far", "C3")):
            counts = [s["histogram"] for each in found for s in each["sets"].values() if s["kind"] == kind]
            if counts:
                axes.stairs(shares(counts), edges, label=f"{kind} unknown", color=colour, linewidth=1.5)
        axes.set(xlabel="largest probability", ylabel="share", xlim=(0, 1), ylim=(0, 1))
        axes.legend(loc="upper left", frameon=False, fontsize="small")

    return draw_svg(draw, size=(3.0, 2.5), label=f"Largest probabilities of {row.label}")
