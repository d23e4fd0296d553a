"""Losses for the tests: random smooth ones in one dimension with known majorants, and one in two dimensions."""

import numpy as np
from hypothesis import strategies as st

from bsam.theory.losses import Loss, Majorant


def wavy(curvature, linear, sines=(), logistics=()):
    """1/2 a theta^2 + b theta + sum A sin(w theta + p) + sum k log(1 + exp(s theta + t)), with its majorant.

    log(1 + e^z) <= log 2 + (|z| + z) / 2.
    """
    sines, logistics = np.reshape(sines, (-1, 3)), np.reshape(logistics, (-1, 3))
    (A, w, p), (k, s, t) = sines.T, logistics.T

    def sigmoid(z):
        return np.exp(-np.logaddexp(0, -z))

    def value(theta):
        z = theta[..., None]
        waves = (A * np.sin(w * z + p)).sum(-1) + (k * np.logaddexp(0, s * z + t)).sum(-1)
        return curvature * theta**2 / 2 + linear * theta + waves

    def gradient(theta):
        z = theta[..., None]
        waves = (A * w * np.cos(w * z + p)).sum(-1) + (k * s * sigmoid(s * z + t)).sum(-1)
        return curvature * theta + linear + waves

    def hessian(theta):
        z = theta[..., None]
        q = sigmoid(s * z + t)
        return curvature - (A * w**2 * np.sin(w * z + p)).sum(-1) + (k * s**2 * q * (1 - q)).sum(-1)

    majorant = Majorant(
        float(np.abs(A).sum() + (k * (np.log(2) + np.maximum(t, 0))).sum()),
        linear + float((k * s).sum()) / 2,
        float((k * np.abs(s)).sum()) / 2,
        curvature,
    )
    return Loss(value, gradient, hessian, majorant=majorant)


def moved(loss, center):
    """The loss theta -> loss(theta - center), for a majorant without slope."""
    bound = loss.majorant
    assert bound.slope == 0
    center = np.asarray(center)
    linear = bound.linear - (bound.curvature * center if loss.dim == 1 else bound.curvature @ center)
    return Loss(
        lambda theta: loss(theta - center),
        lambda theta: loss.gradient(theta - center),
        lambda theta: loss.hessian(theta - center),
        loss.dim,
        Majorant(float(bound(-center)), linear, curvature=bound.curvature),
    )


def number(low, high):
    return st.floats(low, high).map(lambda x: round(x, 3))


random_losses = st.builds(
    wavy,
    number(0.1, 2.0),
    number(-1.0, 1.0),
    st.lists(st.tuples(number(-1.0, 1.0), number(0.3, 3.0), number(-3.0, 3.0)), max_size=3),
    st.lists(st.tuples(number(0.1, 2.0), number(-3.0, 3.0), number(-2.0, 2.0)), max_size=2),
)


def two_dimensional():
    """A bowl around (3, -2) with ripples."""
    center, H = np.array([3.0, -2.0]), np.array([[1.2, 0.4], [0.4, 0.8]])
    heights, waves, phases = np.array([0.3, 0.2]), np.array([[2.0, 0.0], [1.0, -2.0]]), np.array([0.0, np.pi / 2])

    def value(theta):
        d = theta - center
        return ((d @ H) * d).sum(-1) / 2 + np.sin(theta @ waves.T + phases) @ heights

    def gradient(theta):
        return (theta - center) @ H + (heights * np.cos(theta @ waves.T + phases)) @ waves

    def hessian(theta):
        return H - np.einsum("...k,ki,kj->...ij", heights * np.sin(theta @ waves.T + phases), waves, waves)

    bound = Majorant(0.5 + center @ H @ center / 2, -H @ center, curvature=H)
    return Loss(value, gradient, hessian, 2, bound)
