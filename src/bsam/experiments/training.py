"""One training loop for all methods: the method is its optimizer, everything else is shared."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import bsam

__all__ = ["METHODS", "make_optimizer", "mlp", "posterior_of", "train"]

METHODS = {"sgd": "SGD", "adam": "Adam", "sam-sgd": "SAM-SGD", "sam-adam": "SAM-Adam", "bsam": "bSAM"}
"""Method's name in settings, and in tables."""


def mlp(*sizes: int) -> nn.Sequential:
    """A fully connected network with ReLU between its layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_optimizer(
    method: str,
    model: nn.Module,
    num_data: int,
    *,
    lr: float,
    prior_precision: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    rho: float | None = None,
    damping: float = 0.1,
    splits: int = 1,
    seed: int = 0,
) -> Optimizer:
    """The optimizer of a method, in the paper's settings: prior_precision / num_data is the weight decay of all."""
    decay = prior_precision / num_data
    sgd: dict[str, Any] = {"lr": lr, "momentum": beta1, "weight_decay": decay}
    adam: dict[str, Any] = {"lr": lr, "betas": (beta1, beta2), "weight_decay": decay}
    if method == "sgd":
        return torch.optim.SGD(model.parameters(), **sgd)
    if method == "adam":
        return torch.optim.Adam(model.parameters(), **adam)
    if rho is None:
        raise ValueError(f"{method} needs rho: its settings have none.")
    if method == "sam-sgd":
        return bsam.SAM(model.parameters(), torch.optim.SGD, rho=rho, splits=splits, module=model, **sgd)
    if method == "sam-adam":
        return bsam.SAM(model.parameters(), torch.optim.Adam, rho=rho, splits=splits, module=model, **adam)
    if method == "bsam":
        return bsam.BSAM(
            model.parameters(),
            lr,
            num_data=num_data,
            rho=rho,
            prior_precision=prior_precision,
            betas=(beta1, beta2),
            damping=damping,
            splits=splits,
            module=model,
            seed=seed,
        )
    raise ValueError(f"method={method!r} must be one of {', '.join(METHODS)}.")


def train(
    model: nn.Module,
    optimizer: Optimizer,
    data: tuple[Tensor, Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    after_epoch: Callable[[], Any] = lambda: None,
) -> None:
    """Train with a cosine schedule to 0, on batches in an order drawn from `seed`."""
    x, y = data
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(seed)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return loss(model(x), y)

    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(x), generator=generator), batch_size):
            if isinstance(optimizer, bsam.BSAM | bsam.SAM):
                optimizer.step(loss_fn, x[batch], y[batch])
            else:
                optimizer.zero_grad()
                loss_fn(x[batch], y[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        schedule.step()
        after_epoch()


def posterior_of(optimizer: Optimizer, model: nn.Module) -> bsam.Posterior:
    """What the optimizer learned about the weights: a Gaussian, or a point."""
    if isinstance(optimizer, bsam.BSAM | bsam.SAM):
        return optimizer.posterior(model)
    return bsam.PointMass.from_model(model)
