import numpy as np
import pytest

from bsam.theory.fenchel import conjugate, expected_negative_loss, worst_case
from bsam.theory.gaussian import Full
from bsam.theory.losses import Loss, logistic_regression, quadratic, separable_data
from bsam.theory.objectives import elbo, relaxed_elbo
from bsam.theory.relaxed_bayes import (
    _tangent_program,
    bayesian_learning_rule,
    biconjugate_gradient,
    expected_negative_loss_gradient,
)

from .problems import two_dimensional

H = np.array([[2.0, 0.5], [0.5, 1.0]])
CENTER = np.array([1.0, 2.0])
MEAN = np.array([1.0, 1.5])
V = np.array([[0.3, -0.1], [-0.1, 0.2]])
FULL = Full(2)


def ridge_logistic():
    """Logistic regression plus a quadratic: convex, and with curvature at infinity."""
    logistic, bowl = logistic_regression(*separable_data()), quadratic(CENTER, H)
    a, b = logistic.majorant, bowl.majorant
    bound = type(a)(a.constant + b.constant, a.linear + b.linear, a.slope, b.curvature)
    return Loss(
        lambda t: logistic(t) + bowl(t),
        lambda t: logistic.gradient(t) + bowl.gradient(t),
        lambda t: logistic.hessian(t) + bowl.hessian(t),
        2,
        bound,
    )


@pytest.fixture(scope="module")
def logistic():
    return logistic_regression(*separable_data())


def draws(mean, covariance, count=16):
    return mean + np.random.default_rng(0).normal(size=(count, 2)) @ np.linalg.cholesky(covariance).T


def derivative(function, mu, direction, step=1e-4):
    """Of a function of (mean, covariance) along a direction in expectation parameters."""
    ahead, behind = (
        function(*FULL.from_expectation(tuple(x + s * d for x, d in zip(mu, direction, strict=True))))
        for s in (step, -step)
    )
    return (ahead - behind) / (2 * step)


DIRECTIONS = [
    (np.array([1.0, 0.0]), np.zeros((2, 2))),
    (np.array([0.0, 1.0]), np.zeros((2, 2))),
    (np.zeros(2), np.array([[1.0, 0.0], [0.0, 0.0]])),
    (np.zeros(2), np.array([[0.0, 1.0], [1.0, 0.0]])),
    (np.zeros(2), np.array([[0.0, 0.0], [0.0, 1.0]])),
]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bonnet_and_price(logistic, direction):
    """grad f against finite differences in expectation parameters."""
    gradient = expected_negative_loss_gradient(logistic, MEAN, V)
    f = lambda m, c: expected_negative_loss(logistic, m, c, tolerance=1e-12).value  # noqa: E731
    expected = derivative(f, FULL.expectation(MEAN, V), direction)
    np.testing.assert_allclose(FULL.inner(gradient, direction), expected, rtol=1e-5, atol=1e-6)


