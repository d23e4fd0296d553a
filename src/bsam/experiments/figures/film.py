"""A film of a training run on two moons: the predictions of SAM and bSAM, side by side, as the steps go on.

Network, data and settings are those of the figure of two moons, see `bsam.experiments.figures.moons`.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from bsam.experiments.config import Config
from bsam.experiments.data import Dataset, load
from bsam.experiments.demo import CERTAIN, Map, load_demo
from bsam.experiments.figures.threads import one_thread
from bsam.experiments.methods import predict
from bsam.experiments.style import in_print, new_figure, probability
from bsam.experiments.trainer import Trainer

__all__ = ["Film", "compute_film", "write_film"]

TITLES = {"sam-sgd": "SAM", "bsam": "bSAM"}
FORMATS = {".webp": "WEBP", ".png": "PNG"}
_MILLISECONDS, _LAST_MILLISECONDS = 120, 3000
_DPI = 130


@dataclass(frozen=True)
class Film:
    """The maps of both methods after some numbers of steps."""

    steps: tuple[int, ...]
    maps: dict[str, tuple[Map, ...]]
    """By method, one map per number of steps."""


@cache
@one_thread()
def compute_film(num_frames: int = 50, epochs: int | None = None) -> Film:
    """Train both methods; look at their predictions more often at the beginning, where they change fastest."""
    configs = {method: load_demo().moons[method] for method in TITLES}
    if epochs is not None:
        configs = {method: replace(config, epochs=epochs) for method, config in configs.items()}
    dataset = load(configs["bsam"].dataset)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "after .* steps", UserWarning)  # the initial precision counts, as intended
        found = {method: dict(_maps(config, dataset, num_frames)) for method, config in configs.items()}
    steps = tuple(found["bsam"])
    return Film(steps, {method: tuple(maps[step] for step in steps) for method, maps in found.items()})


def _maps(config: Config, dataset: Dataset, num_frames: int) -> Iterator[tuple[int, Map]]:
    trainer = Trainer(config, dataset, seed=0)
    xs, ys = torch.linspace(-3.5, 4.5, 80), torch.linspace(-3.0, 3.5, 65)
    inputs = dataset.normalise(torch.cartesian_prod(ys, xs).flip(1))
    batches = -(-len(dataset.train[0]) // config.batch_size)
    total = batches * config.total_epochs
    wanted = {max(1, round(total * (k / num_frames) ** 2)) for k in range(1, num_frames + 1)}
    before = -1.0
    step = 0
    for _ in trainer.steps():
        if trainer.progress == before:  # the end of an epoch is no step
            continue
        before, step = trainer.progress, step + 1
        if step in wanted:
            yield step, Map(xs, ys, _probability(trainer, config, inputs).view(len(ys), len(xs)), *dataset.train)


def _probability(trainer: Trainer, config: Config, inputs: Tensor) -> Tensor:
    was_training = trainer.model.training
    predictions = predict(config, trainer.model, trainer.posterior(), inputs, num_samples=config.num_samples)
    trainer.model.train(was_training)
    return predictions.probs[:, 1]


def write_film(path: Path) -> Path:
    """Write the film as an animated .webp or .png, by the ending of the path. It plays once."""
    if path.suffix not in FORMATS:
        raise ValueError(f"--out {path} must end in one of: {', '.join(FORMATS)}.")
    film = compute_film()
    frames = [_frame(film, index) for index in range(len(film.steps))]
    durations = [_MILLISECONDS] * (len(frames) - 1) + [_LAST_MILLISECONDS]
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *others = frames
    options = {"quality": 60, "method": 4} if path.suffix == ".webp" else {}
    first.save(path, FORMATS[path.suffix], save_all=True, append_images=others, duration=durations, loop=1, **options)
    return path


def _frame(film: Film, index: int) -> Image.Image:
    with in_print():
        figure = new_figure(4.9, 3.4)
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (method, title) in zip(panels, TITLES.items(), strict=True):
            found = film.maps[method][index]
            x, y, p = (part.double().numpy() for part in (found.x, found.y, found.probability))
            image = probability(axes, x, y, p, found.points.double().numpy(), found.labels.double().numpy())
            share = f"more than {CERTAIN:.0%} certain on {found.certain_far_away():.0%}"
            axes.set_title(f"{title}\n{share}\nof the area far from the data", fontsize="small")
            axes.set_xlabel("first feature")
        panels[0].set_ylabel("second feature")
        figure.colorbar(
            image, ax=panels, location="bottom", ticks=[0, 0.5, 1], label="probability of class 1", aspect=40
        )
        figure.suptitle(f"Two moons after {film.steps[index]:,} of {film.steps[-1]:,} steps", fontsize="medium")
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=_DPI, format="png")
    return Image.open(buffer).convert("RGB")
