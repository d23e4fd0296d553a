"""A stack of runs against the same runs trained one by one."""

import pytest
import torch
from torch.optim import SGD

import bsam
from bsam.experiments.regression.stack import RunStack, make_member

SETTINGS = [{"lr": 0.05, "prior_precision": 1.0}, {"lr": 0.2, "prior_precision": 3.0}]
SIZES = [2, 1]


def data(runs, n=20):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(n, runs, 3, generator=generator).double(), torch.randn(n, runs, generator=generator).double())


def make_stack():
    return RunStack(SIZES, 3, 5, seeds=[0, 1, 2]).double()


def test_outputs_and_loss_are_those_of_the_members():
    stack, (x, y) = make_stack(), data(3)
    found = stack(x)
    members = [make_member(3, 5, seed).double() for seed in range(3)]
    losses = []
    for run, member in enumerate(members):
        f = member(x[:, run])
        torch.testing.assert_close(found[:, run : run + 1], f)
        losses.append(member.loss(f, y[:, run : run + 1]))
    torch.testing.assert_close(stack.loss(x, y), sum(losses))


KINDS = {
    "VOGN": {"betas": (0.9, 0.9)},
    "IVON": {"betas": (0.9, 0.9)},
    "BSAM": {"max_noise": None, "max_grad_norm": None, "sample_noise": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_the_stack_is_a_step_of_each_run(kind):
    """Without noise, whose numbers depend on the place of a parameter, a stack is the same as separate runs."""
    quiet = {} if kind == "BSAM" else {"sample": False}  # BSAM has sample_noise
    options = {"num_data": 100, **KINDS[kind]}
    stack, (x, y) = make_stack(), data(3)
    groups = stack.parameter_groups([{**each, **quiet} for each in SETTINGS])
    optimizer = getattr(bsam, kind)(groups, module=stack, **options)
    for _ in range(5):
        optimizer.step(stack.loss, x, y)
    means = stack.members(dict(stack.named_parameters()))
    for run, settings in enumerate([SETTINGS[0], SETTINGS[0], SETTINGS[1]]):
        member = make_member(3, 5, run).double()
        own = [{"params": member.network.parameters(), **settings, **quiet}]
        alone = getattr(bsam, kind)(own, module=member, **options)
        for _ in range(5):
            alone.step(lambda x, y: member.loss(member(x), y), x[:, run], y[:, run : run + 1])  # noqa: B023
        for name, parameter in member.named_parameters():
            torch.testing.assert_close(means[run][name], parameter)


def test_groups_leave_the_noises_out():
    stack = make_stack()
    optimizer = SGD(stack.parameter_groups([{"lr": 0.1}, {"lr": 0.2}]))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    optimizer.add_param_group({"params": stack.noises(), "lr": 0.3})  # torch refuses a parameter that is there twice
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(stack.parameters()))


def test_one_seed_per_run():
    with pytest.raises(ValueError, match="there are 3 runs and 2 seeds"):
        RunStack([2, 1], 3, 5, seeds=[0, 1])
