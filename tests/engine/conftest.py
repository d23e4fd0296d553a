"""Fixtures of the tests of the engine."""

import pytest
import torch


@pytest.fixture
def _ieee(monkeypatch):
    """Products of float32 are not rounded."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
