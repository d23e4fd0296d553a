"""Digits that were got wrong: which are shown, and with which numbers."""

import base64
import io

import pytest
import torch
from PIL import Image

import bsam
from bsam.experiments.report.mistakes import count_errors, find_mistakes

LABELS = torch.tensor([0, 1, 2, 0])


def predicted(*rows):
    probs = torch.tensor(rows, dtype=torch.float64)
    return bsam.Predictions(probs.log(), torch.zeros(len(rows)), LABELS, 0, 0, "loop")


@pytest.fixture
def two():
    """Both get the third digit wrong, and A alone the second."""
    return {
        "A": predicted((0.8, 0.1, 0.1), (0.6, 0.3, 0.1), (0.9, 0.05, 0.05), (0.5, 0.3, 0.2)),
        "B": predicted((0.7, 0.2, 0.1), (0.2, 0.7, 0.1), (0.5, 0.3, 0.2), (0.4, 0.3, 0.3)),
    }


def test_the_digits_that_most_got_wrong_come_first(two):
    images = torch.arange(4).view(4, 1, 1, 1).expand(4, 1, 8, 8) * 5
    first, second = find_mistakes(images, two)
    assert (first.label, second.label) == (2, 1)
    assert [(a.name, a.says, a.right) for a in first.answers] == [("A", 0, False), ("B", 0, False)]
    assert [a.sure for a in first.answers] == pytest.approx([0.9, 0.5])
    assert [a.right for a in second.answers] == [False, True]
    assert len(find_mistakes(images, two, count=1)) == 1


def test_the_image_is_the_digit_in_dark_ink(two):
    images = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    images[2, 0, 3, 4] = 16
    source = find_mistakes(images, two)[0].source
    image = Image.open(io.BytesIO(base64.b64decode(source.removeprefix("data:image/png;base64,"))))
    assert image.size == (8, 8)
    assert image.getpixel((4, 3)) == 0
    assert image.getpixel((0, 0)) == 255


def test_errors_are_counted(two):
    a, b = count_errors(two)
    assert (a.name, a.count, b.count) == ("A", 2, 1)
    assert a.sure == pytest.approx((0.6 + 0.9) / 2)
    assert b.sure == pytest.approx(0.5)
    right = predicted((0.8, 0.1, 0.1), (0.1, 0.8, 0.1), (0.1, 0.1, 0.8), (0.8, 0.1, 0.1))
    assert count_errors({"C": right})[0].sure is None
