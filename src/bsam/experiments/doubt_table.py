"""What doubt is worth: the numbers of the suites, one row per method, per ensemble of two, and per ensemble of all.

The rows are those of a block of the paper's tables. A method's numbers are over the seeds whose records have suites.
Two runs of a method with one gradient per step cost as much as one run of bSAM or SAM, so they are a row, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bsam.experiments.methods import METHODS
from bsam.experiments.metric_columns import mean_and_sd
from bsam.experiments.paper.beyond import all_tables, beyond
from bsam.experiments.paper.presets import preset
from bsam.experiments.record import read_json
from bsam.experiments.recorded_runs import recorded, same_run
from bsam.experiments.suites import SUITES

__all__ = ["COLUMNS", "Column", "DoubtRow", "command_for", "doubt_rows", "score_rows"]

Suites = Mapping[str, Mapping[str, Any]]
"""By suite: the numbers of one run or ensemble."""


@dataclass(frozen=True)
class Column:
    """One number of the table."""

    title: str
    decimals: int
    suite: str

    def value(self, suites: Suites) -> float | None:
        """Return the number of a run or an ensemble; None if it has not evaluated the suite."""
        return _VALUES[self.title](suites[self.suite]) if self.suite in suites else None


@dataclass(frozen=True)
class DoubtRow:
    """The numbers of a method, or of ensembles of its runs."""

    label: str
    gradients: int
    """Gradients per step of all runs together: what training costs."""
    about: str
    """How many runs or ensembles it has."""
    suites: tuple[Suites, ...]
    """Of each run or ensemble."""

    def cell(self, column: Column) -> str:
        """Write mean (sd) of a column; without sd for a single ensemble."""
        values = tuple(value for each in self.suites if (value := column.value(each)) is not None)
        mean, sd = mean_and_sd(values)
        if mean is None:
            return "-"
        return f"{mean:.{column.decimals}f}" + ("" if sd is None else f" ({sd:.{column.decimals}f})")


def _near(numbers: Mapping[str, Any]) -> float:
    return mean_auroc(numbers, "near", "confidence")


def _far(numbers: Mapping[str, Any]) -> float:
    return mean_auroc(numbers, "far", "confidence")


def mean_auroc(numbers: Mapping[str, Any], kind: str, score: str) -> float:
    """Return the mean AUROC, in percent, of the near or the far unknown sets."""
    sets = [each for each in numbers["sets"].values() if each["kind"] == kind]
    return 100 * statistics.fmean(each["scores"][score]["auroc"] for each in sets)


_VALUES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "near AUROC ↑": _near,
    "far AUROC ↑": _far,
    "shift: accuracy ↑": lambda numbers: 100 * numbers["mean"]["accuracy"],
    "shift: NLL ↓": lambda numbers: numbers["mean"]["nll"],
    "shift: ECE ↓": lambda numbers: numbers["mean"]["ece"],
    "rejection: area ↓": lambda numbers: 100 * numbers["scores"]["confidence"]["area"],
    "rejection: accuracy of 90% ↑": lambda numbers: 100 * numbers["scores"]["confidence"]["accuracy_90"],
    "people ↓": lambda numbers: numbers["cross_entropy"],
}

COLUMNS = (
    Column("near AUROC ↑", 2, "unknown"),
    Column("far AUROC ↑", 2, "unknown"),
    Column("shift: accuracy ↑", 2, "corruptions"),
    Column("shift: NLL ↓", 3, "corruptions"),
    Column("shift: ECE ↓", 4, "corruptions"),
    Column("rejection: area ↓", 3, "rejection"),
    Column("rejection: accuracy of 90% ↑", 2, "rejection"),
    Column("people ↓", 4, "human"),
)
"""AUROC, accuracies and the area under risk and coverage are in percent."""


def command_for(table: str, block: str) -> str:
    """Return the command that makes the records."""
    return f"bsam reproduce {table} --block {block} --seeds 5 --first-seed 5 --suite shift"


def doubt_rows(records: Path, table: str = "table1", block: str = "cifar10") -> list[DoubtRow]:
    """Return the rows of a block that have suites: methods, then ensembles of two, then of all."""
    (found,) = (each for each in all_tables()[table].blocks if each.name == block)
    methods, pairs, ensembles = [], [], []
    for row in found.rows:
        if row.preset in beyond():
            continue
        folder, samples = records / same_run(row.preset)[0], row.samples
        gradients = METHODS[preset(row.preset).method].gradients
        runs = list(_with_suites((run.suites for run in recorded(records, row.preset, "full").values()), samples))
        if runs:
            methods.append(DoubtRow(row.label, gradients, f"{len(runs)} seeds", tuple(runs)))
        two = _read(folder / "pairs.json")
        of_two = list(_with_suites((pair["suites"] for pair in two.get("pairs", ())), samples))
        if of_two and gradients == 1:
            pairs.append(DoubtRow(f"2 × {row.label}", 2, f"{len(of_two)} pairs", tuple(of_two)))
        whole = _read(folder / "ensemble.json")
        of_all = list(_with_suites([whole.get("suites", {})], samples))
        if of_all:
            members = whole["members"]
            ensembles.append(DoubtRow(f"{members} × {row.label}", members * gradients, "one ensemble", tuple(of_all)))
    return [*methods, *pairs, *ensembles]


def _read(path: Path) -> dict[str, Any]:
    record = read_json(path) if path.is_file() else {}
    return record if record.get("scale", "full") == "full" else {}


def _with_suites(found: Iterable[Mapping[str, Any]], samples: int) -> Iterator[Suites]:
    for suites in found:
        names = {suite: str(*SUITES[suite].counts([samples])) for suite in suites}
        numbers = {suite: each[names[suite]] for suite, each in suites.items() if names[suite] in each}
        if numbers:
            yield numbers


def score_rows(rows: Sequence[DoubtRow]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of near and far AUROC by each score of doubt."""
    scores = {
        "confidence": "largest probability",
        "entropy": "entropy",
        "mutual_information": "mutual information",
        "energy": "energy",
    }
    heads = [f"{kind}, {title}" for kind in ("near", "far") for title in scores.values()]
    lines = []
    for row in rows:
        cells = []
        for kind in ("near", "far"):
            for score in scores:
                values = tuple(
                    mean_auroc(each["unknown"], kind, score)
                    for each in row.suites
                    if "unknown" in each and all(score in s["scores"] for s in each["unknown"]["sets"].values())
                )
                mean, _ = mean_and_sd(values)
                cells.append("-" if mean is None else f"{mean:.2f}")
        lines.append([row.label, *cells])
    return heads, lines
