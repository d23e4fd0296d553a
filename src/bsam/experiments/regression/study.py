"""The study of regression on UCI's sets: `bsam reproduce uci`.

For each set, each method, and each published split:

1. A fifth of the training part is held out. The method is trained on the rest with every setting of its grid, and the
   setting with the highest mean log-likelihood on the held-out examples is chosen, for this split alone.
2. The method is trained on the whole training part with this setting, and predicts the test part.

All runs of a set with one method are one `RunStack`: 20 splits and 4 settings are 80 networks in one step. Inputs and
targets are standardised by the training data. The metrics are in the target's own units: with the standard deviation c
of the training targets, the log-likelihood is that of the standardised target minus log c, RMSE and CRPS are times c.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

import bsam
from bsam.experiments.data.uci import UCI_SETS, RegressionSet, read_uci
from bsam.experiments.record import environment, read_json, write_json
from bsam.experiments.regression.methods import (
    METHODS,
    NOISE_LR,
    Method,
    Settings,
    Trained,
    make_noise_optimizer,
    take_step,
    trained_runs,
)
from bsam.experiments.regression.stack import RunStack

__all__ = ["ANCHORS", "METRICS", "Extent", "carry_out_uci", "missing_uci", "run_method"]

METRICS = ("log_likelihood", "rmse", "crps", "quantile_error")

ANCHORS = {"concrete": -2.937, "energy": -1.212, "kin8nm": 1.136, "wine": -0.928, "yacht": -1.250}
"""Test log-likelihood of MC dropout: Gal and Ghahramani (2016), as Mukhoti, Stenetorp and Gal (2018) report it."""

_HELD_OUT = 5
"""One in so many training examples is held out."""


@dataclass(frozen=True)
class Extent:
    """How much is run."""

    num_splits: int | None = None
    """How many of the published splits, from the first; all by default."""
    steps: int | None = None
    """The number of steps of each run, 1000 for small sets and 1500 for large ones by default."""
    sets: tuple[str, ...] = tuple(UCI_SETS)
    methods: tuple[str, ...] = tuple(METHODS)

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise ValueError(f"there is no method {unknown[0]!r}. There are: {', '.join(METHODS)}.")

    def capped(self, data: RegressionSet) -> str | None:
        """Say that a set has fewer splits than are asked for, or return None."""
        if self.num_splits is None or self.num_splits <= len(data.splits):
            return None
        return f"{data.name} has {len(data.splits)} splits, and {self.num_splits} are asked for: all of them are run."

    def of_set(self, data: RegressionSet) -> tuple[RegressionSet, int]:
        """Return the set with the splits that are run, and the number of steps."""
        steps = self.steps or (1500 if len(data.x) > _LARGE else 1000)
        return replace(data, splits=data.splits[: self.num_splits]), steps


_LARGE = 4000
"""Sets with more examples are large."""


def batch_size(num_data: int) -> int:
    """Return the size of the minibatches."""
    return 128 if num_data > 0.7 * _LARGE else 32


def num_hidden(name: str) -> int:
    """Return the number of hidden units: 100 for the largest set, as in earlier work."""
    return 100 if name == "protein" else 50


@dataclass(frozen=True, eq=False)
class Part:
    """Standardised data of one split: what is trained on, and what is predicted."""

    train: tuple[Tensor, Tensor]
    other: tuple[Tensor, Tensor]
    scale: float
    """The standard deviation of the training targets."""


def make_part(data: RegressionSet, train: Tensor, other: Tensor) -> Part:
    """Standardise by the training rows. A column that is constant there is only centred."""
    x, y = data.x[train], data.y[train]
    std = x.std(dim=0)
    std[std == 0] = 1.0
    scale = float(y.std())

    def standardised(rows: Tensor) -> tuple[Tensor, Tensor]:
        return ((data.x[rows] - x.mean(dim=0)) / std).float(), ((data.y[rows] - y.mean()) / scale).float()

    return Part(standardised(train), standardised(other), scale)


def held_out(data: RegressionSet) -> list[Part]:
    """Return the training part of each split, a fifth of it held out."""
    parts = []
    for k, split in enumerate(data.splits):
        order = split.train[torch.randperm(len(split.train), generator=torch.Generator().manual_seed(k))]
        count = len(order) // _HELD_OUT
        parts.append(make_part(data, order[count:], order[:count]))
    return parts


# ------------------------------------------------------------------ training


@dataclass(frozen=True)
class Wanted:
    """A run: its part, its settings, and its seed among those of the part."""

    part: int
    settings: Settings
    seed: int = 0


def train(method: Method, parts: list[Part], wanted: list[Wanted], hidden: int, steps: int) -> list[Trained | None]:
    """Train all wanted runs together. If one diverges, each setting is trained by itself; None if it diverges there."""
    order = sorted(range(len(wanted)), key=lambda i: sorted(wanted[i].settings.items()))
    grouped: list[list[int]] = []
    for i in order:
        if not grouped or wanted[grouped[-1][0]].settings != wanted[i].settings:
            grouped.append([])
        grouped[-1].append(i)
    found: list[Trained | None] = [None] * len(wanted)
    try:
        together = _train_stack(method, parts, [[wanted[i] for i in own] for own in grouped], hidden, steps)
        for i, run in zip(order, together, strict=True):
            found[i] = run
    except FloatingPointError:
        if len(grouped) > 1:
            for own in grouped:
                for i, alone in zip(own, train(method, parts, [wanted[i] for i in own], hidden, steps), strict=True):
                    found[i] = alone
        elif len(wanted) > 1:
            found = [train(method, parts, [each], hidden, steps)[0] for each in wanted]
    return found


def _train_stack(
    method: Method, parts: list[Part], groups: list[list[Wanted]], hidden: int, steps: int
) -> list[Trained]:
    runs = [run for own in groups for run in own]
    streams = list(dict.fromkeys((run.part, run.seed) for run in runs))  # each with its own order of the examples
    stream_of = torch.tensor([streams.index((run.part, run.seed)) for run in runs])
    x, y = (torch.stack([parts[part].train[i] for part, _ in streams]) for i in (0, 1))
    num_data, size = x.shape[1], batch_size(x.shape[1])
    stack = RunStack([len(own) for own in groups], x.shape[2], hidden, [1000 * run.seed + run.part for run in runs])
    settings = [own[0].settings for own in groups]
    optimizer = method.make(stack, settings, num_data)
    noise = make_noise_optimizer(stack)
    schedulers = [CosineAnnealingLR(each, steps) for each in (optimizer, noise)]
    generator, rows = torch.Generator().manual_seed(0), torch.arange(len(streams))[:, None]
    done = 0
    while done < steps:
        order = torch.rand(len(streams), num_data, generator=generator).argsort(dim=1)
        for index in torch.split(order[:, : num_data // size * size], size, dim=1)[: steps - done]:
            inputs, targets = x[rows, index][stream_of], y[rows, index][stream_of]
            take_step(optimizer, noise, stack, inputs.transpose(0, 1), targets.T)
            for scheduler in schedulers:
                scheduler.step()
            done += 1
    return trained_runs(method, stack, optimizer, settings)


# ------------------------------------------------------------------ rating


def rate(method: Method, runs: list[Trained | None], part: Part) -> dict[str, float]:
    """Return the metrics of the runs of one split, in the target's own units; the worst if a run diverged."""
    worst = {"log_likelihood": -math.inf, "rmse": math.inf, "crps": math.inf, "quantile_error": math.inf}
    whole = [run for run in runs if run is not None]
    if len(whole) < len(runs):
        return worst
    try:
        found = method.predict(whole, part.train, part.other)
        summary = bsam.metrics.summary(found, num_bootstrap=0)
        return {
            "log_likelihood": -summary.nll - math.log(part.scale),
            "rmse": summary.rmse * part.scale,
            "crps": bsam.metrics.crps(found, num_bootstrap=0).crps * part.scale,
            "quantile_error": bsam.metrics.quantile_calibration(found).error,
        }
    except (ValueError, OverflowError):  # weights or outputs that are not finite
        return worst


