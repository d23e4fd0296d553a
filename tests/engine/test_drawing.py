"""Samples of the first pass: each seed, step, run and group has its own."""

import pytest
import torch
from torch import nn

import bsam
from tests.engine.runs import GAUSSIAN, SPLITS, Run, batches_of, gpu_batch, on_cuda, on_gpu, stack, stacked
from tests.networks import assert_close, make_batch
from tests.optim.contract import assert_same


@pytest.mark.parametrize("name", GAUSSIAN)
def test_seeds_have_noise_of_their_own(name):
    runs = [Run(name) for _ in range(3)]
    for seed, run in zip((0, 1, 0), runs, strict=True):
        run.optimizer.param_groups[0]["seed"] = seed
    batch = make_batch("mlp", 16)
    step = stacked(runs, [batch] * 3)
    for _ in range(3):  # the first of VOGN has no noise
        step(*stack([batch] * 3))
    a, b, c = (run.model.state_dict() for run in runs)
    assert_same(a, c)
    assert not torch.equal(a["0.weight"], b["0.weight"])


@pytest.mark.gpu
@on_cuda
@pytest.mark.usefixtures("_ieee")
def test_groups_without_noise_come_before_those_with_noise():
    def groups(model):
        return [{"params": model.layers[:3].parameters(), "sample": False}, {"params": model.layers[3:].parameters()}]

    ours, plain = on_gpu("BSAM", params=groups), on_gpu("BSAM", params=groups, vectorise=False)
    batch = gpu_batch()
    step = ours.engine(batch, compile=False)
    for _ in range(2):
        assert_close(step(*batch), plain.loop(*batch), tolerance=1e-5)
    assert_close(ours.model.state_dict(), plain.model.state_dict(), tolerance=1e-5)


@pytest.mark.gpu
@on_cuda
def test_every_replay_has_fresh_noise():
    run = on_gpu("BSAM", max_noise=None)
    batch = gpu_batch()
    step = run.engine(batch, compile=True)
    (pack,), (theta,) = step._packs, step._draws.theta
    drawn = []
    for _ in range(3):
        omega, precision = pack.weights.clone(), 100 * pack.state["unit_precision"]
        step(*batch)
        drawn.append((theta - omega[:, None]) * precision[:, None].sqrt())
    first, second, third = (z[:, :, :1000] for z in drawn)
    for z in (first, second, third):
        assert 0.9 < z.std() < 1.1
    for a, b in ((first, second), (second, third)):
        assert 0.9 < (a - b).std() / 2**0.5 < 1.1  # independent, and not the same again


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("name", GAUSSIAN)
def test_the_sampling_kernel_draws_what_the_optimizer_draws(name):
    runs = [on_gpu(name, seed=seed) for seed in (0, 7)]
    step = stacked(runs, [gpu_batch()] * 2, compile=False)
    for _ in range(2):
        step(*stack([gpu_batch()] * 2))
    step._draws()
    for run, each in enumerate(runs):
        for pack, theta in zip(step._packs, step._draws.theta, strict=True):
            for slot, start, size in zip(pack.runs[run], pack.offsets, pack.sizes, strict=True):
                for split in range(SPLITS):
                    expected = each.optimizer._theta(slot, split).detach().flatten()
                    assert_close(theta[run, split, start : start + size], expected, tolerance=1e-6)


@pytest.mark.parametrize("name", GAUSSIAN)
def test_the_precisions_of_a_stack_are_those_of_each_run(name):
    """Runs may have other rates, and the formulas of a method then get tensors (runs, 1) as options."""
    runs = [Run(name, seed=seed) for seed in range(3)]
    for run, precision in zip(runs, (1.0, 5.0, 20.0), strict=True):
        run.optimizer.param_groups[0]["prior_precision"] = precision
    batches = batches_of("mlp", 3)
    step = stacked(runs, batches)
    for _ in range(2):
        for number in range(len(step._draws.theta)):
            found = step._draws.noise_precision(number)
            pack = step._draws._packs[number]
            for run, slots in enumerate(pack.runs):
                for place, slot in enumerate(slots):
                    expected = runs[run].optimizer._noise_precision(slot)
                    expected = expected.expand(slot.parameter.shape)
                    torch.testing.assert_close(pack.view(found.expand(len(runs), pack.numel), run, place), expected)
        step(*stack(batches))


@pytest.mark.parametrize("name", GAUSSIAN)
def test_the_samples_are_those_of_the_methods(name):
    runs = [Run(name, seed=seed) for seed in (0, 7)]
    batches = batches_of("mlp", 2)
    step = stacked(runs, batches)
    step(*stack(batches))
    step._draws()
    noisy = [pack for pack, sampled in zip(step._packs, step._draws.sampled, strict=True) if sampled]
    assert len(step._packs) - len(noisy) == (name == "BSAM")  # its biases have no noise
    for pack, theta in zip(noisy, step._draws.theta, strict=True):
        for run, each in enumerate(runs):
            for slot, start, size in zip(pack.runs[run], pack.offsets, pack.sizes, strict=True):
                for split in range(SPLITS):
                    expected = each.optimizer._theta(slot, split).flatten()
                    assert torch.equal(theta[run, split, start : start + size], expected)


@pytest.mark.parametrize("name", ["SAM-SGD", "SGD"])
def test_nothing_is_drawn_for_methods_without_noise(name):
    step = Run(name).engine(batches_of("mlp", 1)[0])
    assert step._draws.theta == []
    assert not any(step._draws.sampled)


@pytest.mark.gpu
@on_cuda
def test_the_kernel_leaves_padding_at_its_mean():
    model = nn.Sequential(nn.Embedding(9, 4, padding_idx=2), nn.Flatten(), nn.Linear(12, 3)).cuda()
    optimizer = bsam.BSAM(model.parameters(), num_data=16, splits=2, module=model)
    words = torch.randint(0, 9, (8, 3), device="cuda")
    step = bsam.TrainStep(optimizer, lambda words: model(words).square().mean(), (words,))
    for _ in range(2):
        step(words)
        (theta,) = step._draws.theta
        table = theta[0, :, :36].unflatten(1, (9, 4))
        assert not table[:, 2].any()
        assert table[:, [0, 1, 3, 4, 5, 6, 7, 8]].all()
