"""The demo: all methods on scikit-learn's digits, and a picture of their uncertainty on two moons."""

from __future__ import annotations

import itertools
import statistics
import time
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

import bsam
from bsam.experiments.config import Config, from_mapping
from bsam.experiments.data import Dataset, load, plain_batches
from bsam.experiments.ensemble import average
from bsam.experiments.methods import METHODS, predict
from bsam.experiments.metric_columns import TITLES, mean_and_sd, number, values_of
from bsam.experiments.record import environment
from bsam.experiments.suites.unknown_inputs import UNKNOWN, unknown_images
from bsam.experiments.trainer import Trainer

__all__ = ["Demo", "Map", "cells", "grid_of", "load_demo", "moons", "run_digits", "tune"]

Advance = Callable[[str], None]


@dataclass(frozen=True)
class Demo:
    """The settings of the demo."""

    digits: dict[str, Config]
    """Settings by method."""
    grid: dict[str, dict[str, list[float]]]
    """By method: some settings, and the values that `tune` tries."""
    moons: dict[str, Config]
    seeds: int
    tuning_seeds: int


def load_demo() -> Demo:
    """Read the settings of the demo from its TOML file."""
    content = tomllib.loads((files("bsam.experiments") / "demo.toml").read_text())
    grid = content["digits"].pop("grid")
    return Demo(
        _configs(content["digits"]), grid, _configs(content["moons"]), content["seeds"], content["tuning_seeds"]
    )


def _configs(part: dict[str, Any]) -> dict[str, Config]:
    common = {name: value for name, value in part.items() if name != "methods"}
    return {method: from_mapping({**common, "method": method, **row}) for method, row in part["methods"].items()}


def _no_progress(method: str) -> None:
    pass


# ------------------------------------------------------------------ digits


def train_and_predict(
    config: Config, dataset: Dataset, seed: int, part: str, unknown: Iterable[str] = ()
) -> tuple[bsam.Predictions, dict[str, bsam.Predictions]]:
    """Train one method with one seed, and predict one part of the data, and unknown sets by name."""
    trainer = Trainer(config, dataset, seed=seed)
    for _ in trainer.steps():
        pass
    posterior = trainer.posterior()
    data: dict[str, Any] = {name: [dataset.normalise(unknown_images(dataset, name, None))] for name in unknown}
    found = {
        name: predict(config, trainer.model, posterior, each, num_samples=config.num_samples, seed=seed)
        for name, each in {part: plain_batches(dataset, part), **data}.items()
    }
    return found.pop(part), found


def run_digits(
    demo: Demo, advance: Advance = _no_progress
) -> tuple[dict[str, Any], dict[str, bsam.Predictions], dict[str, dict[str, bsam.Predictions]]]:
    """Train every method with every seed.

    Returns:
        The record; by method, the test predictions of the first seed; and by method and unknown set, its predictions
        for images that are no digits.
    """
    record: dict[str, Any] = {"seeds": demo.seeds, "methods": {}, "pairs": {}}
    first: dict[str, bsam.Predictions] = {}
    strange: dict[str, dict[str, bsam.Predictions]] = {}
    for method, config in demo.digits.items():
        dataset = load(config.dataset, validation=config.validation)
        begin = time.perf_counter()
        found = []
        for seed in range(demo.seeds):
            found.append(train_and_predict(config, dataset, seed, "test", UNKNOWN["digits"]))
            advance(method)
        first[method], strange[method] = found[0]
        seconds = round(time.perf_counter() - begin, 1)
        runs = [_numbers(*each) for each in found]
        record["methods"][method] = {"config": asdict(config), "runs": runs, "seconds": seconds}
        if METHODS[method].is_point and METHODS[method].gradients == 1 and demo.seeds > 1:
            record["pairs"][method] = [_numbers(*_pair(one, other)) for one, other in itertools.combinations(found, 2)]
    record["environment"] = environment()
    return record, first, strange


_Found = tuple[bsam.Predictions, dict[str, bsam.Predictions]]
"""Predictions of the test part, and of unknown sets."""


