"""Losses and matrices of the tests of conjugates."""

import numpy as np

from bsam.theory.losses import Loss, Majorant

H = np.array([[2.0, 0.5], [0.5, 1.0]])
CENTER = np.array([1.0, 2.0])
V = np.array([[0.5, -0.2], [-0.2, 0.6]])
SINE = Loss(np.sin, np.cos, lambda t: -np.sin(t), majorant=Majorant(1.0))

NOT_A_NUMBER = Loss(
    lambda t: np.where(np.abs(t) > 2, np.nan, t),
    np.ones_like,
    np.zeros_like,
    majorant=Majorant(1.0, slope=1.0),
)


def theta_to_the_fourth(majorant=None):
    return Loss(lambda t: t**4, lambda t: 4 * t**3, lambda t: 12 * t**2, majorant=majorant)
