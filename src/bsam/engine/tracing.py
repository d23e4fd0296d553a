"""From a function of tensors to kernels: traced once, compiled by TorchInductor, captured in a CUDA graph."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.split_module import split_module

from bsam.engine.graphs import keep_layouts, last_sums, merge_views, share_copies
from bsam.interrupts import interruptible
from bsam.kernels import convolution, filter_response

__all__ = ["Captured", "compile_function", "compile_in_two"]

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
    table = convolution.decompositions() | filter_response.decompositions()
    # cuDNN's BatchNorm converts the layout of images, which vmap cannot do; traced without it, it is compiled too.
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=torch.backends.cudnn.allow_tf32):
        graph = make_fx(function, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    graph.graph.eliminate_dead_code()
    merge_views(graph)
    share_copies(graph)
    keep_layouts(graph)
    graph.recompile()
    return graph


def _compile(graph: GraphModule, inputs: list[Tensor], options: dict[str, Any]) -> Function:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own: deprecations, hints on speed
        from torch._inductor import compile as compile_graph

        # What is compiled for fixed shapes is kept on disk, if the compiler is told that they are.
        fake = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
        with tracing(TracingContext(fake)), interruptible():  # it takes long, and writes nothing of the user's
            compiled: Function = compile_graph(graph, inputs, options=options)  # type: ignore[arg-type]
    return compiled


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


class Captured:
    """A function without arguments, captured in a CUDA graph.

    Args:
        function: Reads and writes tensors that stay where they are.
        device: The CUDA device.
        undo: Called after the warm-up runs, to put back what they wrote.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, undo: Callable[[], None]) -> None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels, and lets libraries make their workspaces
                function()
            undo()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(self._graph, stream=stream):
            self.result = function()

    def __call__(self) -> Any:
        """Run it again; the result is in the same tensors every time."""
        self._graph.replay()
        return self.result


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage before and not within: an older graph or event that dies during a capture would spoil it."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
