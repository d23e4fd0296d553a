"""Estimates of training time, from records and, on a CPU, from one timed gradient of the network.

The work of a run is the number of floating-point operations of its gradients. A run without a record takes as long as a
similar recorded run, in proportion to their work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from bsam.experiments.config import Config
from bsam.experiments.data import DATASETS
from bsam.experiments.methods import METHODS
from bsam.experiments.models import make_model
from bsam.experiments.record import environment
from bsam.experiments.recorded_runs import Recorded, read_record
from bsam.experiments.reproduce.plan import Task

__all__ = ["Estimate", "estimate", "estimate_elsewhere", "num_steps", "read_records", "time_gradient", "work"]

_TIMED_OPERATIONS = 2 * 10**9
"""Operations of the forward pass of the examples that are timed together."""


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of training, or None, and the source of the estimate."""

    seconds: float | None
    source: str
    """`records` of the run, `similar` runs, a `timed` gradient, the name of another device, or `no record`."""


def read_records(folder: Path) -> list[Recorded]:
    """Read all records of runs in a folder."""
    return [read_record(path) for path in sorted(folder.rglob("seed*.json"))]


def estimate(tasks: Iterable[Task], records: Sequence[Recorded], device: torch.device) -> dict[str, Estimate]:
    """Estimate the time of one run per name on this device."""
    here = _kind(environment(device)["device"])
    on_this = [run for run in records if _kind(run.device) == here]
    other, on_other = _most_used_gpu(records)
    estimates = {}
    for task in {task.name: task for task in tasks}.values():
        config = task.config
        if same := [_seconds(run) for run in on_this if run.config == config]:
            estimates[task.name] = Estimate(statistics.fmean(same), "records")
        elif device.type == "cpu":
            gradients = num_steps(config) * config.batch_size * METHODS[config.method].gradients
            estimates[task.name] = Estimate(gradients * time_gradient(*_network(config)), "timed")
        elif on_this:
            estimates[task.name] = Estimate(_by_similar(config, on_this), "similar")
        elif on_other:
            estimates[task.name] = Estimate(_by_similar(config, on_other), other)
        else:
            estimates[task.name] = Estimate(None, "no record")
    return estimates


def estimate_elsewhere(tasks: Iterable[Task], records: Sequence[Recorded]) -> tuple[str, float] | None:
    """Return the GPU with most records, and the seconds of all tasks there."""
    name, runs = _most_used_gpu(records)
    return (name, sum(task.share_left * _by_similar(task.config, runs) for task in tasks)) if runs else None


def _most_used_gpu(records: Sequence[Recorded]) -> tuple[str, list[Recorded]]:
    kinds = [_kind(run.device) for run in records]
    name = statistics.mode([kind for kind in kinds if kind != "CPU"] or [""])
    return name, [run for run, kind in zip(records, kinds, strict=True) if kind == name]


def _by_similar(config: Config, known: Sequence[Recorded]) -> float:
    """Return the seconds of the most similar runs, in proportion to their work."""

    def similarity(other: Config) -> tuple[bool, ...]:
        shape, other_shape = (DATASETS[each.dataset].image_shape for each in (config, other))
        names = ("method", "precision", "splits", "sample_noise")
        alike = (getattr(config, name) == getattr(other, name) for name in names)
        return config.model == other.model, shape == other_shape, *alike

    best = max(similarity(run.config) for run in known)
    alike = [run for run in known if similarity(run.config) == best]
    return work(config) * statistics.median(_seconds(run) / work(run.config) for run in alike)


def _seconds(run: Recorded) -> float:
    """Return the seconds of a recorded run alone on its device: processes that share a GPU take turns."""
    return run.seconds if _kind(run.device) == "CPU" else run.seconds / run.processes


def _kind(device: str) -> str:
    """Return a GPU's name, or CPU without the number of its cores and threads."""
    return device.partition(",")[0]


def num_steps(config: Config) -> int:
    """Return the number of steps of a whole run."""
    examples = DATASETS[config.dataset].num_train - config.validation
    batches = examples // config.batch_size if config.drop_last else -(-examples // config.batch_size)
    return batches * config.total_epochs


def work(config: Config) -> float:
    """Return the number of operations of all forward passes of a run; backward passes are in proportion to them."""
    return num_steps(config) * config.batch_size * METHODS[config.method].gradients * _operations(*_network(config))


def _network(config: Config) -> tuple[str, tuple[int, ...]]:
    return config.model, DATASETS[config.dataset].image_shape  # the number of classes changes the work by little


@cache
def _operations(model: str, image_shape: tuple[int, ...]) -> int:
    """Count the operations of one example's forward pass, without computing it."""
    network = make_model(model, num_classes=10, image_shape=image_shape, seed=0).to("meta")
    with FlopCounterMode(display=False) as counter:
        network(torch.empty(1, *image_shape, device="meta"))
    return int(counter.get_total_flops())


@cache
def time_gradient(model: str, image_shape: tuple[int, ...]) -> float:
    """Return the seconds of one example's gradient on the CPU; the first, slower pass is not counted."""
    count = max(2, min(64, _TIMED_OPERATIONS // _operations(model, image_shape)))
    network = make_model(model, num_classes=10, image_shape=image_shape, seed=0)
    images, labels = torch.rand(count, *image_shape), torch.zeros(count, dtype=torch.long)
    for _ in range(2):
        begin = time.perf_counter()
        torch.autograd.backward(cross_entropy(network(images), labels))
        seconds = time.perf_counter() - begin
    return seconds / count
