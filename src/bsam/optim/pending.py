"""Probes that wait for a step: their averages, and the gradients that they left in `.grad`.

Between `probe` and `step`, `p.grad` holds the mean of the gradients that will be applied. Code from outside may change
it there (clipping) or read it (norms, logging): the step applies what it then finds in `p.grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from bsam.modules import BufferSnapshot
from bsam.optim.arithmetic import all_finite
from bsam.optim.leftover import was_left
from bsam.optim.micro_batches import Kept
from bsam.optim.probing import emptied
from bsam.optim.scaling import Scaling
from bsam.shards import local
from bsam.torch_private import is_view

__all__ = ["Pending", "Probed"]

Probed = tuple[list[Tensor], dict[str, list[Tensor]]]
"""The mean loss of each pass, and the averages by name, one tensor per slot."""


@dataclass(frozen=True)
class Pending:
    """The probes since the last step. An object never changes: a further probe makes a new one, or fails."""

    parameters: list[Tensor]
    buffers: BufferSnapshot
    """The model's buffers before the first probe."""
    scaling: Scaling | None = None
    """The part of a `GradScaler`: it multiplies the gradient, here and in `.grad`."""
    probed: Probed = ([], {})
    """Means over all probes."""
    weight: float = 0.0
    """The sum of the probes' weights."""
    seen: list[bool] = field(default_factory=list)
    """Of each parameter, whether a probe left a gradient in `.grad`."""
    num_probes: int = 0
    """Number of sub-batches per split so far; those that wait for their last micro-batch do not count."""
    kept: Kept | None = None
    """Micro-batches that wait for the last one of their sub-batch."""

    def joined(self, probed: Probed, weight: float, seen: list[bool]) -> Pending:
        """Return these probes and one more. The tensors of `probed` belong to the result, or are dropped."""
        losses, averages = probed
        if self.weight:
            share = weight / (self.weight + weight)
            losses = [old + share * (new - old) for old, new in zip(self.probed[0], losses, strict=True)]
            averages = {
                name: [torch.lerp(old, new, share) for old, new in zip(self.probed[1][name], emptied(new), strict=True)]
                for name, new in averages.items()
            }
        return replace(
            self,
            probed=(losses, averages),
            weight=self.weight + weight,
            seen=seen,
            num_probes=self.num_probes + 1,
            kept=None,
        )

    def owned(self) -> Pending:
        """Return these probes with gradients that share no memory: DistributedDataParallel writes into its own."""
        losses, averages = self.probed
        gradients = [g.clone() if is_view(g) else g for g in averages["gradient"]]
        return replace(self, probed=(losses, {**averages, "gradient": gradients}))

    def scale_gradients(self) -> Tensor:
        """Multiply the gradients by the scale, in place, or by infinity if a number is not finite; return which."""
        assert self.scaling is not None
        losses, averages = self.probed
        finite = all_finite([*losses, *(t for tensors in averages.values() for t in tensors)])
        factor = self.scaling.factor(finite)
        for gradient in averages["gradient"]:
            gradient.mul_(factor.to(gradient.device))
        return finite

    def as_in_grad(self, *, unscaled: bool = False) -> Pending:
        """Return these probes with the gradients that `.grad` holds now.

        Args:
            unscaled: Whether a `GradScaler` has unscaled `.grad` since the probes.
        """
        losses, averages = self.probed
        if "gradient" not in averages:
            return self
        scaling = None if unscaled else self.scaling
        gradients = []
        for parameter, average in zip(self.parameters, averages["gradient"], strict=True):
            gradient = _gradient_now(parameter.grad, average)
            gradients.append(gradient if scaling is None else gradient * scaling.inverse(gradient.device))
        return replace(self, probed=(losses, {**averages, "gradient": gradients}))

    def changed_gradients(self) -> list[int]:
        """Return the positions of parameters whose `.grad` is not what the last probe left."""
        grads = [parameter.grad for parameter in self.parameters]
        as_left = [not seen if grad is None else was_left(grad) for grad, seen in zip(grads, self.seen, strict=True)]
        return [i for i, is_left in enumerate(as_left) if not is_left]

    def is_cleared(self) -> bool:
        """Whether `.grad` is None everywhere although a probe left gradients: `model.zero_grad()` was called."""
        return any(self.seen) and all(p.grad is None for p in self.parameters)

    def check_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Raise unless the parameters are those of the probes."""
        same = len(parameters) == len(self.parameters)
        if not (same and all(p is q for p, q in zip(parameters, self.parameters, strict=True))):
            raise RuntimeError(
                "the trained parameters changed after a probe: a parameter was added, frozen or unfrozen. Change "
                "parameters after step(), or call optimizer.discard() first."
            )

    def check_scaler(self, scaler: GradScaler | None, optimizer: Optimizer) -> None:
        """Raise unless a further probe may have this scaler."""
        enabled = scaler if scaler is not None and scaler.is_enabled() else None
        if enabled is not (None if self.scaling is None else self.scaling.scaler):
            raise ValueError("all probes of a step must have the same scaler=, or none.")
        if self.scaling is not None and self.scaling.is_unscaled(optimizer):
            raise RuntimeError(
                "scaler.unscale_(optimizer) was called after a probe: call scaler.step(optimizer) before the next one."
            )

    def check_complete(self, parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
        """Raise unless a step can apply the probes."""
        self.check_parameters(parameters)
        if self.kept is not None:
            raise RuntimeError(
                "the last probe had last=False, so its further passes are still to come: probe the last micro-batch "
                "with last=True before step(), or call optimizer.discard()."
            )
        if self.scaling is not None and not self.scaling.is_unscaled(optimizer):
            raise RuntimeError(
                "the gradients in .grad are scaled: call scaler.step(optimizer), which unscales them and steps."
            )


def _gradient_now(grad: Tensor | None, average: Tensor) -> Tensor:
    """Return the present gradient of a parameter, in the type of its average."""
    if grad is None:
        return torch.zeros_like(average)
    grad = local(grad)
    if grad.dtype == average.dtype:
        return grad
    # `.grad` of 16-bit weights is rounded: where nobody has changed it, the average is the same gradient, not rounded.
    return torch.where(grad == average.to(grad.dtype), average, grad.to(average.dtype))
