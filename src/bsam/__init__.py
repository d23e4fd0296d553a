"""SAM and variational Bayes in one optimizer.

The public names are loaded at their first use, from `bsam.api`, so that `bsam --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bsam.api import *

__all__ = [
    "ASAM",
    "BSAM",
    "IVON",
    "SAM",
    "SWAG",
    "VOGN",
    "Calibration",
    "DiagonalGaussian",
    "GaussianPredictions",
    "LearnedNoise",
    "LowRankGaussian",
    "Mixture",
    "PointMass",
    "Posterior",
    "Predictions",
    "Predictor",
    "Sensitivities",
    "Suggestion",
    "TrainStep",
    "calibrate",
    "laplace",
    "load_posterior",
    "metrics",
    "predict",
    "predict_linearised",
    "recalibrate_batch_norm",
    "sensitivity",
    "suggest",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load a module of the package, or all public names, and return the one that is asked for."""
    if not name.startswith("_") and find_spec(f"bsam.{name}"):
        return import_module(f"bsam.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'bsam' has no attribute {name!r}")
    api = import_module("bsam.api")
    globals().update({public: getattr(api, public) for public in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
