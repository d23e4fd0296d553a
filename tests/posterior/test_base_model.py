"""Posteriors of the trained parameters alone, for a base model, and other names."""

import json
import os

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

import bsam
from bsam.posterior import DiagonalGaussian, LowRankGaussian, PointMass, load_posterior
from bsam.posterior.base_model import FrozenWeights, new_names
from bsam.torch_private import version_of
from tests.posterior.kinds import KINDS, generator, make_net, same, snapshot
from tests.posterior.test_base import equal, rewritten

WIDTH = 64


class Adapted(nn.Module):
    """A frozen layer with a low-rank correction beside it, under PEFT's names."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, layer.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Wrapper(nn.Module):
    """Puts a prefix before all names, as a trainer's module does."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


def adapted(seed=0, adapter=1):
    """A base model, the same for a seed, with fresh adapters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        torch.manual_seed(adapter)
        body = [layer for base in layers for layer in (Adapted(base), nn.BatchNorm1d(WIDTH, affine=False), nn.Tanh())]
        return nn.Sequential(*body)


def trained():
    """A posterior of bSAM, of the adapters alone."""
    model = adapted()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = bsam.BSAM(trainable, lr=0.05, num_data=100, betas=(0.9, 0.5), prior_precision=1.0)
    x = torch.randn(50, WIDTH, generator=generator(1))
    for _ in range(5):
        optimizer.step(lambda x: F.mse_loss(model(x), x), x)
    return model.eval(), optimizer.posterior(model)


def inputs(n=6):
    return torch.randn(n, WIDTH, generator=generator(2))


# ---------------------------------------------------------------- what is kept


def test_what_is_frozen_is_known():
    model, q = trained()
    names = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert q.frozen == names
    assert all("base_layer" in name for name in names)
    assert q.temper(2.0).frozen == q.to("cpu").frozen == names
    assert PointMass.from_model(model).frozen == names
    assert PointMass({name: p.detach() for name, p in model.named_parameters()}).frozen == frozenset()  # not known
    swag = bsam.SWAG(model, interval=1)
    for _ in range(3):
        swag.step()
    assert swag.posterior().frozen == names


def test_what_is_sampled_or_trained_is_not_frozen():
    model = adapted()
    model[0].base_layer.bias.requires_grad_(True)  # trained, but a point: it is not in the base model
    a, b = model[0].lora_A["default"].weight, model[0].base_layer.weight
    q = DiagonalGaussian.from_model(model, {a: torch.ones_like(a), b: torch.ones_like(b)})
    assert "0.base_layer.bias" not in q.frozen
    assert "0.base_layer.weight" not in q.frozen  # sampled, whatever the flag says
    kept = q.without_frozen()
    assert {"0.base_layer.bias", "0.base_layer.weight", "0.lora_A.default.weight"} <= set(kept.mean)


def test_without_frozen(tmp_path):
    model, q = trained()
    kept = q.without_frozen()
    assert set(kept.mean) == set(q.mean) - q.frozen
    assert set(kept.base) == q.frozen
    assert kept.frozen == frozenset()
    assert same(kept.buffers, q.buffers)  # BatchNorm's statistics have moved
    assert kept.sampled_names == q.sampled_names
    assert same(kept.sample(generator()), {name: t for name, t in q.sample(generator()).items() if name in kept.mean})
    for number in ("kl", "entropy"):
        torch.testing.assert_close(getattr(kept, number)(), getattr(q, number)())
    torch.testing.assert_close(
        kept.log_prob(kept.sample(generator())), q.log_prob(q.sample(generator())), rtol=1e-12, atol=1e-9
    )
    assert kept.without_frozen() is kept
    assert kept.temper(2.0).base == kept.base
    assert kept.num_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind, tmp_path):
    net = make_net()
    q = KINDS[kind](net)
    assert q.frozen == {"frozen.weight", "frozen.bias"}
    q.save(tmp_path / "all")
    assert equal(load_posterior(tmp_path / "all"), q)
    q.save(tmp_path / "trained", frozen=False)
    loaded = load_posterior(tmp_path / "trained", model=net)
    assert equal(loaded, q.without_frozen())
    assert type(q).load(tmp_path / "trained", model=net).base.keys() == {"frozen.weight", "frozen.bias"}
    assert same({n: q.sample(generator(3))[n] for n in loaded.mean}, loaded.sample(generator(3)))
    loaded.save(tmp_path / "again")
    assert equal(load_posterior(tmp_path / "again"), loaded)


def test_all_frozen():
    model = adapted().requires_grad_(False)
    with pytest.raises(ValueError, match="all parameters of the posterior are frozen"):
        PointMass.from_model(model).without_frozen()


def test_nothing_is_frozen(tmp_path):
    q = PointMass.from_model(nn.Linear(2, 2))
    assert q.without_frozen() is q
    q.save(tmp_path / "q", frozen=False)
    assert equal(load_posterior(tmp_path / "q"), q)


def test_arguments_that_contradict_the_mean():
    mean, std = {"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": torch.ones(2), "b": torch.zeros(2)}
    for frozen in (["a"], ["c"]):
        with pytest.raises(ValueError, match="is not in the mean, or is sampled"):
            DiagonalGaussian(mean, std, frozen=frozen)
    assert DiagonalGaussian(mean, std, frozen=["b"]).frozen == {"b"}
    with pytest.raises(ValueError, match="base has b, which is in the mean"):
        PointMass(mean, base={"b": FrozenWeights((2,), 0.0, 0.0)})


# ---------------------------------------------------------------- files


def test_a_file_is_about_as_small_as_the_adapter(tmp_path):
    model, q = trained()
    q.save(tmp_path / "all")
    q.save(tmp_path / "trained", frozen=False)
    adapter = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    size = os.path.getsize(tmp_path / "trained")
    assert size < 2 * adapter + buffers + 6000  # mean, std, and names
    assert os.path.getsize(tmp_path / "all") > 5 * size


def test_loaded_onto_a_base_model(tmp_path):
    model, q = trained()
    q.save(tmp_path / "q", frozen=False)
    wanted = bsam.predict(model, q, inputs(), num_samples=4, recalibrate=False)
    base = adapted(adapter=7).train()  # the same base, other adapters
    loaded = load_posterior(tmp_path / "q", model=base)
    before = snapshot(base)
    for vectorise in (True, False):
        found = bsam.predict(base, loaded, inputs(), num_samples=4, vectorise=vectorise, recalibrate=False)
        torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=0, atol=1e-6)
    assert same(before, snapshot(base))
    predictor = bsam.Predictor(base, loaded, num_samples=4, recalibrate=False)
    torch.testing.assert_close(predictor(inputs())["probs"], wanted.probs, rtol=0, atol=1e-6)
    loaded.write_mean(base)
    assert same(dict(base.named_parameters()), q.mean)


def test_samples_switch_only_the_trained_weights():
    model, q = trained()
    kept = q.without_frozen()
    frozen = {name: p for name, p in model.named_parameters() if name in q.frozen}
    versions, before = {name: version_of(p) for name, p in frozen.items()}, snapshot(model)
    with kept.sampled(model, generator()):
        assert not torch.equal(model[0].lora_A["default"].weight, before["0.lora_A.default.weight"])
        with kept.sampled(model, generator(1)):
            pass
    bsam.predict(model, kept, inputs(), num_samples=2, recalibrate=False)
    kept.write_mean(model)
    assert {name: version_of(p) for name, p in frozen.items()} == versions  # never written, not even restored
    with pytest.raises(RuntimeError), kept.sampled(model, generator()):
        raise RuntimeError
    assert same(before, snapshot(model))
    optimizer = bsam.BSAM([p for p in model.parameters() if p.requires_grad], num_data=10)
    with kept.sampled(model, generator()), pytest.raises(RuntimeError, match="sample"):
        optimizer.step(lambda: model(inputs()).sum())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m[0].base_layer.register_parameter("bias", None), r"the model lacks 0\.base_layer\.bias"),
        (lambda m: setattr(m[3], "base_layer", nn.Linear(WIDTH, 3)), r"3\.base_layer\.weight \(64, 64\) in the post"),
        (lambda m: m.append(nn.Linear(2, 2)), r"the posterior lacks 12\.weight, 12\.bias"),
        (lambda m: setattr(m[0], "lora_A", nn.ModuleDict()), r"the model lacks 0\.lora_A\.default\.weight"),
    ],
)
def test_a_base_model_that_does_not_fit(change, message, tmp_path):
    _, q = trained()
    q.save(tmp_path / "q", frozen=False)
    base = adapted()
    change(base)
    before = snapshot(base)
    with pytest.raises(ValueError, match=message):
        load_posterior(tmp_path / "q", model=base)
    loaded = load_posterior(tmp_path / "q")  # every use checks it too
    with pytest.raises(ValueError, match=message), loaded.sampled(base, generator()):
        pass
    with pytest.raises(ValueError, match=message):
        bsam.predict(base, loaded, inputs())
    assert same(before, snapshot(base))


def test_a_base_model_with_other_weights(tmp_path):
    _, q = trained()
    q.save(tmp_path / "q", frozen=False)
    with pytest.raises(ValueError, match=r"not those that the posterior was trained with: 0\.base_layer\.\w+"):
        load_posterior(tmp_path / "q", model=adapted(seed=3))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        load_posterior(tmp_path / "q", model=adapted().to(dtype))
    q.save(tmp_path / "all")
    load_posterior(tmp_path / "all", model=adapted(seed=3))  # a complete posterior has its own
    with pytest.raises(ValueError, match="does not fit the model"):
        load_posterior(tmp_path / "all", model=nn.Linear(2, 2))


def test_a_layer_called_module_is_no_wrapper(tmp_path):
    """Here all names that are left begin with `module.`, which is a wrapper's prefix only if all names have it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)

    for make in (
        lambda net: DiagonalGaussian.from_model(net, {net.module.weight: torch.ones(2, 2)}, prior_precision=2.0),
        PointMass.from_model,
        lambda net: LowRankGaussian(
            dict(net.named_parameters()),
            {"module.weight": torch.ones(2, 2)},
            {"module.weight": torch.ones(2, 2, 2)},
            prior_precision=2.0,
        ),
    ):
        net = Net()
        make(net).save(tmp_path / "q", frozen=False)
        loaded = load_posterior(tmp_path / "q", model=net)
        assert set(loaded.mean) == {"module.weight", "module.bias"}
        with loaded.sampled(net, generator()):
            pass


