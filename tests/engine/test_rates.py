"""Rates: read from the device, followed when they change, and different from run to run."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import bsam
from bsam.engine.methods import method_of
from bsam.engine.rates import Rates
from tests.engine.runs import PROBING, Run, batches_of, every_optimizer, needs_compiler, stack, stacked
from tests.networks import assert_close
from tests.optimizers import METHODS


@every_optimizer
def test_schedules_are_followed(name):
    ours, plain = Run(name), Run(name)
    batches = batches_of("mlp", 6)
    step = ours.engine(batches[0])
    schedules = [lr_scheduler.CosineAnnealingLR(run.optimizer, 6) for run in (ours, plain)]
    for batch in batches:
        assert_close(step(*batch), plain.loop(*batch))
        for schedule in schedules:
            schedule.step()
    assert_close(ours.state(), plain.state())


@pytest.mark.parametrize("name", PROBING)
def test_every_rate_may_change_between_steps(name):
    ours, plain = Run(name), Run(name)
    rates = METHODS[name].other_rates
    assert set(ours.optimizer.rates) <= set(rates)
    changes = [{}, *({rate: value} for rate, value in rates.items())]
    batches = batches_of("mlp", len(changes))
    step = ours.engine(batches[0])
    for batch, change in zip(batches, changes, strict=True):
        for run in (ours, plain):
            run.optimizer.param_groups[0].update(change)
        assert_close(step(*batch), plain.loop(*batch))
    assert_close(ours.state(), plain.state())


DIFFERENT_RATES = {name: METHODS[name].other_rates for name in PROBING} | {
    "SGD": {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.1},
    "Adam": {"lr": 0.03, "betas": (0.5, 0.9), "weight_decay": 0.1},
}


@every_optimizer
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=needs_compiler)])
def test_runs_may_differ_in_their_rates(name, compile):
    """Three runs, the second with other rates, each as it would be alone; the third's change on the way."""
    network = "mlp"
    ours, alone = ([Run(name, network, seed=seed) for seed in range(3)] for _ in range(2))
    for runs in (ours, alone):
        runs[1].optimizer.param_groups[0].update(DIFFERENT_RATES[name])
    batches = batches_of(network, 3)
    step = stacked(ours, batches, compile=compile)
    for count in range(4):
        if count == 2:
            for runs in (ours, alone):
                runs[2].optimizer.param_groups[0]["lr"] = 0.007
        losses = step(*stack(batches))
        expected = [run.loop(*batch) for run, batch in zip(alone, batches, strict=True)]
        assert_close(losses, torch.stack(expected))
        for run, other in zip(ours, alone, strict=True):
            assert_close(run.state()["model"], other.state()["model"])


def methods(count=2, **options):
    made = []
    for run in range(count):
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        groups = [{"params": [parameters[0]]}, {"params": [parameters[1]], "rho": 0.5, "betas": (0.1, 0.2)}]
        made.append(bsam.BSAM(groups, lr=0.1 * (run + 1), num_data=10, **options))
    return made


def test_every_rate_has_its_columns_and_pairs_have_two():
    made = methods()
    rates = Rates(made, torch.device("cpu"))
    assert rates.send()
    for run, method in enumerate(made):
        for number, group in enumerate(method.param_groups):
            read = rates.read(group, rates.tensor[run, number])
            for name in method.rates:
                values = [float(t) for t in read[name]] if name == "betas" else float(read[name])
                assert values == (list(group[name]) if name == "betas" else group[name])
            assert all(read[name] is group[name] for name in group if name not in method.rates)
    assert torch.equal(rates.column("lr"), torch.tensor([[0.1, 0.1], [0.2, 0.2]], dtype=torch.float64))
    assert rates.column("rho")[:, 1].tolist() == [0.5, 0.5]


def test_only_rates_that_have_changed_are_sent():
    made = methods()
    rates = Rates(made, torch.device("cpu"))
    assert [rates.send() for _ in range(3)] == [True, False, False]
    made[1].param_groups[0]["lr"] = torch.tensor(0.7)  # a scheduler may write a tensor
    assert [rates.send() for _ in range(2)] == [True, False]
    torch.testing.assert_close(rates.column("lr")[1, 0], torch.tensor(0.7, dtype=torch.float64), rtol=1e-7, atol=0)
    made[0].param_groups[1]["betas"] = (0.3, 0.4)
    assert rates.send()
    made[0].param_groups[1]["num_data"] = 7  # no rate
    assert not rates.send()


def test_an_optimizer_without_a_learning_rate_has_the_rate_zero():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    del optimizer.param_groups[0]["lr"]
    rates = Rates([method_of(optimizer, model)], torch.device("cpu"))
    rates.send()
    assert rates.column("lr").tolist() == [[0.0]]
