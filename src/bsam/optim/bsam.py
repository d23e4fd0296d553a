r"""bSAM: SAM that learns a Gaussian posterior over the weights.

Möllenhoff and Khan (2023), "SAM as an Optimal Relaxation of Bayes", ICLR; Algorithm 1 (the red boxes) and, for
several splits, the listing of appendix E.4 ("bSAM algorithm with m-sharpness").

    1:  omega <- initial weights, s <- 1, g_m <- 0
    2:  while not converged, for a minibatch cut into m parts M_1 .. M_m:
    3:      theta_k  <-  omega + e_k,   e_k ~ N(0, sigma^2),   sigma^2 = 1 / (N s)
    4:      g_k      <-  mean gradient of M_k at theta_k
    5:      eps_k    <-  rho g_k / s
    6:      g_eps    <-  mean over k of the mean gradient of M_k at omega + eps_k
    7:      g_m      <-  beta1 g_m + (1 - beta1) (g_eps + delta omega)
    8:      s        <-  beta2 s + (1 - beta2) (sqrt(s) |g| + delta + gamma)
    9:      omega    <-  omega - alpha g_m / s
    10: the posterior is N(omega, 1 / (N s))

| paper | here |
|---|---|
| omega, theta | the module's weights; a sample of them |
| s | `unit_precision`: precision for one example; the posterior's is N s |
| N | `num_data * augmentation_factor` |
| delta | `prior_precision / N` |
| alpha, (beta1, beta2) | `lr`, `betas` |
| rho, gamma, m | `rho`, `damping`, `splits` |

Where this differs from print, and why:

- Line 6 of the appendix's listing adds the noise e_k again and its line 5 leaves rho out; the authors' code, and
  Algorithm 1, take the second gradient at omega + eps_k with eps_k = rho g_k / s. So does this.
- `curvature="mean_abs"` (the default, as the authors' code) averages |g_k| over the splits; `"abs_mean"` takes the
  absolute value of the average, as printed. They agree for one split.
- The printed order of lines 8 and 9 is kept: omega moves with the new s (the authors' code: with the old one).
- The derivation has sqrt(N s) |g| in line 8; algorithm and code have sqrt(s) |g|, "because it performed better".
  On a quadratic with curvature h the stationary s is therefore delta + gamma + h sqrt(2 / (pi N)), not delta + h.
- Neither print nor code corrects the bias of the averages; s starts at `init_precision`.
- Sub-batches count by their size, so that ragged ones give the mean over all examples.

State of a parameter: `momentum` (g_m), `unit_precision` (s) and `step`; float32 for 16-bit weights.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bsam.noise import standard_normal
from bsam.optim import options
from bsam.optim.base import GradAt, Probe, ProbingOptimizer, Slot, write
from bsam.posterior import DiagonalGaussian

__all__ = ["BSAM", "curvature", "perturbation", "posterior_std", "update"]


def posterior_std(s: Tensor, N: float) -> Tensor:
    """The posterior's standard deviation sigma = 1 / sqrt(N s)."""
    return (N * s).rsqrt()  # line 3


def perturbation(g: Tensor, s: Tensor, rho: float) -> Tensor:
    """The adversarial step eps: SAM's, with a vector in place of the norm."""
    return rho * g / s  # line 5


def curvature(abs_g: Tensor, s: Tensor) -> Tensor:
    """The curvature h = sqrt(s) |g|: the optimal precision b* of the biconjugate, appendix E.1."""
    return s.sqrt() * abs_g  # line 8


