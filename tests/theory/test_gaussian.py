import numpy as np
import pytest
import scipy.stats

from bsam.theory.gaussian import Diagonal, Full, Isotropic, Univariate

FAMILIES = [Univariate(), Isotropic(3), Diagonal(3), Full(3)]
BATCH = (4, 2)


def gaussian(family, seed=0, batch=BATCH):
    """A random batch of (mean, covariance)."""
    generator = np.random.default_rng(seed)
    mean = generator.normal(size=batch if family.dim == 1 else (*batch, family.dim))
    if isinstance(family, Full):
        root = generator.normal(size=(*batch, 3, 3))
        return mean, root @ np.swapaxes(root, -1, -2) + 0.3 * np.eye(3)
    shape = (*batch, 3) if isinstance(family, Diagonal) else batch
    return mean, generator.uniform(0.3, 3.0, size=shape)


def close(a, b, **options):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, **{"rtol": 1e-10, "atol": 1e-10, **options})


def directional(function, at, direction, step=1e-5):
    """Derivative of a function of a pair along a pair, by central differences."""
    ahead = function(tuple(x + step * d for x, d in zip(at, direction, strict=True)))
    behind = function(tuple(x - step * d for x, d in zip(at, direction, strict=True)))
    return (ahead - behind) / (2 * step)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
class TestEveryFamily:
    def test_coordinates_are_inverses(self, family):
        q = gaussian(family)
        close(family.from_natural(family.natural(*q)), q)
        close(family.from_expectation(family.expectation(*q)), q)
        close(family.natural_to_expectation(family.natural(*q)), family.expectation(*q))
        close(family.expectation_to_natural(family.expectation(*q)), family.natural(*q))

    def test_gradients_of_a_and_a_star_are_the_maps(self, family):
        q = gaussian(family)
        natural, expectation = family.natural(*q), family.expectation(*q)
        other = gaussian(family, seed=1)
        direction = tuple(0.1 * x for x in family.expectation(*other))  # any pair of the right shape
        np.testing.assert_allclose(
            directional(family.log_partition, natural, direction), family.inner(direction, expectation), rtol=1e-6
        )
        np.testing.assert_allclose(
            directional(family.negative_entropy, expectation, direction), family.inner(natural, direction), rtol=1e-6
        )

    def test_fenchel_young_is_an_equality(self, family):
        q = gaussian(family)
        natural, expectation = family.natural(*q), family.expectation(*q)
        total = family.log_partition(natural) + family.negative_entropy(expectation)
        np.testing.assert_allclose(total, family.inner(natural, expectation))
        elsewhere = family.expectation(*gaussian(family, seed=1))
        assert (
            family.log_partition(natural) + family.negative_entropy(elsewhere) > family.inner(natural, elsewhere)
        ).all()

    def test_kl_is_the_bregman_divergence_of_a(self, family):
        q, p = gaussian(family), gaussian(family, seed=1)
        lambda_q, lambda_p, mu_q = family.natural(*q), family.natural(*p), family.expectation(*q)
        difference = tuple(x - y for x, y in zip(lambda_p, lambda_q, strict=True))
        bregman = family.log_partition(lambda_p) - family.log_partition(lambda_q) - family.inner(difference, mu_q)
        np.testing.assert_allclose(family.kl(q, p), bregman)
        np.testing.assert_allclose(family.kl(q, q), 0, atol=1e-12)

    def test_scipy_agrees(self, family):
        mean, covariance = gaussian(family, batch=())
        theta = np.random.default_rng(2).normal(size=np.shape(mean))
        reference = scipy.stats.multivariate_normal(np.atleast_1d(mean), family.matrix(covariance))
        natural = family.natural(mean, covariance)
        np.testing.assert_allclose(family.log_density(theta, natural), reference.logpdf(np.atleast_1d(theta)))
        np.testing.assert_allclose(family.entropy(covariance), reference.entropy())

    def test_expectation_is_the_mean_of_the_statistics(self, family):
        mean, covariance = gaussian(family, batch=())
        draws = np.random.default_rng(0).multivariate_normal(np.atleast_1d(mean), family.matrix(covariance), 200_000)
        first, second = family.sufficient_statistics(draws.reshape(200_000, *np.shape(mean)))
        close((first.mean(0), second.mean(0)), family.expectation(mean, covariance), atol=0.1, rtol=0.05)

    def test_outside_of_the_spaces(self, family):
        mean, covariance = gaussian(family, batch=())
        first, second = family.natural(mean, covariance)
        assert family.in_omega((first, second))
        assert not family.in_omega((first, -second))
        with pytest.raises(ValueError, match="outside Omega"):
            family.from_natural((first, -second))
        first, second = family.expectation(mean, covariance)
        assert family.in_m((first, second))
        assert not family.in_m((first, family.square(first)))  # the boundary: a point mass
        with pytest.raises(ValueError, match="interior of M"):
            family.from_expectation((first, 0 * second))
        with pytest.raises(ValueError, match="positive definite"):
            family.natural(mean, -covariance)
        with pytest.raises(ValueError, match="positive definite"):
            family.entropy(np.nan * covariance)

    def test_identity(self, family):
        np.testing.assert_array_equal(family.matrix(family.identity), np.eye(family.dim))


@pytest.mark.parametrize("family", FAMILIES[1:3], ids=lambda f: type(f).__name__)
def test_small_families_are_full_ones(family):
    (m_q, v_q), (m_p, v_p) = gaussian(family), gaussian(family, seed=1)
    full = Full(3)
    V_q, V_p = family.matrix(v_q), family.matrix(v_p)
    np.testing.assert_allclose(family.kl((m_q, v_q), (m_p, v_p)), full.kl((m_q, V_q), (m_p, V_p)))
    np.testing.assert_allclose(family.entropy(v_q), full.entropy(V_q))
    np.testing.assert_allclose(
        family.log_partition(family.natural(m_q, v_q)), full.log_partition(full.natural(m_q, V_q))
    )


def test_an_asymmetric_matrix_is_refused():
    with pytest.raises(ValueError, match="positive definite"):
        Full(2).natural(np.zeros(2), np.array([[1.0, 0.5], [0.0, 1.0]]))
