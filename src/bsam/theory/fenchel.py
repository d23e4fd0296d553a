r"""The expected loss, its conjugate and its biconjugate (Section 2.1 of the paper).

With T the sufficient statistics of a Gaussian family (`bsam.theory.gaussian`) and mu its expectation parameters,

    f(mu)        = E_{q_mu}[-loss(theta)]                                                 Eq. 7
    f*(lambda')  = sup_theta  <T(theta), lambda'> + loss(theta)                           Theorem 1, Eq. 10
                 = [ sup_eps  loss(m + eps) - 1/2 <eps, S eps> ] + 1/2 <m, S m>           Eq. 17
    f**(mu)      = sup_{lambda'}  <lambda', mu> - f*(lambda')                             Eq. 8

where lambda' = (S m, -S/2) belongs to N(m, S^-1). The bracket is the max-loss of SAM in its proximal form (`max_loss`);
f* is that plus a constant, and f** is the largest convex function below f.

**What f** is, without conjugates.** f* is a supremum of functions linear in lambda', one for each theta, so f** is a
linear program, and its dual has a distribution w over theta as its unknown:

    -f**(mu) = sup { E_w[loss(theta)] :  w any distribution with E_w[T(theta)] = mu }.

Bayes takes the expected loss under one distribution with these moments, the Gaussian; relaxed Bayes under the worst. So
f** <= f is evident, f** = f for a quadratic loss whose Hessian the family contains (only the moments count), and both
are -loss(omega) when the variance goes to zero. In pictures, f** is the lower convex envelope of the curve
(T(theta), -loss(theta)).

Two details. The supremum may need mass that escapes to infinity and takes second moment with it, at the price of the
loss's curvature there (`Majorant.curvature`); this mirrors that f* is infinite for a precision S below that curvature.
And in one dimension three atoms are enough (three equations).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linprog, minimize  # type: ignore[import-untyped]
from scipy.spatial import ConvexHull  # type: ignore[import-untyped]

from bsam.theory.gaussian import Array, Family, Pair
from bsam.theory.losses import Loss, Majorant

__all__ = [
    "Biconjugate",
    "Conjugate",
    "Expectation",
    "MaxLoss",
    "WorstCase",
    "biconjugate",
    "conjugate",
    "conjugate_maximisers",
    "conjugate_over_gaussians",
    "expectation",
    "expected_negative_loss",
    "max_loss",
    "max_loss_in_ball",
    "smoothed",
    "worst_case",
]

Rows: TypeAlias = NDArray[np.intp]

RANGE = 9.0  # of quadrature, in standard deviations; the density there is 1e-18 of its peak
MAX_GRID = 2**21  # points on the line, to either side
MAX_HULL = 2**18  # points of a convex hull
NUM_SCATTERED = 2048  # points in space
HIGHS = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}

# -- f: expectations under a Gaussian ---------------------------------------------------------------------------------


class Expectation(NamedTuple):
    """An expectation, an estimate of its error, and the spacing of the nodes in standard deviations."""

    value: Array
    error: Array
    step: float


def expectation(
    function: Callable[[Array], Array],
    mean: ArrayLike,
    covariance: ArrayLike,
    *,
    dim: int = 1,
    tolerance: float = 1e-10,
    max_points: int = 2**20,
) -> Expectation:
    """E[function(theta)] for theta ~ N(mean, covariance), by the trapezoidal rule in whitened coordinates.

    For smooth integrands against a Gaussian the error of the trapezoidal rule falls faster than any power of the
    spacing (Trefethen and Weideman 2014). Gauss-Hermite rules waste most nodes where the density vanishes: for
    log(1 + exp(-30 z)) this reaches 1e-10 with some 600 nodes, Gauss-Hermite needs over ten times as many. The spacing
    is halved until two results agree; their difference is the reported error, and that of the returned, finer one is
    smaller.

    Args:
        function: theta -> numbers or arrays, vectorised like the parts of a `Loss`.
        mean: (...) in one dimension, (..., P) in P.
        covariance: The variance, (...) and possibly zero, in one dimension; (..., P, P) in P.
        dim: P.
        tolerance: Required |error| / (1 + |value|).
        max_points: Limit on the number of nodes for one Gaussian.

    Raises:
        RuntimeError: If the tolerance is not reached with `max_points` nodes.

    >>> round(float(expectation(np.cos, 0.0, 1.0).value), 10), round(np.exp(-0.5).item(), 10)
    (0.6065306597, 0.6065306597)
    """
    mean, covariance = np.asarray(mean, float), np.asarray(covariance, float)
    if dim == 1:
        mean, covariance = np.broadcast_arrays(mean, covariance)
        if (covariance < 0).any():
            raise ValueError(f"covariance={covariance.min()} must not be negative.")
    root = np.sqrt(covariance) if dim == 1 else np.linalg.cholesky(covariance)
    step, previous, error = 0.5, None, np.asarray(np.inf)
    while (2 * RANGE / step + 1) ** dim <= max_points:
        z, weights = _nodes(step, dim)
        if dim == 1:
            theta = mean[..., None] + root[..., None] * z[:, 0]
        else:
            theta = mean[..., None, :] + z @ np.swapaxes(root, -1, -2)
        axis = theta.ndim - 1 if dim == 1 else theta.ndim - 2
        value = np.tensordot(function(theta), weights, axes=(axis, 0))
        if previous is not None:
            error = np.abs(value - previous)
            if np.all(error <= tolerance * (1 + np.abs(value))):
                return Expectation(value, error, step)
        step, previous = step / 2, value
    raise RuntimeError(
        f"the expectation changed by {np.max(error):.1e} at the last refinement, tolerance={tolerance} was asked for, "
        f"and a finer rule has more than max_points={max_points} nodes. Raise one of the two, or lower the variance."
    )


def expected_negative_loss(
    loss: Loss, mean: ArrayLike, covariance: ArrayLike, *, tolerance: float = 1e-10
) -> Expectation:
    """f(mu) = E[-loss(theta)] for q_mu = N(mean, covariance), shapes as in `expectation`.

    >>> from bsam.theory.losses import quadratic
    >>> f = expected_negative_loss(quadratic(0.0, 2.0), [0.0, 1.0], 0.5)
    >>> f.value.round(12)
    array([-0.5, -1.5])
    """
    value, error, step = expectation(loss.value, mean, covariance, dim=loss.dim, tolerance=tolerance)
    return Expectation(-value, error, step)


def smoothed(loss: Loss, variance: float, *, tolerance: float = 1e-10) -> Loss:
    """The loss theta -> E[loss(theta + e)], e ~ N(0, variance I): a slice of -f, again with derivatives and a bound."""
    covariance = variance if loss.dim == 1 else variance * np.eye(loss.dim)

    def mean_of(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
        return lambda theta: expectation(function, theta, covariance, dim=loss.dim, tolerance=tolerance).value

    bound = loss.majorant
    if bound is not None:  # E norm(e) <= sqrt(P v), E <e, A e> = v tr A
        trace = float(np.trace(np.atleast_2d(bound.curvature)))
        constant = bound.constant + bound.slope * (loss.dim * variance) ** 0.5 + variance * trace / 2
        bound = Majorant(constant, bound.linear, bound.slope, bound.curvature)
    return Loss(mean_of(loss.value), mean_of(loss.gradient), mean_of(loss.hessian), loss.dim, bound)


def _nodes(step: float, dim: int) -> tuple[Array, Array]:
    """Nodes (n, dim) within RANGE of zero on a square lattice, and their normalised standard normal weights."""
    count = int(RANGE / step)
    line = step * np.arange(-count, count + 1)
    z = np.stack(np.meshgrid(*[line] * dim, indexing="ij"), -1).reshape(-1, dim)
    square = (z**2).sum(1)
    inside = square <= RANGE**2
    weights = np.exp(-square[inside] / 2)
    return z[inside], weights / weights.sum()


# -- f*: the max-loss -------------------------------------------------------------------------------------------------


class MaxLoss(NamedTuple):
    """The value of a maximised loss and the perturbation eps that attains it."""

    value: Array
    perturbation: Array


class Conjugate(NamedTuple):
    """f*(lambda') and the theta that attains it."""

    value: Array
    theta: Array


def max_loss(loss: Loss, mean: ArrayLike, precision: ArrayLike, *, resolution: float = 0.02) -> MaxLoss:
    """sup_eps loss(mean + eps) - 1/2 <eps, precision eps>, over all eps: the second term of Eq. 9.

    The search is global. With the loss's majorant c + <b, theta> + L norm(theta) + 1/2 <theta, A theta>, the objective
    at distance r from the mean m is at most

        c(m) + (norm(b + A m) + L) r - kappa r^2 / 2,     kappa = smallest eigenvalue of precision - A,

    c(m) being the majorant at m. Beyond the radius where this parabola falls below a value already attained there is
    nothing to find. In one dimension everything within that radius is searched on a grid and each grid maximum that
    could still win is polished by bisection on the derivative; in P dimensions many scattered points are tried and
    the best, and some others, polished by BFGS (no guarantee, but P is small). Where kappa <= 0 the result is +inf.

    Args:
        loss: A loss with a majorant.
        mean: m: in one dimension an array of any shape, in P dimensions one vector.
        precision: S: in one dimension an array that broadcasts with `mean`, in P dimensions a number or a P x P matrix.
        resolution: Spacing of the grid in one dimension: finer than the distance between neighbouring maxima.

    >>> from bsam.theory.losses import quadratic
    >>> max_loss(quadratic(0.0, 1.0), [1.0, 2.0], 2.0)
    MaxLoss(value=array([1., 4.]), perturbation=array([1., 2.]))
    """
    if loss.dim == 1:
        return _max_on_line(loss, np.asarray(mean, float), np.asarray(precision, float), resolution)
    S = np.asarray(precision, float) * (1 if np.ndim(precision) == 2 else np.eye(loss.dim))
    values, eps = _maxima_in_space(loss, np.asarray(mean, float), S)
    return MaxLoss(values[0], eps[0])


def max_loss_in_ball(loss: Loss, mean: ArrayLike, rho: float, *, resolution: float = 0.02) -> MaxLoss:
    """sup over norm(eps) <= rho of loss(mean + eps): the max-loss of SAM in its trust-region form, Eq. 1.

    In one dimension by a grid of at most this resolution and bisection; in P dimensions many points of the ball are
    tried and the best polished by SLSQP.

    Args:
        loss: The loss; no majorant needed.
        mean: An array of any shape in one dimension, one vector in P.
        rho: Radius, >= 0.
        resolution: Largest spacing of the grid in one dimension.
    """
    m = np.asarray(mean, float)
    if loss.dim == 1:
        grid = m.reshape(-1, 1) + rho * np.linspace(-1, 1, 3 + 2 * int(rho / resolution))
        value, theta = _best_on_grid(loss(grid), grid, lambda at, _: loss(at), lambda at, _: loss.gradient(at))
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
        for start in eps[np.argsort(-loss(m + eps))[:6]]
    ]
    ends = [x * min(1.0, rho / max(float(np.linalg.norm(x)), 1e-300)) for x in ends]  # SLSQP may end slightly outside
    best = max(ends, key=lambda x: float(loss(m + x)))
    return MaxLoss(loss(m + best), best)


