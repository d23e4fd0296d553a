import numpy as np
import pytest
import torch

from bsam.theory.losses import (
    Loss,
    Majorant,
    from_torch,
    logistic_regression,
    murphy_data,
    quadratic,
    separable_data,
    three_minima,
)

from .problems import two_dimensional, wavy

H = np.array([[2.0, 0.5], [0.5, 1.0]])
LOSSES = {
    "quadratic line": quadratic(1.5, 0.7, 0.3),
    "quadratic plane": quadratic([1.0, 2.0], H, 0.3),
    "three minima": three_minima(),
    "logistic": logistic_regression(*separable_data()),
    "wavy": wavy(0.5, 0.2, [(0.7, 2.0, 0.1)], [(1.0, -2.0, 0.5)]),
    "rippled plane": two_dimensional(),
    "torch": from_torch(lambda t: t**2 / 2 + torch.sin(3 * t), majorant=Majorant(1.0, curvature=1.0)),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
class TestEveryLoss:
    def test_derivatives(self, loss):
        generator = np.random.default_rng(0)
        theta = generator.normal(size=(5, 3) if loss.dim == 1 else (5, 3, loss.dim))
        d, step = generator.normal(size=theta.shape), 1e-6
        slope = (loss(theta + step * d) - loss(theta - step * d)) / (2 * step)
        bend = (loss.gradient(theta + step * d) - loss.gradient(theta - step * d)) / (2 * step)
        g, hessian = loss.gradient(theta), loss.hessian(theta)
        assert g.shape == theta.shape
        assert hessian.shape == (theta.shape if loss.dim == 1 else (*theta.shape, loss.dim))
        np.testing.assert_allclose((g * d) if loss.dim == 1 else (g * d).sum(-1), slope, rtol=1e-6, atol=1e-6)
        product = hessian * d if loss.dim == 1 else (hessian @ d[..., None])[..., 0]
        np.testing.assert_allclose(product, bend, rtol=1e-6, atol=1e-6)

    def test_majorant(self, loss):
        generator = np.random.default_rng(0)
        theta = 10 ** generator.uniform(-2, 3, (20_000, 1)) * generator.normal(size=(20_000, loss.dim))
        theta = theta[:, 0] if loss.dim == 1 else theta
        bound = loss.majorant(theta)
        assert (loss(theta) <= bound + 1e-9 * (1 + np.abs(bound))).all()

    def test_majorant_around_another_point(self, loss):
        generator = np.random.default_rng(0)
        for center in generator.normal(scale=10, size=(20, loss.dim)):
            at = center[0] if loss.dim == 1 else center
            theta = 10 ** generator.uniform(-2, 3, (200, 1)) * generator.normal(size=(200, loss.dim))
            theta = theta[:, 0] if loss.dim == 1 else theta
            bound, around = loss.majorant(theta), loss.majorant.around(at)(theta - at)
            assert (around >= bound - 1e-9 * (1 + np.abs(bound))).all()
            if loss.majorant.slope == 0:  # else it is a bound on a bound
                np.testing.assert_allclose(around, bound, rtol=1e-9, atol=1e-9)

    def test_the_look_far_out_finds_nothing_wrong(self, loss):
        assert loss.checked_majorant is loss.majorant

    def test_nothing_beyond_the_radius(self, loss):
        """The promise of Majorant.radius, on which every global search rests."""
        m = np.asarray(0.7) if loss.dim == 1 else np.array([0.7, -0.4])
        A = loss.majorant.curvature
        S = A + 0.5 * (1 if loss.dim == 1 else np.eye(2))
        radius = loss.majorant.radius(m, 0.5, loss(m))
        eps = np.random.default_rng(0).normal(size=(10_000, loss.dim))
        eps *= radius * np.logspace(1e-9, 2, 10_000)[:, None] / np.linalg.norm(eps, axis=1, keepdims=True)
        penalty = ((eps @ np.atleast_2d(S)) * eps).sum(1) / 2
        J = loss(m + (eps[:, 0] if loss.dim == 1 else eps)) - penalty
        assert (loss(m) + 1e-9 * (1 + penalty) >= J).all()


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize(
    "function", [lambda t: t**4, lambda t: np.abs(t) ** 2.5, np.cosh, lambda t: 1.3 * t**2 + t], ids=range(4)
)
def test_growth_beyond_the_majorant_is_seen_far_out(function, dim):
    """Wherever the loss is asked for: near zero, none of these is above its bound."""
    bound = Majorant(50.0, curvature=2.0 if dim == 1 else 2 * np.eye(2))
    value = function if dim == 1 else lambda t: function(t[..., 0])
    loss = Loss(value, value, value, dim, bound)
    with pytest.raises(ValueError, match=r"exceeds majorant.*Declare a majorant"):
        _ = loss.checked_majorant


def test_an_overflow_far_out_is_no_growth():
    with np.errstate(over="ignore"):
        softplus = Loss(lambda t: np.log(1 + np.exp(t)), np.exp, np.exp, majorant=Majorant(1.0, slope=1.0))
        assert softplus.checked_majorant is softplus.majorant


def test_three_minima_as_advertised():
    loss = three_minima()
    theta = np.linspace(-10, 10, 20_001)
    value = loss(theta)
    minima = 1 + np.flatnonzero((value[1:-1] < value[:-2]) & (value[1:-1] < value[2:]))
    A, B, C = theta[minima]
    assert A < -3 < B < 3 < C
    sharpness = loss.hessian(np.array([A, B, C]))
    assert sharpness[0] > 10 * sharpness[1]
    assert sharpness[2] > 10 * sharpness[1]
    value_a, value_b, value_c = value[minima]
    assert value_a < value_c < value_b


def test_the_data_are_separable_by_a_line_through_zero():
    x, y = separable_data()
    assert x.shape == (60, 2)
    angles = np.linspace(0, 2 * np.pi, 1000)
    margins = (y * (np.stack([np.cos(angles), np.sin(angles)], 1) @ x.T)).min(1)
    assert margins.max() > 0.1
    np.testing.assert_array_equal(x, separable_data()[0])


def test_the_books_data():
    """As numpy.random.seed(135) and two randn(30, 2) give them; and separable."""
    x, y = murphy_data()
    np.testing.assert_array_equal(y, np.repeat([1.0, -1.0], 30))
    np.testing.assert_allclose(x[0], [-0.26485598, 6.18428092])
    np.testing.assert_allclose(x[30:].mean(0), [-4.68958964, 0.81458187], atol=1e-6)
    angles = np.linspace(0, 2 * np.pi, 1000)
    assert (y * (np.stack([np.cos(angles), np.sin(angles)], 1) @ x.T)).min(1).max() > 0.1


def test_from_torch_agrees_with_written_derivatives():
    x, y = separable_data(num_data=10)
    written = logistic_regression(x, y)
    yx = torch.from_numpy(y[:, None] * x)
    automatic = from_torch(lambda theta: torch.nn.functional.softplus(-yx @ theta).sum(), dim=2)
    theta = np.random.default_rng(0).normal(size=(4, 3, 2))
    for name in ("value", "gradient", "hessian"):
        np.testing.assert_allclose(
            getattr(written, name)(theta), getattr(automatic, name)(theta), rtol=1e-10, atol=1e-12
        )


def test_what_is_refused():
    with pytest.raises(ValueError, match="must not be negative"):
        Majorant(0.0, curvature=-1.0)
    with pytest.raises(ValueError, match=r"numpy\.zeros\(\(2, 2\)\)"):
        Loss(np.sum, np.sum, np.sum, dim=2, majorant=Majorant(0.0))
    with pytest.raises(ValueError, match=r"-1 or \+1"):
        logistic_regression(np.zeros((3, 2)), [0, 1, 1])


def test_a_hessian_is_symmetric():
    with pytest.raises(ValueError, match="is not symmetric"):
        quadratic([0.0, 0.0], [[1.0, 1.0], [0.0, 1.0]])
