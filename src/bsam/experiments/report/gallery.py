"""The figures of the theory in the report: their captions, and the images that `bsam figure all` wrote."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Shown", "gallery"]

_CAPTIONS = {
    "sam-vs-bayes": "SAM takes the largest loss in a ball, and Bayes the expected loss under a Gaussian (Figure 1a).",
    "worst-case": "−f** is the worst expected loss for a given mean and variance. The paper has no such figure.",
    "smoothing": "The expected loss and its relaxation lose minima as the variance grows (Figure 1b).",
    "theorem-2": "SAM's minimiser is also the minimiser of the relaxation (the star of Figure 1b).",
    "dual-spaces": "A Gaussian has expectation parameters and natural parameters (Figure 2a).",
    "biconjugate": "These are f and f** over μ, and over mean and variance (Figures 2b and 2c).",
    "logistic": "These are the predictions of exact Bayes, bSAM, SAM, and SAM with Laplace's approximation (Figure 3).",
    "logistic-posterior": "These are the data of that figure, the exact posterior, and its approximations (appendix).",
    "data-sets": "This is how confident the methods are on 200 data sets. The paper has no such figure.",
    "certainty": "These are the predictions of SAM and bSAM on two moons, side by side. The paper has no such figure.",
    "moons": "These are the predictions of bSAM, SAM, and SAM with Laplace's approximation on two moons (appendix).",
    "relaxed-bayes": "These are the posteriors of Bayes and of relaxed Bayes, and the gaps of their ELBO (appendix).",
}
"""One sentence per figure."""
_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


@dataclass(frozen=True)
class Shown:
    """A figure of the gallery."""

    name: str
    caption: str
    command: str
    source: str | None
    """The image as a data URI; None if it is not in the folder."""


def gallery(folder: Path) -> Iterator[Shown]:
    """Yield the figures of the theory, with the images that are in the folder."""
    for name, caption in _CAPTIONS.items():
        path = next((path for ending in _TYPES if (path := folder / f"{name}{ending}").is_file()), None)
        source = None
        if path is not None:
            source = f"data:{_TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"
        ending = path.suffix if path else ".svg"
        yield Shown(name, caption, f"bsam figure {name} --out {name}{ending}", source)
