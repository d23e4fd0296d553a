"""Small data sets in place of the real ones."""

import pytest

from bsam.experiments.data import DATASETS
from tests.experiments.data.synthetic import make


@pytest.fixture(autouse=True)
def _no_folder_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def register(monkeypatch):
    """Put an entry into the table of data sets."""
    return lambda info: monkeypatch.setitem(DATASETS, info.name, info)


@pytest.fixture
def synthetic(tmp_path, register):
    """Write a small data set into the temporary folder, and put it into the table."""

    def write(name):
        made = make(name, tmp_path)
        register(made.info)
        return made

    return write
