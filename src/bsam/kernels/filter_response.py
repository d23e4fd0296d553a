"""Filter response normalisation (Singh and Krishnan, 2020) and its derivative, each in one pass over memory on CUDA.

The formulas include the bias of the convolution before it and the addition of a shortcut after it. Means and sums run
over the pixels of one channel of one example:

    r = 1 / sqrt(mean((x + bias)^2) + eps),   v = (x + bias) r,   y = gamma v + beta,   z = max(y, tau) + skip

and, with dy = dz where y > tau, and half of dz where they are equal,

    dx     =  gamma r (dy - v sum(dy v) / pixels)
    dgamma =  sum(dy v),   dbeta = sum(dy),   dtau = sum(dz - dy),   dbias = sum(dx)      (and over the examples)

All derivatives use the same few sums, which automatic differentiation does not find. Everything is computed in float32,
or in float64 for float64 inputs.

The two operators evaluate these formulas on the CPU, and are one kernel each on CUDA. Under vmap over the weights,
images are (groups x examples, channels, height, width), as in `bsam.kernels.convolution`, and bias, gamma, beta and tau
are (groups, channels).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bsam.compiler.registry import better_on, register
from bsam.kernels.convolution import joined

__all__ = ["normalise", "normalise_backward"]

LARGEST_IMAGE = 4096
"""Largest number of pixels that a kernel can hold in registers."""

Vectors = tuple[Tensor, Tensor, Tensor, Tensor]
"""bias, gamma, beta and tau."""


def normalise(x: Tensor, vectors: Vectors, skip: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return z, in the dtype of x, and r.

    Args:
        x: (examples, channels, height, width).
        vectors: bias, gamma, beta and tau, (channels) each.
        skip: A tensor like x that is added, or None.
        eps: Constant under the square root.
    """
    if _has_kernels(x):
        z, r = torch.ops.bsam.filter_response(x, *(t[None] for t in vectors), skip, eps)
        return z, r
    return _forward(x, vectors, skip, eps)


def normalise_backward(dz: Tensor, x: Tensor, vectors: Vectors, r: Tensor) -> tuple[Tensor, Vectors]:
    """Return the derivatives with respect to x, in its dtype, and to bias, gamma, beta and tau."""
    if _has_kernels(x) and not torch.is_grad_enabled():  # the kernel itself has no derivative
        dx, sums = torch.ops.bsam.filter_response_backward(dz, x, *(t[None] for t in vectors), r)
    else:
        dx, sums = _backward(dz, x, vectors, r)
    dbias, dgamma, dbeta, dtau = sums.sum(0).unbind()
    return dx, (dbias, dgamma, dbeta, dtau)


