"""VOGN: variational inference by natural gradients, with squared per-example gradients as curvature.

Osawa, Swaroop, Jain, Eschenhagen, Turner, Yokota and Khan (2019), "Practical Deep Learning with Bayesian Principles",
NeurIPS; Algorithm 1. A baseline of Möllenhoff and Khan (2023), appendix G.1, with one weight sample per split.

    1:  mu <- initial weights, m <- 0; the first minibatch takes e_k = 0, and its h_hat is the first s
    2:  while not converged, for a minibatch of B examples cut into K parts M_1 .. M_K:
    3:      w_k    <-  mu + e_k,   e_k ~ N(0, sigma^2),   sigma^2 = 1 / (N (s + delta + gamma))
    4:      g_i    <-  gradient of the loss of example i at w_k, for each i in M_k
    5:      g_hat  <-  mean of g_i over all B examples
    6:      h_hat  <-  mean of g_i^2 over all B examples
    7:      m      <-  beta1 m + g_hat + delta mu
    8:      s      <-  beta2 s + (1 - beta2) h_hat
    9:      mu     <-  mu - alpha m / (s + delta + gamma)
    10: the posterior is N(mu, 1 / (N (s + delta + gamma)))

| paper | here |
|---|---|
| mu, w | the module's weights; a sample of them |
| s | `curvature`: the average of squared per-example gradients |
| N | `num_data * augmentation_factor` |
| delta | `prior_precision / N` |
| alpha, (beta1, beta2) | `lr`, `betas` |
| gamma, K | `damping`, `splits` |

Where this differs from print, and why:

- Osawa et al. run K weight samples on each device's whole part of the minibatch; Möllenhoff and Khan cut the minibatch
  into 16 parts, "and consider independently computed perturbations for each". This file does the same: one sample per
  part.
- Line 8 is an average with a long memory, as `betas` mean elsewhere: `statistics="average"`. In the code of Osawa et
  al. 0.999 is the weight of the new h_hat, s <- (1 - beta2) s + beta2 h_hat, so that s is nearly the present h_hat:
  `statistics="latest"`. The settings of Möllenhoff and Khan do not say which form they mean.
- The heavy ball of line 7 has no factor 1 - beta1, as in the code of Osawa et al.: effective rates are then SGD's.
- s starts as in the code of Osawa et al., at the h_hat of the first minibatch, and that first step is not sampled.
- No tempering: their tau is 1. Their factor for augmented data is `augmentation_factor`.
- Parts are weighted by their size, so that ragged ones give the mean over all examples.

State of a parameter: `momentum` (m), `curvature` (s) and `step`; float32 for 16-bit weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bsam.batches import map_tensors
from bsam.optim import options
from bsam.optim.arithmetic import average, plus, plus_quotient
from bsam.optim.probing import Gradients, Slot, Tally
from bsam.optim.variational import GaussianOptimizer
from bsam.torch_private import AnyBatchNorm

__all__ = ["VOGN", "unit_precision", "update"]


def unit_precision(s: Tensor, delta: float | Tensor, gamma: float | Tensor) -> Tensor:
    """1 / (N sigma^2)."""
    return s + delta + gamma  # line 3


def update(
    mu: Tensor,
    m: Tensor,
    s: Tensor,
    g_hat: Tensor,
    h_hat: Tensor,
    *,
    started: Tensor,
    alpha: float | Tensor,
    beta1: float | Tensor,
    beta2: float | Tensor,
    delta: float | Tensor,
    gamma: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new (mu, m, s); `started` is false in the first step."""
    m = plus(plus(g_hat, mu, delta), m, beta1)  # line 7: beta1 m + g_hat + delta mu
    s = torch.where(started, average(s, h_hat.clone(), beta2), h_hat)  # lines 1, 8: beta2 s + (1 - beta2) h_hat
    mu = plus_quotient(mu, m, s + (delta + gamma), -alpha)  # line 9: mu - alpha m / (s + delta + gamma)
    return mu, m, s


