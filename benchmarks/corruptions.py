"""How far are the corruptions from those of scikit-image, OpenCV, ImageMagick and Pillow?

    pip install scikit-image opencv-python-headless wand    # and ImageMagick's library, such as libmagickwand-dev
    python benchmarks/corruptions.py --data data --out results/corruptions.json

Every kind and strength is applied to test images of CIFAR-10 by this package, and by the packages that the published
program uses, with the same random numbers. The record has the mean and the largest difference in levels from 0 to 255,
beside the mean change that the corruption itself makes. Frost is left out: its photographs are not ours to use.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bsam.experiments.corruptions import KINDS, STRENGTHS, corrupt
from bsam.experiments.corruptions.draw import Draw
from bsam.experiments.data import load
from bsam.experiments.record import environment, write_json

PACKAGES = ("scikit-image", "opencv-python-headless", "wand", "scipy", "pillow")


class Recording(Draw):
    """Keeps what was drawn, in order."""

    def __init__(self, *address: int | str, device: torch.device) -> None:
        super().__init__(*address, device=device)
        self.drawn: list[Any] = []
        for name in ("normal", "uniform", "integers"):
            setattr(self, name, self._keeping(getattr(super(), name)))

    def _keeping(self, function: Any) -> Any:
        def kept(*arguments: Any) -> torch.Tensor:
            values = function(*arguments)
            self.drawn.append(values.double().numpy())
            return values

        return kept


def in_line(x: np.ndarray, radius: float, sigma: float, angle: float) -> np.ndarray:
    """ImageMagick's motion blur of a picture in uint8."""
    import ctypes

    from PIL import Image as PillowImage
    from wand.api import library
    from wand.image import Image

    library.MagickMotionBlurImage.argtypes = (ctypes.c_void_p, *(ctypes.c_double,) * 3)
    file = io.BytesIO()
    PillowImage.fromarray(x).save(file, "PNG")
    with Image(blob=file.getvalue()) as image:
        library.MagickMotionBlurImage(image.wand, radius, sigma, angle)
        found = np.asarray(PillowImage.open(io.BytesIO(image.make_blob("PNG"))).convert("L" if x.ndim == 2 else "RGB"))
    return found


def enlarged(x: np.ndarray, factor: float) -> np.ndarray:
    from scipy.ndimage import zoom

    size = len(x)
    cut = int(np.ceil(size / factor))
    top = (size - cut) // 2
    x = zoom(x[top : top + cut, top : top + cut], (factor, factor, 1)[: x.ndim], order=1)
    trim = (len(x) - size) // 2
    return x[trim : trim + size, trim : trim + size]


