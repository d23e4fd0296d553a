"""SWAG's moments against the definition, exact resume in the middle, and its link to optimizer, model and file."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import bsam
from bsam.optim.swag import update


class Net(nn.Module):
    """Frozen and tied weights, and BatchNorm."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 2)
        self.tied = self.head

    def forward(self, x):
        return self.head(self.frozen(torch.tanh(self.norm(self.body(x)))))


def data(step=0, size=16):
    g = torch.Generator().manual_seed(step)
    return torch.randn(size, 3, generator=g), torch.randint(2, (size,), generator=g)


def network():
    torch.manual_seed(3)
    return Net()


def train(model, optimizer, swag, start, stop):
    dtype = model.body.weight.dtype
    for step in range(start, stop):
        x, y = data(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(dtype)), y).backward()
        optimizer.step()
        swag.step()


def trained(steps=60, dtype=torch.float32):
    model = network().to(dtype)
    swag = bsam.SWAG(model, rank=4, interval=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, swag, 0, steps)
    return model, optimizer, swag


def test_moments_and_deviations_are_those_of_the_paper():
    """Mean of theta, mean of theta^2 minus the square of the mean, and the last deviations from the running mean."""
    model, optimizer, swag = trained(0, torch.float64)
    snapshots = []
    for step in range(63):
        train(model, optimizer, swag, step, step + 1)
        if step % 5 == 4:
            snapshots.append({name: p.detach().numpy().copy() for name, p in model.named_parameters()})
    assert (swag.num_steps, swag.num_snapshots) == (63, 12)
    posterior = swag.posterior()
    assert posterior.rank == 4
    for name in ("body.weight", "norm.bias", "head.bias"):
        theta = np.stack([s[name] for s in snapshots])
        np.testing.assert_allclose(posterior.mean[name], theta.mean(0), rtol=1e-12)
        np.testing.assert_allclose(posterior.variance[name], (theta**2).mean(0) - theta.mean(0) ** 2, rtol=1e-8)
        for k, n in enumerate(range(9, 13)):
            np.testing.assert_allclose(posterior.deviations[name][k], theta[n - 1] - theta[:n].mean(0), atol=1e-13)
    assert torch.equal(posterior.mean["frozen.weight"], model.frozen.weight)
    assert not posterior.std["frozen.weight"].any()
    assert set(posterior.variance) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert torch.equal(posterior.buffers["norm.running_mean"], model.norm.running_mean)


def test_the_variance_survives_float32():
    """theta = 1 + 1e-4 z: the mean of squares minus the square of the mean is rounding."""
    z = torch.randn(200, 1000, generator=torch.Generator().manual_seed(0))
    mean, v = torch.zeros(1000), torch.zeros(1000)
    for n, row in enumerate(1 + 1e-4 * z, start=1):
        mean, v, _ = update(mean, v, row, n)
    exact = (1 + 1e-4 * z).double().var(0, correction=0)
    torch.testing.assert_close(v.double(), exact, rtol=1e-2, atol=0)
    squares = (1 + 1e-4 * z).square().mean(0) - (1 + 1e-4 * z).mean(0).square()
    assert ((squares.double() - exact).abs() > 0.5 * exact).any()  # what is avoided


def test_weights_that_do_not_move_have_the_least_variance():
    model = nn.Linear(2, 1)
    swag = bsam.SWAG(model, rank=3, interval=1)
    for _ in range(4):
        swag.step()
    q = swag.posterior()
    assert torch.equal(q.variance["weight"], torch.full((1, 2), 1e-30))
    assert torch.equal(q.sample(torch.Generator())["weight"], model.weight)


def test_it_collects_at_the_interval_and_when_asked():
    model = nn.Linear(2, 1)
    swag = bsam.SWAG(model, rank=2, interval=10)
    for _ in range(9):
        swag.step()
    assert swag.num_snapshots == 0
    swag.step()
    assert swag.num_snapshots == 1
    swag.collect()
    assert (swag.num_steps, swag.num_snapshots) == (10, 2)
    assert repr(swag) == "SWAG(rank=2, interval=10, num_steps=10, num_snapshots=2)"