class VOGN(GaussianOptimizer):
    r"""Variational online Gauss-Newton.

    A step needs the gradient of each example: `step(loss_fn, *batch)` calls `loss_fn` with batches of one example,
    all at once by `torch.func.vmap` where that is possible and faster. So `loss_fn` must look its weights up in
    `module` when it is called, and examples must not mix: BatchNorm in training mode is refused.

    The letters are those of the VOGN of Osawa et al. (2019).

    Args:
        params: Parameters, named parameters, or groups of them. A group may override `lr`, `prior_precision`, `betas`
            and `damping`. With `sample=False` it gets no noise, and its posterior is a point.
        lr: Learning rate $\alpha$. The step is $m / (s + \delta + \gamma)$, and $m$ is $1 / (1 - \beta_1)$ gradients
            long: rates are about `damping` times those of SGD.
        module: The model.
        num_data: Number of training examples $N$: a larger $N$ makes the posterior more certain.
        prior_precision: Precision of the Gaussian prior on the weights ($N \delta$ in the paper), 25 by default. It
            also acts as weight decay of strength `prior_precision / N` on all parameters.
        weight_decay: The same in the units of torch's optimizers: `prior_precision = weight_decay * N`. Give one of the
            two. Groups take both names as well.
        betas: Decay of the momentum, and the $\beta_2$ of `statistics`.
        damping: Added to the curvature ($\gamma$), in the step and in the posterior's precision.
        augmentation_factor: How many times augmentation enlarges the data set: $N$ is
            `num_data * augmentation_factor`.
        splits: Number of parts of each minibatch, each with its own weight sample (the paper uses 16): more parts
            change the method. Micro-batches of several `probe` calls are further parts.
        statistics: `"average"`: the curvature keeps a share $\beta_2$ of itself in each step. `"latest"`: it keeps a
            share $1 - \beta_2$.
        nonfinite: `"raise"` stops at a loss or gradient that is not finite, `"skip"` skips the step and counts it in
            `skipped_steps`.
        max_grad_norm: Clips the norm of $\hat g$, the averaged gradient, before the prior is added. The
            squared gradients are not clipped.
        vectorise: True: vmap over the examples, or an error. False: a loop, with the same numbers. None: the faster of
            the two; if vmap fails, a loop, with one warning that says why.
        process_group: Ranks as further splits, see the page on distributed training.
        seed: Seed of the noise.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> optimizer = VOGN(model.parameters(), lr=0.01, module=model, num_data=50, damping=0.1)
        >>> x, y = torch.randn(8, 3), torch.randint(2, (8,))
        >>> loss = optimizer.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
        >>> with optimizer.sampled():
        ...     prediction = model(x)
    """

    whole_options: ClassVar[tuple[str, ...]] = (*GaussianOptimizer.whole_options, "statistics")
    rates: ClassVar[tuple[str, ...]] = (*GaussianOptimizer.rates, "damping")
    per_example: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.001,
        *,
        module: nn.Module,
        num_data: float,
        prior_precision: float | None = None,
        weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        damping: float = 0.01,
        augmentation_factor: float = 1.0,
        splits: int = 1,
        statistics: str = "average",
        nonfinite: str = "raise",
        max_grad_norm: float | None = None,
        vectorise: bool | None = None,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "prior_precision": options.prior(
                prior_precision, weight_decay, num_data, augmentation_factor, default=25.0
            ),
            "betas": betas,
            "damping": damping,
            "sample": True,
            "num_data": num_data,
            "augmentation_factor": augmentation_factor,
            "splits": splits,
            "statistics": statistics,
            "nonfinite": nonfinite,
            "max_grad_norm": max_grad_norm,
            "batch_norm": "none",  # running statistics never move: see _check_batch
            "seed": seed,
        }
        super().__init__(params, defaults, module=module, process_group=process_group, vectorise=vectorise)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        options.one_of("statistics", group["statistics"], ("average", "latest"))
        if not group["prior_precision"] and not group["damping"]:
            raise ValueError(
                "prior_precision=0 and damping=0: one of them must be > 0, or a weight without curvature would take "
                "an infinite step. Write damping=0.01."
            )

    def _check_module(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise TypeError(
                f"module={self.module!r} must be the model: VOGN differentiates the loss of each example with respect "
                "to its weights. Write VOGN(model.parameters(), module=model, ...)."
            )
        if isinstance(self.module, nn.parallel.DistributedDataParallel):
            raise ValueError(
                "module= is a DistributedDataParallel, which averages gradients before they can be squared: give VOGN "
                "the bare module, and process_group= so that it averages over the ranks itself."
            )
        super()._check_module()

    def _check_batch(self, batch: tuple[Any, ...]) -> None:
        tensors: list[Tensor] = []
        map_tensors(tensors.append, batch)
        if not tensors:
            raise ValueError(
                "VOGN needs the examples of the minibatch, to differentiate each by itself: call step(loss_fn, x, y) "
                "with its tensors and a loss_fn(x, y) that returns the mean loss of its arguments."
            )
        assert self.module is not None
        for name, layer in self.module.named_modules():
            if isinstance(layer, AnyBatchNorm) and (layer.training or layer.running_mean is None):
                raise ValueError(
                    f"layer {name or 'module'} is a {type(layer).__name__} that uses means over the minibatch. This "
                    "mixes its examples: they have no gradients of their own. Put the layer into evaluation mode "
                    "(layer.eval()), or use GroupNorm or LayerNorm."
                )

    def _fresh_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state = super()._fresh_state(parameter, group)
        return {**state, "curvature": torch.zeros_like(state["momentum"])}

    def _share_kept(self, group: dict[str, Any]) -> Any:
        beta2 = group["betas"][1]
        return beta2 if group["statistics"] == "average" else 1 - beta2

    def _unit_precision(self, slot: Slot) -> Tensor:
        delta = self._letters(slot.group)["delta"]
        return unit_precision(slot.state["curvature"], delta, slot.group["damping"])

    def _noise_precision(self, slot: Slot) -> Tensor | None:
        precision = super()._noise_precision(slot)
        return None if precision is None else torch.where(self._started(slot), precision, torch.inf)  # lines 1, 3

    def _started(self, slot: Slot) -> Tensor:
        return slot.per_element(slot.state["step"] > 0)

    def _probe(self, slots: list[Slot], theta: Iterable[Tensor], grad_at: Gradients, tally: Tally) -> None:
        g_hat, h_hat = grad_at.moments(theta)  # lines 4 to 6
        tally.add("gradient", g_hat)
        tally.add("square", h_hat)

    def _update(self, slot: Slot, **averages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mu, m, s = update(
            slot.mean.to(slot.dtype),
            slot.state["momentum"],
            slot.state["curvature"],
            averages["gradient"],
            averages["square"],
            started=self._started(slot),
            gamma=slot.group["damping"],
            **self._letters(slot.group),
        )
        return mu, {"momentum": m, "curvature": s}

    def _check_state(self, key: Any, state: dict[str, Any]) -> None:
        s = state["curvature"]
        if not bool(((s >= 0) & s.isfinite()).all()):
            raise ValueError(f"the loaded curvature of parameter {key} is negative or not finite somewhere.")
