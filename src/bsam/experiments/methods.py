"""The registry of methods: one entry per method. No other file of the experiments has a list of methods.

To add one, write its optimizer in `bsam.optim`, export it, and add its entry to `METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import bsam
from bsam.experiments.data import plain_batches

if TYPE_CHECKING:
    from bsam.experiments.config import Config
    from bsam.experiments.trainer import Trainer

__all__ = ["METHODS", "Method", "make_optimizer", "predict"]

Loss = Callable[[Tensor, Tensor], Tensor]

_MANY_STEPS = 1e6
"""Steps after which beta^step is 0 in float64 for every beta up to 0.999; float32 counts on from it exactly."""
_TEST_SET = 10_000
_MANY_PREDICTIONS = 256 * _TEST_SET
"""Predictions of single samples that take longer than compiling a pass."""


# ------------------------------------------------------------------ how an optimizer is made


def _plain(base: type[Optimizer]) -> Callable[..., Optimizer]:
    """Return a function that makes an optimizer of torch."""

    def make(config: Config, model: nn.Module, num_data: int, seed: int) -> Optimizer:
        return _started(base(model.parameters(), **_base_options(base, config, num_data)), base, config)

    return make


def _sharpness_aware(kind: Callable[..., Optimizer], base: type[Optimizer]) -> Callable[..., Optimizer]:
    """Return a function that makes an optimizer of ours which hands its gradient to an optimizer of torch."""

    def make(config: Config, model: nn.Module, num_data: int, seed: int, **options: Any) -> Optimizer:
        options |= _base_options(base, config, num_data)
        return _started(kind(model.parameters(), base, module=model, **options), base, config)

    return make


def _gaussian(kind: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Return a function that makes an optimizer of ours which learns a Gaussian."""

    def make(config: Config, model: nn.Module, num_data: int, seed: int, **options: Any) -> Optimizer:
        options |= {"lr": config.lr, "betas": (config.beta1, config.beta2), "num_data": num_data, "seed": seed}
        return kind(model.parameters(), module=model, **options)

    return make


def _base_options(base: type[Optimizer], config: Config, num_data: int) -> dict[str, Any]:
    """Return the options of an optimizer of torch; the weight decay stands for the prior."""
    momentum = {"betas": (config.beta1, config.beta2)} if base is Adam else {"momentum": config.beta1}
    return {"lr": config.lr, "weight_decay": config.prior_precision / num_data, **momentum}


def _started(optimizer: Optimizer, base: type[Optimizer], config: Config) -> Optimizer:
    """Switch off Adam's bias correction, if the settings say so.

    torch divides the averages by 1 - beta^step. After `_MANY_STEPS` steps this is 1, so an optimizer that counts from
    there has no correction.
    """
    if base is Adam and not config.bias_correction:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            averages = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(_MANY_STEPS), **averages}
    return optimizer


# ------------------------------------------------------------------ how an optimizer takes a step


