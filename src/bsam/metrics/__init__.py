"""Numbers of predictions, with intervals: classes, calibration, rejection, unknown inputs, soft labels, regression."""

from bsam.metrics.calibration import ReliabilityTable, adaptive_ece, classwise_ece
from bsam.metrics.classes import Metrics, Summary, accuracy, auroc, brier, ece, nll, reliability, summary
from bsam.metrics.plots import quantile_diagram, reliability_diagram, risk_coverage_diagram, unknown_diagram
from bsam.metrics.regression import CrpsSummary, GaussianSummary, QuantileTable, crps, quantile_calibration
from bsam.metrics.rejection import (
    RejectionSummary,
    RiskCoverage,
    Threshold,
    rate_rejection,
    risk_coverage,
    threshold_for_risk,
)
from bsam.metrics.scores import doubt
from bsam.metrics.soft_labels import SoftLabelSummary, rate_soft_labels
from bsam.metrics.unknown import UnknownSummary, rate_unknown

__all__ = [
    "CrpsSummary",
    "GaussianSummary",
    "Metrics",
    "QuantileTable",
    "RejectionSummary",
    "ReliabilityTable",
    "RiskCoverage",
    "SoftLabelSummary",
    "Summary",
    "Threshold",
    "UnknownSummary",
    "accuracy",
    "adaptive_ece",
    "auroc",
    "brier",
    "classwise_ece",
    "crps",
    "doubt",
    "ece",
    "nll",
    "quantile_calibration",
    "quantile_diagram",
    "rate_rejection",
    "rate_soft_labels",
    "rate_unknown",
    "reliability",
    "reliability_diagram",
    "risk_coverage",
    "risk_coverage_diagram",
    "summary",
    "threshold_for_risk",
    "unknown_diagram",
]
