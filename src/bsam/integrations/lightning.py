"""Lightning: a `LightningModule` that probes every batch; Lightning takes the step, with its own hooks and precision.

It optimizes manually inside. In automatic optimization, logs and metrics would see each batch several times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import lightning
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import Metric

from bsam.batches import has_examples, num_examples
from bsam.executor import refuse_under_vmap
from bsam.integrations.fabric import probe_with
from bsam.integrations.lightning_callbacks import PosteriorCheckpoint, StepGuard, accumulating, check_setup
from bsam.modules import preserved_attributes
from bsam.optim import options
from bsam.torch_private import pytree

__all__ = ["LightningModule", "PosteriorCheckpoint"]


class LightningModule(lightning.LightningModule):
    """A `lightning.LightningModule` that trains with an optimizer of bsam; write `training_step` as always.

    `self.log` and metrics see the first pass over each example only; for other side effects ask `self.first_pass`.
    Schedulers step as in automatic optimization, except `ReduceLROnPlateau`, which you step yourself.

    Args:
        accumulate_grad_batches: Number of micro-batches per step. The last batch of an epoch always steps.
        gradient_clip_val: Largest norm, or value, of the gradient that is applied; 0 does not clip.
        gradient_clip_algorithm: "norm" or "value".
    """

    def __init__(
        self, *, accumulate_grad_batches: int = 1, gradient_clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        super().__init__()
        options.count("accumulate_grad_batches", accumulate_grad_batches, "It is the number of micro-batches per step.")
        options.one_of("gradient_clip_algorithm", gradient_clip_algorithm, ("norm", "value"))
        options.non_negative("gradient_clip_val", gradient_clip_val or 0.0)
        self.automatic_optimization, self.first_pass = False, True
        self._accumulate, self._clip = accumulate_grad_batches, (gradient_clip_val, gradient_clip_algorithm)
        self._is_probing = self._is_waiting = False  # inside a probe; between the micro-batches of a step
        self._num_examples: int | None = None  # of the present part of a batch, where they can be counted

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        training_step, configure_optimizers = cls.training_step, cls.configure_optimizers  # or those of a mixin

        @functools.wraps(training_step)
        def train(self: LightningModule, batch: Any, *rest: Any) -> Any:
            trainer = self._trainer
            if self.automatic_optimization or self._is_probing or trainer is None or trainer.fit_loop._skip_backward:
                return training_step(self, batch, *rest)
            return self._train(lambda part: training_step(self, part, *rest), batch)

        @functools.wraps(configure_optimizers)
        def configure(self: LightningModule) -> Any:
            with accumulating(self._trainer, self._accumulate):
                configured = configure_optimizers(self)
            if not self.automatic_optimization and self._trainer is not None:
                check_setup(self._trainer, configured)
            return configured

        if training_step is not lightning.LightningModule.training_step:
            cls.training_step = train
        if configure_optimizers is not lightning.LightningModule.configure_optimizers:
            cls.configure_optimizers = configure

    def probe_weight(self, batch: Any) -> float | None:
        """Return the number of terms in the mean loss of a batch. Override it; None is the number of examples."""
        if (self._accumulate > 1 or self.trainer.world_size > 1) and not has_examples(batch):
            raise ValueError(
                f"the batch is of type {type(batch).__name__}, and its examples cannot be counted: override "
                f"probe_weight(batch) in {type(self).__name__}, and return their number."
            )
        return None

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value as Lightning does, in the first pass only. The examples of the present part weigh it."""
        refuse_under_vmap([value])
        if self._num_examples is not None and kwargs.get("batch_size") is None:
            kwargs["batch_size"] = self._num_examples
        if self.first_pass:
            super().log(name, value, *args, **kwargs)

    def configure_callbacks(self) -> Any:
        """Refuse arguments of the Trainer that would act on each pass of a step; return a `StepGuard`."""
        for name, default in (("accumulate_grad_batches", 1), ("gradient_clip_val", None)):
            given = f"{name}={getattr(self.trainer, name)}"
            if getattr(self.trainer, name) not in (default, 0):
                raise ValueError(
                    f"Trainer({given}) would act on each pass of a step: leave it out of the Trainer, and write "
                    f"super().__init__({given}) in {type(self).__name__}, with automatic_optimization = False."
                )
        return [StepGuard()]

    def on_validation_model_zero_grad(self) -> None:
        """Clear the gradients before a validation, unless they are those of pending probes."""
        if not self._is_waiting:
            super().on_validation_model_zero_grad()

    def _train(self, training_step: Callable[[Any], Any], batch: Any) -> Any:
        """Probe a batch, and step if it is the last one of its step; return what `training_step` returned first."""
        strategy, optimizer = self.trainer.strategy, self.optimizers(use_pl_optimizer=False)
        metrics = [module for module in self.modules() if isinstance(module, Metric)]
        seen: list[tuple[Any, Any]] = []

        def loss_fn(part: Any) -> Any:
            refuse_under_vmap(pytree.tree_leaves(part) if metrics else ())
            self.first_pass = not any(part is each for each, _ in seen)  # a part is the same object in all its passes
            self._num_examples = num_examples(part) if has_examples(part) else None
            with preserved_attributes(() if self.first_pass else metrics):
                output = training_step(part)
            refuse_under_vmap(output.values() if isinstance(output, Mapping) else ())
            if self.first_pass:
                seen.append((part, output))
            return output["loss"] if isinstance(output, Mapping) else output

        self._is_probing = True
        try:
            loss = probe_with(strategy, optimizer, loss_fn, batch, weight=self.probe_weight(batch))
        finally:
            self._is_probing, self.first_pass, self._num_examples = False, True, None
        self._step()
        return {**seen[0][1], "loss": loss} if isinstance(seen[0][1], Mapping) else loss

    def _step(self) -> None:
        """Let Lightning step after the last batch of a step, and step the schedulers that are due."""
        trainer, number = self.trainer, self.trainer.fit_loop.batch_idx + 1
        is_last = trainer.is_last_batch or number >= trainer.num_training_batches
        self._is_waiting = not is_last and number % self._accumulate > 0
        if not self._is_waiting:
            with trainer.optimizers[0].register_step_pre_hook(self._before_step):
                self.optimizers().step()
        due = {"step": not self._is_waiting and number, "epoch": is_last and trainer.current_epoch + 1}
        for config in trainer.lr_scheduler_configs:
            count = due[config.interval]
            if count and count % config.frequency == 0 and not isinstance(config.scheduler, ReduceLROnPlateau):
                self.lr_scheduler_step(config.scheduler, None)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run Lightning's closure, which calls its hooks, then clip; the step itself gets no closure."""
        kwargs.get("closure", lambda: None)()
        if self._clip[0]:
            clip = nn.utils.clip_grad_norm_ if self._clip[1] == "norm" else nn.utils.clip_grad_value_
            clip([p for group in optimizer.param_groups for p in group["params"]], self._clip[0])
        return args[:1], {}
