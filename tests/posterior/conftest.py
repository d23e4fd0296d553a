"""Fixtures of the tests of posteriors."""

import pytest

from tests.posterior.kinds import KINDS, make_net


@pytest.fixture
def net():
    return make_net()


@pytest.fixture(params=KINDS)
def posterior(request, net):
    return KINDS[request.param](net)
