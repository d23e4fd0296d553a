r"""The losses of `bsam.theory`: their definition, and examples.

A loss $\ell$ is a function of $\theta$ together with its gradient and Hessian, all of them vectorised over leading
axes. In one dimension $\theta$, gradient and Hessian are plain arrays of the same shape, so that `loss(grid)` can be
plotted; in $P > 1$ dimensions they have shapes (..., P), (..., P) and (..., P, P).

Theorem 1 of the paper assumes that the loss is majorised by a quadratic. Finitely many values of the loss cannot prove
this bound, so a loss declares it (`Majorant`). Every function that relies on the bound checks it wherever it evaluates
the loss. It is also checked once far out, up to a million from zero, where growth faster than a quadratic is visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit  # type: ignore[import-untyped]

from bsam.theory.gaussian import Array

__all__ = [
    "Loss",
    "Majorant",
    "from_torch",
    "logistic_regression",
    "murphy_data",
    "quadratic",
    "separable_data",
    "three_minima",
]


@dataclass(frozen=True)
class Majorant:
    r"""A quadratic upper bound of a loss.

    For all $\theta$,

    ```math
    \ell(\theta) \le c + \langle b, \theta \rangle + L \lVert \theta \rVert + \frac12 \langle \theta, A \theta \rangle
    ```

    This is the bound in the proof of Theorem 1 with one more term: with $L$, losses of linear growth can declare
    $A = 0$. $A$ should be the smallest valid matrix, which is the curvature of the loss at infinity, because
    $f^*(\lambda')$ is infinite where the precision $-2 \lambda_2'$ does not exceed $A$. A larger $A$ is safe, but makes
    $f^{**}$ a looser lower bound.

    Args:
        constant: $c$.
        linear: $b$, a number in one dimension and a vector in $P$.
        slope: $L \ge 0$.
        curvature: $A$, a number in one dimension and a $P \times P$ matrix in $P$.

    Examples:
        >>> Majorant(1.0, curvature=2.0)(np.array([0.0, 3.0]))
        array([ 1., 10.])
    """

    constant: float
    linear: Array | float = 0.0
    slope: float = 0.0
    curvature: Array | float = 0.0

    def __post_init__(self) -> None:
        if self.slope < 0 or np.linalg.eigvalsh(np.atleast_2d(self.curvature))[0] < 0:
            raise ValueError(
                f"slope={self.slope} and curvature={self.curvature} must not be negative. The loss is bounded below, "
                "so its bound cannot fall at infinity."
            )

    def __call__(self, theta: Array) -> Array:
        r"""The bound at $\theta$."""
        b, A = np.asarray(self.linear), np.asarray(self.curvature)
        if A.ndim == 0:
            return self.constant + b * theta + self.slope * np.abs(theta) + A * theta**2 / 2
        norm = np.linalg.norm(theta, axis=-1)
        return np.asarray(self.constant + (theta * b + (theta @ A) * theta / 2).sum(-1) + self.slope * norm)

    def is_exceeded(self, theta: Array, value: Array) -> NDArray[np.bool_]:
        r"""Whether a loss of this value at $\theta$ exceeds the bound by more than rounding errors."""
        bound, terms = self(theta), self._absolute(theta)
        return np.asarray(value > bound + 1e-9 * (1 + np.abs(bound)) + 1e-13 * terms)

    def around(self, center: Array) -> Majorant:
        r"""A bound for the loss as a function of $\theta$ minus `center`."""
        A = np.asarray(self.curvature)
        constant = float(self(center) + 1e-13 * self._absolute(center))  # the terms may be large and cancel
        return Majorant(constant, self.linear + (A * center if A.ndim == 0 else A @ center), self.slope, A)

    def _absolute(self, theta: Array) -> Array:
        """An upper bound on the sum of the terms' absolute values."""
        A = np.asarray(self.curvature)
        size = np.abs(theta) if A.ndim == 0 else np.linalg.norm(theta, axis=-1)
        slope = np.linalg.norm(self.linear) + self.slope
        return np.asarray(abs(self.constant) + slope * size + np.linalg.norm(A) * size**2 / 2)

    def radius(self, mean: Array, margin: Array | float, attained: Array | float) -> Array:
        r"""The distance from the mean $m$ beyond which the loss minus a parabola is below an attained value.

        The function is $\ell(\theta) - \frac12 \langle \theta - m, S (\theta - m) \rangle$.

        Args:
            mean: $m$.
            margin: The smallest eigenvalue of $S - A$, which must be positive.
            attained: A value that this function attains.
        """
        b, A, kappa = np.asarray(self.linear), np.asarray(self.curvature), np.asarray(margin)
        slope = self.slope + (np.abs(b + A * mean) if A.ndim == 0 else np.linalg.norm(b + A @ mean))
        gap = np.maximum(self(mean) - attained, 0)  # the larger root of gap + slope r - kappa r^2 / 2
        return np.asarray((slope + np.sqrt(slope**2 + 2 * kappa * gap)) / kappa)


@dataclass(frozen=True)
class Loss:
    r"""A loss with its derivatives.

    Args:
        value: Returns $\ell(\theta)$.
        gradient: Returns the gradient at $\theta$.
        hessian: Returns the Hessian at $\theta$.
        dim: $P$.
        majorant: A quadratic upper bound, or None if there is none. $f^*$ and $f^{**}$ need one.

    Examples:
        >>> loss = Loss(np.cos, lambda t: -np.sin(t), lambda t: -np.cos(t), majorant=Majorant(1.0))
        >>> loss(np.zeros(3))
        array([1., 1., 1.])
    """

    value: Callable[[Array], Array]
    gradient: Callable[[Array], Array]
    hessian: Callable[[Array], Array]
    dim: int = 1
    majorant: Majorant | None = None

    def __post_init__(self) -> None:
        if self.majorant is not None and np.shape(self.majorant.curvature) != (
            () if self.dim == 1 else (self.dim,) * 2
        ):
            raise ValueError(
                f"majorant.curvature has shape {np.shape(self.majorant.curvature)}; for dim={self.dim} write "
                + ("a number." if self.dim == 1 else f"a matrix, for instance numpy.zeros(({self.dim}, {self.dim})).")
            )

    def __call__(self, theta: ArrayLike) -> Array:
        r"""The loss $\ell(\theta)$."""
        return self.value(np.asarray(theta, float))

    @cached_property
    def checked_majorant(self) -> Majorant:
        """The majorant, checked against the loss far from zero. Values that overflow there are ignored."""
        if self.majorant is None:
            raise ValueError(
                "f* needs a loss that a quadratic majorises (Theorem 1), and this one declares no majorant. Write "
                "Loss(..., majorant=Majorant(constant, ...)). If the loss grows faster than every quadratic, as "
                "theta^4 does, f* is infinite everywhere and there is no f**: cap the loss outside the region of "
                "interest."
            )
        others = np.random.default_rng(0).standard_normal((8, self.dim))
        directions = np.concatenate([np.eye(self.dim), -np.eye(self.dim), others])
        for radius in 2.0 ** np.arange(21):
            theta = radius * (directions[:2, 0] if self.dim == 1 else directions)
            with np.errstate(all="ignore"):
                value = self(theta)
            wrong = np.isfinite(value) & self.majorant.is_exceeded(theta, value)
            if wrong.any():
                raise ValueError(exceeded(self.majorant, theta[wrong][0], value[wrong][0]))
        return self.majorant


class Derived(Loss):
    """A loss derived from another loss. Its majorant follows from the `checked_majorant` of that loss."""

    @cached_property
    def checked_majorant(self) -> Majorant:
        """The majorant. That of the other loss is already checked far from zero."""
        return super().checked_majorant if self.majorant is None else self.majorant


def exceeded(majorant: Majorant, theta: Array, value: Array) -> str:
    r"""The error message for a majorant that does not hold at $\theta$."""
    return (
        f"loss={value:.6g} exceeds majorant={majorant(theta):.6g} at theta={theta}. Declare a majorant that holds for "
        "all theta, with a larger constant, slope or curvature. If the loss grows faster than every quadratic, as "
        "theta^4 does, f* is infinite everywhere: cap the loss outside the region of interest."
    )


def from_torch(
    function: Callable[[torch.Tensor], torch.Tensor], *, dim: int = 1, majorant: Majorant | None = None
) -> Loss:
    r"""A loss from a torch function; torch.func computes its derivatives.

    Args:
        function: Returns $\ell(\theta)$, written with torch for one $\theta$: a number if `dim` is 1, else a vector.
        dim: $P$.
        majorant: See `Loss`.

    Examples:
        >>> above = Majorant(1.0, curvature=2.0)
        >>> loss = from_torch(lambda theta: theta**2 + torch.sin(theta), majorant=above)
        >>> loss.gradient(np.array([0.0]))
        array([1.])
    """

    def vectorised(derivative: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Array], Array]:
        batched = torch.func.vmap(derivative)

        def apply(theta: Array) -> Array:
            theta = np.asarray(theta, float)
            batch = theta.shape if dim == 1 else theta.shape[:-1]
            flat = torch.from_numpy(theta.reshape(-1) if dim == 1 else theta.reshape(-1, dim))
            result: Array = batched(flat).numpy()
            return result.reshape(batch + result.shape[1:])

        return apply

    gradient = torch.func.grad(function)
    hessian = torch.func.jacrev(gradient)
    return Loss(vectorised(function), vectorised(gradient), vectorised(hessian), dim, majorant)


