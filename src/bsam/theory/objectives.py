r"""The objectives of SAM, Bayes and relaxed Bayes, and Theorem 2.

```math
\mathcal E_{\text{SAM}}(\theta; \rho, \delta) = \sup_{\lVert \epsilon \rVert \le \rho} \ell(\theta + \epsilon)
  + \frac \delta 2 \lVert \theta \rVert^2 \tag{1}
```

```math
\mathcal E_{\text{Bayes}}(m; \sigma, \delta) = \mathbb E_{e \sim \mathcal N(0, \sigma^2 I)} [\ell(m + e)]
  + \frac \delta 2 \lVert m \rVert^2 \tag{3}
```

```math
\mathcal E_{\text{relaxed}}(m, \sigma; \delta')
  = \left[ \sup_\epsilon \ell(m + \epsilon) - \frac{1}{2 \sigma^2} \lVert \epsilon \rVert^2 \right] - \log Z \tag{12}
```

```math
-\log Z = \frac{\delta'}{2} \lVert m \rVert^2 - \frac P2 \log (\sigma^2 \delta') \tag{18}
```

The ELBO of a Gaussian $q$ with expectation parameters $\mu$ is $f(\mu) - \mathrm{KL}(q \parallel p)$ (Eq. 2), and the
relaxed ELBO is $f^{**}(\mu) - \mathrm{KL}(q \parallel p)$ (Eq. 11). The prior is $p = \mathcal N(0, I / \delta_0)$, and
$\delta' = 1 / (\sigma^2 + 1 / \delta_0)$. The maximum of the relaxed ELBO over $\mu$ is minus the minimum of
$\mathcal E_{\text{relaxed}}$ over $m$ and $\sigma$. (Appendix C once prints $\delta$ in $Z$ where $\delta_0$ is meant.)

**Theorem 2.** At a SAM solution $\theta$ with perturbation $\epsilon$ on the sphere, $\lVert \epsilon \rVert = \rho$,
the first-order conditions are $\delta \theta = -g$ and $\epsilon = (\rho / \mu) g$, where $g$ is the gradient of the
loss at $\theta + \epsilon$. The printed proof does not give the multiplier $\mu > 0$; taking norms shows
$\mu = \lVert g \rVert$. The conditions of $\mathcal E_{\text{relaxed}}$ are $\delta' m = -g$ and
$\epsilon = \sigma^2 g$. Both sets of conditions agree for

```math
m = \theta, \qquad \sigma^2 = \rho / \lVert g \rVert, \qquad \delta' = \delta
```

and back for $\rho = \sigma^2 \lVert g \rVert = \lVert \epsilon \rVert$. Because
$\lVert g \rVert = \delta \lVert \theta \rVert$, also $\sigma^2 \delta' = \rho / \lVert \theta \rVert$. A prior
$\delta_0$ that gives this $\delta'$ exists exactly if $\rho < \lVert \theta \rVert$, that is, if the perturbation does
not reach the origin (`prior_precision_of`).

The proof shows that stationary points with a single worst $\epsilon$ correspond. This is less than the
"arg min = arg min" of the theorem. Three things to know before you try it:

- Where the regulariser is weak, the minimum of $\mathcal E_{\text{SAM}}$ is usually a kink: two or more $\epsilon$
  attain the maximum (in one dimension $\rho$ and $-\rho$), and no single gradient balances $\delta \theta$. The formula
  then gives no $\sigma$, and there may be none. For the loss $\frac h2 (\theta - c)^2$ and $\delta c < h \rho$, SAM's
  minimum is $c$, with $\lVert \epsilon \rVert = \rho$, while the minimum of $\mathcal E_{\text{relaxed}}$ lies between
  0 and $c$ for all $\sigma$ and $\delta' > 0$.
- $\epsilon$ must also attain the supremum in $\mathcal E_{\text{relaxed}}$, over all $\epsilon$. The first-order
  condition does not guarantee it: on the sphere the loss may be more curved along $\epsilon$ than $1 / \sigma^2$, or
  another $\epsilon$ may be worse. This happens for logistic regression unless $\rho$ is small or $\delta$ large.
  `relaxation_of_sam` checks it with `max_loss` and refuses these points.
- An interior maximum of the ball, $\lVert \epsilon \rVert < \rho$, is excluded by assumption.
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
    r"""SAM's objective $\mathcal E_{\text{SAM}}$ and its perturbation, from the exact maximum over the ball.

    Args:
        loss: The loss. It needs no majorant.
        theta: An array of any shape in one dimension, one vector in $P$.
        rho: Radius.
        delta: Strength of the regulariser.
        linearised: True takes $\epsilon = \rho g / \lVert g \rVert$, as the SAM algorithm does, where $g$ is the
            gradient at $\theta$, and the true loss there. The result is never above the exact maximum.
        resolution: As in `max_loss`.

    Examples:
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
    r"""$\mathcal E_{\text{Bayes}}$: the expected loss under $\mathcal N(m, \sigma^2 I)$ plus the regulariser.

    Args:
        loss: The loss.
        mean: $m$: (...) in one dimension, (..., P) in $P$.
        sigma: Standard deviation.
        delta: Strength of the regulariser.
    """
    m = np.asarray(mean, float)
    covariance = sigma**2 if loss.dim == 1 else sigma**2 * np.eye(loss.dim)
    return expectation(loss.value, m, covariance, dim=loss.dim).value + delta / 2 * _square_norm(loss, m)


