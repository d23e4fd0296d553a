"""Linear filters of images (n, channels, height, width): one matrix per direction, or samples between the pixels.

A filter of one direction is a matrix (output size, input size) that has the rule at the border in it:

    edge      a a a | a b c d | d d d       replicate
    reflect   c b a | a b c d | d c b       the border is between two pixels
    mirror    d c b | a b c d | c b a       the border is a pixel
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "Border",
    "along_both",
    "box_matrix",
    "gaussian_matrix",
    "inside",
    "sample_between",
    "shifted",
    "zoom_matrix",
]

Border = Literal["edge", "reflect", "mirror"]


def inside(index: Tensor, size: int, border: Border) -> Tensor:
    """Return the pixel from 0 to size - 1 that stands for each index, also for those outside."""
    if border == "edge":
        return index.clamp(0, size - 1)
    period = 2 * size if border == "reflect" else 2 * size - 2
    index = index.remainder(period)
    return torch.minimum(index, period - (1 if border == "reflect" else 0) - index)


def along_both(images: Tensor, matrix: Tensor) -> Tensor:
    """Apply a matrix to the rows and to the columns of images."""
    matrix = matrix.to(images)
    return matrix @ images @ matrix.T


def gaussian_matrix(size: int, sigma: float, *, truncate: float, border: Border) -> Tensor:
    """Return the Gaussian filter, cut off at `truncate` standard deviations and normalised."""
    radius = int(truncate * sigma + 0.5)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.exp(-0.5 * (offsets.double() / max(sigma, 1e-15)) ** 2)
    pixels = torch.arange(size)[:, None]
    matrix = torch.zeros(size, size, dtype=torch.float64)
    matrix.scatter_add_(1, inside(pixels + offsets, size, border), (weights / weights.sum()).expand(size, -1))
    return matrix


def zoom_matrix(size: int, factor: float) -> Tensor:
    """Return the filter that cuts out the middle, enlarges it linearly by `factor`, and trims it to `size`."""
    cut = math.ceil(size / factor)
    enlarged = round(cut * factor)
    top, trim = (size - cut) // 2, (enlarged - size) // 2
    place = (torch.arange(size, dtype=torch.float64) + trim) * (cut - 1) / (enlarged - 1)
    before = place.floor().clamp(max=cut - 1)
    share = place - before
    matrix = torch.zeros(size, size, dtype=torch.float64)
    rows = torch.arange(size)
    matrix[rows, top + before.long()] += 1 - share
    matrix[rows, top + (before.long() + 1).clamp(max=cut - 1)] += share
    return matrix


def box_matrix(size: int, new_size: int) -> Tensor:
    """Return Pillow's box filter, which gives each pixel whose centre is in the box the same weight."""
    scale = size / new_size
    half = max(scale, 1.0) / 2
    centre = (torch.arange(new_size, dtype=torch.float64)[:, None] + 0.5) * scale
    distance = torch.arange(size, dtype=torch.float64) + 0.5 - centre
    matrix = ((distance > -half) & (distance <= half)).double()
    return matrix / matrix.sum(dim=1, keepdim=True)


def sample_between(images: Tensor, rows: Tensor, columns: Tensor, border: Border) -> Tensor:
    """Interpolate images linearly at places (n, height, width), in pixels from the first one."""
    height, width = images.shape[-2:]
    top, left = rows.floor(), columns.floor()
    down, right = (rows - top)[:, None], (columns - left)[:, None]

    def at(row: Tensor, column: Tensor) -> Tensor:
        return _picked(images, inside(row.long(), height, border), inside(column.long(), width, border))

    upper = (1 - right) * at(top, left) + right * at(top, left + 1)
    lower = (1 - right) * at(top + 1, left) + right * at(top + 1, left + 1)
    return (1 - down) * upper + down * lower


def shifted(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Return the pixels that are `down` rows below and `right` columns beside, per image (n,) or pixel (n, h, w)."""
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device)[:, None] + (down[:, None, None] if down.ndim == 1 else down)
    columns = torch.arange(width, device=images.device) + (right[:, None, None] if right.ndim == 1 else right)
    everywhere = torch.zeros(len(images), height, width, dtype=torch.int64, device=images.device)
    return _picked(images, inside(rows + everywhere, height, "edge"), inside(columns + everywhere, width, "edge"))


def _picked(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the pixels at (n, height, width) places; all channels of an image have the same places."""
    flat = (rows * images.shape[-1] + columns).flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, flat).view(*images.shape[:2], *rows.shape[1:])