@pytest.mark.parametrize(
    "settings",
    [
        {"base": [1]},
        {"base": {"x": 3}},
        {"base": {"x": [[2], "a", 1.0]}},
        {"base": {"x": [[-1], 0.0, 1.0]}},
        {"base": {"scale": [[], 0.0, 1.0]}},
        {"frozen": 3},
        {"frozen": [3]},
        {"frozen": ["nobody"]},
    ],
)
def test_hostile_settings(settings, tmp_path):
    path = tmp_path / "q"
    PointMass.from_model(make_net()).save(path)
    rewritten(path, kind="point", settings=json.dumps(settings))
    with pytest.raises(ValueError, match="do not make sense") as caught:
        load_posterior(path)
    assert str(path) in str(caught.value)


def test_a_file_of_a_posterior_without_frozen_parameters_is_as_before(tmp_path):
    model = nn.Linear(2, 2)
    DiagonalGaussian.from_model(model, {model.weight: torch.ones(2, 2)}).save(tmp_path / "q")
    with safe_open(tmp_path / "q", "pt") as file:
        assert json.loads(file.metadata()["settings"]) == {"prior_precision": {}}


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("rename", [{"model.": ""}, lambda name: name.removeprefix("model.")])
def test_a_wrapper_is_taken_away(rename, tmp_path):
    model, q = trained()
    wrapped = PointMass.from_model(Wrapper(model)), optimizer_posterior(Wrapper(model))
    for posterior in wrapped:
        with pytest.raises(ValueError, match=r"does not fit.*rename them: posterior\.renamed"):
            posterior.write_mean(model)
        for frozen in (True, False):
            posterior.save(tmp_path / "q", frozen=frozen)
            loaded = load_posterior(tmp_path / "q", model=model, rename=rename)
            assert set(loaded.mean) | set(loaded.base) == set(q.mean)
            loaded.write_mean(model)
            assert equal(loaded.renamed({"": "model."}), type(posterior).load(tmp_path / "q"))


