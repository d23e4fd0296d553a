"""Batches: accepted forms of data, inputs and labels, and cutting a batch into sub-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset, IterableDataset

__all__ = [
    "as_tensor",
    "batches_of",
    "has_examples",
    "inputs_and_labels",
    "map_tensors",
    "moved",
    "num_examples",
    "some_examples",
    "split_batch",
]


def batches_of(data: Any, batch_size: int) -> Iterable[Any]:
    """Return the batches of `data`.

    Tensors, NumPy arrays and dictionaries of them are cut evenly, into as few batches as `batch_size` allows.
    """
    if isinstance(data, tuple) and len(data) == 2 and _is_array(data[0], Mapping) and data[1] is None:
        raise TypeError("data is (inputs, None): give the inputs alone, or the labels too.")
    pair = isinstance(data, tuple) and len(data) == 2 and _is_array(data[0], Mapping) and _is_array(data[1], list)
    parts = data if pair else (data,)
    for part in parts:
        if hasattr(part, "to_numpy"):
            raise TypeError(f"data has a {type(part).__name__}: write .to_numpy() to make it an array.")
        if isinstance(part, Tensor | np.ndarray) and part.ndim == 0:
            raise ValueError("data is a single number: give one row per example.")
        if isinstance(part, Tensor | np.ndarray) and len(part) == 0:
            raise ValueError("data is empty: there is nothing to predict.")
    if pair:
        inputs, labels = (_cut(part, batch_size) for part in data)
        lengths = [_length(part) for part in data]
        if lengths[0] != lengths[1]:
            raise ValueError(f"data has {lengths[0]} inputs and {lengths[1]} labels: give one label per input.")
        return list(zip(inputs, labels, strict=True))
    if _is_array(data, Mapping):
        return _cut(data, batch_size)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise TypeError(
            "data is a Dataset of single examples: write torch.utils.data.DataLoader(data, batch_size=512)."
        )
    if not isinstance(data, Iterable):
        raise TypeError(f"data is of type {type(data).__name__}: give a tensor, (inputs, labels) or batches.")
    return data


def _is_array(part: Any, or_of: type) -> bool:
    """Whether all examples are in this part of the data: an array, or an object of the other type."""
    return isinstance(part, Tensor | np.ndarray | or_of) or hasattr(part, "to_numpy")


def _length(part: Any) -> int:
    """Return the number of examples of an array, or of the arrays of a dictionary."""
    if not isinstance(part, Mapping):
        return len(part)
    lengths = {key: len(value) for key, value in part.items() if isinstance(value, Tensor | np.ndarray) and value.ndim}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        found = ", ".join(f"{key}: {length}" for key, length in lengths.items()) or "no tensors"
        raise TypeError(
            f"data is a dictionary of tensors that do not have one row per example ({found}), so it cannot be cut into "
            "batches: write [data] if it is one batch, or a DataLoader of dictionaries."
        )
    return next(iter(lengths.values()))


def _cut(part: Any, batch_size: int) -> Sequence[Any]:
    # Evenly, because BatchNorm could not estimate a variance from a last batch of one example.
    num_batches = -(-_length(part) // batch_size)
    if isinstance(part, Mapping):
        cut = {
            key: _cut(value, batch_size)
            if isinstance(value, Tensor | np.ndarray) and value.ndim
            else [value] * num_batches
            for key, value in part.items()
        }
        return [{key: pieces[i] for key, pieces in cut.items()} for i in range(num_batches)]
    if isinstance(part, Tensor):
        return torch.tensor_split(part, num_batches)
    return np.array_split(part, num_batches)  # of the same sizes as those of tensor_split


def as_tensor(values: Any) -> Tensor:
    """Return numbers as a tensor: an array is copied, because it may be read-only."""
    return torch.from_numpy(np.array(values)) if isinstance(values, np.ndarray) else torch.as_tensor(values)


def inputs_and_labels(batch: Any) -> tuple[Any, Any]:
    """Split a batch into inputs and labels; labels are None if there are none."""
    if isinstance(batch, Mapping):
        inputs = dict(batch)
        key = "labels" if "labels" in inputs else "label"
        return inputs, inputs.pop(key, None)
    if isinstance(batch, list | tuple):
        if len(batch) not in (1, 2):
            raise ValueError(
                f"a batch has {len(batch)} parts: it must be (inputs, labels) or (inputs,). Put several inputs into a "
                "tuple or dictionary: ((a, b), labels)."
            )
        return batch[0], batch[1] if len(batch) == 2 else None
    return batch, None


def moved(tree: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move the inputs of a batch to `device`. NumPy arrays become tensors, those of real numbers of type `dtype`."""
    _refuse_packed(tree)
    if isinstance(tree, Mapping):
        return {key: moved(value, device, dtype) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(moved(value, device, dtype) for value in tree)
    if isinstance(tree, np.ndarray):
        tensor = as_tensor(tree)
        return tensor.to(device, dtype if tensor.is_floating_point() else None)
    return tree.to(device) if hasattr(tree, "to") else tree


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply `function` to every tensor of a nested structure that has a dimension to cut."""
    _refuse_packed(tree)
    if isinstance(tree, Tensor):
        return function(tree) if tree.dim() else tree
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(function, tree[key]) for key in tree}
        try:
            return type(tree)(mapped)  # type: ignore[call-arg]  # an OrderedDict, or a tokenizer's BatchEncoding
        except TypeError:
            return mapped
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, item) for item in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(function, item) for item in tree)
    return tree


def _refuse_packed(tree: Any) -> None:
    """Raise if this is a PackedSequence: the rows of its tensors are words of several examples."""
    if isinstance(tree, PackedSequence):
        raise TypeError(
            "a PackedSequence has no row per example, so it cannot be cut or counted: give padded inputs and their "
            "lengths, and pack them inside the model or the loss function."
        )


def has_examples(batch: Any) -> bool:
    """Whether a batch has tensors, so that its examples can be counted."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, batch)
    return bool(tensors)


def num_examples(batch: Any) -> int:
    """Return the number of examples of a batch."""
    lengths: list[int] = []
    map_tensors(lambda t: lengths.append(len(t)), batch)
    return lengths[0]


@torch.enable_grad()
def some_examples(batch: Any, start: int, stop: int) -> Any:
    """Return examples start .. stop - 1 of a batch, or of its inputs."""
    return map_tensors(lambda t: t[start:stop], batch)


def split_batch(batch: tuple[Any, ...], splits: int, *, counted: bool = True) -> list[tuple[tuple[Any, ...], int]]:
    """Cut `batch` into `splits` parts along dimension 0; return each part with its number of examples.

    Tensors, at any depth of tuples, lists and mappings, are cut by `torch.tensor_split`: sizes differ by at most
    one, so a list with one tensor per example is cut in the wrong place. All other objects, and 0-dimensional tensors,
    go to every part unchanged. A batch of fewer examples than
    `splits` is cut into single examples. With one split the batch is the only part; without tensors its size is 1.

    Args:
        batch: The batch.
        splits: The number of parts.
        counted: False if the number of examples does not matter with one split. Tensors may then differ in length.

    Raises:
        ValueError: tensors of different lengths, an empty batch, or several splits and nothing to cut.
    """
    lengths: list[int] = []
    map_tensors(lambda t: lengths.append(len(t)), batch)
    if len(set(lengths)) > 1 and (splits > 1 or counted):
        raise ValueError(
            f"the tensors of the batch have different lengths {lengths}: they are cut into sub-batches along "
            "dimension 0, so all must hold the same number of examples. Use other tensors inside the closure, or, with "
            "splits=1, give the number of examples: optimizer.probe(loss_fn, *batch, weight=...)."
        )
    if not lengths:
        if splits > 1:
            raise ValueError(
                f"splits={splits} needs a batch to split: call step(loss_fn, *batch) with the tensors of the batch "
                "and a loss_fn that returns the mean loss of its arguments."
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
