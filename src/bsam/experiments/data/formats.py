"""Readers of the data sets' files: MNIST's idx files, CIFAR's pickles, TinyImageNet's JPEGs.

The md5 of every file is checked before the file is parsed, on the same bytes. Images are returned as uint8
(n, channels, height, width), labels as int64.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import pickle
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError

from bsam.experiments.data.progress import ProgressBar
from bsam.experiments.data.table import DatasetInfo
from bsam.files import naming, read_file, write_file

__all__ = [
    "Arrays",
    "read_cifar",
    "read_cifar_test",
    "read_mnist",
    "read_mnist_test",
    "read_tiny_imagenet",
    "read_tiny_test",
]

Arrays = tuple[NDArray[Any], NDArray[np.int64]]
"""Inputs and labels."""


def read_checked(info: DatasetInfo, folder: Path, name: str) -> bytes:
    """Return the contents of a file whose md5 is known; an error names a missing or wrong file."""
    path = folder / name
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise _missing(info, folder, path) from None
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if md5 != info.md5[name]:
        raise ValueError(
            f"{path} is torn, or not the official file: its md5 is {md5}, not {info.md5[name]}. "
            f"{_start_again(info, folder)}"
        )
    return content


def _missing(info: DatasetInfo, folder: Path, path: Path) -> FileNotFoundError:
    return FileNotFoundError(
        f"{path} is missing. Copy it there, or name a folder that holds the data with --data DIR or BSAM_DATA=DIR. "
        f"{_start_again(info, folder)}"
    )


def _start_again(info: DatasetInfo, folder: Path) -> str:
    return f"To download all of {info.name} again, delete {folder / info.folder}."


def _check(info: DatasetInfo, arrays: Arrays, num: int, where: Path) -> Arrays:
    """Raise if arrays do not have the data set's size, shape, type and classes."""
    images, labels = arrays
    if images.dtype != np.uint8 or images.shape != (num, *info.image_shape):
        raise ValueError(f"{where} holds {images.dtype} images {images.shape}, not uint8 {(num, *info.image_shape)}.")
    if labels.dtype != np.int64 or labels.shape != (num,) or not ((labels >= 0) & (labels < info.num_classes)).all():
        raise ValueError(f"{where} does not hold {num} labels from 0 to {info.num_classes - 1}.")
    return images, labels


# ------------------------------------------------------------------ MNIST, FashionMNIST


def read_mnist(info: DatasetInfo, folder: Path) -> tuple[Arrays, Arrays]:
    """Read training and test set from idx files, compressed or not."""
    return _read_mnist(info, folder, info.train_files, info.num_train), read_mnist_test(info, folder)


def read_mnist_test(info: DatasetInfo, folder: Path) -> Arrays:
    """Read the test set alone; the files of the training set need not be there."""
    return _read_mnist(info, folder, info.test_files, info.num_test)


def _read_mnist(info: DatasetInfo, folder: Path, names: tuple[str, ...], num: int) -> Arrays:
    images, labels = (_read_idx(info, folder, name, dims) for name, dims in zip(names, (3, 1), strict=True))
    return _check(info, (images[:, None], labels.astype(np.int64)), num, folder / info.folder)


def _read_idx(info: DatasetInfo, folder: Path, name: str, num_dims: int) -> NDArray[np.uint8]:
    plain = name.removesuffix(".gz")
    if not (folder / name).exists() and (folder / plain).exists():
        name = plain
    content = read_checked(info, folder, name)
    with naming(folder / name):
        if name != plain:
            try:
                content = gzip.decompress(content)
            except (OSError, EOFError, zlib.error) as error:
                raise ValueError(f"not a whole gzip file: {error}") from error
        return _parse_idx(content, num_dims)


def _parse_idx(content: bytes, num_dims: int) -> NDArray[np.uint8]:
    """Parse an array of unsigned bytes: 0, 0, 8, the number of dimensions, each size as four bytes, the values."""
    start = 4 + 4 * num_dims
    if len(content) < start or content[:4] != bytes((0, 0, 8, num_dims)):
        raise ValueError(f"an idx file of {num_dims} dimensions cannot begin with {content[:4].hex(' ')}")
    shape = [int(size) for size in np.frombuffer(content[4:start], ">u4")]
    if len(content) - start != math.prod(shape):
        raise ValueError(f"{len(content) - start} bytes of values do not fill the shape {shape}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()  # a copy is writable


# ------------------------------------------------------------------ CIFAR


def read_cifar(info: DatasetInfo, folder: Path) -> tuple[Arrays, Arrays]:
    """Read training and test set from Python 2 pickles; CIFAR-100 with its fine labels."""
    return _read_cifar(info, folder, info.train_files, info.num_train), read_cifar_test(info, folder)


def read_cifar_test(info: DatasetInfo, folder: Path) -> Arrays:
    """Read the test set alone; the files of the training set need not be there."""
    return _read_cifar(info, folder, info.test_files, info.num_test)


def _read_cifar(info: DatasetInfo, folder: Path, names: tuple[str, ...], num: int) -> Arrays:
    images, labels = zip(*(_read_batch(info, folder, name) for name in names), strict=True)
    return _check(info, (np.concatenate(images), np.concatenate(labels)), num, folder / info.folder)


def _read_batch(info: DatasetInfo, folder: Path, name: str) -> Arrays:
    content = read_checked(info, folder, name)
    with naming(folder / name):
        try:
            batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        except Exception as error:  # a pickle can raise anything
            raise ValueError(str(error)) from error
        images, labels = batch[b"data"], batch[b"fine_labels" if b"fine_labels" in batch else b"labels"]
        if not isinstance(images, np.ndarray) or not all(type(y) is int and 0 <= y < info.num_classes for y in labels):
            raise TypeError(f"data must be an array, and labels integers from 0 to {info.num_classes - 1}")
        return images.reshape(-1, *info.image_shape), np.array(labels, np.int64)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles dictionaries, lists, strings, integers and arrays of bytes, and runs no other code."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it wants to use {module}.{name}, which no data needs") from None


