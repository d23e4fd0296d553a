"""Cutting batches: any nesting, any size."""

from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bsam.batches import split_batch


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
