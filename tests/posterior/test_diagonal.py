"""The Gaussian's formulas and sampling law, and, for every kind of posterior, its model and its file."""

import json
import math
import os
import stat

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributions import Normal, kl_divergence

from bsam.files import checksum
from bsam.modules import clean_names, preserved
from bsam.posterior import DiagonalGaussian, LowRankGaussian, PointMass, load_posterior


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Net(nn.Module):
    """Tied weights, BatchNorm, a frozen layer, a transient buffer, a scalar and an empty parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("offset", torch.arange(4.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.scale * self.head(self.frozen(self.norm(self.embed(x)))) + self.offset


@pytest.fixture
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net().double()
        model(torch.randn(16, 4, dtype=torch.float64))  # moves the running statistics
        return model


def gaussian(model, std=0.1, prior_precision=2.0):
    widths = {p: torch.full_like(p, std) for p in model.parameters() if p.requires_grad}
    return DiagonalGaussian.from_model(model, widths, prior_precision=prior_precision)


def low_rank(model):
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return LowRankGaussian(
        dict(model.named_parameters()),
        {name: torch.full_like(p, 0.01) for name, p in trainable.items()},
        {name: torch.linspace(-0.1, 0.1, 3).double().view(3, *[1] * p.ndim) * p for name, p in trainable.items()},
        buffers=PointMass.from_model(model).buffers,
        prior_precision=2.0,
    )


KINDS = {"gaussian": gaussian, "point": PointMass.from_model, "low_rank": low_rank}


@pytest.fixture(params=KINDS)
def posterior(request, net):
    return KINDS[request.param](net)


def random_gaussian(seed=0, prior_precision=3.0, fixed=True):
    g = generator(seed)
    shapes = {"a": (3, 4), "b": (5,), "c": ()}
    mean = {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}
    std = {name: torch.rand(shape, generator=g, dtype=torch.float64) + 0.1 for name, shape in shapes.items()}
    if fixed:
        std["a"][0] = 0
    return DiagonalGaussian(mean, std, prior_precision=prior_precision)


def snapshot(model):
    return {name: t.clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize("fixed", [False, True])
def test_closed_forms_are_those_of_torch_distributions(fixed):
    q = random_gaussian(fixed=fixed)
    sample = q.sample(generator(1))
    log_prob = entropy = kl = 0.0
    for name, mean in q.mean.items():
        sampled = q.std[name] > 0
        normal = Normal(mean[sampled], q.std[name][sampled])
        prior = Normal(torch.zeros_like(normal.mean), 1 / math.sqrt(3.0))
        log_prob += normal.log_prob(sample[name][sampled]).sum()
        entropy += normal.entropy().sum()
        kl += kl_divergence(normal, prior).sum()
    torch.testing.assert_close(q.log_prob(sample), log_prob, rtol=1e-12, atol=0)
    torch.testing.assert_close(q.entropy(), entropy, rtol=1e-12, atol=0)
    torch.testing.assert_close(q.kl(), kl, rtol=1e-12, atol=0)


def test_sums_are_float64_for_float32_weights():
    n = 1_000_000
    q = DiagonalGaussian({"w": torch.zeros(n)}, {"w": torch.full((n,), 0.1)}, prior_precision=1.0)
    one = Normal(torch.tensor(0.0, dtype=torch.float64), torch.tensor(0.1).double())
    torch.testing.assert_close(q.entropy(), n * one.entropy(), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        q.kl(), n * kl_divergence(one, Normal(torch.zeros_like(one.mean), 1.0)), rtol=1e-12, atol=0
    )
    assert q.kl().dtype == q.log_prob(q.mean).dtype == torch.float64


def test_log_prob_of_a_fixed_element_off_its_mean():
    q = random_gaussian()
    sample = q.sample(generator())
    assert q.log_prob(sample).isfinite()
    sample["a"][0, 0] += 1e-9
    assert q.log_prob(sample) == -math.inf


def test_a_gaussian_without_width_behaves_as_a_point():
    q = random_gaussian().temper(0)
    assert same(q.sample(generator()), q.mean)
    assert q.log_prob(q.mean) == 0
    assert q.entropy() == -math.inf
    with pytest.raises(ValueError, match="infinite"):
        q.kl()


@pytest.mark.parametrize("precision", [None, 0.0, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0, "c": 0.0}])
def test_kl_needs_a_prior(precision):
    with pytest.raises(ValueError, match=r"prior precision of .*c.* is 0 or not given"):
        random_gaussian(prior_precision=precision).kl()


def test_kl_needs_no_prior_for_fixed_parameters():
    mean = {"a": torch.ones(2), "b": torch.ones(2)}
    q = DiagonalGaussian(mean, {"a": torch.ones(2), "b": torch.zeros(2)}, prior_precision={"a": 1.0})
    assert q.kl() == 1.0  # of two: (1 + 1 - 1 - 0) / 2


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.01, 100))
def test_kl_is_not_negative_and_zero_at_the_prior(seed, precision):
    q = random_gaussian(seed, precision)
    assert q.kl() >= 0
    prior = {name: torch.full_like(m, precision**-0.5) for name, m in q.mean.items()}
    same_as_prior = DiagonalGaussian(
        {n: torch.zeros_like(m) for n, m in q.mean.items()}, prior, prior_precision=precision
    )
    assert abs(same_as_prior.kl()) < 1e-12


# ---------------------------------------------------------------- samples


def test_law_of_samples():
    q = random_gaussian()
    g = generator(3)
    draws = [q.sample(g) for _ in range(4000)]
    for name, mean in q.mean.items():
        values = torch.stack([draw[name] for draw in draws])
        std = q.std[name]
        assert ((values.mean(0) - mean).abs() <= 4.5 * std / 4000**0.5 + 1e-15).all()
        assert ((values.std(0) - std).abs() <= 4.5 * std / 8000**0.5 + 1e-15).all()
        z = ((values - mean) / std)[..., std > 0]
        for width, mass in ((1, 0.6827), (2, 0.9545)):  # of the normal law
            assert ((z.abs() < width).double().mean() - mass).abs() < 4.5 * (mass * (1 - mass) / z.numel()) ** 0.5


def test_randomness_is_that_of_the_generator():
    q = random_gaussian()
    state = torch.get_rng_state()
    g = generator(7)
    first, second = q.sample(g), q.sample(g)
    assert torch.equal(state, torch.get_rng_state())
    assert same(first, q.sample(generator(7)))
    assert not same(first, second)
    for wrong in (None, 0):
        with pytest.raises(TypeError, match=r"torch\.Generator\(\)\.manual_seed"):
            q.sample(wrong)


def test_samples_are_copies(posterior):
    before = {name: mean.clone() for name, mean in posterior.mean.items()}
    for tensor in posterior.sample(generator()).values():
        tensor.zero_()
    assert same(before, posterior.mean)


def test_fixed_parameters_take_no_random_numbers():
    q = random_gaussian()
    more = DiagonalGaussian(
        {"0": torch.zeros(9), **q.mean}, {"0": torch.zeros(9), **q.std}
    )  # "0" comes first in any order
    drawn = more.sample(generator())
    del drawn["0"]
    assert same(drawn, q.sample(generator()))


def test_sixteen_bit_weights():
    mean = {"w": torch.linspace(1, 2, 1000).bfloat16()}
    q = DiagonalGaussian(mean, {"w": torch.full((1000,), 0.01, dtype=torch.bfloat16)})
    assert (q.mean["w"].dtype, q.std["w"].dtype) == (torch.bfloat16, torch.float32)
    sample = q.sample(generator())["w"]
    assert sample.dtype == torch.bfloat16
    noise = torch.randn(1000, generator=generator())
    assert torch.equal(sample, (mean["w"].float() + q.std["w"] * noise).bfloat16())  # rounded once


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_generator_on_another_device():
    q = random_gaussian()
    here = q.sample(generator())
    there = q.to("cuda").sample(generator())
    assert all(t.is_cuda for t in there.values())
    assert all(torch.allclose(here[name], there[name].cpu(), rtol=1e-15) for name in here)


def test_temper():
    q = random_gaussian()
    cold = q.temper(0.25)
    assert all(torch.equal(cold.std[name], q.std[name] / 2) for name in q.std)
    assert same(cold.mean, q.mean)
    assert cold.prior_precision == q.prior_precision
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="temperature="):
            q.temper(wrong)


# ---------------------------------------------------------------- construction


def one(value, **options):
    return {"w": torch.tensor(value, **options)}


@pytest.mark.parametrize(
    ("mean", "std", "precision", "error", "message"),
    [
        (one([1.0, math.nan]), one([1.0, 1.0]), None, ValueError, "mean of w is not finite"),
        (one([1.0, 1.0]), one([1.0, math.inf]), None, ValueError, "std of w must be finite and >= 0"),
        (one([1.0, 1.0]), one([1.0, -1e-9]), None, ValueError, "std of w must be finite and >= 0"),
        (one([1.0]), one([1e300], dtype=torch.float64), None, ValueError, "std of w must be finite"),
        (one([1.0, 1.0]), one([1.0]), None, ValueError, r"w \(1,\) instead of \(2,\)"),
        (one([1.0]), {}, None, ValueError, "missing: w"),
        (one([1.0]), {**one([1.0]), "v": torch.ones(1)}, None, ValueError, "unexpected: v"),
        (one([1]), one([1.0]), None, TypeError, "int64"),
        ({"w": [1.0]}, one([1.0]), None, TypeError, r"mean\['w'\] is of type list"),
        (one([1.0]), one([1.0]), -1.0, ValueError, "prior_precision=-1.0 of w must be a finite number >= 0"),
        (one([1.0]), one([1.0]), math.inf, ValueError, "prior_precision=inf"),
        (one([1.0]), one([1.0]), {"w": "1"}, ValueError, "prior_precision='1'"),
        (one([1.0]), one([1.0]), {"v": 1.0}, ValueError, "prior_precision has v, which is not in the mean"),
    ],
)
def test_constructor_refuses(mean, std, precision, error, message):
    with pytest.raises(error, match=message):
        DiagonalGaussian(mean, std, prior_precision=precision)


def test_tensors_are_detached_copies(net):
    q = gaussian(net)
    before = q.mean["scale"].clone()
    with torch.no_grad():
        net.scale.add_(1)
    assert torch.equal(q.mean["scale"], before)
    assert not any(t.requires_grad for t in (*q.mean.values(), *q.std.values()))


def test_from_model(net):
    q = gaussian(net, prior_precision={net.scale: 4.0})
    assert list(q.mean) == [name for name, _ in net.named_parameters()]
    assert "head.weight" not in q.mean  # tied to embed.weight
    assert (q.std["frozen.weight"] == 0).all()
    assert (q.std["embed.weight"] == 0.1).all()
    assert set(q.buffers) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "offset"}
    assert q.prior_precision == {"scale": 4.0}
    assert q.num_parameters == sum(p.numel() for p in net.parameters())
    with pytest.raises(ValueError, match=r"a parameter of shape \(7,\) that is not in the model"):
        DiagonalGaussian.from_model(net, {torch.ones(7): torch.ones(7)})


def test_repr():
    assert repr(random_gaussian().temper(0)) == ("DiagonalGaussian(18 parameters in 3 tensors, 0 sampled, std 0 to 0)")


def test_to(posterior):
    assert posterior.to("cpu") is posterior


# ---------------------------------------------------------------- in a model


def test_sampled_writes_sample_and_buffers(net, posterior):
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1)
        net.norm.running_mean.add_(1)
        net.offset.add_(1)
        net.cache.add_(1)
    before, addresses = snapshot(net), {name: p.data_ptr() for name, p in net.named_parameters()}
    sample = posterior.sample(generator(5))
    with posterior.sampled(net, generator(5)):
        assert same(dict(net.named_parameters()), sample)
        assert net.head.weight is net.embed.weight
        assert torch.equal(net.norm.running_mean, posterior.buffers["norm.running_mean"])
        assert torch.equal(net.offset, posterior.buffers["offset"])
        assert torch.equal(net.cache, before["cache"])
        assert all(p.is_leaf and p.data_ptr() == addresses[name] for name, p in net.named_parameters())
    assert same(before, snapshot(net))
    assert all(p.is_leaf and p.data_ptr() == addresses[name] for name, p in net.named_parameters())
    assert net.scale.requires_grad
    assert not net.frozen.weight.requires_grad


def test_posterior_without_buffers_leaves_those_of_the_model(net):
    q = DiagonalGaussian(gaussian(net).mean, gaussian(net).std)
    before = snapshot(net)
    with q.sampled(net, generator()):
        assert torch.equal(net.offset, before["offset"])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_sampled_restores_whatever_happens(net, posterior, error):
    before = snapshot(net)

    def fail():
        with posterior.sampled(net, generator()):
            net.train()
            net(torch.randn(8, 4, dtype=torch.float64))  # moves the running statistics
            net.norm.running_var = torch.ones(4, dtype=torch.float64)  # another tensor
            raise error

    with torch.random.fork_rng(), pytest.raises(error):
        fail()
    assert same(before, snapshot(net))


def test_sampled_nests(net):
    q = gaussian(net)
    before = snapshot(net)
    with q.sampled(net, generator(1)):
        outer = snapshot(net)
        with q.sampled(net, generator(2)):
            assert not same(outer, snapshot(net))
        assert same(outer, snapshot(net))
    assert same(before, snapshot(net))


def test_sampled_under_autocast():
    layer = nn.Linear(4, 4)
    q = gaussian(layer, std=1.0)
    x = torch.ones(1, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean = layer(x)
        with q.sampled(layer, generator()):
            assert not torch.equal(layer(x), mean)
        assert torch.equal(layer(x), mean)


def test_write_mean(net, posterior):
    wanted = snapshot(net)
    address = net.scale.data_ptr()
    with torch.no_grad():
        for t in (*net.parameters(), net.norm.running_mean):
            t.add_(1)
    posterior.write_mean(net)
    assert same(wanted, snapshot(net))
    assert net.scale.data_ptr() == address


def broken(posterior, how):
    mean, buffers = dict(posterior.mean), dict(posterior.buffers)
    if how == "missing":
        for name in ("scale", "nothing", "frozen.weight", "frozen.bias"):
            del mean[name]
    elif how == "unexpected":
        mean["extra.weight"] = torch.zeros(1)
        buffers["other"] = torch.zeros(1)
    elif how == "shape":
        mean["frozen.weight"] = torch.zeros(4, 5)
    elif how == "buffer":
        buffers["offset"] = torch.zeros(3)
    return PointMass(mean, buffers=buffers)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "the posterior lacks scale, nothing, frozen.weight and 1 more"),
        ("unexpected", "the model lacks extra.weight, buffer other"),
        ("shape", r"frozen.weight \(4, 5\) in the posterior, \(4, 4\) in the model"),
        ("buffer", r"offset \(3,\) in the posterior, \(4,\) in the model"),
    ],
)
@pytest.mark.parametrize("write", ["sampled", "write_mean"])
def test_another_model_is_refused_and_untouched(net, posterior, how, message, write):
    before = snapshot(net)
    with torch.no_grad():
        wrong = broken(PointMass({k: v + 1 for k, v in posterior.mean.items()}, buffers=posterior.buffers), how)

    def attempt():
        if write == "sampled":
            with wrong.sampled(net, generator()):
                pass
        else:
            wrong.write_mean(net)

    with pytest.raises(ValueError, match=message):
        attempt()
    assert same(before, snapshot(net))


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


class Compiled(nn.Module):
    """Named as torch.compile's module is, without the time it takes to import the compiler."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