def quadratic(center: ArrayLike, hessian: ArrayLike, constant: float = 0.0) -> Loss:
    r"""A quadratic loss, with the minimum at a center $c$.

    It is $\ell(\theta) = \frac12 \langle \theta - c, H (\theta - c) \rangle$ plus a constant. It is linear in
    $T(\theta)$, so that $f^{**} = f$.

    Args:
        center: The minimum $c$: a number, or a vector of length $P$.
        hessian: $H$, positive semi-definite: a number, or a $P \times P$ matrix.
        constant: The value at the minimum.
    """
    center, H = np.asarray(center, float), np.asarray(hessian, float)
    if H.ndim == 0:
        majorant = Majorant(constant + float(H * center**2) / 2, -H * center, curvature=H)
        return Loss(
            lambda theta: constant + H * (theta - center) ** 2 / 2,
            lambda theta: H * (theta - center),
            lambda theta: np.broadcast_to(H, theta.shape),
            majorant=majorant,
        )
    dim = len(H)
    if not np.allclose(H, H.T):
        raise ValueError(f"hessian={H} is not symmetric: write (H + H.T) / 2, which is the Hessian of this loss.")
    return Loss(
        lambda theta: constant + np.einsum("...i,ij,...j", theta - center, H, theta - center) / 2,
        lambda theta: (theta - center) @ H,
        lambda theta: np.broadcast_to(H, (*theta.shape, dim)),
        dim,
        Majorant(constant + float(center @ H @ center) / 2, -H @ center, curvature=H),
    )


