"""Checks of the runs of one `TrainStep`, when it is made and at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from bsam.batches import map_tensors
from bsam.engine.methods import Method
from bsam.gradients import reached_by
from bsam.modules import LossFunction
from bsam.optim.probing import Slot

__all__ = ["alike", "fixed_options", "one_architecture", "reached", "rows_of_runs", "unchanged"]


def alike(methods: Sequence[Method]) -> None:
    """Raise unless the optimizers of all runs are of one class, with the same options except rates and seeds."""
    first = methods[0]
    for method in methods[1:]:
        if type(method) is not type(first) or len(method.param_groups) != len(first.param_groups):
            raise ValueError("runs that are trained together must have optimizers of one class, with the same groups.")
        for group, other in zip(first.param_groups, method.param_groups, strict=True):
            one, two = first._fixed(group), method._fixed(other)
            differ = [key for key in {**one, **two} if key != "seed" and one.get(key) != two.get(key)]
            if differ:
                raise ValueError(
                    f"the runs differ in {differ[0]}: {one.get(differ[0])} and {two.get(differ[0])}. Runs that are "
                    "trained together may differ only in seed, weights, data and rates."
                )


def one_architecture(modules: Sequence[nn.Module], keys: list[list[str]], slots: list[list[Slot]]) -> None:
    """Raise unless all runs have the same parameters, buffers and modes."""
    seen = [
        (
            names,
            [(slot.parameter.shape, slot.parameter.dtype) for slot in own],
            [(name, b.shape, b.dtype) for name, b in module.named_buffers()],
            [owner.training for owner in module.modules()],
        )
        for names, own, module in zip(keys, slots, modules, strict=True)
    ]
    for run, other in enumerate(seen):
        if other != seen[0]:
            raise ValueError(
                f"the model of run {run} differs from the model of run 0: runs that are trained together must have the "
                "same architecture, the same frozen parameters, and the same modes (train() or eval())."
            )


def reached(
    modules: Sequence[nn.Module], slots: list[list[Slot]], loss_fns: Sequence[LossFunction], part: tuple[Any, ...]
) -> list[bool]:
    """Return which slots the loss of a sub-batch uses; raise unless it uses some, and the same in all runs."""
    found: list[list[bool]] = []
    for run, (module, own, loss_fn) in enumerate(zip(modules, slots, loss_fns, strict=True)):
        found.append(reached_by(module, [slot.parameter for slot in own], loss_fn, part))
        if not any(found[run]):
            of_run = f" of run {run}" if len(modules) > 1 else ""
            raise ValueError(
                f"no gradient reaches any parameter of the optimizer{of_run}: does loss_fn use the module?"
            )
        if found[run] != found[0]:
            raise ValueError(f"the loss of run {run} uses other parameters than the loss of run 0.")
    return found[0]


def rows_of_runs(batch: tuple[Any, ...], runs: int) -> None:
    """Raise unless every tensor of a batch has one row per run, and a dimension of examples."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, batch)
    for shape in (tuple(t.shape) for t in tensors):
        if len(shape) < 2 or shape[0] != runs:
            raise ValueError(
                f"a tensor of the batch has shape {shape}: with {runs} runs it must be ({runs}, examples, ...)."
            )


def fixed_options(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """Return the options that are compiled in, of each group of each run."""
    return [dict(method._fixed(group)) for method in methods for group in method.param_groups]


def unchanged(fixed: list[dict[str, Any]], methods: Sequence[Method]) -> None:
    """Raise if an option that is compiled in was changed."""
    now = fixed_options(methods)
    if len(now) != len(fixed):
        raise ValueError("a group of parameters was added after the TrainStep was made: make a new TrainStep.")
    for group, before in zip(now, fixed, strict=True):
        for name in {**before, **group}:
            if group.get(name) != before.get(name):
                raise ValueError(
                    f"{name} was {before.get(name)} when the TrainStep was made, and is {group.get(name)} now. It is "
                    "compiled in: make a new TrainStep."
                )