def test_prefixes_of_wrappers(net):
    wrapped = Wrapper(Compiled(net))
    q = gaussian(wrapped)
    assert list(q.mean) == [name for name, _ in net.named_parameters()]
    by_hand = DiagonalGaussian(
        dict(wrapped.named_parameters()),
        {name: torch.ones_like(p) for name, p in wrapped.named_parameters()},
        buffers={"module._orig_mod.offset": net.offset},
        prior_precision={"module._orig_mod.scale": 2.0},
    )
    assert by_hand.prior_precision == {"scale": 2.0}
    assert list(by_hand.buffers) == ["offset"]
    for posterior in (q, by_hand):
        for model in (net, wrapped, Compiled(net)):
            with posterior.sampled(model, generator()):
                pass


def test_clean_names():
    assert clean_names([]) == {}
    assert clean_names(["a._orig_mod.w"]) == {"a._orig_mod.w": "a.w"}
    assert clean_names(["module.a", "head"]) == {"module.a": "module.a", "head": "head"}  # a layer, not a wrapper


def test_preserved_restores_everything(net):
    before = snapshot(net)
    with preserved(net), torch.no_grad():
        for t in (*net.parameters(), *net.buffers()):
            t.zero_()
    assert same(before, snapshot(net))


# ---------------------------------------------------------------- files


