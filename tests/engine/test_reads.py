"""What a loss function reads, and a compiled step whose loss function reads something new."""

import enum
import functools
import math
import shutil
import weakref
from collections import OrderedDict
from types import FunctionType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import bsam
from bsam.engine.reads import change, differing, values_read

SCALE = 2.0


def helper(x):
    return SCALE * x


class Criterion:
    """Has a number of its own, one of its class, and slots."""

    __slots__ = ("empty", "weight")
    shared = 3.0

    def __init__(self):
        self.weight = 0.5

    @property
    def secret(self):
        raise AssertionError("code of the user is not run")

    def __call__(self, x):
        return self.weight * self.shared * x if self.weight else self.secret + self.empty

    def loss(self, x):
        return self(x)


class Proxy:
    def __getattr__(self, name):
        raise KeyError(name)


def read(*functions):
    return {name.partition(".")[2]: value for name, value in values_read(functions).items()}


def test_places_of_closures_globals_attributes_and_items(monkeypatch):
    settings = SimpleNamespace(loss=SimpleNamespace(weight=0.5, loss=2.0), epoch=0)
    terms, layer = {"kl": 0.1, "epoch": 0, "of": (torch.ones(2), "mean")}, nn.Linear(2, 2)

    def loss_fn(x, y=3, *, factor=settings):
        weighted = settings.loss.weight * layer(helper(x)).loss
        return weighted + terms["kl"] + terms["of"][0] + sum(SCALE * p for p in x) + math.pi * y + factor.epoch

    before = read(loss_fn)
    assert {name: value for name, value in before.items() if not isinstance(value, FunctionType)} == {
        "settings.loss.weight": 0.5,
        "layer": layer,
        "helper: SCALE": 2.0,
        "terms['kl']": 0.1,
        "terms['of'][0]": terms["of"][0],
        "SCALE": 2.0,
        "math.pi": math.pi,
        "y": 3,
        "factor.epoch": 0,
    }
    terms["epoch"] = settings.loss.loss = 1  # nothing reads these
    terms["of"][0].fill_(5.0)  # the same tensor, which a compiled step reads
    assert differing(before, read(loss_fn)) == []
    settings.loss.weight = 1.0
    terms["of"] = (torch.ones(2), "mean")
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert set(differing(before, read(loss_fn))) == {"settings.loss.weight", "terms['of'][0]", "SCALE", "helper: SCALE"}
    monkeypatch.setitem(globals(), "helper", lambda x: x)
    assert "helper" in differing(before, read(loss_fn))


def test_a_global_that_is_named_like_an_attribute_is_not_read(monkeypatch):
    layer = nn.Linear(2, 2)
    before = read(lambda x: layer(x).SCALE)
    assert before == {"layer": layer}


def test_methods_objects_partial_functions_and_slots():
    criterion = Criterion()
    scaled = functools.partial(lambda x, factor: factor * criterion(x), factor=2.0)
    before = read(lambda x: criterion.loss(x) + scaled(x), criterion.loss, criterion)
    criterion.weight = 4.0
    found = differing(before, read(lambda x: criterion.loss(x) + scaled(x), criterion.loss, criterion))
    assert found == ["criterion: self.weight"]
    criterion.weight = 0.5
    before = read(scaled)
    assert before["partial['factor']"] == 2.0
    scaled.keywords["factor"] = 5.0
    assert differing(before, read(scaled)) == ["partial['factor']"]
    Criterion.shared, shared = 1.0, Criterion.shared
    assert differing(before, read(scaled))[-1].endswith("self.shared")
    Criterion.shared = shared


def test_what_cannot_be_read_is_passed_over():
    proxy, keyed = Proxy(), {torch.ones(2): 1.0}

    def outer():
        def inner():
            return value + unknown + proxy.weight + proxy["a"] + keyed[0] + keyed[[]] + math.nothing  # noqa: F821

        assert read(inner) == {}  # the cell of value is empty
        value = 1
        return inner

    assert read(outer()) == {"value": 1}
    assert read(len, nn.CrossEntropyLoss(), nn.functional.cross_entropy) == {}
    assert differing({"a": math.nan, "b": 1, "c": 0}, {"a": math.nan, "b": True}) == ["b"]


class Switch(enum.Enum):
    ON, OFF = 1, 2


class Config(NamedTuple):
    weight: float
    switch: Switch


class Base:
    weight, penalty = 1.0, 0.5

    def loss(self, x):
        """Its `self` is read by a generator, too."""
        return self.weight * x + sum(self.penalty * p for p in x) + self.fixed(x) + self.named(x)

    @staticmethod
    def fixed(x):
        return SCALE * x

    @classmethod
    def named(cls, x):
        return cls.penalty * x


class Around:
    def __init__(self, weight, inner):
        self.weight, self.inner = weight, inner

    def __call__(self, x):
        return self.weight * self.inner(x)


def test_variables_that_functions_inside_share():
    def loss_fn(x, scale=2.0):
        return scale * x + sum(scale * p for p in x)

    assert read(loss_fn) == {"scale": 2.0}
    found = read(Base().loss)
    assert found.pop("self.fixed: SCALE") == found.pop("self.named: cls.penalty") * 4 == 2.0
    assert found == {"self.weight": 1.0, "self.penalty": 0.5, "self.fixed": Base.fixed}


