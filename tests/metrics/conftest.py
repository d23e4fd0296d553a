"""Fixtures of the tests of metrics."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Many tiny calls: on a busy machine threads that wait for each other take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def plt():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")
