"""Run PyTorch's own optimizer tests (test/test_optim.py of its repository) on our optimizers.

The file is not part of the wheel. Take it from a PyTorch checkout of the installed version, then

    python -m tests.pytorch_suite path/to/test_optim.py

Arguments after the path go to pytest. The tests are generated from `OptimizerInfo` records in a list; this puts ours
there in place of PyTorch's, before the file is imported.

Two promises of ours say other than these tests, which are named below. `CLEARED`: they call a step with gradients in
`.grad` that no step left there. Ours refuses them, so here they are dropped before every step. `LEFT_OUT`: they cannot
apply, and are not run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal import common_optimizers as suite

import bsam
from tests.problems import holding

CLEARED = {
    "test_forloop_goes_right_direction": "evaluates the closure by itself before the first step",
    "test_forloop_goes_right_direction_multigpu": "the same",
    "test_param_group_with_lrscheduler_goes_right_direction": "the same",
    "test_load_nontensor_step": "sets .grad, and gives a closure that finds no gradient",
    "test_state_dict_with_cuda_params": "the same",
    "test_deepcopy_copies_all_public_attrs": "the same",
    "test_non_empty_state": "calls backward() before the step, and gives a closure that finds no gradient",
    "test_param_groups_weight_decay": "calls backward() before the step, and gives no closure",
    "test_param_groups_lr": "the same",
}
"""The tests that would meet "has a gradient in .grad that no step left there", and why."""

LEFT_OUT = {
    "test_param_groups_weight_decay_BSAM": "weight_decay is no option of BSAM, which refuses it in a group",
    "test_param_groups_weight_decay_VOGN": "the same for VOGN",
}
"""The tests that cannot apply, by name and optimizer, and why."""


class FromGradients:
    """Lets a step begin with any gradients, and without a closure, as some of the tests do.

    Without a closure the present gradients count at all weights; with one they are dropped: see `CLEARED`.
    """

    def step(self, closure: Any = None, *batch: Any) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters]
        self.zero_grad()

        def replay(*_: Any) -> float:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = None if gradient is None else gradient.clone()
            return 0.0

        return super().step(replay if closure is None else closure, *batch)


# tolerance_grad: one test takes every optimizer with a closure for LBFGS.


class BSAM(FromGradients, bsam.BSAM):
    def __init__(
        self, params: Any, lr: Any = 0.1, num_data: int = 1000, tolerance_grad: Any = None, **options: Any
    ) -> None:
        super().__init__(params, lr, num_data=num_data, **options)


class SAMSGD(FromGradients, bsam.SAM):
    def __init__(
        self, params: Any, lr: Any = 1e-3, rho: float = 0.05, tolerance_grad: Any = None, **options: Any
    ) -> None:
        super().__init__(params, torch.optim.SGD, rho=rho, lr=lr, **options)


class SAMAdam(FromGradients, bsam.SAM):
    def __init__(
        self, params: Any, lr: Any = 1e-3, rho: float = 0.05, tolerance_grad: Any = None, **options: Any
    ) -> None:
        super().__init__(params, torch.optim.Adam, rho=rho, lr=lr, **options)


class VOGN(FromGradients, bsam.VOGN):
    def __init__(
        self,
        params: Any,
        lr: Any = 0.01,
        num_data: int = 1000,
        damping: float = 1.0,
        tolerance_grad: Any = None,
        **options: Any,
    ) -> None:
        params = list(params) if isinstance(params, Iterator) else params
        options |= {"num_data": num_data, "damping": damping}
        # In a loop: the tests do not look the parameters up in the module.
        super().__init__(params, lr, module=holding(params), vectorise=False, **options)

    def step(self, closure: Any = None, *batch: Any) -> Any:
        """With one example, that nobody looks at."""
        return super().step(None if closure is None else lambda _: closure(), torch.zeros(1))


def inputs(*kwargs: dict[str, Any]) -> Any:
    # The tests change the dictionaries they are given.
    return lambda device, dtype=None: [suite.OptimizerInput(params=None, kwargs=dict(k), desc=str(k)) for k in kwargs]


def error_inputs(*cases: tuple[dict[str, Any], str]) -> Any:
    def make(device: Any, dtype: Any) -> list[Any]:
        params = [torch.nn.Parameter(torch.randn(1, 1, device=device, dtype=dtype))]
        own = [
            suite.ErrorOptimizerInput(
                suite.OptimizerInput(params, kwargs, desc=regex), error_type=ValueError, error_regex=regex
            )
            for kwargs, regex in cases
        ]
        return suite.get_error_inputs_for_all_optims(device, dtype) + own

    return make


def info(cls: type, kwargs: list[dict[str, Any]], errors: list[tuple[dict[str, Any], str]]) -> suite.OptimizerInfo:
    return suite.OptimizerInfo(
        cls,
        optim_inputs_func=inputs(*kwargs),
        optim_error_inputs_func=error_inputs(*errors),
        supported_impls=(),
        not_og_supported_flags=(),
        supports_complex=False,
        step_requires_closure=True,
    )


INFOS = [
    info(
        BSAM,
        [{}, {"lr": 0.01}, {"lr": torch.tensor(0.01)}, {"rho": 0.1}, {"betas": (0.5, 0.9)}, {"damping": 1.0}],
        [({"lr": -1.0}, "lr=-1.0"), ({"betas": (1.0, 0.9)}, "betas"), ({"num_data": 0}, "num_data=0")],
    ),
    info(
        VOGN,
        [
            {},
            {"lr": 0.001},
            {"lr": torch.tensor(0.01)},
            {"betas": (0.5, 0.9)},
            {"damping": 1.0},
        ],
        [({"lr": -1.0}, "lr=-1.0"), ({"betas": (1.0, 0.9)}, "betas"), ({"num_data": 0}, "num_data=0")],
    ),
    info(
        SAMSGD,
        [{}, {"lr": 0.01}, {"lr": torch.tensor(0.001)}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"rho": 0.0}],
        [({"rho": -0.1}, "rho=-0.1"), ({"momentum": -0.5}, "Invalid momentum value: -0.5")],
    ),
    info(
        SAMAdam,
        [{}, {"lr": 0.01}, {"weight_decay": 0.1}, {"amsgrad": True}, {"rho": 0.2}],
        [({"lr": -1.0}, "lr=-1.0"), ({"betas": (1.0, 0.0)}, "Invalid beta parameter")],
    ),
]


if __name__ == "__main__":
    suite.optim_db[:] = INFOS
    path, *rest = sys.argv[1:] or sys.exit(__doc__)
    names = " or ".join(f"_{info.name}_cpu" for info in INFOS)
    chosen = f"({names}) and not ({' or '.join(LEFT_OUT)})"
    sys.exit(pytest.main([path, "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "-k", chosen, *rest]))
