"""The table of what a step of a sharded model costs, from the record of `benchmarks/fsdp.py`."""

from __future__ import annotations

from typing import Any

__all__ = ["markdown"]


def markdown(record: dict[str, Any]) -> str:
    """Write time per step, also in steps of AdamW, and memory in copies of the shard."""
    lines = ["| | seconds per step | in steps of AdamW | held | peak |", "|---|---|---|---|---|"]
    adamw = record["methods"]["AdamW"]["seconds"]
    for name, found in record["methods"].items():
        memory = " | ".join("" if found[key] is None else f"{found[key]:.1f}" for key in ("held", "peak"))
        lines.append(
            f"| {name.replace('BSAM', 'bSAM')} | {found['seconds']:.3f} | {found['seconds'] / adamw:.2f} | {memory} |"
        )
    environment = record["environment"]
    lines += [
        "",
        f"{record['parameters']:,} parameters, {record['ranks']} rank{'s' if record['ranks'] > 1 else ''}, "
        f"{record['size']['batch']} sequences of {record['size']['length']} tokens per rank; {environment['device']}, "
        f"torch {environment['packages']['torch']}.",
    ]
    return "\n".join(lines)
