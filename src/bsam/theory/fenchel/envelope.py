"""f**, the biconjugate: a convex envelope on the line, and a linear program for the worst distribution elsewhere."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import linprog  # type: ignore[import-untyped]
from scipy.spatial import ConvexHull  # type: ignore[import-untyped]

from bsam.theory.fenchel.conjugates import MAX_GRID, Rows, checked_loss, conjugate, conjugate_maximisers, reach
from bsam.theory.gaussian import Array, Family, Pair
from bsam.theory.losses import Derived, Loss

__all__ = ["Biconjugate", "WorstCase", "biconjugate", "check_bounds", "worst_case"]

MAX_HULL = 2**18  # points of a convex hull
HIGHS = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}


class Biconjugate(NamedTuple):
    r"""A lower bound on $f^{**}(\mu)$, its largest error, and a $\lambda'$ that attains it: $\nabla f^{**}(\mu)$."""

    value: Array
    error: Array
    natural: Pair


class WorstCase(NamedTuple):
    r"""A `Biconjugate` at one $\mu$, with the atoms and weights of the worst distribution.

    The moments of this distribution are $\mu$, except where some second moment has escaped to infinity.
    """

    value: float
    error: float
    natural: Pair
    atoms: Array
    weights: Array


def biconjugate(
    loss: Loss, mean: ArrayLike, variance: ArrayLike, *, tolerance: float = 1e-5, resolution: float = 0.02
) -> Biconjugate:
    r"""$f^{**}(\mu)$ for one-dimensional Gaussians, on grids of any shape.

    On a grid of $\theta$, $f^{**}$ is the lower convex envelope of the points
    $(\theta_i, \theta_i^2, -\ell(\theta_i))$. Its facets are the planes $\lambda'$ that matter, so one convex hull is
    enough for all $\mu$. Atoms on a grid are a restriction, so the envelope is an upper bound. Each of its planes, with
    $f^*$ computed without the grid by `conjugate`, gives a lower bound. The grid is refined until both bounds agree.
    The lower bound is returned, so the result never exceeds $f^{**}$. Means that are far from each other have separate
    grids.

    (The hull is that of $-\ell + \frac a2 \theta^2$, with $a$ the curvature at infinity, and of the same points moved
    up along $\theta^2$: mass that escapes to infinity raises the second moment at no cost. This is the constraint
    $S \ge a$.)

    Args:
        loss: A one-dimensional loss with a majorant.
        mean: $\omega$.
        variance: $v \ge 0$; for $v = 0$ the result is $-\ell(\omega)$.
        tolerance: Largest allowed difference of the two bounds.
        resolution: First spacing of the grid, and the resolution of `conjugate`.

    Examples:
        >>> from bsam.theory.fenchel import expected_negative_loss
        >>> from bsam.theory.losses import three_minima
        >>> loss, omega = three_minima(), np.array([-4.0, 0.0])
        >>> f = expected_negative_loss(loss, omega, 0.5).value
        >>> bool((biconjugate(loss, omega, 0.5).value <= f).all())
        True
    """
    omega, v = np.broadcast_arrays(np.asarray(mean, float), np.asarray(variance, float))
    if loss.dim != 1 or (v < 0).any():
        raise ValueError(
            f"loss.dim={loss.dim} must be 1, and variance={v.min()} must not be negative. In P dimensions use "
            "worst_case."
        )
    shape, omega, v = omega.shape, omega.ravel(), v.ravel()
    value, error, first, second = np.empty((4, omega.size))
    order = np.argsort(omega)
    apart = np.diff(omega[order]) > 2 * _first_radius(0.0, v)  # their first grids would not meet
    for i in np.split(order, 1 + np.flatnonzero(apart)):
        value[i], error[i], (first[i], second[i]) = _on_one_grid(loss, omega[i], v[i], tolerance, resolution)
    return Biconjugate(value.reshape(shape), error.reshape(shape), (first.reshape(shape), second.reshape(shape)))


def _first_radius(omega: ArrayLike, v: Array) -> float:
    return float((np.abs(omega) + 3 * np.sqrt(v)).max()) + 1


