"""Settings of every test."""

import os

# The tensors of the tests are tiny: threads would only wait for each other, and for other processes. The variable is
# read by NumPy's and torch's libraries when they are loaded, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    """What a command says is not broken into lines by the length of a temporary folder's name."""
    monkeypatch.setenv("COLUMNS", "200")


def pytest_collection_modifyitems(items):
    """Mark the tests that look at pages in a browser."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)


def pytest_make_parametrize_id(val, argname):
    """Name long bytes by their argument: an archive holds the time, and all processes must give a test one name."""
    return argname if isinstance(val, bytes) and len(val) > 20 else None
