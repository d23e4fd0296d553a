"""People's answers: shares from counts, and files that are not what they should be."""

import numpy as np
import pytest
import torch

from bsam.experiments.data import load
from bsam.experiments.suites.people import FILE, read_answers


def test_counts_become_shares(colour_data):
    known = load("cifar10", colour_data)
    answers = read_answers(known, colour_data)
    assert answers.shape == (20, 10)
    torch.testing.assert_close(answers.sum(dim=1), torch.ones(20, dtype=torch.float64))
    assert torch.equal(answers.argmax(dim=1), known.test[1])
    assert answers.max() == pytest.approx(45.5 / 50)


def test_wrong_files_are_refused(colour_data):
    known = load("cifar10", colour_data)
    good = np.load(colour_data / FILE)
    for counts, message in (
        (good[:10], r"counts of the shape \(20, 10\), got \(10, 10\)"),
        (-good, r"must have counts >= 0 with an answer in each row, got \[.*-.*\] in row 0"),
        (good * 0, r"with an answer in each row, got \[0.*\] in row 0"),
        (np.where(np.arange(20)[:, None] == 3, np.nan, good), r"got \[nan.*\] in row 3"),
        (good.astype(str), "is not an array of numbers"),
        (good[:, ::-1], "its rows have another order"),
    ):
        np.save(colour_data / FILE, counts)
        with pytest.raises(ValueError, match=message):
            read_answers(known, colour_data)
    for content in (b"no array", b""):
        (colour_data / FILE).write_bytes(content)
        with pytest.raises(
            ValueError, match=r"not an array of numbers: it is damaged, or another file. Copy it again.$"
        ):
            read_answers(known, colour_data)
    (colour_data / FILE).unlink()
    with pytest.raises(FileNotFoundError, match="Copy the file of that name"):
        read_answers(known, colour_data)
