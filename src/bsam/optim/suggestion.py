"""bSAM's settings for a problem on which SGD or AdamW works, with the reason for each number.

The rules are in `BSAM.from_sgd` and `BSAM.from_adamw`: the settings are read from an optimizer that they make.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bsam.optim import options
from bsam.optim.bsam import BSAM

__all__ = ["Suggestion", "suggest"]

_SGD: dict[str, Any] = {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}
_ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01}
"""The defaults of torch."""


@dataclass(frozen=True)
class Suggestion:
    """Settings of bSAM and why; printed, a line of Python and one sentence per setting."""

    settings: dict[str, Any]
    """Keywords of `bsam.BSAM`."""
    reasons: dict[str, str]
    """One sentence for each keyword."""

    def __str__(self) -> str:
        shown = {name: _shown(value) for name, value in self.settings.items()}
        line = f"bsam.BSAM(model.parameters(), {', '.join(f'{name}={text}' for name, text in shown.items())})"
        width = max(len(f"{name}={text}") for name, text in shown.items())
        return "\n".join(
            [line, "", *(f"{f'{name}={text}':{width}}  {self.reasons[name]}" for name, text in shown.items())]
        )


def suggest(
    *,
    sgd: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    num_data: float,
) -> Suggestion:
    """Suggest settings of bSAM for a problem on which SGD or AdamW works.

    Args:
        sgd: Settings of `torch.optim.SGD`: `lr`, `momentum` and `weight_decay`. Missing ones have torch's defaults.
        adamw: Settings of `torch.optim.AdamW`: `lr`, `betas` and `weight_decay`. Give either `sgd` or `adamw`.
        num_data: Number of training examples.

    Examples:
        >>> suggestion = suggest(sgd={"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}, num_data=50_000)
        >>> suggestion.settings["lr"]
        1.0
        >>> print(suggestion.reasons["betas"])
        The first is SGD's momentum. With the second, s forgets its start in about 230 steps.
    """
    if (sgd is None) == (adamw is None):
        raise ValueError("give either sgd=, like sgd={'lr': 0.1, 'momentum': 0.9}, or adamw=, like adamw={'lr': 1e-3}.")
    options.positive("num_data", num_data)
    if sgd is not None:
        line = _complete("SGD", sgd, _SGD)
        made = BSAM.from_sgd(_parameters(), **line, num_data=num_data)
        reasons = _sgd_reasons(**line)
    else:
        assert adamw is not None
        line = _complete("AdamW", adamw, _ADAMW)
        made = BSAM.from_adamw(_parameters(), **line, num_data=num_data)
        reasons = _adamw_reasons(**line)
    (group,) = made.param_groups
    prior = group["prior_precision"]
    reasons = {
        "lr": reasons["lr"],
        "num_data": "The number of training examples.",
        "betas": reasons["betas"],
        "weight_decay": f"{reasons['weight_decay']} It is a prior of precision weight_decay * num_data = {prior:.4g}.",
        "damping": reasons["damping"],
        "init_precision": f"The precision s starts here. The noise of a weight is then 1 / sqrt(num_data) = "
        f"{1 / math.sqrt(num_data):.2g}.",
        "rho": reasons["rho"],
        "sqrt_num_data": reasons["sqrt_num_data"],
        "max_noise": "The noise of a matrix is at most this share of its weights, and biases and norms have none. "
        "It matters for few data and wide layers.",
        "max_grad_norm": reasons["max_grad_norm"],
    }
    return Suggestion({name: prior / num_data if name == "weight_decay" else group[name] for name in reasons}, reasons)


def _sgd_reasons(lr: float, momentum: float, weight_decay: float) -> dict[str, str]:
    return {
        "lr": f"The default: on small problems no rate made from SGD's was better. SGD's {lr:g} is not used.",
        "betas": "The first is SGD's momentum. With the second, s forgets its start in about 230 steps.",
        **_default_reasons("SGD", weight_decay),
    }


def _adamw_reasons(lr: float, betas: tuple[float, float], weight_decay: float) -> dict[str, str]:
    return {
        "lr": f"({lr} / 0.001)^(1/4), a rule found on small problems: AdamW's default becomes that of bSAM.",
        "betas": f"The first is AdamW's. The second is bSAM's default: AdamW's {betas[1]} is for another average.",
        **_default_reasons("AdamW", weight_decay),
    }


def _default_reasons(source: str, weight_decay: float) -> dict[str, str]:
    return {
        "weight_decay": f"The default, because {source} decays the weights: how much says little about the prior."
        if weight_decay
        else f"{source} does not decay the weights.",
        "damping": "The default, chosen on small problems, as are rho, sqrt_num_data and max_grad_norm. It is 0.1, and "
        "with fewer than 300 examples 30 / num_data, at most 1.",
        "rho": "The default.",
        "sqrt_num_data": "The default: the derivation's factor sqrt(N) in the curvature.",
        "max_grad_norm": "The default: it clips the norm of the gradient at the perturbed weights.",
    }


def _complete(name: str, given: Mapping[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the given settings with torch's defaults for those that are missing."""
    if unknown := sorted(set(given) - set(defaults)):
        raise ValueError(f"{', '.join(unknown)} of {name} has no counterpart here: give {', '.join(defaults)}.")
    options.positive("lr", given.get("lr", 1.0))
    return {**defaults, **given}


def _parameters() -> list[nn.Parameter]:
    """Return a parameter that takes no memory."""
    return [nn.Parameter(torch.empty(1, device="meta"))]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"({', '.join(map(_shown, value))})" if isinstance(value, tuple) else repr(value)
