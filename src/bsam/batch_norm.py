"""Running statistics of BatchNorm: which passes of a step move them, and how to estimate them anew.

A step of SAM or bSAM runs the network at perturbed weights, several times. The policies say which of those passes
may move the running mean and variance:

| policy | moved by |
|---|---|
| `"first_split"` | both passes of the first split (what the authors' code does; the default) |
| `"first_pass"` | the first pass of every split |
| `"all"` | every pass |
| `"none"` | no pass: call `recalibrate_batch_norm` before you evaluate |

They need to know the module: `BSAM(model.parameters(), module=model, ...)`. Without it every pass moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bsam.forward import call_model, inputs_and_labels, moved
from bsam.interrupts import deferred, interruptible, reading

__all__ = ["POLICIES", "BufferSnapshot", "moves_statistics", "recalibrate_batch_norm", "running_statistics"]

POLICIES = ("first_split", "first_pass", "all", "none")


def moves_statistics(policy: str, split: int, pass_index: int) -> bool:
    """Whether a pass of a split may move the running statistics."""
    return policy == "all" or (policy == "first_split" and split == 0) or (policy == "first_pass" and pass_index == 0)


class BufferSnapshot:
    """The values of some buffers, to be put back into the same tensors."""

    def __init__(self, buffers: Iterable[tuple[nn.Module, str]]) -> None:
        found = [(owner, name, owner._buffers[name]) for owner, name in buffers]
        self._saved = [(owner, name, b, b.detach().clone()) for owner, name, b in found if b is not None]
        self._empty = [(owner, name) for owner, name, b in found if b is None]

    def restore(self, unless: Tensor | None = None) -> None:
        """Put the values back; with `unless`, a 0-dim boolean, keep the present ones where it is true."""
        for owner, name, buffer, value in self._saved:
            if unless is not None:
                now = owner._buffers[name]
                value = value if now is None else torch.where(unless.to(now.device), now, value)
            buffer.copy_(value)
            owner._buffers[name] = buffer
        for owner, name in self._empty:  # filled since: read the answer from the device, which is rare
            if owner._buffers[name] is not None and not (unless is not None and bool(unless)):
                owner._buffers[name] = None


def all_buffers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Owner and name of every buffer of `module`."""
    return [(owner, name) for owner in module.modules() for name in owner._buffers]


def running_statistics(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Owner and name of the running statistics of every normalisation layer of `module`."""
    return [(owner, name) for owner, name in all_buffers(module) if isinstance(owner, _NormBase)]


def recalibrate_batch_norm(
    model: nn.Module, data: Iterable[Any], *, forward: Callable[[Any], Any] | None = None
) -> None:
    """Estimate the running statistics of `model` anew, at its present weights.

    Statistics gathered along training belong to weights that have moved on; those of a posterior sample were never
    gathered at all. This resets them and averages over `data` with equal weight a batch. Only normalisation layers
    are put into training mode, so dropout stays off. If anything fails, the old statistics come back.

    Args:
        model: The network; without BatchNorm nothing happens.
        data: Batches, as `bsam.predict` takes them: inputs, (inputs, labels), or a dictionary. Labels are ignored.
        forward: How to run the model on one batch, where that is not the rule: `lambda batch: model(batch.image)`.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _NormBase) and layer.running_mean is not None]
    if not layers:
        return
    with deferred(), torch.no_grad():
        _recalibrate(model, layers, data, forward)


def _recalibrate(
    model: nn.Module, layers: list[_NormBase], data: Iterable[Any], forward: Callable[[Any], Any] | None
) -> None:
    modes = [(layer, layer.training) for layer in model.modules()]
    momenta = [(layer, layer.momentum) for layer in layers]
    snapshot = BufferSnapshot(all_buffers(model))
    device = next(iter(model.parameters())).device
    try:
        model.eval()
        for layer in layers:
            layer.train()
            layer.reset_running_stats()
            layer.momentum = None  # torch's way to ask for a cumulative average
        batches = 0
        for batch in reading(data):
            try:
                with interruptible():
                    if forward is not None:
                        forward(batch)
                    else:
                        call_model(model, moved(inputs_and_labels(batch)[0], device))
            except ValueError as error:
                if "Expected more than 1" not in str(error):  # torch's check of one value a channel
                    raise
                raise ValueError(
                    f"batch {batches} has one value a channel, and a variance needs 2 or more: leave it out, as "
                    "DataLoader(..., drop_last=True) does. No statistics were changed."
                ) from error
            batches += 1
        if not batches:
            raise ValueError("data gave no batch: there is nothing to estimate the BatchNorm statistics from.")
    except BaseException:
        snapshot.restore()
        raise
    finally:
        for layer, momentum in momenta:
            layer.momentum = momentum
        for module, training in modes:
            module.training = training
