"""Weather: snow, frost, fog and brightness."""

from __future__ import annotations

import torch
from torch import Tensor

from bsam.experiments.corruptions.blur import moved
from bsam.experiments.corruptions.draw import Draw
from bsam.experiments.corruptions.filters import along_both, zoom_matrix

__all__ = ["brightness", "fog", "frost", "plasma", "snow"]


def snow(
    x: Tensor, draw: Draw, mean: float, std: float, zoom: float, least: float, radius: int, sigma: float, kept: float
) -> Tensor:
    """Whiten the image, and add flakes: enlarged bright spots of noise that fall, once as drawn and once turned."""
    n, _, height, width = x.shape
    layer = along_both(mean + std * draw.normal(n, 1, height, width), zoom_matrix(height, zoom))
    layer = torch.where(layer < least, 0.0, layer).clamp(0, 1)
    layer = moved((layer * 255).floor() / 255, draw.uniform(-135, -45, n), radius, sigma)
    gray = (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(dim=1, keepdim=True)
    whitened = kept * x + (1 - kept) * torch.maximum(x, 1.5 * gray + 0.5)
    return whitened + layer + layer.rot90(2, dims=(-2, -1))


_ICE = (
    # red, green, blue: mean; red, green, blue: standard deviation within a window; of the windows' means; slope
    ((0.305, 0.582, 0.647), (0.084, 0.052, 0.049), 0.042, -0.98),
    ((0.777, 0.795, 0.831), (0.070, 0.071, 0.073), 0.034, -0.82),
    ((0.777, 0.795, 0.831), (0.070, 0.071, 0.073), 0.034, -0.82),
    ((0.562, 0.619, 0.669), (0.101, 0.101, 0.105), 0.041, -0.42),
    ((0.402, 0.446, 0.492), (0.138, 0.136, 0.133), 0.061, -1.09),
)
"""The statistics of the five published photographs of ice, at the scale at which CIFAR-10-C has them."""


def frost(x: Tensor, draw: Draw, kept: float, ice: float) -> Tensor:
    """Darken the image, and add ice.

    CIFAR-10-C adds windows of five photographs of ice, which are not part of this package. Here the ice is a random
    texture with the photographs' colours, contrasts, differences between windows, and power spectra |f|^slope.
    """
    n, _, height, width = x.shape
    which = draw.integers(0, len(_ICE), n)
    means, stds, shifts, slopes = (x.new_tensor([row[k] for row in _ICE])[which] for k in range(4))
    frequency = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)).to(x)
    frequency[0, 0] = torch.inf  # no power at frequency 0: `shifts` has it
    spectrum = torch.fft.rfft2(draw.normal(n, height, width)) * frequency ** (slopes[:, None, None] / 2)
    texture = torch.fft.irfft2(spectrum, s=(height, width))
    texture = texture / texture.std(dim=(1, 2), correction=0, keepdim=True)
    shift = shifts * draw.normal(n)
    layer = (means + shift[:, None])[:, :, None, None] + stds[:, :, None, None] * texture[:, None]
    frosted: Tensor = kept * x + ice * layer.clamp(0, 1)
    return frosted


def fog(x: Tensor, draw: Draw, amount: float, decay: float) -> Tensor:
    """Add a random height map, and darken so that the brightest value stays."""
    most = x.amax(dim=(1, 2, 3), keepdim=True)
    return (x + amount * plasma(draw, len(x), x.shape[-1], decay)[:, None]) * most / (most + amount)


def plasma(draw: Draw, num: int, size: int, decay: float) -> Tensor:
    """Return height maps (num, size, size) from 0 to 1 by the diamond-square algorithm, which wraps around.

    Args:
        draw: The source of randomness.
        num: Number of maps.
        size: A power of two.
        decay: By how much the size of the random steps shrinks when the distance of the points is halved.
    """
    whole = draw.uniform(0, 0, num, size, size)
    step, wibble = size, 100.0

    def wibbled(total: Tensor) -> Tensor:
        return total / 4 + wibble * draw.uniform(-wibble, wibble, *total.shape)

    while step >= 2:
        half = step // 2
        corners = whole[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        whole[:, half::step, half::step] = wibbled(pairs + pairs.roll(-1, 2))
        middles = whole[:, half::step, half::step]
        whole[:, ::step, half::step] = wibbled(middles + middles.roll(1, 1) + corners + corners.roll(-1, 2))
        whole[:, half::step, ::step] = wibbled(middles + middles.roll(1, 2) + corners + corners.roll(-1, 1))
        step, wibble = half, wibble / decay
    whole = whole - whole.amin(dim=(1, 2), keepdim=True)
    return whole / whole.amax(dim=(1, 2), keepdim=True)


def brightness(x: Tensor, draw: Draw, amount: float) -> Tensor:
    """Add to the value of HSV, the largest colour; hue and saturation stay, so all three are multiplied alike."""
    value = x.amax(dim=1, keepdim=True)
    brighter = (value + amount).clamp(max=1)
    return torch.where(value > 0, x * brighter / value.clamp(min=1e-12), brighter)
