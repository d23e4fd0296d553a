"""Checks of an optimizer's options: each error names the value, the rule, and what to write."""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def non_negative(name: str, value: Any, hint: str = "") -> None:
    """Accept finite numbers >= 0; a tensor without dimensions counts as its number."""
    number = _number(name, value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name}={value} must be a finite number >= 0. {hint}".rstrip())


def positive(name: str, value: Any, hint: str = "") -> None:
    """Accept finite numbers > 0."""
    number = _number(name, value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name}={value} must be a finite number > 0. {hint}".rstrip())


def prior(
    prior_precision: Any, weight_decay: Any, num_data: Any, augmentation_factor: Any, default: float | None = None
) -> Any:
    """Return the prior's precision: as it is given, or weight_decay times N, or the default if neither is given."""
    if weight_decay is None:
        return default if prior_precision is None else prior_precision
    if prior_precision is not None:
        raise ValueError(
            f"prior_precision={prior_precision} and weight_decay={weight_decay} say the same thing, because "
            "prior_precision = weight_decay * N: give one of them."
        )
    non_negative("weight_decay", weight_decay)
    return weight_decay * effective_num_data(num_data, augmentation_factor)


def effective_num_data(num_data: Any, augmentation_factor: Any) -> Any:
    """Return N, the product of two positive numbers."""
    positive("num_data", num_data, "It is the number of training examples, len(train_set).")
    positive("augmentation_factor", augmentation_factor)
    return num_data * augmentation_factor


def betas(value: Any) -> None:
    """Accept a pair of numbers in [0, 1)."""
    if not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"betas={value!r} must be a pair of numbers in [0, 1), like (0.9, 0.999).")
    for beta in value:
        if not 0 <= _number("betas", beta) < 1:
            raise ValueError(f"betas={value!r} must both lie in [0, 1), like (0.9, 0.999).")


def count(name: str, value: Any, hint: str = "") -> None:
    """Accept integers >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer >= 1. {hint}".rstrip())


def integer(name: str, value: Any) -> None:
    """Accept integers of 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}={value!r} must be an integer of at most 64 bits.")


def one_of(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Accept one of the given values."""
    if not any(value is choice or value == choice for choice in choices):
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")


def fingerprint(groups: Sequence[Mapping[str, Any]]) -> int:
    """Return a number below 2^20 that is the same for the same options, and else differs but once in a million."""
    return int(hashlib.sha256("; ".join(map(listed, groups)).encode()).hexdigest()[:5], 16)


def different(groups: Sequence[Mapping[str, Any]]) -> ValueError:
    """Return the error for ranks whose fingerprints are not equal."""
    return ValueError(
        f"the ranks have optimizers with different options, this one {listed(groups[0])}: give the optimizers of all "
        "ranks the same options. num_data is the number of examples of all ranks together."
    )


def listed(group: Mapping[str, Any]) -> str:
    """Return the options of a group that are numbers, texts, pairs or None as text."""
    kinds = (numbers.Real, str, tuple, list, type(None))
    return ", ".join(
        f"{name}={value!r}"
        for name, value in group.items()
        if name not in ("params", "param_names") and isinstance(value, kinds)
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"Tensor {name} must be 1-element, not of shape {tuple(value.shape)}.")
    if isinstance(value, Tensor) and value.dim() > (name == "lr"):  # torch takes learning rates of shape (1,)
        raise ValueError(f"{name} is a tensor of shape {tuple(value.shape)}: write a number, or torch.tensor(0.1).")
    if isinstance(value, bool) or not isinstance(value, numbers.Real | Tensor):
        raise TypeError(f"{name}={value!r} must be a number, not {type(value).__name__}.")
    try:
        return float(value)
    except OverflowError:
        return math.inf
