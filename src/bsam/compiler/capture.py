"""Captures a function in a CUDA graph, which runs it with one launch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Captured"]


class Captured:
    """A function without arguments, captured in a CUDA graph.

    Args:
        function: Reads and writes tensors whose addresses do not change.
        device: The CUDA device.
        undo: Called after the warm-up runs, to restore the tensors that they wrote.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, undo: Callable[[], None]) -> None:
        self._function = function  # keeps the tensors that the graph reads and writes
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels, and lets libraries allocate their workspaces
                function()
            undo()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(self._graph, stream=stream):
            self.result = function()

    def __call__(self) -> Any:
        """Run the function; the result is in the same tensors every time."""
        self._graph.replay()
        return self.result


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage before the block, not inside: freeing an old graph or event would break a capture."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
