"""The margins of the paper's blocks, see `margins.toml`: differences up to a margin are called equal."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

__all__ = ["margins"]


@cache
def margins() -> dict[str, dict[str, dict[str, float]]]:
    """Return the margins by table, block and metric; accuracy in points."""
    text = (files("bsam.experiments.paper") / "margins.toml").read_text(encoding="utf-8")
    content: dict[str, dict[str, dict[str, float]]] = tomllib.loads(text)
    return content
