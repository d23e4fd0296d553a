"""Traces a function of tensors once, and compiles it with TorchInductor."""

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

Function = Callable[..., Sequence[Tensor]]


@torch.no_grad()
def compile_function(function: Function, inputs: list[Tensor], *, unrolled: int = 0) -> Function:
    """Trace `function(*inputs)` and compile the trace; the function may write into its inputs.

    Args:
        function: Takes tensors, returns a list of tensors.
        inputs: Example inputs. Later inputs must have the same shapes, types and devices.
        unrolled: Sums of up to this number of elements are unrolled and fused with the kernels around them.
    """
    options = {"unroll_reductions_threshold": unrolled + 1} if unrolled > 7 else {}  # up to 7 by default
    return _compile(_trace(function, inputs), inputs, options)


@torch.no_grad()
def compile_in_two(function: Function, inputs: list[Tensor]) -> Function:
    """Compile a function that does not write into its inputs, with its last sums as a separate part.

    Weight gradients are partial sums of many small tensors, spread over the network. At the end they are independent of
    each other, and the compiler merges them into few kernels.
    """
    graph = _trace(function, inputs)
    last = last_sums(graph)
    if not last:
        return _compile(graph, inputs, _merging(inputs))
    parts = split_module(graph, graph, lambda node: int(node in last))
    _CompileParts(parts).run(*inputs)
    return parts


def _merging(inputs: Sequence[Any]) -> dict[str, Any]:
    """Return the compiler's option to merge small independent kernels into one launch; it makes large sums slower.

    On a CPU nothing is launched, and the compiler of torch 2.8 raises there.
    """
    return {"combo_kernels": any(isinstance(t, Tensor) and t.device.type == "cuda" for t in inputs)}


def _trace(function: Function, inputs: list[Tensor]) -> GraphModule:
    # cuDNN's BatchNorm converts the layout of images, which vmap cannot do. Without cuDNN, BatchNorm is compiled too.
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=torch.backends.cudnn.allow_tf32):
        graph = trace_graph(function, inputs, DECOMPOSITIONS)
    graph.graph.eliminate_dead_code()
    merge_views(graph)
    share_copies(graph)
    keep_layouts(graph)
    graph.recompile()
    return graph


def _compile(graph: GraphModule, inputs: list[Tensor], options: dict[str, Any]) -> Function:
    with interruptible():  # it takes long, and does not write to the user's tensors
        return compile_graph(graph, inputs, options)


class _CompileParts(Interpreter):
    """Runs a module of parts once, and replaces each part by its compiled version."""

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile a part for these inputs."""
        part = _Compiled(_compile(self.fetch_attr(target), list(args), _merging(args)))
        setattr(self.module, target, part)
        return part(*args)


class _Compiled(nn.Module):
    def __init__(self, compiled: Function) -> None:
        super().__init__()
        self.compiled = compiled

    def forward(self, *inputs: Tensor) -> Any:
        """Return the part's result: one tensor, or several."""
        return self.compiled(*inputs)
