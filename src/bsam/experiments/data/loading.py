"""Data sets as tensors on the device where they are used."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bsam.experiments.data.download import data_folder, fetch
from bsam.experiments.data.embedded import Labelled, digits, two_moons
from bsam.experiments.data.formats import (
    Arrays,
    read_cifar,
    read_cifar_test,
    read_mnist,
    read_mnist_test,
    read_tiny_imagenet,
    read_tiny_test,
)
from bsam.experiments.data.table import DATASETS, DatasetInfo

__all__ = ["Dataset", "load", "load_test"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set on a device: raw images (n, channels, height, width) in uint8, and labels in int64."""

    info: DatasetInfo
    train: Labelled
    validation: Labelled
    """Held out of the training set; may be empty."""
    test: Labelled
    mean: Tensor
    """Shaped to be subtracted from a batch."""
    std: Tensor

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.info.num_classes

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self.info.image_shape

    @property
    def num_train(self) -> int:
        """Number of training examples, without those that are held out."""
        return len(self.train[0])

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.train[0].device

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of all images and labels, with those that are held out."""
        digest = hashlib.sha256()
        for images, labels in (self.train, self.validation, self.test):
            for tensor in (images, labels):
                digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()

    def normalise(self, images: Tensor) -> Tensor:
        """Convert raw images to a network's input: float32, scaled to [0, 1], then standardised by `mean` and `std`."""
        return images.to(torch.float32, copy=True).div_(self.info.scale).sub_(self.mean).div_(self.std)


def load(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    device: torch.device | str = "cpu",
    download: bool = True,
    validation: int = 0,
) -> Dataset:
    """Load a data set; every file that is read is checked.

    Args:
        name: One of `DATASETS`.
        folder: Folder of the data sets, as torchvision lays them out. By default the environment variable BSAM_DATA,
            else a folder in the user's cache.
        device: Device of the tensors.
        download: Download missing files. A wrong file is an error, and is not replaced. A wrong archive is downloaded
            again if its folder is missing.
        validation: Number of training examples that are held out; they are the same in every run.

    Raises:
        FileNotFoundError: A file is missing, and `download` is False.
        ValueError: A file is damaged or not the official one.
        ConnectionError: A file is missing and cannot be downloaded.

    Examples:
        >>> data = load("digits", validation=97)
        >>> data.train[0].shape, data.train[0].dtype
        (torch.Size([900, 1, 8, 8]), torch.uint8)
    """
    if name not in DATASETS:
        raise ValueError(f"there is no data set {name!r}. There are: {', '.join(DATASETS)}.")
    info = DATASETS[name]
    if not 0 <= validation < info.num_train:
        raise ValueError(f"validation={validation} must be from 0 to {info.num_train - 1}, to leave some to train on.")
    root = data_folder(folder) if info.urls else Path()
    if download:
        fetch(info, root)
    train, test = ((torch.from_numpy(images), torch.from_numpy(labels)) for images, labels in READERS[name](info, root))
    order = torch.randperm(info.num_train, generator=torch.Generator().manual_seed(0))
    chosen, kept = order[:validation], order[validation:].sort().values
    parts = {"train": _take(train, kept) if validation else train, "validation": _take(train, chosen), "test": test}
    mean, std = (torch.tensor(values).view(-1, *[1] * (len(info.image_shape) - 1)) for values in (info.mean, info.std))
    return Dataset(
        info,
        **{part: (x.to(device), y.to(device)) for part, (x, y) in parts.items()},
        mean=mean.to(device),
        std=std.to(device),
    )


def load_test(name: str, folder: str | os.PathLike[str] | None = None) -> Labelled:
    """Load the test part of a data set of `TEST_READERS` on the CPU; files of the training part need not be there."""
    info, root = DATASETS[name], data_folder(folder)
    fetch(info, root, test_only=True)
    images, labels = TEST_READERS[name](info, root)
    return torch.from_numpy(images), torch.from_numpy(labels)


def _take(data: Labelled, index: Tensor) -> Labelled:
    return data[0][index], data[1][index]


def _read_digits(info: DatasetInfo, folder: Path) -> tuple[Arrays, Arrays]:
    """Read the digits of `digits()`."""

    def raw(part: Labelled) -> Arrays:
        return (part[0] * info.scale).to(torch.uint8).view(-1, *info.image_shape).numpy(), part[1].numpy()

    train, test = digits(info.num_train)
    return raw(train), raw(test)


def _read_moons(info: DatasetInfo, folder: Path) -> tuple[Arrays, Arrays]:
    """Read the points of `two_moons()`, and a test set with another seed."""

    def arrays(part: Labelled) -> Arrays:
        return part[0].numpy(), part[1].numpy().astype(np.int64)

    return arrays(two_moons(info.num_train)), arrays(two_moons(info.num_test, seed=1))


READERS: dict[str, Callable[[DatasetInfo, Path], tuple[Arrays, Arrays]]] = {
    "mnist": read_mnist,
    "fashionmnist": read_mnist,
    "mnist-standardised": read_mnist,
    "fashionmnist-standardised": read_mnist,
    "cifar10": read_cifar,
    "cifar100": read_cifar,
    "tinyimagenet": read_tiny_imagenet,
    "digits": _read_digits,
    "moons": _read_moons,
}
"""Functions that read training and test part from the data folder, by data set."""

TEST_READERS: dict[str, Callable[[DatasetInfo, Path], Arrays]] = {
    "mnist": read_mnist_test,
    "fashionmnist": read_mnist_test,
    "cifar10": read_cifar_test,
    "cifar100": read_cifar_test,
    "tinyimagenet": read_tiny_test,
}
"""Functions that read the test part alone, of the data sets that are unknown inputs for others."""
