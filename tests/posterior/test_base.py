"""Every kind of posterior in a model and in its file."""

import json
import math
import os
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bsam.files import checksum
from bsam.posterior import DiagonalGaussian, PointMass, load_posterior
from tests.posterior.kinds import gaussian, generator, same, snapshot


def test_samples_are_copies(posterior):
    before = {name: mean.clone() for name, mean in posterior.mean.items()}
    for tensor in posterior.sample(generator()).values():
        tensor.zero_()
    assert same(before, posterior.mean)


def test_to(posterior):
    assert posterior.to("cpu") is posterior


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


@pytest.mark.parametrize("function", ["replace", "fsync"])
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
