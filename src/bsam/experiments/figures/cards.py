"""One small picture per method, for its page: logistic regression with two weights, where the exact posterior is known.

Each method trains on minibatches of `bsam.theory.losses.separable_data`, with the prior N(0, I) and the package's own
classes. The picture shows the path of the weights, and the posterior that the method gives: an ellipse, or a point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import bsam
from bsam.experiments.figures.threads import one_thread
from bsam.experiments.style import BLACK, BLUE, GRAY, RED, ellipse
from bsam.theory.gaussian import Array
from bsam.theory.losses import logistic_regression, separable_data

__all__ = ["CARDS", "Card", "compute_card", "draw_card"]

_BATCH, _PRIOR = 10, 1.0


@dataclass(frozen=True)
class Card:
    """What a method does with two weights."""

    method: str  # a name of `CARDS`
    path: Array  # the weights after each step, (steps, 2)
    mean: Array  # of the posterior
    covariance: Array  # zero, up to rounding, for a point
    weights: Array  # a grid of both weights
    density: Array  # of the exact posterior on the grid, not normalised


def _sam(cls: Any, rho: float, model: nn.Linear, num_data: int) -> Any:
    options: Any = {"lr": 0.1, "momentum": 0.9, "weight_decay": _PRIOR / num_data, "module": model}
    return cls(model.parameters(), torch.optim.SGD, rho=rho, **options)


def _bsam(model: nn.Linear, num_data: int) -> Any:
    return bsam.BSAM(
        model.parameters(),
        lr=0.3,
        num_data=num_data,
        prior_precision=_PRIOR,
        damping=0.02,
        module=model,
        max_noise=None,
    )


def _ivon(model: nn.Linear, num_data: int) -> Any:
    options: Any = {"betas": (0.9, 0.99), "initial_hessian": 0.5, "module": model}
    return bsam.IVON(model.parameters(), lr=0.1, num_data=num_data, prior_precision=_PRIOR, **options)


def _vogn(model: nn.Linear, num_data: int) -> Any:
    options: Any = {"betas": (0.9, 0.99), "damping": 0.02, "module": model}
    return bsam.VOGN(model.parameters(), lr=0.02, num_data=num_data, prior_precision=_PRIOR, **options)


CARDS: dict[str, tuple[str, Callable[[nn.Linear, int], Any] | None]] = {
    "bsam": ("bSAM", _bsam),
    "sam": ("SAM", partial(_sam, bsam.SAM, 0.1)),
    "asam": ("ASAM", partial(_sam, bsam.ASAM, 0.2)),
    "ivon": ("IVON", _ivon),
    "vogn": ("VOGN", _vogn),
    "swag": ("SWAG", None),
    "laplace": ("Laplace", None),
}
"""Title of each method, and how its optimizer is made; None: the method works beside SGD, or after it."""


@one_thread()
def compute_card(method: str, num_steps: int = 600) -> Card:
    """Train one method."""
    features, labels = separable_data()
    num_data = len(labels)
    x, y = torch.from_numpy(features), torch.from_numpy((labels + 1) / 2)
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    make = CARDS[method][1]
    optimizer: Any = (
        make(model, num_data)
        if make
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=_PRIOR / num_data)
    )
    swag = bsam.SWAG(model, rank=20, interval=5) if method == "swag" else None

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(x)[:, 0], y)

    generator = torch.Generator().manual_seed(0)
    path = [np.zeros(2)]
    for step in range(num_steps):
        part = torch.randint(num_data, (_BATCH,), generator=generator)
        if make:
            optimizer.step(loss_fn, x[part], y[part])
        else:
            optimizer.zero_grad()
            loss_fn(x[part], y[part]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if swag is not None and step >= num_steps // 2:
            swag.step()
        path.append(model.weight.detach().numpy().ravel().copy())
    if swag is not None:
        posterior: Any = swag.posterior()
    elif method == "laplace":
        posterior = bsam.laplace(model, "bernoulli", (x, y), prior_precision=_PRIOR)
    else:
        posterior = optimizer.posterior()
    samples = np.stack([posterior.sample(generator)["weight"].numpy().ravel() for _ in range(2000)])
    weights = np.linspace(-1, 5, 121)
    mesh = np.stack(np.meshgrid(weights, weights), -1)
    log_density = -logistic_regression(features, labels)(mesh) - _PRIOR / 2 * (mesh**2).sum(-1)
    density = np.exp(log_density - log_density.max())
    return Card(method, np.array(path), samples.mean(0), np.cov(samples.T), weights, density)


def draw_card(result: Card, figure: Figure) -> None:
    """Draw the exact posterior, the path and what the method gives."""
    axes = figure.subplots()
    levels = [0.1, 0.3, 0.5, 0.7, 0.9]
    axes.contour(result.weights, result.weights, result.density, levels=levels, colors=GRAY, linewidths=0.7)
    axes.plot(*result.path.T, color=BLUE, lw=0.6, alpha=0.6, label="path of the weights")
    if result.covariance.max() > 1e-9:
        ellipse(axes, result.mean, result.covariance, ec=RED, lw=2.2)
        axes.plot([], [], color=RED, lw=2.2, label="its posterior, 90%")
        axes.plot(*result.mean, "+", color=RED, ms=9, mew=2)
    else:
        axes.plot(*result.mean, "*", color=RED, ms=14, mec=BLACK, mew=0.7, label="its solution, a point")
    axes.plot([], [], color=GRAY, lw=0.7, label="exact posterior")
    axes.set(xlim=(-0.5, 4.2), ylim=(-0.5, 4.2), xlabel="$w_1$", ylabel="$w_2$", aspect="equal")
    axes.set_title(f"{CARDS[result.method][0]} on two weights")
    axes.legend(loc="upper left")
