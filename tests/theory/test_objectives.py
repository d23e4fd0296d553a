import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq, minimize, root

from bsam.theory.fenchel import biconjugate, max_loss, max_loss_in_ball
from bsam.theory.gaussian import Full, Isotropic, Univariate
from bsam.theory.losses import logistic_regression, quadratic, separable_data, three_minima
from bsam.theory.objectives import (
    bayes_objective,
    elbo,
    log_normaliser,
    prior_precision_of,
    relaxation_of_sam,
    relaxed_elbo,
    relaxed_objective,
    relaxed_posterior,
    rho_of_relaxation,
    sam_objective,
)

from .problems import two_dimensional, wavy

RIPPLED = wavy(1.0, -3.0, [(0.3, 2.0, 0.0)])  # around 3


class TestSAM:
    def test_exact_and_linearised(self):
        loss, theta = three_minima(), np.linspace(-6, 6, 121)
        exact = sam_objective(loss, theta, rho=0.5, delta=0.2)
        quick = sam_objective(loss, theta, rho=0.5, delta=0.2, linearised=True)
        np.testing.assert_allclose(exact.value, loss(theta + exact.perturbation) + 0.1 * theta**2)
        assert (np.abs(exact.perturbation) <= 0.5 + 1e-12).all()
        np.testing.assert_allclose(np.abs(quick.perturbation[loss.gradient(theta) != 0]), 0.5)
        assert (quick.value <= exact.value + 1e-12).all()
        assert (quick.value < exact.value - 0.01).any()  # inside the sharp wells the slope misleads

    def test_linearised_is_exact_for_small_rho(self):
        plane, theta = two_dimensional(), np.array([1.0, 1.0])
        exact, quick = (sam_objective(plane, theta, 1e-3, 0.5, linearised=flag) for flag in (False, True))
        np.testing.assert_allclose(exact.perturbation, quick.perturbation, atol=1e-5)
        np.testing.assert_allclose(exact.value, quick.value, atol=1e-8)

    def test_no_gradient_no_perturbation(self):
        assert sam_objective(quadratic(0.0, 1.0), 0.0, 1.0, 1.0, linearised=True).perturbation == 0
        plane = quadratic(np.zeros(2), np.eye(2))
        np.testing.assert_array_equal(
            sam_objective(plane, np.zeros(2), 1.0, 1.0, linearised=True).perturbation, np.zeros(2)
        )


class TestBayes:
    def test_quadratic(self):
        m = np.array([-1.0, 0.0, 2.0])
        np.testing.assert_allclose(
            bayes_objective(quadratic(1.0, 3.0), m, sigma=0.5, delta=0.2), 1.5 * ((m - 1) ** 2 + 0.25) + 0.1 * m**2
        )
        plane, m = quadratic([1.0, 2.0], np.diag([3.0, 1.0])), np.array([[0.0, 0.0], [1.0, 1.0]])
        np.testing.assert_allclose(
            bayes_objective(plane, m, sigma=0.5, delta=0.2),
            plane(m) + 0.25 / 2 * 4 + 0.1 * (m**2).sum(1),
        )

    def test_the_elbo_of_a_quadratic_is_the_evidence_at_the_posterior(self):
        """exp(-loss) a Gaussian likelihood, so the posterior is Gaussian and the bound tight."""
        h, c, delta_0 = 3.0, 1.0, 0.5
        evidence = quad(
            lambda t: np.exp(-h * (t - c) ** 2 / 2 - delta_0 * t**2 / 2) * np.sqrt(delta_0 / (2 * np.pi)), -10, 10
        )[0]
        value = elbo(quadratic(c, h), h * c / (h + delta_0), 1 / (h + delta_0), delta_0)
        np.testing.assert_allclose(value, np.log(evidence), rtol=1e-8)

    def test_e_bayes_is_the_elbo_in_m(self):
        """Equation "isogausselbo": the terms of -ELBO that depend on m."""
        m, sigma, delta = np.array([-1.0, 0.3, 2.0]), 0.7, 0.4
        difference = bayes_objective(RIPPLED, m, sigma, delta) + elbo(RIPPLED, m, sigma**2 * np.ones(3), delta)
        np.testing.assert_allclose(difference, difference[0])


