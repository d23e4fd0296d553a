"""Inputs of another kind than a data set's own, in its format: near ones, which look alike, and far ones.

Images of three colours have 32 x 32 pixels here. Of TinyImageNet, each 2 x 2 pixels are averaged; MNIST and
FashionMNIST get a black border of two pixels, and the same gray in all three colours. All test images are taken.
CIFAR-100, TinyImageNet and CIFAR-10 have some classes in common, such as dogs in TinyImageNet and CIFAR-10, which other
authors leave out: with these, an AUROC of 1 is out of reach, for all methods alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bsam.experiments.data import Dataset, load_test

__all__ = ["UNKNOWN", "unknown_images"]

_COLOUR_FAR = {"mnist": "far", "fashionmnist": "far"}
UNKNOWN: dict[str, dict[str, str]] = {
    "cifar10": {"cifar100": "near", "tinyimagenet": "near", **_COLOUR_FAR},
    "cifar100": {"cifar10": "near", "tinyimagenet": "near", **_COLOUR_FAR},
    "mnist": {"fashionmnist": "far"},
    "fashionmnist": {"mnist": "far"},
    "mnist-standardised": {"fashionmnist": "far"},
    "fashionmnist-standardised": {"mnist": "far"},
    "digits": {"mirrored": "near", "photographs": "far"},
}
"""By data set: the unknown sets, and whether they are near or far."""


def unknown_images(known: Dataset, name: str, folder: Path | None) -> Tensor:
    """Return the images of an unknown set in the format of the known one: uint8 (n, channels, height, width)."""
    if name in _MADE:
        return _MADE[name](known)
    images, _ = load_test(name, folder)
    channels, _, width = known.image_shape
    if images.shape[-1] == 2 * width:
        images = F.avg_pool2d(images.float(), 2).round().to(torch.uint8)
    border = (width - images.shape[-1]) // 2
    images = F.pad(images, (border,) * 4).expand(-1, channels, -1, -1)
    assert images.shape[1:] == known.image_shape, (name, images.shape)
    return images.to(known.device)


# ------------------------------------------------------------------ unknown sets that need no files


def _mirrored(known: Dataset) -> Tensor:
    """Return the test digits but 0, 1 and 8, mirrored left to right: no longer digits."""
    images, labels = known.test
    chosen = ~torch.isin(labels, torch.tensor([0, 1, 8], device=labels.device))
    return images[chosen].flip(-1)


def _photographs(known: Dataset) -> Tensor:
    """Return windows of scikit-learn's two photographs, in gray and with the pixels and values of the known set."""
    from sklearn.datasets import load_sample_images

    size, scale = known.image_shape[-1], known.info.scale
    windows = []
    for photograph in load_sample_images().images:
        gray = torch.from_numpy(np.array(photograph)).float().mean(dim=-1)
        small = F.avg_pool2d(gray[None], 3)[0] / 255 * scale
        windows.append(small.unfold(0, size, size).unfold(1, size, size).reshape(-1, 1, size, size))
    return torch.cat(windows).round().to(torch.uint8).to(known.device)


_MADE: dict[str, Callable[[Dataset], Tensor]] = {"mirrored": _mirrored, "photographs": _photographs}
