"""The step as a function of tensors: packs in and out, for one run and for several."""

import copy

import pytest
import torch

from tests.engine.runs import PROBING, SPLITS, Run, batches_of, stacked
from tests.networks import assert_close


def test_packs_and_names_fit_together():
    """What `_pack` makes of the gradients is what `_unpack` made of the weights."""
    run = Run("BSAM")
    traced = run.engine(batches_of("mlp", 1)[0])._traced
    weights = [pack.weights[0] for pack in traced._packs]
    named = traced._unpack(weights)
    assert_close({name.removeprefix("module."): w for name, w in named.items()}, dict(run.model.named_parameters()))
    assert_close(traced._pack(list(named.values())), weights)


@pytest.mark.parametrize("name", PROBING)
def test_a_method_sees_packs_as_slots_with_its_rates(name):
    runs = [Run(name, seed=seed) for seed in (0, 1)]
    step = stacked(runs, batches_of("mlp", 2))
    traced = step._traced
    rates = traced._rates.tensor
    for run, each in enumerate(runs):
        given = {
            "weights": [pack.weights[run] for pack in traced._packs],
            "state": [{key: value[run] for key, value in pack.state.items()} for pack in traced._packs],
            "rates": rates[run],
        }
        for slot, pack in zip(traced._pack_slots(given, traced._ends), traced._packs, strict=True):
            assert torch.equal(slot.mean, pack.weights[run])
            assert slot.parameter.data_ptr() != slot.mean.data_ptr()  # the update writes to a copy
            assert float(slot.group["lr"]) == float(each.optimizer.param_groups[0]["lr"])
            assert slot.state.keys() == pack.state.keys()


def test_a_step_writes_only_to_what_it_is_given():
    """The formulas of one run leave the packs as they are; the step copies their results there."""
    run = Run("BSAM", "normalised", max_noise=None)
    batch = batches_of("normalised", 1)[0]
    step = run.engine(batch)
    before = copy.deepcopy(run.state())
    traced, pack = step._traced, step._packs[0]
    given = {
        "theta": [pack.weights[0].expand(SPLITS, -1).clone()],
        "weights": [pack.weights[0]],
        "state": [{key: value[0] for key, value in pack.state.items()}],
        "buffers": {name: stack[0] for name, stack in step._buffers.stacks.items()},
        "batch": list(batch),
        "rates": traced._rates.tensor[0],
    }
    results = traced._one(given, traced._ends)
    assert_close(run.state(), before)
    assert results["refused"] == 0
    assert not torch.equal(results["weights"][0], pack.weights[0])
    bad = traced._one({**given, "batch": [batch[0] * torch.nan, batch[1]]}, traced._ends)
    assert bad["refused"] == 1
    assert torch.equal(bad["weights"][0], pack.weights[0])
    assert_close(bad["buffers"], given["buffers"])
