"""Unknown inputs have the format of the known ones, and are what they should be."""

import shutil

import torch

from bsam.experiments.data import DATASETS, load, load_test
from bsam.experiments.suites.unknown_inputs import UNKNOWN, unknown_images


def test_colour_images_have_32_pixels_and_three_channels(colour_data):
    known = load("cifar10", colour_data)
    found = {name: unknown_images(known, name, colour_data) for name in UNKNOWN["cifar10"]}
    assert {tuple(images.shape[1:]) for images in found.values()} == {(3, 32, 32)}
    assert torch.equal(found["cifar100"], load("cifar100", colour_data).test[0])
    digits = load("mnist", colour_data).test[0]
    for channel in range(3):
        assert torch.equal(found["mnist"][:, channel, 2:-2, 2:-2], digits[:, 0])
    assert not found["mnist"][:, :, :2].any()
    shutil.rmtree(colour_data / "tiny-imagenet-200" / "train")  # the training parts are not needed
    for name in ("cifar100", "mnist", "fashionmnist"):
        for file in DATASETS[name].train_files:
            (colour_data / file).unlink()
    for name, images in found.items():
        assert torch.equal(unknown_images(known, name, colour_data), images)
    tiny = load_test("tinyimagenet", colour_data)[0].double()
    mean = (tiny[..., ::2, ::2] + tiny[..., 1::2, ::2] + tiny[..., ::2, 1::2] + tiny[..., 1::2, 1::2]) / 4
    assert (found["tinyimagenet"] - mean).abs().max() <= 0.5


def test_gray_images_stay_gray(colour_data):
    known = load("mnist", colour_data)
    assert torch.equal(unknown_images(known, "fashionmnist", colour_data), load("fashionmnist", colour_data).test[0])


def test_unknown_digits_need_no_files():
    known = load("digits")
    for name in UNKNOWN["digits"]:
        images = unknown_images(known, name, None)
        assert images.shape[1:] == known.image_shape
        assert images.dtype == torch.uint8
        assert images.max() <= known.info.scale
        assert len(images) > 300


def test_the_unknown_sets_are_not_the_known_one():
    for known, sets in UNKNOWN.items():
        assert known in DATASETS
        assert known.removesuffix("-standardised") not in sets
        assert set(sets.values()) <= {"near", "far"}
