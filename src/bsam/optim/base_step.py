"""Steps of a torch optimizer with given gradients: for the base optimizer of SAM, and beside a compiled step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bsam.modules import restored_on_failure
from bsam.torch_private import has_step_hooks

__all__ = ["BaseStep", "clear_gradients", "evaluates_loss"]


def evaluates_loss(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step needs a closure, as that of LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def clear_gradients(optimizer: Optimizer) -> None:
    """Set every `.grad` to None, so that the optimizer does not step with gradients of an earlier pass."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


class BaseStep:
    """Steps an optimizer with given gradients.

    On CUDA, SGD, Adam and AdamW can use their fused steps, which skip a step without waiting for the device.

    Args:
        optimizer: The optimizer.
        hooks: Whether its hooks run. torch's global hooks run once, for the step of the method around it.
    """

    def __init__(self, optimizer: Optimizer, *, hooks: bool) -> None:
        self._optimizer, self._hooks = optimizer, hooks
        self._seen: tuple[Any, Any] = (None, None)
        self._times_loaded = 0

    # ------------------------------------------------------------------ in the loop

    def or_nothing(self, gradients: list[tuple[Tensor, Tensor | None]]) -> None:
        """Step with the gradients of some parameters; a step that raises leaves options and state unchanged.

        All other parameters have no gradient during the step, and their own `.grad` again afterwards.
        """
        given = {parameter for parameter, _ in gradients}
        groups = self._optimizer.param_groups
        idle = [(p, p.grad) for group in groups for p in group["params"] if p not in given]
        try:
            for parameter, gradient in (*((p, None) for p, _ in idle), *gradients):
                parameter.grad = gradient
            with restored_on_failure(_StateSnapshot(self._optimizer)):
                self._step()
        finally:
            for parameter, grad in idle:
                parameter.grad = grad

    def make_state(self) -> None:
        """Let the optimizer make its state, by a step with the gradients of zeros and the learning rates 0 in place.

        Where the optimizer counts steps, the count is 0 again afterwards: so far no step was taken.
        """
        groups = self._optimizer.param_groups
        decays = [group.get("weight_decay") for group in groups]
        try:
            for group in groups:
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
            self._step()
        finally:
            for group, decay in zip(groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay
        for state in self._optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].zero_()

    # ------------------------------------------------------------------ beside a compiled step

    def __call__(self, gradients: list[tuple[Tensor, Tensor]], refused: Tensor) -> None:
        """Step with the gradients of some parameters, unless `refused` is 1.

        Args:
            gradients: Parameters and their gradients.
            refused: 0-dim, 0 or 1, on the device.
        """
        base = self._optimizer
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
        """Return all that a captured step depends on, except the learning rate; None if it must not be captured."""
        base = self._optimizer
        hooks = has_step_hooks(base)  # run in Python, in every step
        if device.type != "cuda" or hooks or not self._fuse(device) or self._starts() or not base.state:
            return None
        if self._seen[0] is not base.state or self._seen[1] is not base.param_groups:  # another state was loaded
            self._seen, self._times_loaded = (base.state, base.param_groups), self._times_loaded + 1
        options = [tuple((k, v) for k, v in g.items() if k not in ("params", "lr")) for g in base.param_groups]
        return self._times_loaded, *options

    def written(self) -> list[Tensor]:
        """Return all tensors that a step writes to."""
        tensors = [t for state in self._optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return [*(p for group in self._optimizer.param_groups for p in group["params"]), *tensors]

    @contextmanager
    def reading(self, rates: Tensor) -> Iterator[None]:
        """Inside the block, the step reads its learning rates from the device, one per group, and can be captured."""
        saved = [dict(group) for group in self._optimizer.param_groups]
        for group, rate in zip(self._optimizer.param_groups, rates.unbind(), strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, before in zip(self._optimizer.param_groups, saved, strict=True):
                group.update(before)

    def _step(self) -> None:
        if self._hooks:
            self._optimizer.step()
        else:
            step = type(self._optimizer).step
            getattr(step, "__wrapped__", step)(self._optimizer)

    def _starts(self) -> bool:
        """Whether momenta are missing. A fused step of SGD that is skipped would leave them uninitialised."""
        return any(
            self._optimizer.state.get(parameter, {}).get("momentum_buffer") is None
            for group in self._optimizer.param_groups
            if group.get("momentum")
            for parameter in group["params"]
            if parameter.grad is not None
        )

    def _fuse(self, device: torch.device) -> bool:
        """Switch to fused steps on CUDA, also after a state was loaded; return whether the optimizer uses them."""
        base = self._optimizer
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


class _StateSnapshot:
    """Options and state of an optimizer, to be restored in place if its step raises."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]
        self._state = optimizer.state
        self._saved = {
            parameter: {
                key: (value, value.clone() if isinstance(value, Tensor) else copy.deepcopy(value))
                for key, value in state.items()
            }
            for parameter, state in optimizer.state.items()
            if isinstance(state, dict)  # hooks of the user may leave anything there
        }

    def restore(self) -> None:
        """Put everything back, into the same tensors."""
        for group, before in self._groups:
            group.clear()
            group.update(before)
        for parameter in [p for p, state in self._state.items() if isinstance(state, dict) and p not in self._saved]:
            del self._state[parameter]
        for parameter, values in self._saved.items():
            state = self._state[parameter]
            state.clear()
            for key, (value, copied) in values.items():
                state[key] = value.copy_(copied) if isinstance(value, Tensor) else copied
