"""The scale of a `torch.amp.GradScaler` in a probe: each pass differentiates a scaled loss, methods see true gradients.

A probe hands the scaled loss to autograd, so that gradients of float16 layers do not underflow, and divides the
gradients by the scale before the method uses them. `p.grad` is scaled again until `scaler.unscale_` or `scaler.step`,
as for torch's optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from bsam.modules import LossFunction, checked_loss
from bsam.optim.probing import Gradients, Prober, Slot, Tally
from bsam.torch_private import scaler_round, scaler_stage

__all__ = ["Scaling"]


class Scaling:
    """The part of a `GradScaler` in the probes of one step.

    Args:
        scaler: The scaler.
        device: The device of the parameters.
    """

    def __init__(self, scaler: GradScaler, device: torch.device) -> None:
        self.scaler = scaler
        self.scale: Tensor = scaler.scale(torch.ones((), device=device))  # stays on the device
        self._round = scaler_round(scaler)

    @classmethod
    def of(cls, scaler: GradScaler | None, parameters: Sequence[Tensor]) -> Scaling | None:
        """Return the part of a scaler, or None if there is no scaler, or it is not enabled."""
        enabled = scaler is not None and scaler.is_enabled() and len(parameters) > 0
        return cls(scaler, parameters[0].device) if scaler is not None and enabled else None

    def inverse(self, device: torch.device) -> Tensor:
        """1 / scale."""
        return self.scale.double().reciprocal().float().to(device)

    def unscaled(self, losses: list[Tensor]) -> list[Tensor]:
        """Divide losses by the scale."""
        return [loss * self.inverse(loss.device) for loss in losses]

    def factor(self, finite: Tensor) -> Tensor:
        """Return the factor of the gradient in `.grad`: infinite if a number of a probe is not finite.

        The scaler looks at `.grad` only. So it sees every overflow, skips the step, and lowers the scale.
        """
        return torch.where(finite.to(self.scale.device), self.scale, torch.inf)

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether the scaler has divided the gradients of the optimizer by the scale."""
        return scaler_stage(self.scaler, optimizer) == "UNSCALED"

    def is_over(self, optimizer: Optimizer) -> bool:
        """Whether the scaler is done with the gradients: `scaler.step` has skipped the step."""
        return scaler_round(self.scaler) is not self._round or scaler_stage(self.scaler, optimizer) == "STEPPED"

    def loss_function(self, loss_fn: LossFunction, parameters: Sequence[Tensor]) -> ScaledLoss:
        """Return a loss function that returns scaled losses."""
        return ScaledLoss(loss_fn, self.scale, parameters)

    def prober(self, prober: Prober) -> Prober:
        """Return a prober whose method sees unscaled gradients."""
        return UnscalingProber(prober, self)


class ScaledLoss:
    """A loss function times a scale."""

    def __init__(self, loss_fn: LossFunction, scale: Tensor, parameters: Sequence[Tensor]) -> None:
        self._loss_fn, self._scale, self._parameters = loss_fn, scale, parameters

    @property
    def __code__(self) -> CodeType | LossFunction:  # tells loss functions apart
        return getattr(self._loss_fn, "__code__", self._loss_fn)

    def __call__(self, *batch: Any) -> Tensor:
        """Return the scaled loss."""
        loss = checked_loss(self._loss_fn(*batch))
        if any(parameter.grad is not None for parameter in self._parameters):
            raise ValueError(
                "the closure called backward() itself, on a loss that is not scaled. With scaler= it must return the "
                "loss: probe() scales it and calls backward()."
            )
        return loss * self._scale.to(loss.device)


class UnscalingProber:
    """A prober that divides gradients by the scale before the method uses them."""

    def __init__(self, prober: Prober, scaling: Scaling) -> None:
        self._prober, self._scaling = prober, scaling

    def _option(self, name: str) -> Any:
        return self._prober._option(name)

    def _theta(self, slot: Slot, split: int) -> Tensor:
        return self._prober._theta(slot, split)

    def _probe(self, slots: list[Slot], theta: Iterable[Tensor], grad_at: Gradients, tally: Tally) -> None:
        self._prober._probe(slots, theta, Unscaled(grad_at, self._scaling), tally)


class Unscaled:
    """Gradients divided by the scale, see `bsam.optim.probing.Gradients`."""

    def __init__(self, grad_at: Gradients, scaling: Scaling) -> None:
        self._grad_at, self._scaling = grad_at, scaling

    def __call__(self, weights: Iterable[Tensor]) -> list[Tensor]:
        """The gradients, one per slot."""
        return [g.mul_(self._scaling.inverse(g.device)) for g in self._grad_at(weights)]

    def with_weights(self, weights: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients, and the weights at which they were computed."""
        gradients, at = self._grad_at.with_weights(weights)
        return [g.mul_(self._scaling.inverse(g.device)) for g in gradients], at

    def moments(self, weights: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return mean and mean square of the examples' gradients."""
        means, squares = self._grad_at.moments(weights)
        inverse = self._scaling.inverse
        return [m.mul_(inverse(m.device)) for m in means], [s.mul_(inverse(s.device).square()) for s in squares]

    def per_split(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Apply a function of one sub-batch's tensors to each sub-batch."""
        return self._grad_at.per_split(function)
