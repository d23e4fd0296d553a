"""What the state of an optimizer says about its settings, in sentences with numbers.

Each rule is a pure function from numbers to a `Finding`. The limits lie above what runs of the paper, of the demo and
of small problems with the defaults showed: noise of 0.73 of the weights, steps of 0.07, adversarial steps of 0.021,
weights that double, and 99.99% of the precision from prior and damping.

Ratios to the weights are of root mean squares over all weights that carry the model: tensors of two or more dimensions
(all, where there are none) that were not zero when this optimizer took its first step. Biases and layers that start at
zero would make every step look large.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "CHECKED_AT",
    "FEWEST_WEIGHTS",
    "SIZE_RULES",
    "Diagnosis",
    "Finding",
    "Ratio",
    "batch_fits",
    "factor",
    "full_rate",
    "growth",
    "noise_size",
    "num_data_matches",
    "pace",
    "perturbation_size",
    "prior_share",
    "ratio",
    "sampled_loss",
    "skipped",
    "start_left",
    "step_size",
    "weight_decay",
]

CHECKED_AT = (10, 100, 1000)
"""The optimizer checks its ratios after these steps, and warns at most once."""

FEWEST_WEIGHTS = 256
"""Training warns only if a model has at least this many weights. With few weights a wide posterior may be right."""


@dataclass(frozen=True)
class Finding:
    """One rule's number, and what it means."""

    name: str
    value: float
    limit: float
    """A value above it is bad."""
    sentence: str

    @property
    def is_bad(self) -> bool:
        """True if the value is above its limit, or is not a number."""
        return not self.value <= self.limit


@dataclass(frozen=True)
class Diagnosis:
    """The findings about an optimizer. Print it to read them."""

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that are bad."""
        return tuple(finding for finding in self.findings if finding.is_bad)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, name: str) -> Finding:
        """The finding of this name."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"there is no finding {name!r}; there are {', '.join(f.name for f in self.findings)}.")

    def __str__(self) -> str:
        marked = (f"{'problem' if finding.is_bad else 'ok':>7}  {finding.sentence}" for finding in self.findings)
        return "\n".join(marked)


@dataclass(frozen=True)
class Ratio:
    """The size of something that is added to the weights, divided by the size of the weights (root mean squares)."""

    total: float
    """Over all weights."""
    median: float
    """Over the tensors."""
    worst: float
    worst_name: str
    """The tensor where it is largest."""

    def __str__(self) -> str:
        return f"{self.total:.2g} (median of the tensors {self.median:.2g}, worst {self.worst:.2g}, {self.worst_name})"


def ratio(norms: Mapping[str, tuple[float, float]]) -> Ratio | None:
    """Return the ratio of two sizes, from their norms by tensor; None if all weights are zero."""
    each = {name: added / weights for name, (added, weights) in norms.items() if weights > 0}
    if not each:
        return None
    added, weights = (math.hypot(*(pair[i] for pair in norms.values())) for i in (0, 1))
    worst = max(each, key=lambda name: each[name])
    return Ratio(added / weights, statistics.median(each.values()), each[worst], worst)


def _advised(finding: Finding, advice: str) -> Finding:
    """Add to the sentence what to change, if the finding is bad."""
    if not finding.is_bad:
        return finding
    return Finding(finding.name, finding.value, finding.limit, f"{finding.sentence} {advice}")


# ------------------------------------------------------------------ the rules


def growth(times: float, steps: int) -> Finding:
    """Judge how much the weights have grown: steps that are too large make weights beside which they look small."""
    sentence = f"The weights are {times:.3g} times as large as before this optimizer's first step."
    limit = 3.0 if steps <= CHECKED_AT[0] else 10.0
    return _advised(Finding("growth", times, limit, sentence), "The steps were far too large: lower lr.")


def step_size(found: Ratio, lr: Sequence[float]) -> Finding:
    """Judge the size of a step against the weights."""
    sentence = f"A step with lr={_numbers(lr)} divided by the weights is {found}."
    advice = "A step should change the weights by a few percent at most: lower lr."
    return _advised(Finding("step", found.total, 0.5, sentence), advice)


def pace(step: float, lr: Sequence[float]) -> Finding:
    """Judge whether the first steps, divided by the weights, were so small that nothing is learned."""
    sentence = f"After {CHECKED_AT[0]} steps, a step with lr={_numbers(lr)} divided by the weights was {step:.2g}."
    advice = (
        "Such steps hardly move the weights: raise lr. bSAM's default is 1; Adam's rates are about 1,000 times too "
        "small for it."
    )
    return _advised(Finding("pace", 1 / step if step else math.inf, 5_000.0, sentence), advice)


def noise_size(found: Ratio, num_data: Sequence[float]) -> Finding:
    """Judge the standard deviation of the noise against the weights."""
    sentence = f"The noise divided by the weights is {found}, with num_data={_numbers(num_data)}."
    advice = (
        "Samples of the weights are mostly noise: is num_data the number of training examples, len(train_set)? If it "
        "is, raise what the precision starts from and is made of (damping, prior_precision, or IVON's initial_hessian)."
    )
    return _advised(Finding("noise", found.total, 1.5, sentence), advice)


