"""ASAM: SAM whose ball scales with the weights, so that rescaled weights have the same neighbourhood.

Kwon, Kim, Park and Choi (2021), "ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of Deep
Neural Networks", ICML; Algorithm 1 with the element-wise operator T and the norm p = 2.

    1:  while not converged, for a minibatch cut into m parts M_1 .. M_m:
    2:      g_k      <-  mean gradient of M_k at omega
    3:      eps_k    <-  rho T^2 g_k / ||T g_k||,   T = |omega| + eta
    4:      g_eps    <-  mean over k of the mean gradient of M_k at omega + eps_k
    5:      omega    <-  one step of the base optimizer with the gradient g_eps

| paper | here |
|---|---|
| w (omega) | the module's weights |
| rho, eta | `rho`, `eta` |
| lambda | `weight_decay` of the base optimizer |

Where this differs from the printed algorithm, and why:

- The minibatch may be cut into parts with separate perturbations, as in the other methods.
- The operator applies to all perturbed parameters, also to biases, and the norm runs over all of them.

State: that of the base optimizer, as in `bsam.optim.sam`. Everything but T comes from there; T = 1 is SAM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from bsam.optim import options
from bsam.optim.probing import Slot
from bsam.optim.sam import SAM

__all__ = ["ASAM", "axes"]


def axes(omega: Tensor, eta: float | Tensor) -> Tensor:
    """The half-axes T of the ellipsoid of radius 1 around the weights."""
    return omega.abs() + eta  # line 3: SAM perturbs T g, and the result is multiplied by T


class ASAM(SAM):
    r"""Adaptive SAM with a base optimizer.

    Args:
        params: Parameters, named parameters, or groups of them. A group may override `rho`, `eta` and every option of
            the base optimizer, and set `perturb=False` to be left out of the adversarial step.
        base_optimizer: A torch optimizer class, or a function that makes an optimizer. It is called with the groups
            and `base_kwargs`.
        rho: Radius of the ball, in units of $\lvert \omega \rvert + \eta$. Good values are about 10 times SAM's (0.5 to
            2).
        eta: Constant that is added to the absolute values of the weights, so that weights at 0 are perturbed too.
        splits: Number of parts of each minibatch. Each part has its own perturbation (m-sharpness): more parts change
            the method. Micro-batches of several `probe` calls are further parts.
        nonfinite: `"raise"` raises at a loss or gradient that is not finite. `"skip"` skips the step and counts it
            in `skipped_steps` (here this costs one synchronisation with the device per step).
        max_grad_norm: Clips the norm of $g_\epsilon$, the averaged gradient at the perturbed weights.
        module: The model. With it, the optimizer can handle BatchNorm, compute the splits together, and name
            parameters in messages.
        batch_norm: Which passes update BatchNorm's running statistics, see `bsam.batch_norm`.
        vectorise: True computes the splits together by vmap, or raises. False computes them in a loop, with the same
            numbers. None computes them together on a GPU, and falls back to a loop with one warning that says why.
        process_group: The ranks that act as further splits; see the page on distributed training.
        base_kwargs: Options of the base optimizer.

    Examples:
        >>> import torch
        >>> model = nn.Linear(3, 2)
        >>> optimizer = ASAM(model.parameters(), torch.optim.SGD, rho=0.5, lr=0.1, momentum=0.9)
        >>> x, y = torch.randn(8, 3), torch.randint(2, (8,))
        >>> loss = optimizer.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
    """

    rates: ClassVar[tuple[str, ...]] = (*SAM.rates, "eta")

    def __init__(
        self,
        params: Any,
        base_optimizer: Callable[..., Optimizer],
        *,
        rho: float = 0.5,
        eta: float = 0.01,
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
            "eta": eta,
            "perturb": True,
            "splits": splits,
            "nonfinite": nonfinite,
            "max_grad_norm": max_grad_norm,
            "batch_norm": batch_norm,
        }
        self._build(params, base_optimizer, defaults, base_kwargs, module, process_group, vectorise)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        options.non_negative("eta", group["eta"])

    def _scaled(self, slot: Slot, tensor: Tensor) -> Tensor:
        return axes(slot.mean.to(slot.dtype), slot.group["eta"]) * tensor  # line 3
