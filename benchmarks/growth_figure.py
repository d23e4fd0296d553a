"""Draw what `growth.py` measured: what a step costs against splits, seeds, batch and parameters, and predictions.

python benchmarks/growth_figure.py results/engine_growth.json --out docs/images/performance/growth.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, StrMethodFormatter

from bsam.experiments.style import BLACK, BLUE, GRAY, RED, new_figure, save

Measurements = list[dict[str, Any]]
Curve = list[tuple[float, float]]
"""Points (x, cost), by x."""

COMMON = """Steps: ResNet-20-FRN in
bfloat16, captured; 8 splits,
one seed and 128 images,
one of them varied.
bSAM's arithmetic: sampling,
perturbation and update, no
network; GPT-2's widths.
16 copies: the same bytes,
at a copy's speed.
Plain passes: compiled,
fixed weights.
Dotted: in proportion to
the first point."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="What growth.py wrote.")
    parser.add_argument("--out", type=Path, default=Path("growth.svg"), help="Ends in .png, .svg or .pdf.")
    arguments = parser.parse_args()
    with matplotlib.rc_context({"font.size": 9}):
        figure = new_figure(5.2, 8.6)
        draw(json.loads(arguments.record.read_text()), figure)
        save(figure, arguments.out)


def draw(record: dict[str, Any], figure: Figure) -> None:
    """Five panels, and in words what they have in common; measurements that failed are left out."""
    measured = [each for each in record["measurements"].values() if "error" not in each]
    steps = [each for each in measured if "splits" in each and each.get("convolutions") != "cuDNN"]  # an older record
    (splits, seeds), (batches, parameters), (samples, words) = figure.subplots(3, 2)
    draw_splits(splits, [step for step in steps if step["runs"] == 1 and step["batch"] == 128])
    draw_seeds(seeds, [step for step in steps if step["splits"] == 8 and step["batch"] == 128])
    draw_batches(batches, [step for step in steps if step["splits"] == 8 and step["runs"] == 1])
    draw_parameters(parameters, [each for each in measured if "floor_16_passes_ms" in each])
    draw_samples(samples, [each for each in measured if "predict_s" in each])
    words.set_axis_off()
    common = f"{record['environment']['device']}\n\n{COMMON}"
    written = words.text(0, 1, common, va="top", color=BLACK, linespacing=1.4, transform=words.transAxes)
    written.set_in_layout(False)  # else the panel above shrinks


def draw_splits(axes: Axes, steps: Measurements) -> None:
    points = curve(steps, "splits", "ms")
    line(axes, points, BLUE)
    numbers(axes, points, BLUE)
    finish(axes, "m, splits of the same images", "ms per step", flat=True)


def draw_seeds(axes: Axes, steps: Measurements) -> None:
    total, each = curve(steps, "runs", "ms"), curve(steps, "runs", "ms_per_run")
    proportional(axes, total)
    line(axes, total, BLUE, "all seeds")
    numbers(axes, total, BLUE, above=True)
    line(axes, each, RED, "for each seed")
    numbers(axes, each[1:], RED)  # the first is that of all
    finish(axes, "seeds trained together", "ms per step")


def draw_batches(axes: Axes, steps: Measurements) -> None:
    points = curve(steps, "batch", "ms")
    proportional(axes, points)
    line(axes, points, BLUE)
    numbers(axes, points, BLUE, above=True)
    finish(axes, "images of a batch", "ms per step")


def draw_parameters(axes: Axes, found: Measurements) -> None:
    points = curve(found, "parameters", "ms")
    line(axes, curve(found, "parameters", "floor_16_passes_ms"), GRAY, "16 copies")
    line(axes, points, BLUE, "bSAM's arithmetic")
    numbers(axes, points, BLUE, above=True)
    finish(axes, "parameters, in millions", "ms per step", lambda x: f"{x / 1e6:.0f}")


def draw_samples(axes: Axes, found: Measurements) -> None:
    points = curve(found, "samples", "predict_s")
    line(axes, curve(found, "samples", "plain_s"), GRAY, "as many plain passes")
    line(axes, points, BLUE, "bsam.predict")
    numbers(axes, points, BLUE, above=True)
    finish(axes, "samples, for 10,000 images", "seconds")


# ------------------------------------------------------------------ what the panels share


def curve(found: Measurements, x: str, y: str) -> Curve:
    return sorted((each[x], each[y]) for each in found)


def line(axes: Axes, points: Curve, colour: str, label: str | None = None) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, label=label)


def numbers(axes: Axes, points: Curve, colour: str, *, above: bool = False) -> None:
    """The cost at each point: below it, or above it on the left, where a curve that rises is not."""
    ha, va, offset = ("right", "bottom", (1, 2)) if above else ("center", "top", (0, -5))
    place: Any = {"ha": ha, "va": va, "xytext": offset, "textcoords": "offset points", "color": colour}
    place["path_effects"] = [withStroke(linewidth=2, foreground="white")]  # where a line passes behind it
    for x, y in points:
        axes.annotate(f"{y:.2g}" if y < 0.1 else f"{y:.3g}", (x, y), **place)


def proportional(axes: Axes, points: Curve) -> None:
    if points:
        (x, y), (last, _) = points[0], points[-1]
        axes.plot([x, last], [y, y * last / x], ":", color=GRAY, linewidth=1)


def finish(axes: Axes, x: str, y: str, name: Callable[[float], str] = "{:g}".format, *, flat: bool = False) -> None:
    """Logarithmic axes with ticks at what was measured, or costs from 0 on; a curve's name has its colour."""
    axes.set(xscale="log", yscale="linear" if flat else "log", xlabel=x, ylabel=y)
    ticks = sorted({float(at) for drawn in axes.lines for at in drawn.get_xdata()})
    axes.set_xticks(ticks, [name(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="x", rotation=60 if len(ticks) > 4 else 0)
    low, high = axes.get_ylim()
    if flat:
        axes.set_ylim(0, 1.4 * high)
    else:
        axes.set_ylim(low / (high / low) ** 0.1, high * (high / low) ** 0.3)  # room for numbers and names
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_yticks([], minor=True)
    first, last = ticks[0], ticks[-1]
    axes.set_xlim(first / (last / first) ** 0.32, last * (last / first) ** 0.05)  # room on the left for a number
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", frameon=False, handlelength=1.2, labelcolor="linecolor")


if __name__ == "__main__":
    main()
