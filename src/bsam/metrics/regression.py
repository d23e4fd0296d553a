r"""Metrics of real predictions: NLL, RMSE, $R^2$, coverage, CRPS, and the calibration of quantiles.

Every example $i$ has $D$ targets $y_{id}$, their predicted means $f_{id}$, the log-density $\log p(y_i)$ of all its
targets, and the predicted probability $F_{id}$ of a smaller target. $[\cdot]$ is 1 if the statement is true and 0 if
not, and $\bar y_d$ is the mean target of output $d$. Over $n$ examples:

| metric | formula | remark |
|---|---|---|
| NLL | $-\frac1n \sum_i \log p(y_i)$ | natural logarithm |
| RMSE | $\sqrt{\frac{1}{n D} \sum_{id} (y_{id} - f_{id})^2}$ | |
| $R^2$ | $1 - \sum_i (y_{id} - f_{id})^2 / \sum_i (y_{id} - \bar y_d)^2$ | the mean of this over the outputs $d$ |
| coverage | $\frac{1}{n D} \sum_{id} [\lvert 2 F_{id} - 1 \rvert \le q]$ | targets in the central interval of $q$ |

$R^2$ is NaN if all targets of an output are equal. $q$ is 50% or 95%, and the coverage of calibrated predictions is
$q$, up to chance. It is exact for the mixture of Gaussians that `bsam.predict` averages, which is not a Gaussian.

The continuous ranked probability score (Gneiting and Raftery, 2007) is the mean over all $n D$ targets of

```math
\mathrm{CRPS}(F, y) = \int (F(z) - [z \ge y])^2 \, dz
```

in units of the targets; smaller is better. For a Gaussian, and for a mixture of Gaussians with means $f_s$, weights
$w_s$ and one variance $v$, it has closed forms (Grimit et al., 2006). Let $A(m, v)$ be the expectation of
$\lvert X \rvert$ for $X \sim \mathcal N(m, v)$:

```math
A(m, v) = 2 \sqrt v \, \phi(m / \sqrt v) + m \, (2 \Phi(m / \sqrt v) - 1)
```

where $\phi$ and $\Phi$ are density and distribution function of $\mathcal N(0, 1)$. Then

```math
\mathrm{CRPS} = \sum_s w_s A(y - f_s, v) - \frac12 \sum_{st} w_s w_t A(f_s - f_t, 2 v)
```

The calibration of quantiles compares a level $q$ with the share of the $F_{id}$ that are at most $q$ (Kuleshov et al.,
2018). Its error is the area between this curve and the diagonal, over all levels; it has no interval, as all
calibration errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from bsam.metrics.bootstrap import Numbers, check_bootstrap, with_intervals

__all__ = [
    "CrpsSummary",
    "GaussianSummary",
    "HasGaussianPredictions",
    "HasMixture",
    "QuantileTable",
    "crps",
    "quantile_calibration",
    "rate_gaussian",
]

_COVERED = (0.5, 0.95)
"""The probabilities of the central intervals whose coverage is computed."""


class HasGaussianPredictions(Protocol):
    """Real predictions, such as `bsam.GaussianPredictions`."""

    @property
    def mean(self) -> Tensor:
        """The average output, (n,) or (n, D)."""

    @property
    def targets(self) -> Tensor | None:
        """Of the same shape."""

    @property
    def log_density(self) -> Tensor | None:
        """The log-density of each example's targets, (n,)."""

    @property
    def cdf(self) -> Tensor | None:
        """The predicted probability of a smaller target, of the shape of the targets."""


class HasMixture(Protocol):
    """Real predictions with all that their distribution needs, such as `bsam.GaussianPredictions`."""

    @property
    def mean(self) -> Tensor:
        """The average output, (n,) or (n, D)."""

    @property
    def targets(self) -> Tensor | None:
        """Of the same shape."""

    @property
    def epistemic_variance(self) -> Tensor:
        """The variance of the output over the samples."""

    @property
    def noise_std(self) -> float:
        """The standard deviation of a measurement around the true output."""

    @property
    def sample_means(self) -> Tensor | None:
        """The output of each sample, (S, n) or (S, n, D)."""


@dataclass(frozen=True)
class GaussianSummary(Numbers):
    """The metrics of one set of real predictions. `intervals` has (low, high) per metric, or is empty."""

    names: ClassVar[tuple[str, ...]] = ("nll", "rmse", "r2", "coverage_50", "coverage_95")

    num_examples: int
    nll: float
    rmse: float
    r2: float
    coverage_50: float
    """The share of targets inside their central interval of probability 50%."""
    coverage_95: float
    intervals: dict[str, tuple[float, float]]
    level: float


