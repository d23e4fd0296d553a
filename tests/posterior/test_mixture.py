"""Mixtures: several posteriors of one model as one."""

import copy
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bsam.posterior import DiagonalGaussian, Mixture, PointMass, load_posterior
from tests.posterior.kinds import KINDS, gaussian, generator, low_rank, make_net, same, snapshot


def other_net(net, shift):
    """The net with other trained weights, and other statistics of BatchNorm."""
    found = copy.deepcopy(net)
    with torch.no_grad():
        for p in found.parameters():
            if p.requires_grad:
                p.add_(shift)
        found.norm.running_mean.add_(shift)
    return found


@pytest.fixture
def nets():
    return [other_net(make_net(), shift) for shift in (0.0, 1.0, -2.0)]


@pytest.fixture(params=[*KINDS, "all kinds"])
def mixture(request, nets):
    kinds = list(KINDS.values()) if request.param == "all kinds" else [KINDS[request.param]] * 3
    return Mixture([kind(net) for kind, net in zip(kinds, nets, strict=True)], [1, 2, 5])


def numbers(*values):
    return {"w": torch.tensor(values, dtype=torch.float64)}


def normal(mean, std, **options):
    return DiagonalGaussian(numbers(*mean), numbers(*std), **options)


# ---------------------------------------------------------------- moments, draws, densities


def test_moments_are_those_of_samples():
    q = Mixture([normal([0.0, 1.0], [1.0, 0.5]), PointMass(numbers(3.0, 1.0))], [3, 1])
    torch.testing.assert_close(q.mean["w"], torch.tensor([0.75, 1.0], dtype=torch.float64))
    wanted = [0.75 * 1 + 0.75 * 0.25 * 9, 0.75 * 0.25]
    torch.testing.assert_close(q.std["w"], torch.tensor(wanted, dtype=torch.float64).sqrt())
    g = generator()
    drawn = torch.stack([q.sample(g)["w"] for _ in range(4000)])
    torch.testing.assert_close(drawn.mean(0), q.mean["w"], atol=0.1, rtol=0)
    torch.testing.assert_close(drawn.std(0), q.std["w"], atol=0.1, rtol=0)
    at_point = (drawn == torch.tensor([3.0, 1.0])).all(1).double().mean()
    assert float(at_point) == pytest.approx(0.25, abs=0.03)


def test_equal_weights_have_an_exact_mean_and_no_std():
    value = torch.tensor([0.1, 0.7, 1e-3])
    q = Mixture([PointMass({"w": value, "v": value * i}) for i in range(3)])
    assert torch.equal(q.mean["w"], value)
    assert not q.std["w"].any()
    assert q.sampled_names == ["v"]


def test_parts_that_are_mixtures_are_taken_apart():
    a, b, c = (PointMass(numbers(float(i))) for i in range(3))
    q = Mixture([Mixture([a, b], [1, 3]), c])
    assert q.parts == (a, b, c)
    assert q.weights == (0.125, 0.375, 0.5)


def test_log_prob_is_the_density_of_the_mixture():
    a, b = normal([0.0, 1.0], [1.0, 0.5]), normal([1.0, -1.0], [0.2, 2.0])
    q, x = Mixture([a, b], [1, 3]), numbers(0.3, 0.4)
    wanted = 0.25 * a.log_prob(x).exp() + 0.75 * b.log_prob(x).exp()
    torch.testing.assert_close(q.log_prob(x), wanted.log())
    points = Mixture([PointMass(numbers(float(i))) for i in (0, 0, 1)])
    assert points.log_prob(numbers(0.0)) == pytest.approx(math.log(2 / 3))
    assert points.log_prob(numbers(2.0)) == -math.inf
    with pytest.raises(ValueError, match="sample other elements of w"):
        Mixture([a, PointMass(a.mean)]).log_prob(x)
    with pytest.raises(ValueError, match="missing: w"):
        q.log_prob({})


