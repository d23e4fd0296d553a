"""SWAG: a Gaussian fitted to the weights that an optimizer passes through.

Maddox, Garipov, Izmailov, Vetrov and Wilson (2019), "A Simple Baseline for Bayesian Uncertainty in Deep Learning",
NeurIPS; Algorithm 1. It watches any torch optimizer, after training and with a constant learning rate.

    1:  n <- 0; for the weights theta after every c-th step:
    2:      n      <-  n + 1
    3:      mean'  <-  mean + (theta - mean) / n
    4:      v      <-  v + ((theta - mean) (theta - mean') - v) / n
    5:      append theta - mean' to the columns of D, and leave the first out if there are more than K
    6:      mean   <-  mean'
    7:  the posterior is N(mean, 1/2 diag(v) + 1 / (2 (K - 1)) D D^T)

| paper | here |
|---|---|
| theta | the module's weights |
| c, K | `interval` (in steps), `rank` |
| n | `num_snapshots` |
| line 7 | `bsam.LowRankGaussian` |

Where this differs from print, and why:

- The paper keeps the mean of theta^2 and subtracts mean^2 in the end; v of line 4 is the same number without the
  cancellation, which in float32 can be larger than the variance itself. As in the authors' code v is at least 1e-30.
- With fewer than `rank` snapshots K is their number (the authors' code still divides by rank - 1).
- Only parameters that require a gradient are sampled. BatchNorm's running statistics belong neither to the mean nor to
  a sample: `bsam.predict(..., recalibrate=train_loader)` estimates them again.

State: counts, `mean`, `variance` and `deviations` by name of the parameter; float32 for 16-bit weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bsam.interrupts import deferred
from bsam.modules import named_buffers, named_parameters
from bsam.optim import options
from bsam.posterior import LowRankGaussian
from bsam.posterior.base import check_same_layout, first_few
from bsam.shards import refuse_sharded

__all__ = ["SWAG", "update"]

_LEAST_VARIANCE = 1e-30
_STATE = ("rank", "interval", "num_steps", "num_snapshots", "mean", "variance", "deviations")


def update(mean: Tensor, v: Tensor, theta: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new (mean, v), and the deviation from the new mean, where theta is the n-th snapshot."""
    new_mean = mean + (theta - mean) / n  # line 3
    v = v + ((theta - mean) * (theta - new_mean) - v) / n  # line 4
    return new_mean, v, theta - new_mean  # line 5


