"""Posteriors next to Lightning's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.plugins import CheckpointIO

__all__ = ["SavePosterior"]


class SavePosterior(lightning.Callback):
    """Writes the posterior next to each checkpoint: `last.safetensors` belongs to `last.ckpt`.

    `bsam.load_posterior` reads the file. When Lightning removes a checkpoint, its posterior is removed too. The folder
    must be on this machine.
    """

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Let the trainer write posteriors."""
        if stage == "fit":
            trainer.strategy.checkpoint_io = _WithPosteriors(trainer.strategy.checkpoint_io, pl_module)

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Give the trainer back its own way to write checkpoints."""
        if isinstance(trainer.strategy.checkpoint_io, _WithPosteriors):
            trainer.strategy.checkpoint_io = trainer.strategy.checkpoint_io.inner


class _WithPosteriors(CheckpointIO):
    """Writes and removes checkpoints and their posteriors. Lightning calls it on the first rank only."""

    def __init__(self, inner: CheckpointIO, model: lightning.LightningModule) -> None:
        self.inner, self._model = inner, model

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        posterior = self._model.optimizers(use_pl_optimizer=False).posterior(self._model)
        self.inner.save_checkpoint(checkpoint, path, storage_options)  # makes the folder
        posterior.save(_beside(path))

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.load_checkpoint(*args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)
        _beside(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        self.inner.teardown()


def _beside(path: Any) -> Path:
    """Return the path of the posterior of a checkpoint."""
    return Path(path).with_suffix(".safetensors")
