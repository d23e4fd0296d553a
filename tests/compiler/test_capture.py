"""Tests of tracing, compiling and capturing; what the compiled steps compute is tested with them."""

import gc
import weakref

import pytest
import torch

from bsam.compiler.capture import Captured, _no_collection

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_before_and_not_within(enabled):
    class Node:
        pass

    gc.collect()
    before = gc.isenabled()
    gc.enable() if enabled else gc.disable()
    try:
        node = Node()
        node.itself, died = node, []
        watched = weakref.ref(node, lambda _: died.append(1))
        del node
        with _no_collection():
            assert died
            assert watched() is None
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if before else gc.disable()


@pytest.mark.gpu
@on_cuda
def test_a_graph_that_dies_during_a_capture_does_not_spoil_it():
    device = torch.device("cuda")
    x = torch.zeros(1000, device=device)
    older = [Captured(lambda: x.add_(1), device, undo=x.zero_)]
    calls = []

    def function():
        calls.append(1)
        if len(calls) == 3:  # two to warm up, one that is captured
            cycle = older.copy()
            older.clear()
            cycle.append(cycle)
            del cycle
            assert len([[] for _ in range(10_000)]) == 10_000  # a collector that was on would run now
        return x.add_(1)

    captured = Captured(function, device, undo=x.zero_)
    captured()
    torch.cuda.synchronize()
    assert len(calls) == 3
    assert (x == 1).all()


@pytest.mark.gpu
@on_cuda
def test_a_graph_writes_to_no_memory_that_others_may_get():
    device = torch.device("cuda")

    def captured() -> Captured:
        only_here = torch.zeros(5, device=device)

        def function() -> None:  # returns nothing that would keep the tensor
            only_here.zero_()

        return Captured(function, device, undo=function)

    graph = captured()
    gc.collect()
    others = [torch.ones(5, device=device) for _ in range(200)]  # memory that is free comes first
    graph()
    torch.cuda.synchronize()
    assert all(bool((other == 1).all()) for other in others)
