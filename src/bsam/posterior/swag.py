"""A Gaussian over the weights whose covariance is diagonal plus low-rank: the posterior of SWAG.

Maddox, Garipov, Izmailov, Vetrov and Wilson (2019), "A Simple Baseline for Bayesian Uncertainty in Deep Learning",
NeurIPS; section 3.3. With a variance v_j for each weight, K deviations as the columns of D, and a scale (1 in theory),

    Sigma  =  scale (1/2 diag(v) + 1 / (2 (K - 1)) D D^T)
    theta  =  mu + sqrt(scale) (sqrt(v / 2) z_1 + D z_2 / sqrt(2 (K - 1))),      z_1, z_2 ~ N(0, I)

With A = scale v / 2, U = sqrt(scale / (2 (K - 1))) D, W = A^-1/2 U, C = I + W^T W and r = A^-1/2 (theta - mu),
densities need matrices of K x K only:

    log det Sigma                             =  sum_j log A_j + log det C
    (theta - mu)^T Sigma^-1 (theta - mu)      =  min_z |r - W z|^2 + |z|^2
    KL(q || N(0, 1 / delta))  =  1/2 (sum_j delta_j (Sigma_jj + mu_j^2) - 1 - log delta_j) - 1/2 log det Sigma

The sums are over the elements with v_j > 0, in float64; the other elements are fixed.

If a variance is tiny compared to its deviations (SWAG's smallest is 1e-30), W^T W has entries of 1e30 and more, and the
identity in C is lost to rounding. So the largest rows w_j of W are added to C one at a time, as in a Kalman filter.
With C^-1 = L L^T and the minimiser z before, f = L^T w_j and e = r_j - <w_j, z>,

    log det C  <-  log det C + log(1 + |f|^2)              z  <-  z + L f e / (1 + |f|^2)
    minimum    <-  minimum + e^2 / (1 + |f|^2)             L  <-  L H diag(1, .. 1 / sqrt(1 + |f|^2), .. 1)

where the reflection H maps f to the k-th axis, another axis for each row, so that a small column of L stays small. At
most K rows are large relative to L. The other rows are added together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from bsam.files import Settings
from bsam.modules import clean_names
from bsam.posterior.base import (
    Posterior,
    check_generator,
    check_same_layout,
    check_temperature,
    copied,
    copied_mean,
    first_few,
)
from bsam.posterior.base_model import FrozenWeights
from bsam.posterior.diagonal import by_name, check_prior

__all__ = ["LowRankGaussian"]

_LARGEST_SHARED_ROW = 1e4
"""Largest squared norm of the rows that are added together: the sum keeps twelve digits of the identity."""


class LowRankGaussian(Posterior):
    r"""A Gaussian with a diagonal plus low-rank covariance, $\frac12 \mathrm{diag}(v) + \frac{1}{2 (K - 1)} D D^\top$.

    Args:
        mean: All weights by name, as in `model.named_parameters()`, also frozen ones. They are copied.
        variance: $v$ of the sampled parameters, under the same names; 0 where an element is fixed.
        deviations: The columns of $D$, stacked along dimension 0: `(K, *shape)`, for the same parameters, $K \ge 2$.
        scale: Multiplies the covariance.
        buffers: The buffers that belong to the mean, as in `model.named_buffers()`.
        prior_precision: Precision of the prior, a Gaussian around 0: one number for all, or one number per name.
            Only `kl` needs it.
        frozen: Names of parameters that training did not change, for `without_frozen`. By default those that are given
            as `nn.Parameter` without `requires_grad`, and are not sampled.
        base: What is known of further parameters of the model, by name, which are not part of this distribution.

    Examples:
        >>> mean = {"w": torch.zeros(3)}
        >>> LowRankGaussian(mean, {"w": torch.ones(3)}, {"w": torch.randn(5, 3)})
        LowRankGaussian(3 parameters in 1 tensors, 3 sampled, rank 5, scale 1)
    """

    kind: ClassVar[str] = "low_rank_gaussian"

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        variance: Mapping[str, Tensor],
        deviations: Mapping[str, Tensor],
        *,
        scale: float = 1.0,
        buffers: Mapping[str, Tensor] | None = None,
        prior_precision: float | Mapping[str, float] | None = None,
        frozen: Iterable[str] | None = None,
        base: Mapping[str, FrozenWeights] | None = None,
    ) -> None:
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not (math.isfinite(scale) and scale >= 0):
            raise ValueError(f"scale={scale!r} must be a finite number >= 0: it multiplies the covariance.")
        self.mean = copied_mean(mean, base)
        self.buffers = copied("buffers", buffers)
        self.scale = float(scale)
        all_names = clean_names([*mean, *(base or ())])
        names = {name: all_names[name] for name in mean}
        self.prior_precision = by_name(prior_precision, names)
        unknown = [name for name in variance if name not in names]
        if unknown:
            raise ValueError(f"variance has {first_few(unknown)}, which is not in the mean.")
        self.variance = {names[name]: v.detach().clone() for name, v in variance.items()}
        check_same_layout("variance", self.variance, {name: self.mean[name] for name in self.variance})
        self.deviations = {names.get(name, name): d.detach().clone() for name, d in deviations.items()}
        self._check_deviations()
        for name in self.variance:
            self._convert(name)
        self.std = {name: self._marginal_std(name) for name in self.mean}
        self._note_layout(mean, frozen, base)

    @property
    def rank(self) -> int:
        """The number of deviations $K$."""
        return next((len(d) for d in self.deviations.values()), 0)

    def _check_deviations(self) -> None:
        check_same_layout(
            "a deviation", {name: d[0] if len(d) else d for name, d in self.deviations.items()}, self.variance
        )
        counts = {len(d) for d in self.deviations.values()}
        if len(counts) > 1 or min(counts, default=2) < 2:
            raise ValueError(
                f"deviations has {sorted(counts)} columns: it must have the same number K >= 2 for each parameter, "
                "because their covariance is D D^T / (K - 1)."
            )

    def _convert(self, name: str) -> None:
        """Convert variance and deviations of a parameter to their type, and raise if they are not valid."""
        mu, v, d = self.mean[name], self.variance[name], self.deviations[name]
        if not mu.is_floating_point():
            raise TypeError(f"{name} is {mu.dtype}: only floating point weights can have a variance.")
        dtype = torch.float64 if mu.dtype == torch.float64 else torch.float32
        self.variance[name], self.deviations[name] = v, d = v.to(mu.device, dtype), d.to(mu.device, dtype)
        if not bool(((v >= 0) & v.isfinite()).all() & d.isfinite().all()):
            raise ValueError(f"variance (>= 0) and deviations of {name} must be finite everywhere.")
        if bool(d[:, v == 0].any()):
            raise ValueError(f"{name} has deviations where its variance is 0: write 1e-30 for a variance that small.")

    def _marginal_std(self, name: str) -> Tensor:
        mu = self.mean[name]
        if name not in self.variance:
            return torch.zeros((), device=mu.device).expand(mu.shape)
        low_rank = self.deviations[name].square().sum(dim=0) / (self.rank - 1)
        return (self.scale / 2 * (self.variance[name] + low_rank)).sqrt()

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw all weights; weights that are not sampled are copies of the mean.

        Args:
            generator: The only source of randomness. It may be on another device than the weights: numbers are drawn
                there and moved.
        """
        check_generator(generator)
        z_2 = torch.randn(self.rank, generator=generator, device=generator.device, dtype=torch.float64)
        drawn = {name: self._draw(name, z_2, generator) for name in self.sampled_names}
        return {name: drawn[name] if name in drawn else mean.clone() for name, mean in self.mean.items()}

    def _draw(self, name: str, z_2: Tensor, generator: torch.Generator) -> Tensor:
        mu, v, d = self.mean[name], self.variance[name], self.deviations[name]
        z_1 = torch.randn(v.shape, generator=generator, device=generator.device, dtype=v.dtype).to(v.device)
        low_rank = torch.tensordot(z_2.to(d), d, dims=1) / math.sqrt(2 * (self.rank - 1))
        offset: Tensor = math.sqrt(self.scale) * ((v / 2).sqrt() * z_1 + low_rank)
        return (mu.to(v.dtype) + offset).to(mu.dtype)

    def log_prob(self, sample: Mapping[str, Tensor]) -> Tensor:
        """Return the log-density of the sampled elements of `sample`; -inf if another element is not at its mean."""
        check_same_layout("a sample", sample, self.mean)
        residuals = {}
        for name, mu in self.mean.items():
            theta, fixed = sample[name].to(mu.device), self.std[name] == 0
            if not bool((theta == mu)[fixed].all()):
                return torch.tensor(-math.inf, dtype=torch.float64)
            if name in self.sampled_names:
                residuals[name] = (theta.double() - mu.double())[~fixed]
        log_det, quadratic = self._forms(residuals)
        return -0.5 * (quadratic + log_det + self._num_sampled * math.log(2 * math.pi))

    def entropy(self) -> Tensor:
        """Return the differential entropy of the sampled elements; -inf if there are none, as for a point."""
        if not self.sampled_names:
            return torch.tensor(-math.inf, dtype=torch.float64)
        return 0.5 * (self._forms()[0] + self._num_sampled * math.log(2 * math.pi * math.e))

    def kl(self) -> Tensor:
        """Return the KL divergence of the sampled elements from the prior."""
        check_prior(self.sampled_names, self.prior_precision)
        total = -self._forms()[0]
        for name in self.sampled_names:
            mask, delta = self.std[name] > 0, self.prior_precision[name]
            moments = self.std[name][mask].double().square() + self.mean[name][mask].double().square()
            total += (delta * moments - 1 - math.log(delta)).sum().cpu()
        return 0.5 * total

    def temper(self, temperature: float) -> Self:
        """Return the posterior with `temperature` times the variance; 0 gives a point, below 1 a cold posterior."""
        check_temperature(temperature)
        groups, settings = self._contents()
        return self._from_contents(groups, {**settings, "scale": self.scale * temperature})

    @property
    def _num_sampled(self) -> int:
        return sum(int((self.std[name] > 0).sum()) for name in self.sampled_names)

    def _forms(self, residuals: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return log det Sigma, and (theta - mu)^T Sigma^-1 (theta - mu) for the residuals theta - mu."""
        log_det, quadratic = torch.zeros(2, dtype=torch.float64)
        rows, scaled = {}, {}
        for name in self.sampled_names:
            mask = self.std[name] > 0
            a = self.scale / 2 * self.variance[name][mask].double()
            u = math.sqrt(self.scale / (2 * (self.rank - 1))) * self.deviations[name][:, mask].double()
            rows[name] = (u / a.sqrt()).T
            scaled[name] = torch.zeros_like(a) if residuals is None else residuals[name] / a.sqrt()
            log_det += a.log().sum().cpu()
        root, z = torch.eye(self.rank, dtype=torch.float64), torch.zeros(self.rank, dtype=torch.float64)
        for k in range(self.rank if rows else 0):
            norms = {name: (w @ root.to(w)).square().sum(dim=1) for name, w in rows.items()}
            name = max(norms, key=lambda name: float(norms[name].max()))
            j = int(norms[name].argmax())
            norm = float(norms[name][j])
            if norm <= _LARGEST_SHARED_ROW:
                break
            w = rows[name][j].cpu()
            f, e = root.T @ w, scaled[name][j].cpu() - w @ z
            rows[name][j], scaled[name][j] = 0, 0  # this row is done
            log_det += math.log1p(norm)
            quadratic += e.square() / (1 + norm)
            z = z + root @ f * (e / (1 + norm))
            f[k] += math.copysign(math.sqrt(norm), f[k])  # I - 2 f f^T / |f|^2 maps the old f to the k-th axis
            root = root - torch.outer(root @ f, f) * (2 / f.square().sum())
            root[:, k] /= math.sqrt(1 + norm)
        rest, b = torch.eye(self.rank, dtype=torch.float64), torch.zeros(self.rank, dtype=torch.float64)
        for name, w in rows.items():
            rotated, left = w @ root.to(w), scaled[name] - w @ z.to(w)
            rest += (rotated.T @ rotated).cpu()
            b += (rotated.T @ left).cpu()
            quadratic += left.square().sum().cpu()
        lower = torch.linalg.cholesky(rest)
        quadratic -= torch.linalg.solve_triangular(lower, b[:, None], upper=False).square().sum()
        return log_det + 2 * lower.diagonal().log().sum(), quadratic

    def _contents(self) -> tuple[dict[str, dict[str, Tensor]], Settings]:
        groups = {
            "mean": self.mean,
            "variance": self.variance,
            "deviation": self.deviations,
            "buffer": self.buffers,
        }
        return groups, {"scale": self.scale, "prior_precision": self.prior_precision, **self._layout_settings()}

    @classmethod
    def _from_contents(cls, groups: dict[str, dict[str, Tensor]], settings: Settings) -> Self:
        return cls(
            groups.get("mean", {}),
            groups.get("variance", {}),
            groups.get("deviation", {}),
            scale=settings["scale"],
            buffers=groups.get("buffer", {}),
            prior_precision=settings["prior_precision"],
            frozen=settings.get("frozen"),
            base=settings.get("base"),
        )

    def __repr__(self) -> str:
        return (
            f"LowRankGaussian({self.num_parameters} parameters in {len(self.mean)} tensors, "
            f"{self._num_sampled} sampled, rank {self.rank}, scale {self.scale:g})"
        )
