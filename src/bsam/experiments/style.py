"""Style of figures and pages: colours that colour-blind readers can distinguish, maps of probabilities, saving."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from numpy.typing import NDArray
from PIL import Image

__all__ = ["SMALLEST", "ellipse", "in_print", "new_figure", "probability", "save", "scatter"]

Array = NDArray[Any]

# Okabe and Ito (2008).
BLUE, RED, GREEN, ORANGE, PURPLE = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7"
GRAY, BLACK = "#8a8a8a", "#1a1a1a"

_CERTAINTY = LinearSegmentedColormap.from_list("certainty", ["#c2570c", "#fdba74", "#ffffff", "#93c5fd", "#1d4ed8"])
_CLASSES = ("#7c2d12", "#172554")


SMALLEST = 8.5
"""Size of the smallest letters of a figure of the docs, in points."""

_TEXT: Any = {"font.size": 9.5, "axes.titlesize": 9.5, "legend.fontsize": SMALLEST, "legend.framealpha": 0.9}


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure; width and height are in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def in_print() -> AbstractContextManager[None]:
    """Draw inside of this context in sizes that stay readable when a figure is 400 pixels wide."""
    return matplotlib.rc_context(_TEXT)


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as .png, .svg or .pdf, by the ending of the path."""
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise ValueError(f"--out {path} must end in one of: {', '.join('.' + name for name in sorted(formats))}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "bsam"}):
        if path.suffix == ".png":  # 256 colours are enough, and need a third of the bytes
            buffer = io.BytesIO()
            figure.savefig(buffer, dpi=110, format="png")
            # MAXCOVERAGE keeps the colours of thin lines, which median cut loses; k-means reduces its banding
            image = Image.open(buffer).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=1)
            image.save(path, optimize=True)
        else:  # equal runs write equal files: no date, and names of parts from a fixed salt
            figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def probability(axes: Axes, x: Array, y: Array, p: Array, points: Array, labels: Array, *, size: float = 20) -> Any:
    """Draw a map of the probability of the second class, white where it is 0.5, with the data; return the image.

    `p` has shape (y, x), and `points` (N, 2), drawn in this size. The larger label is the second class.
    """
    extent = (float(x[0]), float(x[-1]), float(y[0]), float(y[-1]))
    options: Any = {"origin": "lower", "extent": extent, "cmap": _CERTAINTY, "vmin": 0, "vmax": 1, "aspect": "auto"}
    image = axes.imshow(p, interpolation="bilinear", **options)
    axes.contour(x, y, p, levels=[0.1, 0.5, 0.9], colors=BLACK, linewidths=[0.5, 1.0, 0.5])
    scatter(axes, points, labels, size=size)
    return image


def scatter(axes: Axes, points: Array, labels: Array, *, size: float = 20) -> None:
    """Draw the points of two classes, one as circles and one as triangles."""
    for label, colour, marker in zip(np.unique(labels), _CLASSES, ("o", "^"), strict=True):
        chosen = points[labels == label]
        axes.scatter(chosen[:, 0], chosen[:, 1], s=size, c=colour, marker=marker, edgecolors="white", linewidths=0.5)


def ellipse(axes: Axes, mean: Array, covariance: Array, *, mass: float = 0.9, **style: Any) -> None:
    """Draw the smallest region that holds this share of the mass of a two-dimensional Gaussian."""
    values, vectors = np.linalg.eigh(covariance)
    width, height = 2 * np.sqrt(-2 * np.log(1 - mass) * values)
    angle = float(np.degrees(np.arctan2(vectors[1, 0], vectors[0, 0])))
    axes.add_patch(Ellipse((float(mean[0]), float(mean[1])), width, height, angle=angle, fill=False, **style))
