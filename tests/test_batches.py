"""Cutting batches: any nesting, any size."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bsam.batches import as_tensor, batches_of, has_examples, moved, split_batch


@given(size=st.integers(1, 40), splits=st.integers(1, 12))
def test_parts_are_the_batch_in_order_and_differ_by_at_most_one(size, splits):
    x = torch.arange(size)
    parts = split_batch((x, {"twice": 2 * x, "name": "kept"}), splits)
    assert len(parts) == min(size, splits)
    assert torch.equal(torch.cat([part[0] for part, _ in parts]), x)
    assert torch.equal(torch.cat([part[1]["twice"] for part, _ in parts]), 2 * x)
    assert all(part[1]["name"] == "kept" for part, _ in parts)
    sizes = [n for _, n in parts]
    assert sizes == [len(part[0]) for part, _ in parts]
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1


def test_one_split_is_the_batch_itself():
    x = torch.ones(3, 2)
    ((part, size),) = split_batch((x,), 1)
    assert part[0] is x
    assert size == 3
    assert split_batch((), 1) == [((), 1)]
    assert split_batch(("no tensor", torch.tensor(2.0)), 1)[0][1] == 1


def test_named_tuples_stay_named_tuples():
    Pair = namedtuple("Pair", "x y")
    parts = split_batch((Pair(torch.arange(4), torch.arange(4)),), 2)
    assert torch.equal(parts[1][0][0].y, torch.tensor([2, 3]))
    assert isinstance(parts[0][0][0], Pair)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match=r"different lengths \[3, 2\]"):
        split_batch((torch.ones(3), [torch.ones(2)]), 1)
    batch = torch.ones(3), [torch.ones(2)]
    ((part, _),) = split_batch(batch, 1, counted=False)
    assert part is batch
    with pytest.raises(ValueError, match=r"different lengths \[3, 2\]"):
        split_batch(batch, 2, counted=False)


def test_whether_examples_can_be_counted():
    assert has_examples(({"x": torch.ones(2)}, 1))
    assert not has_examples((object(), torch.tensor(1.0)))


@given(size=st.integers(1, 40), batch_size=st.integers(1, 12))
def test_arrays_dictionaries_and_tensors_are_cut_at_the_same_places(size, batch_size):
    x = torch.arange(size)
    expected = [part.tolist() for part in batches_of(x, batch_size)]
    assert [part.tolist() for part in batches_of(x.numpy(), batch_size)] == expected
    whole = {"a": x, "b": x.numpy(), "scale": torch.tensor(2.0), "name": "kept"}
    for data in (whole, (whole, x), (whole, x.tolist())):
        cut = list(batches_of(data, batch_size))
        for batch, part in zip(cut, expected, strict=True):
            inputs, labels = (batch, None) if data is whole else batch
            assert inputs["a"].tolist() == inputs["b"].tolist() == part
            assert labels is None or labels.tolist() == part
            assert (inputs["scale"], inputs["name"]) == (torch.tensor(2.0), "kept")


def test_arrays_become_tensors():
    array = np.arange(6.0).reshape(2, 3)[:, ::-1]
    array.flags.writeable = False
    tensor = as_tensor(array)
    assert torch.equal(tensor, torch.tensor([[2.0, 1, 0], [5, 4, 3]], dtype=torch.float64))
    tree = moved({"x": array, "i": np.arange(2), "t": (torch.ones(1), "s")}, torch.device("cpu"), torch.float32)
    assert (tree["x"].dtype, tree["i"].dtype) == (torch.float32, torch.int64)
    assert torch.equal(tree["t"][0], torch.ones(1))
    assert moved(array, torch.device("cpu")).dtype == torch.float64


def test_a_packed_sequence_is_refused():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    for refuse in (
        lambda: split_batch((packed, torch.ones(2)), 1),
        lambda: moved((packed,), torch.device("cpu")),
    ):
        with pytest.raises(TypeError, match="give padded inputs and their lengths"):
            refuse()


def test_no_labels_are_not_none():
    with pytest.raises(TypeError, match=r"data is \(inputs, None\): give the inputs alone"):
        batches_of((torch.ones(3, 2), None), 2)