def update(
    omega: Tensor,
    g_m: Tensor,
    s: Tensor,
    g_eps: Tensor,
    h: Tensor,
    *,
    alpha: float | Tensor,
    beta1: float,
    beta2: float,
    delta: float,
    gamma: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new (omega, g_m, s)."""
    g_m = beta1 * g_m + (1 - beta1) * (g_eps + delta * omega)  # line 7
    s = beta2 * s + (1 - beta2) * (h + delta + gamma)  # line 8
    omega = omega - alpha * g_m / s  # line 9
    return omega, g_m, s


class BSAM(ProbingOptimizer):
    """Bayesian SAM.

    Args:
        params: Parameters, named parameters, or groups of them. A group may override `lr`, `rho`,
            `prior_precision`, `betas` and `damping`, and say `perturb=False` (no adversarial step) or
            `sample=False` (no noise; its posterior is a point).
        lr: Learning rate alpha. The step is g / s with s well below 1, not g / sqrt(s): values that suit SGD suit
            bSAM (0.1 to 1), Adam's are about 100 times too small.
        num_data: Number of training examples, the N of the loss's sum. With the mean loss of each batch it sets
            how certain the posterior is.
        rho: Size of the adversarial step.
        prior_precision: Precision of the Gaussian prior on the weights (N delta in the paper). It also acts as weight
            decay of strength prior_precision / N on all parameters.
        betas: Decay of the average gradient and of the precision. Use beta2 = 0.99 for runs of a few hundred
            steps: the precision starts at `init_precision` and forgets it in about 1 / (1 - beta2) steps.
        damping: Added to the curvature (gamma).
        init_precision: Where `unit_precision` starts.
        augmentation_factor: How many times augmentation enlarges the data set (the paper uses 4 for crops and flips):
            N is num_data * augmentation_factor.
        splits: Into how many parts each minibatch is cut, each with a noise and a perturbation of its own
            (m-sharpness; the paper uses 8). Not gradient accumulation: it changes the method.
        curvature: `"mean_abs"`, the mean of |g_k| over the splits, or `"abs_mean"`, |mean of g_k|.
        sample_noise: False leaves out line 3, the paper's "bSAM w/o noise".
        nonfinite: `"raise"` stops at a loss or gradient that is not finite, `"skip"` leaves the step out and counts
            it in `skipped_steps`.
        max_grad_norm: Clips the norm of g_eps, the averaged gradient at the perturbed weights (line 6), before the
            prior is added. The first gradients (line 4) are not clipped.
        module: The model. Lets the optimizer handle BatchNorm and name parameters in messages.
        batch_norm: Which passes move BatchNorm's running statistics, see `bsam.batch_norm`.
        process_group: Ranks as further splits, see the page on distributed training.
        seed: Seed of the noise.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> optimizer = BSAM(model.parameters(), lr=0.1, num_data=50)
        >>> x, y = torch.randn(8, 3), torch.randint(2, (8,))
        >>> loss = optimizer.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
        >>> with optimizer.sampled():
        ...     prediction = model(x)
    """

    whole_options = (
        *ProbingOptimizer.whole_options,
        *("num_data", "augmentation_factor", "init_precision", "curvature", "sample_noise", "seed"),
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.1,
        *,
        num_data: float,
        rho: float = 0.01,
        prior_precision: float = 25.0,
        betas: tuple[float, float] = (0.9, 0.999),
        damping: float = 0.1,
        init_precision: float = 1.0,
        augmentation_factor: float = 1.0,
        splits: int = 1,
        curvature: str = "mean_abs",
        sample_noise: bool = True,
        nonfinite: str = "raise",
        max_grad_norm: float | None = None,
        module: nn.Module | None = None,
        batch_norm: str = "first_split",
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "rho": rho,
            "prior_precision": prior_precision,
            "betas": betas,
            "damping": damping,
            "perturb": True,
            "sample": True,
            "num_data": num_data,
            "init_precision": init_precision,
            "augmentation_factor": augmentation_factor,
            "splits": splits,
            "curvature": curvature,
            "sample_noise": sample_noise,
            "nonfinite": nonfinite,
            "max_grad_norm": max_grad_norm,
            "batch_norm": batch_norm,
            "seed": seed,
        }
        super().__init__(params, defaults, module=module, process_group=process_group)

    def _reset(self) -> None:
        super()._reset()
        self._draws = 0  # samples taken by sampled()
        self._means: dict[Tensor, Tensor] | None = None  # the weights, while sampled() holds a sample in the model

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        options.non_negative("lr", group["lr"])
        for name in ("rho", "prior_precision", "damping"):
            options.non_negative(name, group[name])
        options.betas(group["betas"])
        options.positive("num_data", group["num_data"], "It is the number of training examples, len(train_set).")
        options.positive("init_precision", group["init_precision"])
        options.positive("augmentation_factor", group["augmentation_factor"])
        options.one_of("curvature", group["curvature"], ("mean_abs", "abs_mean"))
        for name in ("perturb", "sample", "sample_noise"):
            options.one_of(name, group[name], (True, False))
        options.integer("seed", group["seed"])

    @property
    def effective_num_data(self) -> float:
        """N = num_data * augmentation_factor."""
        return float(self._option("num_data") * self._option("augmentation_factor"))

    def _fresh_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return {
            "step": torch.zeros((), dtype=torch.int64, device=parameter.device),
            "momentum": torch.zeros_like(parameter, dtype=dtype),
            "unit_precision": torch.full_like(parameter, group["init_precision"], dtype=dtype),
        }

    def _posterior_noise(self, slot: Slot, split: int) -> Tensor | None:
        """The offset e ~ N(0, 1 / (N s)) of line 3, or None for a group that is not sampled."""
        if not slot.group["sample"]:
            return None
        e = standard_normal(
            self._option("seed"),
            slot.state["step"],
            split,
            slot.index,
            slot.parameter.shape,
            device=slot.parameter.device,
            dtype=slot.dtype,
        )
        return e.mul_(posterior_std(slot.state["unit_precision"], self.effective_num_data))

    def _probe(self, slots: list[Slot], grad_at: GradAt, split: int) -> Probe:
        noisy = self._option("sample_noise")
        g, loss = grad_at(self._posterior_noise(slot, split) if noisy else None for slot in slots)  # lines 3, 4
        eps = (  # line 5, made one by one as the weights are written
            perturbation(g_i, slot.state["unit_precision"], slot.group["rho"]) if slot.group["perturb"] else None
            for slot, g_i in zip(slots, g, strict=True)
        )
        g_eps, _ = grad_at(eps)  # line 6
        return Probe(loss, (g_eps, [t.abs() for t in g] if self._option("curvature") == "mean_abs" else g))

    def _update(self, slots: list[Slot], statistics: tuple[list[Tensor], ...], accept: Tensor | None) -> None:
        for slot, g_eps, g in zip(slots, *statistics, strict=True):
            state, group = slot.state, slot.group
            omega, g_m, s = update(
                slot.mean.to(slot.dtype),
                state["momentum"],
                state["unit_precision"],
                g_eps,
                curvature(g.abs(), state["unit_precision"]),
                alpha=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                delta=group["prior_precision"] / self.effective_num_data,
                gamma=group["damping"],
            )
            write(slot.parameter, omega, accept)
            write(state["momentum"], g_m, accept)
            write(state["unit_precision"], s, accept)
            write(state["step"], state["step"] + 1, accept)
            self.state[slot.parameter] = state

    def posterior(self, model: nn.Module | None = None) -> DiagonalGaussian:
        """The Gaussian N(omega, 1 / (N s)) over the weights, with the prior that was used.

        Frozen parameters and groups with `sample=False` are points. Warns while a tenth or more of the precision is
        still its starting value, that is while beta2^t > 0.1.

        Args:
            model: The model, for the names of its parameters and for its buffers. Not needed if the optimizer was
                made with `module=`.
        """
        model = self._model_or_own(model)
        slots = [slot for slot in self._slots() if slot.group["sample"]]
        steps = max((int(slot.state["step"]) for slot in slots), default=0)
        left = max((slot.group["betas"][1] ** steps for slot in slots), default=0.0)
        if left > 0.1:
            warnings.warn(
                f"after {steps} steps {left:.0%} of the precision is still its starting value: train longer, or with a "
                "smaller beta2 (0.99 forgets it in 230 steps).",
                stacklevel=2,
            )
        return DiagonalGaussian.from_model(
            model,
            {s.parameter: posterior_std(s.state["unit_precision"], self.effective_num_data) for s in slots},
            prior_precision={s.parameter: float(s.group["prior_precision"]) for s in slots},
        )

    @contextlib.contextmanager
    def sampled(self, draw: int | None = None) -> Iterator[None]:
        """Put one sample of the posterior into the model; the mean comes back when the block ends.

        Blocks may be nested: an inner one replaces the sample by another. Frozen parameters stay as they are.

        Args:
            draw: Number of the sample: the same number at the same step is the same sample. By default the next one.
        """
        outermost = self._means is None
        if outermost:
            self._refuse_if_away("sample the posterior")
        if draw is not None and draw < 0:
            raise ValueError(f"draw={draw} must be >= 0: it numbers the samples of the posterior.")
        if draw is None:
            draw, self._draws = self._draws, self._draws + 1
        slots = self._slots()  # what to put back: the mean, or the outer sample
        if outermost:
            self._means, self._away = {slot.parameter: slot.mean for slot in slots}, "inside sampled()"
        try:
            self._write_sample(slots, draw)
            yield
        finally:
            with torch.no_grad():
                for slot in slots:
                    slot.parameter.copy_(slot.mean)
            torch.clear_autocast_cache()
            if outermost:
                self._means, self._away = None, None

    @torch.no_grad()
    def _write_sample(self, slots: list[Slot], draw: int) -> None:
        assert self._means is not None
        for slot in slots:
            offset = self._posterior_noise(slot, -1 - draw)
            if offset is not None:
                slot.parameter.copy_(self._means.get(slot.parameter, slot.mean) + offset)
        torch.clear_autocast_cache()

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        super()._check_state_dict(state_dict)
        for key, state in state_dict["state"].items():
            missing = [name for name in ("step", "momentum", "unit_precision") if name not in state]
            if missing:
                raise ValueError(
                    f"the loaded state of parameter {key} has no {missing[0]!r}: is it another optimizer's?"
                )
            s, momentum = state["unit_precision"], state["momentum"]
            if not bool(((s > 0) & s.isfinite()).all()):
                raise ValueError(f"the loaded unit_precision of parameter {key} is not positive and finite everywhere.")
            if not bool(momentum.isfinite().all()):
                raise ValueError(f"the loaded momentum of parameter {key} is not finite everywhere.")

    def _restore_types(self, parameter: Tensor, saved: dict[str, Any]) -> None:
        # torch casts what it loads to the parameter's type; a bfloat16 average with beta2 = 0.999 never moves.
        fresh = self._fresh_state(parameter, self.param_groups[0])
        self.state[parameter] = {k: torch.as_tensor(saved[k]).to(v, copy=True) for k, v in fresh.items()}
