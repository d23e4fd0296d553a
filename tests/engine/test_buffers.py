"""Buffers of several models as views of one stack."""

import pytest
import torch

from bsam.engine.buffers import StackedBuffers
from bsam.modules import LossModule
from tests.networks import make_network


def models(count=3):
    made = [make_network("normalised", seed) for seed in range(count)]
    for seed, model in enumerate(made):
        for buffer in model.buffers():
            buffer.add_(seed)
    return made


def test_the_buffers_are_rows_of_the_stacks():
    made = models()
    before = [[b.clone() for b in model.buffers()] for model in made]
    stacked = StackedBuffers(made)
    assert list(stacked.stacks) == [name for name, _ in LossModule(made[0], lambda: 0.0).named_buffers()]
    for run, model in enumerate(made):
        torch.testing.assert_close(list(model.buffers()), before[run], rtol=0, atol=0)
        for buffer, stack in zip(model.buffers(), stacked.stacks.values(), strict=True):
            assert buffer.data_ptr() == stack[run].data_ptr()
    stacked.stacks["module.1.running_mean"].zero_()
    assert not any(model[1].running_mean.any() for model in made)


def test_replaced_buffers_are_adopted():
    made = models()
    stacked = StackedBuffers(made)
    view = made[1][1].running_mean
    made[1][1].running_mean = torch.full((4,), 7.0, dtype=torch.float64)
    stacked.adopt()
    assert made[1][1].running_mean is view
    assert stacked.stacks["module.1.running_mean"][1].tolist() == [7.0] * 4
    assert stacked.stacks["module.1.running_mean"][0].tolist() == made[0][1].running_mean.tolist()


def test_models_must_have_the_same_buffers():
    with pytest.raises(ValueError, match="zip"):
        StackedBuffers([make_network("normalised"), make_network("mlp")])
