"""The methods of the UCI study: their settings to choose from, how a stack is trained, and what each run learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

import bsam
from bsam.experiments.regression.stack import RunStack, make_member

__all__ = ["METHODS", "Method", "Settings", "Trained", "make_noise_optimizer", "take_step", "trained_runs"]

Settings = dict[str, float]
"""The settings that are chosen by validation."""


@dataclass(frozen=True, eq=False)
class Trained:
    """One trained run."""

    model: bsam.LearnedNoise
    posterior: bsam.Posterior
    settings: Settings


def _grid(**values: tuple[float, ...]) -> tuple[Settings, ...]:
    """Return all combinations."""
    combined: list[Settings] = [{}]
    for name, own in values.items():
        combined = [{**settings, name: value} for settings in combined for value in own]
    return tuple(combined)


# ------------------------------------------------------------------ optimizers of a stack


def _adam(stack: RunStack, settings: list[Settings], num_data: int) -> Optimizer:
    groups = [{"lr": each["lr"], "weight_decay": each["prior_precision"] / num_data} for each in settings]
    return Adam(stack.parameter_groups(groups))


def _gaussian(kind: Callable[..., Optimizer], **options: Any) -> Callable[..., Optimizer]:
    """Return a function that makes an optimizer of ours."""

    def make(stack: RunStack, settings: list[Settings], num_data: int) -> Optimizer:
        return kind(stack.parameter_groups(settings), num_data=num_data, module=stack, **options)

    return make


NOISE_LR = 0.01
"""The learning rate of the noise, by Adam."""


def make_noise_optimizer(stack: RunStack) -> Optimizer:
    """Make the optimizer of the noises: the same for all methods."""
    return Adam(stack.noises(), lr=NOISE_LR)


def take_step(optimizer: Any, noise: Optimizer, stack: RunStack, x: Tensor, y: Tensor) -> None:
    """Take one step of the weights and one of the noise, of every run.

    The noise of a method with a posterior is learned at sampled weights: its best value is the expected square of the
    residual over the posterior.
    """
    if isinstance(optimizer, Adam):
        optimizer.zero_grad()
        noise.zero_grad()
        loss = stack.loss(x, y)
        if not bool(loss.isfinite()):
            raise FloatingPointError(f"the loss of the stack is {float(loss.detach())}.")
        torch.autograd.backward(loss)
        optimizer.step()
    else:
        optimizer.step(stack.loss, x, y)
        with torch.no_grad(), optimizer.sampled():
            outputs = stack(x)
        noise.zero_grad()
        torch.autograd.backward(stack.nll(outputs, y))
    noise.step()


# ------------------------------------------------------------------ what the runs learned


def _posteriors(stack: RunStack, optimizer: Any) -> list[bsam.Posterior]:
    whole = optimizer.posterior(stack)
    pairs = zip(stack.members(whole.mean), stack.members(whole.std), strict=True)
    return [bsam.DiagonalGaussian(mean, std) for mean, std in pairs]


def _points(stack: RunStack, optimizer: Any) -> list[bsam.Posterior]:
    return [bsam.PointMass(mean) for mean in stack.members(bsam.PointMass.from_model(stack).mean)]


Predict = Callable[[list[Trained], tuple[Tensor, Tensor], tuple[Tensor, Tensor]], bsam.GaussianPredictions]
"""Predicts from the runs of one split, its training data, and the data to predict."""

NUM_SAMPLES = 32


def _averaged(
    runs: list[Trained], train: tuple[Tensor, Tensor], data: tuple[Tensor, Tensor]
) -> bsam.GaussianPredictions:
    posterior = runs[0].posterior if len(runs) == 1 else bsam.Mixture([run.posterior for run in runs])
    return bsam.predict(
        runs[0].model,
        posterior,
        data,
        likelihood="gaussian",
        num_samples=NUM_SAMPLES,
        keep_samples=True,
        progress=False,
    )


def _linearised(
    runs: list[Trained], train: tuple[Tensor, Tensor], data: tuple[Tensor, Tensor]
) -> bsam.GaussianPredictions:
    (run,) = runs
    run.posterior.write_mean(run.model)
    posterior = bsam.laplace(run.model, "gaussian", train, prior_precision=run.settings["prior_precision"])
    return bsam.predict_linearised(run.model, posterior, data, likelihood="gaussian")


# ------------------------------------------------------------------ the entries


@dataclass(frozen=True)
class Method:
    """Everything that the study needs to know about a method."""

    title: str
    make: Callable[[RunStack, list[Settings], int], Optimizer]
    """Makes the optimizer of a stack, from the settings of its groups and the number of training examples."""
    grid: tuple[Settings, ...]
    posteriors: Callable[[RunStack, Any], list[bsam.Posterior]] = _posteriors
    predict: Predict = _averaged
    chosen_by: str | None = None
    """The method whose choice of settings is taken over; None if the method chooses by its own predictions."""
    num_runs: int = 1
    """Runs per split."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Settings that are not chosen, for the record."""


_ADAM: dict[str, Any] = {
    "make": _adam,
    "grid": _grid(lr=(0.003, 0.01), prior_precision=(1.0, 10.0)),
    "posteriors": _points,
}
_IVON: dict[str, Any] = {"betas": (0.9, 0.995), "initial_hessian": 0.5}
_VOGN: dict[str, Any] = {"betas": (0.9, 0.995)}
_BSAM: dict[str, Any] = {"rho": 0.001, "prior_precision": 1.0, "max_noise": None, "max_grad_norm": None}

METHODS: dict[str, Method] = {
    "adam": Method("Adam", **_ADAM),
    "ensemble": Method("Ensemble of 5", **_ADAM, chosen_by="adam", num_runs=5),
    "laplace": Method("Laplace", **_ADAM, predict=_linearised),
    "vogn": Method(
        "VOGN",
        _gaussian(bsam.VOGN, **_VOGN),
        _grid(lr=(0.01, 0.03), prior_precision=(0.3, 3.0)),
        fixed=_VOGN,
    ),
    "ivon": Method(
        "IVON",
        _gaussian(bsam.IVON, **_IVON),
        _grid(lr=(0.03, 0.1), prior_precision=(0.3, 3.0)),
        fixed=_IVON,
    ),
    "bsam": Method(
        "bSAM",
        _gaussian(bsam.BSAM, **_BSAM),
        _grid(lr=(0.2, 0.5), damping=(0.3, 1.0)),
        fixed=_BSAM,
    ),
}
"""By name in the record."""


def trained_runs(method: Method, stack: RunStack, optimizer: Any, settings: list[Settings]) -> list[Trained]:
    """Return the runs of a trained stack, group after group."""
    of_run = [own for own, size in zip(settings, stack.sizes, strict=True) for _ in range(size)]
    model = make_member(stack.num_features, stack.hidden, 0)  # predictions write a posterior's mean into it
    return [
        Trained(model, posterior, own)
        for posterior, own in zip(method.posteriors(stack, optimizer), of_run, strict=True)
    ]