class TestRelaxed:
    def test_log_normaliser(self):
        m, sigma, delta_0 = 1.3, 0.6, 0.4
        prior = lambda t: np.sqrt(delta_0 / (2 * np.pi)) * np.exp(-delta_0 * t**2 / 2)  # noqa: E731
        Z = quad(lambda t: np.exp(-((t - m) ** 2) / (2 * sigma**2)) * prior(t), -20, 20)[0]
        delta_prime = 1 / (sigma**2 + 1 / delta_0)
        np.testing.assert_allclose(log_normaliser(m, sigma, delta_prime), np.log(Z), rtol=1e-8)
        # the plane is a product of lines
        pair = np.array([1.3, -0.2])
        lines = sum(log_normaliser(x, sigma, delta_prime) for x in pair)
        np.testing.assert_allclose(log_normaliser(pair, sigma, delta_prime, dim=2), lines)

    def test_the_maximum_over_mu_for_fixed_m_and_sigma(self):
        """Appendix "Derivation of the equivalent relaxed objective": attained at q proportional to N(m, sigma^2) p."""
        m, sigma, delta_0 = 1.3, 0.6, 0.4
        family = Univariate()

        def inside(omega, v):
            return -((omega - m) ** 2 + v) / (2 * sigma**2) - family.kl((omega, v), (0.0, 1 / delta_0))

        omega, v = relaxed_posterior(m, sigma, delta_0)
        log_Z = log_normaliser(m, sigma, 1 / (sigma**2 + 1 / delta_0))
        np.testing.assert_allclose(inside(omega, v), log_Z)
        step = np.linspace(-0.5, 0.5, 21)
        values = inside(omega + step[:, None], v * np.exp(step))
        assert values.max() <= log_Z + 1e-12

    @pytest.mark.parametrize("loss", [three_minima(), RIPPLED], ids=["three minima", "rippled"])
    def test_maximum_over_mu_is_minimum_over_m_and_sigma(self, loss):
        """sup_mu f** - KL = -inf E_relaxed, equations "relaxedBayes" and "sambayes"."""
        delta_0 = 0.5

        def energy(m, sigma):
            return relaxed_objective(loss, m, sigma, 1 / (sigma**2 + 1 / delta_0)).value

        m, sigma = np.meshgrid(np.linspace(-5, 5, 101), np.exp(np.linspace(-2, 0.9, 30)))
        grid = energy(m, sigma)
        best = np.unravel_index(grid.argmin(), grid.shape)
        omega, v = relaxed_posterior(m[best], sigma[best], delta_0)
        # Back and forth: for mu the best (m, sigma) is grad f**(mu), for (m, sigma) the best mu is relaxed_posterior.
        values = [-grid[best]]
        for _ in range(30):
            first, second = biconjugate(loss, omega, v, tolerance=1e-6).natural
            values.append(relaxed_elbo(loss, omega, v, delta_0))
            m, sigma = -first / second / 2, (-2 * second) ** -0.5
            values.append(-energy(m, sigma))
            omega, v = relaxed_posterior(m, sigma, delta_0)
        assert (np.diff(values) >= -1e-8).all()
        np.testing.assert_allclose(values[-2], values[-1], atol=2e-6)
        # no other (m, sigma) on the grid and no other mu does better
        omegas, vs = np.meshgrid(omega + np.linspace(-4, 4, 41), v * np.logspace(-1, 1, 21))
        assert relaxed_elbo(loss, omegas, vs, delta_0, tolerance=1e-4).max() <= values[-1] + 1e-5

    def test_the_relaxed_elbo_is_lower(self):
        omega, v = np.meshgrid(np.linspace(-5, 5, 11), [0.01, 0.5, 3.0])
        loss = three_minima()
        assert (relaxed_elbo(loss, omega, v, 0.5, tolerance=1e-4) <= elbo(loss, omega, v, 0.5)).all()
        plane, mean, V = two_dimensional(), np.array([2.0, -1.0]), np.array([[0.3, 0.1], [0.1, 0.2]])
        full = relaxed_elbo(plane, mean, V, 0.5, family=Full(2), tolerance=1e-4)
        assert full <= elbo(plane, mean, V, 0.5, family=Full(2))
        round_ = relaxed_elbo(plane, mean, 0.25, 0.5, family=Isotropic(2), tolerance=1e-4)
        assert round_ <= elbo(plane, mean, 0.25, 0.5, family=Isotropic(2))
        with pytest.raises(ValueError, match=r"family=Full\(2\)"):
            elbo(plane, mean, V, 0.5)


