"""Access to modules: names, buffers, snapshots, modes, and a model with its loss or its call as one module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bsam.interrupts import interruptible
from bsam.shards import reshard, write
from bsam.torch_private import NormBase, own_buffers, transient_buffers

__all__ = [
    "BufferSnapshot",
    "Forward",
    "GradientSnapshot",
    "LossFunction",
    "LossModule",
    "OutputModel",
    "all_buffers",
    "call_model",
    "clean_names",
    "differentiable",
    "evaluating",
    "floating_type",
    "keys_of",
    "named_buffers",
    "named_parameters",
    "normalisation_layers",
    "output_tensor",
    "padding_rows",
    "preserved",
    "preserved_attributes",
    "restored_on_failure",
    "running_statistics",
    "shortened",
    "unwrapped",
]

Forward = Callable[[nn.Module, Any], Any]
"""How to run a model on the inputs of one batch."""
LossFunction = Callable[..., Tensor | float]
"""Returns the mean loss of a batch."""


# ------------------------------------------------------------------ names


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Map the names of all parameters (or all buffers) of a model to names without the prefixes of wrappers.

    `torch.compile` adds `_orig_mod.` wherever it was applied, DistributedDataParallel adds `module.` to all names.

    Examples:
        >>> clean_names(["module._orig_mod.layer.weight", "module._orig_mod.layer.bias"]).values()
        dict_values(['layer.weight', 'layer.bias'])
    """
    clean = {name: name.replace("_orig_mod.", "") for name in names}
    # A wrapper's prefix is on all names; a layer may also be called `module`.
    while clean and all(name.startswith("module.") for name in clean.values()):
        clean = {name: short.removeprefix("module.") for name, short in clean.items()}
    return clean


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by clean name, tied parameters once; those of a sharded model are sharded."""
    reshard(model)
    parameters = dict(model.named_parameters())
    return {short: parameters[name] for name, short in clean_names(parameters).items()}


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers by clean name, without non-persistent buffers, as in a state_dict."""
    transient = {id(own_buffers(owner)[name]) for owner in model.modules() for name in transient_buffers(owner)}
    buffers = {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in transient}
    return {short: buffers[name] for name, short in clean_names(buffers).items()}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of wrappers: DistributedDataParallel, DataParallel and `torch.compile`."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in (inside := dict(model.named_children())):
            model = inside["_orig_mod"]
        else:
            return model


def floating_type(model: nn.Module) -> torch.dtype | None:
    """Return the type of the first weights, or else buffers, that are real numbers; None if there are none."""
    tensors = chain(model.parameters(), model.buffers())
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)


def keys_of(module: nn.Module, parameters: Sequence[Tensor]) -> list[str]:
    """Return the names of the parameters in a `LossModule` of the module."""
    names = {id(p): f"module.{name}" for name, p in module.named_parameters()}
    if any(id(p) not in names for p in parameters):
        raise RuntimeError("some parameters do not belong to module=")
    return [names[id(p)] for p in parameters]


# ------------------------------------------------------------------ buffers and snapshots


def all_buffers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return owner and name of every buffer of `module`."""
    return [(owner, name) for owner in module.modules() for name in own_buffers(owner)]


def padding_rows(module: nn.Module) -> dict[int, int]:
    """Return the row of each embedding that stands for padding, by the `id` of the weights. No gradient reaches it.

    Weights that another layer has too, as a tied output layer does, are left out: that layer trains the row.
    """
    rows: dict[int, set[int | None]] = {}
    for layer in module.modules():
        row = layer.padding_idx if isinstance(layer, nn.Embedding | nn.EmbeddingBag) else None
        for name, parameter in layer.named_parameters(recurse=False):
            rows.setdefault(id(parameter), set()).add(row if name == "weight" else None)
    return {key: row for key, found in rows.items() if len(found) == 1 and (row := next(iter(found))) is not None}


def shortened(module: nn.Module) -> set[int]:
    """Return the `id` of the weights of embeddings that shorten their rows in every pass (`max_norm`)."""
    embeddings = (layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag))
    return {id(layer.weight) for layer in embeddings if layer.max_norm is not None}


def normalisation_layers(module: nn.Module) -> list[tuple[str, NormBase]]:
    """Return name and layer of every layer that may have running statistics: BatchNorm and InstanceNorm."""
    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, NormBase)]


def running_statistics(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return owner and name of the running statistics of every normalisation layer of `module`."""
    return [(layer, name) for _, layer in normalisation_layers(module) for name in own_buffers(layer)]


class Snapshot(Protocol):
    """A copy of values, made by the constructor."""

    def restore(self) -> None:
        """Restore the values."""


