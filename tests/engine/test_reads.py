"""What a loss function reads, and a compiled step whose loss function reads something new."""

import functools
import math
import shutil

import pytest
import torch
from torch import nn

import bsam
from bsam.engine.reads import changed, values_read

SCALE = 2.0


def helper(x):
    return SCALE * x


class Settings:
    def __init__(self):
        self.weight, self.unused, self.history = 0.5, 1.0, [0.0] * 200


def test_values_of_closures_globals_and_attributes(monkeypatch):
    settings, terms, layer = Settings(), {"kl": 0.1, "of": (torch.ones(2), "mean")}, nn.Linear(2, 2)

    def loss_fn(x, y=3):
        return settings.weight * layer(helper(x)).sum() + terms["kl"] + math.pi * y

    read = values_read([loss_fn])
    by_name = {name.partition(".")[2]: value for name, value in read.items()}
    assert by_name["settings.weight"] == 0.5
    assert by_name["helper: SCALE"] == 2.0
    assert by_name["layer"] is layer
    assert by_name["terms['of'][0]"] is terms["of"][0]
    assert not [name for name in by_name if "unused" in name or "history" in name]
    assert changed(read, values_read([loss_fn])) is None
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert changed(read, values_read([loss_fn])) == ("helper: SCALE", 2.0, 3.0)
    monkeypatch.undo()
    terms["of"][0].fill_(5.0)  # the same tensor, which a compiled step reads
    assert changed(read, values_read([loss_fn])) is None
    terms["of"] = (torch.ones(2), "mean")
    name, old, new = changed(read, values_read([loss_fn]))
    assert name == "terms['of'][0]"
    assert old is not new
    settings.weight = 1
    settings.unused = 7
    assert {changed(read, values_read([loss_fn]))[0]} <= {"settings.weight", "terms['of'][0]"}


def test_values_of_methods_partial_functions_and_layers():
    class Objective:
        def __init__(self):
            self.beta = 0.1

        def loss(self, x):
            return self.beta * x

    objective, smoothed = Objective(), nn.CrossEntropyLoss(label_smoothing=0.1)
    scaled = functools.partial(lambda x, factor: factor * x, factor=2.0)
    read = values_read([objective.loss, smoothed, scaled])
    objective.beta = 0.2
    assert changed(read, values_read([objective.loss, smoothed, scaled])) == ("self.beta", 0.1, 0.2)
    objective.beta, smoothed.label_smoothing = 0.1, 0.3
    assert changed(read, values_read([objective.loss, smoothed, scaled])) == ("loss_fn.label_smoothing", 0.1, 0.3)
    smoothed.label_smoothing, scaled.keywords["factor"] = 0.1, 4.0
    assert changed(read, values_read([objective.loss, smoothed, scaled])) == ("args[0]['factor']", 2.0, 4.0)


def test_what_cannot_be_read_is_passed_over():
    def later():
        return unknown  # noqa: F821

    def outer():
        def inner():
            return value

        assert values_read([inner]) == {}  # its cell is empty
        value = 1
        return inner

    assert values_read([outer()]) == {"0.value": 1}
    assert values_read([later, len]) == {}
    assert changed({"0.a": math.nan}, {"0.a": math.nan}) is None
    assert changed({}, {"0.a": 1}) == ("a", None, 1)
    assert changed({"0.a": 1}, {"0.a": True}) == ("a", 1, True)


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
        settings["calls"] = step._read["0.settings['calls']"]
        both()
        assert settings["calls"] < calls  # compiled again: the loss function was not called
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


def test_a_step_follows_a_layer_that_is_replaced():
    model, optimizer, _, loss_fn, batch = problem()
    twin = problem()
    step = bsam.TrainStep(optimizer, loss_fn, batch, compile=False)
    model[1], twin[0][1] = nn.Tanh(), nn.Tanh()
    torch.testing.assert_close(step(*batch), twin[1].step(twin[3], *twin[4]))
    for a, b in zip(model.parameters(), twin[0].parameters(), strict=True):
        torch.testing.assert_close(a, b)
