r"""The objectives of SAM, Bayes and relaxed Bayes, and Theorem 2.

    E_SAM(theta; rho, delta)     = sup_{norm(eps) <= rho} loss(theta + eps) + delta/2 norm(theta)^2         Eq. 1
    E_Bayes(m; sigma, delta)     = E_{e ~ N(0, sigma^2 I)}[loss(m + e)] + delta/2 norm(m)^2                 Eq. 3
    E_relaxed(m, sigma; delta')  = [ sup_eps loss(m + eps) - norm(eps)^2 / (2 sigma^2) ] - log Z            Eq. 12
    -log Z                       = delta'/2 norm(m)^2 - P/2 log(sigma^2 delta')
    ELBO(q), relaxed ELBO(q)     = f(mu) - KL(q, p), f**(mu) - KL(q, p)                                Eqs. 2 and 11

The prior is p = N(0, I/delta_0) and delta' = 1 / (sigma^2 + 1/delta_0). Relaxed Bayes maximised over mu is E_relaxed
minimised over (m, sigma): sup_mu f** - KL = -inf E_relaxed. (Appendix C once prints delta in Z where delta_0 is
meant.)

**Theorem 2.** At a SAM solution theta with perturbation eps on the sphere, norm(eps) = rho, the first-order conditions
are delta theta = -g and eps = (rho / mu) g, where g is the gradient of the loss at theta + eps. The printed proof
does not give the multiplier mu > 0; taking norms shows mu = norm(g). The conditions of E_relaxed are delta' m = -g and
eps = sigma^2 g. Both sets of conditions agree for

    m = theta,   sigma^2 = rho / norm(g),   delta' = delta,        and back:   rho = sigma^2 norm(g) = norm(eps).

Because norm(g) = delta norm(theta), also sigma^2 delta' = rho / norm(theta). A prior delta_0 that gives this delta'
exists exactly if rho < norm(theta), that is, if the perturbation does not reach the origin (`prior_precision_of`).

The proof shows that stationary points with a single worst eps correspond. This is less than the "arg min = arg min" of
the theorem. Three things to know before you try it:

- Where the regulariser is weak, the minimum of E_SAM is usually a kink: two or more eps attain the maximum (in one
  dimension eps = rho and -rho) and no single gradient balances delta theta. The formula then gives no sigma, and there
  may be none. For the loss h/2 (theta - c)^2 and delta c < h rho, SAM's minimum is c, with norm(eps) = rho, while the
  minimum of E_relaxed lies between 0 and c for all sigma and delta' > 0.
- eps must also attain the supremum in E_relaxed, over all eps. The first-order condition does not guarantee it: on the
  sphere the loss may be more curved along eps than 1/sigma^2, or another eps may be worse. This happens for logistic
  regression unless rho is small or delta large. `relaxation_of_sam` checks it with `max_loss` and refuses these points.
- An interior maximum of the ball (norm(eps) < rho) is excluded by assumption.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bsam.theory.fenchel import (
    MaxLoss,
    biconjugate,
    expectation,
    expected_negative_loss,
    max_loss,
    max_loss_in_ball,
    worst_case,
)
from bsam.theory.gaussian import Array, Family, Univariate
from bsam.theory.losses import Loss

__all__ = [
    "Relaxation",
    "bayes_objective",
    "elbo",
    "log_normaliser",
    "prior_precision_of",
    "relaxation_of_sam",
    "relaxed_elbo",
    "relaxed_objective",
    "relaxed_posterior",
    "rho_of_relaxation",
    "sam_objective",
]


def sam_objective(
    loss: Loss, theta: ArrayLike, rho: float, delta: float, *, linearised: bool = False, resolution: float = 0.02
) -> MaxLoss:
    """E_SAM and its perturbation, from the exact maximum over the ball.

    Args:
        loss: The loss. It needs no majorant.
        theta: An array of any shape in one dimension, one vector in P.
        rho: Radius.
        delta: Strength of the regulariser.
        linearised: True takes eps = rho g / norm(g), as the SAM algorithm does, where g is the gradient at theta, and
            the true loss there. The result is never above the exact maximum.
        resolution: As in `max_loss`.

    >>> from bsam.theory.losses import quadratic
    >>> sam_objective(quadratic(0.0, 1.0), [1.0, -2.0], rho=1.0, delta=0.0)
    MaxLoss(value=array([2. , 4.5]), perturbation=array([ 1., -1.]))
    """
    theta = np.asarray(theta, float)
    if linearised:
        g = loss.gradient(theta)
        norm = np.abs(g) if loss.dim == 1 else np.linalg.norm(g)
        eps = rho * np.divide(g, norm, out=np.zeros_like(g), where=norm > 0)
        value = loss(theta + eps)
    else:
        value, eps = max_loss_in_ball(loss, theta, rho, resolution=resolution)
    return MaxLoss(value + delta / 2 * _square_norm(loss, theta), eps)


def bayes_objective(loss: Loss, mean: ArrayLike, sigma: float, delta: float) -> Array:
    """E_Bayes: the expected loss under N(mean, sigma^2 I) plus the regulariser.

    Args:
        loss: The loss.
        mean: m: (...) in one dimension, (..., P) in P.
        sigma: Standard deviation.
        delta: Strength of the regulariser.
    """
    m = np.asarray(mean, float)
    covariance = sigma**2 if loss.dim == 1 else sigma**2 * np.eye(loss.dim)
    return expectation(loss.value, m, covariance, dim=loss.dim).value + delta / 2 * _square_norm(loss, m)


def log_normaliser(mean: ArrayLike, sigma: ArrayLike, delta_prime: ArrayLike, *, dim: int = 1) -> Array:
    """log Z, Eq. 18: Z is the integral of exp(-norm(theta - mean)^2 / (2 sigma^2)) p(theta)."""
    m, sigma, delta_prime = np.asarray(mean, float), np.asarray(sigma, float), np.asarray(delta_prime, float)
    square = m**2 if dim == 1 else (m**2).sum(-1)
    return np.asarray(dim / 2 * np.log(sigma**2 * delta_prime) - delta_prime / 2 * square)


def relaxed_objective(
    loss: Loss, mean: ArrayLike, sigma: ArrayLike, delta_prime: ArrayLike, *, resolution: float = 0.02
) -> MaxLoss:
    """E_relaxed and the perturbation that attains its supremum. It is +inf where 1/sigma^2 is too small.

    Args:
        loss: A loss with a majorant.
        mean: m: an array of any shape in one dimension, one vector in P.
        sigma: Standard deviation: an array that broadcasts with `mean` in one dimension, a number in P.
        delta_prime: delta'; with a prior N(0, I/delta_0) write 1 / (sigma**2 + 1 / delta_0).
        resolution: As in `max_loss`.
    """
    value, eps = max_loss(loss, mean, 1 / np.asarray(sigma, float) ** 2, resolution=resolution)
    return MaxLoss(value - log_normaliser(mean, sigma, delta_prime, dim=loss.dim), eps)


def relaxed_posterior(mean: ArrayLike, sigma: ArrayLike, prior_precision: float) -> tuple[Array, Array]:
    """Mean and variance of the posterior q that belongs to (m, sigma); q is proportional to N(m, sigma^2 I) p."""
    precision = 1 / np.asarray(sigma, float) ** 2
    return np.asarray(mean, float) * precision / (precision + prior_precision), 1 / (precision + prior_precision)


def elbo(
    loss: Loss, mean: ArrayLike, covariance: ArrayLike, prior_precision: float, *, family: Family | None = None
) -> Array:
    """The ELBO, f(mu) - KL(q, p).

    Args:
        loss: The loss.
        mean: omega.
        covariance: The covariance of q, in the form that the family takes.
        prior_precision: delta_0.
        family: The family of q. It is not needed in one dimension.
    """
    family, V = _family(loss, family), np.asarray(covariance, float)
    f = expected_negative_loss(loss, mean, V if loss.dim == 1 else family.matrix(V)).value
    return f - _kl(family, mean, V, prior_precision)


def relaxed_elbo(
    loss: Loss,
    mean: ArrayLike,
    covariance: ArrayLike,
    prior_precision: float,
    *,
    family: Family | None = None,
    tolerance: float = 1e-6,
) -> Array:
    """The relaxed ELBO, f**(mu) - KL(q, p), with the arguments of `elbo`: grids in one dimension, one mu in P."""
    family, V = _family(loss, family), np.asarray(covariance, float)
    if loss.dim == 1:
        f = biconjugate(loss, mean, V, tolerance=tolerance).value
    else:
        f = np.asarray(worst_case(loss, family, mean, V, tolerance=tolerance).value)
    return f - _kl(family, mean, V, prior_precision)


class Relaxation(NamedTuple):
    """The sigma and delta' for which E_relaxed is stationary at a SAM solution."""

    sigma: float
    delta_prime: float