def _byte_type(code: bytes, align: int, copy: int) -> np.dtype[Any]:
    if code != b"u1":
        raise pickle.UnpicklingError(f"it holds an array of type {code!r}, not u1")
    return np.dtype(np.uint8)


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],  # moved in numpy 2
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _byte_type,
}


# ------------------------------------------------------------------ TinyImageNet


def read_tiny_imagenet(info: DatasetInfo, folder: Path) -> tuple[Arrays, Arrays]:
    """Read training and validation images from JPEGs; class k is the k-th name of wnids.txt in alphabetical order.

    Decoding takes a minute, so the images are kept in the file `decoded.safetensors` of the same folder, with a
    checksum. If this file exists, it is read instead.
    """
    root = folder / info.folder
    cache = root / "decoded.safetensors"
    if cache.exists():
        return _read_cache(info, cache)
    files = _tiny_files(info, folder)
    names = [[path for path, _ in part] for part in files]
    with ProgressBar(f"decoding {info.name}", sum(map(len, names))) as bar:
        images = [_decode(info, folder, part, bar) for part in names]
    train, test = (
        (pixels, np.array([label for _, label in part], np.int64)) for pixels, part in zip(images, files, strict=True)
    )
    _write_cache(info, cache, train, test)
    return train, test


def read_tiny_test(info: DatasetInfo, folder: Path) -> Arrays:
    """Read the validation images alone, as `read_tiny_imagenet` does; the training images need not be there."""
    cache = folder / info.folder / "decoded.safetensors"
    if cache.exists():
        return _read_cache(info, cache)[1]
    _, files = _tiny_files(info, folder)
    with ProgressBar(f"decoding {info.name}, test part", len(files)) as bar:
        images = _decode(info, folder, [path for path, _ in files], bar)
    return images, np.array([label for _, label in files], np.int64)


def _tiny_files(info: DatasetInfo, folder: Path) -> list[list[tuple[Path, int]]]:
    """Return path and label of each training image, and of each validation image."""
    root = folder / info.folder
    index, annotations = root / "wnids.txt", root / "val" / "val_annotations.txt"
    for path in (index, annotations):
        if not path.exists():
            raise _missing(info, folder, path)
    with naming(index):
        classes = {wnid: k for k, wnid in enumerate(sorted(index.read_text().split()))}
        if len(classes) != info.num_classes:
            raise ValueError(f"it names {len(classes)} classes, not {info.num_classes}")
    each = range(info.num_train // info.num_classes)
    train = [(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", k) for wnid, k in classes.items() for i in each]
    with naming(annotations):
        wnids = dict(line.split("\t")[:2] for line in annotations.read_text().splitlines())
        names = [f"val_{i}.JPEG" for i in range(info.num_test)]
        test = [(root / "val" / "images" / name, classes[wnids[name]]) for name in names]
    return [train, test]


def _decode(info: DatasetInfo, folder: Path, paths: Sequence[Path], bar: ProgressBar) -> NDArray[np.uint8]:
    images = np.empty((len(paths), *info.image_shape), np.uint8)
    for image, path in zip(images, paths, strict=True):
        try:
            with Image.open(path, formats=["JPEG"]) as file:
                pixels = np.asarray(file.convert("RGB")).transpose(2, 0, 1)  # some are gray
        except FileNotFoundError:
            raise _missing(info, folder, path) from None
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"{path} is not a whole JPEG: {error}. {_start_again(info, folder)}") from error
        if pixels.shape != image.shape:
            raise ValueError(f"{path} has shape {pixels.shape}, not {image.shape}. {_start_again(info, folder)}")
        image[:] = pixels
        bar.update()
    return images


_FORMAT = "bsam-data"
_TENSORS = ("train_images", "train_labels", "test_images", "test_labels")


def _write_cache(info: DatasetInfo, path: Path, train: Arrays, test: Arrays) -> None:
    arrays = dict(zip(_TENSORS, (*train, *test), strict=True))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    try:
        write_file(path, tensors, format=_FORMAT, kind=info.name, settings={})
    except (OSError, SafetensorError) as error:
        warnings.warn(f"{path} cannot be written, so that every load will decode {info.name} anew: {error}")


def _read_cache(info: DatasetInfo, path: Path) -> tuple[Arrays, Arrays]:
    try:
        _, tensors, _ = read_file(path, format=_FORMAT, kinds=[info.name])
        with naming(path):
            arrays = [tensors[name].numpy() for name in _TENSORS]
            train = _check(info, (arrays[0], arrays[1]), info.num_train, path)
            test = _check(info, (arrays[2], arrays[3]), info.num_test, path)
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}. Delete it, and it is made again.") from error
    return train, test