def _forward(x: Tensor, vectors: Vectors, skip: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    bias, gamma, beta, tau = _spread(vectors, len(x))
    wide = _widened(x) + bias
    r = torch.rsqrt(wide.square().mean(dim=(-2, -1), keepdim=True) + eps)
    z = torch.maximum(gamma * (wide * r) + beta, tau)
    return (z if skip is None else z + skip).to(x.dtype), r


def _backward(dz: Tensor, x: Tensor, vectors: Vectors, r: Tensor) -> tuple[Tensor, Tensor]:
    """Return dx, and the sums over the pixels of dbias, dgamma, dbeta and dtau: (examples, 4, channels)."""
    bias, gamma, beta, tau = _spread(vectors, len(x))
    dz, v = _widened(dz), (_widened(x) + bias) * r
    above = gamma * v + beta - tau
    dy = dz * torch.where(above > 0, 1.0, torch.where(above == 0, 0.5, 0.0))
    dyv = (dy * v).sum(dim=(-2, -1), keepdim=True)
    dx = gamma * r * (dy - v * (dyv / (x.shape[-2] * x.shape[-1])))
    sums = [t.sum(dim=(-2, -1)) for t in (dx, dyv, dy, dz - dy)]
    return dx.to(x.dtype), torch.stack(sums, 1)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _spread(vectors: Vectors, examples: int) -> Vectors:
    """Reshape to (channels, 1, 1), or repeat per example of a group: (groups x examples, channels, 1, 1)."""
    bias, gamma, beta, tau = (
        (t if t.dim() == 1 else t.repeat_interleave(examples // len(t), 0))[..., None, None] for t in vectors
    )
    return bias, gamma, beta, tau


def _has_kernels(x: Tensor) -> bool:
    small = x.dim() == 4 and 0 < x.shape[2] * x.shape[3] <= LARGEST_IMAGE
    return small and better_on(x.device) and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _flat(x: Tensor) -> Tensor:
    """Return the image with a constant stride between its pixels."""
    flat = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    return x if flat else x.contiguous(memory_format=torch.channels_last)


# ------------------------------------------------------------------ operators


@torch.library.custom_op("bsam::filter_response", mutates_args=(), device_types="cpu")
def _filter_response(
    x: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, tau: Tensor, skip: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    z, r = _forward(x, (bias, gamma, beta, tau), skip, eps)
    return torch.empty_like(_flat(x)).copy_(z), r.contiguous()


@_filter_response.register_fake
def _(
    x: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, tau: Tensor, skip: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(_flat(x)), _empty_r(x)


@_filter_response.register_kernel("cuda")
def _(
    x: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, tau: Tensor, skip: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    from bsam.kernels.filter_response_triton import forward

    x = _flat(x)
    z, r = torch.empty_like(x), _empty_r(x)
    forward(x, (bias, gamma, beta, tau), None if skip is None else _laid_out_as(x, skip), eps, z, r)
    return z, r


def _empty_r(x: Tensor) -> Tensor:
    return torch.empty((*x.shape[:2], 1, 1), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _laid_out_as(x: Tensor, t: Tensor) -> Tensor:
    """Return t with the strides of the flat image x."""
    last = x.is_contiguous(memory_format=torch.channels_last)
    return t.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def _joined_vectors(vectors: list[Tensor], dims: tuple[int | None, ...], count: int) -> list[Tensor]:
    """Join bias, gamma, beta and tau like the images; unchanged if all images are examples of one group."""
    if len(vectors[0]) == 1 and all(dim is None for dim in dims):
        return vectors
    return [joined(t, dim, count) for t, dim in zip(vectors, dims, strict=True)]


@_filter_response.register_vmap
def _(info: Any, dims: Any, x: Tensor, *rest: Any) -> Any:
    *vectors, skip, eps = rest
    z, r = torch.ops.bsam.filter_response(
        joined(x, dims[0], info.batch_size),
        *_joined_vectors(vectors, dims[1:5], info.batch_size),
        None if skip is None else joined(skip, dims[5], info.batch_size),
        eps,
    )
    return tuple(t.unflatten(0, (info.batch_size, -1)) for t in (z, r)), (0, 0)


@torch.library.custom_op("bsam::filter_response_backward", mutates_args=(), device_types="cpu")
def _filter_response_backward(
    dz: Tensor, x: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, tau: Tensor, r: Tensor
) -> tuple[Tensor, Tensor]:
    dx, sums = _backward(dz, x, (bias, gamma, beta, tau), r)
    return torch.empty_like(_flat(x)).copy_(dx), sums.contiguous()


@_filter_response_backward.register_fake
def _(
    dz: Tensor, x: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, tau: Tensor, r: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(_flat(x)), _empty_sums(x)


@_filter_response_backward.register_kernel("cuda")
def _(
    dz: Tensor, x: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, tau: Tensor, r: Tensor
) -> tuple[Tensor, Tensor]:
    from bsam.kernels.filter_response_triton import backward

    x = _flat(x)
    dx, sums = torch.empty_like(x), _empty_sums(x)
    backward(_laid_out_as(x, dz), x, (bias, gamma, beta, tau), r.contiguous(), dx, sums)
    return dx, sums


def _empty_sums(x: Tensor) -> Tensor:
    shape = (x.shape[0], 4, x.shape[1])
    return torch.empty(shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


@_filter_response_backward.register_vmap
def _(info: Any, dims: Any, dz: Tensor, x: Tensor, *rest: Tensor) -> Any:
    *vectors, r = rest
    count = info.batch_size
    dx, sums = torch.ops.bsam.filter_response_backward(
        *(joined(t, dim, count) for t, dim in zip((dz, x), dims[:2], strict=True)),
        *_joined_vectors(vectors, dims[2:6], count),
        joined(r, dims[6], count),
    )
    return tuple(t.unflatten(0, (info.batch_size, -1)) for t in (dx, sums)), (0, 0)


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Replacements where an operator would convert a layout: the compiler fuses the conversion into other kernels."""
    ops = torch.ops.bsam

    def filter_response(x: Tensor, *rest: Any) -> Any:
        *vectors, skip, eps = rest
        if skip is None or _laid_out_as(x, skip) is skip:
            return NotImplemented
        return ops.filter_response(x, *vectors, _laid_out_as(x, skip), eps)

    def filter_response_backward(dz: Tensor, x: Tensor, *rest: Any) -> Any:
        if _laid_out_as(x, dz) is dz:
            return NotImplemented
        return ops.filter_response_backward(_laid_out_as(x, dz), x, *rest)

    return {
        ops.filter_response.default: filter_response,
        ops.filter_response_backward.default: filter_response_backward,
    }


register(
    decompositions=_decompositions(),
    # The first output, dx, is used at once; the second output, the sums, is not.
    weight_gradients=[(torch.ops.bsam.filter_response_backward.default, 1)],
)
