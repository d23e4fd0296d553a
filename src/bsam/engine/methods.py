"""The interface that `TrainStep` needs of an optimizer, and a wrapper of torch's optimizers that has it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from bsam.gradients import batch_gradient
from bsam.interrupts import deferred
from bsam.modules import BufferSnapshot, LossFunction, all_buffers, restored_on_failure
from bsam.optim.arithmetic import all_finite
from bsam.optim.base import ProbingOptimizer
from bsam.optim.base_step import BaseStep, clear_gradients, evaluates_loss
from bsam.optim.checked import slots_of
from bsam.optim.probing import Gradients, Slot, Tally

__all__ = ["Method", "Plain", "method_of"]


class Plain:
    """A torch optimizer with the interface of `ProbingOptimizer`: one gradient, at the present weights."""

    process_group: dist.ProcessGroup | None = None
    rates: tuple[str, ...] = ("lr",)
    per_example = False
    effective_num_data = 1.0

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        if evaluates_loss(optimizer):
            raise ValueError(f"{type(optimizer).__name__} evaluates the loss by itself: call its step in a loop.")
        self._optimizer, self._module = optimizer, module
        self._skipped: Tensor | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups; loading a state replaces them."""
        return self._optimizer.param_groups

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps."""
        return 0 if self._skipped is None else int(self._skipped)

    def step(self, closure: LossFunction, *batch: Any) -> Tensor:
        """Take one eager step; raise before any change if a loss or gradient is not finite."""
        with deferred(), torch.no_grad(), restored_on_failure(BufferSnapshot(all_buffers(self._module))):
            parameters = [slot.parameter for slot in self._slots()]
            clear_gradients(self._optimizer)
            gradients, loss = batch_gradient(parameters, closure, batch)
            if not all_finite([loss, *(g for g in gradients if g is not None)]):
                raise FloatingPointError("a loss or gradient is not finite. Weights and state are unchanged. Lower lr.")
            self._base_step().or_nothing(list(zip(parameters, gradients, strict=True)))
            return loss

    def _option(self, name: str) -> Any:
        return {"splits": 1, "batch_norm": "first_split", "max_grad_norm": None, "nonfinite": "raise"}[name]

    def _fixed(self, group: dict[str, Any]) -> dict[str, Any]:
        return {}  # the torch optimizer reads all options at every step

    def _slots(self) -> list[Slot]:
        return slots_of(self._optimizer, None)

    def _check_batch(self, batch: tuple[Any, ...]) -> None:
        pass

    def _check_changes(self) -> None:
        pass  # torch does not check what is written into groups

    def _refuse_if_away(self, what: str) -> None:
        pass

    def _refuse_if_pending(self, what: str) -> None:
        pass

    def _note_start(self) -> None:
        pass

    def _count_step(self, examples: float) -> None:
        pass  # torch says nothing of its steps

    def _warn_of_unseen(self, slots: list[Slot]) -> None:
        pass  # torch skips them without a warning

    def _state_of(self, slot: Slot) -> dict[str, Tensor]:
        return {}

    def _own(self, slots: list[Slot]) -> None:
        pass

    def _theta(self, slot: Slot, split: int) -> Tensor:
        return slot.mean

    def _noise_precision(self, slot: Slot) -> Tensor | None:
        return None

    def _probe(self, slots: list[Slot], theta: Iterable[Tensor], grad_at: Gradients, tally: Tally) -> None:
        tally.add("gradient", grad_at(theta))

    def _apply(self, slots: list[Slot], averages: dict[str, list[Tensor]], accept: Tensor | None) -> None:
        raise AssertionError("the torch optimizer moves the weights, through _base_step")

    def _base_step(self) -> BaseStep:
        return BaseStep(self._optimizer, hooks=True)


Method = ProbingOptimizer | Plain


def method_of(optimizer: Optimizer, module: nn.Module) -> Method:
    """Return the optimizer itself, or a torch optimizer wrapped in `Plain`."""
    return optimizer if isinstance(optimizer, ProbingOptimizer) else Plain(optimizer, module)
