r"""The closed forms that lead to Algorithm 1: appendix E, "Derivation of the bSAM algorithm".

For a diagonal Gaussian $q = \mathcal N(\omega, \mathrm{diag}(1/s))$ the biconjugate is, with
$\Sigma = \mathrm{diag}(1/b)$,

```math
\begin{aligned}
-f^{**}(\mu) = \min_{m, b} & \left[ \sup_\epsilon \ell(m + \epsilon) - \frac12 \sum_j b_j \epsilon_j^2 \right] \\
& {} + \frac12 \sum_j b_j (\omega_j - m_j)^2 + \frac12 \sum_j \frac{b_j}{s_j}
\end{aligned}
\tag{20}
```

and $\nabla f^{**}(\mu) = (b m, -b/2)$ at the optimum. The appendix takes one approximate step per unknown:

| step | result | function |
|---|---|---|
| 1. linearise the loss at $\theta \sim q$, gradient $g$ | $\epsilon^* = g / b$, used with $b = s$ | `perturbation` |
| 2. linearise it at $\theta + \epsilon^*$, gradient $g_\epsilon$ | $m^* = \omega - g_\epsilon / b$ | `optimal_mean` |
| 3. linearise as in 1, with $m = \omega$ | $b^* = \lvert g \rvert \sqrt s$ | `optimal_precision` |
| 4. insert them into $\nabla f^{**}$ | $(b^* m^*, -b^*/2)$ | `closed_form_gradient` |
| 5. take a step of the Bayesian learning rule, Eq. 14 | see below | `learning_rule` |

```math
\lambda \leftarrow (1 - \alpha) \lambda + \alpha (\lambda_0 + \nabla f^{**}(\mu)) \tag{14}
```

In the coordinates $(s, \omega)$, step 5 equals Eqs. 23 and 24 (`precision_step`, `mean_step`) exactly, if $\omega$
moves with the new $s$. With a loss that sums over $N$ examples, $s = N \hat s$ and mean gradients of a minibatch, this
is Algorithm 1 (`bsam_update`), apart from the changes for deep learning: a separate step size for $s$ ($1 - \beta_2$),
momentum, the damping $\gamma$, $\rho$, and the removal of $\sqrt N$ from $b^*$.

Notes on the printed text:

- Step 3 is one block of a block-coordinate descent. Minimising the linearised problem over $m$ and $b$ together would
  give $b = 0$, because the gain from $m$ cancels the price of $\epsilon$: a linear function is its own envelope.
- Eq. 24 prints $\delta$ where $\delta_0$ is meant.
- Eqs. 21 and 26 print step 2 at $\omega + \epsilon^*$, and the sentence between them at $\theta + \epsilon^*$: see the
  page "Paper, code and library", "Where the second gradient is taken". The closed forms are the same for both.
- For the loss of all $N$ examples, $\epsilon^* = N g / (N \hat s) = g / \hat s$, so $\rho = 1$. The text gets
  $g / (N \hat s)$, so $\rho = 1/N$, because it relaxes the mean losses of $K$ minibatches, one by one. That is the
  looser bound $\frac NK \sum_i f_i^{**} \le f^{**}$.
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
    r"""The objective that Eq. 20 minimises over $m$ and $b > 0$, for $P > 1$.

    Its minimum is $-f^{**}(\mu)$, with $\mu$ of $\mathcal N(\omega, \mathrm{diag}(1/s))$.
    """
    inner = max_loss(loss, m, np.diag(b)).value
    return float(inner + (b * (omega - m) ** 2).sum() / 2 + (b / s).sum() / 2)


def perturbation(g: Array, b: Array) -> Array:
    r"""$\epsilon^* = \Sigma g$, which maximises $\langle g, \epsilon \rangle - \frac12 \sum_j b_j \epsilon_j^2$."""
    return g / b


def optimal_mean(omega: Array, g_eps: Array, b: Array) -> Array:
    r"""$m^* = \omega - \Sigma g_\epsilon$, Eq. 21.

    It minimises $\langle g_\epsilon, m \rangle + \frac12 \sum_j b_j (m_j - \omega_j)^2$.
    """
    return omega - g_eps / b


def optimal_precision(g: Array, s: Array) -> Array:
    r"""$b^* = \lvert g \rvert \sqrt s$, Eq. 22.

    It minimises $\frac12 \sum_j g_j^2 / b_j + \frac12 \sum_j b_j / s_j$.

    Examples:
        >>> optimal_precision(np.array([-3.0]), np.array([4.0]))
        array([6.])
    """
    return np.abs(g) * np.sqrt(s)


def closed_form_gradient(omega: Array, g_eps: Array, b: Array) -> Pair:
    r"""The approximate $\nabla f^{**}(\mu) = (b m^*, -b/2)$.

    The form $b \omega - g_\epsilon$ of $b m^*$ needs no division where $b = 0$.
    """
    return b * omega - g_eps, -b / 2


def learning_rule(natural: Pair, gradient: Pair, prior: Pair, learning_rate: Array | float) -> Pair:
    r"""The new $\lambda$ by the Bayesian learning rule (Eq. 14), for any family.

    Args:
        natural: $\lambda$.
        gradient: Gradient with respect to $\mu$ of $f$ or $f^{**}$, the term of the objective beside the KL.
        prior: $\lambda_0$.
        learning_rate: $\alpha$, above 0 and at most 1.
    """
    alpha = learning_rate
    first, second = (
        (1 - alpha) * old + alpha * (zero + new) for old, zero, new in zip(natural, prior, gradient, strict=True)
    )
    return first, second


def precision_step(s: Array, b: Array, prior_precision: Array | float, learning_rate: Array | float) -> Array:
    """The new $s$, Eq. 23."""
    alpha = learning_rate
    return (1 - alpha) * s + alpha * (b + prior_precision)


def mean_step(
    omega: Array, s: Array, gradient: Pair, prior_precision: Array | float, learning_rate: Array | float
) -> Array:
    r"""The new $\omega$, Eq. 24, given the new $s$ and $\nabla f^{**} = (b m^*, -b/2)$."""
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
    r"""The new $(\omega, \hat s)$ by lines 7 to 9 of Algorithm 1 without momentum, composed of the steps above.

    Args:
        omega: Mean.
        unit_precision: $\hat s$; the posterior's precision is $N \hat s$.
        g: Mean gradient at a sample $\theta \sim \mathcal N(\omega, 1 / (N \hat s))$.
        g_eps: Mean gradient at $\theta + \rho g / \hat s$, or at $\omega + \rho g / \hat s$.
        num_data: $N$.
        delta: Prior precision divided by $N$.
        learning_rate: $\alpha$.
        beta2: 1 minus the learning rate of $s$.
        damping: $\gamma$.
        sqrt_num_data: True keeps the $\sqrt N$ of the derivation (Eq. 27 and 30), which Algorithm 1 leaves out.
    """
    N = num_data
    s = N * unit_precision
    b = optimal_precision(N * g, s if sqrt_num_data else unit_precision)
    s = precision_step(s, b, N * (delta + damping), 1 - beta2)
    omega = mean_step(omega, s, closed_form_gradient(omega, N * g_eps, b), N * delta, learning_rate)
    return omega, s / N
