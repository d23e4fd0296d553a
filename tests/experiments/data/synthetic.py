"""Tiny data sets of random pixels in the real formats."""

import gzip
import hashlib
import io
import pickle
import struct
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from bsam.experiments.data import DATASETS, DatasetInfo


@dataclass
class Synthetic:
    """The entry for the table, and what reading the files must give."""

    info: DatasetInfo
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def md5(content):
    return hashlib.md5(content).hexdigest()


def write(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def make(name, folder, num_train=30, num_test=20):
    """Write a small data set into `folder`."""
    makers = {"mnist": _mnist, "fashionmnist": _mnist, "cifar10": _cifar, "cifar100": _cifar, "tinyimagenet": _tiny}
    info = replace(DATASETS[name], num_train=num_train, num_test=num_test)
    return makers[name](info, folder)


def _random(info, num, seed):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (num, *info.image_shape), dtype=np.uint8)
    return images, rng.integers(0, info.num_classes, num)


def assert_same(dataset, made):
    """What was loaded is what was written."""
    for part, (images, labels) in ((dataset.train, made.train), (dataset.test, made.test)):
        np.testing.assert_array_equal(part[0], images)
        np.testing.assert_array_equal(part[1], labels)


# ------------------------------------------------------------------ MNIST


def idx(array):
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def _mnist(info, folder):
    train, test = _random(info, info.num_train, 0), _random(info, info.num_test, 1)
    hashes = {}
    for names, (images, labels) in ((info.train_files, train), (info.test_files, test)):
        for name, array in zip(names, (images[:, 0], labels), strict=True):
            content = idx(array)
            packed = gzip.compress(content)
            hashes |= {name: md5(packed), name.removesuffix(".gz"): md5(content)}
            write(folder, name, packed)
    return Synthetic(replace(info, md5=hashes), train, test)


# ------------------------------------------------------------------ CIFAR


def text(string):
    return pickle.SHORT_BINSTRING + bytes([len(string)]) + string.encode()


def integer(value):
    return pickle.BININT + struct.pack("<i", value)


def array_pickle(array, code="u1"):
    """An array as Python 2's cPickle wrote it, with protocol 2."""
    shape = b"".join(map(integer, array.shape)) + pickle.TUPLE2
    kind = pickle.GLOBAL + b"numpy\ndtype\n" + text(code) + integer(0) + integer(1) + pickle.TUPLE3 + pickle.REDUCE
    state = integer(3) + text("|") + pickle.NONE * 3 + integer(-1) * 2 + integer(0)
    body = array.tobytes()
    return b"".join(
        (
            pickle.GLOBAL + b"numpy.core.multiarray\n_reconstruct\n" + pickle.GLOBAL + b"numpy\nndarray\n",
            integer(0) + pickle.TUPLE1 + text("b") + pickle.TUPLE3 + pickle.REDUCE,
            pickle.MARK + integer(1) + shape + kind + pickle.MARK + state + pickle.TUPLE + pickle.BUILD,
            pickle.NEWFALSE + pickle.BINSTRING + struct.pack("<i", len(body)) + body + pickle.TUPLE + pickle.BUILD,
        )
    )


def dict_pickle(**items):
    content = b"".join(text(key) + value for key, value in items.items())
    return pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.MARK + content + pickle.SETITEMS + pickle.STOP


def list_pickle(values):
    return pickle.EMPTY_LIST + pickle.MARK + b"".join(values) + pickle.APPENDS


def cifar_pickle(images, labels, key):
    return dict_pickle(
        batch_label=text("testing batch 1 of 1"),
        coarse_labels=list_pickle(map(integer, [0] * len(labels))),
        **{key: list_pickle(map(integer, labels.tolist()))},
        data=array_pickle(images.reshape(len(images), -1)),
        filenames=list_pickle(text(f"image_{i}.png") for i in range(len(labels))),
    )


def _cifar(info, folder):
    train, test = _random(info, info.num_train, 0), _random(info, info.num_test, 1)
    hashes = {}
    for names, (images, labels) in ((info.train_files, train), (info.test_files, test)):
        for name, x, y in zip(names, np.split(images, len(names)), np.split(labels, len(names)), strict=True):
            content = cifar_pickle(x, y, "fine_labels" if info.name == "cifar100" else "labels")
            hashes[name] = md5(content)
            write(folder, name, content)
    return Synthetic(replace(info, md5=hashes), train, test)


# ------------------------------------------------------------------ TinyImageNet


def jpeg(pixels):
    """(channels, height, width) as a JPEG, and what it decodes to."""
    gray = len(pixels) == 1
    file = io.BytesIO()
    Image.fromarray(pixels[0] if gray else pixels.transpose(1, 2, 0)).save(file, "JPEG")
    decoded = np.asarray(Image.open(file))
    return file.getvalue(), np.stack([decoded] * 3) if gray else decoded.transpose(2, 0, 1)


def _tiny(info, folder):
    wnids = ["n03", "n01", "n02"]  # the class is the place in alphabetical order
    info = replace(info, num_classes=3, md5={})
    rng = np.random.default_rng(0)
    each = info.num_train // 3
    train_labels, test_labels = np.repeat([0, 1, 2], each), rng.integers(0, 3, info.num_test)
    names = [f"train/{wnid}/images/{wnid}_{i}.JPEG" for wnid in sorted(wnids) for i in range(each)]
    names += [f"val/images/val_{i}.JPEG" for i in range(info.num_test)]
    images = []
    for k, name in enumerate(names):
        channels = 1 if k % 5 == 0 else 3  # some of the real ones are gray
        content, decoded = jpeg(rng.integers(0, 256, (channels, *info.image_shape[1:]), dtype=np.uint8))
        write(folder, f"{info.folder}/{name}", content)
        images.append(decoded)
    lines = [f"val_{i}.JPEG\t{sorted(wnids)[label]}\t0\t0\t62\t62\n" for i, label in enumerate(test_labels)]
    write(folder, f"{info.folder}/val/val_annotations.txt", "".join(lines).encode())
    write(folder, f"{info.folder}/wnids.txt", "\n".join(wnids).encode())
    pixels = np.stack(images)
    return Synthetic(info, (pixels[: 3 * each], train_labels), (pixels[3 * each :], test_labels))
