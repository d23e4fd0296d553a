"""Lightning: a `LightningModule` whose `training_step` is the loss function of a step.

The class optimizes manually inside: every batch is probed, and Lightning takes the step, with its own hooks, precision
and `global_step`. In automatic optimization, logs and metrics would see each batch several times.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import lightning
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torchmetrics import Metric

from bsam.integrations.lightning_checkpoints import SavePosterior
from bsam.integrations.lightning_checks import check_arguments, check_optimizer
from bsam.integrations.lightning_step import step_schedulers, take_step
from bsam.integrations.passes import Passes, refuse_transformed

__all__ = ["LightningModule", "SavePosterior"]


class LightningModule(lightning.LightningModule):
    """A `lightning.LightningModule` that trains with an optimizer of bsam; write `training_step` as always.

    `self.log` and metrics see the first pass over each example only; for other side effects ask `self.first_pass`.
    Schedulers step as in automatic optimization, except `ReduceLROnPlateau`, which you step yourself.

    Args:
        accumulate_grad_batches: Number of micro-batches per step. The last batch of an epoch always steps.
        gradient_clip_val: Largest norm, or value, of the gradient that is applied.
        gradient_clip_algorithm: "norm" or "value".
        join_micro_batches: Whether the micro-batches of a step share one noise and one perturbation, as a single large
            batch would. By default they are further splits.
    """

    def __init__(
        self,
        *,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        join_micro_batches: bool = False,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._accumulate, self._join = accumulate_grad_batches, join_micro_batches
        if accumulate_grad_batches < 1:
            raise ValueError(f"accumulate_grad_batches={accumulate_grad_batches}: it must be a positive number.")
        clips: Any = {
            "norm": functools.partial(clip_grad_norm_, max_norm=gradient_clip_val),  # type: ignore[arg-type]
            "value": functools.partial(clip_grad_value_, clip_value=gradient_clip_val),  # type: ignore[arg-type]
        }
        if gradient_clip_algorithm not in clips:
            raise ValueError(f"gradient_clip_algorithm={gradient_clip_algorithm!r}: it must be 'norm' or 'value'.")
        self._clip = None if gradient_clip_val is None else clips[gradient_clip_algorithm]
        self._is_waiting = False  # probes are pending
        self._passes: Passes | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        step = cls.training_step  # of this class, or of a mixin
        if step is not lightning.LightningModule.training_step and not hasattr(step, "is_probed"):
            cls.training_step = _probed(step)

    @property
    def first_pass(self) -> bool:
        """Whether `training_step` sees its examples for the first time."""
        return self._passes is None or self._passes.is_first

    def probe_weight(self, batch: Any) -> float | None:
        """Return the number of terms in the mean loss of a batch. Override it; None is the number of examples."""
        return None

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value as Lightning does, in the first pass only."""
        refuse_transformed(value)
        if self.first_pass:
            super().log(name, value, *args, **kwargs)

    def configure_callbacks(self) -> Any:
        """Refuse arguments of the Trainer that would act on each pass of a step; there are no callbacks."""
        check_arguments(self.trainer, type(self).__name__)
        return super().configure_callbacks()

    def on_validation_model_zero_grad(self) -> None:
        """Clear the gradients before a validation, unless probes are pending."""
        if not self._is_waiting:
            super().on_validation_model_zero_grad()

    def on_train_epoch_end(self) -> None:
        """Drop pending probes if training was stopped between two micro-batches: a checkpoint may follow."""
        if self._is_waiting:
            self.optimizers(use_pl_optimizer=False).discard()

    def _train(self, training_step: Callable[..., Any], batch: Any, rest: tuple[Any, ...]) -> Any:
        """Probe a batch, and step if it is the last one of its step; return what `training_step` returned first."""
        trainer, optimizer = self.trainer, self.optimizers(use_pl_optimizer=False)
        weight = self.probe_weight(batch)
        averages = check_optimizer(optimizer, trainer, has_weight=weight is not None)
        metrics = [module for module in self.modules() if isinstance(module, Metric)]
        passes = Passes(lambda part: training_step(self, part, *rest), metrics)

        def loss_fn(part: Any) -> Tensor:
            self._passes = passes  # of an earlier micro-batch, when its second pass has waited
            loss = passes.loss(part)
            if averages:  # by DistributedDataParallel, which must be told
                trainer.strategy.pre_backward(loss)
            return loss

        number = trainer.fit_loop.batch_idx + 1
        is_last = trainer.is_last_batch or number >= trainer.num_training_batches
        steps = is_last or number % self._accumulate == 0
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        try:
            loss = optimizer.probe(loss_fn, batch, weight=weight, last=steps or not self._join, scaler=scaler)
        finally:
            self._passes = None
        self._is_waiting = not steps
        if steps:
            take_step(self, optimizer, self._clip)
            step_schedulers(self, "step", trainer.global_step)
        if is_last:
            step_schedulers(self, "epoch", trainer.current_epoch + 1)
        return {**passes.output, "loss": loss} if isinstance(passes.output, Mapping) else loss


def _probed(training_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a training step that probes its batch and steps, where the trainer calls it."""
    if "dataloader_iter" in inspect.signature(training_step).parameters:
        raise TypeError("training_step must take a batch, not dataloader_iter: each pass would see other examples.")

    @functools.wraps(training_step)
    def train(self: LightningModule, batch: Any, *rest: Any) -> Any:
        if self.automatic_optimization or self._passes is not None or self._trainer is None:
            return training_step(self, batch, *rest)
        return self._train(training_step, batch, rest)

    train.is_probed = True  # type: ignore[attr-defined]
    return train