def log_normaliser(mean: ArrayLike, sigma: ArrayLike, delta_prime: ArrayLike, *, dim: int = 1) -> Array:
    r"""The logarithm of the normaliser $Z$, Eq. 18.

    $Z$ is the integral of $\exp(-\lVert \theta - m \rVert^2 / (2 \sigma^2)) \, p(\theta)$ over $\theta$.
    """
    m, sigma, delta_prime = np.asarray(mean, float), np.asarray(sigma, float), np.asarray(delta_prime, float)
    square = m**2 if dim == 1 else (m**2).sum(-1)
    return np.asarray(dim / 2 * np.log(sigma**2 * delta_prime) - delta_prime / 2 * square)


def relaxed_objective(
    loss: Loss, mean: ArrayLike, sigma: ArrayLike, delta_prime: ArrayLike, *, resolution: float = 0.02
) -> MaxLoss:
    r"""$\mathcal E_{\text{relaxed}}$ and the perturbation that attains its supremum.

    It is +inf where $1 / \sigma^2$ is too small.

    Args:
        loss: A loss with a majorant.
        mean: $m$: an array of any shape in one dimension, one vector in $P$.
        sigma: Standard deviation: an array that broadcasts with `mean` in one dimension, a number in $P$.
        delta_prime: $\delta'$; with a prior $\mathcal N(0, I / \delta_0)$ write `1 / (sigma**2 + 1 / delta_0)`.
        resolution: As in `max_loss`.
    """
    if np.min(delta_prime) <= 0:
        raise ValueError(f"delta_prime={delta_prime!r} must be positive: it is a precision.")
    value, eps = max_loss(loss, mean, 1 / np.asarray(sigma, float) ** 2, resolution=resolution)
    return MaxLoss(value - log_normaliser(mean, sigma, delta_prime, dim=loss.dim), eps)


def relaxed_posterior(mean: ArrayLike, sigma: ArrayLike, prior_precision: float) -> tuple[Array, Array]:
    r"""Mean and variance of the posterior $q$ that belongs to $m$ and $\sigma$.

    $q$ is proportional to $\mathcal N(m, \sigma^2 I)$ times the prior.
    """
    precision = 1 / np.asarray(sigma, float) ** 2
    return np.asarray(mean, float) * precision / (precision + prior_precision), 1 / (precision + prior_precision)


def elbo(
    loss: Loss, mean: ArrayLike, covariance: ArrayLike, prior_precision: float, *, family: Family | None = None
) -> Array:
    r"""The ELBO, $f(\mu) - \mathrm{KL}(q \parallel p)$.

    Args:
        loss: The loss.
        mean: $\omega$.
        covariance: The covariance of $q$, in the form that the family takes.
        prior_precision: $\delta_0$.
        family: The family of $q$. It is not needed in one dimension.
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
    r"""The relaxed ELBO, $f^{**}(\mu) - \mathrm{KL}(q \parallel p)$.

    The arguments are those of `elbo`: grids in one dimension, one $\mu$ in $P$.
    """
    family, V = _family(loss, family), np.asarray(covariance, float)
    if loss.dim == 1:
        f = biconjugate(loss, mean, V, tolerance=tolerance).value
    else:
        f = np.asarray(worst_case(loss, family, mean, V, tolerance=tolerance).value)
    return f - _kl(family, mean, V, prior_precision)


class Relaxation(NamedTuple):
    r"""The $\sigma$ and $\delta'$ for which $\mathcal E_{\text{relaxed}}$ is stationary at a SAM solution."""

    sigma: float
    delta_prime: float


def relaxation_of_sam(
    loss: Loss, theta: ArrayLike, perturbation: ArrayLike, delta: float, *, tolerance: float = 1e-4
) -> Relaxation:
    r"""The $\sigma$ and $\delta'$ of a SAM solution: Theorem 2 from left to right.

    Args:
        loss: A loss with a majorant.
        theta: A stationary point of $\mathcal E_{\text{SAM}}$, a number or a vector.
        perturbation: The $\epsilon$ of this point, on the sphere. Its norm is $\rho$.
        delta: Strength of the regulariser.
        tolerance: Largest error of the two conditions, relative to $\lVert g \rVert$, and largest distance of
            $\epsilon$ from the supremum in $\mathcal E_{\text{relaxed}}$, relative to $\rho \lVert g \rVert$.

    Raises:
        ValueError: If $\theta$ and $\epsilon$ do not satisfy the first-order conditions, or if another $\epsilon$
            attains the supremum in $\mathcal E_{\text{relaxed}}$.
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
    r"""The $\rho$ of a stationary point of $\mathcal E_{\text{relaxed}}$: Theorem 2 from right to left.

    It is $\rho = \sigma^2 \lVert g \rVert = \lVert \epsilon \rVert$.
    """
    value, eps = max_loss(loss, mean, 1 / sigma**2)
    if not np.isfinite(value):
        raise ValueError(f"sigma={sigma}: sup over eps is infinite; 1/sigma^2 must exceed the majorant's curvature.")
    return float(sigma**2 * np.linalg.norm(loss.gradient(np.asarray(mean, float) + eps)))


def prior_precision_of(sigma: float, delta_prime: float) -> float:
    r"""The prior precision $\delta_0$ for which $\delta' = 1 / (\sigma^2 + 1 / \delta_0)$.

    Raises:
        ValueError: If there is no such $\delta_0$, because $\sigma^2 \delta' \ge 1$.

    Examples:
        >>> round(prior_precision_of(sigma=0.5, delta_prime=2.0), 12)
        4.0
    """
    if delta_prime <= 0:
        raise ValueError(f"delta_prime={delta_prime} must be positive: it is a precision.")
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
