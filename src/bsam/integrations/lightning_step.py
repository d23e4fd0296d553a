"""How Lightning takes a step whose probes are done, and how schedulers follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
from torch.optim.lr_scheduler import ReduceLROnPlateau

__all__ = ["step_schedulers", "take_step"]


def take_step(module: lightning.LightningModule, optimizer: Any, clip: Callable[[list[Any]], Any] | None) -> None:
    """Let Lightning step: it runs its hooks in a closure, then the gradients are clipped and the probes applied."""
    step, is_own = optimizer.step, "step" in vars(optimizer)

    def after_hooks(closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            closure()
        if clip is not None:
            clip([p for group in optimizer.param_groups for p in group["params"]])
        return step()

    optimizer.step = after_hooks
    try:
        module.optimizers().step()
    finally:
        del optimizer.step
        if is_own:  # a scheduler's
            optimizer.step = step


def step_schedulers(module: lightning.LightningModule, interval: str, count: int) -> None:
    """Step the schedulers of an interval, "step" or "epoch", after `count` of them."""
    for config in module.trainer.lr_scheduler_configs:
        is_due = config.interval == interval and count % config.frequency == 0
        if is_due and not isinstance(config.scheduler, ReduceLROnPlateau):
            module.lr_scheduler_step(config.scheduler, None)
