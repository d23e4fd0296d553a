"""Transformers: a `Trainer` whose training step probes a micro-batch, with `TrainingArguments` as always.

transformers' own training step calls `backward()` once per micro-batch, at the present weights. The optimizers here
need gradients at other weights too, so this trainer hands them `compute_loss` as a function. All else is transformers'
own: data, clipping, schedulers, precision, checkpoints, callbacks.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn

from bsam.batches import num_examples
from bsam.integrations.accelerate import probe, unwrap_optimizer
from bsam.optim.base import ProbingOptimizer
from bsam.posterior import Posterior

__all__ = ["ProbingTrainer", "Trainer"]


class ProbingTrainer:
    """The training step of `Trainer`, for other trainers: `class My(ProbingTrainer, Seq2SeqTrainer)`."""

    def training_step(self: Any, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Probe a micro-batch.

        Args:
            model: The prepared model.
            inputs: The micro-batch.
            num_items_in_batch: The number of labels in all micro-batches of the step, where transformers counts them.

        Returns:
            The loss of the first pass, as transformers adds it up over micro-batches for the log.
        """
        model.train()
        inputs = self._prepare_inputs(inputs)
        total = own = num_items_in_batch
        weight, share = None, 1 / self.current_gradient_accumulation_steps
        if own is None or share < 1 or self.accelerator.num_processes > 1:
            own = self._get_num_items_in_batch([inputs], self.args.device)
        told = getattr(self, "loss_is_scaled_for_ga", None)  # the first releases of transformers 5 do not have it
        if own is not None and (self._counts_items() if told is None else told):
            weight = float(self.accelerator.reduce(torch.as_tensor(own).double(), "mean"))
            if not weight:
                return _no_loss(total, inputs)
            share = own / (own if total is None else total)
        elif told:
            weight = 1.0

        def loss_fn(part: dict[str, Any]) -> Tensor:
            items = total if told else own
            if items is not None and part is not inputs:
                # A part counts by its examples. Divided by this share of the labels, each label counts once.
                items = items * (num_examples(part) / num_examples(inputs))
            with self.compute_loss_context_manager():
                loss: Tensor = self.compute_loss(model, dict(part), num_items_in_batch=items)
            return loss / share if told else loss  # the mean over the micro-batch

        loss = probe(self.accelerator, model, self.optimizer, loss_fn, inputs, weight=weight)
        steps = self.args.torch_empty_cache_steps
        if steps is not None and self.state.global_step % steps == 0:
            clear_device_cache()
        in_step: Tensor = loss * share
        return in_step

    def create_optimizer(self: Any, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the optimizer that was given, or make it of `optimizer_cls_and_kwargs`.

        One parameter group has all trained parameters; with `TrainingArguments(weight_decay=...)` there are
        transformers' two groups, for base optimizers that know this option.
        """
        self._check_setup()
        given = self.optimizer_cls_and_kwargs
        if self.optimizer is None and given is None:
            raise ValueError(
                "this trainer needs an optimizer of bsam: write Trainer(..., optimizers=(bsam.BSAM(model.parameters(), "
                "lr=0.1, num_data=len(train_set)), None)), or with model_init= "
                "Trainer(..., optimizer_cls_and_kwargs=(bsam.BSAM, {'lr': 0.1, 'num_data': len(train_set)}))."
            )
        self._drop_probes()  # an earlier training was interrupted between two micro-batches
        if self.optimizer is None and not self.args.weight_decay:
            trained = [p for p in (self.model if model is None else model).parameters() if p.requires_grad]
            self.optimizer = given[0](trained, **given[1])
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)  # type: ignore[misc]
        return optimizer

    def posterior(self: Any) -> Posterior:
        """Return the learned distribution over the weights of the model."""
        if self.optimizer is None:
            raise RuntimeError("there is no optimizer yet: call train() first, or write Trainer(..., optimizers=...).")
        optimizer = self.optimizer
        own = optimizer if isinstance(optimizer, ProbingOptimizer) else unwrap_optimizer(optimizer)
        return own.posterior(self.model)

    def _drop_probes(self: Any) -> None:
        getattr(getattr(self.optimizer, "optimizer", self.optimizer), "discard", lambda: None)()

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        """Save the state; training that was stopped between two micro-batches is resumed at the first of them."""
        if self.control.should_training_stop:
            self._drop_probes()
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _check_setup(self: Any) -> None:
        """Raise if the arguments ask for something that no probe can do."""
        if self.args.n_gpu > 1:
            raise ValueError(
                f"one process drives {self.args.n_gpu} GPUs (nn.DataParallel): start one process per GPU, "
                f"torchrun --nproc-per-node={self.args.n_gpu} script.py, or set CUDA_VISIBLE_DEVICES=0."
            )
        if self.accelerator.parallelism_config is not None:
            raise ValueError("parallelism_config= shards the model, and no probe can perturb it: leave it out.")
        if self.args.load_best_model_at_end and self.args.save_only_model:
            raise ValueError(
                "load_best_model_at_end=True with save_only_model=True would leave the best weights with the last "
                "precision: write save_only_model=False."
            )

    def _counts_items(self: Any) -> bool:
        """Whether a loss is divided by the number of items that it is given, as transformers sees it."""
        return bool(self.model_accepts_loss_kwargs or self.compute_loss_func is not None)

    def _load_best_model(self: Any) -> None:
        """Load the best weights, and the state of the optimizer that belongs to them."""
        super()._load_best_model()  # type: ignore[misc]
        self._load_optimizer_and_scheduler(self.state.best_model_checkpoint)


class Trainer(ProbingTrainer, transformers.Trainer):
    """A `transformers.Trainer` that trains with an optimizer of bsam.

    `gradient_accumulation_steps`, `max_grad_norm`, `bf16`, `fp16` and all other `TrainingArguments` keep their meaning.
    Where transformers counts the labels of a step (`num_items_in_batch`), a micro-batch counts by its number of labels:
    tokens, for a language model. `num_data` of the optimizer then counts tokens too.

    Args:
        args: As for `transformers.Trainer`, with `optimizers=(optimizer, scheduler_or_None)`, or
            `optimizer_cls_and_kwargs=(bsam.BSAM, {...})`.
    """


def _no_loss(num_items_in_batch: Tensor | int | None, inputs: dict[str, Any]) -> Tensor:
    """Return the loss of a micro-batch whose labels are all ignored: it adds nothing to the step."""
    if not num_items_in_batch:
        raise ValueError("all labels of a step are -100, so there is no loss: drop such examples from the data.")
    return torch.zeros((), device=inputs["labels"].device)
