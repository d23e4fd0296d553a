"""Sweeps and ablations: four metrics as functions of one setting.

`sweep rho` is the paper's figure of sensitivity. The ablations of noise, samples and splits are its tables 3, 4 and 5.
The ablation of the curvature compares the two readings of Algorithm 1 (see `bsam.BSAM`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bsam.experiments.choices import SCALES, Scale
from bsam.experiments.methods import METHODS
from bsam.experiments.metric_columns import mean_and_sd, values_of
from bsam.experiments.paper.results import METRICS, PAPER_SAMPLES, paper_tables
from bsam.experiments.record import environment, read_json
from bsam.experiments.reproduce.plan import Wanted, find_recorded

__all__ = ["ABLATIONS", "Point", "Study", "collect", "refuse_to_replace", "sweep_rho"]

_SPLITS = (1, 2, 4, 8, 16)
_COUNTS = (0, 1, 2, 4, 8, 16, 32, 64, 512, 2048)
_RHO_FACTOR = 100
"""bSAM's rho is not normalised by the gradient's length; the paper draws it at 100 rho, as we do."""


@dataclass(frozen=True)
class Point:
    """One place on the horizontal axis, and its run."""

    x: float | str
    wanted: Wanted
    samples: int = PAPER_SAMPLES


@dataclass(frozen=True)
class Study:
    """Curves, each a list of points."""

    kind: str
    """`sweep` or `ablate`."""
    what: str
    """The setting that changes."""
    title: str
    x: str
    series: dict[str, tuple[Point, ...]]

    @property
    def file(self) -> str:
        """Name of its JSON and of its figure, without the ending."""
        return f"{self.kind}_{self.what}"

    @property
    def command(self) -> str:
        """The command that runs it."""
        return f"bsam {self.kind} {self.what}"

    @property
    def wanted(self) -> list[Wanted]:
        """All runs."""
        return [point.wanted for points in self.series.values() for point in points]


def sweep_rho(scale: Scale) -> Study:
    """Make the study of SAM-SGD, SAM-Adam and bSAM over rho, on CIFAR-100 without augmentation."""
    grid = (0.05, 0.1, 0.2, 0.5, 1.0, 3.0) if scale == "tiny" else (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)

    def points(method: str, factor: float) -> tuple[Point, ...]:
        names = [f"{x / factor:g}" for x in grid]
        preset = f"table1/cifar100/{method}"
        return tuple(
            Point(x, Wanted(preset, (PAPER_SAMPLES,), (f"rho={rho}",), f"sweep/rho/{method}-{rho}"))
            for x, rho in zip(grid, names, strict=True)
        )

    series = {METHODS[method].title: points(method, 1) for method in ("sam-sgd", "sam-adam")}
    series[f"{METHODS['bsam'].title}, at {_RHO_FACTOR} ρ"] = points("bsam", _RHO_FACTOR)
    return Study("sweep", "rho", "Sensitivity to ρ", "ρ", series)


def _noise() -> Study:
    blocks = paper_tables()["table3"].blocks
    series = {
        label: tuple(
            Point(block.title.rpartition(" ")[2], Wanted(block.rows[row].preset, (PAPER_SAMPLES,))) for block in blocks
        )
        for row, label in enumerate(("bSAM without noise", "bSAM"))
    }
    return Study("ablate", "noise", "With and without noise", "data", series)


def _samples() -> Study:
    points = tuple(Point(count, Wanted("table1/cifar10/bsam", (count,)), count) for count in _COUNTS)
    title, x = "Number of posterior samples", "samples (0: the mean)"
    return Study("ablate", "samples", title, x, {"bSAM": points})


def _splits() -> Study:
    series = {
        METHODS[method].title: tuple(
            Point(m, Wanted(f"table5/cifar100/{method}-{m}", (PAPER_SAMPLES,))) for m in _SPLITS
        )
        for method in ("bsam", "sam-sgd")
    }
    return Study("ablate", "splits", "m-sharpness", "splits", series)


def _curvature() -> Study:
    def points(curvature: str) -> tuple[Point, ...]:
        names = {m: f"ablate/curvature/{curvature}-{m}" for m in _SPLITS}
        changes = (f"curvature={curvature}",)
        return tuple(
            Point(m, Wanted(f"table5/cifar100/bsam-{m}", (PAPER_SAMPLES,), changes, name)) for m, name in names.items()
        )

    series = {"mean of |g|, as the authors' code": points("mean_abs"), "|mean of g|, as printed": points("abs_mean")}
    title = "Curvature: absolute value before or after the mean over splits"
    return Study("ablate", "curvature", title, "splits", series)


_ABLATIONS = (_noise, _samples, _splits, _curvature)
ABLATIONS: dict[str, Callable[[], Study]] = {make.__name__.removeprefix("_"): make for make in _ABLATIONS}
"""The functions that make the ablations, by name."""


def collect(study: Study, scale: Scale, records: Path, command: str) -> dict[str, Any]:
    """Make the study's record from the records of its runs: mean and sd (null for one seed) per point.

    A point without a record is left out.
    """
    series = []
    for label, points in study.series.items():
        curve: dict[str, Any] = {"label": label, "x": [], "seeds": [], "metrics": {metric: [] for metric in METRICS}}
        for point in points:
            runs = find_recorded(point.wanted, scale, records).values()
            evaluations = [run.test[str(point.samples)] for run in runs if str(point.samples) in run.test]
            if not evaluations:
                continue
            curve["x"].append(point.x)
            curve["seeds"].append(len(evaluations))
            for metric in METRICS:
                curve["metrics"][metric].append([*mean_and_sd(values_of(evaluations, metric))])
        series.append(curve)
    return {
        "what": study.what,
        "title": study.title,
        "x": study.x,
        "scale": scale,
        "series": series,
        "environment": environment(),
        "command": command,
    }


def refuse_to_replace(path: Path, scale: Scale) -> None:
    """Raise if the file holds the study at a larger scale."""
    if not path.exists():
        return
    there = read_json(path).get("scale")
    if there in SCALES and SCALES.index(there) < SCALES.index(scale):
        raise FileExistsError(f"{path} holds this study at the {there} scale: choose another folder with --records.")
