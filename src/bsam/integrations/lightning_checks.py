"""What the adapter to Lightning refuses, and what to write instead."""

from __future__ import annotations

from typing import Any

import lightning
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from bsam.integrations.fabric import averages_gradients

__all__ = ["check_arguments", "check_optimizer"]


def check_arguments(trainer: lightning.Trainer, name: str) -> None:
    """Raise if an argument of the Trainer would act on each pass of a step; `name` is the class of the module."""
    accumulates, clips = trainer.accumulate_grad_batches != 1, bool(trainer.gradient_clip_val)
    if trainer.state.fn == "fit" and (accumulates or clips):
        argument = "accumulate_grad_batches" if accumulates else "gradient_clip_val"
        given = f"{argument}={getattr(trainer, argument)}"
        raise ValueError(
            f"Trainer({given}) would act on each pass of a step: leave it out of the Trainer, and write "
            f"super().__init__({given}) in {name}, with automatic_optimization = False."
        )


def check_optimizer(optimizer: Any, trainer: lightning.Trainer, *, has_weight: bool) -> bool:
    """Raise if optimizer and strategy do not go together; return whether the strategy averages the gradients."""
    strategy = trainer.strategy
    if not hasattr(optimizer, "probe"):
        raise TypeError(
            f"configure_optimizers() returned {type(optimizer).__name__}: it must return one optimizer of bsam, or "
            "write self.automatic_optimization = True in __init__()."
        )
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy) or getattr(strategy.model, "static_graph", False):
        raise ValueError(f"{type(strategy).__name__}: use one device, or strategy='ddp' without static_graph.")
    return averages_gradients(optimizer, trainer.world_size, has_weight=has_weight)