def optimizer_posterior(model):
    widths = {p: torch.full_like(p, 0.1) for p in model.parameters() if p.requires_grad}
    return DiagonalGaussian.from_model(model, widths, prior_precision=2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_gets_the_new_names(kind):
    net = make_net()
    q = KINDS[kind](net)
    renamed = q.renamed({"": "a."})
    assert set(renamed.mean) == set(renamed.std) == {f"a.{name}" for name in q.mean}
    assert set(renamed.buffers) == {f"a.{name}" for name in q.buffers}
    assert renamed.frozen == {"a.frozen.weight", "a.frozen.bias"}
    assert same({f"a.{name}": t for name, t in q.sample(generator()).items()}, renamed.sample(generator()))
    if kind != "point":
        torch.testing.assert_close(renamed.kl(), q.kl())
    assert equal(renamed.renamed(lambda name: name.removeprefix("a.")), q)
    assert set(renamed.without_frozen().base) == {"a.frozen.weight", "a.frozen.bias"}


def test_new_names():
    names = ["a.x", "a.y", "b.x"]
    assert new_names({"a.": "c.", "b.": ""}, names) == {"a.x": "c.x", "a.y": "c.y", "b.x": "x"}
    assert new_names({"a.x": "first", "a.": ""}, names) == {"a.x": "first", "a.y": "y", "b.x": "b.x"}
    with pytest.raises(ValueError, match=r"both a\.x and b\.x into x: names must stay different"):
        new_names({"a.": "", "b.": ""}, names)
    with pytest.raises(ValueError, match=r"the prefix 'd\.', but no name begins with it: a\.x"):
        new_names({"d.": ""}, names)
    with pytest.raises(TypeError, match="must return a string"):
        new_names(lambda name: None, names)
    with pytest.raises(TypeError, match="must be a function, or a mapping of prefixes"):
        new_names(3, names)


def test_weights_are_recognised():
    weights = torch.randn(30, 20, generator=generator())
    known = FrozenWeights.of(weights)
    assert known.shape == (30, 20)
    assert known.are_those_of(weights.bfloat16())
    assert not known.are_those_of(weights.T)
    assert not known.are_those_of(torch.randn(30, 20, generator=generator(1)))
    assert not known._replace(total=float("nan")).are_those_of(weights)
    assert FrozenWeights.of(torch.arange(3)).are_those_of(torch.arange(3))
    assert FrozenWeights.of(torch.zeros(3)).are_those_of(torch.zeros(3))