def conjugate(loss: Loss, natural: Pair, *, resolution: float = 0.02) -> Conjugate:
    """f*(lambda') by Theorem 1: the supremum over theta.

    Args:
        loss: A loss with a majorant.
        natural: lambda' = (S m, -S/2): arrays that broadcast in one dimension; a vector and a P x P matrix in P.
        resolution: See `max_loss`.

    Returns:
        The value, +inf outside the domain of f*, and the maximiser.

    >>> from bsam.theory.losses import quadratic
    >>> conjugate(quadratic(0.0, 1.0), (2.0, -1.0)).value.item()  # (lambda_1 + b)^2 / (4 (-lambda_2 - a / 2))
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
    """One f*(lambda') and the theta at which it was found; in P dimensions further local maxima follow, (k, P).

    Args:
        loss: A loss with a majorant.
        natural: lambda', two numbers in one dimension, a vector and a P x P matrix in P.
        starts: Further starting points of the search in P dimensions, (n, P).

    Returns:
        +inf and no theta outside the domain of f*.
    """
    S = -2 * np.asarray(natural[1], float)
    if np.linalg.eigvalsh(np.atleast_2d(S - _majorant(loss).curvature))[0] <= 0:
        return np.inf, np.empty((0, *np.shape(natural[0])))
    if loss.dim == 1:
        value, theta = conjugate(loss, natural)
        return float(value), theta[None]
    m = np.linalg.solve(S, natural[0])
    values, eps = _maxima_in_space(loss, m, S, starts)
    return float(values[0] + m @ S @ m / 2), m + eps


def conjugate_over_gaussians(loss: Loss, natural: Pair, variance: float, *, resolution: float = 0.02) -> Array:
    """sup over Gaussians of <mu'', lambda'> - f(mu''), among those with covariance `variance` times the identity.

    This is the left-hand side of Theorem 1 restricted to one variance: the expectation of <T(theta), lambda'> +
    loss(theta), maximised over the mean. Smoothing never raises a maximum, so it grows when the variance shrinks, and
    its limit is f*(lambda').
    """
    trace = np.trace(natural[1]) if loss.dim > 1 else np.asarray(natural[1], float)
    return trace * variance + conjugate(smoothed(loss, variance), natural, resolution=resolution).value


def _majorant(loss: Loss) -> Majorant:
    if loss.majorant is None:
        raise ValueError(
            "f* needs a loss that a quadratic majorises (Theorem 1), and this one declares no majorant. Write "
            "Loss(..., majorant=Majorant(constant, ...)). If the loss grows faster than every quadratic, as theta^4 "
            "does, f* is infinite everywhere and there is no f**: cap the loss outside the region of interest."
        )
    return loss.majorant


def _checked(loss: Loss, theta: Array) -> Array:
    """loss(theta), after a look at the declared majorant."""
    value, bound = loss(theta), _majorant(loss)(theta)
    wrong = ~(value <= bound + 1e-9 * (1 + np.abs(bound)))
    if wrong.any():
        raise ValueError(
            f"loss={value[wrong][0]:.6g} exceeds majorant={bound[wrong][0]:.6g} at theta={theta[wrong][0]}. Declare a "
            "bound that holds for all theta; if the loss grows faster than every quadratic, f* is infinite everywhere."
        )
    return value


def _reach(loss: Loss, m: Array, S: Array) -> Array:
    """The largest |theta| that the supremum over the line has to consider."""
    bound = _majorant(loss)
    radius = bound.radius(m, S - bound.curvature, _checked(loss, m))
    probe = radius[:, None] * np.linspace(-1, 1, 65) ** 3  # a first look, dense near m, shrinks the radius
    attained = (_checked(loss, m[:, None] + probe) - S[:, None] * probe**2 / 2).max(1, initial=-np.inf)
    return np.abs(m) + bound.radius(m, S - bound.curvature, attained)


def _max_on_line(loss: Loss, mean: Array, precision: Array, resolution: float) -> MaxLoss:
    shape = np.broadcast(mean, precision).shape
    m, S = (np.broadcast_to(x, shape).ravel() for x in (mean, precision))
    value, eps = np.full(m.shape, np.inf), np.full(m.shape, np.nan)
    finite = np.flatnonzero(S - _majorant(loss).curvature > 1e-12 * S)  # to rounding
    counts = _reach(loss, m[finite], S[finite]) / resolution + 2
    if counts.max(initial=0) > MAX_GRID:
        raise ValueError(
            f"the supremum over eps has to be searched up to |theta|={counts.max() * resolution:.3g}, more than "
            f"{MAX_GRID} steps of resolution={resolution}. Raise the resolution, or the precision, which is too close "
            f"to the loss's curvature at infinity, {_majorant(loss).curvature}."
        )
    sizes = np.ceil(np.log2(counts))
    for size in np.unique(sizes):  # rows of similar reach share a grid, on which the loss is evaluated once
        theta = resolution * np.arange(-(2**size), 2**size + 1)
        ell, rows = _checked(loss, theta), finite[sizes == size]
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
    """The maximum of each row of a function known on a grid: its value and its place, ends of the grid included.

    Args:
        J: The function on the grid, (rows, n).
        grid: (n,) or (rows, n).
        value: (places, rows) -> the function.
        slope: (places, rows) -> its derivative.
    """
    if not np.isfinite(J).all():
        raise ValueError("the loss is not finite everywhere on the grid that is searched for its maximum.")
    grid = np.broadcast_to(np.pad(grid, [(0, 0)] * (grid.ndim - 1) + [(1, 1)], mode="edge"), (len(J), J.shape[1] + 2))
    J = np.pad(J, [(0, 0), (1, 1)], constant_values=-np.inf)
    left, center, right = J[:, :-2], J[:, 1:-1], J[:, 2:]
    # A parabola through three points, the middle one highest, rises above it by at most an eighth of their second
    # difference; a half allows for what is not a parabola.
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
    """Local maxima of loss(m + eps) - 1/2 <eps, S eps>, the best first: values (k,) and eps (k, P)."""
    kappa, U = np.linalg.eigh(S - _majorant(loss).curvature)
    if kappa[0] <= 0:
        return np.array([np.inf]), np.full((1, loss.dim), np.nan)

    def negative(eps: Array) -> tuple[float, Array]:
        return float(eps @ S @ eps / 2 - loss(m + eps)), S @ eps - loss.gradient(m + eps)

    radius = _majorant(loss).radius(m, kappa[0], _checked(loss, m[None])[0])
    radii = radius * np.logspace(-4, 0, NUM_SCATTERED)  # all scales: the radius may be far too careful
    scattered = (radii[:, None] * _directions(loss.dim) * np.sqrt(kappa[0] / kappa)) @ U.T
    value = _checked(loss, m + scattered) - ((scattered @ S) * scattered).sum(1) / 2
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


# -- f**: the envelope ------------------------------------------------------------------------------------------------


class Biconjugate(NamedTuple):
    """f**(mu), from below; how far above it the true value may be; and a lambda' that attains it, grad f**(mu)."""

    value: Array
    error: Array
    natural: Pair


class WorstCase(NamedTuple):
    """A `Biconjugate` at one mu, with the atoms and weights of the worst distribution.

    Their moments are mu, except where second moment has escaped to infinity.
    """

    value: float
    error: float
    natural: Pair
    atoms: Array
    weights: Array


def biconjugate(
    loss: Loss, mean: ArrayLike, variance: ArrayLike, *, tolerance: float = 1e-5, resolution: float = 0.02
) -> Biconjugate:
    """f**(mu) for one-dimensional Gaussians N(mean, variance), on grids of any shape.

    With theta on a grid, f** is the lower convex envelope of the points (theta_i, theta_i^2, -loss(theta_i)), and its
    facets are the planes lambda' that matter: one convex hull serves all mu. Atoms on a grid are a restriction, so
    the envelope is an upper bound. Each of its planes, with f* computed without the grid by `conjugate`, is a lower
    bound. The grid is refined until the two agree; the lower one is returned, so the result never exceeds f**.

    (The hull is that of -loss + a/2 theta^2, a the curvature at infinity, and of the same points moved up along
    theta^2: mass that escapes to infinity raises the second moment at no cost. This is the constraint S >= a.)

    Args:
        loss: A one-dimensional loss with a majorant.
        mean: omega.
        variance: v >= 0; for v = 0 this is -loss(omega).
        tolerance: Largest allowed difference of the two bounds.
        resolution: The first spacing of the grid, and the one of `conjugate`.

    >>> from bsam.theory.losses import three_minima
    >>> loss, omega = three_minima(), np.array([-4.0, 0.0])
    >>> bool((biconjugate(loss, omega, 0.5).value <= expected_negative_loss(loss, omega, 0.5).value).all())
    True
    """
    omega, v = np.broadcast_arrays(np.asarray(mean, float), np.asarray(variance, float))
    if loss.dim != 1 or (v < 0).any():
        raise ValueError(
            f"loss.dim={loss.dim} must be 1 and variance={v.min()} not negative. In P dimensions use worst_case."
        )
    a = np.asarray(_majorant(loss).curvature)
    mu = np.stack([omega, omega**2 + v], -1).reshape(-1, 2)
    margin = 0.1 * tolerance / (1 + mu[:, 1].max())  # of S over a
    radius, step = float((np.abs(omega) + 3 * np.sqrt(v)).max()) + 1, resolution
    error = np.asarray(np.inf)
    while radius / step < MAX_HULL / 2:
        grid = step * np.arange(-np.ceil(radius / step), np.ceil(radius / step) + 1)
        planes, offsets = _lower_planes(loss, np.union1d(grid, omega))  # with omega, each mu lies over the grid's hull
        upper, facet = _highest(planes, offsets, mu)
        used, facet = np.unique(facet, return_inverse=True)  # the other planes cannot win
        lambda_1, lambda_2 = planes[used, 0], np.minimum(planes[used, 1], -margin / 2)
        S = a - 2 * lambda_2
        near = _reach(loss, lambda_1 / S, S) < (MAX_GRID - 2) * resolution
        f_star, theta = np.full((2, len(used)), np.inf)
        f_star[near], theta[near] = conjugate(loss, (lambda_1[near], -S[near] / 2), resolution=resolution)
        lower, best = _highest(np.stack([lambda_1, lambda_2], 1), f_star, mu)
        error = upper - lower
        if error.max() <= tolerance:
            value, error, first, second = (
                x.reshape(omega.shape) for x in (lower - a / 2 * mu[:, 1], error, lambda_1[best], -S[best] / 2)
            )
            return Biconjugate(value, error, (first, second))
        if np.abs(theta[facet[error > tolerance]]).max() > radius:  # atoms are missing outside the grid
            radius *= 2
        else:  # the error goes with the square of the step
            step *= max(0.1, 0.7 * float(np.sqrt(tolerance / error.max())))
    raise RuntimeError(
        f"f** is known to {error.max():.1e} only, tolerance={tolerance} was asked for, and the grid would grow beyond "
        f"{MAX_HULL} points. Raise the tolerance, or use worst_case for single points."
    )


def _lower_planes(loss: Loss, theta: Array) -> tuple[Array, Array]:
    """Planes (n, 2) and offsets (n,) with envelope(mu) = max_n <plane_n, mu> - offset_n, relative to a."""
    theta = theta[np.append(True, np.diff(theta) > 1e-7)]  # coinciding points confuse the hull
    height = _majorant(loss).curvature * theta**2 / 2 - loss(theta)
    points = np.stack([theta, theta**2, height], 1)
    points = np.concatenate([points, points + np.array([0.0, theta[-1] ** 2, 0.0])])
    slope, intercept = np.polyfit(theta, height, 1)
    if np.abs(height - slope * theta - intercept).max() <= 1e-12 * (1 + np.abs(height).max()):  # a quadratic: one plane
        return np.array([[slope, 0.0]]), np.array([-intercept])
    equations = ConvexHull(points).equations
    below = equations[equations[:, 2] < -1e-12]
    return -below[:, :2] / below[:, 2:3], below[:, 3] / below[:, 2]


def _highest(planes: Array, offsets: Array, mu: Array) -> tuple[Array, Rows]:
    """max_n <plane_n, mu> - offset_n, and which n."""
    values, facets = [], []
    for part in np.array_split(mu, 1 + len(mu) * len(planes) // 2**22):
        heights = part @ planes.T - offsets
        facets.append(heights.argmax(1))
        values.append(heights.max(1))
    return np.concatenate(values), np.concatenate(facets)


def worst_case(
    loss: Loss,
    family: Family,
    mean: ArrayLike,
    covariance: ArrayLike,
    *,
    tolerance: float = 1e-7,
    max_rounds: int = 200,
) -> WorstCase:
    """f**(mu) at one mu in any family and a few dimensions, with the distribution that attains it.

    The linear program of the module's first lines, solved by adding atoms: the weights of the present atoms are
    optimised (HiGHS), the dual variables are a lambda', and the theta that attain f*(lambda') are the next atoms. The
    program's value is an upper bound on f**(mu), <lambda', mu> - f*(lambda') a lower one; stops when they agree. In
    the dual this is Kelley's cutting-plane method for the concave maximisation over lambda'.

    Mass that escapes to infinity in direction u is a column of its own: it adds T_2(u) to the second moment at the
    cost -1/2 <u, A u>.

    Args:
        loss: A loss with a majorant.
        family: Which T. The smaller the family, the fewer moments the worst case must match, the lower f**.
        mean: omega.
        covariance: As the family wants it.
        tolerance: Largest allowed difference of the two bounds.
        max_rounds: How often to add atoms.

    >>> from bsam.theory.gaussian import Univariate
    >>> from bsam.theory.losses import Loss, Majorant
    >>> loss = Loss(np.cos, lambda t: -np.sin(t), lambda t: -np.cos(t), majorant=Majorant(1.0))
    >>> worst = worst_case(loss, Univariate(), np.pi, 1.0)
    >>> np.sort(worst.atoms - np.pi).round(6), worst.weights.round(6)
    (array([-1.,  1.]), array([0.5, 0.5]))
    """
    P = family.dim
    if loss.dim != P:
        raise ValueError(f"family.dim={P} and loss.dim={loss.dim} must agree.")
    omega, V = np.asarray(mean, float), np.asarray(covariance, float)
    mu = _flat(1, *family.expectation(omega, V))[0]
    A = np.atleast_2d(_majorant(loss).curvature)
    # The first atoms: 2 P that have these moments when equally weighted, and some around them.
    scattered = 2 * np.random.default_rng(0).standard_normal((50 * P, P))
    z = np.concatenate([np.sqrt(P) * np.eye(P), -np.sqrt(P) * np.eye(P), scattered])
    atoms = omega + (z @ np.linalg.cholesky(family.matrix(V)).T).reshape(-1, *omega.shape)
    rays: Array = np.eye(P)
    # The first lambda': a Gaussian at omega, as precise as q on top of the curvature at infinity.
    S = family.inverse(V) + np.linalg.eigvalsh(A)[-1] * family.identity
    best, lower = _flat(1, family.apply(S, omega), -S / 2)[0], -np.inf
    for _ in range(max_rounds):
        columns = np.concatenate(
            [
                _flat(len(atoms), np.ones(len(atoms)), *family.sufficient_statistics(atoms)),
                _flat(len(rays), np.zeros(len(rays)), 0 * rays, family.square(rays)),
            ]
        )
        cost = -np.concatenate([loss(atoms), ((rays @ A) * rays).sum(1) / 2])
        program = linprog(cost, A_eq=columns.T, b_eq=np.append(1.0, mu), options=HIGHS)
        if program.status != 0:
            raise RuntimeError(f"HiGHS did not solve the linear program of f**: {program.message}")
        outside = program.eqlin.marginals[1:]
        if V.ndim == 2:  # the rows of theta_i theta_j and theta_j theta_i are the same and share their dual unevenly
            outside[P:] = (outside[P:].reshape(P, P) + outside[P:].reshape(P, P).T).ravel() / 2
        kappa, U = np.linalg.eigh(family.matrix(-2 * outside[P:].reshape(V.shape)) - A)
        rays = np.concatenate([rays, U.T[kappa < -1e-9]])
        # f* is asked for between the program's lambda' and the best one: there it is finite and the cuts are deep.
        natural = 0.7 * outside + 0.3 * best
        support = atoms[program.x[: len(atoms)] > 0]
        first, second = natural[:P].reshape(omega.shape), natural[P:].reshape(V.shape)
        f_star, theta = conjugate_maximisers(loss, (first, second if P == 1 else family.matrix(second)), support)
        if natural @ mu - f_star > lower:
            best, lower = natural, float(natural @ mu) - f_star
        if program.fun - lower <= tolerance:
            weights = program.x[: len(atoms)]
            pair = best[:P].reshape(omega.shape), best[P:].reshape(V.shape)
            return WorstCase(lower, program.fun - lower, pair, support, weights[weights > 0])
        atoms = np.concatenate([atoms, theta.reshape(-1, *omega.shape)])
    raise RuntimeError(
        f"f** is known to {program.fun - lower:.1e} after max_rounds={max_rounds}, tolerance={tolerance} was asked for."
    )


def _flat(count: int, *parts: Array) -> Array:
    return np.concatenate([part.reshape(count, -1) for part in parts], axis=1)