def _on_one_grid(loss: Loss, omega: Array, v: Array, tolerance: float, resolution: float) -> Biconjugate:
    """`biconjugate` of vectors of means and variances, on a grid around the means.

    The center of the grid is a whole number, so that means which are close to each other use the same grid.
    """
    center = np.round((omega.min() + omega.max()) / 2)
    loss, omega = _around(loss, center), omega - center
    a = np.asarray(loss.checked_majorant.curvature)
    mu = np.stack([omega, omega**2 + v], -1)
    margin = 0.1 * tolerance / (1 + mu[:, 1].max())  # of S over a
    radius, step = _first_radius(omega, v), resolution
    error = np.asarray(np.inf)
    while radius / step < MAX_HULL / 2:
        grid = step * np.arange(-np.ceil(radius / step), np.ceil(radius / step) + 1)
        planes, offsets = _lower_planes(loss, np.union1d(grid, omega))  # with omega, each mu lies above the grid's hull
        upper, facet = _highest(planes, offsets, mu)
        used, facet = np.unique(facet, return_inverse=True)  # the other planes cannot win
        lambda_1, lambda_2 = planes[used, 0], np.minimum(planes[used, 1], -margin / 2)
        S = a - 2 * lambda_2
        near = reach(loss, lambda_1 / S, S) < (MAX_GRID - 2) * resolution
        f_star, theta = np.full((2, len(used)), np.inf)
        f_star[near], theta[near] = conjugate(loss, (lambda_1[near], -S[near] / 2), resolution=resolution)
        lower, best = _highest(np.stack([lambda_1, lambda_2], 1), f_star, mu)
        error = upper - lower
        check_bounds(float(error.min()), tolerance)
        if error.max() <= tolerance:
            value = np.minimum(lower, upper) - a / 2 * mu[:, 1]
            return Biconjugate(value, np.abs(error), (lambda_1[best] + S[best] * center, -S[best] / 2))
        if np.abs(theta[facet[error > tolerance]]).max() > radius:  # atoms are missing outside the grid
            radius *= 2
        else:  # the error goes with the square of the step
            step *= max(0.1, 0.7 * float(np.sqrt(tolerance / error.max())))
    raise RuntimeError(
        f"f** is known only to {error.max():.1e}, not to tolerance={tolerance}, and a finer grid would have more than "
        f"{MAX_HULL} points. Raise the tolerance, or use worst_case for single points."
    )


def _around(loss: Loss, center: Array) -> Loss:
    """The loss as a function of theta - center. Far from zero, rounding errors of theta^2 would be too large."""
    return Derived(
        lambda theta: checked_loss(loss, theta + center),  # so that an error names theta
        lambda theta: loss.gradient(theta + center),
        lambda theta: loss.hessian(theta + center),
        loss.dim,
        loss.checked_majorant.around(center),
    )


def check_bounds(difference: float, tolerance: float) -> None:
    """Raise if the upper bound on f** minus the lower one is negative, by more than the tolerance."""
    if difference < -tolerance:
        raise RuntimeError(
            f"the lower bound on f** is {-difference:.3g} above the upper bound, so one of them is wrong. Either the "
            "loss's majorant does not hold for all theta: declare a larger one. Or the search for f* missed a narrow "
            "maximum: give biconjugate a smaller resolution, or measure theta in a smaller unit."
        )


def _lower_planes(loss: Loss, theta: Array) -> tuple[Array, Array]:
    """Planes (n, 2) and offsets (n,) with envelope(mu) = max_n <plane_n, mu> - offset_n, relative to a."""
    theta = theta[np.append(True, np.diff(theta) > 1e-7)]  # the hull fails with points that coincide
    height = loss.checked_majorant.curvature * theta**2 / 2 - checked_loss(loss, theta)
    points = np.stack([theta, theta**2, height], 1)
    points = np.concatenate([points, points + np.array([0.0, theta[-1] ** 2, 0.0])])
    slope, intercept = np.polyfit(theta, height, 1)
    if np.abs(height - slope * theta - intercept).max() <= 1e-12 * (1 + np.abs(height).max()):  # a quadratic: one plane
        return np.array([[slope, 0.0]]), np.array([-intercept])
    equations = ConvexHull(points).equations
    below = equations[equations[:, 2] < -1e-12]
    return -below[:, :2] / below[:, 2:3], below[:, 3] / below[:, 2]


