"""Suggested settings are those of the conversions, and every one has its reason."""

import pytest
import torch
from torch import nn

import bsam


def made_with(settings, parameters):
    """The options of a bSAM with the suggested keywords, apart from its parameters."""
    return {
        name: value for name, value in bsam.BSAM(parameters, **settings).param_groups[0].items() if name != "params"
    }


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}),
        ("adamw", {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    ],
)
def test_the_line_makes_the_optimizer_of_the_conversion(source, line):
    parameters = [nn.Parameter(torch.zeros(7, 10))]
    suggestion = bsam.suggest(**{source: line}, num_data=600)
    convert = getattr(bsam.BSAM, f"from_{source}")
    expected = convert(parameters, **line, num_data=600).param_groups[0]
    suggested = made_with(suggestion.settings, parameters)
    assert suggested.pop("prior_precision") == pytest.approx(expected["prior_precision"])
    assert all(expected[name] == value for name, value in suggested.items())
    text, _, reasons = str(suggestion).partition("\n\n")
    evaluated = eval(text, {"bsam": bsam, "model": nn.Linear(3, 2)}).param_groups[0]
    assert evaluated["lr"] == pytest.approx(expected["lr"], rel=1e-3)
    assert evaluated["betas"] == expected["betas"]
    assert len(reasons.splitlines()) == len(suggestion.settings) == len(suggestion.reasons)
    assert all(reason.endswith(".") for reason in suggestion.reasons.values())


def test_settings_that_are_missing_are_those_of_torch():
    parameters = [nn.Parameter(torch.zeros(2))]
    for source, optimizer in (("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)):
        group = optimizer(parameters).param_groups[0]
        names = ("lr", "weight_decay", "momentum" if source == "sgd" else "betas")
        line = {name: group[name] for name in names}
        short, whole = (bsam.suggest(**{source: given}, num_data=10) for given in ({}, line))
        assert short.settings == whole.settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give either sgd="),
        ({"sgd": {}, "adamw": {}}, "give either sgd="),
        ({"sgd": {"nesterov": True}}, "nesterov of SGD has no counterpart"),
        ({"sgd": {"lr": 0.0}}, "lr=0.0 must be a finite number > 0"),
        ({"sgd": {"momentum": 1.0}}, "momentum=1.0 must lie in"),
        ({"sgd": {}, "num_data": 0}, "num_data=0"),
    ],
)
def test_what_cannot_be_converted_is_an_error(given, message):
    with pytest.raises(ValueError, match=message):
        bsam.suggest(**{"num_data": 100, **given})
