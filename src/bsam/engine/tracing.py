"""From a function of tensors to kernels: traced once, compiled by TorchInductor, captured in a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from bsam.engine.convolution import better_on, decompositions

__all__ = ["Captured", "compile_function"]

Function = Callable[..., Sequence[Tensor]]


@torch.no_grad()
def compile_function(function: Function, inputs: list[Tensor], *, least_groups: int = 2) -> Function:
    """Trace `function(*inputs)` and compile what it did; it may write into its inputs.

    Args:
        function: Takes tensors, returns a list of tensors.
        inputs: Examples. Shapes, types and devices of later calls must be the same.
        least_groups: Convolutions with fewer groups are left to cuDNN.
    """
    table = decompositions(least_groups=least_groups) if better_on(inputs[0].device) else {}
    # cuDNN's BatchNorm converts the layout of images, which vmap cannot do; traced without it, it is compiled too.
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=torch.backends.cudnn.allow_tf32):
        graph = make_fx(function, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.view.default:  # the compiler may choose strides that ask for a copy
            node.target = torch.ops.aten.reshape.default
    graph.graph.eliminate_dead_code()
    graph.recompile()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own: deprecations, hints on speed
        from torch._inductor import compile as compile_graph

        compiled: Function = compile_graph(graph, inputs)  # type: ignore[arg-type]
    return compiled


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
        with torch.cuda.graph(self._graph, stream=stream):
            self.result = function()

    def __call__(self) -> Any:
        """Run it again; the result is in the same tensors every time."""
        self._graph.replay()
        return self.result
