"""Evaluation of a finished run: predictions averaged over its posterior, and what they are worth."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from torch import nn

import bsam
from bsam.experiments.config import Config, from_mapping
from bsam.experiments.data import Dataset, load, plain_batches
from bsam.experiments.methods import predict
from bsam.experiments.models import make_model
from bsam.experiments.record import environment, write_json
from bsam.experiments.runs import choose_device, remembered_data

__all__ = ["evaluate", "evaluation_name"]


def evaluate(
    folder: Path,
    *,
    samples: Iterable[int] | None = None,
    part: str = "test",
    temperature: float | None = None,
    device: str | None = None,
    data: Path | None = None,
    seed: int | None = None,
    again: bool = False,
) -> dict[str, bsam.metrics.Summary]:
    """Predict one part of the data with so many samples of the posterior; results go into the record.

    Predictions that were made before, with the same posterior and seed, are read and not made again.

    Args:
        folder: The folder of a finished run.
        samples: Numbers of samples; 0 is the mean. By default what the run's settings say.
        part: `"test"`, or `"validation"` if the run held some data out.
        temperature: Of the posterior; by default what the run's settings say.
        device: Where to predict; chosen by itself if None.
        data: Folder of the data sets; by default the one that the run was started with.
        seed: Seed of the samples; by default the run's own, so that no two runs have the same draws.
        again: Make all predictions anew.

    Returns:
        The metrics, by their names in the record, see `evaluation_name`.
    """
    path = folder / "record.json"
    if not (folder / "config.toml").is_file():
        raise FileNotFoundError(f"{folder} holds no run: there is no {folder / 'config.toml'}.")
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no finished run. Go on with: bsam train --resume {folder}")
    record: dict[str, Any] = json.loads(path.read_text())
    trained = from_mapping(record["config"])
    config = trained if temperature is None else replace(trained, temperature=temperature)
    evaluations = record["evaluations"].setdefault(part, {})
    seed = record["seed"] if seed is None else seed
    origin = {"seed": seed, "posterior_sha256": _sha256(folder / "posterior.safetensors")}

    @cache
    def loaded() -> tuple[Dataset, nn.Module, bsam.Posterior]:
        where = data or remembered_data(folder)
        dataset = load(config.dataset, where, device=choose_device(device), validation=config.validation)
        model = make_model(config.model, num_classes=dataset.num_classes, image_shape=dataset.image_shape, seed=0)
        return dataset, model.to(dataset.device), bsam.load_posterior(folder / "posterior.safetensors")

    results = {}
    for count in samples if samples is not None else [config.num_samples]:
        name = evaluation_name(count, temperature, trained)
        file = folder / f"predictions-{part}-{name}.safetensors"
        if again or not _belongs(file, origin, evaluations.get(name, {})):
            dataset, model, posterior = loaded()
            batches = plain_batches(dataset, part, batch_size=500)  # of one size, for a compiled pass
            predict(config, model, posterior, batches, num_samples=count, seed=seed).save(file)
            evaluations[name] = {"environment": environment(dataset.device)}
        predictions = bsam.Predictions.load(file)
        _draw(predictions, folder / f"reliability-{part}-{name}.png")
        results[name] = summary = bsam.metrics.summary(predictions)
        assert predictions.labels is not None
        bins = bsam.metrics.reliability(predictions.log_probs, predictions.labels).as_rows()
        kept = {"environment": evaluations[name]["environment"]} if "environment" in evaluations[name] else {}
        evaluations[name] = {**summary.as_dict(), "reliability": bins, **origin, "sha256": _sha256(file), **kept}
        write_json(path, record)
    return results


def evaluation_name(count: int, temperature: float | None, config: Config) -> str:
    """What the record calls an evaluation: the number of samples, and the temperature if it is not the run's own."""
    return str(count) if temperature in (None, config.temperature) else f"{count}@{float(temperature)}"


def _belongs(file: Path, origin: dict[str, Any], evaluation: dict[str, Any]) -> bool:
    """Whether the record knows the predictions in `file`, and that they are of this origin."""
    if not file.is_file():
        return False
    return all(evaluation.get(key) == value for key, value in {**origin, "sha256": _sha256(file)}.items())


def _draw(predictions: bsam.Predictions, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(4.5, 5), layout="constrained")
    bsam.metrics.reliability_diagram(predictions, ax=axes)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