def test_what_has_no_closed_form_raises(nets):
    q = Mixture(map(gaussian, nets))
    for ask in (q.entropy, q.kl):
        with pytest.raises(ValueError, match="no closed form"):
            ask()
    with pytest.raises(ValueError, match="lies between its parts"):
        q.write_mean(nets[0])


def test_temper_leaves_the_parts_where_they_are(nets):
    q = Mixture([gaussian(nets[0]), PointMass.from_model(nets[1])], [1, 2])
    cold = q.temper(0.25)
    assert cold.weights == q.weights
    assert all(same(a.mean, b.mean) for a, b in zip(cold.parts, q.parts, strict=True))
    torch.testing.assert_close(cold.parts[0].std["scale"], q.parts[0].std["scale"] / 2)
    with pytest.raises(ValueError, match="temperature=-1"):
        q.temper(-1)


# ---------------------------------------------------------------- how many samples of each part


@pytest.mark.parametrize(
    "weights",
    [np.array([1, 3]), np.array([1, 3], dtype=np.float32), [np.float32(1), np.int64(3)], torch.tensor([1.0, 3.0])],
)
def test_weights_are_numbers_of_any_kind(weights):
    q = Mixture([normal([0.0], [1.0]), normal([1.0], [1.0])], weights)
    assert q.weights == (0.25, 0.75)
    assert all(type(weight) is float for weight in q.weights)


@pytest.mark.parametrize(
    ("weights", "num_samples", "wanted"),
    [
        ([1, 1, 1], 32, (11, 11, 10)),
        ([1, 1, 1], 3, (1, 1, 1)),
        ([1, 2, 3], 30, (5, 10, 15)),
        ([1, 1, 998], 10, (1, 1, 8)),
        ([1, 1, 1], 0, (1, 1, 1)),
    ],
)
def test_samples_are_spread_by_weight(weights, num_samples, wanted):
    q = Mixture([normal([float(i)], [1.0]) for i in range(3)], weights)
    assert q.num_draws(num_samples) == wanted


def test_a_point_has_one_pass():
    wide, point = normal([0.0], [1.0]), PointMass(numbers(0.0))
    for num_samples in (0, 1, 7, 1000):
        assert Mixture([point, point]).num_draws(num_samples) == (1, 1)
        assert Mixture([point, wide, point]).num_draws(num_samples) == (1, max(1, num_samples), 1)
    with pytest.raises(ValueError, match=r"num_samples=1 is fewer than the 2 parts.*Write num_samples=2"):
        Mixture([wide, wide]).num_draws(1)


# ---------------------------------------------------------------- in a model


def test_sampled_writes_the_buffers_of_the_part(nets, mixture):
    net, seen = nets[0], set()
    before = snapshot(net)
    for seed in range(40):
        sample, g = mixture.sample(generator(seed)), generator(seed)
        with mixture.sampled(net, g):
            assert same(dict(net.named_parameters()), sample)
            part = [
                m
                for m, q in enumerate(mixture.parts)
                if same({"": net.norm.running_mean}, {"": q.buffers["norm.running_mean"]})
            ]
            seen.update(part)
        assert same(before, snapshot(net))
    assert seen == {0, 1, 2}


def test_names_and_places(nets, mixture):
    assert mixture.to("cpu") is mixture
    assert mixture.num_parameters == mixture.parts[0].num_parameters
    renamed = mixture.renamed({"": "model."})
    assert {f"model.{name}" for name in mixture.mean} == set(renamed.mean)
    renamed.check_fits(nn.ModuleDict({"model": nets[0]}))
    with pytest.raises(ValueError, match="does not fit the model"):
        mixture.check_fits(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="manual_seed"):
        mixture.sample(0)


