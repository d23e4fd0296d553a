"""Rows of ours, which the paper does not have: they are below its rows in a block of a table, see `beyond.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from bsam.experiments.choices import DtypeName
from bsam.experiments.config import FIELDS
from bsam.experiments.paper.presets import preset
from bsam.experiments.paper.results import METRICS, PAPER_SAMPLES, PaperBlock, PaperRow, PaperTable, paper_tables

__all__ = ["Beyond", "all_tables", "beyond", "contents", "own_dtype", "settings_line"]

_SHARED = (
    "dataset",
    "model",
    "epochs",
    "batch_size",
    "schedule",
    "milestones",
    "warmup_epochs",
    "augment",
    "drop_last",
)
"""Settings that all runs of a block share, unless a row changes them."""


@dataclass(frozen=True)
class Beyond:
    """A row of ours."""

    preset: str
    table: str
    block: str
    label: str
    about: str
    """Source of its settings."""
    like: str | None
    """Label of the paper's row that it is compared with."""
    dtype: DtypeName | None
    """The dtype of the gradients that the row is about, and is run in."""


def contents() -> dict[str, dict[str, Any]]:
    """Return the contents of `beyond.toml`, by preset."""
    rows = {}
    text = (files("bsam.experiments.paper") / "beyond.toml").read_text(encoding="utf-8")
    for name, row in tomllib.loads(text).items():
        if "methods" not in row and "blocks" not in row:
            rows[name] = row
        for where, part in row.get("blocks", {}).items():
            table, _, block = where.partition("/")
            rows[name.replace("*", part)] = {**row, "table": table, "block": block}
        for method, label in row.get("methods", {}).items():
            settings = {"method": method, **row["settings"]}
            written = {"label": row["label"].replace("*", label), "like": label, "settings": settings}
            rows[name.replace("*", method)] = {**row, **written}
    return rows


@cache
def beyond() -> dict[str, Beyond]:
    """Return our rows by preset, without rows whose settings are not chosen yet."""
    return {
        name: Beyond(
            name,
            row["table"],
            row["block"],
            row["label"],
            row["about"],
            row.get("like"),
            row["settings"].get("precision"),
        )
        for name, row in contents().items()
        if "table" in row and "settings" in row
    }


@cache
def all_tables() -> dict[str, PaperTable]:
    """Return the paper's tables, with our rows at the end of their blocks."""
    return {
        name: replace(table, blocks=tuple(_extended(name, block) for block in table.blocks))
        for name, table in paper_tables().items()
    }


def _extended(table: str, block: PaperBlock) -> PaperBlock:
    printed = {row.label: row.cells for row in block.rows}
    ours = [
        PaperRow(row.label, row.preset, PAPER_SAMPLES, printed[row.like] if row.like else (None,) * len(METRICS))
        for row in beyond().values()
        if (row.table, row.block) == (table, block.name)
    ]
    return replace(block, rows=(*block.rows, *ours))


def own_dtype(name: str) -> DtypeName | None:
    """Return the dtype that a row of ours is about; None if it is about something else, or one of the paper's."""
    return beyond()[name].dtype if name in beyond() else None


def settings_line(name: str) -> str:
    """Describe a row of ours: the source of its settings, and the settings that other rows of its block do not have."""
    row, config, changed = beyond()[name], preset(name), contents()[name]["settings"]
    if row.like:
        return f"Rows with “{row.label.partition(', ')[2]}” are ours, beside the paper's numbers: settings {row.about}."
    shown = [
        f"{field} = {getattr(config, field)}"
        for field, info in FIELDS.items()
        if field in changed or (field not in _SHARED and getattr(config, field) != info.default)
        if field != "method"
    ]
    return f"{row.label} is not in the paper. Its settings: {row.about}; {', '.join(shown)}."
