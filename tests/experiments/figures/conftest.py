"""Results of the figures at a reduced size, which several tests share."""

import pytest

from bsam.experiments.figures import data_sets, duality, logistic, moons, objectives, relaxed


@pytest.fixture(scope="session")
def neighbourhood():
    return objectives.compute_neighbourhood()


@pytest.fixture(scope="session")
def smoothing():
    return objectives.compute_smoothing(num_points=201)


@pytest.fixture(scope="session")
def theorem_2():
    return objectives.compute_theorem_2(num_points=281, num_radii=8)


@pytest.fixture(scope="session")
def surfaces():
    return duality.compute_surfaces(num_omega=41, num_v=9)


@pytest.fixture(scope="session")
def logistic_result():
    settings = logistic.Settings(bsam_steps=2500, bsam_betas=(0.9, 0.995), weight_grid=201, map_grid=21)
    return logistic.compute_logistic(settings)


@pytest.fixture(scope="session")
def sets():
    settings = logistic.Settings(bsam_steps=1500, bsam_betas=(0.9, 0.99), map_grid=11)
    return data_sets.compute_data_sets(20, settings=settings)


@pytest.fixture(scope="session")
def relaxed_result():
    return relaxed.compute_relaxed(num_steps=8, num_tangents=16)


@pytest.fixture(scope="session")
def moons_result():
    return moons.compute_moons(epochs=20)
