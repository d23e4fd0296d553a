"""Settings of every test."""

import pytest
import torch

# The tensors of the tests are tiny: threads would only wait for each other, and for other processes.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
