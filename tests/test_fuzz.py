"""Random programs of steps, failures and checkpoints, see `tests/fuzz.py`."""

import pytest

from tests.fuzz import fuzz


@pytest.mark.filterwarnings("ignore")  # parameters are frozen at random, and batches too small
@pytest.mark.parametrize("start", range(0, 24, 6))
def test_failures_and_checkpoints_leave_no_trace(start):
    counts, broken = fuzz(range(start, start + 6))
    assert broken == []
    assert counts["steps"] > 20
