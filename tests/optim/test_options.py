"""Every rule of the options: what it accepts, and what it says of what it refuses."""

import math

import numpy as np
import pytest
import torch

from bsam.optim import options

NUMBERS = [1, 0.5, np.float32(0.5), torch.tensor(0.5)]
NOT_NUMBERS = [("0.5", "must be a number, not str"), (None, "not NoneType"), (True, "not bool"), ([0.5], "not list")]


@pytest.mark.parametrize("rule", [options.non_negative, options.positive])
def test_numbers(rule):
    for value in NUMBERS:
        rule("rho", value)
    for value in (-0.5, math.nan, math.inf, torch.tensor(-1.0), 10**400):
        with pytest.raises(ValueError, match=r"^rho=.* must be a finite number >=? 0\. Write 0\.1\.$"):
            rule("rho", value, "Write 0.1.")
    for value, message in NOT_NUMBERS:
        with pytest.raises(TypeError, match=message):
            rule("rho", value)


def test_zero_is_not_positive():
    options.non_negative("rho", 0.0)
    with pytest.raises(ValueError, match=r"num_data=0\.0 must be a finite number > 0\.$"):
        options.positive("num_data", 0.0)


def test_tensors_are_numbers_if_they_have_no_dimensions():
    with pytest.raises(ValueError, match=r"Tensor rho must be 1-element, not of shape \(2,\)"):
        options.non_negative("rho", torch.ones(2))
    with pytest.raises(ValueError, match=r"rho is a tensor of shape \(1,\): write a number"):
        options.non_negative("rho", torch.ones(1))
    options.non_negative("lr", torch.ones(1))  # as torch's optimizers
    with pytest.raises(ValueError, match=r"lr is a tensor of shape \(1, 1\)"):
        options.non_negative("lr", torch.ones(1, 1))


def test_the_prior_is_given_in_one_of_two_ways():
    assert options.prior(3.0, None, 50, 2.0) == 3.0
    assert options.prior(None, 0.02, 50, 2.0) == 0.02 * 100
    assert options.prior(None, None, 50, 2.0) is None
    assert options.prior(None, None, 50, 2.0, default=25.0) == 25.0
    assert options.prior(0.0, None, 50, 2.0, default=25.0) == 0.0
    with pytest.raises(ValueError, match=r"prior_precision=3\.0 and weight_decay=0\.02 say the same thing"):
        options.prior(3.0, 0.02, 50, 2.0)
    with pytest.raises(ValueError, match="weight_decay=-1"):
        options.prior(None, -1, 50, 2.0)
    with pytest.raises(ValueError, match="num_data=0"):
        options.prior(None, 0.1, 0, 1.0)


def test_betas():
    for value in ((0.9, 0.999), [0.0, 0.0], (torch.tensor(0.9), 0.5)):
        options.betas(value)
    for value in (0.9, (0.9,), (0.9, 0.9, 0.9), None):
        with pytest.raises(ValueError, match=r"must be a pair of numbers in \[0, 1\)"):
            options.betas(value)
    for value in ((1.0, 0.9), (0.9, -0.1), (math.nan, 0.9)):
        with pytest.raises(ValueError, match=r"must both lie in \[0, 1\)"):
            options.betas(value)


def test_counts_and_integers():
    options.count("splits", 1)
    for value in (0, -1, 2.0, True, "2", None):
        with pytest.raises(ValueError, match=r"^splits=.* must be an integer >= 1\. Write 1\.$"):
            options.count("splits", value, "Write 1.")
    for value in (0, -5, 2**63 - 1, -(2**63)):
        options.integer("seed", value)
    for value in (0.0, False, 2**63, None):
        with pytest.raises(ValueError, match=r"^seed=.* must be an integer of at most 64 bits"):
            options.integer("seed", value)


def test_choices():
    for value in (True, False, None):
        options.one_of("vectorise", value, (True, False, None))
    with pytest.raises(ValueError, match=r"^curvature='mean' must be one of 'mean_abs', 'abs_mean'\.$"):
        options.one_of("curvature", "mean", ("mean_abs", "abs_mean"))
