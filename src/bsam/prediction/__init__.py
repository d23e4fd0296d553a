"""Predictions averaged over a posterior."""

from bsam.prediction.predict import predict
from bsam.prediction.results import GaussianPredictions, Predictions

__all__ = ["GaussianPredictions", "Predictions", "predict"]
