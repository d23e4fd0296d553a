"""Corruptions of one image with NumPy, SciPy and Pillow: slow, in float64, from the published descriptions.

An image is (height, width, 3) in uint8. `drawn` yields the random numbers that the fast code drew for this image.
"""

import colorsys
import io
import math

import numpy as np
from PIL import Image
from scipy import ndimage, stats

from bsam.experiments.corruptions.draw import Draw


class Recording(Draw):
    """Draws as `Draw` does, and keeps what it drew."""

    def __init__(self, *address, device):
        super().__init__(*address, device=device)
        self.drawn = []

    def normal(self, *shape):
        return self._kept(super().normal(*shape))

    def uniform(self, low, high, *shape):
        return self._kept(super().uniform(low, high, *shape))

    def integers(self, low, high, *shape):
        return self._kept(super().integers(low, high, *shape))

    def _kept(self, values):
        self.drawn.append(values.double().numpy())
        return values


def blurred(x, sigma, **options):
    return ndimage.gaussian_filter(x, (sigma, sigma, 0)[: x.ndim], **options)


def zoomed(x, factor):
    size = len(x)
    cut = math.ceil(size / factor)
    top = (size - cut) // 2
    larger = ndimage.zoom(x[top : top + cut, top : top + cut], (factor, factor, 1)[: x.ndim], order=1)
    trim = (len(larger) - size) // 2
    return larger[trim : trim + size, trim : trim + size]


def along_a_line(x, angle, radius, sigma):
    """ImageMagick's motion blur, one pixel at a time."""
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
    size, out = len(x), np.zeros_like(x, dtype=float)
    for i, weight in enumerate(weights):
        down = math.ceil(i * math.sin(math.radians(angle)) - 0.5)
        right = math.ceil(i * math.cos(math.radians(angle)) - 0.5)
        for row in range(size):
            for column in range(size):
                from_row, from_column = (min(max(place, 0), size - 1) for place in (row + down, column + right))
                out[row, column] += weight / sum(weights) * x[from_row, from_column]
    return out


def gaussian_noise(x, c, drawn):
    return x / 255 + c * next(drawn).transpose(1, 2, 0)


def shot_noise(x, c, drawn):
    return stats.poisson.ppf(next(drawn).transpose(1, 2, 0), x / 255 * c) / c


def impulse_noise(x, c, drawn):
    hit, white = next(drawn).transpose(1, 2, 0) <= c, next(drawn).transpose(1, 2, 0) <= 0.5
    out = x / 255
    out[hit & white], out[hit & ~white] = 1, 0
    return out


def defocus_blur(x, radius, alias, drawn):
    place = np.arange(-8, 9)
    disk = (place[:, None] ** 2 + place**2 <= radius**2).astype(float)
    one = np.exp(-0.5 * (np.arange(-1, 2) / alias) ** 2)
    kernel = ndimage.correlate(disk / disk.sum(), np.outer(one, one) / one.sum() ** 2, mode="mirror")
    return ndimage.correlate(x / 255, kernel[..., None], mode="mirror")


def glass_blur(x, sigma, reach, times, drawn):
    x = np.uint8(blurred(x / 255, sigma, mode="nearest") * 255)
    size = len(x)
    for _ in range(times):
        right, down = next(drawn).astype(int)
        for row in range(size - reach, reach, -1):
            for column in range(size - reach, reach, -1):
                other = row + down[row, column], column + right[row, column]
                x[row, column], x[other] = x[other], x[row, column]  # views: a copy, as in the published program
    return blurred(x / 255, sigma, mode="nearest")


def motion_blur(x, radius, sigma, drawn):
    return np.floor(along_a_line(x, next(drawn), radius, sigma) + 1e-3) / 255


def zoom_blur(x, num_zooms, drawn):
    x = x / 255
    return (x + sum(zoomed(x, 1 + k / 100) for k in range(num_zooms))) / (num_zooms + 1)


def snow(x, mean, std, zoom, least, radius, sigma, kept, drawn):
    x, layer = x / 255, zoomed(mean + std * next(drawn)[0], zoom)
    layer[layer < least] = 0
    layer = np.uint8(np.clip(layer, 0, 1) * 255)
    layer = np.floor(along_a_line(layer, next(drawn), radius, sigma) + 1e-3)[..., None] / 255
    gray = x @ [0.299, 0.587, 0.114]
    x = kept * x + (1 - kept) * np.maximum(x, gray[..., None] * 1.5 + 0.5)
    return x + layer + np.rot90(layer, 2)


def fog(x, amount, decay, drawn):
    x = x / 255
    size = len(x)
    whole, step, wibble = np.zeros((size, size)), size, 100.0
    next(drawn)
    while step >= 2:
        half = step // 2
        steps = [wibble * next(drawn) for _ in range(3)]
        places = range(0, size, step)
        for a, row in enumerate(places):
            for b, column in enumerate(places):
                four = [whole[(row + i) % size, (column + j) % size] for i in (0, step) for j in (0, step)]
                whole[row + half, column + half] = sum(four) / 4 + steps[0][a, b]
        for k, (i, j) in enumerate([(0, half), (half, 0)], start=1):
            for a, row in enumerate(places):
                for b, column in enumerate(places):
                    y, z = row + i, column + j
                    around = [(y - half, z), (y + half, z), (y, z - half), (y, z + half)]
                    whole[y, z] = sum(whole[p % size, q % size] for p, q in around) / 4 + steps[k][a, b]
        step, wibble = half, wibble / decay
    whole = (whole - whole.min()) / (whole.max() - whole.min())
    return (x + amount * whole[..., None]) * x.max() / (x.max() + amount)


def brightness(x, amount, drawn):
    def brighter(pixel):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        return colorsys.hsv_to_rgb(hue, saturation, min(value + amount, 1))

    return np.apply_along_axis(brighter, 2, x / 255)


def contrast(x, kept, drawn):
    x = x / 255
    return (x - x.mean((0, 1))) * kept + x.mean((0, 1))


def elastic_transform(x, alpha, sigma, affine, drawn):
    x = x / 255
    size = len(x)
    corners = np.array([[26, 26], [26, 6], [6, 6]], float)  # (x, y) in an image of 32 x 32
    moved = np.column_stack([corners + next(drawn), np.ones(3)])
    back = np.linalg.solve(moved, corners)
    row, column = np.mgrid[:size, :size]
    places = np.stack([column, row, np.ones_like(row)], axis=-1) @ back
    x = np.stack([ndimage.map_coordinates(x[..., k], places[..., ::-1].transpose(2, 0, 1), order=1, mode="mirror")
                  for k in range(3)], axis=-1)  # fmt: skip
    if alpha == 0:
        return x
    right, down = (alpha * blurred(next(drawn), sigma, mode="reflect", truncate=3) for _ in range(2))
    coordinates = np.stack([row + down, column + right])
    return np.stack([ndimage.map_coordinates(x[..., k], coordinates, order=1, mode="reflect") for k in range(3)],
                    axis=-1)  # fmt: skip


def pixelate(x, share, drawn):
    small = int(len(x) * share)
    image = Image.fromarray(x).resize((small, small), Image.Resampling.BOX)
    return np.asarray(image.resize(x.shape[:2], Image.Resampling.BOX)) / 255


def jpeg_compression(x, quality, drawn):
    file = io.BytesIO()
    Image.fromarray(x).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file)) / 255