class TestBiconjugateGradient:
    @pytest.mark.parametrize("loss", [logistic_regression(*separable_data()), ridge_logistic()], ids=["plain", "ridge"])
    def test_against_the_linear_program(self, loss):
        tangents = biconjugate_gradient(loss, MEAN, V, draws(MEAN, V), tolerance=1e-6)
        atoms = worst_case(loss, FULL, MEAN, V, tolerance=1e-6)
        assert atoms.value - 1e-9 <= tangents.upper + 1e-6
        np.testing.assert_allclose(tangents.lower, atoms.value, atol=2e-6)
        for ours, theirs in zip(tangents.natural, atoms.natural, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-2, atol=1e-2)
        # the lower bound is one: f* at this lambda', maximised afresh
        mu = FULL.expectation(MEAN, V)
        bound = FULL.inner(tangents.natural, mu) - conjugate(loss, tangents.natural).value
        np.testing.assert_allclose(tangents.lower, bound, atol=1e-8)
        assert tangents.upper <= expected_negative_loss(loss, MEAN, V).value

    @pytest.mark.parametrize("direction", [DIRECTIONS[0], DIRECTIONS[3]])
    def test_against_finite_differences(self, logistic, direction):
        points = draws(MEAN, V)
        gradient = biconjugate_gradient(logistic, MEAN, V, points, tolerance=1e-7).natural
        f = lambda m, c: biconjugate_gradient(logistic, m, c, points, tolerance=1e-7).lower  # noqa: E731
        expected = derivative(f, FULL.expectation(MEAN, V), direction, step=1e-3)
        np.testing.assert_allclose(FULL.inner(gradient, direction), expected, rtol=2e-3, atol=2e-3)

    def test_sampled_tangents_alone_are_too_optimistic(self, logistic):
        """The paper's single program bounds f** from above, and with few tangents exceeds even f."""
        exact = biconjugate_gradient(logistic, MEAN, V, draws(MEAN, V), tolerance=1e-5)
        sampled = [
            biconjugate_gradient(logistic, MEAN, V, draws(MEAN, V, count), tolerance=np.inf) for count in (2, 16, 64)
        ]
        assert all(s.upper > exact.upper + 0.1 for s in sampled)
        assert sampled[0].upper > expected_negative_loss(logistic, MEAN, V).value
        assert all(s.lower < exact.lower - 0.1 for s in sampled)  # what their lambda' is really worth
        assert len(sampled[1].points) == 16

    def test_quadratic_is_exact_with_any_tangents(self):
        loss = quadratic(CENTER, H, 0.3)
        solution = biconjugate_gradient(loss, MEAN, V, draws(MEAN, V, 3))
        np.testing.assert_allclose(solution.lower, expected_negative_loss(loss, MEAN, V).value, atol=1e-6)
        np.testing.assert_allclose(solution.natural[0], H @ CENTER, atol=1e-5)
        np.testing.assert_allclose(solution.natural[1], -H / 2, atol=1e-5)

    def test_what_is_refused(self, logistic):
        with pytest.raises(ValueError, match="not convex"):
            biconjugate_gradient(two_dimensional(), MEAN, V, draws(MEAN, V))
        with pytest.raises(RuntimeError, match="max_rounds=1"):
            biconjugate_gradient(logistic, MEAN, V, draws(MEAN, V), max_rounds=1)
        with pytest.raises(ValueError, match="majorant"):
            biconjugate_gradient(Loss(logistic.value, logistic.gradient, logistic.hessian, 2), MEAN, V, draws(MEAN, V))

    def test_a_failure_of_the_solver_is_reported(self, logistic, monkeypatch):
        program = _tangent_program(2, 16)
        unbounded = type(program.problem)(type(program.problem.objective)(program.lambda_1[0]))
        monkeypatch.setattr(
            "bsam.theory.relaxed_bayes._tangent_program", lambda *_: program._replace(problem=unbounded)
        )
        with pytest.raises(RuntimeError, match="CLARABEL reports 'unbounded'"):
            biconjugate_gradient(logistic, MEAN, V, draws(MEAN, V))


@pytest.fixture(scope="module")
def bayes(logistic):
    return bayesian_learning_rule(
        logistic,
        prior_precision=1.0,
        objective="bayes",
        learning_rate=0.3,
        num_steps=60,
        mean=[2.0, 1.0],
        covariance=0.2 * np.eye(2),
        tolerance=1e-2,
    )


@pytest.fixture(scope="module")
def relaxed(logistic):
    return bayesian_learning_rule(
        logistic, prior_precision=1.0, objective="relaxed", learning_rate=1.0, num_steps=35, covariance=np.eye(2)
    )


