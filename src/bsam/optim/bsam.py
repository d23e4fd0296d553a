"""bSAM: SAM that learns a Gaussian posterior over the weights.

Möllenhoff and Khan (2023), "SAM as an Optimal Relaxation of Bayes", ICLR; Algorithm 1 (the red boxes) and, for
several splits, the listing of appendix E.4 ("bSAM algorithm with m-sharpness").

    1:  omega <- initial weights, s <- 1, g_m <- 0
    2:  while not converged, for a minibatch cut into m parts M_1 .. M_m:
    3:      theta_k  <-  omega + e_k,   e_k ~ N(0, sigma^2),   sigma^2 = 1 / (N s)
    4:      g_k      <-  mean gradient of M_k at theta_k
    5:      eps_k    <-  rho g_k / s
    6:      g_eps    <-  mean over k of the mean gradient of M_k at theta_k + eps_k
    7:      g_m      <-  beta1 g_m + (1 - beta1) (g_eps + delta omega)
    8:      s        <-  beta2 s + (1 - beta2) (sqrt(s) |g| + delta + gamma)
    9:      omega    <-  omega - alpha g_m / s
    10: the posterior is N(omega, 1 / (N s))

| paper | here |
|---|---|
| omega, theta | the module's weights; a sample of them |
| s | `unit_precision`: precision per example; the posterior's precision is N s |
| N | `num_data * augmentation_factor` |
| delta | `prior_precision / N` |
| alpha, (beta1, beta2) | `lr`, `betas` |
| rho, gamma, m | `rho`, `damping`, `splits` |

Where this differs from the printed algorithm, and why:

- The paper prints three places for the second gradient (line 6): omega + eps in Algorithm 1, theta + eps in the
  derivation, and omega + e_k in the listing of appendix E.4, whose line 5 also leaves rho out. The default,
  `perturb_from="sample"`, is the derivation's: each split keeps its noise. `"mean"` is Algorithm 1 as printed and as in
  the authors' code. docs/algorithm.md compares the numbers of both.
- `curvature="mean_abs"` (the default, as in the authors' code) averages |g_k| over the splits. `"abs_mean"` takes the
  absolute value of the average, as printed. They agree for one split.
- The printed order of lines 8 and 9 is kept: omega moves with the new s. In the authors' code it moves with the old s.
- The derivation has sqrt(N s) |g| in line 8: `sqrt_num_data=True`, the default. Algorithm and code have sqrt(s) |g|,
  "because it performed better": `sqrt_num_data=False`. On a quadratic with curvature h and exact gradients, the
  stationary s is delta + gamma + h sqrt(2 / pi) with the factor and delta + gamma + h sqrt(2 / (pi N)) without it.
  docs/algorithm.md has the formula with the noise of minibatches.
- The defaults are not the paper's settings. They were chosen on small problems of many kinds (docs/out_of_the_box.md).
- Neither the paper nor the code corrects the bias of the averages; s starts at `init_precision`.
- Sub-batches are weighted by their size, so that parts of different size give the mean over all examples.

State of a parameter: `momentum` (g_m), `unit_precision` (s) and `step`; float32 for 16-bit weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bsam.optim import diagnosis, options
from bsam.optim.arithmetic import average, plus, plus_quotient
from bsam.optim.diagnosis import Finding
from bsam.optim.probing import Gradients, Slot, Tally, matrix_size
from bsam.optim.variational import GaussianOptimizer

__all__ = ["BSAM", "curvature", "default_damping", "limited", "perturbed", "update"]

_WEIGHT_DECAY = 5e-4
"""The default of `weight_decay`."""


def perturbed(weights: Tensor, g: Tensor, s: Tensor, rho: float | Tensor, *, in_place: bool = False) -> Tensor:
    """The weights plus the adversarial step eps, which is SAM's step with a vector instead of the norm."""
    return plus_quotient(weights, g, s, rho, into_a=in_place)  # line 5


def curvature(abs_g: Tensor, s: Tensor, N: float = 1.0) -> Tensor:
    """The curvature h = sqrt(N s) |g|, the optimal precision b* of the biconjugate (appendix E.1).

    Algorithm 1 has h = sqrt(s) |g|, which is N = 1.
    """
    root = s.sqrt() if N == 1.0 else (N * s).sqrt_()
    return root.mul_(abs_g)  # line 8


