"""The table of what the adapters to trainers cost, from the record of `benchmarks/trainers.py`."""

from __future__ import annotations

from typing import Any

__all__ = ["markdown"]


def markdown(record: dict[str, Any]) -> str:
    """Write the times per step, and what each adapter costs beyond what its trainer costs with Adam."""
    lines = ["| in | Adam, ms | bSAM, ms | extra cost | beside | extra over one call |", "|---|---|---|---|---|---|"]
    for name, ms in record["ms"].items():
        extra, total = record["extra"].get(name), record["over_one_call"].get(name)
        beside = extra["beside"] if extra else ""
        cells = [name, f"{ms['Adam']:.2f}", f"{ms['BSAM']:.2f}", _interval(extra), beside, _interval(total)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _interval(cost: dict[str, Any] | None) -> str:
    """Write a median with its 95% interval."""
    if cost is None:
        return ""
    median, low, high = (f"{round(number, 3) + 0.0:.1%}" for number in (cost["median"], *cost["interval"]))  # no -0.0%
    return f"{median} ({low}, {high})"
