"""Registry of operators with our own kernels: the rest of the compiler does not name them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

__all__ = ["DECOMPOSITIONS", "LAYERS", "WEIGHT_GRADIENTS", "better_on", "register"]

LAYERS: dict[Any, Callable[..., Any]] = {}
"""Maps a function of torch to its replacement under vmap over the weights.

The replacement takes the same arguments, and returns NotImplemented where torch's function must be used."""

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
"""Maps an operator to a function that is traced in its place, or returns NotImplemented."""

WEIGHT_GRADIENTS: set[tuple[Any, int | None]] = set()
"""Operators with a gradient of weights as output, and the number of that output if there are several."""

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def register(
    *,
    layers: Mapping[Any, Callable[..., Any]] | None = None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    weight_gradients: Iterable[tuple[Any, int | None]] = (),
) -> None:
    """Add operators to the three tables above."""
    LAYERS.update(layers or {})
    DECOMPOSITIONS.update(decompositions or {})
    WEIGHT_GRADIENTS.update(weight_gradients)


def better_on(device: torch.device) -> bool:
    """Whether we have kernels for a device that are faster than torch's."""
    return device.type == "cuda" and _HAS_TRITON
