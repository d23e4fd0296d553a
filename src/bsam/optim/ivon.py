"""IVON: variational inference that learns the Hessian from one gradient at a sample of the weights.

Shen, Daheim, Cong, Nickl, Marconi, Bazan, Yokota, Gurevych, Cremers, Khan and Möllenhoff (2024), "Variational Learning
is Effective for Large Deep Networks", ICML; Algorithm 1.

    1:  m <- initial weights, h <- h_0, g <- 0
    2:  for t = 1, 2, ..., with a minibatch cut into K parts M_1 .. M_K:
    3:      theta_k  <-  m + e_k,   e_k ~ N(0, sigma^2),   sigma^2 = 1 / (lambda (h + delta))
    4:      g_hat    <-  mean over k of g_k,   g_k = mean gradient of M_k at theta_k
    5:      h_hat    <-  mean over k of g_k (theta_k - m) / sigma^2
    6:      g        <-  beta1 g + (1 - beta1) g_hat
    7:      h        <-  beta2 h + (1 - beta2) h_hat + (1 - beta2)^2 (h - h_hat)^2 / (2 (h + delta))
    8:      g_bar    <-  g / (1 - beta1^t)
    9:      m        <-  m - alpha (g_bar + delta m) / (h + delta)
    10: the posterior is N(m, 1 / (lambda (h + delta)))

| paper | here |
|---|---|
| m, theta | the module's weights; a sample of them |
| h, h_0 | `hessian`, which may be negative as long as h + delta is positive; `initial_hessian` |
| lambda | N = `num_data * augmentation_factor` |
| delta, the weight decay | `prior_precision / N` |
| alpha, (beta1, beta2) | `lr`, `betas` |
| K | `splits` |

Where this differs from the printed algorithm, and why:

- The paper draws several samples for the whole minibatch. Here each sample has a part of the minibatch, as in the other
  methods, so K samples cost one pass over it. A batch that contains the minibatch K times gives the paper's form.
- The paper optionally multiplies the learning rate by h_0 + delta, and the authors' package does so by default. Here
  alpha is the rate of line 9: multiply a rate of theirs by h_0 + delta to get ours.
- The paper clips the preconditioned step for some tasks. `clip_radius` clips each element of (g_bar + delta m) / (h +
  delta) separately; by default nothing is clipped.
- A group with `sample=False` has no noise. Without noise, line 5 gives no estimate, and h stays at h_0.
- Parts are weighted by their size, so that parts of different size give the mean over all examples.

State of a parameter: `momentum` (g), `hessian` (h) and `step` (t); float32 for 16-bit weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bsam.optim import diagnosis, options
from bsam.optim.arithmetic import plus
from bsam.optim.probing import Gradients, Slot, Tally, emptied
from bsam.optim.variational import GaussianOptimizer
from bsam.shards import local

__all__ = ["IVON", "hessian_estimate", "new_hessian", "unit_precision", "update"]


def unit_precision(h: Tensor, delta: float | Tensor) -> Tensor:
    """The precision per example, 1 / (N sigma^2)."""
    return h + delta  # line 3


def hessian_estimate(g: Tensor, theta: Tensor, m: Tensor, precision: Tensor) -> Tensor:
    """The estimate h_hat of the Hessian's diagonal, by Stein's identity; `precision` is 1 / sigma^2."""
    return (theta - m) * g * precision  # line 5


def new_hessian(h: Tensor, h_hat: Tensor, beta2: float | Tensor, delta: float | Tensor) -> Tensor:
    """The new average h. Its last term keeps h + delta positive: it is never below half of its old value."""
    x = (h_hat - h) * (1 - beta2)
    return h + x + x.square() / (2 * unit_precision(h, delta))  # line 7


def update(
    m: Tensor,
    g: Tensor,
    h: Tensor,
    g_hat: Tensor,
    h_hat: Tensor,
    *,
    correction: Tensor,
    alpha: float | Tensor,
    beta1: float | Tensor,
    beta2: float | Tensor,
    delta: float | Tensor,
    clip_radius: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new (m, g, h); `correction` is 1 - beta1^t."""
    g = plus(g, g_hat - g, 1 - beta1)  # line 6: beta1 g + (1 - beta1) g_hat
    h = new_hessian(h, h_hat, beta2, delta)  # line 7
    g_bar = g / correction  # line 8
    change = plus(g_bar, m, delta) / unit_precision(h, delta)
    if clip_radius is not None:
        change = change.clamp(-clip_radius, clip_radius)
    m = plus(m, change, -alpha)  # line 9: m - alpha (g_bar + delta m) / (h + delta)
    return m, g, h


