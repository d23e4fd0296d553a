r"""Gaussians as exponential families.

Section 2.1 of the paper: an exponential family with base measure 1 has the densities

```math
q_\lambda(\theta) = \exp( \langle \lambda, T(\theta) \rangle - A(\lambda) ) \tag{5}
```

A Gaussian $\mathcal N(\omega, V)$ with precision $S = V^{-1}$ has three sets of coordinates:

| coordinates | definition | all of them |
|---|---|---|
| mean-covariance | $(\omega, V)$ | $V$ is positive definite |
| natural | $\lambda = (S \omega, -S/2)$ | $\Omega$: $\lambda_2$ is negative definite |
| expectation | $\mu = \mathbb E[T(\theta)]$ | $\mathcal M$: $\mu_2 - T_2(\mu_1)$ is positive definite |

The gradients of two convex functions convert $\lambda$ and $\mu$ into each other, $\mu = \nabla A(\lambda)$ and
$\lambda = \nabla A^*(\mu)$:

```math
A(\lambda) = \frac12 \langle \lambda_1, V \lambda_1 \rangle - \frac12 \log \det S + \frac P2 \log 2 \pi
```

```math
A^*(\mu) = - \text{entropy of } q_\mu
```

The paper's table of notations calls $A^*$ "the entropy". By its definitions ($A^*$ is the convex conjugate of $A$),
$A^*$ is the negative entropy, which `negative_entropy` returns. At corresponding points,
$\langle \lambda, \mu \rangle = A(\lambda) + A^*(\mu)$.

There are four families, all minimal. (The paper writes $T = (\theta, \theta \theta^\top)$ for the isotropic and the
diagonal family too, and restricts $\lambda_2$; the inner products are the same.)

| family | shape of $\theta$ | covariance | $T(\theta)$ | $\mathbb E[T_2]$ |
|---|---|---|---|---|
| `Univariate()` | (...) | $v$, (...) | $(\theta, \theta^2)$ | $\omega^2 + v$ |
| `Isotropic(P)` | (..., P) | $v$, (...) | $(\theta, \lVert \theta \rVert^2)$ | $\lVert \omega \rVert^2 + P v$ |
| `Diagonal(P)` | (..., P) | $v$, (..., P) | $(\theta, \theta^2)$ | $\omega^2 + v$ |
| `Full(P)` | (..., P) | $V$, (..., P, P) | $(\theta, \theta \theta^\top)$ | $\omega \omega^\top + V$ |

Parameters are pairs of arrays (first, second), and everything broadcasts over leading axes. $V$ is recovered from $\mu$
by subtracting $T_2(\omega)$. This loses digits where $V$ is much smaller than $\omega^2$: keep $(\omega, V)$ there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Array", "Diagonal", "Family", "Full", "Isotropic", "Pair", "Univariate"]

Array: TypeAlias = NDArray[np.float64]
Pair: TypeAlias = tuple[Array, Array]


class Family(ABC):
    """A family of Gaussians. The formulas are written once, with the matrix operations of the subclass.

    Examples:
        >>> family = Univariate()
        >>> family.natural([1.0], [0.5]), family.expectation([1.0], [0.5])  # Eq. 6
        ((array([2.]), array([-1.])), (array([1.]), array([1.5])))
    """

    dim: int
    spread = 1  # E[T_2] = T_2(omega) + spread * V

    # -- differences between the families: the second coordinate, as a symmetric matrix ------------------------------

    @property
    def identity(self) -> Array:
        r"""The covariance of $\mathcal N(0, I)$."""
        return np.ones(())

    @abstractmethod
    def square(self, theta: ArrayLike) -> Array:
        r"""The second statistic $T_2(\theta)$."""

    @abstractmethod
    def apply(self, matrix: Array, vector: Array) -> Array:
        """Matrix times vector."""

    @abstractmethod
    def log_det(self, matrix: Array) -> Array:
        r"""Logarithm of the determinant of the $P \times P$ matrix."""

    @abstractmethod
    def matrix(self, second: ArrayLike) -> Array:
        r"""The $P \times P$ matrix that a second natural parameter, a precision or a covariance represents."""

    def inverse(self, matrix: Array) -> Array:
        """Inverse matrix."""
        return 1 / matrix

    def is_positive(self, matrix: Array) -> NDArray[np.bool_]:
        """Whether the matrix is positive definite (and finite)."""
        return (matrix > 0) & np.isfinite(matrix)

    def inner_first(self, a: Array, b: Array) -> Array:
        """Inner product of first coordinates."""
        return np.asarray((a * b).sum(-1))

    def inner_second(self, a: Array, b: Array) -> Array:
        """Inner product of second coordinates."""
        return a * b

    # -- coordinates ------------------------------------------------------------------------------------------------

    def sufficient_statistics(self, theta: ArrayLike) -> Pair:
        r"""The sufficient statistics $T(\theta)$."""
        return np.asarray(theta, float), self.square(theta)

    def natural(self, mean: ArrayLike, covariance: ArrayLike) -> Pair:
        r"""The natural parameters $\lambda$ of the Gaussian with this mean and covariance."""
        S = self.inverse(self._checked_covariance(covariance))
        return self.apply(S, np.asarray(mean, float)), -S / 2

    def from_natural(self, natural: Pair) -> Pair:
        r"""Mean and covariance of the natural parameters $\lambda$."""
        if not np.all(self.in_omega(natural)):
            raise ValueError(
                f"lambda_2={natural[1]} is not negative definite, so lambda is outside Omega and there is no Gaussian "
                "with this lambda. lambda_2 must be -1/2 times a precision."
            )
        V = self.inverse(-2 * np.asarray(natural[1], float))
        return self.apply(V, np.asarray(natural[0], float)), V

    def expectation(self, mean: ArrayLike, covariance: ArrayLike) -> Pair:
        r"""The expectation parameters $\mu$ of the Gaussian with this mean and covariance."""
        V = self._checked_covariance(covariance)
        return np.asarray(mean, float), self.square(mean) + self.spread * V

    def from_expectation(self, expectation: Pair) -> Pair:
        r"""Mean and covariance of the expectation parameters $\mu$."""
        if not np.all(self.in_m(expectation)):
            raise ValueError(
                f"mu=({expectation[0]}, {expectation[1]}) is outside the interior of M: the covariance, mu_2 "
                "minus T_2(mu_1), must be positive definite."
            )
        return np.asarray(expectation[0], float), self._covariance(expectation)

    def natural_to_expectation(self, natural: Pair) -> Pair:
        r"""The expectation parameters $\mu = \nabla A(\lambda)$."""
        return self.expectation(*self.from_natural(natural))

    def expectation_to_natural(self, expectation: Pair) -> Pair:
        r"""The natural parameters $\lambda = \nabla A^*(\mu)$."""
        return self.natural(*self.from_expectation(expectation))

    def in_omega(self, natural: Pair) -> NDArray[np.bool_]:
        r"""Whether $A(\lambda)$ is finite."""
        return self.is_positive(-np.asarray(natural[1], float))

    def in_m(self, expectation: Pair) -> NDArray[np.bool_]:
        r"""Whether $\mu$ lies in the interior of $\mathcal M$."""
        return self.is_positive(self._covariance(expectation))

    def inner(self, natural: Pair, expectation: Pair) -> Array:
        r"""The inner product $\langle \lambda, \mu \rangle$.

        With $T(\theta)$ instead of $\mu$, it is $\langle \lambda, T(\theta) \rangle$.
        """
        (l1, l2), (m1, m2) = natural, expectation
        return self.inner_first(l1, m1) + self.inner_second(l2, m2)

    # -- functions --------------------------------------------------------------------------------------------------

    def log_partition(self, natural: Pair) -> Array:
        r"""The log-partition function $A(\lambda)$."""
        omega, V = self.from_natural(natural)
        return np.asarray(
            (self.inner_first(natural[0], omega) + self.log_det(V) + self.dim * math.log(2 * math.pi)) / 2
        )

    def negative_entropy(self, expectation: Pair) -> Array:
        r"""The convex conjugate $A^*(\mu)$ of $A$."""
        return -self.entropy(self.from_expectation(expectation)[1])

    def entropy(self, covariance: ArrayLike) -> Array:
        r"""Differential entropy, $\frac12 \log \det (2 \pi e V)$."""
        V = self._checked_covariance(covariance)
        return (self.log_det(V) + self.dim * math.log(2 * math.pi * math.e)) / 2

    def log_density(self, theta: ArrayLike, natural: Pair) -> Array:
        r"""The log-density $\log q_\lambda(\theta)$, Eq. 5."""
        return self.inner(natural, self.sufficient_statistics(theta)) - self.log_partition(natural)

    def kl(self, q: tuple[ArrayLike, ArrayLike], p: tuple[ArrayLike, ArrayLike]) -> Array:
        r"""KL divergence $\mathrm{KL}(q \parallel p)$ of two Gaussians, both given as (mean, covariance).

        Examples:
            >>> bool(np.isclose(Univariate().kl((1.0, 2.0), (0.0, 2.0)), 1 / 4))
            True
        """
        V_q, V_p = self._checked_covariance(q[1]), self._checked_covariance(p[1])
        second = self.square(np.asarray(q[0], float) - np.asarray(p[0], float)) + self.spread * V_q
        trace = self.inner_second(self.inverse(V_p), second)
        return (trace - self.dim + self.log_det(V_p) - self.log_det(V_q)) / 2

    def _covariance(self, expectation: Pair) -> Array:
        return (np.asarray(expectation[1], float) - self.square(expectation[0])) / self.spread

    def _checked_covariance(self, covariance: ArrayLike) -> Array:
        V = np.asarray(covariance, float)
        if not np.all(self.is_positive(V)):
            raise ValueError(f"covariance={V} must be positive definite and finite.")
        return V


class Univariate(Family):
    r"""$\mathcal N(\omega, v)$ on the line. Arrays have any shape and no axis for the dimension."""

    dim = 1

    def square(self, theta: ArrayLike) -> Array:
        r"""The second statistic $\theta^2$."""
        return np.asarray(theta, float) ** 2

    def apply(self, matrix: Array, vector: Array) -> Array:
        """The product."""
        return matrix * vector

    def log_det(self, matrix: Array) -> Array:
        """The logarithm."""
        return np.log(matrix)

    def matrix(self, second: ArrayLike) -> Array:
        r"""The number as a $1 \times 1$ matrix."""
        return np.asarray(second, float)[..., None, None]

    def inner_first(self, a: Array, b: Array) -> Array:
        """The product."""
        return a * b


class Isotropic(Family):
    r"""$\mathcal N(\omega, v I)$ in $P$ dimensions. The covariance is the number $v$."""

    def __init__(self, dim: int) -> None:
        self.dim = self.spread = dim

    def square(self, theta: ArrayLike) -> Array:
        r"""The second statistic $\lVert \theta \rVert^2$."""
        return np.asarray((np.asarray(theta, float) ** 2).sum(-1))

    def apply(self, matrix: Array, vector: Array) -> Array:
        """The number times the vector."""
        return np.asarray(matrix)[..., None] * vector

    def log_det(self, matrix: Array) -> Array:
        """$P$ times the logarithm."""
        return self.dim * np.log(matrix)

    def matrix(self, second: ArrayLike) -> Array:
        """The number times the identity."""
        return np.asarray(second, float)[..., None, None] * np.eye(self.dim)


class Diagonal(Family):
    r"""$\mathcal N(\omega, \mathrm{diag}(v))$ in $P$ dimensions. The covariance is the vector $v$."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    @property
    def identity(self) -> Array:
        """The vector of ones."""
        return np.ones(self.dim)

    def square(self, theta: ArrayLike) -> Array:
        r"""The second statistic $\theta^2$, entry by entry."""
        return np.asarray(theta, float) ** 2

    def apply(self, matrix: Array, vector: Array) -> Array:
        """The product, entry by entry."""
        return matrix * vector

    def log_det(self, matrix: Array) -> Array:
        """The sum of the logarithms."""
        return np.asarray(np.log(matrix).sum(-1))

    def matrix(self, second: ArrayLike) -> Array:
        """The diagonal matrix."""
        return np.asarray(second, float)[..., None] * np.eye(self.dim)

    def is_positive(self, matrix: Array) -> NDArray[np.bool_]:
        """Whether all entries are positive."""
        return np.asarray(super().is_positive(matrix).all(-1))

    def inner_second(self, a: Array, b: Array) -> Array:
        """The sum of the products."""
        return np.asarray((a * b).sum(-1))


