"""The tables of regression on UCI's sets, from the record of `bsam reproduce uci`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

__all__ = ["TABLES", "metric_markdown", "sets_markdown"]

_ANCHOR = "MC dropout"


def metric_markdown(metric: str, record: dict[str, Any]) -> str:
    """Write one row per set and one column per method: mean and standard error over the splits; the best is bold.

    Every method that is less than one standard error of the best behind it is bold, too.
    """
    methods, config = record["config"]["methods"], record["config"]["sets"]
    anchors = next(iter(record["anchors"].values())) if metric == "log_likelihood" else {}
    titles = [own["title"] for own in methods.values()]
    lines = [
        f"| set | splits | {' | '.join([*titles, *([_ANCHOR] if anchors else [])])} |",
        f"|---|---{'|---' * (len(titles) + bool(anchors))}|",
    ]
    sign = -1 if metric == "log_likelihood" else 1
    for name, rows in record["summary"].items():
        cells = [rows[method][metric] for method in methods]
        known = [cell for cell in cells if cell["mean"] is not None and math.isfinite(cell["mean"])]
        best = min(known, key=lambda cell: sign * cell["mean"])
        limit = sign * best["mean"] + (best["se"] or 0.0)
        texts = [_cell(cell, limit, sign) for cell in cells]
        if anchors:
            texts.append(f"{anchors[name]:.3f}" if name in anchors else "")
        lines.append(f"| {name} | {config[name]['splits']} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _cell(cell: dict[str, Any], limit: float, sign: int) -> str:
    if cell["mean"] is None:
        return "diverged"
    mean, error = cell["mean"], cell["se"] or 0.0
    digits = max(0, min(4, 2 - _exponent(mean)), -_exponent(error))  # at least one of the error
    text = f"{mean:.{digits}f}<br>± {error:.{digits}f}"  # in two lines, or some cells would wrap and others not
    return f"**{text}**" if sign * cell["mean"] <= limit else text


def _exponent(number: float) -> int:
    return math.floor(math.log10(abs(number) or 1.0))


def sets_markdown(record: dict[str, Any]) -> str:
    """Write what each set is, and how it was trained."""
    lines = [
        "| set | training examples | test | features | hidden units | steps | batch | splits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, own in record["config"]["sets"].items():
        cells = [own[key] for key in ("num_train", "num_test", "features", "hidden", "steps", "batch_size", "splits")]
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "uci": functools.partial(metric_markdown, "log_likelihood"),
    "uci/rmse": functools.partial(metric_markdown, "rmse"),
    "uci/crps": functools.partial(metric_markdown, "crps"),
    "uci/quantile_error": functools.partial(metric_markdown, "quantile_error"),
    "uci/sets": sets_markdown,
}
"""The tables by their names on a page."""