def _highest(planes: Array, offsets: Array, mu: Array) -> tuple[Array, Rows]:
    """The maximum over n of <plane_n, mu> - offset_n, and the n that attains it."""
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
    r"""$f^{**}(\mu)$ at one $\mu$ in any family and a few dimensions, with the distribution that attains it.

    This solves the linear program of $f^{**}$, without conjugates, by adding atoms. HiGHS optimises the
    weights of the present atoms, the dual variables are a $\lambda'$, and the $\theta$ that attain $f^*(\lambda')$ are
    the next atoms. The program's value is an upper bound on $f^{**}(\mu)$, and
    $\langle \lambda', \mu \rangle - f^*(\lambda')$ is a lower bound. The loop stops when they agree. In the dual this
    is Kelley's cutting-plane method for the concave maximisation over $\lambda'$.

    Mass that escapes to infinity in direction $u$ is a separate column: it adds $T_2(u)$ to the second moment at the
    cost $-\frac12 \langle u, A u \rangle$.

    Args:
        loss: A loss with a majorant.
        family: The family, which defines $T$. In a smaller family the worst case must match fewer moments, and
            $f^{**}$ is lower.
        mean: $\omega$.
        covariance: The covariance, in the form that the family takes.
        tolerance: Largest allowed difference of the two bounds.
        max_rounds: Largest number of times that atoms are added.

    Examples:
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
    center, V = np.asarray(mean, float), np.asarray(covariance, float)
    loss, omega = _around(loss, center), np.zeros_like(center)
    mu = _flat(1, *family.expectation(omega, V))[0]
    A = np.atleast_2d(loss.checked_majorant.curvature)
    # The first atoms: 2 P atoms that have these moments with equal weights, and some around them.
    scattered = 2 * np.random.default_rng(0).standard_normal((50 * P, P))
    z = np.concatenate([np.sqrt(P) * np.eye(P), -np.sqrt(P) * np.eye(P), scattered])
    atoms = omega + (z @ np.linalg.cholesky(family.matrix(V)).T).reshape(-1, *omega.shape)
    rays: Array = np.eye(P)
    # The first lambda': a Gaussian at omega whose precision is that of q plus the curvature at infinity.
    S = family.inverse(V) + np.linalg.eigvalsh(A)[-1] * family.identity
    best, lower = _flat(1, family.apply(S, omega), -S / 2)[0], -np.inf
    for _ in range(max_rounds):
        columns = np.concatenate(
            [
                _flat(len(atoms), np.ones(len(atoms)), *family.sufficient_statistics(atoms)),
                _flat(len(rays), np.zeros(len(rays)), 0 * rays, family.square(rays)),
            ]
        )
        cost = -np.concatenate([checked_loss(loss, atoms), ((rays @ A) * rays).sum(1) / 2])
        program = linprog(cost, A_eq=columns.T, b_eq=np.append(1.0, mu), options=HIGHS)
        if program.status != 0:
            raise RuntimeError(f"HiGHS did not solve the linear program of f**: {program.message}")
        outside = program.eqlin.marginals[1:]
        if V.ndim == 2:  # theta_i theta_j and theta_j theta_i have equal rows, and unequal duals
            outside[P:] = (outside[P:].reshape(P, P) + outside[P:].reshape(P, P).T).ravel() / 2
        kappa, U = np.linalg.eigh(family.matrix(-2 * outside[P:].reshape(V.shape)) - A)
        rays = np.concatenate([rays, U.T[kappa < -1e-9]])
        # f* is evaluated between the program's lambda' and the best one: there it is finite and the cuts are deep.
        between = 0.7 * outside + 0.3 * best
        support = atoms[program.x[: len(atoms)] > 0]
        first, second = between[:P].reshape(omega.shape), between[P:].reshape(V.shape)
        f_star, theta = conjugate_maximisers(loss, (first, second if P == 1 else family.matrix(second)), support)
        if between @ mu - f_star > lower:
            best, lower = between, float(between @ mu) - f_star
        check_bounds(program.fun - lower, tolerance)
        if program.fun - lower <= tolerance:
            weights = program.x[: len(atoms)]
            first, second = best[:P].reshape(omega.shape), best[P:].reshape(V.shape)
            natural = first + family.apply(-2 * second, center), second
            value, error = min(lower, program.fun), abs(program.fun - lower)
            return WorstCase(value, error, natural, support + center, weights[weights > 0])
        atoms = np.concatenate([atoms, theta.reshape(-1, *omega.shape)])
    raise RuntimeError(
        f"f** is known to {program.fun - lower:.1e} after max_rounds={max_rounds}, not to tolerance={tolerance}."
    )


def _flat(count: int, *parts: Array) -> Array:
    return np.concatenate([part.reshape(count, -1) for part in parts], axis=1)
