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

import copy
import sys
from typing import Any

import pytest
import torch
from torch.testing._internal import common_optimizers as suite

from tests.optimizers import METHODS, arguments

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
    f"test_param_groups_weight_decay_{name}": f"weight_decay is no option of {name}, which refuses it in a group"
    for name, method in METHODS.items()
    if method.base is None
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


def adapted(name: str) -> type:
    """The optimizer of a method as the tests make it: with parameters and few options."""
    method = METHODS[name]

    class Adapted(FromGradients, method.optimizer):
        # tolerance_grad: one test takes every optimizer with a closure for LBFGS.
        def __init__(self, params: Any, lr: Any = None, tolerance_grad: Any = None, **options: Any) -> None:
            options = {**method.suite, **({} if lr is None else {"lr": lr}), **options}
            positional, keywords = arguments(name, params, options)
            super().__init__(*positional, **keywords)

        def step(self, closure: Any = None, *batch: Any) -> Any:
            if not method.per_example:
                return super().step(closure, *batch)
            # One example, that nobody looks at.
            return super().step(None if closure is None else lambda _: closure(), torch.zeros(1))

    Adapted.__name__ = Adapted.__qualname__ = name.replace("-", "")
    return Adapted


def inputs(*kwargs: dict[str, Any]) -> Any:
    # The tests change the dictionaries they are given, and schedulers the tensors in them.
    return lambda device, dtype=None: [
        suite.OptimizerInput(params=None, kwargs=copy.deepcopy(k), desc=str(k)) for k in kwargs
    ]


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


def info(name: str) -> suite.OptimizerInfo:
    return suite.OptimizerInfo(
        adapted(name),
        optim_inputs_func=inputs({}, *METHODS[name].variants),
        optim_error_inputs_func=error_inputs(*METHODS[name].errors),
        supported_impls=(),
        not_og_supported_flags=(),
        supports_complex=False,
        step_requires_closure=True,
    )


INFOS = [info(name) for name in METHODS]


if __name__ == "__main__":
    suite.optim_db[:] = INFOS
    path, *rest = sys.argv[1:] or sys.exit(__doc__)
    names = " or ".join(f"_{info.name}_cpu" for info in INFOS)
    chosen = f"({names}) and not ({' or '.join(LEFT_OUT)})"
    sys.exit(pytest.main([path, "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "-k", chosen, *rest]))
