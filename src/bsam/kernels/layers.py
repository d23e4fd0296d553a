"""Layers exchanged for those that suit vmap over the weights, while a network runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from bsam.kernels.batch_norm import batch_norm
from bsam.kernels.convolution import Convolution, better_on

__all__ = ["OurLayers", "our_layers"]


def our_layers(device: torch.device) -> AbstractContextManager[Any]:
    """`OurLayers` on a device where they are faster, and nothing elsewhere."""
    return OurLayers() if better_on(device) else nullcontext()


class OurLayers(TorchFunctionMode):
    """Inside of it, `conv2d` and `batch_norm` (in training mode) of torch are ours, where they can do it."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        """Exchange these two, and leave the rest as it is."""
        options = options or {}
        if function is torch.conv2d:
            convolution = Convolution(*arguments, **options)
            if convolution.fits:
                return convolution()
        if function is F.batch_norm and options.get("training") and arguments[0].numel() > arguments[0].shape[1]:
            return batch_norm(*arguments, **options)
        return function(*arguments, **options)
