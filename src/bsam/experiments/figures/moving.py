"""Figures that move: a page to explore the theory with, and a film. `bsam figure NAME --out FILE` writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bsam.experiments.figures.explore import write_explore
from bsam.experiments.figures.film import write_film

__all__ = ["MOVING", "Moving"]


@dataclass(frozen=True)
class Moving:
    """A figure that moves: its description, the ending of its file, and the function that writes it."""

    what: str
    ending: str
    write: Callable[[Path], Path]


MOVING: dict[str, Moving] = {
    "explore": Moving("a page with sliders: objectives, f and f** of a loss", ".html", write_explore),
    "film": Moving("predictions of SAM and bSAM on two moons while they train", ".webp", write_film),
}
