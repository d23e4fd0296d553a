"""Blur: out of focus, through frosted glass, by motion, and by zooming."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bsam.experiments.corruptions.draw import Draw
from bsam.experiments.corruptions.filters import along_both, gaussian_matrix, shifted, zoom_matrix

__all__ = ["defocus_blur", "glass_blur", "motion_blur", "moved", "zoom_blur"]


def defocus_blur(x: Tensor, draw: Draw, radius: float, alias: float) -> Tensor:
    """Average over a disk, which is smoothed by a Gaussian of 3 x 3 pixels with the standard deviation `alias`."""
    half = int(radius) + 1
    place = torch.arange(-half, half + 1, dtype=torch.float64)
    disk = (place[:, None] ** 2 + place**2 <= radius**2).double()
    weights = torch.exp(-0.5 * (torch.arange(-1, 2, dtype=torch.float64) / alias) ** 2)
    weights = weights / weights.sum()
    kernel = F.conv2d((disk / disk.sum())[None, None], torch.outer(weights, weights)[None, None], padding=1)
    channels = x.shape[1]
    with torch.backends.cudnn.flags(enabled=False):  # cuDNN may use TensorFloat-32, which has 11 bits
        return F.conv2d(F.pad(x, (half,) * 4, mode="reflect"), kernel.to(x).repeat(channels, 1, 1, 1), groups=channels)


def glass_blur(x: Tensor, draw: Draw, sigma: float, reach: int, times: int) -> Tensor:
    """Blur, copy pixels from up to `reach` pixels above and to the left, and blur again.

    The published program means to swap two pixels. Its arrays are views, so that it copies one over the other; since
    it goes from the last pixel to the first, no copied pixel is copied again. CIFAR-10-C was made like this.
    """
    n, _, height, width = x.shape
    matrix = gaussian_matrix(height, sigma, truncate=4, border="edge")
    x = (along_both(x, matrix) * 255 + 1e-3).floor()
    scope = torch.zeros(height, width, dtype=torch.bool, device=x.device)
    scope[reach + 1 : height - reach + 1, reach + 1 : width - reach + 1] = True
    for _ in range(times):
        right, down = draw.integers(-reach, reach, 2, n, height, width)
        x = shifted(x, down * scope, right * scope)
    return along_both(x / 255, matrix)


def motion_blur(x: Tensor, draw: Draw, radius: int, sigma: float) -> Tensor:
    """Blur along a line of a random direction, up to 45 degrees from the horizontal."""
    return moved(x, draw.uniform(-45, 45, len(x)), radius, sigma)


def moved(x: Tensor, angle: Tensor, radius: int, sigma: float) -> Tensor:
    """Average over the pixels on a line that begins at each pixel, with half a Gaussian as weights.

    This is ImageMagick's motion blur: the line has 2 radius + 1 pixels, and the result is rounded down to 8 bits.
    """
    angle = angle.double().deg2rad()
    step = torch.arange(2 * radius + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (step / sigma) ** 2)
    weights = weights / weights.sum()
    blurred = torch.zeros_like(x)
    for k, weight in enumerate(weights.tolist()):
        down, right = ((k * part - 0.5).ceil().long() for part in (angle.sin(), angle.cos()))
        blurred += weight * shifted(x, down, right)
    return (blurred * 255 + 1e-3).floor() / 255


def zoom_blur(x: Tensor, draw: Draw, num_zooms: int) -> Tensor:
    """Average the image and its enlargements by 1.00, 1.01, 1.02, ..."""
    total = x.clone()
    for k in range(num_zooms):
        total += along_both(x, zoom_matrix(x.shape[-1], 1 + k / 100))
    return total / (num_zooms + 1)