def limited(s: Tensor, inverse_mean_square: Tensor, N: float, r: float) -> Tensor:
    """The precision s with which the noise 1 / sqrt(N s) is below r times the root mean square of the weights.

    A Gaussian prior with the weights' own mean square as its variance has the precision 1 / mean square. The posterior
    then has it on top of N s; r weighs it.
    """
    return s + inverse_mean_square / (N * r**2)


def default_damping(N: float) -> float:
    """Return the default of gamma, 0.1, but 30 / N with 30 to 300 examples, and 1 with fewer.

    Where the loss is flat, s falls to gamma. The smaller s is, the larger are noise, perturbation and steps (lines 3, 5
    and 9), and a network that learns nothing at first would never begin. A gamma of 1 keeps s at its start.
    """
    return min(max(0.1, 30 / N), 1.0)


def update(
    omega: Tensor,
    g_m: Tensor,
    s: Tensor,
    g_eps: Tensor,
    h: Tensor,
    *,
    alpha: float | Tensor,
    beta1: float | Tensor,
    beta2: float | Tensor,
    delta: float | Tensor,
    gamma: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new (omega, g_m, s)."""
    g_m = average(g_m, plus(g_eps, omega, delta), beta1)  # line 7: beta1 g_m + (1 - beta1) (g_eps + delta omega)
    s = average(s, h.add_(delta + gamma), beta2)  # line 8: beta2 s + (1 - beta2) (h + delta + gamma)
    omega = plus_quotient(omega, g_m, s, -alpha)  # line 9: omega - alpha g_m / s
    return omega, g_m, s


class BSAM(GaussianOptimizer):
    r"""Bayesian SAM.

    The letters are those of Algorithm 1 of the paper.

    Args:
        params: Parameters, named parameters, or groups of them. A group may override `lr`, `rho`,
            `prior_precision`, `betas` and `damping`, and set `perturb=False` (no adversarial step) or
            `sample=False` (no noise; its posterior is a point).
        lr: Learning rate $\alpha$. The step is $g / s$, not $g / \sqrt s$: Adam's values are about 1,000 times too
            small.
        num_data: Number of training examples. The loss of a batch is a mean, and the posterior needs the sum over all
            examples, so this number sets how certain the posterior is.
        rho: Size of the adversarial step.
        prior_precision: Precision of the Gaussian prior on the weights ($N \delta$ in the paper). It also acts as
            weight decay of strength `prior_precision` / $N$ on all parameters.
        weight_decay: The same in the units of torch's optimizers: `prior_precision = weight_decay * N`. Give one of the
            two; without both it is 5e-4. Groups take both names as well.
        betas: Decay of the averages of the gradient and of the precision. The precision starts at `init_precision` and
            forgets nine tenths of this value in about $2.3 / (1 - \beta_2)$ steps.
        damping: Constant $\gamma$ that is added to the curvature. By default it is 0.1, but $30 / N$ with 30 to 300
            examples, and 1 with fewer.
        init_precision: First value of `unit_precision`.
        augmentation_factor: The factor by which augmentation enlarges the data set (the paper uses 4 for crops and
            flips): $N$ is `num_data * augmentation_factor`.
        splits: Number of parts of each minibatch. Each part has its own noise and perturbation (m-sharpness; the paper
            uses 8): more parts change the method. Micro-batches of several `probe` calls are further parts.
        perturb_from: Where the adversarial step of a split starts. `"sample"`: at the weights that were sampled for its
            first gradient. `"mean"`: at the mean, as Algorithm 1 prints it.
        curvature: `"mean_abs"`, the mean of $\lvert g_k \rvert$ over the splits $k$, or `"abs_mean"`, the absolute
            value of the mean of $g_k$.
        sqrt_num_data: Whether the curvature is $\sqrt{N s} \lvert g \rvert$, as in the derivation, or
            $\sqrt s \lvert g \rvert$, as Algorithm 1 prints it. With the factor $\sqrt N$ the width of the posterior
            follows the gradients; without it the damping sets most of the width. In long training on many data, compare
            both (the page "Choosing the settings").
        max_noise: Limits the noise of a matrix of weights to this share of their root mean square. Biases and the
            scales of norms, which are vectors, then have no noise (unless no matrix has any); their posterior is a
            point. It matters for few data and for wide layers with small weights, where the noise would hide the
            weights. With None all weights have noise, without a limit, as in the paper.
        sample_noise: False draws no noise, which is the paper's "bSAM w/o noise".
        nonfinite: `"raise"` raises at a loss or gradient that is not finite. `"skip"` skips the step and counts it
            in `skipped_steps`.
        max_grad_norm: Clips the norm of $g_\epsilon$, the averaged gradient at the perturbed weights, before the prior
            is added. The first gradients, at the sampled weights, are not clipped.
        module: The model. With it, the optimizer can handle BatchNorm, compute the splits together, and name
            parameters in messages.
        batch_norm: Which passes update BatchNorm's running statistics, see `bsam.batch_norm`.
        vectorise: True computes the splits together by vmap, or raises. False computes them in a loop, with the same
            numbers. None computes them together on a GPU, and falls back to a loop with one warning that says why.
        process_group: The ranks that act as further splits; see the page on distributed training.
        seed: Seed of the noise.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> optimizer = BSAM(model.parameters(), num_data=50)
        >>> x, y = torch.randn(8, 3), torch.randint(2, (8,))
        >>> loss = optimizer.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
        >>> with optimizer.sampled():
        ...     prediction = model(x)
    """

    whole_options: ClassVar[tuple[str, ...]] = (
        *GaussianOptimizer.whole_options,
        "init_precision",
        "perturb_from",
        "curvature",
        "sqrt_num_data",
        "max_noise",
        "sample_noise",
    )
    rates: ClassVar[tuple[str, ...]] = (*GaussianOptimizer.rates, "damping", "rho")
    absent_options: ClassVar[dict[str, Any]] = {"perturb_from": "mean", "sqrt_num_data": False, "max_noise": None}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        *,
        num_data: float,
        rho: float = 0.05,
        prior_precision: float | None = None,
        weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.99),
        damping: float | None = None,
        init_precision: float = 1.0,
        augmentation_factor: float = 1.0,
        splits: int = 1,
        perturb_from: str = "sample",
        curvature: str = "mean_abs",
        sqrt_num_data: bool = True,
        max_noise: float | None = 0.5,
        sample_noise: bool = True,
        nonfinite: str = "raise",
        max_grad_norm: float | None = 1.0,
        module: nn.Module | None = None,
        batch_norm: str = "first_split",
        vectorise: bool | None = None,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        if prior_precision is None and weight_decay is None:
            weight_decay = _WEIGHT_DECAY
        if damping is None:
            damping = default_damping(options.effective_num_data(num_data, augmentation_factor))
        defaults = {
            "lr": lr,
            "rho": rho,
            "prior_precision": options.prior(prior_precision, weight_decay, num_data, augmentation_factor),
            "betas": betas,
            "damping": damping,
            "perturb": True,
            "sample": True,
            "num_data": num_data,
            "init_precision": init_precision,
            "augmentation_factor": augmentation_factor,
            "splits": splits,
            "perturb_from": perturb_from,
            "curvature": curvature,
            "sqrt_num_data": sqrt_num_data,
            "max_noise": max_noise,
            "sample_noise": sample_noise,
            "nonfinite": nonfinite,
            "max_grad_norm": max_grad_norm,
            "batch_norm": batch_norm,
            "seed": seed,
        }
        super().__init__(params, defaults, module=module, process_group=process_group, vectorise=vectorise)

    @classmethod
    def from_sgd(
        cls,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        num_data: float,
        **further: Any,
    ) -> BSAM:
        r"""Make a bSAM for a problem on which `torch.optim.SGD(params, lr, momentum, weight_decay)` works.

        SGD's steps can be had exactly (the page "Coming from" has the algebra), but they are not good for bSAM. Both
        were tried with several settings on small problems (the page "Out of the box"), and no learning rate or weight
        decay that was made from SGD's best ones was better than bSAM's defaults. So the learning rate is bSAM's
        default, 1. If parameter groups have rates of their own, these keep their proportion to `lr`.

        $\beta_1$ is SGD's momentum. Weights that SGD decays have bSAM's default weight decay, and the others none. All
        other options are bSAM's defaults.

        Args:
            params: Parameters, named parameters, or groups of them. `lr` and `weight_decay` of a group are SGD's; a
                group that is added later has bSAM's.
            lr: Learning rate of SGD. Only the rates of groups are compared with it.
            momentum: Momentum of SGD.
            weight_decay: Weight decay of SGD. Only whether it is 0 is used.
            num_data: Number of training examples.
            further: Options of bSAM that differ from its defaults. To set the learning rate or the strength of the
                prior, use `bsam.BSAM` with the other settings that `bsam.suggest` prints.
        """
        options.positive("lr", lr)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} must lie in [0, 1), as SGD has it.")
        settings = {"betas": (momentum, 0.99), "weight_decay": weight_decay}
        return cls._converted(params, lr, num_data, {**settings, **further}, lambda rate: rate / lr)

    @classmethod
    def from_adamw(
        cls,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        *,
        num_data: float,
        **further: Any,
    ) -> BSAM:
        r"""Make a bSAM for a problem on which `torch.optim.AdamW(params, lr, betas, weight_decay)` works.

        There is no algebra between the two: AdamW divides a gradient by its size, bSAM by a precision. The conversion
        is a rule that was found by trying rates of both on small problems (the page "Coming from"). AdamW's defaults
        become bSAM's. A rate of AdamW that is ten times as large becomes one of bSAM that is about twice as large,
        which was as good as keeping bSAM's own (the page "Out of the box"):

        ```math
        \alpha_{\text{bSAM}} = (\alpha_{\text{AdamW}} / 0.001)^{1/4}
        ```

        $\beta_1$ is AdamW's. Weights that AdamW decays have bSAM's default weight decay, and the others none: AdamW
        takes `lr * weight_decay` of a weight per step, which is usually too little to say how strong the prior is.
        $\beta_2$ and all other options are bSAM's defaults, because AdamW's $\beta_2$ is the memory of another average.

        Args:
            params: Parameters, named parameters, or groups of them. `lr` and `weight_decay` of a group are AdamW's; a
                group that is added later has bSAM's.
            lr: Learning rate of AdamW.
            betas: Decays of AdamW's averages. The second is not used.
            weight_decay: Weight decay of AdamW. Only whether it is 0 is used.
            num_data: Number of training examples.
            further: Options of bSAM that differ from its defaults. To set the strength of the prior, use `bsam.BSAM`
                with the other settings that `bsam.suggest` prints.
        """
        settings = {"betas": (betas[0], 0.99), "weight_decay": weight_decay}
        return cls._converted(params, lr, num_data, {**settings, **further}, lambda rate: (rate / 1e-3) ** 0.25)

    @classmethod
    def _converted(
        cls, params: Any, lr: Any, num_data: float, settings: dict[str, Any], rate: Callable[[Any], Any]
    ) -> BSAM:
        """Make a bSAM with converted learning rates, and the default prior for all groups that have one."""
        params = params if isinstance(params, Tensor) else list(params)  # a single tensor is refused below
        if any("prior_precision" in each for each in (settings, *params) if isinstance(each, dict)):
            raise ValueError(
                "prior_precision is not a setting of SGD or AdamW, and the conversion sets it: leave it out, and write "
                'it into group["prior_precision"] of the converted optimizer.'
            )
        optimizer = cls(params, lr, num_data=num_data, **settings)
        prior = _WEIGHT_DECAY * optimizer.effective_num_data
        for group in (optimizer.defaults, *optimizer.param_groups):
            group["lr"] = rate(group["lr"])
            group["prior_precision"] = prior if group["prior_precision"] > 0 else 0.0
        return optimizer

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        options.positive("init_precision", group["init_precision"])
        options.one_of("perturb_from", group["perturb_from"], ("sample", "mean"))
        options.one_of("curvature", group["curvature"], ("mean_abs", "abs_mean"))
        if group["max_noise"] is not None:
            options.positive("max_noise", group["max_noise"], "Write None for no limit.")
        for name in ("perturb", "sample_noise", "sqrt_num_data"):
            options.one_of(name, group[name], (True, False))

    def _fresh_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state = super()._fresh_state(parameter, group)
        return {**state, "unit_precision": torch.full_like(state["momentum"], group["init_precision"])}

    @property
    def _curvature_num_data(self) -> float:
        return self.effective_num_data if self._option("sqrt_num_data") else 1.0

    def _unit_precision(self, slot: Slot) -> Tensor:
        s: Tensor = slot.state["unit_precision"]
        return s

    def _is_sampled(self, slot: Slot) -> bool:
        if self._option("max_noise") is None or matrix_size(slot.parameter.shape):
            return super()._is_sampled(slot)
        sampled = (p for group in self.param_groups if group["sample"] for p in group["params"])
        return super()._is_sampled(slot) and not any(matrix_size(p.shape) for p in sampled)

    def _posterior_precision(self, slot: Slot) -> Tensor:
        s, r = self._unit_precision(slot), self._option("max_noise")
        return s if r is None else limited(s, slot.per_element(slot.inverse_mean_square()), self.effective_num_data, r)

    def _noise_precision(self, slot: Slot) -> Tensor | None:
        return super()._noise_precision(slot) if self._option("sample_noise") else None  # line 3

    def _probe(self, slots: list[Slot], theta: Iterable[Tensor], grad_at: Gradients, tally: Tally) -> None:
        from_sample = self._option("perturb_from") == "sample"
        if from_sample:
            g, start = grad_at.with_weights(theta)  # line 4
        else:
            g, start = grad_at(theta), [slot.mean for slot in slots]
        # Added before the second pass, so that its memory is needed once, and as a copy: DistributedDataParallel may
        # write the next gradients into the memory of g.
        if self._option("curvature") == "mean_abs":
            tally.add_abs("first_gradient", g)
        else:
            tally.add("first_gradient", (t.clone() for t in g))
        worse = (  # line 5, computed one by one while the weights are written
            perturbed(
                at.to(slot.mean.dtype).to(slot.dtype),  # a loop has rounded the sample to the type of the weights
                g_i,
                slot.state["unit_precision"],
                slot.group["rho"],
                in_place=from_sample,
            )
            if slot.group["perturb"]
            else at.expand_as(g_i)
            for slot, at, g_i in zip(slots, start, g, strict=True)
        )
        del g, start  # their memory is free once the weights are written
        tally.add("gradient", grad_at(worse))  # line 6

    def _update(self, slot: Slot, **averages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        g_eps, g, s = averages["gradient"], averages["first_gradient"], slot.state["unit_precision"]
        h = curvature(g if self._option("curvature") == "mean_abs" else g.abs(), s, self._curvature_num_data)
        omega, g_m, s = update(
            slot.mean.to(slot.dtype),
            slot.state["momentum"],
            s,
            g_eps,
            h,
            gamma=slot.group["damping"],
            **self._letters(slot.group),
        )
        return omega, {"momentum": g_m, "unit_precision": s}

    def _learned_precision(self, slot: Slot) -> Tensor:
        """Return the average h of line 8, which is s without its starting value, prior and damping."""
        s = self._unit_precision(slot)
        left = self._share_kept(slot.group) ** slot.state["step"].clamp_min(1).double()
        h: Tensor = (s - left * slot.group["init_precision"]) / (1 - left) - self._given_precision(slot.group)
        h = h.clamp_min(0) * (slot.state["step"] > 0)  # nothing is learned before the first step
        return h.to(s.dtype)

    def _sizes(self, slot: Slot) -> dict[str, Tensor]:
        sizes = super()._sizes(slot)
        if slot.group["perturb"] and int(slot.state["step"]):
            s = self._unit_precision(slot)
            g = self._learned_precision(slot) / (self._curvature_num_data * s).sqrt()  # line 8, solved for |g|
            sizes["perturbation"] = perturbed(torch.zeros_like(s), g, s, slot.group["rho"])
        return sizes

    def _own_findings(self) -> list[Finding]:
        return [diagnosis.factor(self.effective_num_data)] if self._option("sqrt_num_data") else []

    def _check_state(self, key: Any, state: dict[str, Any]) -> None:
        s = state["unit_precision"]
        if not bool(((s > 0) & s.isfinite()).all()):
            raise ValueError(f"the loaded unit_precision of parameter {key} is not positive and finite everywhere.")
