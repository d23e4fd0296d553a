"""SAM: sharpness-aware minimization on top of any torch optimizer.

Foret, Kleiner, Mobahi and Neyshabur (2021), "Sharpness-Aware Minimization for Efficiently Improving Generalization",
ICLR; lines 3 to 6 of Algorithm 1 (the blue boxes) of Möllenhoff and Khan (2023). Lines 7 to 9 are the base
optimizer's: with `torch.optim.SGD` this is SAM-SGD, with `torch.optim.Adam` it is SAM-Adam.

    1:  while not converged, for a minibatch cut into m parts M_1 .. M_m:
    2:      g_k      <-  mean gradient of M_k at omega
    3:      eps_k    <-  rho g_k / ||g_k||
    4:      g_eps    <-  mean over k of the mean gradient of M_k at omega + eps_k
    5:      omega    <-  one step of the base optimizer with the gradient g_eps

| paper | here |
|---|---|
| omega | the module's weights |
| rho, m | `rho`, `splits` |
| delta | `weight_decay` of the base optimizer; prior_precision / N in the paper's tables |

Where this differs from print, and why:

- The norm runs over all perturbed parameters of all groups and is taken of the loss gradient alone, without weight
  decay. A zero gradient is not perturbed.
- torch's Adam corrects the bias of its averages, Algorithm 1 does not: the first steps are larger.
- Sub-batches are weighted by their size, so that ragged ones give the mean over all examples.

State: that of the base optimizer, which shares `state` and `param_groups`, so state_dict holds everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from bsam.optim import options
from bsam.optim.arithmetic import total_norm
from bsam.optim.base import ProbingOptimizer
from bsam.optim.base_step import evaluates_loss
from bsam.optim.probing import Gradients, Slot, Tally, emptied

__all__ = ["SAM", "perturbation"]


def perturbation(g: Tensor, norm: Tensor, rho: float) -> Tensor:
    """The adversarial step eps, of length rho over all parameters together."""
    return rho * g / norm.clamp_min(torch.finfo(norm.dtype).tiny)  # line 3


class SAM(ProbingOptimizer):
    r"""SAM with a base optimizer.

    Args:
        params: Parameters, named parameters, or groups of them. A group may override `rho` and every option of
            the base optimizer. With `perturb=False` it is excluded from the adversarial step.
        base_optimizer: A torch optimizer class, or a function that makes an optimizer. It is called with the groups
            and `base_kwargs`.
        rho: Radius of the ball in which the loss is maximised.
        splits: Number of parts of each minibatch, each with its own perturbation (m-sharpness): more parts change the
            method. Micro-batches of several `probe` calls are further parts.
        nonfinite: `"raise"` stops at a loss or gradient that is not finite, `"skip"` skips the step and counts it in
            `skipped_steps` (which waits for the device once per step).
        max_grad_norm: Clips the norm of $g_\epsilon$, the averaged gradient at the perturbed weights.
        module: The model. With it the optimizer can handle BatchNorm, compute the splits together, and name parameters
            in messages.
        batch_norm: Which passes move BatchNorm's running statistics, see `bsam.batch_norm`.
        vectorise: True: compute the splits together by vmap, or raise. False: compute them in a loop, with the same
            numbers. None: together on a GPU; if that fails, in a loop, with one warning that says why.
        process_group: Ranks as further splits, see the page on distributed training.
        base_kwargs: Options of the base optimizer.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
        >>> x, y = torch.randn(8, 3), torch.randint(2, (8,))
        >>> loss = optimizer.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
    """

    rates: ClassVar[tuple[str, ...]] = ("rho", "lr")
    base_optimizer: Optimizer

    def __init__(
        self,
        params: Any,
        base_optimizer: Callable[..., Optimizer],
        *,
        rho: float,
        splits: int = 1,
        nonfinite: str = "raise",
        max_grad_norm: float | None = None,
        module: nn.Module | None = None,
        batch_norm: str = "first_split",
        vectorise: bool | None = None,
        process_group: dist.ProcessGroup | None = None,
        **base_kwargs: Any,
    ) -> None:
        defaults = {
            "rho": rho,
            "perturb": True,
            "splits": splits,
            "nonfinite": nonfinite,
            "max_grad_norm": max_grad_norm,
            "batch_norm": batch_norm,
        }
        self._build(params, base_optimizer, defaults, base_kwargs, module, process_group, vectorise)

    def _build(
        self,
        params: Any,
        base_optimizer: Callable[..., Optimizer],
        defaults: dict[str, Any],
        base_kwargs: dict[str, Any],
        module: nn.Module | None,
        process_group: dist.ProcessGroup | None,
        vectorise: bool | None,
    ) -> None:
        """Make the groups, and the base optimizer that shares them."""
        if isinstance(base_optimizer, Optimizer) or not callable(base_optimizer):
            raise TypeError(
                f"base_optimizer={base_optimizer!r} must be a class or a function that makes an optimizer: "
                f"{type(self).__name__}(params, torch.optim.SGD, rho={defaults['rho']}, lr=0.1)."
            )
        self._check_group({**defaults, **base_kwargs})
        super().__init__(params, defaults, module=module, process_group=process_group, vectorise=vectorise)
        self.base_optimizer = base_optimizer(self.param_groups, **base_kwargs)
        if evaluates_loss(self.base_optimizer):
            raise ValueError(
                f"{type(self.base_optimizer).__name__} evaluates the loss by itself, so SAM cannot give it a gradient."
            )
        self.defaults = {**self.base_optimizer.defaults, **defaults}
        for group in self.base_optimizer.param_groups:
            self._check_keys(group)
            self._check_group(group)
        self.param_groups, self.state = self.base_optimizer.param_groups, self.base_optimizer.state

    def _check_keys(self, group: dict[str, Any]) -> None:
        if "base_optimizer" in self.__dict__:  # it is made from the groups, and knows the other options
            super()._check_keys(group)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        options.non_negative("rho", group["rho"])
        options.one_of("perturb", group["perturb"], (True, False))
        if "lr" in group:
            options.non_negative("lr", group["lr"])
        if group.get("maximize"):
            raise ValueError(
                "maximize=True does not go with SAM, which searches for the largest loss nearby: negate the loss."
            )

    def _scaled(self, slot: Slot, tensor: Tensor) -> Tensor:
        """Multiply a gradient or a perturbation by the axes of the ball around the weights: here all are 1."""
        return tensor

    def _probe(self, slots: list[Slot], theta: Iterable[Tensor], grad_at: Gradients, tally: Tally) -> None:
        g = [self._scaled(slot, g_i) for slot, g_i in zip(slots, emptied(grad_at(theta)), strict=True)]  # line 2
        moved = [g_i for slot, g_i in zip(slots, g, strict=True) if slot.group["perturb"]]
        parameters = [slot.parameter for slot in slots if slot.group["perturb"]]
        norm = grad_at.per_split(total_norm)(moved, parameters=parameters) if moved else None
        step = grad_at.per_split(perturbation)
        perturbed = (
            slot.mean + self._scaled(slot, step(g_i, norm.to(g_i.device), rho=slot.group["rho"]))
            if slot.group["perturb"] and norm is not None
            else slot.mean.expand_as(g_i)
            for slot, g_i in zip(slots, g, strict=True)
        )
        del g, moved  # so that their memory is free after the weights are written
        tally.add("gradient", grad_at(perturbed))  # line 4

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options left out take the optimizer's defaults."""
        if "base_optimizer" in self.__dict__:
            self.base_optimizer.add_param_group(self._checked_group(param_group))  # the list of groups is shared
        else:
            super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "base_optimizer": self.base_optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # State and groups are new objects now, as after load_state_dict: share them again.
        self.base_optimizer.__setstate__({"state": self.state, "param_groups": self.param_groups})
