"""Candidates for bSAM's defaults that are more than settings: bSAM with one change each.

They were compared with the defaults on the problems for choosing (`out_of_the_box.py --variant`), and rejected. None is
part of the package.

| name | the change |
|---|---|
| `debiased` | the precision s starts as a plain mean of what it averages, so it forgets its start at once |
| `empirical_bayes` | the prior's precision is learned: effective parameters / (|omega|^2 + trace of the variances) |
| `unbiased` | the curvature N s e g of Stein's identity, with IVON's correction, in the place of sqrt(N s) |g| |
| `first_clipped` | gradients are clipped in the first 100 steps only |
| `noisy_vectors` | biases and norms have noise, too, and it has no limit |
| `scaled_vectors` | biases and norms have noise, too, limited as that of matrices, by their own root mean square |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import bsam
from bsam.optim.bsam import limited
from bsam.optim.probing import Gradients, Slot, Tally

__all__ = ["CANDIDATES", "Debiased", "EmpiricalBayes", "FirstClipped", "NoisyVectors", "ScaledVectors", "Unbiased"]


class Debiased(bsam.BSAM):
    """The start of s counts as one observation: step t keeps at most (t + 1) / (t + 2) of s."""

    def _update(self, slot: Slot, **averages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        beta1, beta2 = slot.group["betas"]
        t = int(slot.state["step"])
        group = {**slot.group, "betas": (beta1, min(beta2, (t + 1) / (t + 2)))}
        return super()._update(replace(slot, group=group), **averages)


class EmpiricalBayes(bsam.BSAM):
    """After each step the prior's precision is that with which the evidence is stationary (MacKay, 1992)."""

    @torch.no_grad()
    def step(self, closure: Callable[..., Any] | None = None, *batch: Any) -> Any:
        loss = super().step(closure, *batch)
        slots, N = self._slots(), self.effective_num_data
        variances = [(N * self._posterior_precision(slot)).reciprocal() for slot in slots]
        prior = float(self.param_groups[0]["prior_precision"])
        effective = sum(float((1 - prior * v).sum()) for v in variances)
        size = sum(float(slot.mean.square().sum() + v.sum()) for slot, v in zip(slots, variances, strict=True))
        for group in self.param_groups:
            group["prior_precision"] = max(effective, 1.0) / size
        return loss


class FirstClipped(bsam.BSAM):
    """No clipping after 100 steps."""

    def step(self, closure: Callable[..., Any] | None = None, *batch: Any) -> Any:
        if self._num_steps == 100:
            for group in self.param_groups:
                group["max_grad_norm"] = None
        return super().step(closure, *batch)


class NoisyVectors(bsam.BSAM):
    """`max_noise` limits the noise of matrices, and takes away none."""

    def _is_sampled(self, slot: Slot) -> bool:
        return bool(slot.group["sample"])


class ScaledVectors(NoisyVectors):
    """`max_noise` limits the noise of vectors, too: one that starts at 0 has no noise until it has moved."""

    def _posterior_precision(self, slot: Slot) -> Tensor:
        s, r = super()._posterior_precision(slot), self.param_groups[0]["max_noise"]
        if slot.parameter.dim() > 1:
            return s
        inverse = slot.mean.square().mean().clamp_min(1e-12).reciprocal()
        return limited(s, inverse, self.effective_num_data, r)


@dataclass
class _Noted:
    """Gradients that show each first gradient, and the weights it is at, to `note`."""

    grad_at: Gradients
    note: Callable[[list[Tensor], list[Tensor]], None]

    def __call__(self, weights: Iterable[Tensor]) -> list[Tensor]:
        return self.grad_at(weights)

    def with_weights(self, weights: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        g, theta = self.grad_at.with_weights(weights)
        self.note(g, theta)
        return g, theta


class Unbiased(bsam.BSAM):
    """E[(theta - omega) g] is the variance times the Hessian, so N s (theta - omega) g is an unbiased curvature."""

    def _probe(self, slots: list[Slot], theta: Iterable[Tensor], grad_at: Gradients, tally: Tally) -> None:
        N = self.effective_num_data

        def note(g: list[Tensor], theta: list[Tensor]) -> None:
            products = (
                N * self._posterior_precision(slot) * (at - slot.mean) * g_i
                for slot, g_i, at in zip(slots, g, theta, strict=True)
            )
            tally.add("product", products)

        super()._probe(slots, theta, _Noted(grad_at, note), tally)  # type: ignore[arg-type]

    def _update(self, slot: Slot, **averages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        h, s = averages.pop("product"), slot.state["unit_precision"]
        beta2 = slot.group["betas"][1]
        target = h + self._given_precision(slot.group)
        new = beta2 * s + (1 - beta2) * target + (1 - beta2) ** 2 * (s - target).square() / (2 * s)  # IVON's line 8
        # The update of bSAM with a precision that is already new: beta2 = 1 keeps it.
        held = replace(
            slot,
            group={**slot.group, "betas": (slot.group["betas"][0], 1.0)},
            state={**slot.state, "unit_precision": new},
        )
        return super()._update(held, **averages)


CANDIDATES: dict[str, type[bsam.BSAM]] = {
    "debiased": Debiased,
    "empirical_bayes": EmpiricalBayes,
    "unbiased": Unbiased,
    "first_clipped": FirstClipped,
    "noisy_vectors": NoisyVectors,
    "scaled_vectors": ScaledVectors,
}
