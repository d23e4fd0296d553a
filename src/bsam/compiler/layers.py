"""Replaces layers by versions for vmap over the weights, while a network runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bsam.compiler.registry import LAYERS, better_on

__all__ = ["OurLayers", "our_layers"]


def our_layers(device: torch.device) -> AbstractContextManager[Any]:
    """Return `OurLayers` on a device where they are faster, and an empty context elsewhere."""
    return OurLayers() if better_on(device) else nullcontext()


class OurLayers(TorchFunctionMode):
    """Inside this context, registered functions of torch are replaced by ours, if ours accept the arguments."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        """Replace a registered function, and call any other unchanged."""
        options = options or {}
        ours = LAYERS.get(function)
        result = NotImplemented if ours is None else ours(*arguments, **options)
        return function(*arguments, **options) if result is NotImplemented else result