def equal(a, b):
    (groups_a, settings_a), (groups_b, settings_b) = a._contents(), b._contents()
    return (
        type(a) is type(b)
        and settings_a == settings_b
        and groups_a.keys() == groups_b.keys()
        and all(same(groups_a[k], groups_b[k]) for k in groups_a)
    )


def test_round_trip(posterior, tmp_path):
    path = tmp_path / "posterior.safetensors"
    posterior.save(path)
    for loaded in (type(posterior).load(path), load_posterior(str(path))):
        assert equal(posterior, loaded)
        assert same(posterior.sample(generator()), loaded.sample(generator()))
        assert torch.equal(posterior.entropy(), loaded.entropy())
    assert os.listdir(tmp_path) == ["posterior.safetensors"]
    keys = {key.partition("/")[0] for key in load_file(path)}
    assert {"mean", "buffer"} <= keys <= {"mean", "std", "variance", "deviation", "buffer"}


def test_round_trip_of_awkward_tensors(tmp_path):
    base = torch.randn(4, 6, generator=generator())
    mean = {
        "bf16": base.bfloat16(),
        "transposed": base.T,
        "strided": base[:, ::2],
        "expanded": base[:1].expand(5, 6),
        "scalar": torch.tensor(2.0),
        "empty": torch.zeros(0, 3),
        "double": base.double() / 3,
    }
    q = DiagonalGaussian(mean, {name: t.abs().float() for name, t in mean.items()}, prior_precision=0.1)
    q.mean["alias"] = q.mean["strided"][1:]  # memory that two tensors share
    q.std["alias"] = q.std["strided"][1:]
    q.save(tmp_path / "q")
    assert equal(q, DiagonalGaussian.load(tmp_path / "q"))