class IVON(GaussianOptimizer):
    r"""Improved variational online Newton.

    One gradient per step, at weights that are sampled from the posterior. The letters are those of Shen et al. (2024).

    Args:
        params: Parameters, named parameters, or groups of them. A group may override `lr`, `prior_precision`, `betas`
            and `clip_radius`, and set `sample=False` (no noise; its posterior is a point, and its Hessian stays at
            `initial_hessian`).
        lr: Learning rate $\alpha$. The step is $g / (h + \delta)$: rates are about `initial_hessian` times those of
            SGD.
        num_data: Number of training examples. The loss of a batch is a mean, and the posterior needs the sum over all
            examples, so this number sets how certain the posterior is.
        prior_precision: Precision of the Gaussian prior on the weights ($N \delta$ in the paper), 25 by default. It
            also acts as weight decay of strength `prior_precision` / $N$ on all parameters.
        weight_decay: The same in the units of torch's optimizers: `prior_precision = weight_decay * N`. Give one of the
            two. Groups take both names as well.
        betas: Decay of the averages of the gradient and of the Hessian. The paper's $\beta_2 = 0.99999$ is for runs of
            100,000 steps and more; use 0.999 for some thousand steps.
        initial_hessian: First value of `hessian`. The first samples have the standard deviation
            $1 / \sqrt{N h_0 + N \delta}$, where $h_0$ is this value and $N \delta$ the prior's precision. If the
            value is too small, the noise of the first steps is too large to learn.
        augmentation_factor: The factor by which augmentation enlarges the data set: $N$ is
            `num_data * augmentation_factor`.
        splits: Number of parts of each minibatch. Each part has its own weight sample: more parts change the method.
            Micro-batches of several `probe` calls are further parts.
        clip_radius: Largest absolute value of an element of the preconditioned step
            $(\bar g + \delta m) / (h + \delta)$, before the step is multiplied by `lr`. None clips nothing.
        nonfinite: `"raise"` raises at a loss or gradient that is not finite. `"skip"` skips the step and counts it
            in `skipped_steps`.
        max_grad_norm: Clips the norm of $\hat g$, the averaged gradient, before the prior is added. The
            estimate of the Hessian uses gradients that are not clipped.
        module: The model. With it, the optimizer can handle BatchNorm, compute the splits together, and name
            parameters in messages.
        batch_norm: Which passes update BatchNorm's running statistics, see `bsam.batch_norm`.
        vectorise: True computes the splits together by vmap, or raises. False computes them in a loop, with the same
            numbers. None computes them together on a GPU, and falls back to a loop with one warning that says why.
        process_group: The ranks that act as further splits; see the page on distributed training.
        seed: Seed of the noise.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> optimizer = IVON(model.parameters(), lr=0.1, num_data=50)
        >>> x, y = torch.randn(8, 3), torch.randint(2, (8,))
        >>> loss = optimizer.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
        >>> with optimizer.sampled():
        ...     prediction = model(x)
    """

    whole_options: ClassVar[tuple[str, ...]] = (*GaussianOptimizer.whole_options, "initial_hessian")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.1,
        *,
        num_data: float,
        prior_precision: float | None = None,
        weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.99999),
        initial_hessian: float = 0.5,
        augmentation_factor: float = 1.0,
        splits: int = 1,
        clip_radius: float | None = None,
        nonfinite: str = "raise",
        max_grad_norm: float | None = None,
        module: nn.Module | None = None,
        batch_norm: str = "first_split",
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
            "clip_radius": clip_radius,
            "sample": True,
            "num_data": num_data,
            "initial_hessian": initial_hessian,
            "augmentation_factor": augmentation_factor,
            "splits": splits,
            "nonfinite": nonfinite,
            "max_grad_norm": max_grad_norm,
            "batch_norm": batch_norm,
            "seed": seed,
        }
        super().__init__(params, defaults, module=module, process_group=process_group, vectorise=vectorise)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        options.positive("initial_hessian", group["initial_hessian"])
        if group["clip_radius"] is not None:
            options.positive("clip_radius", group["clip_radius"], "Write None for no clipping.")

    def _fresh_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state = super()._fresh_state(parameter, group)
        return {**state, "hessian": torch.full_like(state["momentum"], group["initial_hessian"])}

    def _unit_precision(self, slot: Slot) -> Tensor:
        return unit_precision(slot.state["hessian"], self._letters(slot.group)["delta"])

    def _probe(self, slots: list[Slot], theta: Iterable[Tensor], grad_at: Gradients, tally: Tally) -> None:
        sampled = list(theta)  # line 3; kept, because 16-bit parameters hold only a rounded copy
        g = grad_at(sampled)  # line 4
        N = self.effective_num_data
        estimates = (
            hessian_estimate(g_i, theta_i, slot.mean, N * self._unit_precision(slot))
            for slot, g_i, theta_i in zip(slots, g, emptied(sampled), strict=True)
        )
        tally.add("hessian", estimates)
        tally.add("gradient", g)

    def _update(self, slot: Slot, **averages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        state, letters = slot.state, self._letters(slot.group)
        correction = (1 - letters["beta1"] ** (state["step"] + 1).double()).to(slot.dtype)
        m, g, h = update(
            slot.mean.to(slot.dtype),
            state["momentum"],
            state["hessian"],
            averages["gradient"],
            averages["hessian"] if slot.group["sample"] else state["hessian"],
            correction=slot.per_element(correction),
            clip_radius=slot.group["clip_radius"],
            **letters,
        )
        return m, {"momentum": g, "hessian": h}

    def _sizes(self, slot: Slot) -> dict[str, Tensor]:
        sizes = super()._sizes(slot)
        beta1, steps = slot.group["betas"][0], slot.state["step"].clamp_min(1)
        step = sizes["step"] / (1 - beta1 ** steps.double()).to(slot.dtype)  # line 8
        if slot.group["clip_radius"] is not None:
            most = diagnosis.full_rate(slot.group) * slot.group["clip_radius"]
            step = step.clamp(-most, most)
        return {**sizes, "step": step}

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        super()._check_state_dict(state_dict)
        for group in state_dict["param_groups"]:
            merged = {**self.defaults, **group}
            delta = merged["prior_precision"] / (merged["num_data"] * merged["augmentation_factor"])
            for key in group["params"]:
                if key in state_dict["state"] and not bool(
                    (local(state_dict["state"][key]["hessian"]) + delta > 0).all()
                ):
                    raise ValueError(
                        f"the loaded hessian of parameter {key} is not above -{delta:.3g}, which is "
                        "-prior_precision / N, everywhere: it makes no precision."
                    )