def perturbation_size(found: Ratio, rho: Sequence[float]) -> Finding:
    """Judge the size of the adversarial step against the weights, by an estimate of the gradient."""
    sentence = f"The adversarial step divided by the weights is about {found}, with rho={_numbers(rho)}."
    advice = (
        "The gradient is taken too far from the weights to say where to go. Does the loss function return a mean and "
        "not a sum, and are the inputs standardised? If so, lower rho."
    )
    return _advised(Finding("perturbation", found.total, 0.025, sentence), advice)


def skipped(skipped_steps: int, steps: int) -> Finding:
    """Judge how many steps changed nothing, because a loss or gradient was not finite."""
    sentence = f"{skipped_steps:,} of {steps:,} steps were skipped, because a loss or a gradient was not finite."
    advice = 'Write nonfinite="raise" to see where the first one comes from, or lower lr.'
    return _advised(Finding("skipped", skipped_steps / steps, 0.5, sentence), advice)


def start_left(share: float, steps: int) -> Finding:
    """Judge which share of the precision is still its starting value."""
    sentence = f"After {steps:,} steps {share:.1%} of the precision is still its starting value."
    advice = (
        "If training ends here, the posterior is mostly not learned: train longer, or use a smaller beta2 (0.99 "
        "forgets it in 230 steps)."
    )
    return _advised(Finding("start", share, 0.5, sentence), advice)


def prior_share(share: float) -> Finding:
    """Judge which share of the mean precision comes from the settings and not from the data."""
    sentence = f"Prior and damping make up {share:.4%} of the mean precision; the rest is learned from the data."
    advice = (
        "The width of the posterior is that of the settings alone: lower damping, and lr with it, or prior_precision."
    )
    return _advised(Finding("prior share", share, 0.9999, sentence), advice)


def weight_decay(prior_precision: float, N: float) -> Finding:
    """Judge the weight decay that the prior is."""
    decay = prior_precision / N
    sentence = (
        f"prior_precision={prior_precision:g} is a weight decay of {decay:.2g}, prior_precision / N with N={N:g}."
    )
    advice = "Weight decays are 1e-5 to 1e-3 as a rule: lower prior_precision, or see whether num_data is too small."
    return _advised(Finding("weight decay", decay, 0.03, sentence), advice)


def factor(N: float) -> Finding:
    """Judge the factor sqrt(N) of bSAM's curvature: with many data it may make the precision too large."""
    sentence = f"The curvature has the factor sqrt(N) with N={N:g} (sqrt_num_data=True)."
    advice = (
        "On CIFAR-100, with 45,000 images, long training was much better without it: compare with "
        "sqrt_num_data=False, damping=1 on validation data."
    )
    return _advised(Finding("factor", N, 20_000.0, sentence), advice)


def batch_fits(num_data: float, examples: float) -> Finding:
    """Judge whether the data can be as few as num_data, given the largest number of examples in a step."""
    sentence = f"num_data={num_data:g}, and a step has seen {examples:,g} examples."
    advice = "num_data is the number of training examples, not of batches: write num_data=len(train_set)."
    return _advised(Finding("batch", examples / num_data, 1.0, sentence), advice)


def num_data_matches(num_data: float, examples: int) -> Finding:
    """Judge by which factor num_data and the number of training examples differ."""
    factor = max(num_data / examples, examples / num_data) if examples else math.inf
    sentence = f"num_data={num_data:g}, and the training set has {examples:,} examples."
    advice = "num_data sets how wide the posterior is and how much the prior counts: write num_data=len(train_set)."
    return _advised(Finding("num_data", factor, 2.0, sentence), advice)


def sampled_loss(at_mean: float, at_samples: float) -> Finding:
    """Judge the loss at samples of the weights against the loss at their mean.

    Bad where it is larger by more than half a unit and by more than the loss at the mean.
    """
    sentence = f"The loss is {at_samples:.4g} at samples of the weights, and {at_mean:.4g} at their mean."
    advice = "The noise destroys what the mean has learned: is num_data too small, or damping?"
    return _advised(Finding("loss", at_samples, at_mean + max(abs(at_mean), 0.5), sentence), advice)


def full_rate(group: Mapping[str, Any]) -> float:
    """Return the largest learning rate that a group is known to have: schedulers write down where they start."""
    return max(float(group.get(name, 0.0)) for name in ("lr", "initial_lr", "max_lr"))


def _numbers(values: Sequence[float]) -> str:
    """Write the different values of the groups."""
    return " and ".join(f"{value:.6g}" for value in sorted(set(values)))


SIZE_RULES: dict[str, tuple[Callable[[Ratio, Sequence[float]], Finding], str]] = {
    "step": (step_size, "lr"),
    "noise": (noise_size, "num_data"),
    "perturbation": (perturbation_size, "rho"),
}
"""The rules for what is added to the weights, by its name in `ProbingOptimizer._sizes`, and the option that sets it."""
