"""BatchNorm as plain formulas, in training mode with the derivative in closed form.

Under vmap, torch's own BatchNorm joins the sets of weights with the channels, which needs layout conversions in the
whole network. In training mode, with means over the examples and pixels of one channel,

    m = mean(x),   r = 1 / sqrt(mean((x - m)^2) + eps),   v = (x - m) r,   y = gamma v + beta

    dgamma = sum(dy v),   dbeta = sum(dy),   dx = gamma r (dy - mean(dy) - v mean(dy v))

Everything is computed in float32, or in float64 for float64 inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bsam.compiler.registry import register

__all__ = ["batch_norm"]


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Like `torch.nn.functional.batch_norm`: training updates the running statistics in place, evaluation uses them."""
    channels = x.shape[1]
    gamma = x.new_ones(channels, dtype=_wide(x)) if weight is None else weight
    beta = x.new_zeros(channels, dtype=_wide(x)) if bias is None else bias
    if not training:
        assert running_mean is not None
        assert running_var is not None
        scale = gamma * torch.rsqrt(running_var + eps)
        return (_spread(scale, x) * x.to(_wide(x)) + _spread(beta - running_mean * scale, x)).to(x.dtype)
    y, mean, r = _Normalise.apply(x, gamma, beta, eps)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None:
        count = x.numel() // channels
        variance = (r.pow(-2) - eps) * (count / (count - 1))
        for running, now in ((running_mean, mean), (running_var, variance)):
            running.mul_(1 - momentum).add_(now.to(running.dtype), alpha=momentum)
    normalised: Tensor = y
    return normalised


class _Normalise(torch.autograd.Function):
    """Computes y, m and r."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        wide, over = x.to(_wide(x)), _all_but_channels(x)
        mean = wide.mean(over)
        centred = wide - _spread(mean, x)
        r = torch.rsqrt(centred.square().mean(over) + eps)
        return (_spread(gamma * r, x) * centred + _spread(beta, x)).to(x.dtype), mean, r

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:2], *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, mean, r = ctx.saved_tensors
        over, count = _all_but_channels(x), x.numel() // x.shape[1]
        v, dy = (x.to(_wide(x)) - _spread(mean, x)) * _spread(r, x), dy.to(_wide(x))
        dgamma, dbeta = (dy * v).sum(over), dy.sum(over)
        dx = _spread(gamma * r, x) * (dy - _spread(dbeta / count, x) - v * _spread(dgamma / count, x))
        return dx.to(x.dtype), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype), None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _spread(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape(-1, *[1] * (x.dim() - 2))


def _normalise(
    x: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, *rest: Any, **options: Any
) -> Any:
    """`torch.nn.functional.batch_norm` with our formulas, or NotImplemented where torch must raise an error."""
    possible = x.numel() > x.shape[1] if options["training"] else running_mean is not None
    return batch_norm(x, running_mean, running_var, *rest, **options) if possible else NotImplemented


register(layers={F.batch_norm: _normalise})
