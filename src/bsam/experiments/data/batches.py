"""Batches, made on the device of the data.

Order and augmentation are functions of (seed, epoch) only. They are drawn on the CPU when an epoch starts, so they are
the same on every device, and any batch can be made without the batches before it.

Augmentation does what torchvision's RandomCrop(size, padding=4) and RandomHorizontalFlip() do before normalisation: the
raw image is padded with zeros (black), a window of its size is cut out, and half of the windows are mirrored.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bsam.experiments.data.embedded import Labelled
from bsam.experiments.data.loading import Dataset

__all__ = ["crop_and_flip", "epoch_length", "plain_batches", "stacked_batches"]

PADDING = 4


def epoch_length(dataset: Dataset, batch_size: int, *, augment: bool = False, drop_last: bool = False) -> int:
    """Return the number of batches per epoch; an error if `stacked_batches` could not make them."""
    _check_batch_size(batch_size)
    if augment and len(dataset.image_shape) != 3:
        raise ValueError(f"{dataset.info.name} cannot be augmented: it holds no images. Leave out augment.")
    num_data = dataset.num_train
    if drop_last and num_data < batch_size:
        raise ValueError(f"batch_size={batch_size} with drop_last leaves no batch of {num_data} examples.")
    return num_data // batch_size if drop_last else -(-num_data // batch_size)


def stacked_batches(
    dataset: Dataset,
    batch_size: int,
    *,
    seeds: Sequence[int],
    epoch: int,
    augment: bool = False,
    drop_last: bool = False,
    start_batch: int = 0,
) -> Iterator[Labelled]:
    """Yield the normalised batches of one epoch of training, for several runs: (seeds, batch, ...).

    Args:
        dataset: The data.
        batch_size: Examples per batch.
        seeds: The seed of each run.
        epoch: Which epoch. Seed and epoch decide order and augmentation.
        augment: Crop and mirror at random.
        drop_last: Leave out a last batch that is smaller than the others.
        start_batch: Begin with this batch, counted from 0, to go on in the middle of an epoch.
    """
    images, labels = dataset.train
    num_batches = epoch_length(dataset, batch_size, augment=augment, drop_last=drop_last)
    if not 0 <= start_batch <= num_batches:
        raise ValueError(f"start_batch={start_batch} must be from 0 to {num_batches}, the batches of an epoch.")
    drawn = [_draw_epoch(len(images), seed, epoch) for seed in seeds]
    order, down, right, mirrored = (torch.stack(column).to(dataset.device) for column in zip(*drawn, strict=True))

    def batches() -> Iterator[Labelled]:
        for k in range(start_batch, num_batches):
            part = slice(k * batch_size, (k + 1) * batch_size)
            index, *window = (t[:, part].flatten() for t in ((order, down, right, mirrored) if augment else (order,)))
            x = dataset.normalise(crop_and_flip(images, index, *window) if augment else images[index])
            yield x.view(len(seeds), -1, *x.shape[1:]), labels[index].view(len(seeds), -1)

    return batches()


def _draw_epoch(num_data: int, seed: int, epoch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw the order of the examples, their windows' offsets down and right, and whether they are mirrored."""
    digest = hashlib.blake2b(struct.pack("<2q", seed, epoch), digest_size=8, person=b"batches").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
    order = torch.randperm(num_data, generator=generator)
    down, right = torch.randint(-PADDING, PADDING + 1, (2, num_data), generator=generator)
    return order, down, right, torch.randint(2, (num_data,), generator=generator)


def crop_and_flip(images: Tensor, index: Tensor, down: Tensor, right: Tensor, mirrored: Tensor) -> Tensor:
    """Pick images through windows that are moved and, where `mirrored` is not 0, mirrored; zeros outside the image.

    Args:
        images: (n, channels, height, width).
        index: Which images; the other arguments have the same length.
        down: Number of pixels that the window moves down, or up if negative.
        right: Number of pixels that the window moves to the right.
        mirrored: Whether the window is mirrored left to right, after it was moved.
    """
    _, channels, height, width = images.shape
    channel, row, column = (torch.arange(size, device=images.device) for size in (channels, height, width))
    column = torch.where(mirrored[:, None] != 0, width - 1 - column, column)
    row, column = row + down[:, None], column + right[:, None]
    inside = ((row >= 0) & (row < height))[:, None, :, None] & ((column >= 0) & (column < width))[:, None, None, :]
    row, column = row.clamp(0, height - 1), column.clamp(0, width - 1)
    picked = images[index[:, None, None, None], channel[:, None, None], row[:, None, :, None], column[:, None, None, :]]
    return picked * inside


def plain_batches(dataset: Dataset, part: str = "test", batch_size: int = 512) -> Iterator[Labelled]:
    """Yield the normalised batches of a part of the data: "train", "validation" or "test", in order."""
    parts = {"train": dataset.train, "validation": dataset.validation, "test": dataset.test}
    if part not in parts:
        raise ValueError(f"part={part!r} must be one of {', '.join(parts)}.")
    _check_batch_size(batch_size)
    images, labels = parts[part]
    if len(images) == 0:
        raise ValueError(f"the {part} part of {dataset.info.name} is empty: load it with validation=1000, for example.")
    slices = (slice(start, start + batch_size) for start in range(0, len(images), batch_size))
    return ((dataset.normalise(images[rows]), labels[rows]) for rows in slices)


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
