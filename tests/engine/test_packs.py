"""Packs: parameters and states as views of few buffers."""

import pytest
import torch
from torch import nn

from bsam.engine import packs
from bsam.engine.packs import ALIGNMENT, Pack, PackSlot, make_packs
from bsam.optim.probing import Slot
from tests.engine.runs import Run, batches_of, every_optimizer, network_of, stack, stacked
from tests.networks import assert_close, make_batch


@every_optimizer
def test_parameters_stay_where_and_what_they_are(name):
    network = network_of(name)
    run = Run(name, network)
    parameters, buffers = list(run.model.parameters()), dict(run.model.named_buffers())
    batch = make_batch(network, 16)
    step = run.engine(batch)
    addresses = run.addresses()
    for _ in range(3):
        step(*batch)
        assert run.addresses() == addresses
    assert all(a is b for a, b in zip(run.model.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(run.optimizer.param_groups[0]["params"], parameters, strict=True))
    assert all(p.is_leaf and p.requires_grad for p in parameters)
    assert dict(run.model.named_buffers()).keys() == buffers.keys()


def test_parameters_of_vogn_start_each_by_itself():
    """The first step of a parameter has no noise, and begins its curvature: also beside others that have begun."""
    together, alone = ([Run("VOGN", seed=seed) for seed in (3, 5)] for _ in range(2))
    batches = batches_of("mlp", 2)
    step = stacked(together, batches)
    for run, batch in zip(alone, batches, strict=True):
        run.loop(*batch)
    for number, (run, other) in enumerate(zip(alone, together, strict=True)):
        saved = run.state()
        saved["optimizer"]["state"][number + 1]["step"].zero_()
        for each in (run, other):
            each.model.load_state_dict(saved["model"])
            each.optimizer.load_state_dict(saved["optimizer"])
    for _ in range(2):
        losses = step(*stack(batches))
        assert_close(list(losses), [run.loop(*batch) for run, batch in zip(alone, batches, strict=True)])
    for one, other in zip(together, alone, strict=True):
        assert_close(one.state(), other.state())


SHAPES = [(3, 2), (5,), ()]


def make_slots(seed=0, shapes=SHAPES, group=None):
    generator = torch.Generator().manual_seed(seed)
    group = {} if group is None else group
    slots = []
    for index, shape in enumerate(shapes):
        parameter = nn.Parameter(torch.randn(shape, generator=generator))
        state = {"step": torch.tensor(seed + index), "momentum": torch.randn(shape, generator=generator)}
        slots.append(Slot(index, parameter, group, parameter.detach().clone(), state))
    return slots


def test_parameters_and_states_become_views():
    runs = [make_slots(seed) for seed in (0, 1)]
    before = [[(s.parameter.detach().clone(), s.state["momentum"], s.state["step"]) for s in run] for run in runs]
    parameters = [[slot.parameter for slot in run] for run in runs]
    pack = Pack(runs, ["a", "b", "c"])
    for run, (slots, kept) in enumerate(zip(runs, before, strict=True)):
        for place, (slot, (weight, momentum, step)) in enumerate(zip(slots, kept, strict=True)):
            assert slot.parameter is parameters[run][place]
            assert slot.parameter.data_ptr() == pack.view(pack.weights, run, place).data_ptr()
            assert slot.state["momentum"].data_ptr() == pack.view(pack.state["momentum"], run, place).data_ptr()
            assert torch.equal(slot.parameter, weight)
            assert torch.equal(slot.state["momentum"], momentum)
            assert slot.state["step"] == step == pack.state["step"][run, place]
    pack.weights.zero_()
    assert not any(slot.parameter.any() for run in runs for slot in run)


def test_parameters_are_aligned_and_padding_has_a_precision():
    pack = Pack([make_slots()], ["a", "b", "c"])
    assert all(offset % ALIGNMENT == 0 for offset in (*pack.offsets, pack.numel))
    assert all(end - start >= size for start, end, size in zip(pack.offsets, pack.ends(), pack.sizes, strict=True))
    used = torch.zeros(pack.numel, dtype=torch.bool)
    for start, size in zip(pack.offsets, pack.sizes, strict=True):
        used[start : start + size] = True
    assert (pack.weights[0, ~used] == 0).all()
    assert (pack.state["momentum"][0, ~used] == 1).all()


def test_what_was_replaced_is_adopted():
    runs = [make_slots()]
    pack = Pack(runs, ["a", "b", "c"])
    slot = runs[0][1]
    slot.parameter.data = torch.full((5,), 3.0)
    slot.state["momentum"] = torch.full((5,), 4.0)
    pack.adopt()
    assert pack.view(pack.weights, 0, 1).tolist() == [3.0] * 5
    assert pack.view(pack.state["momentum"], 0, 1).tolist() == [4.0] * 5
    assert slot.parameter.data_ptr() == pack.view(pack.weights, 0, 1).data_ptr()


def test_pack_undoes_unpack():
    pack = Pack([make_slots()], ["a", "b", "c"])
    named = pack.unpack(pack.weights[0])
    assert list(named) == ["a", "b", "c"]
    torch.testing.assert_close(list(named.values()), [slot.parameter.detach() for slot in pack.runs[0]])
    torch.testing.assert_close(pack.pack(list(named.values()), torch.float32), pack.weights[0])


@pytest.mark.parametrize("runs", [None, 2])
def test_one_number_per_parameter_is_given_to_its_elements(runs):
    pack = Pack([make_slots()], ["a", "b", "c"])
    slot = PackSlot(0, pack.weights, {}, pack.weights, {}, ends=pack.ends())
    value = torch.tensor([1.0, 2.0, 3.0]) if runs is None else torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    spread = slot.per_element(value)
    for place, (start, size) in enumerate(zip(pack.offsets, pack.sizes, strict=True)):
        expected = value[..., place, None].expand(*value.shape[:-1], size)
        assert torch.equal(spread[..., start : start + size], expected)


def test_mean_squares_of_a_pack_are_those_of_its_parameters():
    shapes = [(3, 2), (5,), (2, 2, 2), (4, 1)]
    runs = [make_slots(seed, shapes) for seed in (0, 1)]
    pack = Pack(runs, ["a", "b", "c", "d"])
    with torch.no_grad():
        pack.runs[1][3].parameter.zero_()
    found = PackSlot(0, pack.weights, {}, pack.weights, {}, ends=pack.ends(), pack=pack).inverse_mean_square()
    expected = torch.stack([torch.stack([slot.inverse_mean_square() for slot in slots]) for slots in runs])
    torch.testing.assert_close(found, expected)
    first = runs[0][0].parameter.detach()
    torch.testing.assert_close(found[0, 0], 1 / first.square().mean())
    assert found[:, 1].tolist() == [0.0, 0.0]  # a vector
    assert found[1, 3] > 1e30


def test_a_pack_of_one_parameter_needs_no_ends():
    pack = Pack([make_slots(shapes=[(3,)])], ["a"])
    assert pack.ends() is None
    value = torch.ones(1)
    assert PackSlot(0, pack.weights, {}, pack.weights, {}, ends=None).per_element(value) is value


def test_what_is_packed_together(monkeypatch):
    """Small parameters of one group and type; a large one is a pack by itself."""
    monkeypatch.setattr(packs, "LARGE", 6)
    first, second = make_slots(), make_slots(1, [(2,), (2,)], {"lr": 0.1})
    second[1].parameter.data = second[1].parameter.data.double()
    made = make_packs([first + second], ["large", "b", "c", "other group", "other type"], [True] * 5)
    assert sorted(pack.names for pack in made) == [["b", "c"], ["large"], ["other group"], ["other type"]]


def test_a_group_with_one_number():
    """A parameter that is a number, as a learned noise, has states that are numbers too: they are no counters."""
    from bsam import BSAM, LearnedNoise, TrainStep

    def run():
        torch.manual_seed(0)
        model = LearnedNoise(nn.Linear(3, 1)).double()
        groups = [
            {"params": [model.log_noise_std], "prior_precision": 0.0, "sample": False, "perturb": False},
            {"params": model.network.parameters()},
        ]
        return model, BSAM(groups, lr=0.1, num_data=50, module=model)

    batches = [(torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)) for _ in range(3)]
    (fast, one), (slow, other) = run(), run()
    step = TrainStep(one, lambda x, y: fast.loss(fast(x), y), batches[0], compile=False)
    for x, y in batches:
        step(x, y)
        other.step(lambda x, y: slow.loss(slow(x), y), x, y)
    for a, b in zip(fast.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert fast.noise_std != 1.0
