"""Tests of tracing, compiling and capturing; what the compiled steps compute is tested with them."""

import gc
import weakref

import pytest
import torch

from bsam.engine.tracing import Captured, _no_collection

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
def test_graphs_that_nobody_holds_any_more_do_not_spoil_a_capture():
    device = torch.device("cuda")
    x = torch.zeros(1000, device=device)
    thresholds = gc.get_threshold()
    gc.set_threshold(1)  # as often as Python can
    try:
        for _ in range(5):
            captured = Captured(lambda: [x.add_(1), [[] for _ in range(100)]][0], device, undo=x.zero_)
            captured()
            cycle = [captured]
            cycle.append(cycle)
            del captured, cycle
    finally:
        gc.set_threshold(*thresholds)
    torch.cuda.synchronize()
    assert (x == 1).all()