def run_method(name: str, data: RegressionSet, steps: int, choices: list[Settings] | None = None) -> dict[str, Any]:
    """Choose the settings of a method for each split, train with them, and rate the test part.

    Args:
        name: The method.
        data: The set.
        steps: Number of steps of each run.
        choices: The settings for each split, if another method chose them.
    """
    method, hidden = METHODS[name], num_hidden(data.name)
    begin = time.process_time()
    validation: list[list[float]] = []
    if choices is None:
        parts = held_out(data)
        tries = [Wanted(k, settings) for settings in method.grid for k in range(len(parts))]
        runs = train(method, parts, tries, hidden, steps)
        rated = [rate(method, [run], parts[one.part])["log_likelihood"] for one, run in zip(tries, runs, strict=True)]
        validation = [rated[start : start + len(parts)] for start in range(0, len(rated), len(parts))]
        choices = [
            max(zip(own, method.grid, strict=True), key=lambda pair: pair[0])[1]
            for own in zip(*validation, strict=True)
        ]
    parts = [make_part(data, split.train, split.test) for split in data.splits]
    wanted = [Wanted(k, choices[k], seed) for k in range(len(parts)) for seed in range(method.num_runs)]
    runs = train(method, parts, wanted, hidden, steps)
    of_split = [runs[start : start + method.num_runs] for start in range(0, len(runs), method.num_runs)]
    test = [rate(method, own, part) for own, part in zip(of_split, parts, strict=True)]
    return {
        "set": data.name,
        "method": name,
        "splits": len(parts),
        "choices": choices,
        "validation": validation,
        "test": {metric: [each[metric] for each in test] for metric in METRICS},
        "cpu_seconds": time.process_time() - begin,
    }


