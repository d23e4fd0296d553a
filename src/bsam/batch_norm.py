"""Running statistics of BatchNorm: which passes of a step move them, and how to estimate them again.

A step of SAM or bSAM runs the network several times, at perturbed weights. The policies say which of these passes
move the running mean and variance:

| policy | moved by |
|---|---|
| `"first_split"` | both passes of the first split (what the authors' code does; the default) |
| `"first_pass"` | the first pass of every split |
| `"all"` | every pass |
| `"none"` | no pass: call `recalibrate_batch_norm` before you evaluate |

The optimizer must know the module: `BSAM(model.parameters(), module=model, ...)`. Without it every pass moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from bsam.batches import inputs_and_labels, moved
from bsam.interrupts import deferred, interruptible, reading
from bsam.modules import (
    BufferSnapshot,
    all_buffers,
    call_model,
    evaluating,
    floating_type,
    normalisation_layers,
    restored_on_failure,
)

__all__ = ["POLICIES", "moves_statistics", "recalibrate_batch_norm"]

POLICIES = ("first_split", "first_pass", "all", "none")


def moves_statistics(policy: str, split: int, pass_index: int) -> bool:
    """Whether a pass of a split may move the running statistics."""
    return policy == "all" or (policy == "first_split" and split == 0) or (policy == "first_pass" and pass_index == 0)


def recalibrate_batch_norm(
    model: nn.Module, data: Iterable[Any], *, forward: Callable[[Any], Any] | None = None
) -> None:
    """Estimate the running statistics of `model` again, at its present weights.

    Statistics from training belong to earlier weights, and a posterior sample has none of its own. This function resets
    them and averages over `data` with equal weight per batch. Only normalisation layers are put into training mode, so
    dropout stays off. If anything fails, the old statistics are restored.

    Args:
        model: The network; without BatchNorm nothing happens.
        data: Batches, as for `bsam.predict`: inputs, (inputs, labels), or a dictionary. Labels are ignored.
        forward: Runs the model on one batch, if the default call does not fit: `lambda batch: model(batch.image)`.
    """
    layers = [layer for _, layer in normalisation_layers(model) if layer.running_mean is not None]
    if not layers:
        return
    momenta = [(layer, layer.momentum) for layer in layers]
    device = next(iter(model.parameters())).device
    with (
        deferred(),
        torch.no_grad(),
        evaluating(model),
        restored_on_failure(BufferSnapshot(all_buffers(model))),
    ):
        try:
            for layer in layers:
                layer.train()
                layer.reset_running_stats()
                layer.momentum = None  # None means a cumulative average in torch
            _run_on(model, data, device, forward)
        finally:
            for layer, momentum in momenta:
                layer.momentum = momentum


def _run_on(model: nn.Module, data: Iterable[Any], device: torch.device, forward: Callable[[Any], Any] | None) -> None:
    batches = 0
    for batch in reading(data):
        try:
            with interruptible():
                if forward is not None:
                    forward(batch)
                else:
                    call_model(model, moved(inputs_and_labels(batch)[0], device, floating_type(model)))
        except ValueError as error:
            if "Expected more than 1" not in str(error):  # torch's check of one value per channel
                raise
            raise ValueError(
                f"batch {batches} has one value per channel, and a variance needs 2 or more: leave it out, as "
                "DataLoader(..., drop_last=True) does. No statistics were changed."
            ) from error
        batches += 1
    if not batches:
        raise ValueError("data gave no batch: there is nothing to estimate the BatchNorm statistics from.")