class TestLearningRule:
    @pytest.mark.parametrize("objective", ["bayes", "relaxed"])
    def test_a_quadratic_has_its_posterior_in_closed_form(self, objective):
        loss, delta_0 = quadratic(CENTER, H), 0.5
        trace = bayesian_learning_rule(
            loss, prior_precision=delta_0, objective=objective, learning_rate=0.5, num_steps=30
        )
        S = H + delta_0 * np.eye(2)
        np.testing.assert_allclose(trace.mean[-1], np.linalg.solve(S, H @ CENTER), atol=1e-6)
        np.testing.assert_allclose(trace.covariance[-1], np.linalg.inv(S), atol=1e-6)
        np.testing.assert_allclose(trace.gap, 0, atol=1e-6)
        # in one step, with learning rate 1
        once = bayesian_learning_rule(
            loss, prior_precision=delta_0, objective=objective, learning_rate=1.0, num_steps=1
        )
        np.testing.assert_allclose(once.covariance[-1], np.linalg.inv(S), atol=1e-6)

    def test_bayes_ends_where_the_elbo_is_stationary(self, logistic, bayes):
        assert (np.diff(bayes.elbo) > -1e-9).all()
        mu = FULL.expectation(bayes.mean[-1], bayes.covariance[-1])
        for direction in DIRECTIONS:
            value = derivative(lambda m, c: elbo(logistic, m, c, 1.0, family=FULL), mu, direction)
            np.testing.assert_allclose(value, 0, atol=1e-3)

    def test_relaxed_ends_where_its_lambda_reproduces_itself(self, logistic, relaxed):
        """The natural parameters are the prior's plus grad f**(mu)."""
        mean, covariance = relaxed.mean[-1], relaxed.covariance[-1]
        gradient = biconjugate_gradient(logistic, mean, covariance, draws(mean, covariance), tolerance=1e-7).natural
        natural = FULL.natural(mean, covariance)
        np.testing.assert_allclose(natural[0], gradient[0], rtol=1e-2)
        np.testing.assert_allclose(natural[1], gradient[1] - np.eye(2) / 2, rtol=1e-2)

    def test_relaxed_never_decreases(self, logistic, relaxed):
        slow = bayesian_learning_rule(
            logistic, prior_precision=1.0, objective="relaxed", learning_rate=0.2, num_steps=12, covariance=np.eye(2)
        )
        for trace in (relaxed, slow):
            assert (np.diff(trace.relaxed_elbo) > -2e-5).all()

    def test_the_trace(self, logistic, bayes, relaxed):
        assert relaxed.mean.shape == (36, 2)
        assert relaxed.covariance.shape == (36, 2, 2)
        for trace in (bayes, relaxed):
            assert (trace.gap > 0).all()  # f** <= f at the same mu
            value = elbo(logistic, trace.mean[3], trace.covariance[3], 1.0, family=FULL)
            np.testing.assert_allclose(trace.elbo[3], value, atol=1e-6)
        value = relaxed_elbo(logistic, relaxed.mean[3], relaxed.covariance[3], 1.0, family=FULL, tolerance=1e-5)
        np.testing.assert_allclose(relaxed.relaxed_elbo[3], value, atol=2e-5)

    def test_what_the_relaxation_costs(self, logistic, bayes, relaxed):
        """A narrower posterior; sampled tangents alone hide most of that."""
        sampled = bayesian_learning_rule(
            logistic,
            prior_precision=1.0,
            objective="relaxed",
            learning_rate=0.3,
            num_steps=30,
            covariance=np.eye(2),
            num_tangents=64,
            tolerance=np.inf,
        )
        exact, narrow, between = (np.diag(trace.covariance[-1]) for trace in (bayes, relaxed, sampled))
        assert (narrow < exact / 3).all()
        assert (between > 2 * narrow).all()
        assert bayes.elbo[-1] > relaxed.elbo[-1]
        assert bayes.relaxed_elbo[-1] < relaxed.relaxed_elbo[-1]

    def test_what_is_refused(self, logistic):
        with pytest.raises(ValueError, match="'bayes' or 'relaxed'"):
            bayesian_learning_rule(logistic, prior_precision=1.0, objective="sam", learning_rate=0.1, num_steps=1)
        with pytest.raises(ValueError, match=r"\(0, 1\]"):
            bayesian_learning_rule(logistic, prior_precision=1.0, objective="bayes", learning_rate=2.0, num_steps=1)
