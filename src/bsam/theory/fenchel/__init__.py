r"""The expected loss, its conjugate and its biconjugate (Section 2.1 of the paper).

With $T$ the sufficient statistics of a Gaussian family (`bsam.theory.gaussian`) and $\mu$ its expectation parameters,
$f$ is the expected negative loss:

```math
f(\mu) = \mathbb E_{\theta \sim q_\mu} [-\ell(\theta)] \tag{7}
```

Its conjugate is, by Theorem 1, a supremum over points:

```math
f^*(\lambda') = \sup_\theta \; \langle T(\theta), \lambda' \rangle + \ell(\theta) \tag{10}
```

```math
f^*(\lambda') = \left[ \sup_\epsilon \ell(m + \epsilon) - \frac12 \langle \epsilon, S \epsilon \rangle \right]
  + \frac12 \langle m, S m \rangle \tag{17}
```

Here $\lambda' = (S m, -S/2)$ belongs to $\mathcal N(m, S^{-1})$. The bracket is the max-loss of SAM in its proximal
form (`max_loss`), so that $f^*$ is this max-loss plus a constant. The biconjugate is the largest convex function below
$f$:

```math
f^{**}(\mu) = \sup_{\lambda'} \; \langle \lambda', \mu \rangle - f^*(\lambda') \tag{8}
```

**Without conjugates.** $f^*$ is a supremum of functions that are linear in $\lambda'$, one per $\theta$. So $f^{**}$ is
a linear program, and the unknown of its dual is a distribution $w$ over $\theta$:

```math
\begin{aligned}
-f^{**}(\mu) & = \sup_w \, \mathbb E_w [\ell(\theta)], \\
& \phantom{=} \; w \text{ any distribution with } \mathbb E_w [T(\theta)] = \mu
\end{aligned}
```

Bayes takes the expected loss under one distribution with these moments, the Gaussian. Relaxed Bayes takes it under the
worst distribution. This shows that $f^{**} \le f$, that $f^{**} = f$ for a quadratic loss whose Hessian the family
contains (only the moments matter), and that both become $-\ell(\omega)$ when the variance goes to zero. In pictures,
$f^{**}$ is the lower convex envelope of the curve $(T(\theta), -\ell(\theta))$.

Two details: The supremum may need mass that escapes to infinity and carries second moment with it, at the price of the
loss's curvature there (`Majorant.curvature`). This corresponds to $f^*$ being infinite for a precision $S$ below that
curvature. In one dimension three atoms are enough, because there are three equations.
"""

from bsam.theory.fenchel.conjugates import (
    Conjugate,
    MaxLoss,
    conjugate,
    conjugate_maximisers,
    conjugate_over_gaussians,
    max_loss,
    max_loss_in_ball,
)
from bsam.theory.fenchel.envelope import Biconjugate, WorstCase, biconjugate, worst_case
from bsam.theory.fenchel.expected_loss import Expectation, expectation, expected_negative_loss, smoothed

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
