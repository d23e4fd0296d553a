"""Lightning's callbacks: one that keeps steps in two halves whole, and one that saves the posterior."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim.lr_scheduler import ReduceLROnPlateau

from bsam.torch_private import pytree

__all__ = ["PosteriorCheckpoint", "StepGuard", "accumulating", "check_setup"]

_NOT_CALLED = (
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "backward",
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
)
"""Methods of a LightningModule that Lightning calls in automatic optimization only."""


@contextlib.contextmanager
def accumulating(trainer: lightning.Trainer | None, batches: int) -> Iterator[None]:
    """Let `trainer.estimated_stepping_batches` count steps while optimizer and schedulers are made."""
    if trainer is None:
        yield
        return
    before, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, batches
    try:
        yield
    finally:
        trainer.accumulate_grad_batches = before


class StepGuard(Callback):
    """Drops pending probes where training is stopped between them, before other callbacks save a checkpoint."""

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Refuse what Lightning does in automatic optimization only."""
        if stage != "fit" or pl_module.automatic_optimization:
            return
        if any(getattr(callback, "_train_time_interval", None) for callback in trainer.checkpoint_callbacks):
            raise ValueError("train_time_interval= would save nothing: write every_n_train_steps= in its place.")
        for name in _NOT_CALLED:
            if is_overridden(name, pl_module):
                raise ValueError(
                    f"{type(pl_module).__name__}.{name}() would not be called, because a step computes several "
                    "gradients. Read or change the gradient that will be applied in on_before_optimizer_step(), clip "
                    "it by super().__init__(gradient_clip_val=...), and change the learning rate by a scheduler."
                )

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Tell checkpoints that the step from which a run is resumed is saved already."""
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                callback._last_global_step_saved = trainer.global_step

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Drop pending probes if training was stopped between two micro-batches."""
        for optimizer in trainer.optimizers:
            getattr(optimizer, "discard", lambda: None)()

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """Drop pending probes if training failed between two micro-batches."""
        self.on_train_epoch_end(trainer, pl_module)


def check_setup(trainer: lightning.Trainer, configured: Any) -> None:
    """Raise if there is no `StepGuard`, or `configure_optimizers` has left a `ReduceLROnPlateau` to Lightning.

    Args:
        trainer: The trainer, before training: the search for a learning rate takes its callbacks away.
        configured: The result of `configure_optimizers`.
    """
    if not any(isinstance(callback, StepGuard) for callback in trainer.callbacks):
        raise ValueError("write [*super().configure_callbacks(), ...] in configure_callbacks().")
    found = pytree.tree_flatten_with_path(configured)[0]
    monitors = [leaf for path, leaf in found if leaf and getattr(path[-1] if path else None, "key", None) == "monitor"]
    if monitors and any(isinstance(leaf, ReduceLROnPlateau) for _, leaf in found):
        raise ValueError(
            f"ReduceLROnPlateau with monitor={monitors[0]!r} would not be stepped. Leave monitor= out, and write in "
            f"on_train_epoch_end(): self.lr_schedulers().step(self.trainer.callback_metrics[{monitors[0]!r}])."
        )


class PosteriorCheckpoint(ModelCheckpoint):
    """A `ModelCheckpoint` that writes the posterior beside each checkpoint, `last.safetensors` beside `last.ckpt`."""

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Refuse averages of the weights over the steps: the posterior is around other weights."""
        averaging = getattr(callbacks, "WeightAveraging", ())  # Lightning 2.5 has none
        if any(isinstance(callback, averaging) for callback in trainer.callbacks):
            raise ValueError(
                "PosteriorCheckpoint beside a WeightAveraging callback: the checkpoint would hold averaged weights, "
                "and the posterior is around the trained ones. Leave WeightAveraging out, or write ModelCheckpoint."
            )
        super().setup(trainer, pl_module, stage)

    def _save_checkpoint(self, trainer: lightning.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        if trainer.is_global_zero:
            trainer.optimizers[0].posterior(trainer.lightning_module).save(_beside(filepath))

    def _remove_checkpoint(self, trainer: lightning.Trainer, filepath: str) -> None:
        super()._remove_checkpoint(trainer, filepath)
        _beside(filepath).unlink(missing_ok=True)

    @staticmethod
    def _link_checkpoint(trainer: lightning.Trainer, filepath: str, linkpath: str) -> None:
        ModelCheckpoint._link_checkpoint(trainer, filepath, linkpath)
        ModelCheckpoint._link_checkpoint(trainer, str(_beside(filepath)), str(_beside(linkpath)))


def _beside(filepath: str) -> Path:
    return Path(filepath).with_suffix(".safetensors")
