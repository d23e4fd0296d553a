"""f*, the conjugate of the expected negative loss. It is a max-loss, which a global search finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped]

from bsam.theory.fenchel.expected_loss import smoothed
from bsam.theory.gaussian import Array, Pair
from bsam.theory.losses import Loss, exceeded

__all__ = [
    "Conjugate",
    "MaxLoss",
    "checked_loss",
    "conjugate",
    "conjugate_maximisers",
    "conjugate_over_gaussians",
    "finite_loss",
    "max_loss",
    "max_loss_in_ball",
    "reach",
]

Rows: TypeAlias = NDArray[np.intp]

MAX_GRID = 2**21  # points on the line, to either side
NUM_SCATTERED = 2048  # points in space


class MaxLoss(NamedTuple):
    r"""The value of a maximised loss and the perturbation $\epsilon$ that attains it."""

    value: Array
    perturbation: Array


class Conjugate(NamedTuple):
    r"""$f^*(\lambda')$ and the $\theta$ that attains it."""

    value: Array
    theta: Array


def max_loss(loss: Loss, mean: ArrayLike, precision: ArrayLike, *, resolution: float = 0.02) -> MaxLoss:
    r"""The max-loss of SAM with a penalty instead of a ball: the second term of Eq. 9.

    It is the maximum over all $\epsilon$ of

    ```math
    \ell(m + \epsilon) - \frac12 \langle \epsilon, S \epsilon \rangle
    ```

    The search is global. With the numbers $c$, $b$, $L$ and $A$ of the loss's `Majorant`, the objective at distance $r$
    from $m$ is at most

    ```math
    c(m) + (\lVert b + A m \rVert + L) \, r - \frac12 \kappa r^2
    ```

    where $c(m)$ is the majorant at $m$, and $\kappa$ the smallest eigenvalue of $S - A$. Beyond the radius where this
    parabola falls below an attained value there is no maximum. In one dimension, a grid covers everything within that
    radius, and each grid maximum that may still be the largest is refined by bisection on the derivative. In $P$
    dimensions, many scattered points are tried, and the best and some others are refined by BFGS (without a guarantee,
    but $P$ is small). Where $\kappa \le 0$ the result is +inf.

    Args:
        loss: A loss with a majorant.
        mean: $m$: in one dimension an array of any shape, in $P$ dimensions one vector.
        precision: $S$: in one dimension an array that broadcasts with `mean`, in $P$ dimensions a number or a
            $P \times P$ matrix.
        resolution: Spacing of the grid in one dimension, less than the distance between neighbouring maxima.

    Examples:
        >>> from bsam.theory.losses import quadratic
        >>> max_loss(quadratic(0.0, 1.0), [1.0, 2.0], 2.0)
        MaxLoss(value=array([1., 4.]), perturbation=array([1., 2.]))
    """
    if not (np.isfinite(precision).all() and resolution > 0):
        raise ValueError(f"precision={precision!r} must be finite, and resolution={resolution} must be positive.")
    if loss.dim == 1:
        return _max_on_line(loss, np.asarray(mean, float), np.asarray(precision, float), resolution)
    S = np.asarray(precision, float) * (1 if np.ndim(precision) == 2 else np.eye(loss.dim))
    values, eps = _maxima_in_space(loss, np.asarray(mean, float), S)
    return MaxLoss(values[0], eps[0])


def max_loss_in_ball(loss: Loss, mean: ArrayLike, rho: float, *, resolution: float = 0.02) -> MaxLoss:
    r"""The max-loss of SAM in its trust-region form, Eq. 1.

    It is the maximum of $\ell(m + \epsilon)$ over $\lVert \epsilon \rVert \le \rho$. In one dimension, it is found on a
    grid of at most this resolution and refined by bisection. In $P$ dimensions, many points of the ball are tried, and
    the best are refined by SLSQP.

    Args:
        loss: The loss. It needs no majorant.
        mean: $m$: an array of any shape in one dimension, one vector in $P$.
        rho: Radius, $\rho \ge 0$.
        resolution: Largest spacing of the grid in one dimension.
    """
    if not (rho >= 0 and resolution > 0):
        raise ValueError(f"rho={rho} must not be negative, and resolution={resolution} must be positive.")
    m = np.asarray(mean, float)
    if loss.dim == 1:
        grid = m.reshape(-1, 1) + rho * np.linspace(-1, 1, 3 + 2 * int(rho / resolution))
        value, theta = _best_on_grid(
            finite_loss(loss, grid), grid, lambda at, _: loss(at), lambda at, _: loss.gradient(at)
        )
        return MaxLoss(value.reshape(m.shape), theta.reshape(m.shape) - m)
    eps = rho * _directions(loss.dim) * np.linspace(1, 0, NUM_SCATTERED)[:, None] ** (1 / loss.dim)
    ends = [
        minimize(
            lambda x: -loss(m + x),
            start,
            jac=lambda x: -loss.gradient(m + x),
            method="SLSQP",
            constraints={"type": "ineq", "fun": lambda x: (rho**2 - x @ x) / 2, "jac": lambda x: -x},
            options={"ftol": 1e-15, "maxiter": 1000},
        ).x
        for start in eps[np.argsort(-finite_loss(loss, m + eps))[:6]]
    ]
    ends = [x * min(1.0, rho / max(float(np.linalg.norm(x)), 1e-300)) for x in ends]  # SLSQP may end slightly outside
    best = max(ends, key=lambda x: float(loss(m + x)))
    return MaxLoss(loss(m + best), best)


def conjugate(loss: Loss, natural: Pair, *, resolution: float = 0.02) -> Conjugate:
    r"""$f^*(\lambda')$ by Theorem 1, as a supremum over $\theta$.

    Args:
        loss: A loss with a majorant.
        natural: $\lambda' = (S m, -S/2)$: arrays that broadcast in one dimension; a vector and a $P \times P$ matrix
            in $P$.
        resolution: See `max_loss`.

    Returns:
        The value, which is +inf outside the domain of $f^*$, and the maximiser.

    Examples:
        >>> from bsam.theory.losses import quadratic
        >>> # (lambda_1 + b)^2 / (4 (-lambda_2 - a / 2))
        >>> conjugate(quadratic(0.0, 1.0), (2.0, -1.0)).value.item()
        2.0
    """
    lambda_1, S = np.asarray(natural[0], float), -2 * np.asarray(natural[1], float)
    if loss.dim == 1:
        m = np.divide(lambda_1, S, out=np.zeros(np.broadcast(lambda_1, S).shape), where=S > 0)
        value, eps = max_loss(loss, m, S, resolution=resolution)
        return Conjugate(value + S * m**2 / 2, m + eps)
    f_star, theta = conjugate_maximisers(loss, natural)
    return Conjugate(np.asarray(f_star), theta[0] if len(theta) else np.full(loss.dim, np.nan))


def conjugate_maximisers(loss: Loss, natural: Pair, starts: Array | None = None) -> tuple[float, Array]:
    r"""One $f^*(\lambda')$ and the $\theta$ that attains it; in $P$ dimensions further local maxima follow, (k, P).

    Args:
        loss: A loss with a majorant.
        natural: $\lambda'$: two numbers in one dimension, a vector and a $P \times P$ matrix in $P$.
        starts: Further starting points of the search in $P$ dimensions, (n, P).

    Returns:
        The value and the maximisers; +inf and no $\theta$ outside the domain of $f^*$.
    """
    S = -2 * np.asarray(natural[1], float)
    if np.linalg.eigvalsh(np.atleast_2d(S - loss.checked_majorant.curvature))[0] <= 0:
        return np.inf, np.empty((0, *np.shape(natural[0])))
    if loss.dim == 1:
        value, theta = conjugate(loss, natural)
        return float(value), theta[None]
    m = np.linalg.solve(S, natural[0])
    values, eps = _maxima_in_space(loss, m, S, starts)
    return float(values[0] + m @ S @ m / 2), m + eps


def conjugate_over_gaussians(loss: Loss, natural: Pair, variance: float, *, resolution: float = 0.02) -> Array:
    r"""The left-hand side of Theorem 1 (Eq. 10), for Gaussians of one variance.

    It is the supremum of $\langle \mu'', \lambda' \rangle - f(\mu'')$ over Gaussians with covariance `variance` times
    the identity: the expectation of $\langle T(\theta), \lambda' \rangle + \ell(\theta)$, maximised over the mean.
    Smoothing never raises a maximum, so this value grows when the variance shrinks, and its limit is $f^*(\lambda')$.
    """
    trace = np.trace(natural[1]) if loss.dim > 1 else np.asarray(natural[1], float)
    return trace * variance + conjugate(smoothed(loss, variance), natural, resolution=resolution).value


def finite_loss(loss: Loss, theta: Array) -> Array:
    """Return loss(theta), or raise where it is not a finite number."""
    value = loss(theta)
    wrong = ~np.isfinite(value)
    if wrong.any():
        raise ValueError(
            f"loss={value[wrong][0]} at theta={theta[wrong][0]}: a loss must be finite everywhere. Where a formula "
            "overflows, write it in another form, as numpy.logaddexp(0, z) for log(1 + exp(z)). Where the loss is not "
            "defined, continue it with a large constant."
        )
    return value


def checked_loss(loss: Loss, theta: Array) -> Array:
    """Return loss(theta), or raise where it is not finite or exceeds the declared majorant."""
    value, majorant = finite_loss(loss, theta), loss.checked_majorant
    wrong = majorant.is_exceeded(theta, value)
    if wrong.any():
        raise ValueError(exceeded(majorant, theta[wrong][0], value[wrong][0]))
    return value


def reach(loss: Loss, m: Array, S: Array) -> Array:
    """The largest |eps| that the supremum on the line must consider."""
    bound = loss.checked_majorant
    radius = bound.radius(m, S - bound.curvature, checked_loss(loss, m))
    probe = radius[:, None] * np.linspace(-1, 1, 65) ** 3  # a first look, dense near m, shrinks the radius
    attained = (checked_loss(loss, m[:, None] + probe) - S[:, None] * probe**2 / 2).max(1, initial=-np.inf)
    return bound.radius(m, S - bound.curvature, attained)


def _max_on_line(loss: Loss, mean: Array, precision: Array, resolution: float) -> MaxLoss:
    shape = np.broadcast(mean, precision).shape
    m, S = (np.broadcast_to(x, shape).ravel() for x in (mean, precision))
    value, eps = np.full(m.shape, np.inf), np.full(m.shape, np.nan)
    finite = np.flatnonzero(S - loss.checked_majorant.curvature > 1e-12 * S)  # to rounding
    counts = reach(loss, m[finite], S[finite]) / resolution + 2
    if counts.max(initial=0) > MAX_GRID:
        raise ValueError(
            f"the search for the supremum must go up to |eps|={counts.max() * resolution:.3g}, more than "
            f"{MAX_GRID} steps of resolution={resolution}. Raise the resolution, or the precision, which is too close "
            f"to the loss's curvature at infinity, {loss.checked_majorant.curvature}."
        )
    # Rows with a similar reach and position share a grid, and the loss is evaluated once per grid.
    widths = 2 ** np.maximum(np.ceil(np.log2(counts)), 10).astype(int)
    blocks = np.floor(m[finite] / (resolution * widths)).astype(int)
    for width, block in np.unique(np.stack([widths, blocks], 1), axis=0):
        theta = resolution * np.arange((block - 1) * width, (block + 2) * width + 1)
        ell, rows = checked_loss(loss, theta), finite[(widths == width) & (blocks == block)]
        for part in np.array_split(rows, 1 + len(rows) * len(theta) // 2**22):
            value[part], best = _best_on_grid(
                ell - S[part, None] * (theta - m[part, None]) ** 2 / 2,
                theta,
                lambda at, row: loss(at) - S[part[row]] * (at - m[part[row]]) ** 2 / 2,  # noqa: B023
                lambda at, row: loss.gradient(at) - S[part[row]] * (at - m[part[row]]),  # noqa: B023
            )
            eps[part] = best - m[part]
    return MaxLoss(value.reshape(shape), eps.reshape(shape))


def _best_on_grid(
    J: Array, grid: Array, value: Callable[[Array, Rows], Array], slope: Callable[[Array, Rows], Array]
) -> tuple[Array, Array]:
    """The maximum of each row of a function on a grid: its value and its position, which may be an end of the grid.

    Args:
        J: The function on the grid, (rows, n).
        grid: (n,) or (rows, n).
        value: (positions, rows) -> the function.
        slope: (positions, rows) -> its derivative.
    """
    grid = np.broadcast_to(np.pad(grid, [(0, 0)] * (grid.ndim - 1) + [(1, 1)], mode="edge"), (len(J), J.shape[1] + 2))
    J = np.pad(J, [(0, 0), (1, 1)], constant_values=-np.inf)
    left, center, right = J[:, :-2], J[:, 1:-1], J[:, 2:]
    # A parabola through three points with the highest in the middle exceeds it by at most an eighth of their second
    # difference. A half leaves room for functions that are not parabolas.
    hope = center + (2 * center - left - right) / 2
    row, i = np.nonzero((center >= left) & (center >= right) & (hope >= J.max(1, keepdims=True)))
    rising = slope(grid[row, i + 1], row) > 0
    low, high = grid[row, i + rising], grid[row, i + rising + 1]
    for _ in range(50):
        middle = (low + high) / 2
        rising = slope(middle, row) > 0
        low, high = np.where(rising, middle, low), np.where(rising, high, middle)
    polished = value(high, row)
    best = np.lexsort((polished, row))[np.searchsorted(row, np.arange(len(J)), side="right") - 1]
    return polished[best], high[best]


def _maxima_in_space(loss: Loss, m: Array, S: Array, starts: Array | None = None) -> tuple[Array, Array]:
    """Local maxima of loss(m + eps) - 1/2 <eps, S eps>, the largest first: values (k,) and eps (k, P)."""
    kappa, U = np.linalg.eigh(S - loss.checked_majorant.curvature)
    if kappa[0] <= 0:
        return np.array([np.inf]), np.full((1, loss.dim), np.nan)

    def negative(eps: Array) -> tuple[float, Array]:
        return float(eps @ S @ eps / 2 - loss(m + eps)), S @ eps - loss.gradient(m + eps)

    radius = loss.checked_majorant.radius(m, kappa[0], checked_loss(loss, m[None])[0])
    radii = radius * np.logspace(-4, 0, NUM_SCATTERED)  # all scales, because the radius may be much too large
    scattered = (radii[:, None] * _directions(loss.dim) * np.sqrt(kappa[0] / kappa)) @ U.T
    value = checked_loss(loss, m + scattered) - ((scattered @ S) * scattered).sum(1) / 2
    best = scattered[np.argsort(-value)[:6]]
    begin = np.concatenate([best, scattered[:: NUM_SCATTERED // 6], np.zeros((1, loss.dim))])
    if starts is not None:
        begin = np.concatenate([begin, starts - m])
    ends = [minimize(negative, eps, jac=True, method="BFGS", options={"gtol": 1e-9}) for eps in begin]
    ends.sort(key=lambda end: float(end.fun))
    maxima: list[Array] = []
    for end in ends:
        if all(np.linalg.norm(end.x - other) > 1e-4 * (1 + np.linalg.norm(other)) for other in maxima):
            maxima.append(end.x)
    return -np.array([negative(eps)[0] for eps in maxima]), np.array(maxima)


def _directions(dim: int) -> Array:
    x = np.random.default_rng(0).standard_normal((NUM_SCATTERED, dim))
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))
