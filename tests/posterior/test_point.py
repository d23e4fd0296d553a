"""What is particular to a point; model and file are tested for all kinds in test_gaussian.py."""

import math

import pytest
import torch
from torch import nn

from bsam.posterior import DiagonalGaussian, PointMass


@pytest.fixture
def point():
    return PointMass({"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(0.5, dtype=torch.bfloat16)})


def test_samples_are_the_mean(point):
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    sample = point.sample(generator)
    assert all(torch.equal(sample[name], mean) for name, mean in point.mean.items())
    assert torch.equal(state, generator.get_state())
    with pytest.raises(TypeError, match="manual_seed"):
        point.sample(None)


def test_std_is_zero_and_costs_no_memory(point):
    assert {name: std.shape for name, std in point.std.items()} == {"w": (2,), "b": ()}
    assert all((std == 0).all() for std in point.std.values())
    assert point.std["w"].untyped_storage().nbytes() == 4
    assert point.sampled_names == []


def test_log_prob(point):
    assert point.log_prob(point.mean) == 0
    assert point.log_prob({**point.mean, "w": torch.tensor([1.0, 2.1])}) == -math.inf
    assert point.log_prob({**point.mean, "b": torch.tensor(0.5 + 1e-6)}) == -math.inf  # below bfloat16's precision
    with pytest.raises(ValueError, match="missing: b"):
        point.log_prob({"w": point.mean["w"]})


def test_entropy_and_kl(point):
    assert point.entropy() == -math.inf
    with pytest.raises(ValueError, match="infinite"):
        point.kl()


def test_temper(point):
    assert point.temper(3.0) is point
    with pytest.raises(ValueError, match="temperature=-1"):
        point.temper(-1)


def test_agrees_with_a_gaussian_without_width(point):
    gaussian = DiagonalGaussian(point.mean, point.std)
    elsewhere = {**point.mean, "w": torch.zeros(2)}
    for sample in (point.mean, elsewhere):
        assert torch.equal(point.log_prob(sample), gaussian.log_prob(sample))
    assert torch.equal(point.entropy(), gaussian.entropy())


def test_non_finite_mean_is_refused_but_not_a_buffer():
    mask = torch.tensor([0.0, -math.inf])
    assert torch.equal(PointMass({"w": torch.ones(1)}, buffers={"mask": mask}).buffers["mask"], mask)
    with pytest.raises(ValueError, match="mean of w is not finite"):
        PointMass({"w": mask})


def test_integer_parameters_are_kept():
    model = nn.Linear(2, 2)
    model.code = nn.Parameter(torch.tensor([1, 2], dtype=torch.int8), requires_grad=False)
    assert PointMass.from_model(model).mean["code"].dtype == torch.int8


def test_repr(point):
    assert repr(point) == "PointMass(3 parameters in 2 tensors)"
