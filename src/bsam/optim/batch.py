"""Cutting one minibatch into sub-batches."""

from __future__ import annotations

from typing import Any

import torch

from bsam.forward import map_tensors


def split_batch(batch: tuple[Any, ...], splits: int) -> list[tuple[tuple[Any, ...], int]]:
    """Cut `batch` into `splits` parts along dimension 0, and say how many examples each has.

    Tensors, at any depth of tuples, lists and mappings, are cut by `torch.tensor_split`: sizes differ by at most
    one. Everything else, 0-dimensional tensors included, goes to every part as it is. A batch of fewer examples
    than `splits` gives one part an example. One split, or no batch at all, is the batch itself; without a tensor
    to count it has size 1.

    Raises:
        ValueError: tensors of different lengths, an empty batch, or several splits and nothing to cut.
    """
    lengths: list[int] = []
    map_tensors(lambda t: lengths.append(len(t)), batch)
    if len(set(lengths)) > 1:
        raise ValueError(
            f"the tensors of the batch have different lengths {lengths}: they are cut into sub-batches along "
            "dimension 0, so all must hold the same number of examples. Put anything else into the closure itself."
        )
    if not lengths:
        if splits > 1:
            raise ValueError(
                f"splits={splits} needs a batch to split: call step(loss_fn, *batch) with the tensors of the batch "
                "and a loss_fn that returns the mean loss of what it is given."
            )
        return [(batch, 1)]
    size = lengths[0]
    if size == 0:
        raise ValueError("the batch is empty: there is no loss to average over 0 examples.")
    parts = min(splits, size)
    if parts == 1:
        return [(batch, size)]

    def part(k: int) -> Any:
        return map_tensors(lambda t: torch.tensor_split(t, parts)[k], batch)

    sizes = [size // parts + (k < size % parts) for k in range(parts)]
    return [(part(k), sizes[k]) for k in range(parts)]