def relaxation_of_sam(
    loss: Loss, theta: ArrayLike, perturbation: ArrayLike, delta: float, *, tolerance: float = 1e-4
) -> Relaxation:
    """The sigma and delta' of a SAM solution: Theorem 2 from left to right.

    Args:
        loss: A loss with a majorant.
        theta: A stationary point of E_SAM, a number or a vector.
        perturbation: The eps of this point, on the sphere. Its norm is rho.
        delta: Strength of the regulariser.
        tolerance: Largest error of the two conditions, relative to norm(g), and largest distance of eps from the
            supremum in E_relaxed, relative to rho norm(g).

    Raises:
        ValueError: If (theta, eps) does not satisfy the first-order conditions, or if another eps attains the supremum
            in E_relaxed.
    """
    theta, eps = np.atleast_1d(np.asarray(theta, float)), np.atleast_1d(np.asarray(perturbation, float))
    g = np.atleast_1d(loss.gradient((theta + eps)[0] if loss.dim == 1 else theta + eps))
    rho, norm = float(np.linalg.norm(eps)), float(np.linalg.norm(g))
    pull = delta * theta
    aligned = np.linalg.norm(rho * g - norm * eps) <= tolerance * rho * norm
    if rho == 0 or norm <= tolerance * np.linalg.norm(pull) or not aligned:
        raise ValueError(
            f"the perturbation {eps} is not {rho:.4g} times the direction of the gradient {g} at theta + eps, so it "
            "is not a maximum of the loss over the ball on its surface. Theorem 2 assumes such a maximum."
        )
    if np.linalg.norm(pull + g) > tolerance * norm:
        raise ValueError(
            f"delta * theta = {pull} and the gradient {g} at theta + eps do not cancel, so theta is not "
            "stationary with this one perturbation. If it minimises E_SAM, several perturbations attain the maximum "
            "(a kink) and Theorem 2 does not cover it; a larger delta or a smaller rho avoids that."
        )
    sigma = (rho / norm) ** 0.5
    place, there = (theta[0], eps[0]) if loss.dim == 1 else (theta, eps)
    worst = max_loss(loss, place, norm / rho)
    attained = float(loss(place + there)) - rho * norm / 2  # norm(eps)^2 / (2 sigma^2)
    if not worst.value <= attained + tolerance * rho * norm:
        raise ValueError(
            f"sigma={sigma:.4g}: the perturbation {eps} does not attain the supremum in E_relaxed. It gives "
            f"{attained:.6g}, and eps={worst.perturbation} gives {worst.value:.6g}, so Theorem 2 fails at this point. "
            "Take a smaller rho or a larger delta, and solve for theta again."
        )
    return Relaxation(sigma, delta)