def three_minima() -> Loss:
    """A 1-D loss with a sharp minimum A, a flat minimum B and a sharp minimum C, for Figures 1(b) and 2.

    The paper does not print its loss. This loss is a bowl with three Gaussian wells. The sharp A is the global minimum,
    C is slightly lower than B, and both A and C vanish from expected loss and relaxation when the variance grows.
    """
    bowl, floor = 0.12, 3.0
    centers, widths, depths = np.array([-4.0, 0.0, 3.6]), np.array([0.35, 1.5, 0.3]), np.array([3.4, 2.2, 2.9])

    def wells(theta: Array) -> tuple[Array, Array]:
        z = (theta[..., None] - centers) / widths
        return z, depths * np.exp(-(z**2) / 2)

    def value(theta: Array) -> Array:
        _, well = wells(theta)
        return np.asarray(floor + bowl * theta**2 / 2 - well.sum(-1))

    def gradient(theta: Array) -> Array:
        z, well = wells(theta)
        return np.asarray(bowl * theta + (z / widths * well).sum(-1))

    def hessian(theta: Array) -> Array:
        z, well = wells(theta)
        return np.asarray(bowl + ((1 - z**2) / widths**2 * well).sum(-1))

    return Loss(value, gradient, hessian, majorant=Majorant(floor, curvature=bowl))


