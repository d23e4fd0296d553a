"""The table of what the adapters to trainers cost, from the record of `benchmarks/trainers.py`."""

from __future__ import annotations

from typing import Any

__all__ = ["markdown"]


def markdown(record: dict[str, Any]) -> str:
    """Write the times per step, and what each adapter costs beyond what its trainer costs with Adam."""
    lines = ["| in | Adam, ms | bSAM, ms | extra cost (quartiles) |", "|---|---|---|---|"]
    for name, ms in record["ms"].items():
        extra = record["extra"].get(name)
        cost = "" if extra is None else f"{extra['median']:.1%} ({', '.join(f'{q:.1%}' for q in extra['quartiles'])})"
        lines.append(f"| {name} | {ms['Adam']:.2f} | {ms['BSAM']:.2f} | {cost} |")
    return "\n".join(lines)