def rho_of_relaxation(loss: Loss, mean: ArrayLike, sigma: float) -> float:
    """The rho of a stationary point m of E_relaxed, sigma^2 norm(g) = norm(eps): Theorem 2 from right to left."""
    value, eps = max_loss(loss, mean, 1 / sigma**2)
    if not np.isfinite(value):
        raise ValueError(f"sigma={sigma}: sup over eps is infinite; 1/sigma^2 must exceed the majorant's curvature.")
    return float(sigma**2 * np.linalg.norm(loss.gradient(np.asarray(mean, float) + eps)))


def prior_precision_of(sigma: float, delta_prime: float) -> float:
    """The delta_0 with delta' = 1 / (sigma^2 + 1/delta_0).

    Raises:
        ValueError: If there is no such delta_0, because sigma^2 delta' >= 1.

    >>> round(prior_precision_of(sigma=0.5, delta_prime=2.0), 12)
    4.0
    """
    if sigma**2 * delta_prime >= 1:
        raise ValueError(
            f"sigma={sigma} and delta_prime={delta_prime}: sigma^2 * delta_prime = {sigma**2 * delta_prime:.4g} >= 1, "
            "so no prior N(0, I/delta_0) leads to them. At a SAM solution the product is rho / norm(theta). Take a "
            "smaller rho, or use delta_prime as the strength of a regulariser, which needs no prior."
        )
    return 1 / (1 / delta_prime - sigma**2)


def _square_norm(loss: Loss, theta: Array) -> Array:
    return theta**2 if loss.dim == 1 else (theta**2).sum(-1)


def _family(loss: Loss, family: Family | None) -> Family:
    if family is None and loss.dim > 1:
        raise ValueError(f"loss.dim={loss.dim}: choose a family of Gaussians, for instance family=Full({loss.dim}).")
    return family or Univariate()


def _kl(family: Family, mean: ArrayLike, V: Array, prior_precision: float) -> Array:
    return family.kl((mean, V), (np.zeros_like(mean, float), family.identity / prior_precision))
