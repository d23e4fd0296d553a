"""Formats: real ones are read, everything else is refused by an error that names the file."""

import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from bsam.experiments.data import formats, load
from tests.experiments.data.synthetic import (
    array_pickle,
    assert_same,
    cifar_pickle,
    dict_pickle,
    idx,
    integer,
    list_pickle,
    make,
    md5,
    text,
    write,
)

FILES = ("mnist", "fashionmnist", "cifar10", "cifar100")
ALL = (*FILES, "tinyimagenet")


def overwrite(made, folder, name, content):
    """Another file in place of one, its md5 in the table."""
    write(folder, name, content)
    return replace(made.info, md5={**made.info.md5, name: md5(content)})


@pytest.mark.parametrize("name", ALL)
def test_reads_what_was_written(name, synthetic, tmp_path):
    made = synthetic(name)
    assert_same(load(name, tmp_path, download=False), made)


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_checked_by_md5(name, synthetic, tmp_path):
    made = synthetic(name)
    for file in (*made.info.train_files, *made.info.test_files):
        path = tmp_path / file
        whole = path.read_bytes()
        for bad in (whole[:-1], whole + b"\0", bytes([whole[0] ^ 1]) + whole[1:], b""):
            path.write_bytes(bad)
            with pytest.raises(ValueError, match=rf"{file} is torn.* delete {tmp_path / made.info.folder}"):
                load(name, tmp_path)
        path.write_bytes(whole)
    assert_same(load(name, tmp_path), made)


@pytest.mark.parametrize("name", ALL)
def test_a_missing_file_is_named(name, synthetic, tmp_path):
    made = synthetic(name)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in files[:: max(1, len(files) // 8)]:
        path.rename(tmp_path / "away")
        with pytest.raises(FileNotFoundError, match=rf"{path} is missing.*--data DIR or BSAM_DATA=DIR"):
            load(name, tmp_path, download=False)
        (tmp_path / "away").rename(path)
    assert_same(load(name, tmp_path), made)


# ------------------------------------------------------------------ MNIST


def test_mnist_may_be_uncompressed(synthetic, tmp_path):
    made = synthetic("mnist")
    arrays = (made.train[0][:, 0], made.train[1], made.test[0][:, 0], made.test[1])
    names = (*made.info.train_files, *made.info.test_files)
    for name, array in zip(names, arrays, strict=True):
        (tmp_path / name).unlink()
        write(tmp_path, name.removesuffix(".gz"), idx(array))
    assert_same(load("mnist", tmp_path), made)
    path = tmp_path / names[0].removesuffix(".gz")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{path} is torn"):
        load("mnist", tmp_path)


GOOD = idx(np.zeros((30, 28, 28)))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cannot begin with"),
        (GOOD[:10], "cannot begin with"),
        (b"\0\0\x08\x01" + GOOD[4:], "cannot begin with"),
        (b"\0\0\x09\x03" + GOOD[4:], "cannot begin with"),
        (GOOD[:-1], "do not fill the shape"),
        (GOOD + b"\0", "do not fill the shape"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "do not fill the shape"),
        (idx(np.zeros((29, 28, 28))), "not uint8 (30, 1, 28, 28)"),
        (idx(np.zeros((30, 28, 27))), "not uint8 (30, 1, 28, 28)"),
    ],
)
def test_bad_idx_files(content, says, synthetic, register, tmp_path):
    made = synthetic("mnist")
    (tmp_path / made.info.train_files[0]).unlink()
    name = made.info.train_files[0].removesuffix(".gz")
    register(overwrite(made, tmp_path, name, content))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load("mnist", tmp_path)
    assert says in str(caught.value)
    assert str(tmp_path / made.info.folder) in str(caught.value)


@pytest.mark.parametrize("labels", [np.arange(30) % 11, np.zeros(29)])
def test_bad_labels(labels, synthetic, register, tmp_path):
    made = synthetic("mnist")
    (tmp_path / made.info.train_files[1]).unlink()
    register(overwrite(made, tmp_path, made.info.train_files[1].removesuffix(".gz"), idx(labels)))
    with pytest.raises(ValueError, match="MNIST/raw does not hold 30 labels from 0 to 9"):
        load("mnist", tmp_path)


