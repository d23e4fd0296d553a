"""The demo: five methods on scikit-learn's digits, and a picture of their uncertainty on two moons."""

from __future__ import annotations

import itertools
import statistics
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bsam
from bsam.experiments import data
from bsam.experiments.record import environment
from bsam.experiments.training import METHODS, make_optimizer, mlp, posterior_of, train

__all__ = ["DIGITS", "Map", "cells", "load_settings", "moons", "num_tries", "run_digits", "tune"]

DIGITS = {"accuracy": 2, "nll": 3, "ece": 4, "auroc": 3}
"""The metrics of the tables, and with how many digits they are shown."""
Settings = dict[str, Any]


def load_settings() -> Settings:
    """The settings of the demo, from its TOML file."""
    return tomllib.loads((files("bsam.experiments") / "demo.toml").read_text())


# ------------------------------------------------------------------ digits


def train_and_predict(
    settings: Settings, method: str, options: Settings, seed: int, split: data.Split, part: str
) -> bsam.Predictions:
    """Train one method on the digits with one seed, and predict one part of them."""
    torch.manual_seed(seed)
    model = mlp(*settings["network"])
    optimizer = make_optimizer(method, model, len(split.train[0]), seed=seed, **options)
    train(
        model,
        optimizer,
        split.train,
        F.cross_entropy,
        epochs=settings["epochs"],
        batch_size=settings["batch_size"],
        seed=seed,
    )
    posterior = posterior_of(optimizer, model)
    return bsam.predict(
        model, posterior, getattr(split, part), num_samples=settings["num_samples"], seed=seed, progress=False
    )


def run_digits(
    settings: Settings, advance: Callable[[str], None] = lambda method: None
) -> tuple[dict[str, Any], dict[str, bsam.Predictions]]:
    """Train every method with every seed; return the record, and the first seed's test predictions by method."""
    split = data.digits()
    record: dict[str, Any] = {"settings": settings, "data": "scikit-learn digits: 600 train, 397 validation, 800 test"}
    first: dict[str, bsam.Predictions] = {}
    record["methods"] = {}
    for method, options in settings["methods"].items():
        begin = time.perf_counter()
        runs = []
        for seed in range(settings["seeds"]):
            predictions = train_and_predict(settings, method, options, seed, split, "test")
            first.setdefault(method, predictions)
            summary = bsam.metrics.summary(predictions, num_bootstrap=0)
            runs.append({name: getattr(summary, name) for name in (*DIGITS, "brier")})
            advance(method)
        record["methods"][method] = {"seeds": runs, "seconds": round(time.perf_counter() - begin, 1)}
    record["environment"] = environment()
    return record, first


def cells(record: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """The rows of the table: the method's name, and mean (sd) of each metric over the seeds."""
    rows = []
    for method, result in record["methods"].items():
        row = []
        for metric in DIGITS:
            values = [run[metric] for run in result["seeds"]]
            scale = 100 if metric == "accuracy" else 1
            mean, digits = scale * statistics.fmean(values), DIGITS[metric]
            sd = f"{scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else "-"
            row.append(f"{mean:.{digits}f} ({sd})")
        rows.append((METHODS[method], row))
    return rows


def grid_of(options: dict[str, list[float]]) -> Iterator[Settings]:
    """All combinations of the values of some options."""
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values, strict=True))


def tune(settings: Settings, advance: Callable[[str], None] = lambda method: None) -> dict[str, Any]:
    """Try each method's grid on the validation part; the record has every try, and the one of lowest NLL."""
    split = data.digits()
    record: dict[str, Any] = {"settings": settings, "methods": {}}
    begin = time.perf_counter()
    for method, grid in settings["grid"].items():
        fixed = {k: v for k, v in settings["methods"][method].items() if k not in grid}
        tries = []
        for options in grid_of(grid):
            scores = []
            for seed in range(settings["tuning_seeds"]):
                try:
                    predictions = train_and_predict(
                        settings, method, {**fixed, **options}, 100 + seed, split, "validation"
                    )
                    scores.append(bsam.metrics.summary(predictions, num_bootstrap=0).nll)
                except FloatingPointError:  # diverged
                    scores.append(float("inf"))
            tries.append({**options, "nll": statistics.fmean(scores)})
            advance(method)
        best = min(tries, key=lambda t: t["nll"])
        record["methods"][method] = {"best": {**fixed, **best}, "tries": tries}
    record["seconds"] = round(time.perf_counter() - begin, 1)
    record["environment"] = environment()
    return record


def num_tries(settings: Settings) -> int:
    """How many settings `tune` tries."""
    return sum(1 for grid in settings["grid"].values() for _ in grid_of(grid))


# ------------------------------------------------------------------ two moons


@dataclass(frozen=True)
class Map:
    """The predicted probability of class 1 over a grid, and the data it was learned from."""

    x: Tensor
    y: Tensor
    probability: Tensor
    """(y, x)."""
    points: Tensor
    labels: Tensor


def moons(settings: Settings, advance: Callable[[str], None] = lambda method: None) -> dict[str, Map]:
    """Train each method on two moons; return its predictive probabilities around them."""
    points, labels = data.two_moons()
    xs, ys = torch.linspace(-3.5, 4.5, 120), torch.linspace(-3.0, 3.5, 100)
    grid = torch.cartesian_prod(ys, xs).flip(1)
    maps = {}
    for method, options in settings["methods"].items():
        torch.manual_seed(0)
        model = mlp(*settings["network"])
        optimizer = make_optimizer(method, model, len(points), **options)
        train(
            model,
            optimizer,
            (points, labels),
            lambda f, y: F.binary_cross_entropy_with_logits(f.squeeze(1), y),
            epochs=settings["epochs"],
            batch_size=settings["batch_size"],
            seed=0,
        )
        posterior = posterior_of(optimizer, model)
        predictions = bsam.predict(
            model, posterior, grid, num_samples=settings["num_samples"], likelihood="bernoulli", progress=False
        )
        maps[method] = Map(xs, ys, predictions.probs[:, 1].view(len(ys), len(xs)), points, labels)
        advance(method)
    return maps