# ------------------------------------------------------------------ all of it


def carry_out_uci(
    extent: Extent,
    data_folder: Path,
    runs: Path,
    out: Path,
    *,
    jobs: int = 1,
    say: Callable[[str], None] = print,
    advance: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Run what is missing, and write the record.

    Args:
        extent: How much is run.
        data_folder: The folder with `uci`.
        runs: Where each finished set and method is kept, so that the same command goes on after an interrupt.
        out: The record.
        jobs: Number of processes, each for one set and method at a time.
        say: Prints a line.
        advance: Called with the name of each set and method that was missing and is done.
    """
    runs.mkdir(parents=True, exist_ok=True)
    if jobs > 1:
        _run_in_processes(extent, data_folder, runs, jobs, say, advance)
    found: dict[str, dict[str, Any]] = {}
    about: dict[str, Any] = {}
    for name in extent.sets:
        whole = read_uci(name, data_folder)
        if sentence := extent.capped(whole):
            say(sentence)
        data, steps = extent.of_set(whole)
        n = len(data.splits[0].train)
        about[name] = {
            "sha256": data.sha256,
            "splits": len(data.splits),
            "num_train": n,
            "num_test": len(data.splits[0].test),
            "features": data.x.shape[1],
            "hidden": num_hidden(name),
            "steps": steps,
            "batch_size": batch_size(n),
        }
        found[name] = {}
        for method in extent.methods:
            missing = not _place(method, data, steps, runs).exists()
            found[name][method] = _kept(method, data, steps, runs)
            if missing:
                advance(f"{name} {method}")
            shown = summarise(found[name][method]["test"]["log_likelihood"])
            error = "" if math.isnan(shown["se"]) else f" +- {shown['se']:.3f}"  # of one split, or if a run diverged
            say(f"{name:10} {METHODS[method].title:14} log-likelihood {shown['mean']:8.3f}{error}")
    record = {
        "what": "regression on UCI's sets with their published splits; bsam.experiments.regression.study explains it",
        "config": {
            "held_out": 1 / _HELD_OUT,
            "noise_lr": NOISE_LR,
            "sets": about,
            "methods": {
                name: {"title": m.title, "grid": m.grid, "fixed": m.fixed, "chosen_by": m.chosen_by or name}
                for name, m in METHODS.items()
                if name in extent.methods
            },
        },
        "anchors": {"MC dropout, test log-likelihood": ANCHORS},
        "results": found,
        "summary": {
            name: {m: {metric: summarise(own["test"][metric]) for metric in METRICS} for m, own in each.items()}
            for name, each in found.items()
        },
        "cpu_seconds": math.fsum(own["cpu_seconds"] for each in found.values() for own in each.values()),
        "environment": environment(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, record)
    return record


def missing_uci(extent: Extent, data_folder: Path, runs: Path) -> list[tuple[str, str]]:
    """Return the sets and methods that are not kept from earlier."""
    found = []
    for name in extent.sets:
        data, steps = extent.of_set(read_uci(name, data_folder))
        found += [(name, method) for method in extent.methods if not _place(method, data, steps, runs).exists()]
    return found


def _run_in_processes(
    extent: Extent, data_folder: Path, runs: Path, jobs: int, say: Callable[[str], None], advance: Callable[[str], None]
) -> None:
    """Run what is missing: first the methods that choose their settings, then those that take over a choice."""
    missing = missing_uci(extent, data_folder, runs)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for later in (False, True):
            own = [(name, method) for name, method in missing if (METHODS[method].chosen_by is not None) == later]
            tasks = {pool.submit(_work, extent, data_folder, runs, *each): each for each in own}
            for task in as_completed(tasks):
                task.result()
                advance(" ".join(tasks[task]))
                say(f"{' '.join(tasks[task])} is done")


def _work(extent: Extent, data_folder: Path, runs: Path, name: str, method: str) -> None:
    torch.set_num_threads(1)
    data, steps = extent.of_set(read_uci(name, data_folder))
    _kept(method, data, steps, runs)


def _place(name: str, data: RegressionSet, steps: int, runs: Path) -> Path:
    return runs / f"{data.name}-{name}-{len(data.splits)}-{steps}.json"


def _kept(name: str, data: RegressionSet, steps: int, runs: Path) -> dict[str, Any]:
    """Return what a method did on a set, from an earlier run if there is one."""
    path = _place(name, data, steps, runs)
    if not path.exists():
        source = METHODS[name].chosen_by
        choices = None if source is None else _kept(source, data, steps, runs)["choices"]
        write_json(path, {**run_method(name, data, steps, choices), "environment": environment()})
    return read_json(path)


def summarise(values: Iterable[float | None]) -> dict[str, float]:
    """Return mean and standard error over the splits; infinities stay."""
    known = [math.nan if value is None else float(value) for value in values]
    mean = statistics.fmean(known)
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else math.nan
    return {"mean": mean, "se": error}
