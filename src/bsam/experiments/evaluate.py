"""Evaluation of a finished run: predictions averaged over its posterior, and their metrics."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bsam
from bsam.experiments.config import Config, from_mapping
from bsam.experiments.data import Dataset, load, plain_batches
from bsam.experiments.methods import predict
from bsam.experiments.models import make_model
from bsam.experiments.record import environment, read_json, write_json
from bsam.experiments.runs import choose_device, is_finished, read_origin, remembered_data
from bsam.experiments.style import new_figure
from bsam.files import locked, remove_leftovers, replacing

__all__ = ["belongs", "draw_diagram", "evaluate", "evaluation_name", "evaluation_of", "prepared", "sha256_of"]


def prepared(
    dataset: str, model: str, validation: int, device: torch.device, folder: Path | None
) -> tuple[Dataset, nn.Module]:
    """Load a data set from a folder, and make a network for it; its weights are those of seed 0."""
    data = load(dataset, folder, device=device, validation=validation)
    network = make_model(model, num_classes=data.num_classes, image_shape=data.image_shape, seed=0)
    return data, network.to(data.device)


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
    prepare: Callable[[str, str, int, torch.device, Path | None], tuple[Dataset, nn.Module]] = prepared,
) -> dict[str, bsam.metrics.Summary]:
    """Predict one part of the data with samples of the posterior; write the metrics into the record.

    Predictions that exist, with the same posterior and seed, are read and not made again. Several processes may
    evaluate a run at the same time: each adds its results to the record.

    Args:
        folder: The folder of a finished run.
        samples: Numbers of samples; 0 is the mean. The default is in the run's settings.
        part: `"test"`, or `"validation"` if the run held some data out.
        temperature: Temperature of the posterior. The default is in the run's settings.
        device: Where to predict; None chooses the accelerator, or the CPU.
        data: Folder of the data sets; by default the one that the run was started with.
        seed: Seed of the samples; by default the run's own, so that no two runs have the same draws.
        again: Make all predictions again.
        prepare: Returns data and network, like `prepared`. With `functools.cache(prepared)`, several calls share them,
            and with the network the passes that were compiled for it.

    Returns:
        The metrics, by their names in the record, see `evaluation_name`.
    """
    path, place = folder / "record.json", choose_device(device)
    read_origin(folder)  # raises if it holds no run
    if not is_finished(folder):
        raise FileNotFoundError(f"{folder} holds no finished run. Go on with: bsam train --resume {folder}")
    trained = from_mapping(read_json(path)["config"])
    config = trained if temperature is None else replace(trained, temperature=temperature)
    seed = read_json(path)["seed"] if seed is None else seed
    remove_leftovers(folder)
    lock = folder / ".record.json.lock"
    origin = {"seed": seed, "posterior_sha256": sha256_of(folder / "posterior.safetensors")}

    @cache
    def loaded() -> tuple[Dataset, nn.Module, bsam.Posterior]:
        where = data or remembered_data(folder)
        found = prepare(config.dataset, config.model, config.validation, place, where)
        return *found, bsam.load_posterior(folder / "posterior.safetensors")

    results = {}
    for count in samples if samples is not None else [config.num_samples]:
        name = evaluation_name(count, temperature, trained)
        file = folder / f"predictions-{part}-{name}.safetensors"
        with locked(lock):
            known = read_json(path)["evaluations"].get(part, {}).get(name, {})
            made = again or not belongs(file, origin, known)
            predictions = None if made else bsam.Predictions.load(file)
        if predictions is None:
            dataset, model, posterior = loaded()
            batches = plain_batches(dataset, part, batch_size=500)  # of one size, for a compiled pass
            predictions = predict(config, model, posterior, batches, num_samples=count, seed=seed)
        results[name] = bsam.metrics.summary(predictions)
        found = evaluation_of(predictions, results[name])
        with locked(lock):  # keeps results that other processes have written in the meantime
            if made:
                predictions.save(file)
            draw_diagram(predictions, folder / f"reliability-{part}-{name}.png")
            record = read_json(path)
            evaluation = {**found, **origin, "sha256": sha256_of(file)}
            if made or "environment" in known:
                evaluation["environment"] = environment(dataset.device) if made else known["environment"]
            record["evaluations"].setdefault(part, {})[name] = evaluation
            write_json(path, record)
    return results


def evaluation_of(predictions: bsam.Predictions, summary: bsam.metrics.Summary | None = None) -> dict[str, Any]:
    """Return the part of a record about predictions: metrics, intervals and the bins of the reliability diagram."""
    assert predictions.labels is not None
    bins = bsam.metrics.reliability(predictions.log_probs, predictions.labels).as_rows()
    return {**(summary or bsam.metrics.summary(predictions)).as_dict(), "reliability": bins}


def evaluation_name(count: int, temperature: float | None, config: Config) -> str:
    """Name an evaluation: the number of samples, and the temperature if it is not the run's own."""
    return str(count) if temperature in (None, config.temperature) else f"{count}@{float(temperature)}"


def belongs(file: Path, origin: dict[str, Any], evaluation: dict[str, Any]) -> bool:
    """Whether the record has the predictions in `file`, with this origin."""
    if not file.is_file():
        return False
    return all(evaluation.get(key) == value for key, value in {**origin, "sha256": sha256_of(file)}.items())


def draw_diagram(predictions: bsam.Predictions, path: Path) -> None:
    """Write the reliability diagram of predictions as a picture."""
    figure = new_figure(4.5, 5)
    bsam.metrics.reliability_diagram(predictions, ax=figure.subplots())
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
