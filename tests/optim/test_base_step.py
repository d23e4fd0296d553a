"""Steps of a torch optimizer with given gradients."""

import pytest
import torch
from torch import nn

from bsam.optim.base_step import BaseStep, clear_gradients, evaluates_loss
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


def test_which_optimizers_evaluate_the_loss():
    parameters = [nn.Parameter(torch.ones(2))]
    assert evaluates_loss(torch.optim.LBFGS(parameters))
    assert not any(evaluates_loss(kind(parameters)) for kind in (torch.optim.SGD, torch.optim.Adam))


def test_gradients_of_all_groups_are_cleared():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    clear_gradients(torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.1))
    assert all(p.grad is None for p in parameters)


@torch.no_grad()
def test_only_given_parameters_step_and_the_others_keep_their_gradients():
    moving, idle = (nn.Parameter(torch.ones(2)) for _ in range(2))
    idle.grad = kept = torch.full((2,), 5.0)
    optimizer = torch.optim.SGD([moving, idle], lr=0.1)
    BaseStep(optimizer, hooks=True).or_nothing([(moving, torch.ones(2))])
    torch.testing.assert_close(moving.detach(), torch.full((2,), 0.9))
    assert torch.equal(idle, torch.ones(2))
    assert idle.grad is kept


@torch.no_grad()
def test_a_step_that_raises_leaves_options_and_state():
    """The second group's option makes its update raise, after the first group has stepped."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.1, momentum=0.9, foreach=False)
    step, gradients = BaseStep(optimizer, hooks=True), [(p, torch.ones(2)) for p in parameters]
    step.or_nothing(gradients)
    buffers = [optimizer.state[p]["momentum_buffer"] for p in parameters]
    before = [b.clone() for b in buffers]
    optimizer.param_groups[1]["weight_decay"] = "heavy"
    with pytest.raises(TypeError):
        step.or_nothing(gradients)
    assert all(optimizer.state[p]["momentum_buffer"] is b for p, b in zip(parameters, buffers, strict=True))
    assert all(torch.equal(b, kept) for b, kept in zip(buffers, before, strict=True))


@pytest.mark.parametrize("hooks", [True, False])
def test_hooks_run_if_they_are_wanted(hooks):
    parameter, calls = nn.Parameter(torch.ones(2)), []
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        BaseStep(optimizer, hooks=hooks).or_nothing([(parameter, torch.ones(2))])
    assert len(calls) == hooks
    torch.testing.assert_close(parameter.detach(), torch.full((2,), 0.9))


def test_rates_are_read_from_a_tensor_inside_the_block_only():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.Adam([{"params": [p]} for p in parameters], lr=0.1)
    step, rates = BaseStep(optimizer, hooks=True), torch.tensor([0.2, 0.3])
    with step.reading(rates):
        assert [float(g["lr"]) for g in optimizer.param_groups] == rates.tolist()
        assert all(group["capturable"] for group in optimizer.param_groups)
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.1]
    assert not any(group["capturable"] for group in optimizer.param_groups)
    assert step.signature(torch.device("cpu")) is None  # captured on CUDA only


@torch.no_grad()
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_a_state_that_is_made_before_the_first_step_changes_no_step(kind):
    options = {"momentum": 0.9} if kind in (torch.optim.SGD, torch.optim.RMSprop) else {}
    results = []
    for makes in (True, False):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = kind([parameter], lr=0.1, weight_decay=0.1, **options)
        if makes:
            parameter.grad, optimizer.param_groups[0]["lr"] = torch.zeros(3), 0.0
            BaseStep(optimizer, hooks=False).make_state()
            optimizer.param_groups[0]["lr"] = 0.1
            assert optimizer.state
            assert torch.equal(parameter, torch.ones(3))
            assert optimizer.param_groups[0]["weight_decay"] == 0.1
        for value in (1.0, 2.0):
            parameter.grad = torch.full((3,), value)
            optimizer.step()
        results.append(parameter.detach())
    assert torch.equal(*results)
