"""The buffers of several models, stacked: the models' buffers become views of the stacks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bsam.torch_private import own_buffers

__all__ = ["StackedBuffers"]


class StackedBuffers:
    """Stacks the buffers of models of one architecture, and replaces the buffers by views of the stacks."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        owners = [
            [
                (f"module.{prefix}{'.' if prefix else ''}{name}", owner, name, b)
                for prefix, owner in module.named_modules()
                for name, b in own_buffers(owner).items()
                if b is not None
            ]
            for module in modules
        ]
        self.stacks: dict[str, Tensor] = {}
        """Stacks by name in a `LossModule`, one row per model."""
        for column in zip(*owners, strict=True):
            stack = torch.stack([b for _, _, _, b in column])
            self.stacks[column[0][0]] = stack
            for run, (_, owner, name, _) in enumerate(column):
                own_buffers(owner)[name] = stack[run]
        self._views = [(owner, name, own_buffers(owner)[name]) for column in owners for _, owner, name, _ in column]

    def adopt(self) -> None:
        """Copy buffers that were replaced, for example by loading a state, into the stacks."""
        for owner, name, view in self._views:
            now = own_buffers(owner)[name]
            if now is not view and now is not None and view is not None:
                view.copy_(now)
                own_buffers(owner)[name] = view
