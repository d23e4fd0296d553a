r"""The expected loss, its conjugate and its biconjugate (Section 2.1 of the paper).

With T the sufficient statistics of a Gaussian family (`bsam.theory.gaussian`) and mu its expectation parameters,

    f(mu)        = E_{q_mu}[-loss(theta)]                                                 Eq. 7
    f*(lambda')  = sup_theta  <T(theta), lambda'> + loss(theta)                           Theorem 1, Eq. 10
                 = [ sup_eps  loss(m + eps) - 1/2 <eps, S eps> ] + 1/2 <m, S m>           Eq. 17
    f**(mu)      = sup_{lambda'}  <lambda', mu> - f*(lambda')                             Eq. 8

where lambda' = (S m, -S/2) belongs to N(m, S^-1). The bracket is the max-loss of SAM in its proximal form (`max_loss`).
f* is this max-loss plus a constant, and f** is the largest convex function below f.

**f** without conjugates.** f* is a supremum of functions that are linear in lambda', one per theta. So f** is a linear
program, and the unknown of its dual is a distribution w over theta:

    -f**(mu) = sup { E_w[loss(theta)] :  w any distribution with E_w[T(theta)] = mu }.

Bayes takes the expected loss under one distribution with these moments, the Gaussian. Relaxed Bayes takes it under the
worst distribution. This shows that f** <= f, that f** = f for a quadratic loss whose Hessian the family contains (only
the moments matter), and that both become -loss(omega) when the variance goes to zero. In pictures, f** is the lower
convex envelope of the curve (T(theta), -loss(theta)).

Two details: The supremum may need mass that escapes to infinity and carries second moment with it, at the price of the
loss's curvature there (`Majorant.curvature`). This corresponds to f* being infinite for a precision S below that
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
