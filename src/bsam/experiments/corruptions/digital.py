"""Digital artefacts: contrast, elastic distortion, pixels, JPEG."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bsam.experiments.corruptions.draw import Draw
from bsam.experiments.corruptions.filters import along_both, box_matrix, gaussian_matrix, sample_between

__all__ = ["contrast", "elastic_transform", "jpeg_compression", "pixelate"]


def contrast(x: Tensor, draw: Draw, kept: float) -> Tensor:
    """Move all values of a colour towards their mean."""
    mean = x.mean(dim=(2, 3), keepdim=True)
    return (x - mean) * kept + mean


def elastic_transform(x: Tensor, draw: Draw, alpha: float, sigma: float, affine: float) -> Tensor:
    """Move three corners of a square, and the whole image with them; then move pixels by smooth random steps.

    Args:
        x: The images.
        draw: The source of randomness.
        alpha: Size of the steps, before smoothing.
        sigma: Standard deviation of the smoothing.
        affine: Largest step of a corner in each direction.
    """
    n, _, height, width = x.shape
    centre, reach = height // 2, height // 3
    low, high = centre - reach, centre + reach
    corners = torch.tensor([[high, high], [high, low], [low, low]], dtype=torch.float64, device=x.device)  # (x, y)
    moved = corners + draw.uniform(-affine, affine, n, 3, 2).double()
    # The affine map A, b with A moved_k + b = corners_k says where each pixel comes from.
    ones = torch.ones(n, 3, 1, dtype=torch.float64, device=x.device)
    back = torch.linalg.solve(torch.cat([moved, ones], dim=2), corners.expand(n, -1, -1))  # (n, 3, 2)
    row, column = torch.meshgrid(
        *(torch.arange(size, dtype=torch.float64, device=x.device) for size in (height, width)), indexing="ij"
    )
    places = torch.stack([column, row, torch.ones_like(row)], dim=-1) @ back[:, None]  # (n, height, width, 2)
    x = sample_between(x, places[..., 1].to(x), places[..., 0].to(x), "mirror")
    if alpha == 0:
        return x
    matrix = gaussian_matrix(height, sigma, truncate=3, border="reflect")
    right, down = (alpha * along_both(draw.uniform(-1, 1, n, height, width), matrix) for _ in range(2))
    return sample_between(x, row.to(x) + down, column.to(x) + right, "reflect")


def pixelate(x: Tensor, draw: Draw, share: float) -> Tensor:
    """Make the image smaller and then larger by a box filter, with 8 bits after each of the four passes."""
    size = x.shape[-1]
    small = int(size * share)
    for matrix in (box_matrix(size, small), box_matrix(small, size)):
        matrix = matrix.to(x)
        x = _nearest((x @ matrix.T) * 255) / 255
        x = _nearest((matrix @ x) * 255) / 255
    return x


def _nearest(x: Tensor) -> Tensor:
    """Round to the nearest integer, and halves up, as programs with fixed-point numbers do."""
    return (x + 0.5 + 1e-4).floor()  # sums of float32 may be a little less than a half


# ------------------------------------------------------------------ JPEG

_LUMINANCE = (
    *(16, 11, 10, 16, 24, 40, 51, 61),
    *(12, 12, 14, 19, 26, 58, 60, 55),
    *(14, 13, 16, 24, 40, 57, 69, 56),
    *(14, 17, 22, 29, 51, 87, 80, 62),
    *(18, 22, 37, 56, 68, 109, 103, 77),
    *(24, 35, 55, 64, 81, 104, 113, 92),
    *(49, 64, 78, 87, 103, 121, 120, 101),
    *(72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMINANCE = (
    *(17, 18, 24, 47, 99, 99, 99, 99),
    *(18, 21, 26, 66, 99, 99, 99, 99),
    *(24, 26, 56, 99, 99, 99, 99, 99),
    *(47, 66, 99, 99, 99, 99, 99, 99),
    *(99,) * 32,
)
"""The example tables of the JPEG standard (ITU-T T.81, annex K), which libjpeg uses."""


def jpeg_compression(x: Tensor, draw: Draw, quality: int) -> Tensor:
    """Compress and decompress as JPEG with half the resolution in colour (4:2:0), as libjpeg does."""
    red, green, blue = (x * 255).round().unbind(1)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    blueness = 128 - 0.168735892 * red - 0.331264108 * green + 0.5 * blue
    redness = 128 + 0.5 * red - 0.418687589 * green - 0.081312411 * blue
    luma = _quantised(_nearest(luma), _LUMINANCE, quality)
    cb, cr = (
        _enlarged(_quantised(_halved(_nearest(colour - 3e-4)), _CHROMINANCE, quality)) - 128  # halves down
        for colour in (blueness, redness)
    )
    colours = (luma + 1.402 * cr, luma - 0.344136286 * cb - 0.714136286 * cr, luma + 1.772 * cb)
    return _nearest(torch.stack(colours, dim=1)).clamp(0, 255) / 255


def _halved(plane: Tensor) -> Tensor:
    """Average 2 x 2 values, and round halves down and up in turn."""
    bias = torch.tensor([0.25, 0.5], device=plane.device).repeat(plane.shape[-1] // 4)
    return (F.avg_pool2d(plane[:, None], 2)[:, 0] + bias).floor()


def _quantised(plane: Tensor, table: tuple[int, ...], quality: int) -> Tensor:
    """Round the cosine transform of each block of 8 x 8 values to multiples of the table, scaled for a quality."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    steps = (torch.tensor(table).view(8, 8) * scale + 50).div(100, rounding_mode="floor").clamp(1, 255).to(plane)
    k, place = torch.arange(8, dtype=torch.float64)[:, None], torch.arange(8, dtype=torch.float64)
    cosine = torch.cos((2 * place + 1) * k * math.pi / 16) / 2
    cosine[0] /= math.sqrt(2)
    cosine = cosine.to(plane)
    n, height, width = plane.shape
    blocks = plane.view(n, height // 8, 8, width // 8, 8).transpose(2, 3) - 128  # (n, down, right, 8, 8)
    ratio = (cosine @ blocks @ cosine.T) / steps
    kept = _nearest(ratio.abs()) * ratio.sign() * steps
    back = _nearest(cosine.T @ kept @ cosine + 128).clamp(0, 255)
    return back.transpose(2, 3).reshape(plane.shape)


def _enlarged(plane: Tensor) -> Tensor:
    """Double a plane: each value is 9/16 of the nearest, 3/16 of the next two and 1/16 of the fourth, rounded."""
    size = plane.shape[-1]
    nearest = torch.arange(2 * size) // 2
    next_one = (nearest + torch.tensor([-1, 1]).repeat(size)).clamp(0, size - 1)
    rows, others = nearest.to(plane.device), next_one.to(plane.device)
    columns = 3 * plane[:, rows] + plane[:, others]
    total = 3 * columns[:, :, rows] + columns[:, :, others]
    bias = torch.tensor([8.0, 7.0], device=plane.device).repeat(size)
    return ((total + bias) / 16).floor()