def rate_gaussian(
    predictions: HasGaussianPredictions, *, num_bootstrap: int, level: float, seed: int
) -> GaussianSummary:
    """Return the metrics of real predictions, for `summary`."""
    check_bootstrap(num_bootstrap, level)
    if predictions.targets is None or predictions.log_density is None:
        raise ValueError("the predictions have no targets, which the metrics need; predict on (inputs, targets)")
    columns = {"mean": predictions.mean, "targets": predictions.targets, "log_density": predictions.log_density}
    for name, column in columns.items():
        if bool(column.isnan().any()) or (name != "log_density" and not bool(column.isfinite().all())):
            raise ValueError(f"{name} must be finite everywhere; look for inf or NaN in the outputs and the targets")
    if not len(predictions.mean):
        raise ValueError("the metrics need at least one example, got none; predict on n > 0 examples")
    n = len(predictions.mean)
    f, y = (tensor.detach().cpu().double().reshape(n, -1) for tensor in (predictions.mean, predictions.targets))
    squares, y, nll = (y - f).square(), y - y.mean(dim=0), -predictions.log_density.detach().cpu().double()
    if predictions.cdf is None:
        inside = torch.full((len(_COVERED), n), math.nan, dtype=torch.float64)
    else:
        distance = (2 * predictions.cdf.detach().cpu().double().reshape(n, -1) - 1).abs()
        inside = torch.stack([(distance <= q).double().mean(dim=1) for q in _COVERED])

    def metrics_of(index: Tensor) -> Tensor:
        total = (y[index] - y[index].mean(dim=1, keepdim=True)).square().sum(dim=1)
        left = squares[index].sum(dim=1)
        r2 = torch.where(total > 0, 1 - left / total, math.nan).mean(dim=-1)
        rmse = squares[index].mean(dim=(1, 2)).sqrt()
        return torch.stack([nll[index].mean(dim=1), rmse, r2, *(part[index].mean(dim=1) for part in inside)], dim=-1)

    values, intervals = with_intervals(
        GaussianSummary.names, metrics_of, n, f.numel(), num_bootstrap=num_bootstrap, level=level, seed=seed
    )
    return GaussianSummary(num_examples=n, **values, intervals=intervals, level=level)


def _check_real(attribute: str, predictions: object) -> None:
    """Raise a TypeError for predictions of classes, and for other objects."""
    if not hasattr(predictions, attribute):
        raise TypeError(
            "predictions must be of real targets, such as bsam.GaussianPredictions, got "
            f"{type(predictions).__name__}; predict with likelihood='gaussian'"
        )


# ------------------------------------------------------------------ CRPS


@dataclass(frozen=True)
class CrpsSummary(Numbers):
    """The continuous ranked probability score. `intervals` has (low, high), or is empty."""

    names: ClassVar[tuple[str, ...]] = ("crps",)

    num_examples: int
    crps: float
    intervals: dict[str, tuple[float, float]]
    level: float


def crps(predictions: HasMixture, *, num_bootstrap: int = 1000, level: float = 0.95, seed: int = 0) -> CrpsSummary:
    """Return the continuous ranked probability score of real predictions, in closed form.

    Args:
        predictions: `bsam.GaussianPredictions` with targets. If the weights were sampled, they need the outputs of each
            sample: predict with `keep_samples=True`.
        num_bootstrap: Number of resamples; 0 gives no interval.
        level: Coverage of the interval.
        seed: Seed of the bootstrap's separate generator.
    """
    check_bootstrap(num_bootstrap, level)
    _check_real("targets", predictions)
    if predictions.targets is None:
        raise ValueError("the predictions have no targets, which the metrics need; predict on (inputs, targets)")
    n = len(predictions.mean)
    if not n:
        raise ValueError("the metrics need at least one example, got none; predict on n > 0 examples")
    y = predictions.targets.detach().cpu().double()
    weights: Tensor | None = getattr(predictions, "sample_weights", None)
    if predictions.sample_means is not None:
        f = predictions.sample_means.detach().cpu().double()
        w = torch.full((len(f),), 1 / len(f), dtype=torch.float64, device="cpu")
        w = w if weights is None else weights.detach().cpu().double()
        values = _crps_of_mixture(y, f, w / w.sum(), predictions.noise_std**2)
    elif bool((predictions.epistemic_variance == 0).all()) or getattr(predictions, "computed_by", "") == "linearised":
        variance = predictions.epistemic_variance.detach().cpu().double() + predictions.noise_std**2
        values = _expected_distance(y - predictions.mean.detach().cpu().double(), variance)
        values = values - 0.5 * _expected_distance(torch.zeros_like(y), 2 * variance)
    else:
        raise ValueError(
            "the predictions are a mixture over samples of the weights, whose CRPS needs the output of each sample; "
            "predict with keep_samples=True"
        )
    if not bool(values.isfinite().all()):
        raise ValueError("the CRPS is not finite everywhere; look for inf or NaN in the outputs and the targets")
    of_examples = values.reshape(n, -1).mean(dim=1)
    found, intervals = with_intervals(
        CrpsSummary.names,
        lambda index: of_examples[index].mean(dim=1, keepdim=True),
        n,
        n,
        num_bootstrap=num_bootstrap,
        level=level,
        seed=seed,
    )
    return CrpsSummary(n, **found, intervals=intervals, level=level)