class Full(Family):
    r"""$\mathcal N(\omega, V)$ in $P$ dimensions.

    Matrices are symmetric, and their inner product is the trace of the product.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim

    @property
    def identity(self) -> Array:
        """The identity matrix."""
        return np.eye(self.dim)

    def square(self, theta: ArrayLike) -> Array:
        r"""The second statistic $\theta \theta^\top$."""
        theta = np.asarray(theta, float)
        return np.asarray(theta[..., :, None] * theta[..., None, :])

    def apply(self, matrix: Array, vector: Array) -> Array:
        """Matrix times vector."""
        return (matrix @ vector[..., None])[..., 0]

    def log_det(self, matrix: Array) -> Array:
        """Logarithm of the determinant."""
        return np.asarray(np.linalg.slogdet(matrix)[1])

    def matrix(self, second: ArrayLike) -> Array:
        """The matrix itself."""
        return np.asarray(second, float)

    def inverse(self, matrix: Array) -> Array:
        """Inverse matrix, exactly symmetric."""
        inverse = np.linalg.inv(matrix)
        return (inverse + np.swapaxes(inverse, -1, -2)) / 2

    def is_positive(self, matrix: Array) -> NDArray[np.bool_]:
        """Whether the matrix is finite, symmetric and has positive eigenvalues."""
        finite = np.isfinite(matrix).all((-2, -1))
        symmetric = np.isclose(matrix, np.swapaxes(matrix, -1, -2), rtol=1e-9).all((-2, -1))
        sound = np.where(np.asarray(finite)[..., None, None], matrix, 0.0)
        return finite & symmetric & (np.linalg.eigvalsh(sound)[..., 0] > 0)

    def inner_second(self, a: Array, b: Array) -> Array:
        """Trace of the product."""
        return np.asarray((a * b).sum((-2, -1)))
