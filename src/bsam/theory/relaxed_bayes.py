r"""Exact solutions of Bayes and relaxed Bayes for convex losses, full covariance (appendix F.3).

Both run the Bayesian learning rule on $\lambda$, the natural parameters of $q = \mathcal N(\omega, V)$. For Bayes it is

```math
\lambda \leftarrow (1 - \alpha) \lambda + \alpha (\lambda_0 + \nabla f(\mu)) \tag{34}
```

and relaxed Bayes has $\nabla f^{**}(\mu)$ in place of $\nabla f(\mu)$.

**The gradient of $f$** follows from the theorems of Bonnet and Price. With $g$ and $H$ the expected gradient and
Hessian of the loss under $q$, $\nabla_\omega f = -g$ and $\nabla_V f = -H/2$. Because $\omega = \mu_1$ and
$V = \mu_2 - \mu_1 \mu_1^\top$,

```math
\nabla f(\mu) = (H \omega - g, \; -H/2)
```

**The gradient of $f^{**}$** follows from convex programming. It is the $\lambda'$ that minimises
$f^*(\lambda') - \langle \lambda', \mu \rangle$. For a convex loss, tangents at $L$ points $\theta_i$ are lower bounds.
With their maximum instead of the loss, $f^*$ becomes a maximum of $L$ closed forms. The program is to minimise

```math
c - \langle \lambda', \mu \rangle \tag{32}
```

over $\lambda'$ and $c$, subject to the $L$ constraints

```math
\frac14 \langle \lambda_1' + g_i, (-\lambda_2')^{-1} (\lambda_1' + g_i) \rangle - c
  \le \langle g_i, \theta_i \rangle - \ell(\theta_i) \tag{33}
```

which CVXPY hands to CLARABEL.

The paper does not mention two consequences. Lower bounds on the loss make $f^*$ too small and $f^{**}$ too *large*:
with the $L$ points drawn from $q$, the program bounds $f^{**}$ from above and may even exceed $f$. And the $\theta$
that matter, the atoms of the worst case (`bsam.theory.fenchel`), lie in the tails of $q$, where there are few samples.

Here the samples are only a start. A global search finds the $\theta$ that attain the true $f^*(\lambda')$. They become
further tangent points until the program's value and the lower bound $\langle \lambda', \mu \rangle - f^*(\lambda')$
agree to a tolerance. `tolerance=numpy.inf` is the paper's single program. The difference is large. On `separable_data`,
prior precision 1, Bayes ends with variances (0.24, 0.22) and relaxed Bayes with (0.06, 0.05). With 64 sampled tangents
instead of $f^{**}$ it seems to end near (0.18, 0.16), "very similar" to Bayes.

A quadratic part of the loss, $\frac12 \langle \theta, A \theta \rangle$ with $A$ the majorant's curvature, is linear in
$T(\theta)$. It is removed before the tangents and added to $\lambda'$ again, exactly. The rest must be convex.

The relaxed rule never decreases $f^{**} - \mathrm{KL}$, for any $\alpha$ above 0 and at most 1. $f^{**}$ is convex, so
its tangent at $\mu$ is below it. Up to a constant, the tangent minus KL is minus the KL to the target of the step, and
this KL falls along the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bsam.theory.derivation import learning_rule
from bsam.theory.fenchel import conjugate_maximisers, expectation, expected_negative_loss
from bsam.theory.fenchel.conjugates import checked_loss
from bsam.theory.fenchel.envelope import check_bounds
from bsam.theory.gaussian import Array, Full, Pair
from bsam.theory.losses import Loss

__all__ = [
    "TangentSolution",
    "Trace",
    "bayesian_learning_rule",
    "biconjugate_gradient",
    "expected_negative_loss_gradient",
]


def expected_negative_loss_gradient(
    loss: Loss, mean: ArrayLike, covariance: ArrayLike, *, tolerance: float = 1e-8
) -> Pair:
    r"""The gradient of $f(\mu)$ in $P > 1$ dimensions, by Bonnet and Price and quadrature.

    Examples:
        >>> from bsam.theory.losses import quadratic
        >>> loss = quadratic([1.0, 2.0], np.eye(2))
        >>> first, second = expected_negative_loss_gradient(loss, [0.0, 0.0], np.eye(2))
        >>> first.round(9), second.round(9) + 0.0
        (array([1., 2.]), array([[-0.5,  0. ],
               [ 0. , -0.5]]))
    """
    omega = np.asarray(mean, float)
    g = expectation(loss.gradient, omega, covariance, dim=loss.dim, tolerance=tolerance).value
    H = expectation(loss.hessian, omega, covariance, dim=loss.dim, tolerance=tolerance).value
    return H @ omega - g, -H / 2


class TangentSolution(NamedTuple):
    r"""The gradient of $f^{**}(\mu)$, a lower and an upper bound on $f^{**}(\mu)$, and the tangent points used."""

    natural: Pair
    lower: float
    upper: float
    points: Array


def biconjugate_gradient(
    loss: Loss,
    mean: ArrayLike,
    covariance: ArrayLike,
    points: Array,
    *,
    tolerance: float = 1e-5,
    max_rounds: int = 50,
) -> TangentSolution:
    r"""The gradient and the value of $f^{**}(\mu)$ for a convex loss in $P > 1$ dimensions.

    Args:
        loss: A loss that is convex after its majorant's curvature is removed.
        mean: $\omega$.
        covariance: $V$, (P, P).
        points: First tangent points, (L, P), for instance samples of $q_\mu$.
        tolerance: Largest allowed difference of the two bounds; numpy.inf solves one program without further points.
        max_rounds: Largest number of programs to solve.

    Raises:
        RuntimeError: If CLARABEL does not report an optimal solution, or the tolerance is not reached.
        ValueError: If the loss is found not to be convex.
    """
    if loss.dim == 1 or loss.majorant is None:
        raise ValueError(f"loss.dim={loss.dim} and majorant={loss.majorant}: write a loss with dim > 1 and a majorant.")
    family, A = Full(loss.dim), np.asarray(loss.majorant.curvature)
    omega, V = np.asarray(mean, float), np.asarray(covariance, float)
    mu = family.expectation(omega, V)
    lower = -np.inf
    for _ in range(max_rounds):
        natural, upper = _solve_tangents(loss, A, points, omega, V)
        f_star, theta = conjugate_maximisers(loss, natural, points[-2 * loss.dim :])
        value = float(family.inner(natural, mu)) - f_star
        if value >= lower:
            best, lower = natural, value
        check_bounds(upper - lower, max(tolerance, 1e-6 * (1 + abs(upper))))  # the solver's own error is 1e-7
        if upper - lower <= tolerance:
            return TangentSolution(best, lower, upper, points)
        points = np.concatenate([points, theta])
    raise RuntimeError(
        f"f** is known to {upper - lower:.1e} after max_rounds={max_rounds} programs, not to tolerance={tolerance}."
    )


class _Program(NamedTuple):
    """A CVXPY problem with its parameters and variables, which have no types."""

    problem: Any
    g: Any
    height: Any
    lambda_1: Any
    Q: Any


@cache
def _tangent_program(dim: int, num_tangents: int) -> _Program:
    """Eqs. 32 and 33 for mu = (0, I), compiled once. Q is -lambda_2', and height_i is <g_i, z_i> - loss_i."""
    cp: Any = import_module("cvxpy")  # takes seconds, and only this function needs it
    g, height = cp.Parameter((num_tangents, dim)), cp.Parameter(num_tangents)
    lambda_1, Q, c = cp.Variable(dim), cp.Variable((dim, dim), PSD=True), cp.Variable()
    constraints = [cp.matrix_frac(lambda_1 + g[i], Q) / 4 - c <= height[i] for i in range(num_tangents)]
    return _Program(cp.Problem(cp.Minimize(c + cp.trace(Q)), constraints), g, height, lambda_1, Q)


