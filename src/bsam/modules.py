"""The one door to a module: names, buffers, snapshots, modes, and a model with its loss or its call as one module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bsam.interrupts import interruptible
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
    "keys_of",
    "named_buffers",
    "named_parameters",
    "normalisation_layers",
    "preserved",
    "restored_on_failure",
    "running_statistics",
]

Forward = Callable[[nn.Module, Any], Any]
"""How to run a model on the inputs of one batch."""
LossFunction = Callable[..., Tensor | float]
"""Returns the mean loss of the batch that it is given."""


# ------------------------------------------------------------------ names


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """The names of all parameters (or all buffers) of a model, each with its name without a wrapper's prefix.

    `torch.compile` adds `_orig_mod.` wherever it was applied, DistributedDataParallel `module.` in front of all.

    Examples:
        >>> clean_names(["module._orig_mod.layer.weight", "module._orig_mod.layer.bias"]).values()
        dict_values(['layer.weight', 'layer.bias'])
    """
    clean = {name: name.replace("_orig_mod.", "") for name in names}
    # Only a prefix of all names is a wrapper's; a layer may be called `module` too.
    while clean and all(name.startswith("module.") for name in clean.values()):
        clean = {name: short.removeprefix("module.") for name, short in clean.items()}
    return clean


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by clean name, tied ones once."""
    parameters = dict(model.named_parameters())
    return {short: parameters[name] for name, short in clean_names(parameters).items()}


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers by clean name; as in a state_dict, those that a module declares not to be persistent are left out."""
    transient = {id(own_buffers(owner)[name]) for owner in model.modules() for name in transient_buffers(owner)}
    buffers = {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in transient}
    return {short: buffers[name] for name, short in clean_names(buffers).items()}


def keys_of(module: nn.Module, parameters: Sequence[Tensor]) -> list[str]:
    """The names of the parameters in a `LossModule` of the module."""
    names = {id(p): f"module.{name}" for name, p in module.named_parameters()}
    if any(id(p) not in names for p in parameters):
        raise RuntimeError("some parameters do not belong to module=")
    return [names[id(p)] for p in parameters]


# ------------------------------------------------------------------ buffers, and snapshots that put things back


def all_buffers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Owner and name of every buffer of `module`."""
    return [(owner, name) for owner in module.modules() for name in own_buffers(owner)]


def normalisation_layers(module: nn.Module) -> list[tuple[str, NormBase]]:
    """Name and layer of everything that may keep running statistics: BatchNorm and InstanceNorm."""
    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, NormBase)]


def running_statistics(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Owner and name of the running statistics of every normalisation layer of `module`."""
    return [(layer, name) for _, layer in normalisation_layers(module) for name in own_buffers(layer)]


class Snapshot(Protocol):
    """Values of something, taken when it is made."""

    def restore(self) -> None:
        """Put the values back."""


class BufferSnapshot:
    """The values of some buffers, to be put back into the same tensors."""

    def __init__(self, buffers: Iterable[tuple[nn.Module, str]]) -> None:
        found = [(owner, name, own_buffers(owner)[name]) for owner, name in buffers]
        self._saved = [(owner, name, b, b.detach().clone()) for owner, name, b in found if b is not None]
        self._empty = [(owner, name) for owner, name, b in found if b is None]

    def restore(self, unless: Tensor | None = None) -> None:
        """Put the values back; with `unless`, a 0-dim boolean, keep the present ones where it is true."""
        for owner, name, buffer, value in self._saved:
            if unless is not None:
                now = own_buffers(owner)[name]
                value = value if now is None else torch.where(unless.to(now.device), now, value)
            buffer.copy_(value)
            own_buffers(owner)[name] = buffer
        for owner, name in self._empty:  # filled since: read the answer from the device, which is rare
            if own_buffers(owner)[name] is not None and not (unless is not None and bool(unless)):
                own_buffers(owner)[name] = None


class GradientSnapshot:
    """The `.grad` of some parameters: the same tensors come back."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._saved = [(parameter, parameter.grad) for parameter in parameters]

    def restore(self) -> None:
        """Put them back."""
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
def preserved(model: nn.Module) -> Iterator[None]:
    """Give all parameters and buffers of `model` their values back when the block ends, however it ends."""
    parameters = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    buffers = BufferSnapshot(all_buffers(model))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in parameters:
                parameter.copy_(value)
            buffers.restore()
        torch.clear_autocast_cache()


# ------------------------------------------------------------------ modes


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
    """A module whose forward is the loss function, and whose weights are those of the model it closes over."""

    def __init__(self, module: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.module = module
        self._function = [loss_fn]  # in a list: it may be a module, and would be registered as a part of this one

    def forward(self, batch: tuple[Any, ...]) -> Tensor:
        """The loss."""
        with interruptible():  # here: functional_call writes into the module, and that must be whole
            loss = checked_loss(self._function[0](*batch))
        return loss.reshape(())


def checked_loss(loss: Any) -> Tensor:
    """The loss that a loss function returned, which must be one number."""
    if isinstance(loss, int | float):
        return torch.tensor(float(loss))
    if not isinstance(loss, Tensor):
        raise TypeError(f"the closure returned {type(loss).__name__}: it must return the loss, a scalar tensor.")
    if loss.numel() != 1:
        raise ValueError(
            f"the closure returned a tensor of shape {tuple(loss.shape)}: it must return one number, the mean loss "
            "over the examples it was given."
        )
    return loss


class OutputModel(nn.Module):
    """The model with `forward` around it, so that weights can be handed to the whole by `functional_call`."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model = model
        self.call = forward or call_model

    def forward(self, inputs: Any) -> Tensor:
        """The outputs, one row per example."""
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
