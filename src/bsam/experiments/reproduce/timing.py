"""Estimates of training time, from records of the same run on the same kind of device, or from a few timed steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bsam.experiments.config import Config
from bsam.experiments.data import DATASETS, Dataset
from bsam.experiments.record import environment
from bsam.experiments.recorded_runs import recorded
from bsam.experiments.reproduce.plan import Task
from bsam.experiments.trainer import Trainer

__all__ = ["Estimate", "estimate", "num_steps", "time_step"]

_TIMED_STEPS, _ENOUGH_SECONDS = 3, 1.0


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of training, or None, and the source of the estimate."""

    seconds: float | None
    source: str
    """`records`, `timed` steps, or `no record`."""


def estimate(tasks: tuple[Task, ...], records: Path, device: torch.device) -> dict[str, Estimate]:
    """Estimate the time of one run per name."""
    here = _kind(environment(device)["device"])
    steps: dict[tuple[object, ...], float] = {}
    estimates = {}
    for task in {task.name: task for task in tasks}.values():
        seconds = [r.seconds for r in recorded(records, task.name, task.scale).values() if _kind(r.device) == here]
        if seconds:
            estimates[task.name] = Estimate(statistics.fmean(seconds), "records")
            continue
        if device.type == "cuda":  # steps are compiled there, so a step that is not compiled says nothing
            estimates[task.name] = Estimate(None, "no record")
            continue
        cost = _decides_cost(task.config)
        if cost not in steps:
            steps[cost] = time_step(task.config, device)
        estimates[task.name] = Estimate(steps[cost] * num_steps(task.config), "timed")
    return estimates


def _decides_cost(config: Config) -> tuple[object, ...]:
    """Return what a step's time depends on, so that CIFAR-10 and CIFAR-100 are timed once."""
    shape = DATASETS[config.dataset].image_shape
    arithmetic = config.precision, config.channels_last
    return config.model, shape, config.method, config.splits, config.sample_noise, config.batch_size, arithmetic


def _kind(device: str) -> str:
    """Return a GPU's name, or CPU without the number of its cores and threads."""
    return device.partition(",")[0]


def num_steps(config: Config) -> int:
    """Return the number of steps of a whole run."""
    examples = DATASETS[config.dataset].num_train - config.validation
    batches = examples // config.batch_size if config.drop_last else -(-examples // config.batch_size)
    return batches * config.total_epochs


def time_step(config: Config, device: torch.device) -> float:
    """Time one step on random images, so that no data is needed; a short first step is not counted."""
    info = DATASETS[config.dataset]
    count = (_TIMED_STEPS + 2) * config.batch_size
    images = torch.randint(256, (count, *info.image_shape), dtype=torch.uint8, device=device)
    labels = torch.randint(info.num_classes, (count,), device=device)
    mean, std = (
        torch.tensor(values, device=device).view(-1, *[1] * (len(info.image_shape) - 1))
        for values in (info.mean, info.std)
    )
    data = (images, labels)
    config = replace(config, swag_interval=1)  # SWAG needs two snapshots in these few batches
    steps = Trainer(config, Dataset(info, data, data, data, mean, std), seed=0).steps()
    seconds = [_time_next(steps, device)]
    if seconds[0] < _ENOUGH_SECONDS:
        seconds = []
    while len(seconds) < _TIMED_STEPS and sum(seconds) < _ENOUGH_SECONDS:
        seconds.append(_time_next(steps, device))
    return statistics.median(seconds)


def _time_next(steps: Iterator[None], device: torch.device) -> float:
    _wait_for(device)
    begin = time.perf_counter()
    next(steps)
    _wait_for(device)
    return time.perf_counter() - begin


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
