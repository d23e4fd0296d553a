"""A compiled function as one operator, so that a traced step can call it twice but compiles it once.

A step of bSAM or SAM runs the network forward and backward twice, at different weights. In a plain trace the compiler
would see two networks. `Program` compiles one, and `bsam::program` represents it in the trace of the step. Methods that
train the same network share it in the compiler's cache.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bsam.compiler.tracing import compile_in_two
from bsam.torch_private import pytree

__all__ = ["Program"]

_NUMBERS = itertools.count()
_PROGRAMS: weakref.WeakValueDictionary[int, Program] = weakref.WeakValueDictionary()


class Program:
    """A function of trees of tensors, compiled.

    Args:
        function: Takes trees of tensors, returns a tree of tensors.
        arguments: Example arguments. Later arguments must have the same shapes and types.
        stacked: Whether dimension 0 of the arguments is the run. If so, call the program under vmap over the runs.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], *, stacked: bool) -> None:
        flat, spec = pytree.tree_flatten(arguments)
        flat = [t.contiguous() for t in flat]

        def of_flat(*tensors: Tensor) -> list[Tensor]:
            outputs, self._spec = pytree.tree_flatten(function(*pytree.tree_unflatten(list(tensors), spec)))
            return outputs

        self._compiled = compile_in_two(of_flat, flat)
        with torch.no_grad():
            outputs = self._compiled(*flat)
        self._like = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in outputs]
        self._device, self._stacked = flat[0].device, stacked
        self._number = next(_NUMBERS)
        _PROGRAMS[self._number] = self

    def __call__(self, *arguments: Any) -> Any:
        """Return the function's result. The call may be traced; a stacked program needs vmap over the runs."""
        flat = [t.contiguous() for t in pytree.tree_leaves(arguments)]
        outputs = torch.ops.bsam.program(self._number, self._stacked, flat)
        return pytree.tree_unflatten(list(outputs), self._spec)

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return the outputs."""
        return list(self._compiled(*inputs))

    def fake(self, one_run: bool) -> list[Tensor]:
        """Return empty tensors like the outputs, or like the outputs of one run."""
        first = 1 if one_run else 0
        return [
            torch.empty_strided(t.shape[first:], t.stride()[first:], dtype=t.dtype, device=self._device)
            for t in self._like
        ]


@torch.library.custom_op("bsam::program", mutates_args=())
def _program(number: int, one_run: bool, inputs: Sequence[Tensor]) -> list[Tensor]:
    if one_run:
        raise RuntimeError("a program for several runs was called for one run: call it under vmap over the runs.")
    return _PROGRAMS[number].run(list(inputs))


@_program.register_fake
def _(number: int, one_run: bool, inputs: Sequence[Tensor]) -> list[Tensor]:
    return _PROGRAMS[number].fake(one_run)


@_program.register_vmap
def _(
    info: Any, dims: tuple[Any, ...], number: int, one_run: bool, inputs: Sequence[Tensor]
) -> tuple[list[Tensor], list[int]]:
    stacks = [
        t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(inputs, dims[2], strict=True)
    ]
    outputs = torch.ops.bsam.program(number, False, [t.contiguous() for t in stacks])
    return outputs, [0] * len(outputs)
