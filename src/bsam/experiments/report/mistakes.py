"""Digits that were got wrong, and how sure each method was of them."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

import bsam

__all__ = ["Answer", "Errors", "Mistake", "count_errors", "data_uri", "find_mistakes"]


@dataclass(frozen=True)
class Answer:
    """The class that a method predicts for a digit, and its probability."""

    name: str
    says: int
    sure: float
    right: bool


@dataclass(frozen=True)
class Mistake:
    """A digit that methods got wrong."""

    source: str
    """The image as a data URI."""
    label: int
    answers: list[Answer]


@dataclass(frozen=True)
class Errors:
    """All errors of a method."""

    name: str
    count: int
    sure: float | None
    """Mean probability of the predicted class where it is wrong; None without an error."""


def find_mistakes(images: Tensor, predictions: Mapping[str, bsam.Predictions], count: int = 6) -> list[Mistake]:
    """Return the digits that most methods got wrong; among equals, those of which the methods are most sure.

    Args:
        images: Raw grey values (n, 1, height, width).
        predictions: By title of the method, its predictions of these images, with labels.
        count: Number of digits; fewer if fewer were got wrong.
    """
    named = {name: (each.probs.max(1), _labels(each)) for name, each in predictions.items()}
    wrong = torch.stack([best.indices != labels for best, labels in named.values()])
    sure = torch.stack([best.values for best, _ in named.values()])
    times = wrong.sum(0)
    order = (times + (sure * wrong).mean(0)).argsort(descending=True)
    return [
        Mistake(
            data_uri(images[i]),
            int(next(iter(named.values()))[1][i]),
            [
                Answer(name, int(best.indices[i]), float(best.values[i]), bool(best.indices[i] == labels[i]))
                for name, (best, labels) in named.items()
            ],
        )
        for i in order[:count].tolist()
        if times[i]
    ]


def count_errors(predictions: Mapping[str, bsam.Predictions]) -> list[Errors]:
    """Count the errors of each method, and average its confidence in them."""
    errors = []
    for name, each in predictions.items():
        sure, says = each.probs.max(1)
        wrong = says != _labels(each)
        errors.append(Errors(name, int(wrong.sum()), float(sure[wrong].mean()) if wrong.any() else None))
    return errors


def _labels(predictions: bsam.Predictions) -> Tensor:
    assert predictions.labels is not None
    return predictions.labels


def data_uri(image: Tensor) -> str:
    """Return a picture of raw grey values (1, height, width), dark on white."""
    grey = image.squeeze(0).double()
    ink = (255 * (1 - grey / grey.max().clamp(min=1))).round().to(torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(ink.cpu().numpy(), mode="L").save(buffer, "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
