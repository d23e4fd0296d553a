"""Predictions averaged over a posterior."""

import bsam.kernels as _kernels  # noqa: F401  # its layers register with the compiler
from bsam.prediction.calibrate import Calibration, calibrate
from bsam.prediction.linearised import predict_linearised
from bsam.prediction.predict import predict
from bsam.prediction.predictor import Predictor
from bsam.prediction.results import GaussianPredictions, Predictions
from bsam.prediction.sensitivity import Sensitivities, sensitivity

__all__ = [
    "Calibration",
    "GaussianPredictions",
    "Predictions",
    "Predictor",
    "Sensitivities",
    "calibrate",
    "predict",
    "predict_linearised",
    "sensitivity",
]