def expected(kind: str, x: np.ndarray, c: tuple[Any, ...], drawn: Any) -> np.ndarray:
    """Corrupt one image (height, width, 3) in uint8 with the packages; the result is from 0 to 255."""
    import cv2
    import skimage
    from PIL import Image
    from scipy.ndimage import map_coordinates
    from scipy.stats import poisson
    from skimage.filters import gaussian

    def colours_last() -> np.ndarray:
        return next(drawn).transpose(1, 2, 0)

    unit = x / 255.0
    if kind == "gaussian_noise":
        unit = unit + c[0] * colours_last()
    elif kind == "shot_noise":
        unit = poisson.ppf(colours_last(), unit * c[0]) / c[0]
    elif kind == "impulse_noise":  # skimage.util.random_noise draws the same two arrays
        hit, white = colours_last() <= c[0], colours_last() <= 0.5
        unit[hit] = white[hit]
    elif kind == "defocus_blur":
        place = np.arange(-8, 9)
        disk = np.float32(place[:, None] ** 2 + place**2 <= c[0] ** 2)
        kernel = cv2.GaussianBlur(disk / disk.sum(), ksize=(3, 3), sigmaX=c[1])
        unit = cv2.filter2D(unit, -1, kernel)
    elif kind == "glass_blur":
        sigma, reach, times = c
        y = np.uint8(gaussian(unit, sigma=sigma, channel_axis=-1) * 255)
        for _ in range(times):
            right, down = next(drawn).astype(int)
            for h in range(32 - reach, reach, -1):
                for w in range(32 - reach, reach, -1):
                    other = h + down[h, w], w + right[h, w]
                    y[h, w], y[other] = y[other], y[h, w]
        unit = gaussian(y / 255.0, sigma=sigma, channel_axis=-1)
    elif kind == "motion_blur":
        return in_line(x, *c, angle=next(drawn))
    elif kind == "zoom_blur":
        zooms = [enlarged(np.float32(unit), 1 + 0.01 * k) for k in range(c[0])]
        unit = (unit + sum(zooms)) / (len(zooms) + 1)
    elif kind == "snow":
        layer = enlarged(c[0] + c[1] * next(drawn)[0], c[2])
        layer[layer < c[3]] = 0
        layer = in_line(np.uint8(np.clip(layer, 0, 1) * 255), c[4], c[5], next(drawn))[..., None] / 255.0
        gray = cv2.cvtColor(np.float32(unit), cv2.COLOR_RGB2GRAY)[..., None]
        unit = c[6] * unit + (1 - c[6]) * np.maximum(unit, gray * 1.5 + 0.5)
        unit = unit + layer + np.rot90(layer, k=2)
    elif kind == "brightness":
        hsv = skimage.color.rgb2hsv(unit)
        hsv[..., 2] = np.clip(hsv[..., 2] + c[0], 0, 1)
        unit = skimage.color.hsv2rgb(hsv)
    elif kind == "contrast":
        unit = (unit - unit.mean((0, 1))) * c[0] + unit.mean((0, 1))
    elif kind == "elastic_transform":
        corners = np.float32([[26, 26], [26, 6], [6, 6]])
        matrix = cv2.getAffineTransform(corners, np.float32(corners + next(drawn)))
        unit = cv2.warpAffine(np.float32(unit), matrix, (32, 32), borderMode=cv2.BORDER_REFLECT_101)
        if c[0]:
            right, down = (gaussian(next(drawn), c[1], mode="reflect", truncate=3) * c[0] for _ in range(2))
            row, column = np.mgrid[:32, :32]
            places = np.stack([row + down, column + right])
            unit = np.stack([map_coordinates(unit[..., k], places, order=1, mode="reflect") for k in range(3)], -1)
    elif kind == "pixelate":
        small = int(32 * c[0])
        return np.asarray(
            Image.fromarray(x).resize((small, small), Image.Resampling.BOX).resize((32, 32), Image.Resampling.BOX)
        )
    elif kind == "jpeg_compression":
        file = io.BytesIO()
        Image.fromarray(x).save(file, "JPEG", quality=c[0])
        return np.asarray(Image.open(file))
    else:
        raise ValueError(kind)
    return np.clip(unit, 0, 1) * 255


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=None, help="folder of the data sets")
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("results/corruptions.json"))
    options = parser.parse_args()
    images = load("cifar10", options.data).test[0][: options.images]
    kinds = [kind for kind in KINDS if kind not in ("frost", "fog")]  # fog needs no package: the tests compare it
    record: dict[str, Any] = {"images": len(images), "kinds": {}}
    for kind in kinds:
        rows = []
        for strength in STRENGTHS:
            draw = Recording(0, kind, strength, device=torch.device("cpu"))
            found = corrupt(images, kind, strength, draw=draw).permute(0, 2, 3, 1).numpy().astype(int)
            plain = images.permute(0, 2, 3, 1).numpy()
            wanted = []
            for k, image in enumerate(plain):
                drawn = iter([values[:, k] if kind == "glass_blur" else values[k] for values in draw.drawn])
                wanted.append(np.uint8(expected(kind, image, KINDS[kind].constants[strength - 1], drawn)))
            difference = np.abs(found - np.stack(wanted))
            change = float(np.abs(found - plain).mean())
            rows.append({"mean": float(difference.mean()), "largest": int(difference.max()), "change": change})
            print(kind, strength, rows[-1])
        record["kinds"][kind] = rows
    record["packages"] = {name: importlib.metadata.version(name) for name in PACKAGES}
    record["environment"] = environment()
    write_json(options.out, record)


if __name__ == "__main__":
    main()
