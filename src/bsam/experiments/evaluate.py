"""Evaluation of a finished run: predictions averaged over its posterior, and what they are worth."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

import bsam
from bsam.experiments.config import from_mapping
from bsam.experiments.data import load, plain_batches
from bsam.experiments.methods import predict
from bsam.experiments.models import make_model
from bsam.experiments.record import environment, write_json
from bsam.experiments.runs import choose_device

__all__ = ["evaluate"]


def evaluate(
    folder: Path,
    *,
    samples: Iterable[int] | None = None,
    part: str = "test",
    device: str | None = None,
    data: Path | None = None,
    seed: int = 0,
) -> dict[str, bsam.metrics.Summary]:
    """Predict one part of the data with so many samples of the posterior, once each; results go into the record.

    Args:
        folder: The folder of a finished run.
        samples: Numbers of samples; 0 is the mean. By default what the run's settings say.
        part: `"test"`, or `"validation"` if the run held some data out.
        device: Where to predict; chosen by itself if None.
        data: Folder of the data sets.
        seed: Seed of the samples.

    Returns:
        The metrics, by number of samples.
    """
    path = folder / "record.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no finished run. Go on with: bsam train --resume {folder}")
    record: dict[str, Any] = json.loads(path.read_text())
    config = from_mapping(record["config"])
    dataset = load(config.dataset, data, device=choose_device(device), validation=config.validation)
    model = make_model(config.model, num_classes=dataset.num_classes, image_shape=dataset.image_shape, seed=0)
    model.to(dataset.device)
    posterior = bsam.load_posterior(folder / "posterior.safetensors")
    results = {}
    for count in samples if samples is not None else [config.num_samples]:
        predictions = predict(config, model, posterior, plain_batches(dataset, part), num_samples=count, seed=seed)
        predictions.save(folder / f"predictions-{part}-{count}.safetensors")
        figure, axes = plt.subplots(figsize=(4.5, 5), layout="constrained")
        bsam.metrics.reliability_diagram(predictions, ax=axes)
        figure.savefig(folder / f"reliability-{part}-{count}.png", dpi=120)
        plt.close(figure)
        results[str(count)] = summary = bsam.metrics.summary(predictions)
        assert predictions.labels is not None
        bins = bsam.metrics.reliability(predictions.log_probs, predictions.labels).as_rows()
        evaluation = {**summary.as_dict(), "reliability": bins, "seed": seed}
        record["evaluations"].setdefault(part, {})[str(count)] = evaluation
        record["evaluations"]["environment"] = environment(dataset.device)
        write_json(path, record)
    return results
