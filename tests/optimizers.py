"""The optimizers that the contract tests run over, in one list: a new method is one entry in METHODS.

The tests in tests/optim and tests/engine, tests/pytorch_suite.py, tests/fuzz.py, tests/sigint.py and
tests/test_distributed.py read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

import bsam
from bsam.optim.base import ProbingOptimizer
from tests.extragradient import Extragradient
from tests.problems import holding


@dataclass(frozen=True)
class Method:
    """An optimizer, and what a test that runs over all of them must know of it."""

    optimizer: type[ProbingOptimizer]
    options: dict[str, Any]
    """What it is made with, unless a test says otherwise."""
    base: type[Optimizer] | None = None
    """The torch optimizer that gets its gradient."""
    passes: int = 2
    """How many gradients of each part a step takes."""
    other_rates: dict[str, Any] = field(default_factory=dict)
    """Options that may change from step to step, and differ from run to run: each with another value."""
    suite: dict[str, Any] = field(default_factory=dict)
    """What PyTorch's suite makes it with instead: its problem has other scales."""
    variants: tuple[dict[str, Any], ...] = ()
    """Options of a group that PyTorch's suite makes it with beside these, one after the other."""
    errors: tuple[tuple[dict[str, Any], str], ...] = ()
    """Options that it must refuse, and what its message says."""

    @property
    def gaussian(self) -> bool:
        """Whether it learns a Gaussian: it has a seed, and `sampled()`."""
        return hasattr(self.optimizer, "sampled")

    @property
    def per_example(self) -> bool:
        """Whether it differentiates examples one by one: it knows its model, needs a batch, and refuses BatchNorm."""
        return self.optimizer.per_example


GAUSSIAN: dict[str, Any] = {"num_data": 100, "prior_precision": 1.0}
GAUSSIAN_ERRORS = (({"lr": -1.0}, "lr=-1.0"), ({"betas": (1.0, 0.9)}, "betas"), ({"num_data": 0}, "num_data=0"))

METHODS = {
    "BSAM": Method(
        bsam.BSAM,
        {
            "lr": 0.3,
            "rho": 0.01,
            "betas": (0.9, 0.999),
            "sqrt_num_data": False,
            "max_grad_norm": None,
            **GAUSSIAN,
        },
        other_rates={"lr": 0.1, "rho": 0.2, "prior_precision": 3.0, "damping": 0.5, "betas": (0.5, 0.9)},
        suite={"lr": 0.1, "num_data": 1000, "prior_precision": 25.0},
        variants=({"lr": 0.01}, {"lr": torch.tensor(0.01)}, {"rho": 0.1}, {"betas": (0.5, 0.9)}, {"damping": 1.0}),
        errors=GAUSSIAN_ERRORS,
    ),
    "SAM-SGD": Method(
        bsam.SAM,
        {"lr": 0.1, "rho": 0.05, "momentum": 0.9},
        base=torch.optim.SGD,
        other_rates={"lr": 0.3, "rho": 0.5, "momentum": 0.5, "weight_decay": 0.1},
        suite={"lr": 1e-3, "momentum": 0.0},
        variants=({"lr": 0.01}, {"lr": torch.tensor(0.001)}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"rho": 0.0}),
        errors=(({"rho": -0.1}, "rho=-0.1"), ({"momentum": -0.5}, "Invalid momentum value: -0.5")),
    ),
    "SAM-Adam": Method(
        bsam.SAM,
        {"lr": 0.01, "rho": 0.05},
        base=torch.optim.Adam,
        other_rates={"lr": 0.03, "rho": 0.5, "betas": (0.5, 0.9), "weight_decay": 0.1},
        suite={"lr": 1e-3},
        variants=({"lr": 0.01}, {"weight_decay": 0.1}, {"amsgrad": True}, {"rho": 0.2}),
        errors=(({"lr": -1.0}, "lr=-1.0"), ({"betas": (1.0, 0.0)}, "Invalid beta parameter")),
    ),
    "ASAM-SGD": Method(
        bsam.ASAM,
        {"lr": 0.1, "rho": 0.5, "momentum": 0.9},
        base=torch.optim.SGD,
        other_rates={"lr": 0.3, "rho": 1.0, "eta": 0.1, "momentum": 0.5, "weight_decay": 0.1},
        suite={"lr": 1e-3, "momentum": 0.0},
        variants=({"lr": 0.01}, {"lr": torch.tensor(0.001)}, {"weight_decay": 0.1}, {"rho": 0.0}, {"eta": 0.1}),
        errors=(({"rho": -0.1}, "rho=-0.1"), ({"eta": -0.5}, "eta=-0.5")),
    ),
    "VOGN": Method(
        bsam.VOGN,
        {"lr": 0.02, "damping": 0.1, **GAUSSIAN},
        passes=1,
        other_rates={"lr": 0.03, "prior_precision": 3.0, "damping": 0.5, "betas": (0.5, 0.9)},
        suite={"lr": 0.01, "num_data": 1000, "prior_precision": 25.0, "damping": 1.0},
        variants=({"lr": 0.001}, {"lr": torch.tensor(0.01)}, {"betas": (0.5, 0.9)}, {"damping": 1.0}),
        errors=GAUSSIAN_ERRORS,
    ),
    "IVON": Method(
        bsam.IVON,
        {"lr": 0.1, "betas": (0.9, 0.999), **GAUSSIAN},
        passes=1,
        other_rates={"lr": 0.03, "prior_precision": 3.0, "betas": (0.5, 0.9)},
        suite={"lr": 0.01, "num_data": 1000, "prior_precision": 25.0},
        variants=({"lr": 0.001}, {"lr": torch.tensor(0.01)}, {"betas": (0.5, 0.9)}, {"clip_radius": 1.0}),
        errors=(*GAUSSIAN_ERRORS, ({"initial_hessian": 0.0}, "initial_hessian=0.0")),
    ),
    "Extragradient": Method(
        Extragradient,
        {"lr": 0.1},
        other_rates={"lr": 0.3, "reach": 0.2, "momentum": 0.5},
        suite={"lr": 0.001, "momentum": 0.0},
        variants=({"lr": 0.01}, {"lr": torch.tensor(0.001)}, {"reach": 0.5}, {"momentum": 0.5}),
        errors=(({"lr": -1.0}, "lr=-1.0"), ({"reach": -1.0}, "reach=-1.0")),
    ),
}


def arguments(name: str, params: Any, options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """What the method's optimizer is made with, as arguments and keywords.

    Where a test has only parameters, a method that needs a model gets one that holds them.
    """
    method = METHODS[name]
    if method.per_example and options.get("module") is None:
        params = list(params) if isinstance(params, Iterator) else params
        # In a loop: the test does not look the parameters up in the module.
        options = {**options, "module": holding(params), "vectorise": False}
    return [params, *([] if method.base is None else [method.base])], {**method.options, **options}


def make(name: str, params: Any, **options: Any) -> Optimizer:
    """The method's optimizer."""
    positional, keywords = arguments(name, params, options)
    return METHODS[name].optimizer(*positional, **keywords)