class BufferSnapshot:
    """The values of some buffers, to be restored into the same tensors."""

    def __init__(self, buffers: Iterable[tuple[nn.Module, str]]) -> None:
        found = [(owner, name, own_buffers(owner)[name]) for owner, name in buffers]
        self._saved = [(owner, name, b, b.detach().clone()) for owner, name, b in found if b is not None]
        self._empty = [(owner, name) for owner, name, b in found if b is None]

    def restore(self, unless: Tensor | None = None) -> None:
        """Restore the values, unless the 0-dim boolean `unless` is given and true."""
        for owner, name, buffer, value in self._saved:
            if unless is not None:
                now = own_buffers(owner)[name]
                value = value if now is None else torch.where(unless.to(now.device), now, value)
            buffer.copy_(value)
            own_buffers(owner)[name] = buffer
        for owner, name in self._empty:  # a buffer filled since then reads `unless` from the device, which is rare
            if own_buffers(owner)[name] is not None and not (unless is not None and bool(unless)):
                own_buffers(owner)[name] = None


class GradientSnapshot:
    """The `.grad` tensors of some parameters, not copied."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._saved = [(parameter, parameter.grad) for parameter in parameters]

    def restore(self) -> None:
        """Assign the same tensors to `.grad` again."""
        for parameter, grad in self._saved:
            parameter.grad = grad


@contextlib.contextmanager
def restored_on_failure(*snapshots: Snapshot) -> Iterator[None]:
    """Restore the snapshots if the block raises."""
    try:
        yield
    except BaseException:
        for snapshot in snapshots:
            snapshot.restore()
        raise


@contextlib.contextmanager
def preserved_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the attributes of modules that are not parameters or buffers, such as the counts of metrics.

    Tensors, lists and dictionaries are copied. What a list holds is taken to be replaced, and not written to.
    """
    saved = [(vars(module), {name: _copied(value) for name, value in vars(module).items()}) for module in modules]
    try:
        yield
    finally:
        for attributes, before in saved:
            attributes.update(before)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, list | dict) else value


@contextlib.contextmanager
def preserved(model: nn.Module, names: Iterable[str] | None = None) -> Iterator[None]:
    """Restore the values of parameters and buffers of `model` when the block ends, also after an exception.

    Args:
        model: The model.
        names: The clean names of the parameters that are restored; by default of all. All buffers are restored.
    """
    own = named_parameters(model)
    parameters = [(own[name], own[name].detach().clone()) for name in (own if names is None else names)]
    buffers = BufferSnapshot(all_buffers(model))
    try:
        yield
    finally:
        with torch.no_grad():
            reshard(model)
            for parameter, value in parameters:
                write(parameter, value)
            buffers.restore()
        torch.clear_autocast_cache()


# ------------------------------------------------------------------ modes


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode for the block; afterwards each layer has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def differentiable(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let the parameters take gradients; afterwards each has its own flag and `.grad` again."""
    flags, grads = [(p, p.requires_grad) for p in parameters], GradientSnapshot(parameters)
    try:
        for parameter in parameters:
            parameter.requires_grad_()
        yield
    finally:
        grads.restore()
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


# ------------------------------------------------------------------ modules around a model, for `functional_call`


class LossModule(nn.Module):
    """A module whose forward is a loss function, and whose weights are those of the model in its closure."""

    def __init__(self, module: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.module = module
        self._function = [loss_fn]  # in a list, because a loss function that is a module would be registered

    def forward(self, batch: tuple[Any, ...]) -> Tensor:
        """Return the loss."""
        with interruptible():  # only here, because functional_call must finish writing into the module
            loss = checked_loss(self._function[0](*batch))
        return loss.reshape(())


def checked_loss(loss: Any) -> Tensor:
    """Return the result of a loss function as a tensor, or raise unless it is one number."""
    if isinstance(loss, int | float):
        return torch.tensor(float(loss))
    if not isinstance(loss, Tensor):
        raise TypeError(f"the closure returned {type(loss).__name__}: it must return the loss, a scalar tensor.")
    if loss.numel() != 1:
        raise ValueError(
            f"the closure returned a tensor of shape {tuple(loss.shape)}: it must return one number, the mean loss "
            "over its examples."
        )
    return loss


class OutputModel(nn.Module):
    """A model and the function that runs it, as one module for `functional_call`."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model = model
        self.call = forward or call_model

    def forward(self, inputs: Any) -> Tensor:
        """Return the outputs, one row per example."""
        with interruptible():  # only here, because functional_call must finish writing into the module
            outputs = self.call(self.model, inputs)
        return output_tensor(outputs)


def output_tensor(outputs: Any) -> Tensor:
    """Return the tensor that a model returned, or the logits of the object that it returned."""
    if isinstance(outputs, Mapping) and "logits" in outputs:
        outputs = outputs["logits"]
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor):
        raise TypeError(
            f"the model returned {type(outputs).__name__}: it must return a tensor, or an object with .logits. "
            "Write forward=lambda model, inputs: ... that returns the tensor."
        )
    return outputs


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Run the model on inputs: a dictionary becomes keyword arguments, a tuple or list positional arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, list | tuple):
        return model(*inputs)
    return model(inputs)
