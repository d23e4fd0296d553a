"""Tables of `results/out_of_the_box*.json` in Markdown: optimizers before anybody tunes them."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from bsam.experiments.record import read_json

__all__ = ["choice_markdown", "means_markdown", "problems_markdown", "rates_markdown"]

_NAMES = {"BSAM": "bSAM"}
_KINDS = {
    "defaults": "defaults",
    "converted-sgd": "from SGD's",
    "converted-adamw": "from AdamW's",
    "tuned-sgd": "from the best SGD's",
    "tuned-adamw": "from the best AdamW's",
    "random": "best of 8 random",
}


def means_markdown(record: dict[str, Any]) -> str:
    """Write one row per optimizer and kind of settings: means over the problems."""
    lines = [
        "| optimizer | settings | regret in accuracy | regret in NLL | ECE | failed runs | problems |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, cell in record["means"].items():
        optimizer, _, kind = row.partition(" ")
        numbers = [f"{cell['accuracy_regret']:.3f}", f"{cell['nll_regret']:.3f}", _number(cell["ece"])]
        failures = f"{cell['failures']} of {cell['runs']}"
        lines.append(
            f"| {_name(optimizer)} | {_kind(kind)} | {' | '.join(numbers)} | {failures} | {cell['problems']} |"
        )
    return "\n".join(lines)


def problems_markdown(record: dict[str, Any]) -> str:
    """Write accuracy (of a regression R^2) and NLL of each problem, with every optimizer's defaults."""
    shown = [row for row in record["means"] if row.endswith(" defaults")]
    titles = [_name(row.removesuffix(" defaults")) for row in shown]
    lines = [f"| problem | {' | '.join(titles)} |", f"|---{'|---' * len(titles)}|"]
    for problem, rows in record["summary"].items():
        cells = [f"{rows[row]['accuracy']:.3f} / {rows[row]['nll']:.3f}" if row in rows else "-" for row in shown]
        lines.append(f"| `{problem}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def choice_markdown(results: Path) -> str:
    """Write the means over all problems that are for choosing, of the rows that ran on all three sets of them."""
    sets = [
        read_json(results / f"out_of_the_box_{name}.json") for name in ("choosing", "few_choosing", "hard_choosing")
    ]
    lines = [
        "| optimizer | settings | regret in accuracy | regret in NLL | of ten problems | of few data | of hard starts "
        "| failed runs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in sets[0]["means"] if all(row in record["means"] for record in sets)):
        optimizer, _, kind = row.partition(" ")
        cells = [problem[row] for record in sets for problem in record["summary"].values()]
        numbers = [fmean(cell[name] for cell in cells) for name in ("accuracy_regret", "nll_regret")]
        numbers += [record["means"][row]["nll_regret"] for record in sets]
        failures = f"{sum(cell['failures'] for cell in cells)} of {sum(cell['seeds'] for cell in cells)}"
        columns = " | ".join(f"{number:.3f}" for number in numbers)
        lines.append(f"| {_name(optimizer)} | {_kind(kind)} | {columns} | {failures} |")
    return "\n".join(lines)


def rates_markdown(record: dict[str, Any]) -> str:
    """Write accuracy and NLL, averaged over the problems, of another optimizer and of bSAM by several rules."""
    lines = ["| optimizer, settings | accuracy | NLL |", "|---|---|---|"]
    for row, cell in record["means"].items():
        lines.append(f"| {row} | {cell['accuracy']:.3f} | {cell['nll']:.3f} |")
    return "\n".join(lines)


def _name(optimizer: str) -> str:
    return _NAMES.get(optimizer, optimizer)


def _kind(kind: str) -> str:
    return _KINDS.get(kind, kind.removeprefix("variant:"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