def sam_solution(loss, rho, delta):
    """The minimiser of E_SAM, first roughly, then from its first-order condition; and its perturbation."""
    if loss.dim == 1:
        grid = np.linspace(-6, 6, 2401)
        values, eps = sam_objective(loss, grid, rho, delta)
        i = values.argmin()
        condition = lambda t: delta * t + loss.gradient(t + eps[i])  # noqa: E731
        theta = brentq(condition, grid[i] - 0.1, grid[i] + 0.1, xtol=1e-14)
        return theta, sam_objective(loss, theta, rho, delta).perturbation
    rough = minimize(lambda t: sam_objective(loss, t, rho, delta).value, np.zeros(2), method="Nelder-Mead").x

    def condition(x):
        g = loss.gradient(x[:2] + x[2:])
        return np.concatenate([delta * x[:2] + g, x[2:] - rho * g / np.linalg.norm(g)])

    start = np.concatenate([rough, sam_objective(loss, rough, rho, delta).perturbation])
    x = root(condition, start, tol=1e-13).x
    return x[:2], x[2:]


def slope(function, at, step=1e-4):
    """Gradient by central differences."""
    at = np.asarray(at, float)
    steps = step * (np.eye(2) if at.ndim else np.ones(1))
    return np.array([(function(at + d) - function(at - d)) / (2 * step) for d in steps])


