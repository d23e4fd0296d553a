"""Steps of a torch optimizer with given gradients."""

import pytest
import torch
from torch import nn

from bsam.optim.base_step import BaseStep
from tests.networks import assert_close


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.0}])
def test_a_fused_step_that_is_left_out_leaves_nothing(options):
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True, **options)
    plain = nn.Parameter(torch.ones(4))
    expected = torch.optim.SGD([plain], lr=0.1, **options)
    step = BaseStep(optimizer, hooks=True)
    for value, refused in ((torch.nan, 1.0), (2.0, 0.0), (torch.nan, 1.0), (3.0, 0.0)):
        step([(parameter, torch.full((4,), value))], torch.tensor(refused))
        if not refused:
            plain.grad = torch.full((4,), value)
            expected.step()
        assert_close(parameter.detach(), plain.detach(), tolerance=1e-6)
    assert not hasattr(optimizer, "found_inf")
