"""Running a model on data: what a batch may be, and how its inputs reach the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from bsam.interrupts import interruptible

__all__ = [
    "Forward",
    "OutputModel",
    "batches_of",
    "call_model",
    "evaluating",
    "inputs_and_labels",
    "map_tensors",
    "moved",
]

Forward = Callable[[nn.Module, Any], Any]
"""How to run a model on the inputs of one batch."""


class OutputModel(nn.Module):
    """The model with `forward` around it, so that weights can be handed to the whole by `functional_call`."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model = model
        self.call = forward or call_model

    def forward(self, inputs: Any) -> Tensor:
        """The outputs, one row an example."""
        with interruptible():  # here: functional_call writes into the module, and that must be whole
            outputs = self.call(self.model, inputs)
        if isinstance(outputs, Mapping) and "logits" in outputs:
            outputs = outputs["logits"]
        outputs = getattr(outputs, "logits", outputs)
        if not isinstance(outputs, Tensor):
            raise TypeError(
                f"the model returned {type(outputs).__name__}: a tensor, or something with .logits, is needed. Write "
                "forward=lambda model, inputs: ... that returns the tensor."
            )
        return outputs


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Run the model on the inputs of a batch: a dictionary gives keywords, a tuple or list positional arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, list | tuple):
        return model(*inputs)
    return model(inputs)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the time of the block; afterwards each layer has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def batches_of(data: Any, batch_size: int) -> Iterable[Any]:
    """The batches of `data`; only tensors are cut here, evenly, into as few as `batch_size` allows."""
    tensors = data if isinstance(data, tuple) else (data,)
    if any(isinstance(part, Tensor) and len(part) == 0 for part in tensors):
        raise ValueError("data is empty: there is nothing to predict.")
    if isinstance(data, Tensor):
        return _cut(data, batch_size)
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        inputs, labels = data
        if len(inputs) != len(labels):
            raise ValueError(f"data has {len(inputs)} inputs and {len(labels)} labels: one label an input is needed.")
        return list(zip(_cut(inputs, batch_size), _cut(labels, batch_size), strict=True))
    if isinstance(data, Mapping):
        raise TypeError("data is a dictionary, which is one batch: write [data], or a DataLoader of such batches.")
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise TypeError(
            "data is a Dataset of single examples: write torch.utils.data.DataLoader(data, batch_size=512)."
        )
    if not isinstance(data, Iterable):
        raise TypeError(f"data is of type {type(data).__name__}: a tensor, (inputs, labels) or batches are needed.")
    return data


def _cut(tensor: Tensor, batch_size: int) -> tuple[Tensor, ...]:
    # Evenly: a last batch of one example, say, would have no variance for BatchNorm to estimate.
    return torch.tensor_split(tensor, -(-len(tensor) // batch_size))


def inputs_and_labels(batch: Any) -> tuple[Any, Any]:
    """The two parts of a batch; labels are None where there are none."""
    if isinstance(batch, Mapping):
        inputs = dict(batch)
        key = "labels" if "labels" in inputs else "label"
        return inputs, inputs.pop(key, None)
    if isinstance(batch, list | tuple):
        if len(batch) not in (1, 2):
            raise ValueError(
                f"a batch has {len(batch)} parts: (inputs, labels) or (inputs,) are understood. Several inputs go "
                "into a tuple or dictionary of their own: ((a, b), labels)."
            )
        return batch[0], batch[1] if len(batch) == 2 else None
    return batch, None


def moved(tree: Any, device: torch.device) -> Any:
    """The inputs of a batch on `device`."""
    if isinstance(tree, Mapping):
        return {key: moved(value, device) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(moved(value, device) for value in tree)
    return tree.to(device) if hasattr(tree, "to") else tree


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply `function` to every tensor of a nested structure that has a dimension to cut."""
    if isinstance(tree, Tensor):
        return function(tree) if tree.dim() else tree
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(function, tree[key]) for key in tree}
        try:
            return type(tree)(mapped)  # type: ignore[call-arg]  # an OrderedDict, or what a tokenizer returns
        except TypeError:
            return mapped
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, item) for item in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(function, item) for item in tree)
    return tree