def test_others_may_read_the_file(tmp_path, posterior):
    old = os.umask(0o022)
    try:
        posterior.save(tmp_path / "q")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "q").stat().st_mode) == 0o644


def rewritten(path, **metadata):
    """The file with other metadata and its right checksum, which anybody can compute; None removes an entry."""
    entries = {"format": "bsam.posterior", "version": "2", "kind": "point", "settings": "{}", **metadata}
    entries = {key: value for key, value in entries.items() if value is not None}
    tensors = load_file(path)
    save_file(tensors, path, {"sha256": checksum(tensors, entries), **entries})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"format": None}, r"format=None: expected 'bsam\.posterior'"),
        ({"format": "pt"}, "format='pt'"),
        ({"version": "3"}, "version='3': this bsam reads version '2'"),
        ({"sha256": "0" * 64}, "is damaged: its contents do not match its checksum"),
        ({"kind": "swag"}, "kind='swag': expected 'diagonal_gaussian' or 'low_rank_gaussian' or 'point'"),
        ({"settings": None}, "settings"),
        ({"settings": "{"}, "do not make sense"),
        ({"settings": "[]"}, "dictionary"),
        ({"settings": "[" * 100_000}, "do not make sense"),
        ({"kind": "diagonal_gaussian"}, "prior_precision"),
        ({"kind": "diagonal_gaussian", "settings": '{"prior_precision": 1}'}, "std must have the names"),
    ],
)
def test_other_files_are_refused(net, tmp_path, metadata, message):
    path = tmp_path / "q.safetensors"
    PointMass.from_model(net).save(path)
    rewritten(path, **metadata)
    with pytest.raises(ValueError, match=message) as caught:
        load_posterior(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("precision", ["1", None, -1.0, {"scale": math.nan}, {"scale": True}, {"nobody": 1.0}])
def test_hostile_settings(net, tmp_path, precision):
    path = tmp_path / "q"
    gaussian(net).save(path)
    rewritten(path, kind="diagonal_gaussian", settings=json.dumps({"prior_precision": precision}))
    if precision is None:
        assert load_posterior(path).prior_precision == {}
    else:
        with pytest.raises(ValueError, match="prior_precision") as caught:
            load_posterior(path)
        assert str(path) in str(caught.value)


def test_kinds_do_not_mix(net, tmp_path):
    PointMass.from_model(net).save(tmp_path / "q")
    with pytest.raises(ValueError, match="kind='point': expected 'diagonal_gaussian'"):
        DiagonalGaussian.load(tmp_path / "q")


def test_torn_files(posterior, tmp_path):
    path = tmp_path / "q"
    posterior.save(path)
    whole = path.read_bytes()
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="not a complete one") as caught:
            load_posterior(path)
        assert str(path) in str(caught.value)
    path.write_bytes(b"\xff" * 4096)
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_posterior(path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_posterior(tmp_path / "nowhere")


@pytest.mark.parametrize("function", ["replace", "fsync", "chmod"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failed_write_leaves_the_old_file(net, tmp_path, monkeypatch, function, error):
    path = tmp_path / "q"
    old = gaussian(net)
    old.save(path)

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        with pytest.raises(error):
            old.temper(2.0).save(path)
    assert os.listdir(tmp_path) == ["q"]
    assert equal(old, load_posterior(path))
    old.temper(2.0).save(path)
    assert equal(old.temper(2.0), load_posterior(path))


def test_folder_must_exist(posterior, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        posterior.save(tmp_path / "no" / "q")