class TestTheorem2:
    @pytest.mark.parametrize(("rho", "delta"), [(0.1, 0.5), (0.3, 1.0), (0.5, 1.0), (0.5, 4.0)])
    @pytest.mark.parametrize("loss", [RIPPLED, two_dimensional()], ids=["line", "plane"])
    def test_sam_solutions_are_stationary_for_the_relaxation(self, loss, rho, delta):
        theta, eps = sam_solution(loss, rho, delta)
        np.testing.assert_allclose(np.linalg.norm(eps), rho, rtol=1e-9)  # the constraint is active
        exact = sam_objective(loss, theta, rho, delta)
        np.testing.assert_allclose(eps, exact.perturbation, atol=1e-5)  # and eps is the global maximum over the ball

        sigma, delta_prime = relaxation_of_sam(loss, theta, eps, delta)
        g = loss.gradient(theta + eps)
        np.testing.assert_allclose(sigma**2, rho / np.linalg.norm(g))
        assert delta_prime == delta

        relaxed = relaxed_objective(loss, theta, sigma, delta_prime)
        np.testing.assert_allclose(relaxed.perturbation, eps, atol=1e-6)  # the supremum over all eps is at the same eps
        np.testing.assert_allclose(
            slope(lambda m: relaxed_objective(loss, m, sigma, delta_prime).value, theta), 0, atol=1e-5
        )
        # it is a minimum, here, and the constants of log Z do not depend on m
        nearby = np.random.default_rng(0).normal(scale=0.3, size=(20, *np.shape(theta)))
        assert all(relaxed_objective(loss, theta + d, sigma, delta_prime).value >= relaxed.value for d in nearby)

        np.testing.assert_allclose(rho_of_relaxation(loss, theta, sigma), rho, rtol=1e-5)  # and back
        delta_0 = prior_precision_of(sigma, delta_prime)
        np.testing.assert_allclose(1 / delta_prime, sigma**2 + 1 / delta_0)
        np.testing.assert_allclose(sigma**2 * delta_prime, rho / np.linalg.norm(theta), rtol=1e-6)

    def test_from_the_relaxation_to_sam(self):
        """A minimum of E_relaxed in m, for a given sigma, is a stationary point of E_SAM."""
        sigma, delta = 0.4, 1.0
        m = np.linspace(-5, 6, 2201)
        i = relaxed_objective(RIPPLED, m, sigma, delta).value.argmin()
        condition = lambda t: delta * t + RIPPLED.gradient(t + max_loss(RIPPLED, t, sigma**-2).perturbation)  # noqa: E731
        m = brentq(condition, m[i] - 0.05, m[i] + 0.05, xtol=1e-13)
        rho = rho_of_relaxation(RIPPLED, m, sigma)
        np.testing.assert_allclose(slope(lambda t: sam_objective(RIPPLED, t, rho, delta).value, m), 0, atol=1e-6)

    def test_the_quadratic_in_closed_form(self):
        h, c, rho, delta = 0.5, 2.0, 0.3, 0.7  # delta c > h rho: no kink
        theta = h * (c + rho) / (h + delta)
        loss = quadratic(c, h)
        sigma, delta_prime = relaxation_of_sam(loss, theta, -rho, delta)
        np.testing.assert_allclose(sigma**2, rho / (delta * theta))
        np.testing.assert_allclose(rho_of_relaxation(loss, theta, sigma), rho)
        assert prior_precision_of(sigma, delta_prime) > 0
        with pytest.raises(ValueError, match="infinite"):
            rho_of_relaxation(loss, theta, sigma=1.5)

    def test_a_kink_has_no_sigma(self):
        """With a weak regulariser SAM sits at the minimum of the loss, where eps = rho and -rho are equally bad."""
        loss = quadratic(2.0, 0.5)
        grid = np.linspace(-1, 4, 501)
        theta = grid[sam_objective(loss, grid, 0.5, 0.01).value.argmin()]
        np.testing.assert_allclose(theta, 2.0, atol=1e-3)
        for eps in (0.5, -0.5):
            with pytest.raises(ValueError, match="kink"):
                relaxation_of_sam(loss, theta, eps, 0.01)
        # nor is there another way: E_relaxed has its minimum nearer to zero for all sigma and delta'
        for sigma in (0.1, 1.0, 1.4):
            for delta_prime in (0.001, 0.01, 1.0):
                m = grid[relaxed_objective(loss, grid, sigma, delta_prime).value.argmin()]
                h = 0.5 / (1 - 0.5 * sigma**2)  # the curvature of sup_eps
                np.testing.assert_allclose(m, 2.0 * h / (h + delta_prime), atol=6e-3)

    @pytest.mark.parametrize(("rho", "delta"), [(0.05, 0.1), (0.2, 0.5), (0.2, 1.0)])
    def test_a_perturbation_that_is_not_the_worst_for_its_sigma_is_refused(self, rho, delta):
        """Separable classes: the loss is nearly flat at theta, so sigma is wide, and far away the loss is steep."""
        loss = logistic_regression(*separable_data())
        theta, eps = sam_solution(loss, rho, delta)
        np.testing.assert_allclose(eps, sam_objective(loss, theta, rho, delta).perturbation, atol=1e-5)
        sigma = np.sqrt(rho / np.linalg.norm(loss.gradient(theta + eps)))
        assert rho_of_relaxation(loss, theta, sigma) > 10 * rho  # the way back leads elsewhere
        with pytest.raises(ValueError, match=r"does not attain the supremum.*smaller rho"):
            relaxation_of_sam(loss, theta, eps, delta)

    def test_the_same_loss_with_a_smaller_rho_is_covered(self):
        loss = logistic_regression(*separable_data())
        theta, eps = sam_solution(loss, 0.02, 1.0)
        sigma, _ = relaxation_of_sam(loss, theta, eps, 1.0)
        np.testing.assert_allclose(rho_of_relaxation(loss, theta, sigma), 0.02, rtol=1e-6)

    def test_a_maximum_inside_the_ball_is_refused(self):
        hill = wavy(0.1, 0.0, [(1.0, 1.0, np.pi / 2)])  # cos
        eps = sam_objective(hill, 0.1, 1.0, 0.1).perturbation
        assert abs(eps) < 0.2
        with pytest.raises(ValueError, match="surface"):
            relaxation_of_sam(hill, 0.1, eps, 0.1)
        with pytest.raises(ValueError, match="surface"):
            relaxation_of_sam(hill, 0.1, 0.0, 0.1)

    def test_no_prior_if_the_perturbation_crosses_the_origin(self):
        h, c, delta, rho = 0.1, 1.0, 10.0, 0.5
        theta = h * (c + rho) / (h + delta)
        assert rho > theta
        sigma, delta_prime = relaxation_of_sam(quadratic(c, h), theta, -rho, delta)
        with pytest.raises(ValueError, match=r"no prior N\(0, I/delta_0\)"):
            prior_precision_of(sigma, delta_prime)


@pytest.mark.parametrize(
    "call",
    [
        lambda loss: prior_precision_of(sigma=0.5, delta_prime=-1.0),
        lambda loss: relaxed_objective(loss, 0.0, 1.0, -1.0),
        lambda loss: sam_objective(loss, 0.0, -1.0, 0.1),
        lambda loss: max_loss_in_ball(loss, 0.0, 1.0, resolution=0.0),
        lambda loss: max_loss(loss, 0.0, math.inf),
        lambda loss: max_loss(loss, 0.0, 1.0, resolution=-1.0),
    ],
)
def test_arguments_that_make_no_sense_are_refused(call):
    with pytest.raises(ValueError, match=r"must (be|not be) (positive|finite|negative)"):
        call(three_minima())
