"""From a function of tensors to kernels: traced once, and compiled by TorchInductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter
from torch.fx.passes.split_module import split_module

from bsam.compiler.graphs import keep_layouts, last_sums, merge_views, share_copies
from bsam.compiler.registry import DECOMPOSITIONS
from bsam.interrupts import interruptible
from bsam.torch_private import compile_graph, trace_graph

__all__ = ["compile_function", "compile_in_two"]

TOGETHER = {"combo_kernels": True}
"""Option of the compiler: small kernels that are independent of each other become one. Large sums become slower."""

Function = Callable[..., Sequence[Tensor]]


@torch.no_grad()
def compile_function(function: Function, inputs: list[Tensor], *, unrolled: int = 0) -> Function:
    """Trace `function(*inputs)` and compile what it did; it may write into its inputs.

    Args:
        function: Takes tensors, returns a list of tensors.
        inputs: Examples. Shapes, types and devices of later calls must be the same.
        unrolled: Sums of so many elements are written out, and become a part of the kernels around them.
    """
    options = {"unroll_reductions_threshold": unrolled + 1} if unrolled > 7 else {}  # up to 7 are anyway
    return _compile(_trace(function, inputs), inputs, options)


@torch.no_grad()
def compile_in_two(function: Function, inputs: list[Tensor]) -> Function:
    """The same for a function that writes into none of its inputs, with its last sums compiled by themselves.

    Gradients come as partial sums of many small tensors, at many places of a network. Put off to the end they are
    independent of each other, and the compiler makes few kernels of them in place of one each.
    """
    graph = _trace(function, inputs)
    last = last_sums(graph)
    if not last:
        return _compile(graph, inputs, TOGETHER)
    parts = split_module(graph, graph, lambda node: int(node in last))
    _CompileParts(parts).run(*inputs)
    return parts


def _trace(function: Function, inputs: list[Tensor]) -> GraphModule:
    # cuDNN's BatchNorm converts the layout of images, which vmap cannot do; traced without it, it is compiled too.
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=torch.backends.cudnn.allow_tf32):
        graph = trace_graph(function, inputs, DECOMPOSITIONS)
    graph.graph.eliminate_dead_code()
    merge_views(graph)
    share_copies(graph)
    keep_layouts(graph)
    graph.recompile()
    return graph


def _compile(graph: GraphModule, inputs: list[Tensor], options: dict[str, Any]) -> Function:
    with interruptible():  # it takes long, and writes nothing of the user's
        return compile_graph(graph, inputs, options)


class _CompileParts(Interpreter):
    """Runs a module of parts for once, compiles each part as it comes, and puts it in its place."""

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile a part with the inputs it is given."""
        part = _Compiled(_compile(self.fetch_attr(target), list(args), TOGETHER))
        setattr(self.module, target, part)
        return part(*args)


class _Compiled(nn.Module):
    def __init__(self, compiled: Function) -> None:
        super().__init__()
        self.compiled = compiled

    def forward(self, *inputs: Tensor) -> Any:
        """What the part returns: one tensor, or several."""
        return self.compiled(*inputs)
