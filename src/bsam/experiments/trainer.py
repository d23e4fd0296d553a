"""Training in memory: one loop for all methods. It can stop after any step and go on exactly there.

A step depends only on (config, seed, epoch, batch) and on the state that `Trainer.state` returns: batches and
augmentation are functions of (seed, epoch), the learning rate of the epoch, and the noise of the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bsam
from bsam.experiments.config import Config
from bsam.experiments.data import Dataset, epoch_length, stacked_batches
from bsam.experiments.methods import METHODS, make_optimizer
from bsam.experiments.models import make_model

__all__ = ["Trainer", "check_fits", "train_together"]


class Trainer:
    """A run in memory: model, optimizer, epoch and batch.

    Args:
        config: The settings.
        dataset: The data, on the device to train on.
        seed: Seed of initial weights, order of the data, augmentation and noise.
    """

    def __init__(self, config: Config, dataset: Dataset, *, seed: int) -> None:
        self.config, self.dataset, self.seed = config, dataset, seed
        self.method = METHODS[config.method]
        epoch_length(dataset, config.batch_size, augment=config.augment, drop_last=config.drop_last)  # checks them
        check_fits(config, dataset.num_train)
        model = make_model(
            config.model, num_classes=dataset.num_classes, image_shape=dataset.image_shape, seed=seed
        ).to(dataset.device)
        self.model = model.to(memory_format=torch.channels_last) if config.channels_last else model  # type: ignore[call-overload]
        self.optimizer = make_optimizer(config, self.model, dataset.num_train, seed=seed)
        self._lr_unit = self.method.lr_unit(config, dataset.num_train)
        self.collector = self.method.collector(config, self.model) if self.method.collector else None
        self.epoch = 0
        self.batch = 0
        """Number of batches of the current epoch that are done."""
        self.seconds = 0.0
        self.log: list[dict[str, float]] = []
        """One entry per finished epoch."""
        self._reset_sums()

    # ------------------------------------------------------------------ the loop

    def steps(self) -> Iterator[None]:
        """Train to the end; yield after each step, so that the run can be saved or stopped there."""
        return train_together([self])

    def _count(self, size: int) -> None:
        """Count a step."""
        if self.collector is not None and self.epoch >= self.config.epochs:
            self.collector.step()
        self._examples += size
        self.batch += 1

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        autocast = self.config.precision == "bfloat16"
        with torch.autocast(x.device.type, torch.bfloat16) if autocast else contextlib.nullcontext():
            logits = self.model(x)
        return F.cross_entropy(logits.float(), y)

    def _set_rates(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate(self.epoch) * self._lr_unit
            if self.epoch >= self.config.epochs:
                group["momentum"] = self.config.swag_momentum

    def _finish_epoch(self) -> None:
        loss = float(self._loss_sum) / max(self._examples, 1)
        rate = self.config.learning_rate(self.epoch)
        entry = {"epoch": self.epoch + 1, "loss": loss, "accuracy": self._accuracy(), "lr": rate}
        self.log.append({**entry, "seconds": round(self.seconds, 3)})
        self.epoch, self.batch = self.epoch + 1, 0
        self._reset_sums()

    def _accuracy(self) -> float:
        """Return the accuracy of the current weights on the first 1,024 training examples."""
        logits, labels = self._first_logits()
        return float((logits.argmax(1) == labels).float().mean())

    @torch.no_grad()
    def _first_logits(self) -> tuple[Tensor, Tensor]:
        self.model.eval()
        images, labels = (part[:1024] for part in self.dataset.train)
        return self.model(self.dataset.normalise(images)), labels

    @property
    def progress(self) -> float:
        """Number of epochs done, with a fraction for the current one."""
        batches = self.dataset.num_train / self.config.batch_size
        return self.epoch + min(1.0, self.batch / batches)

    @property
    def diverged(self) -> bool:
        """Whether a step was skipped, or the network's output at the current weights is not finite."""
        return getattr(self.optimizer, "skipped_steps", 0) > 0 or not bool(self._first_logits()[0].isfinite().all())

    def _reset_sums(self) -> None:
        self._loss_sum = torch.zeros((), device=self.dataset.device)
        self._examples = 0

    # ------------------------------------------------------------------ result and state

    def posterior(self) -> bsam.Posterior:
        """Return the posterior of the weights."""
        return self.method.posterior(self)

    def state(self) -> dict[str, Any]:
        """Return everything that is needed to go on exactly here."""
        return {
            "config": dataclasses.asdict(self.config),
            "seed": self.seed,
            "epoch": self.epoch,
            "batch": self.batch,
            "seconds": self.seconds,
            "log": self.log,
            "loss_sum": self._loss_sum,
            "examples": self._examples,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "collector": None if self.collector is None else self.collector.state_dict(),
            "generator": torch.get_rng_state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a state, so that the run goes on where it was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.collector is not None:
            self.collector.load_state_dict(state["collector"])
        torch.set_rng_state(state["generator"])
        self.epoch, self.batch, self.seconds = state["epoch"], state["batch"], state["seconds"]
        self.log = list(state["log"])
        self._loss_sum = state["loss_sum"].to(self.dataset.device)
        self._examples = state["examples"]


def train_together(trainers: Sequence[Trainer], *, compiled: bool = False) -> Iterator[None]:
    """Train runs that differ in seeds and rates only; yield after each step, when they can be saved or stopped.

    Args:
        trainers: The runs, all at the same epoch and batch.
        compiled: Take the step of all runs at once, by `bsam.TrainStep`; otherwise one run after the other.
    """
    first = trainers[0]
    config, dataset = first.config, first.dataset
    step: bsam.TrainStep | None = None

    def count_since(begin: float) -> None:
        for trainer in trainers:
            trainer.seconds += (time.perf_counter() - begin) / len(trainers)

    while first.epoch < config.total_epochs:
        begin = time.perf_counter()
        for trainer in trainers:
            trainer._set_rates()
            trainer.model.train()
        loss_sums = torch.stack([trainer._loss_sum for trainer in trainers])
        for trainer, loss_sum in zip(trainers, loss_sums, strict=True):
            trainer._loss_sum = loss_sum
        batches = stacked_batches(
            dataset,
            config.batch_size,
            seeds=[trainer.seed for trainer in trainers],
            epoch=first.epoch,
            augment=config.augment,
            drop_last=config.drop_last,
            start_batch=first.batch,
        )
        for x, y in batches:
            if config.channels_last and x.dim() == 5:
                x = x.flatten(0, 1).to(memory_format=torch.channels_last).view(x.shape)
            if compiled and step is None and x.shape[1] == config.batch_size:
                step = bsam.TrainStep(
                    [t.optimizer for t in trainers],
                    [t.loss for t in trainers],
                    (x, y),
                    module=[t.model for t in trainers],
                )
            if step is None:
                losses = torch.stack([t.method.step(t.optimizer, t.loss, x[i], y[i]) for i, t in enumerate(trainers)])
            else:
                losses = step(x, y)
            loss_sums.add_(losses, alpha=x.shape[1])
            for trainer in trainers:
                trainer._count(x.shape[1])
            count_since(begin)
            yield
            begin = time.perf_counter()
        loss_sums.cpu()  # waits for steps that were launched on a GPU
        if step is not None:
            step.check()
        count_since(begin)
        begin = time.perf_counter()
        for trainer in trainers:
            trainer._finish_epoch()
        count_since(begin)
        yield


def check_fits(config: Config, num_train: int) -> None:
    """Raise if the data is too small for the settings, and not only in the middle of the run."""
    smallest = min(config.batch_size, num_train)
    if smallest < config.splits:
        raise ValueError(f"splits={config.splits} is more than the {smallest} examples of a batch: write {smallest}.")
    if config.batch_size > num_train:
        raise ValueError(f"batch_size={config.batch_size} is more than the {num_train} training examples.")
    length = num_train // config.batch_size if config.drop_last else -(-num_train // config.batch_size)
    if config.swag_epochs and config.swag_epochs * length < 2 * config.swag_interval:
        steps = config.swag_epochs * length
        raise ValueError(
            f"swag_interval={config.swag_interval} gives {steps // config.swag_interval} snapshots in {steps} steps of "
            f"swag_epochs={config.swag_epochs}, and SWAG needs 2 or more: write swag_interval={max(1, steps // 20)}."
        )
