"""Layers exchanged for those that suit vmap over the weights, while a network runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bsam.compiler.registry import LAYERS, better_on

__all__ = ["OurLayers", "our_layers"]


def our_layers(device: torch.device) -> AbstractContextManager[Any]:
    """`OurLayers` on a device where they are faster, and nothing elsewhere."""
    return OurLayers() if better_on(device) else nullcontext()


class OurLayers(TorchFunctionMode):
    """Inside of it, the functions of torch that are registered are exchanged for ours, where ours can do it."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        """Exchange these, and leave the rest as it is."""
        options = options or {}
        ours = LAYERS.get(function)
        result = NotImplemented if ours is None else ours(*arguments, **options)
        return function(*arguments, **options) if result is NotImplemented else result
