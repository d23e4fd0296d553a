"""Where operators with kernels of their own register: nothing else in the compiler names them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

__all__ = ["DECOMPOSITIONS", "LAYERS", "WEIGHT_GRADIENTS", "better_on", "register"]

LAYERS: dict[Any, Callable[..., Any]] = {}
"""Functions of torch, each with one to call in its place under vmap over the weights.

It takes the same arguments, and returns NotImplemented where torch's own is to be used."""

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
"""Operators, each with a function that is traced in its place, or returns NotImplemented."""

WEIGHT_GRADIENTS: set[tuple[Any, int | None]] = set()
"""Operators whose output, or the one of their outputs with this number, is a gradient of weights."""

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def register(
    *,
    layers: Mapping[Any, Callable[..., Any]] | None = None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    weight_gradients: Iterable[tuple[Any, int | None]] = (),
) -> None:
    """Make operators known to the compiler; see the three tables."""
    LAYERS.update(layers or {})
    DECOMPOSITIONS.update(decompositions or {})
    WEIGHT_GRADIENTS.update(weight_gradients)


def better_on(device: torch.device) -> bool:
    """Whether there are kernels for a device that are faster than torch's own."""
    return device.type == "cuda" and _HAS_TRITON