def test_closures_of_one_function_and_objects_in_objects_are_told_apart():
    def term(settings):
        return lambda x: settings.weight * x

    one, two = SimpleNamespace(weight=1.0), SimpleNamespace(weight=2.0)
    first, second = term(one), term(two)
    before = read(lambda x: first(x) + second(x))
    two.weight = 3.0
    assert differing(before, read(lambda x: first(x) + second(x))) == ["second: settings.weight"]
    nested = Around(1.0, Around(2.0, Around(3.0, helper)))
    before = read(nested)
    nested.inner.inner.weight = 5.0
    assert differing(before, read(nested)) == ["self.inner: self.inner: self.weight"]


def test_decorators_of_torch_are_looked_through():
    settings = SimpleNamespace(weight=1.0)

    @torch.enable_grad()
    def loss_fn(x):
        return settings.weight * x

    assert read(loss_fn) == {"settings.weight": 1.0}


def test_items_and_fields_of_subclasses():
    config, terms = Config(2.0, Switch.ON), OrderedDict(kl=0.1)
    found = read(lambda x: config.weight * x if config.switch is Switch.ON else terms["kl"])
    assert {"config.weight": 2.0, "config.switch": Switch.ON, "terms['kl']": 0.1}.items() <= found.items()


def test_objects_that_raise_when_they_are_looked_at():
    class Gone:
        weight = 1.0

    class Criterion(nn.Module):
        def named_parameters(self, prefix=""):
            raise AssertionError("code of the user is not run")

    proxy, criterion = weakref.proxy(Gone()), Criterion()
    criterion.scale = nn.Parameter(torch.ones(1))
    assert read(lambda x: proxy.weight * proxy + criterion.scale) == {
        "criterion": criterion,
        "criterion.scale": criterion.scale,
    }


def test_a_function_with_many_names():
    """Numbers of names above 255 take two instructions."""
    names = [f"n{i}" for i in range(300)]
    found = {name: SimpleNamespace(weight=i) for i, name in enumerate(names)}
    exec("def loss_fn():\n    return " + " + ".join(f"{name}.weight" for name in names), found)
    assert read(found["loss_fn"]) == {f"{name}.weight": i for i, name in enumerate(names)}


def test_functions_that_call_each_other_are_followed_once():
    def even(n):
        return n == 0 or odd(n - 1, SCALE)

    def odd(n, scale):
        return n != 0 and even(n - 1)

    assert read(even)["SCALE"] == 2.0


def test_changes_are_said_without_reading_a_tensor():
    assert change("0.a.b", 1.0, 2.0) == "a.b, which was 1.0 when the TrainStep was made, and is 2.0 now"
    assert change("0.a", torch.ones(1), torch.ones(1)) == "a, which is another Tensor than when the TrainStep was made"


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    optimizer = bsam.BSAM(model.parameters(), num_data=16, module=model, splits=2)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
    settings = {"weight": 1.0, "calls": 0}

    def loss_fn(x, y):
        settings["calls"] += 1
        return settings["weight"] * nn.functional.cross_entropy(model(x), y)

    return model, optimizer, settings, loss_fn, (x, y)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("compile", [True, False])
def test_a_step_follows_a_number_that_the_loss_function_reads(compile):
    model, optimizer, settings, loss_fn, batch = problem()
    twin = problem()
    step = bsam.TrainStep(optimizer, loss_fn, batch, compile=compile)

    def both():
        torch.testing.assert_close(step(*batch), twin[1].step(twin[3], *twin[4]))

    both()
    settings["weight"] = twin[2]["weight"] = 10.0
    if compile:
        with pytest.warns(UserWarning, match=r"reads settings\['weight'\], which was 1.0 .* and is 10.0 now"):
            both()
        both()  # one warning is enough
        calls = settings["calls"]
        settings["weight"] = twin[2]["weight"] = 1.0
        both()
        assert settings["calls"] == calls  # compiled again: the loss function was not called
    else:
        both()
    for a, b in zip(model.parameters(), twin[0].parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_loss_function_may_count_its_calls():
    _, optimizer, settings, loss_fn, (x, y) = problem()
    step = bsam.TrainStep(optimizer, loss_fn, (x, y))
    step(x[:4], y[:4])  # the loop calls the loss function
    calls = settings["calls"]
    step(x, y)
    assert settings["calls"] == calls


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_buffer_that_is_replaced_is_taken_in():
    model = nn.Linear(4, 3)
    model.register_buffer("temperature", torch.ones(()))
    optimizer = bsam.BSAM(model.parameters(), num_data=16, module=model, lr=0.0, rho=0.0, max_noise=1e-9)
    x, calls = torch.randn(8, 4), []

    def loss_fn(x):
        calls.append(1)
        return (model(x) * model.temperature).square().mean()

    step = bsam.TrainStep(optimizer, loss_fn, (x,))
    before, count = step(x), len(calls)
    model.temperature = torch.tensor(3.0)
    torch.testing.assert_close(step(x), 9 * before)
    assert len(calls) == count  # no loop


def test_a_step_follows_a_layer_that_is_replaced():
    model, optimizer, _, loss_fn, batch = problem()
    twin = problem()
    step = bsam.TrainStep(optimizer, loss_fn, batch, compile=False)
    model[1], twin[0][1] = nn.Tanh(), nn.Tanh()
    torch.testing.assert_close(step(*batch), twin[1].step(twin[3], *twin[4]))
    for a, b in zip(model.parameters(), twin[0].parameters(), strict=True):
        torch.testing.assert_close(a, b)