def _closure_step(optimizer: Any, loss_fn: Loss, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = optimizer.step(loss_fn, x, y)
    return loss


def _backward_step(optimizer: Optimizer, loss_fn: Loss, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = loss_fn(x, y)
    torch.autograd.backward(loss)
    optimizer.step()
    return loss.detach()


# ------------------------------------------------------------------ what a method learns, and how it predicts


def _point(trainer: Trainer) -> bsam.Posterior:
    return bsam.PointMass.from_model(trainer.model)


def _learned(trainer: Trainer) -> bsam.Posterior:
    optimizer: Any = trainer.optimizer
    posterior: bsam.Posterior = optimizer.posterior(trainer.model)
    return posterior


def _collected(trainer: Trainer) -> bsam.Posterior:
    assert trainer.collector is not None
    return trainer.collector.posterior()


def _laplace(trainer: Trainer) -> bsam.Posterior:
    train = plain_batches(trainer.dataset, "train")
    return bsam.laplace(trainer.model, "categorical", train, prior_precision=trainer.config.prior_precision)


def _average(
    model: nn.Module, posterior: bsam.Posterior, data: Any, num_samples: int, seed: int, num_examples: int
) -> bsam.Predictions:
    pays = num_samples * num_examples >= _MANY_PREDICTIONS and next(model.parameters()).is_cuda
    return bsam.predict(
        model,
        posterior,
        data,
        num_samples=num_samples,
        seed=seed,
        recalibrate=False,  # the statistics that training left, as in all records
        compile=pays,
        progress=False,
    )


def _linearised(
    model: nn.Module, posterior: bsam.Posterior, data: Any, num_samples: int, seed: int, num_examples: int
) -> bsam.Predictions:
    if num_samples and isinstance(posterior, bsam.DiagonalGaussian):
        return bsam.predict_linearised(model, posterior, data, num_samples=num_samples, seed=seed)
    return _average(model, posterior, data, num_samples, seed, num_examples)


def _first_curvature(config: Config, num_data: int) -> float:
    """Return the first h + delta of IVON; its authors state learning rates as multiples of this number."""
    return config.initial_hessian + config.prior_precision / (num_data * config.augmentation_factor)


def _make_swag(config: Config, model: nn.Module) -> bsam.SWAG:
    return bsam.SWAG(model, rank=config.swag_rank, interval=config.swag_interval)


# ------------------------------------------------------------------ the entries


@dataclass(frozen=True)
class Method:
    """Everything that the experiments need to know about a method."""

    title: str
    """Its name in tables."""
    make: Callable[..., Optimizer]
    """Makes the optimizer from the settings, the model, the number of training examples, the seed and `options`."""
    options: tuple[str, ...] = ()
    """The settings that its optimizer takes under their own names. All take `lr`, `beta1` and `prior_precision`."""
    posterior: Callable[[Trainer], bsam.Posterior] = _point
    """Returns the posterior after training; a point by default."""
    predict: Callable[[nn.Module, bsam.Posterior, Any, int, int, int], bsam.Predictions] = _average
    """Predicts from a model, a posterior, data, a number of samples, a seed and the number of examples."""
    step: Callable[[Optimizer, Loss, Tensor, Tensor], Tensor] = _closure_step
    """Takes one step in a loop, and returns the loss."""
    gradients: int = 1
    """Number of gradients of each example in a step."""
    lr_unit: Callable[[Config, int], float] = lambda config, num_data: 1.0
    """The optimizer's learning rate for a learning rate of 1 in the settings."""
    collector: Callable[[Config, nn.Module], bsam.SWAG] | None = None
    """Makes the object that collects snapshots in the last `swag_epochs`; None if the method collects none."""

    @property
    def is_point(self) -> bool:
        """Whether its posterior is a point, so that samples and temperatures change nothing."""
        return self.posterior is _point


_SPLITS = ("splits", "max_grad_norm")
_BAYES = (*_SPLITS, "prior_precision", "damping", "augmentation_factor")

METHODS = {
    "sgd": Method("SGD", _plain(SGD), step=_backward_step),
    "sam-sgd": Method("SAM-SGD", _sharpness_aware(bsam.SAM, SGD), (*_SPLITS, "rho"), gradients=2),
    "laplace": Method(
        "SAM + Laplace",
        _sharpness_aware(bsam.SAM, SGD),
        (*_SPLITS, "rho"),
        posterior=_laplace,
        predict=_linearised,
        gradients=2,
    ),
    "swag": Method("SWAG", _plain(SGD), step=_backward_step, posterior=_collected, collector=_make_swag),
    "vogn": Method("VOGN", _gaussian(bsam.VOGN), (*_BAYES, "statistics"), posterior=_learned),
    "adam": Method("Adam", _plain(Adam), step=_backward_step),
    "sam-adam": Method("SAM-Adam", _sharpness_aware(bsam.SAM, Adam), (*_SPLITS, "rho"), gradients=2),
    "bsam": Method(
        "bSAM",
        _gaussian(bsam.BSAM),
        (*_BAYES, "rho", "perturb_from", "curvature", "sqrt_num_data", "max_noise", "sample_noise"),
        posterior=_learned,
        gradients=2,
    ),
    "ivon": Method(
        "IVON",
        _gaussian(bsam.IVON),
        (*_SPLITS, "prior_precision", "augmentation_factor", "initial_hessian"),
        posterior=_learned,
        lr_unit=_first_curvature,
    ),
    "asam-sgd": Method("ASAM-SGD", _sharpness_aware(bsam.ASAM, SGD), (*_SPLITS, "rho"), gradients=2),
}
"""By name in the settings: the methods of the paper's tables in their order, then the others."""


def make_optimizer(config: Config, model: nn.Module, num_data: int, *, seed: int) -> Optimizer:
    """Make the optimizer; for methods without a prior, prior_precision / num_data is the weight decay."""
    method = METHODS[config.method]
    options = {name: getattr(config, name) for name in method.options}
    return method.make(config, model, num_data, seed, **options)


def predict(
    config: Config,
    model: nn.Module,
    posterior: bsam.Posterior,
    data: Any,
    *,
    num_samples: int,
    seed: int = 0,
    num_examples: int = _TEST_SET,
) -> bsam.Predictions:
    """Predict by the average over samples or, for a Laplace approximation, by the linearised model.

    On CUDA, many predictions are made by a compiled pass; `num_examples` need not be exact.
    """
    if config.temperature != 1:
        posterior = posterior.temper(config.temperature)
    return METHODS[config.method].predict(model, posterior, data, num_samples, seed, num_examples)
