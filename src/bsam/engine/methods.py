"""What `TrainStep` asks of an optimizer, and torch's own optimizers in that shape."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from bsam.batch_norm import BufferSnapshot, all_buffers
from bsam.gradients import LossFunction, batch_gradient
from bsam.interrupts import deferred
from bsam.optim.base import ProbingOptimizer, all_finite, make_slots
from bsam.optim.probing import Gradients, Slot, Tally
from bsam.optim.sam import SAM

__all__ = ["Method", "Plain", "TorchStep", "clear_gradients", "method_of"]


class Method(Protocol):
    """An optimizer that probes and updates: see `ProbingOptimizer`, whose members these are."""

    process_group: dist.ProcessGroup | None
    _skipped: Tensor | None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of parameters and their options."""

    @property
    def skipped_steps(self) -> int:
        """How many steps were left out."""

    def step(self, closure: LossFunction, *batch: Any) -> Tensor:
        """Take a step in a loop over the splits."""

    def _option(self, name: str) -> Any: ...

    def _slots(self) -> list[Slot]: ...

    def _check_batch(self, batch: tuple[Any, ...]) -> None: ...

    def _refuse_if_away(self, what: str) -> None: ...

    def _warn_of_unseen(self, slots: list[Slot], stacklevel: int) -> None: ...

    def _probe(self, slots: list[Slot], theta: Iterable[Tensor], grad_at: Gradients, tally: Tally) -> None: ...


class Plain:
    """One of torch's optimizers, in the shape of those that probe: one gradient, at the weights."""

    process_group: dist.ProcessGroup | None = None

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(f"{type(optimizer).__name__} evaluates the loss by itself: call its step in a loop.")
        self.optimizer, self._module = optimizer, module
        self._skipped: Tensor | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own, which loading a state replaces."""
        return self.optimizer.param_groups

    @property
    def skipped_steps(self) -> int:
        """How many steps were left out."""
        return 0 if self._skipped is None else int(self._skipped)

    def step(self, closure: LossFunction, *batch: Any) -> Tensor:
        """One step without a trace, that raises if a number is not finite, before anything has changed."""
        with deferred(), torch.no_grad():
            parameters = [slot.parameter for slot in self._slots()]
            buffers = BufferSnapshot(all_buffers(self._module))
            clear_gradients(self.optimizer)
            try:
                gradients, loss = batch_gradient(parameters, closure, batch)
                if not all_finite([loss, *(g for g in gradients if g is not None)]):
                    raise FloatingPointError(
                        "a loss or gradient is not finite. Weights and state are unchanged. Lower lr."
                    )
            except BaseException:
                buffers.restore()
                raise
            self.optimizer.step()
            return loss

    def _option(self, name: str) -> Any:
        return {"splits": 1, "batch_norm": "first_split", "max_grad_norm": None, "nonfinite": "raise"}[name]

    def _slots(self) -> list[Slot]:
        return make_slots(self.optimizer, lambda parameter, group: {})

    def _check_batch(self, batch: tuple[Any, ...]) -> None:
        pass

    def _refuse_if_away(self, what: str) -> None:
        pass

    def _warn_of_unseen(self, slots: list[Slot], stacklevel: int) -> None:
        pass  # torch leaves them as they are without a word

    def _probe(self, slots: list[Slot], theta: Iterable[Tensor], grad_at: Gradients, tally: Tally) -> None:
        tally.add("gradient", grad_at(theta))


def method_of(optimizer: Optimizer, module: nn.Module) -> Method:
    """The optimizer itself, or one of torch's in its shape."""
    return optimizer if isinstance(optimizer, ProbingOptimizer) else Plain(optimizer, module)


def clear_gradients(optimizer: Optimizer) -> None:
    """Leave no gradient of an earlier pass: the optimizer would step with it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


class TorchStep:
    """The update of a torch optimizer, alone or below SAM: its own step with gradients that were found elsewhere.

    On CUDA, SGD, Adam and AdamW use their fused steps, which can leave a step out without asking the device.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._base = optimizer.base_optimizer if isinstance(optimizer, SAM) else optimizer
        self._of_sam = isinstance(optimizer, SAM)
        self._seen: tuple[Any, Any] = (None, None)
        self._times_loaded = 0

    def __call__(self, gradients: list[tuple[Tensor, Tensor]], refused: Tensor) -> None:
        """Step with the gradients of some parameters, unless `refused` is 1.

        Args:
            gradients: Parameters and their gradients.
            refused: 0-dim, 0 or 1, on the device.
        """
        base = self._base
        clear_gradients(base)  # also of parameters that are frozen, or not part of the loss
        for parameter, gradient in gradients:
            parameter.grad = gradient
        if not self._fuse(refused.device) or self._starts():
            if not bool(refused):
                self._step()
            return
        base.found_inf, base.grad_scale = refused, None  # type: ignore[attr-defined]
        try:
            self._step()
        finally:
            del base.found_inf, base.grad_scale  # type: ignore[attr-defined]

    def signature(self, device: torch.device) -> tuple[Any, ...] | None:
        """What a captured step depends on, apart from the learning rate; None if this step must not be captured."""
        base = self._base
        hooks = (*base._optimizer_step_pre_hooks, *base._optimizer_step_post_hooks)  # run in Python, in every step
        if device.type != "cuda" or hooks or not self._fuse(device) or self._starts() or not base.state:
            return None
        if self._seen[0] is not base.state or self._seen[1] is not base.param_groups:  # another state was loaded
            self._seen, self._times_loaded = (base.state, base.param_groups), self._times_loaded + 1
        options = [tuple((k, v) for k, v in g.items() if k not in ("params", "lr")) for g in base.param_groups]
        return self._times_loaded, *options

    def state(self) -> list[Tensor]:
        """All that a step writes to."""
        tensors = [t for state in self._base.state.values() for t in state.values() if isinstance(t, Tensor)]
        return [*(p for group in self._base.param_groups for p in group["params"]), *tensors]

    @contextmanager
    def reading(self, rates: Tensor) -> Iterator[None]:
        """Let the learning rates be read from the device, one for each group, and the step be captured."""
        saved = [dict(group) for group in self._base.param_groups]
        for group, rate in zip(self._base.param_groups, rates.unbind(), strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, before in zip(self._base.param_groups, saved, strict=True):
                group.update(before)

    def _step(self) -> None:
        if not self._of_sam:
            self._base.step()
            return
        step = type(self._base).step
        getattr(step, "__wrapped__", step)(self._base)  # without hooks, as in SAM's own step

    def _starts(self) -> bool:
        """Whether there are no momenta yet: SGD's fused step would leave them as the memory was, if it is left out."""
        return any(
            self._base.state.get(parameter, {}).get("momentum_buffer") is None
            for group in self._base.param_groups
            if group.get("momentum")
            for parameter in group["params"]
            if parameter.grad is not None
        )

    def _fuse(self, device: torch.device) -> bool:
        """Whether the optimizer uses its fused step; on CUDA it is made to, also after another state was loaded."""
        base = self._base
        if not isinstance(base, torch.optim.SGD | torch.optim.Adam | torch.optim.AdamW):
            return False
        for group in base.param_groups:
            if group["fused"] or device.type != "cuda":
                continue
            group["fused"], group["foreach"] = True, False
            for parameter in group["params"]:
                step = base.state.get(parameter, {}).get("step")
                if isinstance(step, Tensor):
                    base.state[parameter]["step"] = step.to(device, torch.float32)
        return all(group["fused"] for group in base.param_groups)