class SWAG:
    """Collects the weights of a model during its training.

    Train first, with any optimizer. Then continue for some epochs at a constant learning rate, and call `step` after
    each step of the optimizer.

    Args:
        model: The model that is trained.
        rank: Number of deviations that are kept: those of the last snapshots.
        interval: Number of calls of `step` from one snapshot to the next.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> swag = SWAG(model, rank=5, interval=2)
        >>> for _ in range(20):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(8, 3)).square().mean().backward()
        ...     optimizer.step()
        ...     swag.step()
        >>> swag.posterior()
        LowRankGaussian(8 parameters in 2 tensors, 8 sampled, rank 5, scale 1)
    """

    def __init__(self, model: nn.Module, *, rank: int = 20, interval: int = 100) -> None:
        _check_options(rank, interval)
        refuse_sharded("SWAG", model, "use the posterior of bsam.BSAM or bsam.IVON")
        self.model = model
        self.rank = rank
        self.interval = interval
        self.num_steps = 0
        """Number of calls of `step`."""
        self.num_snapshots = 0
        trainable = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
        if not trainable:
            raise ValueError("the model has no parameter that requires a gradient: there is nothing to collect.")
        self._mean = {
            name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32), requires_grad=False)
            for name, p in trainable.items()
        }
        self._variance = {name: torch.zeros_like(mean) for name, mean in self._mean.items()}
        self._deviations: deque[dict[str, Tensor]] = deque(maxlen=rank)

    def step(self) -> None:
        """Count a step of the optimizer, and take a snapshot at every `interval`-th call."""
        with deferred():
            if (self.num_steps + 1) % self.interval == 0:
                self.collect()
            self.num_steps += 1

    def collect(self) -> None:
        """Take a snapshot of the model's weights now."""
        with deferred(), torch.no_grad():
            self._collect()

    def _collect(self) -> None:
        parameters = named_parameters(self.model)
        bad = [name for name in self._mean if not bool(parameters[name].isfinite().all())]
        if bad:
            raise FloatingPointError(
                f"the weights {first_few(bad)} are not finite: did training diverge? No snapshot was taken."
            )
        n = self.num_snapshots + 1
        new = {
            name: update(mean, self._variance[name], parameters[name].to(mean), n) for name, mean in self._mean.items()
        }
        self.num_snapshots = n
        self._mean = {name: mean for name, (mean, _, _) in new.items()}
        self._variance = {name: v for name, (_, v, _) in new.items()}
        self._deviations.append({name: deviation for name, (_, _, deviation) in new.items()})

    def posterior(
        self, *, scale: float = 1.0, prior_precision: float | Mapping[str, float] | None = None
    ) -> LowRankGaussian:
        r"""Return the Gaussian of the snapshots, with the present buffers of the model.

        Args:
            scale: Multiplies the covariance. 1 is the paper's, half the diagonal and half the low rank; the authors'
                code omits the two factors $\frac12$, so that their scale of 0.5 is 1 here.
            prior_precision: Precision of the prior, for the posterior's `kl`.
        """
        if self.num_snapshots < 2:
            raise ValueError(
                f"SWAG has {self.num_snapshots} snapshots after {self.num_steps} steps, and a covariance needs 2 or "
                f"more: call step() after each step of the optimizer, {2 * self.interval} times or more, or choose a "
                "smaller interval."
            )
        parameters = named_parameters(self.model)
        return LowRankGaussian(
            {**parameters, **{name: mean.to(parameters[name].dtype) for name, mean in self._mean.items()}},
            {name: v.clamp(min=_LEAST_VARIANCE) for name, v in self._variance.items()},
            self._stacked_deviations(),
            scale=scale,
            buffers=named_buffers(self.model),
            prior_precision=prior_precision,
        )

    def _stacked_deviations(self) -> dict[str, Tensor]:
        """Stack the deviations: (K, *shape) per parameter."""
        return {
            name: torch.stack([d[name] for d in self._deviations])
            if self._deviations
            else mean.new_empty(0, *mean.shape)
            for name, mean in self._mean.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return copies of everything that `load_state_dict` needs."""
        return {
            "rank": self.rank,
            "interval": self.interval,
            "num_steps": self.num_steps,
            "num_snapshots": self.num_snapshots,
            "mean": {name: mean.clone() for name, mean in self._mean.items()},
            "variance": {name: v.clone() for name, v in self._variance.items()},
            "deviations": self._stacked_deviations(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, options included. A state that does not fit is refused before any change."""
        missing = [key for key in _STATE if key not in state_dict]
        if missing:
            raise ValueError(f"the loaded state has no {missing[0]!r}: is it the state of a SWAG?")
        rank, interval, count = (state_dict[key] for key in ("rank", "interval", "num_snapshots"))
        _check_options(rank, interval)
        columns = {name: d[0] if len(d) else self._mean.get(name, d) for name, d in state_dict["deviations"].items()}
        layouts = {"mean": state_dict["mean"], "variance": state_dict["variance"], "deviations": columns}
        for what, layout in layouts.items():
            check_same_layout(f"the loaded {what}", layout, self._mean)
            bad = [name for name, t in state_dict[what].items() if not bool(t.isfinite().all())]
            if bad:
                raise ValueError(f"the loaded {what} of {first_few(bad)} is not finite everywhere.")
        held = {len(d) for d in state_dict["deviations"].values()}
        if held != {min(count, rank)}:
            raise ValueError(
                f"the loaded deviations have {sorted(held)} columns: with {count} snapshots and rank {rank} there must "
                f"be {min(count, rank)}."
            )
        like = self._mean
        mean = {name: state_dict["mean"][name].to(t, copy=True) for name, t in like.items()}
        variance = {name: state_dict["variance"][name].to(t, copy=True) for name, t in like.items()}
        loaded = {name: state_dict["deviations"][name].to(t, copy=True) for name, t in like.items()}
        snapshots = [{name: d[i] for name, d in loaded.items()} for i in range(min(count, rank))]
        with deferred():
            self.rank, self.interval = rank, interval
            self.num_steps, self.num_snapshots = state_dict["num_steps"], count
            self._mean, self._variance, self._deviations = mean, variance, deque(snapshots, rank)

    def __repr__(self) -> str:
        return (
            f"SWAG(rank={self.rank}, interval={self.interval}, num_steps={self.num_steps}, "
            f"num_snapshots={self.num_snapshots})"
        )


def _check_options(rank: int, interval: int) -> None:
    options.count("interval", interval, "It is the number of steps between two snapshots.")
    options.count("rank", rank)
    if rank < 2:
        raise ValueError(f"rank={rank} must be 2 or more: the covariance of the deviations is divided by rank - 1.")