def test_bad_gzip(synthetic, register, tmp_path):
    made = synthetic("mnist")
    name = made.info.test_files[0]
    whole = (tmp_path / name).read_bytes()
    for bad in (whole[:-20], b"plain", whole[:30] + b"\xff" * 30 + whole[60:]):
        register(overwrite(made, tmp_path, name, bad))
        with pytest.raises(ValueError, match=rf"{name} .*not a whole gzip file"):
            load("mnist", tmp_path)


# ------------------------------------------------------------------ CIFAR


class Runs:
    """Unpickling it calls a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize(
    ("hostile", "wants"),
    [
        (lambda path: Runs(os.system, f"touch {path}"), r"\w+\.system"),
        (lambda path: Runs(eval, f"open({str(path)!r}, 'w')"), r"\w+\.eval"),
        (lambda path: {"data": Runs(np.save, str(path), 1)}, r"numpy\.save"),
        (lambda path: {"data": np.array([Runs(os.mkdir, str(path))], object)}, r"\S+"),
        (lambda path: Runs(getattr, np.ndarray, "tofile"), r"\w+\.getattr"),
    ],
)
def test_a_hostile_pickle_runs_nothing(name, protocol, hostile, wants, synthetic, register, tmp_path):
    made = synthetic(name)
    marker = tmp_path / "was here"
    file = made.info.train_files[-1]
    register(overwrite(made, tmp_path, file, pickle.dumps(hostile(marker), protocol=protocol)))
    with pytest.raises(ValueError, match=rf"{file} .*wants to use {wants}, which no data needs"):
        load(name, tmp_path)
    assert not marker.exists()


def test_a_hostile_item_in_a_good_batch_runs_nothing(synthetic, register, tmp_path):
    made = synthetic("cifar10")
    call = pickle.GLOBAL + b"os\nmkdir\n" + text(str(tmp_path / "was here")) + pickle.TUPLE1 + pickle.REDUCE
    file = made.info.test_files[0]
    content = dict_pickle(data=array_pickle(ZEROS), labels=list_pickle([integer(1)] * 4), batch_label=call)
    register(overwrite(made, tmp_path, file, content))
    with pytest.raises(ValueError, match=rf"{file} .*wants to use os\.mkdir"):
        load("cifar10", tmp_path)
    assert not (tmp_path / "was here").exists()


ZEROS = np.zeros((4, 3072), np.uint8)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "Ran out of input"),
        (cifar_pickle(ZEROS, np.zeros(4, int), "labels")[:-9], ""),
        (pickle.dumps([], protocol=2), "TypeError"),
        (dict_pickle(labels=list_pickle([])), "b'data'"),
        (dict_pickle(data=array_pickle(ZEROS)), "b'labels'"),
        (dict_pickle(data=text("no array"), labels=list_pickle([])), "data must be an array"),
        (dict_pickle(data=array_pickle(ZEROS), labels=integer(3)), "TypeError"),
        (dict_pickle(data=array_pickle(ZEROS), labels=list_pickle([text("cat")] * 4)), "labels integers from 0 to 9"),
        (dict_pickle(data=array_pickle(ZEROS), labels=list_pickle([integer(10)] * 4)), "labels integers from 0 to 9"),
        (dict_pickle(data=array_pickle(ZEROS), labels=list_pickle([integer(-1)] * 4)), "labels integers from 0 to 9"),
        (dict_pickle(data=array_pickle(ZEROS, "i1"), labels=list_pickle([])), "array of type b'i1'"),
        (dict_pickle(data=array_pickle(ZEROS, "O"), labels=list_pickle([])), "array of type b'O'"),
        (dict_pickle(data=array_pickle(ZEROS[:, 1:]), labels=list_pickle([])), "cannot reshape"),
    ],
)
def test_bad_batches(content, says, synthetic, register, tmp_path):
    made = synthetic("cifar10")
    file = made.info.test_files[0]
    register(overwrite(made, tmp_path, file, content))
    with pytest.raises(ValueError, match=rf"{file} has contents that do not make sense.*{says}"):
        load("cifar10", tmp_path)


def test_a_batch_of_another_size(synthetic, register, tmp_path):
    made = synthetic("cifar10")
    images, labels = made.test
    for content in (cifar_pickle(images[1:], labels[1:], "labels"), cifar_pickle(images, labels[1:], "labels")):
        register(overwrite(made, tmp_path, made.info.test_files[0], content))
        with pytest.raises(ValueError, match=r"cifar-10-batches-py (holds|does not hold)"):
            load("cifar10", tmp_path)


# ------------------------------------------------------------------ TinyImageNet


@pytest.fixture
def tiny(synthetic, tmp_path):
    return synthetic("tinyimagenet"), tmp_path / "tiny-imagenet-200"


def test_images_are_decoded_once(tiny, tmp_path):
    made, root = tiny
    assert_same(load("tinyimagenet", tmp_path), made)
    assert not list(root.glob(".*"))
    for path in root.rglob("*.JPEG"):
        path.unlink()
    assert_same(load("tinyimagenet", tmp_path, download=False), made)


def test_a_damaged_cache_is_named(tiny, tmp_path):
    made, root = tiny
    load("tinyimagenet", tmp_path)
    cache = root / "decoded.safetensors"
    whole = cache.read_bytes()
    for bad in (whole[:-1], b"", whole[:-1] + bytes([whole[-1] ^ 1]), whole.replace(b"train_labels", b"train_babels")):
        cache.write_bytes(bad)
        with pytest.raises(ValueError, match=rf"{cache} .*\. Delete it, and it is made again\.$"):
            load("tinyimagenet", tmp_path)
    cache.unlink()
    assert_same(load("tinyimagenet", tmp_path), made)


def test_a_cache_of_something_else_is_refused(tiny, register, tmp_path):
    made, _ = tiny
    load("tinyimagenet", tmp_path)
    for info in (replace(made.info, num_train=27), replace(made.info, num_classes=2)):
        register(info)
        with pytest.raises(ValueError, match=r"decoded\.safetensors .*Delete it"):
            load("tinyimagenet", tmp_path)


def test_a_folder_that_cannot_be_written(tiny, tmp_path, monkeypatch):
    made, _ = tiny

    def refuse(*args, **kwargs):
        raise PermissionError("Read-only file system")

    monkeypatch.setattr(formats, "write_file", refuse)
    with pytest.warns(UserWarning, match="every load will decode tinyimagenet anew: Read-only"):
        assert_same(load("tinyimagenet", tmp_path), made)


def test_bad_images_are_named(tiny, tmp_path):
    made, root = tiny
    path = root / "val" / "images" / "val_7.JPEG"
    whole = path.read_bytes()
    for bad in (whole[:-700], whole[:100], b"", b"GIF89a"):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=rf"{path} is not a whole JPEG.*delete {root}"):
            load("tinyimagenet", tmp_path)
    Image.new("RGB", (64, 64)).save(path, "PNG")
    with pytest.raises(ValueError, match=f"{path} is not a whole JPEG"):
        load("tinyimagenet", tmp_path)
    Image.new("RGB", (1, 1)).save(path, "JPEG")
    with pytest.raises(ValueError, match=rf"{path} has shape \(3, 1, 1\), not \(3, 64, 64\)"):
        load("tinyimagenet", tmp_path)
    path.write_bytes(whole)
    assert_same(load("tinyimagenet", tmp_path), made)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("wnids.txt", b"n01\nn02\n"),
        ("wnids.txt", b"\xff"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn01\n"),
        ("val/val_annotations.txt", b"val_0.JPEG\n"),
        ("val/val_annotations.txt", b"".join(b"val_%d.JPEG\tn77\n" % i for i in range(20))),
    ],
)
def test_bad_lists_are_named(name, content, tiny, tmp_path):
    _, root = tiny
    (root / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{root / name} has contents that do not make sense"):
        load("tinyimagenet", tmp_path)


def test_the_makers_differ(tmp_path):
    """The synthetic training and test sets are not the same, or the tests above would miss a mix-up."""
    made = make("mnist", tmp_path)
    assert not np.array_equal(made.train[0][:20], made.test[0])
