"""Filter response normalisation and its derivative as one kernel each; see `bsam.engine.filter_response`.

A program takes some channels of one example and holds all their pixels in registers: what it reads, it reads once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bsam.engine.convolution import power_of_2
from bsam.engine.filter_response import Vectors

__all__ = ["backward", "forward"]


@triton.jit  # type: ignore[untyped-decorator]
def _load_vector(start, stride, c, channels, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    at = start + c // GROUP * stride + c % GROUP
    return tl.load(at, mask=c < channels, other=0.0).to(tl.float32)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    x, bias, gamma, beta, tau, bias_stride, gamma_stride, beta_stride, tau_stride, skip, eps, z, r, pixels, channels,
    GROUP: tl.constexpr, PIXEL_STRIDE: tl.constexpr, CHANNEL_STRIDE: tl.constexpr,
    PIXELS: tl.constexpr, BLOCK: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    example = tl.program_id(0).to(tl.int64)
    p, c = tl.arange(0, PIXELS)[:, None], tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = example * channels * pixels + p * PIXEL_STRIDE + c[None, :] * CHANNEL_STRIDE
    inside = p < pixels
    mask = inside & (c < channels)[None, :]
    wide = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    wide = tl.where(inside, wide + _load_vector(bias, bias_stride, c, channels, GROUP), 0.0)
    root = tl.rsqrt(tl.sum(wide * wide, 0) / pixels + eps)
    g = _load_vector(gamma, gamma_stride, c, channels, GROUP)
    y = g * (wide * root[None, :]) + _load_vector(beta, beta_stride, c, channels, GROUP)
    threshold = tl.broadcast_to(_load_vector(tau, tau_stride, c, channels, GROUP), (PIXELS, BLOCK))
    top = tl.maximum(y, threshold, propagate_nan=tl.PropagateNan.ALL)
    if SKIP:
        top += tl.load(skip + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(z + at, top.to(z.dtype.element_ty), mask=mask)
    tl.store(r + example * channels + c, root, mask=c < channels)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    dz, x, bias, gamma, beta, tau, bias_stride, gamma_stride, beta_stride, tau_stride, r, dx, sums, pixels, channels,
    GROUP: tl.constexpr, PIXEL_STRIDE: tl.constexpr, CHANNEL_STRIDE: tl.constexpr,
    PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    example = tl.program_id(0).to(tl.int64)
    p, c = tl.arange(0, PIXELS)[:, None], tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = example * channels * pixels + p * PIXEL_STRIDE + c[None, :] * CHANNEL_STRIDE
    inside, here = p < pixels, c < channels
    mask = inside & here[None, :]
    outer = tl.load(dz + at, mask=mask, other=0.0).to(tl.float32)
    root = tl.load(r + example * channels + c, mask=here, other=0.0)[None, :]
    wide = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + _load_vector(bias, bias_stride, c, channels, GROUP)
    v = tl.where(inside, wide * root, 0.0)
    g = _load_vector(gamma, gamma_stride, c, channels, GROUP)
    above = (
        g * v + _load_vector(beta, beta_stride, c, channels, GROUP) - _load_vector(tau, tau_stride, c, channels, GROUP)
    )
    dy = outer * tl.where(above > 0, 1.0, tl.where(above == 0, 0.5, 0.0))
    of_dyv, of_dy = tl.sum(dy * v, 0), tl.sum(dy, 0)
    inner = g * root * (dy - v * (of_dyv / pixels)[None, :])
    tl.store(dx + at, inner.to(dx.dtype.element_ty), mask=mask)
    to = sums + example * 4 * channels + c
    tl.store(to, tl.sum(inner, 0), mask=here)
    tl.store(to + channels, of_dyv, mask=here)
    tl.store(to + 2 * channels, of_dy, mask=here)
    tl.store(to + 3 * channels, tl.sum(outer - dy, 0), mask=here)


def tile(pixels: int, channels: int) -> tuple[int, int, int]:
    """Pixels and channels of a program, and its warps."""
    rows = power_of_2(pixels)
    block = min(power_of_2(channels), 32, max(8, 16384 // rows))
    return rows, block, max(1, min(16, rows * block // 1024))


def forward(x: Tensor, vectors: Vectors, skip: Tensor | None, eps: float, z: Tensor, r: Tensor) -> None:
    """Write z, which has the strides of x and skip, and r."""
    grid, sizes, warps = _sizes(x, vectors)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _forward_kernel[grid](
            x, *_rows(vectors), x if skip is None else skip, eps, z, r, *sizes, skip is not None, num_warps=warps
        )


def backward(dz: Tensor, x: Tensor, vectors: Vectors, r: Tensor, dx: Tensor, sums: Tensor) -> None:
    """Write dx, which has the strides of x and dz, and the sums over the pixels."""
    grid, sizes, warps = _sizes(x, vectors)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _backward_kernel[grid](dz, x, *_rows(vectors), r, dx, sums, *sizes, num_warps=warps)


def _rows(vectors: Vectors) -> list[Tensor | int]:
    rows = [t if t.stride(1) == 1 else t.contiguous() for t in vectors]
    return [*rows, *(t.stride(0) for t in rows)]


def _sizes(x: Tensor, vectors: Vectors) -> tuple[tuple[int, int], tuple[int, ...], int]:
    examples, channels, height, width = x.shape
    pixels = height * width
    rows, block, warps = tile(pixels, channels)
    strides = (channels, 1) if x.is_contiguous(memory_format=torch.channels_last) else (1, pixels)
    grid = (examples, triton.cdiv(channels, block))
    return grid, (pixels, channels, vectors[0].shape[1], *strides, rows, block), warps
