"""Sharded models: four processes run the scenarios of tests/sharded.py once; each test reads what one of them found."""

import pytest
import torch
import torch.multiprocessing as mp

from tests import sharded
from tests.sharded import METHODS, SCENARIOS, WORLDS

pytestmark = pytest.mark.cluster

# The ranks are forked from a process of their own, which imports this module, and what torch imports in a first step,
# once; a fresh start of each would be most of the time.
mp.get_context("forkserver").set_forkserver_preload(["tests.sharded", "torch._dynamo"])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what the scenarios found: `found(name)` is a list, one dictionary per rank."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(sharded.run, (str(folder), list(SCENARIOS)), nprocs=4, start_method="forkserver")

    def read(name):
        results = []
        for rank in range(4):
            path = folder / f"{name}.{rank}.pt"
            assert path.exists(), f"rank {rank} did not get to {name}: an earlier scenario failed"
            results.append(torch.load(path, weights_only=True))
            assert "error" not in results[-1], results[-1]["error"]
        return results

    return read


def assert_close(got, expected, tolerance=1e-10):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", METHODS)
def test_a_sharded_model_trains_as_one_that_is_not_sharded(found, kind):
    model = sharded.transformer()
    optimizer = sharded.make(kind, model)
    losses = sharded.train(model, optimizer)
    expected = sharded.result(model, optimizer)
    for rank, results in enumerate(found("training")):
        for world in WORLDS:
            if rank < world:
                got = dict(results[f"{kind} {world}"])
                got.pop("losses")
                assert_close(got, expected)
