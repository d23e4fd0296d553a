"""IVON, the package ivon-opt, as the runs need it: a step that can be captured, a posterior, and an exact state.

Shen et al., "Variational Learning is Effective for Large Deep Networks", ICML 2024. ivon-opt is GPL-3 and no part of
this package: whoever wants IVON installs it. With N delta = `prior_precision`, its `ess` is N, its `weight_decay` is
delta, and with h the Hessian that it estimates

    q(theta) = N(theta | m, 1 / (N (h + delta))).

What is different from using it directly:

- Its noise comes from torch's default generator, which is seeded for each step from (seed, step), as the noise of the
  other methods is, and put back after it.
- It gives the parameters new storage in each step. Here weights and state come back to where they were, which a CUDA
  graph needs; and an exception in the loss leaves the weights as before the step.
- Its `state_dict` does not have the count of steps, which its first steps depend on. Ours has.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import bsam

if TYPE_CHECKING:
    from bsam.experiments.config import Config

__all__ = ["Ivon", "check_ivon", "make_ivon"]

Loss = Callable[[Tensor, Tensor], Tensor]


def check_ivon() -> None:
    """Raise if ivon-opt is not installed."""
    try:
        import ivon  # noqa: F401
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "method='ivon' needs ivon-opt, which has another licence (GPL-3) and does not come with bsam: "
            "pip install ivon-opt"
        ) from missing


def make_ivon(config: Config, model: nn.Module, num_data: int, seed: int, **options: Any) -> Optimizer:
    """IVON with the settings of a run; what the trainer asks of an optimizer, it has."""
    N, betas = num_data * config.augmentation_factor, (config.beta1, config.beta2)
    return cast(Optimizer, Ivon(model.parameters(), lr=config.lr, num_data=N, betas=betas, seed=seed, **options))


class Ivon:
    """IVON with one sample a step.

    Args:
        params: The parameters, all of which the loss depends on.
        lr: Learning rate.
        num_data: N, IVON's effective sample size.
        prior_precision: N delta.
        betas: How much of the old gradient and of the old Hessian is kept.
        initial_hessian: Where the Hessian starts.
        seed: Decides the noise, with the count of steps.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        num_data: float,
        prior_precision: float,
        betas: tuple[float, float],
        initial_hessian: float,
        seed: int,
    ) -> None:
        check_ivon()
        from ivon import IVON

        self.seed, self.prior_precision = seed, prior_precision
        self.optimizer = IVON(
            list(params),
            lr=lr,
            ess=num_data,
            weight_decay=prior_precision / num_data,
            beta1=betas[0],
            beta2=betas[1],
            hess_init=initial_hessian,
        )
        (group,) = self.param_groups
        self.params: list[nn.Parameter] = group["params"]
        self._weights = [p.data for p in self.params]
        """Where the weights are, whatever IVON does to them during a step."""
        self._momentum, self._hessian = group["momentum"], group["hess"]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """IVON's own."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def steps_taken(self) -> int:
        """How many steps were taken."""
        return int(self.optimizer.current_step)

    @steps_taken.setter
    def steps_taken(self, count: int) -> None:
        self.optimizer.current_step = count

    @property
    def momentum_correction(self) -> float:
        """1 - beta1^t, what IVON divides its momentum by in the next step."""
        beta1: float = self.param_groups[0]["beta1"]
        return 1.0 - beta1 ** (self.steps_taken + 1)

    def step(self, loss_fn: Loss, x: Tensor, y: Tensor) -> Tensor:
        """Take a step; returns the loss at the sampled weights."""
        with self.noise():
            return self.unseeded_step(loss_fn, x, y)

    def unseeded_step(self, loss_fn: Loss, x: Tensor, y: Tensor) -> Tensor:
        """A step with noise from wherever the default generator is: every number in it is computed on the device."""
        try:
            with self.optimizer.sampled_params(train=True):
                loss = loss_fn(x, y)
                gradients = torch.autograd.grad(loss, self.params)
                for p, gradient in zip(self.params, gradients, strict=True):
                    p.grad = gradient
            self.optimizer.step()
            self._keep()
        finally:
            for p, weight in zip(self.params, self._weights, strict=True):
                p.data, p.grad = weight, None
        return loss.detach()

    @torch.no_grad()
    def _keep(self) -> None:
        """Copy what IVON computed to where weights and state were."""
        (group,) = self.param_groups
        torch._foreach_copy_(self._weights, [p.data for p in self.params])
        torch._foreach_copy_([self._momentum, self._hessian], [group["momentum"], group["hess"]])
        group["momentum"], group["hess"] = self._momentum, self._hessian

    @contextmanager
    def noise(self) -> Iterator[None]:
        """Let the default generator of the device give the noise of the next step."""
        device = self.params[0].device
        generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
        before = generator.get_state()
        address = struct.pack("<2q", self.seed, self.steps_taken)
        digest = hashlib.blake2b(address, digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "little", signed=True))
        try:
            yield
        finally:
            generator.set_state(before)

    def posterior(self, model: nn.Module) -> bsam.DiagonalGaussian:
        """The Gaussian that was learned."""
        (group,) = self.param_groups
        std = (group["ess"] * (group["hess"] + group["weight_decay"])).rsqrt()
        if not all(bool(t.isfinite().all()) for t in (std, *self._weights)):
            raise FloatingPointError("IVON's weights or its Hessian are not finite: it diverged. Write a lower lr.")
        parts = std.split([p.numel() for p in self.params])
        by_parameter: dict[Tensor, Tensor] = {p: part.view(p.shape) for p, part in zip(self.params, parts, strict=True)}
        return bsam.DiagonalGaussian.from_model(model, by_parameter, prior_precision=self.prior_precision)

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on beside the weights."""
        return {"steps_taken": self.steps_taken, "momentum": self._momentum, "hessian": self._hessian}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where `state_dict` was taken."""
        self._momentum.copy_(state["momentum"])
        self._hessian.copy_(state["hessian"])
        self.steps_taken = state["steps_taken"]

    def undo(self) -> Callable[[], None]:
        """What brings weights and state back to where they are now."""
        tensors = [*self._weights, self._momentum, self._hessian]
        saved, count = [t.clone() for t in tensors], self.steps_taken

        def undo() -> None:
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)
            self.steps_taken = count

        return undo
