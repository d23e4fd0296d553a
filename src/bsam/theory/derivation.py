r"""The closed forms that lead to Algorithm 1: appendix E, "Derivation of the bSAM algorithm".

For a diagonal Gaussian q = N(omega, diag(1/s)) the biconjugate is, with Sigma = diag(1/b) (Eq. 20),

    -f**(mu) = min_{m, b} [ sup_eps loss(m + eps) - 1/2 sum b eps^2 ] + 1/2 sum b (omega - m)^2 + 1/2 sum b / s

and grad f**(mu) = (b m, -b/2) at the optimum. The appendix takes one approximate step per unknown:

    1. linearise the loss at theta ~ q, gradient g:     eps* = g / b, used with b = s        `perturbation`
    2. linearise it at theta + eps*, gradient g_eps:    m* = omega - g_eps / b               `optimal_mean`
    3. linearise as in 1, with m = omega:               b* = |g| sqrt(s)                     `optimal_precision`
    4. insert them into grad f**:                       (b* m*, -b*/2)                       `closed_form_gradient`
    5. Bayesian learning rule, Eq. 14:                  lambda <- (1 - alpha) lambda + alpha (lambda_0 + grad f**)

In the coordinates (s, omega), step 5 equals Eqs. 23 and 24 (`precision_step`, `mean_step`) exactly, if omega moves with
the new s. With a loss that sums over N examples, s = N s_hat and mean gradients of a minibatch, this is Algorithm 1
(`bsam_update`), apart from the changes for deep learning: a separate step size for s (1 - beta2), momentum, the damping
gamma, rho, and the removal of sqrt(N) from b*.

Notes on the printed text:

- Step 3 is one block of a block-coordinate descent. Minimising the linearised problem over m and b together would give
  b = 0, because the gain from m cancels the price of eps: a linear function is its own envelope.
- Eq. 24 prints delta where delta_0 is meant.
- Eqs. 21 and 26 print step 2 at omega + eps*, and the sentence between them at theta + eps*: see docs/algorithm.md,
  "Where the second gradient is taken". The closed forms are the same for both.
- For the loss of all N examples, eps* = N g / (N s_hat) = g / s_hat, so rho = 1. The text gets g / (N s_hat), so rho =
  1/N, because it relaxes the mean loss of one minibatch. That is the looser bound N/K sum_i f_i** <= f**.
"""

from __future__ import annotations

import numpy as np

from bsam.theory.fenchel import max_loss
from bsam.theory.gaussian import Array, Pair
from bsam.theory.losses import Loss

__all__ = [
    "bsam_update",
    "closed_form_gradient",
    "diagonal_objective",
    "learning_rule",
    "mean_step",
    "optimal_mean",
    "optimal_precision",
    "perturbation",
    "precision_step",
]


def diagonal_objective(loss: Loss, omega: Array, s: Array, m: Array, b: Array) -> float:
    """The objective that Eq. 20 minimises over m and b > 0, for P > 1: its minimum is -f**(mu), mu of N(omega, 1/s)."""
    inner = max_loss(loss, m, np.diag(b)).value
    return float(inner + (b * (omega - m) ** 2).sum() / 2 + (b / s).sum() / 2)


def perturbation(g: Array, b: Array) -> Array:
    """eps* = Sigma g, which maximises <g, eps> - 1/2 sum b eps^2."""
    return g / b


def optimal_mean(omega: Array, g_eps: Array, b: Array) -> Array:
    """m* = omega - Sigma g_eps, which minimises <g_eps, m> + 1/2 sum b (m - omega)^2 (Eq. 21)."""
    return omega - g_eps / b


def optimal_precision(g: Array, s: Array) -> Array:
    """b* = |g| sqrt(s), which minimises 1/2 sum g^2 / b + 1/2 sum b / s (Eq. 22).

    >>> optimal_precision(np.array([-3.0]), np.array([4.0]))
    array([6.])
    """
    return np.abs(g) * np.sqrt(s)


def closed_form_gradient(omega: Array, g_eps: Array, b: Array) -> Pair:
    """The approximate grad f**(mu) = (b m*, -b/2). The form b omega - g_eps needs no division where b = 0."""
    return b * omega - g_eps, -b / 2


def learning_rule(natural: Pair, gradient: Pair, prior: Pair, learning_rate: Array | float) -> Pair:
    """The new lambda by the Bayesian learning rule (Eq. 14), for any family.

    Args:
        natural: lambda.
        gradient: Gradient with respect to mu of f or f**, the term that is added to -KL.
        prior: lambda_0.
        learning_rate: alpha in (0, 1].
    """
    alpha = learning_rate
    first, second = (
        (1 - alpha) * old + alpha * (zero + new) for old, zero, new in zip(natural, prior, gradient, strict=True)
    )
    return first, second


def precision_step(s: Array, b: Array, prior_precision: Array | float, learning_rate: Array | float) -> Array:
    """The new s, Eq. 23."""
    alpha = learning_rate
    return (1 - alpha) * s + alpha * (b + prior_precision)


def mean_step(
    omega: Array, s: Array, gradient: Pair, prior_precision: Array | float, learning_rate: Array | float
) -> Array:
    """The new omega, Eq. 24, given the new s and grad f** = (b m*, -b/2)."""
    b_m, b = gradient[0], -2 * gradient[1]
    return omega - learning_rate / s * (b * omega - b_m + prior_precision * omega)


def bsam_update(
    omega: Array,
    unit_precision: Array,
    g: Array,
    g_eps: Array,
    *,
    num_data: float,
    delta: float,
    learning_rate: float,
    beta2: float,
    damping: float,
    sqrt_num_data: bool = False,
) -> tuple[Array, Array]:
    """The new (omega, unit_precision) by lines 7 to 9 of Algorithm 1 without momentum, composed of the steps above.

    Args:
        omega: Mean.
        unit_precision: s_hat; the posterior's precision is N s_hat.
        g: Mean gradient at a sample theta ~ N(omega, 1 / (N s_hat)).
        g_eps: Mean gradient at theta + rho g / s_hat, or at omega + rho g / s_hat.
        num_data: N.
        delta: Prior precision divided by N.
        learning_rate: alpha.
        beta2: 1 minus the learning rate of s.
        damping: gamma.
        sqrt_num_data: True keeps the sqrt(N) of the derivation (Eq. 27), which Algorithm 1 leaves out.
    """
    N = num_data
    s = N * unit_precision
    b = optimal_precision(N * g, s if sqrt_num_data else unit_precision)
    s = precision_step(s, b, N * (delta + damping), 1 - beta2)
    omega = mean_step(omega, s, closed_form_gradient(omega, N * g_eps, b), N * delta, learning_rate)
    return omega, s / N