def _expected_distance(mean: Tensor, variance: Tensor | float) -> Tensor:
    """Return A(mean, variance) = E|X| of X ~ N(mean, variance)."""
    std = torch.as_tensor(variance, dtype=torch.float64, device="cpu").sqrt()
    z = mean / std
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    signed: Tensor = mean * torch.special.erf(z / math.sqrt(2))
    return 2 * std * density + signed


def _crps_of_mixture(y: Tensor, f: Tensor, w: Tensor, variance: float) -> Tensor:
    """Return the CRPS of targets y (n, ...), for means f (S, n, ...) with weights w (S,) and one variance."""
    shares = w.reshape(-1, *[1] * (f.ndim - 1))
    total = (shares * _expected_distance(y - f, variance)).sum(dim=0)
    for s in range(len(f)):  # pairs of samples, S of them at a time
        others = (shares[s:] * _expected_distance(f[s] - f[s:], 2 * variance)).sum(dim=0)
        own = shares[s] * _expected_distance(torch.zeros_like(y), 2 * variance)
        total = total - w[s] * (others - 0.5 * own)
    return total


# ------------------------------------------------------------------ quantiles


@dataclass(frozen=True, eq=False)
class QuantileTable:
    r"""How often targets are below predicted quantiles.

    Attributes:
        level: the levels $0, 1/m, 2/m, \dots, 1$ of the quantiles, a float64 tensor.
        observed: the share of targets below the quantile of each level.
        error: the area between the curve and the diagonal, over all levels and not only those of the table; 0 is
            perfect, 0.5 the worst.
    """

    level: Tensor
    observed: Tensor
    error: float


def quantile_calibration(predictions: HasGaussianPredictions, num_levels: int = 20) -> QuantileTable:
    """Return how often targets are below their predicted quantiles.

    Args:
        predictions: `bsam.GaussianPredictions` with targets.
        num_levels: The number $m$ of steps between the levels 0 and 1.
    """
    if not isinstance(num_levels, int) or num_levels < 1:
        raise ValueError(f"num_levels must be a positive integer, got {num_levels!r}; write 20 for the default")
    _check_real("cdf", predictions)
    if predictions.cdf is None:
        raise ValueError("the predictions have no targets, or are of an earlier version; predict on (inputs, targets)")
    u = predictions.cdf.detach().cpu().double().flatten().sort().values
    if not len(u):
        raise ValueError("the metrics need at least one example, got none; predict on n > 0 examples")
    if not bool(((u >= 0) & (u <= 1)).all()):
        raise ValueError("cdf must have probabilities; look for inf or NaN in the outputs and the targets")
    level = torch.arange(num_levels + 1, dtype=torch.float64, device="cpu") / num_levels
    observed = torch.searchsorted(u, level, right=True).double() / len(u)
    # Between two neighbours of u the curve is constant, c, and the integral of |q - c| is (q - c) |q - c| / 2.
    edges = torch.cat([u.new_zeros(1), u, u.new_ones(1)])
    c = torch.arange(len(u) + 1, dtype=torch.float64, device="cpu") / len(u)
    below, above = (0.5 * (end - c) * (end - c).abs() for end in (edges[:-1], edges[1:]))
    return QuantileTable(level, observed, float((above - below).sum()))