def logistic_regression(features: ArrayLike, labels: ArrayLike) -> Loss:
    r"""The loss of logistic regression, without intercept.

    It is $\ell(\theta) = \sum_i \log (1 + \exp(-y_i \langle x_i, \theta \rangle))$.

    Args:
        features: $x$, of shape (N, P) with $P > 1$.
        labels: $y$, of length $N$, each -1 or +1.
    """
    x, y = np.asarray(features, float), np.asarray(labels, float)
    if x.ndim != 2 or x.shape[1] < 2 or y.shape != x.shape[:1] or not np.isin(y, (-1, 1)).all():
        raise ValueError(
            f"features of shape {x.shape} and labels of shape {y.shape} must be (N, P) with P > 1 and (N,), "
            "and the labels -1 or +1."
        )
    yx = y[:, None] * x

    def value(theta: Array) -> Array:
        return np.asarray(np.logaddexp(0, -theta @ yx.T).sum(-1))

    def gradient(theta: Array) -> Array:
        return np.asarray(-expit(-theta @ yx.T) @ yx)

    def hessian(theta: Array) -> Array:
        p = expit(theta @ yx.T)
        return np.asarray(
            ((p * (1 - p)) @ (x[:, :, None] * x[:, None, :]).reshape(len(x), -1)).reshape(*theta.shape, -1)
        )

    # log(1 + e^-z) <= log 2 + max(0, -z) = log 2 + (|z| - z) / 2
    slope = float(np.linalg.norm(x, axis=1).sum()) / 2
    bound = Majorant(len(x) * math.log(2), -yx.sum(0) / 2, slope, np.zeros((x.shape[1],) * 2))
    return Loss(value, gradient, hessian, x.shape[1], bound)


def murphy_data(seed: int = 135) -> tuple[Array, Array]:
    r"""Features and labels of the 2-D logistic regression in Murphy (2012), Chapter 8.4, which the paper adopts.

    There are 30 points around (1, 5) with standard deviation 1, and 30 around (-5, 1) with 2.2. The book's prior is
    $\mathcal N(0, 100 I)$. The paper prints no numbers. The seed is that of the Python code published with the book
    (`logreg_laplace_demo.py` of probml/pyprobml). These data are separable by a line through zero, as the paper says
    of its own data. With other seeds they may not be separable.
    """
    generator = np.random.RandomState(seed)  # as in the book's code; NumPy keeps its numbers fixed
    positive = np.array([1.0, 5.0]) + generator.standard_normal((30, 2))
    negative = np.array([-5.0, 1.0]) + 2.2 * generator.standard_normal((30, 2))
    return np.concatenate([positive, negative]), np.repeat([1.0, -1.0], 30)


def separable_data(num_data: int = 60, seed: int = 0) -> tuple[Array, Array]:
    r"""Milder features and labels for 2-D logistic regression, separable by a line through zero.

    Half of the points come from a Gaussian around (1, 2.5), the other half from a wider one around (-2.5, -0.5). With
    these data and the prior $\mathcal N(0, I)$, expectations are quick to compute to many digits. The paper uses
    `murphy_data`.
    """
    generator = np.random.default_rng(seed)
    half = num_data // 2
    positive = np.array([1.0, 2.5]) + 0.5 * generator.standard_normal((half, 2))
    negative = np.array([-2.5, -0.5]) + 0.8 * generator.standard_normal((num_data - half, 2))
    return np.concatenate([positive, negative]), np.repeat([1.0, -1.0], [half, num_data - half])