@pytest.mark.parametrize("optimizer", ["SAM", "BSAM", "Adam"])
def test_on_top_of_any_optimizer(optimizer):
    model = nn.Linear(3, 2)
    make = {
        "SAM": lambda p: bsam.SAM(p, torch.optim.SGD, rho=0.05, lr=0.1),
        "BSAM": lambda p: bsam.BSAM(p, num_data=100),
        "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    }[optimizer](model.parameters())
    swag = bsam.SWAG(model, interval=2)

    def closure():
        make.zero_grad()
        loss = nn.functional.cross_entropy(model(data()[0]), data()[1])
        loss.backward()
        return loss

    for _ in range(10):
        make.step(closure)
        swag.step()
    assert swag.posterior().rank == 5  # fewer snapshots than rank: as many


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("split", [3, 12, 31])  # before the first snapshot, with fewer than rank, with more
def test_a_run_that_is_interrupted_ends_with_the_same_bits(split, tmp_path):
    _, _, swag = trained(50)
    first, first_optimizer, first_swag = trained(split)
    parts = {"model": first, "optimizer": first_optimizer, "swag": first_swag}
    torch.save({key: part.state_dict() for key, part in parts.items()}, tmp_path / "half")
    saved = torch.load(tmp_path / "half", weights_only=True)
    second = network()
    second_optimizer = torch.optim.SGD(second.parameters(), lr=0.7)
    second_swag = bsam.SWAG(second)  # options come from the file
    for key, part in {"model": second, "optimizer": second_optimizer, "swag": second_swag}.items():
        part.load_state_dict(saved[key])
    train(second, second_optimizer, second_swag, split, 50)
    assert repr(second_swag) == repr(swag)
    one, other = swag.posterior()._contents(), second_swag.posterior()._contents()
    assert one[1] == other[1]
    for group in one[0]:
        assert all(torch.equal(one[0][group][name], other[0][group][name]) for name in one[0][group])


def test_the_state_is_a_copy():
    model, _, swag = trained()
    state = swag.state_dict()
    mean = state["mean"]["body.weight"].clone()
    nn.init.ones_(model.body.weight)
    swag.collect()
    assert torch.equal(state["mean"]["body.weight"], mean)
    other = bsam.SWAG(network())
    other.load_state_dict(state)
    other.collect()
    assert torch.equal(state["mean"]["body.weight"], mean)
    assert len(state["deviations"]["body.weight"]) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("variance"), "has no 'variance': is it the state of a SWAG"),
        (lambda s: s["mean"].pop("body.weight"), "the loaded mean must .* missing: body.weight"),
        (lambda s: s["variance"].update({"more": torch.ones(1)}), "unexpected: more"),
        (lambda s: s["mean"].update({"body.bias": torch.ones(5)}), r"body.bias \(5,\) instead of \(4,\)"),
        (lambda s: s["deviations"].update({"body.bias": torch.ones(4, 5)}), r"the loaded deviations .*\(5,\)"),
        (lambda s: s["deviations"].update({"body.bias": torch.ones(3, 4)}), r"\[3, 4\] columns: .* must be 4"),
        (lambda s: s["mean"]["body.bias"].fill_(math.nan), "the loaded mean of body.bias is not finite"),
        (lambda s: s.update(rank=1), "rank=1 must be 2 or more"),
        (lambda s: s.update(interval=0), "interval=0"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_any_change(change, message):
    _, _, swag = trained()
    state = swag.state_dict()
    change(state)
    _, _, other = trained(40)
    before = other.state_dict()
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    after = other.state_dict()
    assert before["num_steps"] == after["num_steps"] == 40
    for key in ("mean", "variance", "deviations"):
        assert all(torch.equal(before[key][name], after[key][name]) for name in before[key])


# ---------------------------------------------------------------- bad input


def test_too_few_snapshots():
    swag = bsam.SWAG(nn.Linear(2, 1), interval=100)
    for _ in range(150):
        swag.step()
    with pytest.raises(ValueError, match=r"1 snapshots after 150 steps.*needs 2 or more.*200 times"):
        swag.posterior()


def test_weights_that_are_not_finite_are_not_collected():
    model = nn.Linear(2, 1)
    swag = bsam.SWAG(model, interval=1)
    swag.step()
    state = swag.state_dict()
    with torch.no_grad():
        model.bias.fill_(math.inf)
    with pytest.raises(FloatingPointError, match="weights bias are not finite"):
        swag.step()
    assert swag.num_steps == swag.num_snapshots == 1
    assert torch.equal(swag.state_dict()["mean"]["bias"], state["mean"]["bias"])


@pytest.mark.parametrize("options", [{"rank": 1}, {"rank": 2.0}, {"rank": True}, {"interval": 0}, {"interval": 0.5}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}={next(iter(options.values()))}"):
        bsam.SWAG(nn.Linear(2, 1), **options)


def test_a_model_without_trainable_weights_is_refused():
    with pytest.raises(ValueError, match="nothing to collect"):
        bsam.SWAG(nn.Linear(2, 1).requires_grad_(False))
    with pytest.raises(ValueError, match=r"scale=-1"):
        trained()[2].posterior(scale=-1)


# ---------------------------------------------------------------- after collection


def test_it_predicts_and_is_saved(tmp_path):
    model, _, swag = trained()
    posterior = swag.posterior(scale=0.5, prior_precision=2.0)
    posterior.save(tmp_path / "swag.safetensors")
    loaded = bsam.load_posterior(tmp_path / "swag.safetensors")
    assert isinstance(loaded, bsam.LowRankGaussian)
    assert loaded.scale == 0.5
    assert torch.equal(loaded.kl(), posterior.kl())
    x, y = data()
    train_set = [data(step) for step in range(5)]
    one, other = (bsam.predict(model, q, (x, y), num_samples=4, recalibrate=train_set) for q in (posterior, loaded))
    assert torch.equal(one.log_probs, other.log_probs)
    not_again = bsam.predict(model, posterior, (x, y), num_samples=4, recalibrate=False)
    assert not torch.equal(one.log_probs, not_again.log_probs)
    assert (one.mutual_information > 0).any()


def test_sixteen_bit_weights_are_averaged_in_float32():
    model, _, swag = trained(dtype=torch.bfloat16)
    assert swag.state_dict()["mean"]["body.weight"].dtype == torch.float32
    assert swag.posterior().mean["body.weight"].dtype == torch.bfloat16
    assert model.body.weight.dtype == torch.bfloat16
