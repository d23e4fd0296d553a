"""The numbers of each suite, from predictions: short enough for a record."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch

import bsam
from bsam.experiments.corruptions import KINDS, STRENGTHS

__all__ = ["COVERAGES", "HISTOGRAM", "rate_corruptions", "rate_people", "rate_rejections", "rate_unknowns"]

COVERAGES = tuple(k / 40 for k in range(1, 41))
"""The coverages at which a record has the risk."""
HISTOGRAM = 20
"""The number of equal bins of the largest probability, from 0 to 1."""
CORRUPTED_METRICS = ("accuracy", "nll", "ece")


def _short(value: float) -> float:
    """Six digits are more than any table shows."""
    return float(f"{value:.6g}")


def _numbers(summary: Any) -> dict[str, float]:
    return {name: _short(getattr(summary, name)) for name in summary.names}


def scores_of(predictions: bsam.Predictions) -> list[Any]:
    """Return the scores of doubt that say something: not the disagreement of a single sample."""
    scores = ["confidence", "entropy"]
    if bool((predictions.mutual_information > 1e-6).any()):
        scores.append("mutual_information")
    return scores if predictions.energy is None else [*scores, "energy"]


def rate_rejections(test: bsam.Predictions, sets: Mapping[str, bsam.Predictions], about: Any) -> dict[str, Any]:
    """Rate rejection by every score, and keep the risk at some coverages, by the largest probability."""
    curve = bsam.metrics.risk_coverage(test)
    index = torch.searchsorted(curve.coverage, torch.tensor(COVERAGES, dtype=torch.float64) - 1e-9)
    return {
        "scores": {
            score: _numbers(bsam.metrics.rate_rejection(test, score, num_bootstrap=0)) for score in scores_of(test)
        },
        "risk": [_short(float(risk)) for risk in curve.risk[index.clamp(max=len(curve.risk) - 1)]],
    }


def rate_unknowns(
    test: bsam.Predictions, sets: Mapping[str, bsam.Predictions], about: Mapping[str, str]
) -> dict[str, Any]:
    """Rate how well every score tells each unknown set from the test set; `about` says which are near or far."""

    def histogram(predictions: bsam.Predictions) -> list[int]:
        largest = predictions.probs.amax(dim=-1).double()
        return [int(count) for count in torch.histc(largest, HISTOGRAM, 0, 1)]

    return {
        "known": {"num_examples": len(test), "histogram": histogram(test)},
        "sets": {
            name: {
                "kind": about[name],
                "num_examples": len(found),
                "scores": {
                    score: _numbers(bsam.metrics.rate_unknown(test, found, score, num_bootstrap=0))
                    for score in scores_of(test)
                },
                "histogram": histogram(found),
            }
            for name, found in ((name, sets[name]) for name in about)
        },
    }


def rate_corruptions(test: bsam.Predictions, sets: Mapping[str, bsam.Predictions], about: Any) -> dict[str, Any]:
    """Rate accuracy, NLL and ECE of each kind at each strength, and their means."""
    kinds: dict[str, dict[str, list[float]]] = {}
    for kind in KINDS:
        found = [bsam.metrics.summary(sets[f"{kind}-{strength}"], num_bootstrap=0) for strength in STRENGTHS]
        kinds[kind] = {name: [_short(getattr(each, name)) for each in found] for name in CORRUPTED_METRICS}
    mean = {
        name: _short(statistics.fmean(value for kind in kinds.values() for value in kind[name]))
        for name in CORRUPTED_METRICS
    }
    return {"num_examples": len(test), "mean": mean, "kinds": kinds}


def rate_people(test: bsam.Predictions, sets: Mapping[str, bsam.Predictions], about: torch.Tensor) -> dict[str, Any]:
    """Compare the probabilities with the shares of people's answers."""
    found = bsam.metrics.rate_soft_labels(test, about, num_bootstrap=0)
    return {"num_examples": len(test), **_numbers(found)}