def _solve_tangents(loss: Loss, A: Array, points: Array, omega: Array, V: Array) -> tuple[Pair, float]:
    """The solution lambda' of the convex program, and its value, an upper bound on f**.

    It is solved for z with theta = omega + root z, where q is standard normal, and for a loss that is scaled to
    gradients of order 1.
    """
    root = np.linalg.cholesky(V)
    z = np.linalg.solve(root, (points - omega).T).T
    r = checked_loss(loss, points) - ((points @ A) * points).sum(1) / 2
    g = (loss.gradient(points) - points @ A) @ root
    scale = np.linalg.norm(g, axis=1).max()
    r, g = r / scale, g / scale
    intercept = r - (g * z).sum(1)
    excess = scale * (g @ z.T + intercept[:, None] - r).max()
    if excess > 1e-7 * scale * (1 + np.abs(r).max()):
        raise ValueError(
            f"a tangent of the loss (minus the curvature of its majorant) is {excess:.3g} above it, so the loss is "
            "not convex, and tangents do not bound it. Use bsam.theory.fenchel.worst_case."
        )
    program = _tangent_program(loss.dim, -(-len(points) // 16) * 16)
    fill = np.minimum(np.arange(program.g.shape[0]), len(points) - 1)  # the last tangent, repeated, fills the program
    program.g.value, program.height.value = g[fill], -intercept[fill]
    try:
        program.problem.solve(solver="CLARABEL")
    except import_module("cvxpy").error.SolverError as error:
        raise RuntimeError(f"CLARABEL failed on the program for grad f** with {len(points)} tangents.") from error
    if program.problem.status != "optimal":
        raise RuntimeError(
            f"CLARABEL reports '{program.problem.status}' for the program of grad f** with {len(points)} tangents."
        )
    kappa, U = np.linalg.eigh(program.Q.value)
    half = np.linalg.solve(root.T, U * np.sqrt(scale * np.maximum(kappa, 1e-9)))  # the solver's zero may be negative
    lambda_2 = -half @ half.T
    first = np.linalg.solve(root.T, scale * program.lambda_1.value) - 2 * lambda_2 @ omega
    quadratic_part = (A * (V + np.outer(omega, omega))).sum() / 2
    return (first, lambda_2 - A / 2), float(-scale * program.problem.value - quadratic_part)


@dataclass(frozen=True)
class Trace:
    r"""The states of a learning rule from start to end, with both objectives at each state.

    Args:
        mean: (steps + 1, P).
        covariance: (steps + 1, P, P).
        elbo: $f - \mathrm{KL}$, (steps + 1,).
        relaxed_elbo: $f^{**} - \mathrm{KL}$, (steps + 1,), as a lower bound.
    """

    mean: Array
    covariance: Array
    elbo: Array
    relaxed_elbo: Array

    @property
    def gap(self) -> Array:
        """The cost of the relaxation, $f - f^{**}$, at each state."""
        return self.elbo - self.relaxed_elbo


def bayesian_learning_rule(
    loss: Loss,
    *,
    prior_precision: float,
    objective: str,
    learning_rate: float,
    num_steps: int,
    mean: ArrayLike | None = None,
    covariance: ArrayLike | None = None,
    num_tangents: int = 16,
    tolerance: float = 1e-5,
    seed: int = 0,
) -> Trace:
    r"""Run Eq. 34 with full covariance, from the prior or a given Gaussian.

    Args:
        loss: A loss as in `biconjugate_gradient`.
        prior_precision: $\delta_0$; the prior is $\mathcal N(0, I / \delta_0)$.
        objective: `"bayes"` follows $\nabla f$, `"relaxed"` $\nabla f^{**}$.
        learning_rate: $\alpha$, above 0 and at most 1.
        num_steps: Number of steps.
        mean: $\omega$ at the start.
        covariance: $V$ at the start.
        num_tangents: $L$, the number of tangent points drawn from $q$ in each step. Some points that earlier steps
            added are kept as well.
        tolerance: Tolerance of $f^{**}$, see `biconjugate_gradient`.
        seed: Seed of the tangent points.
    """
    if objective not in ("bayes", "relaxed"):
        raise ValueError(f"objective={objective!r} must be 'bayes' or 'relaxed'.")
    if not 0 < learning_rate <= 1:
        raise ValueError(f"learning_rate={learning_rate} must lie in (0, 1].")
    family, P = Full(loss.dim), loss.dim
    prior = np.zeros(P), np.eye(P) / prior_precision
    omega = prior[0] if mean is None else np.asarray(mean, float)
    V = prior[1] if covariance is None else np.asarray(covariance, float)
    generator = np.random.default_rng(seed)
    kept = np.empty((0, P))  # tangent points that turned out to matter
    states = []
    for step in range(num_steps + 1):
        samples = omega + generator.standard_normal((num_tangents, P)) @ np.linalg.cholesky(V).T
        relaxed = biconjugate_gradient(loss, omega, V, np.concatenate([samples, kept]), tolerance=tolerance)
        kept = relaxed.points[num_tangents:][-4 * P :]
        f = float(expected_negative_loss(loss, omega, V, tolerance=1e-8).value)
        kl = float(family.kl((omega, V), prior))
        states.append((omega, V, f - kl, relaxed.lower - kl))
        if step < num_steps:
            gradient = expected_negative_loss_gradient(loss, omega, V) if objective == "bayes" else relaxed.natural
            natural = learning_rule(family.natural(omega, V), gradient, family.natural(*prior), learning_rate)
            omega, V = family.from_natural(natural)
    return Trace(*(np.array(column) for column in zip(*states, strict=True)))
