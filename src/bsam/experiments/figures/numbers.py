"""The numbers behind the figures, for `results/figures.json`."""

from __future__ import annotations

import dataclasses
import time
from importlib.metadata import version
from typing import Any

import numpy as np

from bsam.experiments.figures.data_sets import DataSets, compute_data_sets
from bsam.experiments.figures.logistic import Logistic, compute_logistic
from bsam.experiments.figures.moons import FORGETFUL, Moons, compute_moons
from bsam.experiments.figures.objectives import (
    Neighbourhood,
    Smoothing,
    TheoremTwo,
    compute_neighbourhood,
    compute_smoothing,
    compute_theorem_2,
    count_minima,
)
from bsam.experiments.figures.relaxed import Relaxed, compute_relaxed
from bsam.experiments.record import environment
from bsam.theory.gaussian import Array

__all__ = ["compute_numbers"]


def compute_numbers() -> dict[str, Any]:
    """Compute the record of all figures; results that a figure has computed before are used again."""
    begin = time.perf_counter()
    record = {
        "neighbourhood": of_neighbourhood(compute_neighbourhood()),
        "smoothing": of_smoothing(compute_smoothing()),
        "theorem_2": of_theorem_2(compute_theorem_2()),
        "logistic": of_logistic(compute_logistic()),
        "data_sets": of_data_sets(compute_data_sets()),
        "relaxed_bayes": of_relaxed(compute_relaxed()),
        "moons": of_moons(compute_moons()),
    }
    found = environment()
    found["packages"] |= {name: version(name) for name in ("scipy", "cvxpy", "clarabel")}
    return {**record, "seconds": round(time.perf_counter() - begin, 1), "environment": found}


def of_neighbourhood(result: Neighbourhood) -> dict[str, Any]:
    """Return the three losses around one omega."""
    names = ("omega", "rho", "sigma", "max_loss", "expected_loss", "worst_expected_loss")
    return {name: _rounded(getattr(result, name)) for name in names}


def of_smoothing(result: Smoothing) -> dict[str, Any]:
    """Count the minima that are left."""
    return {
        "variances": result.variances.tolist(),
        "minima_of_expected_loss": [count_minima(curve) for curve in result.expected],
        "minima_of_relaxation": [count_minima(curve) for curve in result.relaxed],
    }


def of_theorem_2(result: TheoremTwo) -> dict[str, Any]:
    """Return the two minimisers, found independently, and the rho where the theorem ends."""
    smooth = ~result.is_kink
    return {
        "centre": result.centre,
        "delta": result.delta,
        "rho": result.rho,
        "sigma_squared": _rounded(result.sigma**2),
        "sam_minimiser": _rounded(result.sam_minimiser),
        "relaxed_minimiser": _rounded(result.relaxed_minimiser),
        "largest_difference_without_kink": float(
            np.abs(result.sam_minimisers - result.relaxed_minimisers)[smooth].max()
        ),
        "smallest_rho_with_kink": _rounded(result.radii[result.is_kink].min()) if result.is_kink.any() else None,
    }


def of_logistic(result: Logistic) -> dict[str, Any]:
    """Return distances to exact Bayes, and variances beside those of s* = delta + gamma + h sqrt(2 / (pi N))."""
    return {
        "settings": dataclasses.asdict(result.settings),
        "num_data": len(result.labels),
        "mean_confidence": {name: _rounded(result.confidence(name)) for name in result.maps},
        "mass_on_separating_weights": {name: _rounded(result.separating[name]) for name in result.maps},
        "total_variation_to_exact": {name: _rounded(result.distance(name)) for name in result.maps if name != "exact"},
        "means": {**{name: _rounded(q.mean) for name, q in result.gaussians.items()}, "sam": _rounded(result.point)},
        "variances": {name: _rounded(q.variances) for name, q in result.gaussians.items()},
        "variances_by_s_star": {name: _rounded(value) for name, value in result.stationary.items()},
        "variances_by_fixed_point": {name: _rounded(value) for name, value in result.fixed_point.items()},
    }


def of_data_sets(result: DataSets) -> list[dict[str, Any]]:
    """Count, by prior and separability, how often each method is too confident, and by how much."""
    rows = []
    for prior_precision in result.confidence:
        for separable in (True, False):
            chosen = result.separable == separable
            excess = {name: result.excess(prior_precision, name)[chosen] for name in ("sam", "bsam", "laplace")}
            distance = {name: np.abs(values) for name, values in excess.items()}
            rows.append(
                {
                    "prior_precision": prior_precision,
                    "separable": separable,
                    "num_sets": int(chosen.sum()),
                    "overconfident": {name: int((values > 0).sum()) for name, values in excess.items()},
                    "median_excess": {name: _rounded(np.median(values)) for name, values in excess.items()},
                    "bsam_closest": int((distance["bsam"] < np.minimum(distance["sam"], distance["laplace"])).sum()),
                }
            )
    return rows


def of_relaxed(result: Relaxed) -> dict[str, Any]:
    """Return the ends of the three learning rules, and the change of the variances in the last quarter of the steps."""
    variances = {name: np.diagonal(trace.covariance, axis1=1, axis2=2) for name, trace in result.traces.items()}
    quarter = len(result.apparent_gap) // 4
    return {
        "num_tangents": result.num_tangents,
        "iterations": len(result.apparent_gap) - 1,
        "means": {name: _rounded(trace.mean[-1]) for name, trace in result.traces.items()},
        "variances": {name: _rounded(v[-1]) for name, v in variances.items()},
        "relative_change": {name: _rounded(np.abs(v[-quarter:] / v[-1] - 1).max()) for name, v in variances.items()},
        "elbo": {name: _rounded(trace.elbo[-1]) for name, trace in result.traces.items()},
        "elbo_gap": {name: _rounded(gap[-1]) for name, gap in result.gaps.items()},
        "elbo_gap_reported_by_sampled_tangents": _rounded(np.median(result.apparent_gap[-20:])),
    }


def of_moons(result: Moons) -> dict[str, Any]:
    """Return how certain the methods are far from the data, and their accuracy on the data."""
    return {
        "certain_far_away": {name: _rounded(result.certain_far_away(name)) for name in result.maps},
        "training_accuracy": {name: _rounded(result.accuracy(name)) for name in result.maps},
        "training_accuracy_of_seeds": {
            FORGETFUL: [None if accuracy is None else _rounded(accuracy) for accuracy in result.forgetful]
        },
    }


def _rounded(value: Array | float) -> Any:
    """Round to six digits; further digits differ between machines."""
    return np.vectorize(lambda x: float(f"{x:.6g}"))(value).tolist()