def test_the_frozen_parameters_can_be_left_to_the_base_model(nets, tmp_path):
    q = Mixture(map(gaussian, nets))
    assert q.frozen == {"frozen.weight", "frozen.bias"}
    small = q.without_frozen()
    assert "frozen.weight" not in small.parts[1].mean
    assert small.without_frozen() is small
    q.save(tmp_path / "small", frozen=False)
    loaded = load_posterior(tmp_path / "small", model=nets[0])
    assert same(loaded.parts[2].mean, small.parts[2].mean)
    with torch.no_grad():
        nets[1].frozen.weight.add_(1)
    with pytest.raises(ValueError, match=r"frozen weights frozen.weight differ"):
        Mixture(map(gaussian, nets)).without_frozen()
    with pytest.raises(ValueError, match="are not those that the posterior was trained with"):
        load_posterior(tmp_path / "small", model=nets[1])


# ---------------------------------------------------------------- files


def test_save_and_load(mixture, tmp_path):
    mixture.save(tmp_path / "q")
    for loaded in (load_posterior(tmp_path / "q"), Mixture.load(tmp_path / "q")):
        assert repr(loaded) == repr(mixture)
        assert loaded.weights == mixture.weights
        for a, b in zip(loaded.parts, mixture.parts, strict=True):
            assert type(a) is type(b)
            assert same(a.mean, b.mean)
            assert same(a.buffers, b.buffers)
        for seed in range(5):
            assert same(loaded.sample(generator(seed)), mixture.sample(generator(seed)))
    with pytest.raises(ValueError, match="mixture"):
        PointMass.load(tmp_path / "q")


def test_a_file_is_not_trusted(tmp_path):
    q = Mixture([normal([1.0], [1.0]), PointMass(numbers(2.0))])
    groups, settings = q._contents()
    assert q._from_contents(groups, settings).weights == (0.5, 0.5)
    for wrong, message in [
        ({"parts": [{"kind": "other", "settings": {}}]}, "kind 'other'"),
        ({"weights": [1.0, -1.0]}, "must be a finite number > 0"),
        ({"weights": [1.0]}, "1 numbers for 2 parts"),
        ({"parts": []}, "empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            Mixture._from_contents(groups, {**settings, **wrong})
    q.save(tmp_path / "q")
    assert {key.split("/")[0] for key in load_file(tmp_path / "q")} == {"0.mean", "0.std", "1.mean"}


# ---------------------------------------------------------------- bad input


def test_parts_must_be_of_one_model(nets):
    good = gaussian(nets[0])
    for parts, error, message in [
        ([], ValueError, "parts is empty"),
        ([good, nets[1]], TypeError, "part 1 is of type Net: it must be a posterior"),
        ([good, PointMass({"w": torch.ones(2)})], ValueError, "the mean of part 1 .* missing: .* one model"),
        ([good, PointMass(good.mean)], ValueError, "the buffers of part 1 .* missing: "),
    ]:
        with pytest.raises(error, match=message):
            Mixture(parts)
    with pytest.raises(TypeError, match=r"parts is of type .*: write Mixture\(\[posterior, ...\]\)"):
        Mixture(good)
    with pytest.raises(TypeError, match=r"weights=0.5 must be a list of numbers"):
        Mixture([good, good], 0.5)
    for weights in ([1.0], [1.0, 0.0], [1.0, math.inf], [1.0, True], [1.0, "1"], torch.tensor([1.0, -1.0])):
        with pytest.raises(ValueError, match="weights"):
            Mixture([good, good], weights)
    with pytest.raises(ValueError, match=r"part 0 is on cpu, part 1 on meta: write part.to\(device\)"):
        Mixture([PointMass({"w": torch.ones(2)}), _on_meta()])


def _on_meta():
    found = PointMass({"w": torch.ones(2)})
    found.mean = {name: mean.to("meta") for name, mean in found.mean.items()}
    return found


def test_repr(nets):
    parts = [gaussian(nets[0]), low_rank(nets[1]), PointMass.from_model(nets[2]), gaussian(nets[2])]
    said = repr(Mixture(parts))
    assert said.startswith("Mixture(4 parts of ")
    assert said.endswith("parameters: 2 DiagonalGaussian, 1 LowRankGaussian, 1 PointMass)")
