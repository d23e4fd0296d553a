"""The numbers of a suite as a table: heads, and rows of texts."""

from __future__ import annotations

import statistics
from typing import Any

from bsam.experiments.metric_columns import DECIMALS

__all__ = ["corruptions_table", "people_table", "rejection_table", "unknown_table"]

Rows = tuple[list[str], list[list[str]]]


def rejection_table(numbers: dict[str, Any]) -> Rows:
    """Show what rejecting by each score is worth."""
    heads = ["reject by", "area ↓", "accuracy of 80% ↑", "of 90% ↑", "of 95% ↑"]
    return heads, [
        [_words(score), f"{found['area']:.4f}", *(f"{100 * found[f'accuracy_{c}']:.2f}" for c in (80, 90, 95))]
        for score, found in numbers["scores"].items()
    ]


def unknown_table(numbers: dict[str, Any]) -> Rows:
    """Show how well each score tells each unknown set from the test set."""
    heads = ["unknown", "kind", "score", "AUROC ↑", "AUPR ↑", "FPR 95 ↓"]
    return heads, [
        [
            *((name, each["kind"]) if k == 0 else ("", "")),
            _words(score),
            *(f"{found[metric]:.3f}" for metric in ("auroc", "aupr_unknown", "fpr_95")),
        ]
        for name, each in numbers["sets"].items()
        for k, (score, found) in enumerate(each["scores"].items())
    ]


def corruptions_table(numbers: dict[str, Any]) -> Rows:
    """Show the mean over the strengths of each kind, and the mean of all."""
    heads = ["corruption", "accuracy ↑", "NLL ↓", "ECE ↓"]

    def cells(values: dict[str, float]) -> list[str]:
        return [f"{(100 if m == 'accuracy' else 1) * values[m]:.{DECIMALS[m]}f}" for m in ("accuracy", "nll", "ece")]

    rows = [
        [_words(kind), *cells({metric: statistics.fmean(values) for metric, values in found.items()})]
        for kind, found in numbers["kinds"].items()
    ]
    return heads, [*rows, ["mean", *cells(numbers["mean"])]]


def people_table(numbers: dict[str, Any]) -> Rows:
    """Show the distance from people's answers."""
    return ["cross-entropy to the answers ↓", "KL ↓"], [[f"{numbers['cross_entropy']:.4f}", f"{numbers['kl']:.4f}"]]


def _words(name: str) -> str:
    return "largest probability" if name == "confidence" else name.replace("_", " ")
