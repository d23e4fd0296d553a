"""The tables of docs/scale.md, from the record of `benchmarks/scale.py`."""

from __future__ import annotations

from typing import Any

__all__ = ["computed_markdown", "measured_markdown", "memory_markdown"]

_TITLES = {"adamw": "AdamW", "sam": "SAM-SGD, momentum", "bsam": "bSAM"}
_PARAMETERS = {"7 billion": 7e9, "70 billion": 70e9}
_DEVICES = (8, 64, 512)


def measured_markdown(record: dict[str, Any]) -> str:
    """Write the bytes that a rank sends per step, in numbers of float32 per parameter, by way and number of ranks."""
    size = 4 * record["parameters"]
    ranks = sorted({row["ranks"] for row in record["measured"]})
    lines = [f"| | {' | '.join(_ranks(count) for count in ranks)} |", "|---" * (len(ranks) + 1) + "|"]
    for way in dict.fromkeys(row["way"] for row in record["measured"]):
        cells = []
        for count in ranks:
            (row,) = (row for row in record["measured"] if (row["way"], row["ranks"]) == (way, count))
            cells.append(f"{row['bytes'] / size:.2f} ({row['least'] / size:.2f})")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def computed_markdown(record: dict[str, Any]) -> str:
    """Write bytes and seconds per step on large clusters."""
    ranks = sorted({row["ranks"] for row in record["computed"]})
    heads = " | ".join(_ranks(count) for count in ranks)
    lines = [f"| model, and batch of a rank | | computation | {heads} |", "|---" * (len(ranks) + 3) + "|"]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in record["computed"]:
        found.setdefault((row["job"], row["way"]), []).append(row)
    for (job, way), rows in found.items():
        cells = [f"{_gigabytes(row['bytes'])}<br>{_seconds(row['communication_seconds'])}" for row in rows]
        lines.append(f"| {job} | {way} | {_seconds(rows[0]['computation_seconds'])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def memory_markdown(record: dict[str, Any]) -> str:
    """Write the memory per device, from the peak in copies of the float32 weights."""
    heads = [f"{name}, {count} devices" for name in _PARAMETERS for count in _DEVICES]
    lines = [f"| | copies | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for method, copies in record["copies"].items():
        cells = [_gigabytes(4 * copies * p / count) for p in _PARAMETERS.values() for count in _DEVICES]
        lines.append(f"| {_TITLES[method]} | {copies:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ranks(count: int) -> str:
    return f"{count:,} rank{'' if count == 1 else 's'}"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.0f} GB" if size >= 10e9 else f"{size / 1e9:.2g} GB"


def _seconds(time: float) -> str:
    return f"{time:.1f} s" if time >= 1 else f"{1000 * time:.2g} ms" if time < 0.1 else f"{1000 * time:.0f} ms"
