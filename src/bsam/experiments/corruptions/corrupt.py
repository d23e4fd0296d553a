"""The table of corruptions, with their constants for images of 32 x 32 pixels, and the function that applies one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bsam.experiments.corruptions.blur import defocus_blur, glass_blur, motion_blur, zoom_blur
from bsam.experiments.corruptions.digital import contrast, elastic_transform, jpeg_compression, pixelate
from bsam.experiments.corruptions.draw import Draw
from bsam.experiments.corruptions.noise import gaussian_noise, impulse_noise, shot_noise
from bsam.experiments.corruptions.weather import brightness, fog, frost, snow

__all__ = ["KINDS", "SIZE", "STRENGTHS", "Kind", "check_images", "corrupt"]

SIZE = 32
"""Height and width of the images; the constants are for this size."""
STRENGTHS = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Kind:
    """One corruption."""

    function: Callable[..., Tensor]
    """Called with images from 0 to 1, a source of randomness, and the constants of a strength."""
    constants: Sequence[tuple[Any, ...]]
    """Of the strengths 1 to 5."""


def _each(*values: Any) -> Sequence[tuple[Any, ...]]:
    return [(value,) for value in values]


KINDS: dict[str, Kind] = {
    "gaussian_noise": Kind(gaussian_noise, _each(0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": Kind(shot_noise, _each(500, 250, 100, 75, 50)),
    "impulse_noise": Kind(impulse_noise, _each(0.01, 0.02, 0.03, 0.05, 0.07)),
    "defocus_blur": Kind(defocus_blur, [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)]),
    "glass_blur": Kind(glass_blur, [(0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)]),
    "motion_blur": Kind(motion_blur, [(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)]),
    "zoom_blur": Kind(zoom_blur, _each(7, 12, 16, 21, 26)),
    "snow": Kind(
        snow,
        [
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ],
    ),
    "frost": Kind(frost, [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)]),
    "fog": Kind(fog, [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)]),
    "brightness": Kind(brightness, _each(0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": Kind(contrast, _each(0.75, 0.5, 0.4, 0.3, 0.15)),
    "elastic_transform": Kind(
        elastic_transform,
        [
            (0, 0, 0.08 * SIZE),
            (0.05 * SIZE, 0.2 * SIZE, 0.07 * SIZE),
            (0.08 * SIZE, 0.06 * SIZE, 0.06 * SIZE),
            (0.1 * SIZE, 0.04 * SIZE, 0.05 * SIZE),
            (0.1 * SIZE, 0.03 * SIZE, 0.03 * SIZE),
        ],
    ),
    "pixelate": Kind(pixelate, _each(0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg_compression": Kind(jpeg_compression, _each(80, 65, 58, 50, 40)),
}
"""In the order of the paper: noise, blur, weather, digital artefacts."""


def check_images(shape: Sequence[int]) -> str | None:
    """Return why images of a shape (channels, height, width) cannot be corrupted, or None if they can."""
    if tuple(shape) == (3, SIZE, SIZE):
        return None
    size = " x ".join(map(str, shape))
    return f"the constants are for images of 3 x {SIZE} x {SIZE}, and these are {size}"


def corrupt(images: Tensor, kind: str, strength: int, *, seed: int = 0, draw: Draw | None = None) -> Tensor:
    """Corrupt images.

    Args:
        images: uint8 (n, 3, 32, 32), on any device.
        kind: One of `KINDS`.
        strength: 1 to 5.
        seed: With the same seed, kind, strength and number of images, the random numbers are the same on every device.
        draw: The source of randomness, if not that of the seed.

    Returns:
        uint8 of the same shape: values are cut off between 0 and 255, and rounded down as in CIFAR-10-C.
    """
    if kind not in KINDS:
        raise ValueError(f"there is no corruption {kind!r}: choose one of {', '.join(KINDS)}.")
    if strength not in STRENGTHS:
        raise ValueError(f"strength={strength!r} must be an integer from 1 to {STRENGTHS[-1]}.")
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(f"images must be uint8 (n, 3, {SIZE}, {SIZE}), got {images.dtype} {tuple(images.shape)}.")
    if reason := check_images(images.shape[1:]):
        raise ValueError(f"the images cannot be corrupted: {reason}.")
    found = KINDS[kind]
    draw = draw or Draw(seed, kind, strength, device=images.device)
    corrupted = found.function(images.float() / 255, draw, *found.constants[strength - 1])
    # In float32, k/255 * 255 may be a little less than k.
    return (corrupted.clamp(0, 1) * 255 + 1e-3).floor().to(torch.uint8)
