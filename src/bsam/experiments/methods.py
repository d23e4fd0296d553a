"""The optimizer of each method, from the settings of a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import bsam
from bsam.experiments.config import Config
from bsam.experiments.ivon import Ivon, check_ivon

__all__ = ["METHODS", "POINTS", "check_installed", "make_optimizer", "predict"]

METHODS = {
    "sgd": "SGD",
    "sam-sgd": "SAM-SGD",
    "laplace": "SAM + Laplace",
    "swag": "SWAG",
    "vogn": "VOGN",
    "adam": "Adam",
    "sam-adam": "SAM-Adam",
    "bsam": "bSAM",
    "ivon": "IVON",
}
"""Name of a method in settings, and in tables: those of the paper's tables in their order, then others."""

POINTS = ("sgd", "sam-sgd", "adam", "sam-adam")
"""Methods whose posterior is a point: samples and temperatures change nothing."""

_MANY_STEPS = 1e6
"""Steps after which beta^step is 0 in float64 for every beta up to 0.999; float32 counts on from it exactly."""


def check_installed(config: Config) -> None:
    """Raise if the method needs a package that is not there."""
    if config.method == "ivon":
        check_ivon()


def make_optimizer(config: Config, model: nn.Module, num_data: int, *, seed: int) -> Optimizer | Ivon:
    """The optimizer; for methods without a prior, prior_precision / num_data is the weight decay."""
    decay = config.prior_precision / num_data
    sgd: dict[str, Any] = {"lr": config.lr, "momentum": config.beta1, "weight_decay": decay}
    adam: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "weight_decay": decay}
    shared: dict[str, Any] = {"splits": config.splits, "max_grad_norm": config.max_grad_norm, "module": model}
    bayes: dict[str, Any] = {
        "lr": config.lr,
        "num_data": num_data,
        "augmentation_factor": config.augmentation_factor,
        "prior_precision": config.prior_precision,
        "betas": (config.beta1, config.beta2),
        "damping": config.damping,
        "seed": seed,
    }
    match config.method:
        case "sgd" | "swag":
            return torch.optim.SGD(model.parameters(), **sgd)
        case "adam":
            return _started(torch.optim.Adam(model.parameters(), **adam), config)
        case "sam-sgd" | "laplace":
            return bsam.SAM(model.parameters(), torch.optim.SGD, rho=config.rho, **shared, **sgd)
        case "sam-adam":
            sam = bsam.SAM(model.parameters(), torch.optim.Adam, rho=config.rho, **shared, **adam)
            return _started(sam, config)
        case "vogn":
            return bsam.VOGN(model.parameters(), statistics=config.statistics, **shared, **bayes)
        case "bsam":
            return bsam.BSAM(
                model.parameters(),
                rho=config.rho,
                perturb_from=config.perturb_from,
                curvature=config.curvature,
                sample_noise=config.sample_noise,
                **shared,
                **bayes,
            )
        case "ivon":
            return Ivon(
                model.parameters(),
                lr=config.lr,
                num_data=num_data * config.augmentation_factor,
                prior_precision=config.prior_precision,
                betas=(config.beta1, config.beta2),
                initial_hessian=config.initial_hessian,
                seed=seed,
            )


def _started(adam: Optimizer, config: Config) -> Optimizer:
    """Adam; without a bias correction, if the settings say so.

    torch divides the averages by 1 - beta^step. After so many steps that is 1, so counting from there leaves the
    correction out.
    """
    if not config.bias_correction:
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            averages = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            adam.state[parameter] = {"step": torch.tensor(_MANY_STEPS), **averages}
    return adam


def predict(
    config: Config, model: nn.Module, posterior: bsam.Posterior, data: Any, *, num_samples: int, seed: int = 0
) -> bsam.Predictions:
    """What a method predicts: the average over samples, or, at a Laplace approximation, the linearised model's."""
    if config.temperature != 1:
        posterior = posterior.temper(config.temperature)
    if config.method == "laplace" and num_samples and isinstance(posterior, bsam.DiagonalGaussian):
        return bsam.predict_linearised(model, posterior, data, num_samples=num_samples, seed=seed)
    pays = num_samples >= 256 and next(model.parameters()).is_cuda  # compiling takes as long as hundreds of passes
    return bsam.predict(model, posterior, data, num_samples=num_samples, seed=seed, compile=pays, progress=False)
