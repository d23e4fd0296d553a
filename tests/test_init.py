"""The public names: they are there, they are loaded at their first use, and nothing else is."""

import subprocess
import sys

import pytest

import bsam
from bsam import api


def test_the_public_names_are_those_of_the_api():
    assert bsam.__all__ == api.__all__
    for name in bsam.__all__:
        assert getattr(bsam, name) is getattr(api, name)
    assert set(bsam.__all__) <= set(dir(bsam))


def test_a_name_that_is_not_there():
    assert not hasattr(bsam, "BSAMM")
    assert not hasattr(bsam, "__wrapped__")
    with pytest.raises(ImportError, match="cannot import name 'BSAMM'"):
        from bsam import BSAMM  # noqa: F401


@pytest.mark.parametrize(
    "code",
    [
        "from bsam.engine import TrainStep",
        "bsam.predict",
        "from bsam import BSAM",
        "bsam.optim",
    ],
)
def test_torch_is_loaded_with_the_first_name_and_our_layers_with_it(code):
    check = "from bsam.compiler.registry import LAYERS; assert LAYERS"
    before = "import sys, bsam; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"{before}; {code}; {check}"], check=True)