def _numbers(test: bsam.Predictions, unknown: Mapping[str, bsam.Predictions]) -> dict[str, Any]:
    summary = bsam.metrics.summary(test, num_bootstrap=0)
    return {
        **{name: getattr(summary, name) for name in (*TITLES, "brier")},
        "accuracy_90": bsam.metrics.rate_rejection(test, num_bootstrap=0).accuracy_90,
        "unknown": {
            name: bsam.metrics.rate_unknown(test, each, num_bootstrap=0).auroc for name, each in unknown.items()
        },
    }


def _pair(one: _Found, other: _Found) -> _Found:
    """Return the predictions of an ensemble of two."""
    return average([one[0], other[0]]), {name: average([one[1][name], other[1][name]]) for name in one[1]}


def cells(record: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table: the method's title, and mean (sd) of each metric over the seeds."""
    return [
        (METHODS[method].title, [number(metric, *mean_and_sd(values_of(found["runs"], metric))) for metric in TITLES])
        for method, found in record["methods"].items()
    ]


def grid_of(options: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield all combinations of the options' values."""
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values, strict=True))


def tune(demo: Demo, advance: Advance = _no_progress) -> dict[str, Any]:
    """Try each method's grid on the validation part; the record has every try and, as `best`, the lowest NLL."""
    record: dict[str, Any] = {"seeds": demo.tuning_seeds, "methods": {}}
    begin = time.perf_counter()
    for method, grid in demo.grid.items():
        tries = []
        for options in grid_of(grid):
            config = replace(demo.digits[method], **options)
            dataset = load(config.dataset, validation=config.validation)
            scores = []
            for seed in range(100, 100 + demo.tuning_seeds):
                try:
                    predictions, _ = train_and_predict(config, dataset, seed, "validation")
                    scores.append(bsam.metrics.summary(predictions, num_bootstrap=0).nll)
                except (FloatingPointError, ValueError):  # diverged: not finite while training, or when predicting
                    scores.append(float("inf"))
            tries.append({**options, "nll": statistics.fmean(scores)})
            advance(method)
        record["methods"][method] = {"best": min(tries, key=lambda t: t["nll"]), "tries": tries}
    record["seconds"] = round(time.perf_counter() - begin, 1)
    record["environment"] = environment()
    return record


def num_tries(demo: Demo) -> int:
    """Return the number of settings that `tune` tries."""
    return sum(1 for grid in demo.grid.values() for _ in grid_of(grid))


# ------------------------------------------------------------------ two moons


CERTAIN = 0.99
"""A prediction is called certain if a class has more than this probability."""


@dataclass(frozen=True)
class Map:
    """The predicted probability of class 1 on a grid, and the training data."""

    x: Tensor
    y: Tensor
    probability: Tensor
    """(y, x)."""
    points: Tensor
    labels: Tensor

    def certain_far_away(self) -> float:
        """Return the share of the map outside the data's bounding box where the prediction is certain."""
        low, high = self.points.min(0).values - 0.5, self.points.max(0).values + 0.5
        y, x = torch.meshgrid(self.y, self.x, indexing="ij")
        outside = (x < low[0]) | (x > high[0]) | (y < low[1]) | (y > high[1])
        p = self.probability[outside]
        return float((torch.maximum(p, 1 - p) > CERTAIN).double().mean())


def moons(demo: Demo, advance: Advance = _no_progress, *, seed: int = 0) -> dict[str, Map]:
    """Train each method on two moons; return its predicted probabilities on a map around them."""
    xs, ys = torch.linspace(-3.5, 4.5, 120), torch.linspace(-3.0, 3.5, 100)
    grid = torch.cartesian_prod(ys, xs).flip(1)
    maps = {}
    for method, config in demo.moons.items():
        dataset = load(config.dataset)
        trainer = Trainer(config, dataset, seed=seed)
        for _ in trainer.steps():
            pass
        with warnings.catch_warnings():
            # The authors' 1,000 steps with beta2 = 0.999: 37% of bSAM's precision is still its initial value.
            warnings.filterwarnings("ignore", message="after 1000 steps")
            posterior = trainer.posterior()
        inputs = dataset.normalise(grid)
        predictions = predict(config, trainer.model, posterior, inputs, num_samples=config.num_samples)
        points, labels = dataset.train
        maps[method] = Map(xs, ys, predictions.probs[:, 1].view(len(ys), len(xs)), points, labels)
        advance(method)
    return maps
