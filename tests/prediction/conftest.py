"""Fixtures of the tests of predictions."""

import pytest

from bsam.executor import Executor


@pytest.fixture
def _try_vmap(monkeypatch):
    """Choose as on an accelerator, where vmap is tried first."""
    monkeypatch.setattr(Executor, "launch_bound", lambda device: True)
