"""Filter response normalisation and its derivative as one kernel each; see `bsam.kernels.filter_response`.

A program takes some channels of one example.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bsam.kernels.convolution import power_of_2
from bsam.kernels.filter_response import Vectors

__all__ = ["backward", "forward"]


@triton.jit
def _load_vector(start, offset, c, channels):  # type: ignore[no-untyped-def]
    return tl.load(start + offset + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _mask(  # type: ignore[no-untyped-def]
    p, c, pixels: tl.constexpr, channels: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # Which elements of a tile exist. The mask is a constant if all of them do.
    mask = tl.full((ROWS, BLOCK), True, tl.int1)
    if pixels % ROWS != 0:
        mask &= p < pixels
    if channels % BLOCK != 0:
        mask &= c[None, :] < channels
    return mask


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    x, bias, gamma, beta, tau, bias_stride, gamma_stride, beta_stride, tau_stride, skip, eps, z, r,
    pixels: tl.constexpr, channels: tl.constexpr,
    EXAMPLES: tl.constexpr, PIXEL_STRIDE: tl.constexpr, CHANNEL_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    # Reads x twice, the second time from the cache. Many programs fit on the device and hide each other's waiting.
    example = tl.program_id(0).to(tl.int64)
    group = example // EXAMPLES
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = c < channels
    start = example * channels * pixels + c[None, :] * CHANNEL_STRIDE
    shift = _load_vector(bias, group * bias_stride, c, channels)
    squares = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(0, pixels, ROWS):
        p = first + tl.arange(0, ROWS)[:, None]
        mask = _mask(p, c, pixels, channels, ROWS, BLOCK)
        wide = tl.load(x + start + p * PIXEL_STRIDE, mask=mask, other=0.0).to(tl.float32)
        wide = tl.where(mask, wide + shift, 0.0)
        squares += wide * wide
    root = tl.rsqrt(tl.sum(squares, 0) / pixels + eps)
    tl.store(r + example * channels + c, root, mask=here)
    g = _load_vector(gamma, group * gamma_stride, c, channels)
    b = _load_vector(beta, group * beta_stride, c, channels)
    threshold = tl.broadcast_to(_load_vector(tau, group * tau_stride, c, channels), (ROWS, BLOCK))
    for first in range(0, pixels, ROWS):
        p = first + tl.arange(0, ROWS)[:, None]
        at, mask = start + p * PIXEL_STRIDE, _mask(p, c, pixels, channels, ROWS, BLOCK)
        wide = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + shift
        y = g * (wide * root[None, :]) + b
        top = tl.maximum(y, threshold, propagate_nan=tl.PropagateNan.ALL)
        if SKIP:
            top += tl.load(skip + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(z + at, top.to(z.dtype.element_ty), mask=mask)


@triton.jit
def _add(a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
    return a + e, b + f, c + g, d + h


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    dz, x, bias, gamma, beta, tau, bias_stride, gamma_stride, beta_stride, tau_stride, r, dx, sums,
    pixels: tl.constexpr, channels: tl.constexpr,
    EXAMPLES: tl.constexpr, PIXEL_STRIDE: tl.constexpr, CHANNEL_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Holds all pixels in registers.
    example = tl.program_id(0).to(tl.int64)
    group = example // EXAMPLES
    p, c = tl.arange(0, ROWS)[:, None], tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = example * channels * pixels + p * PIXEL_STRIDE + c[None, :] * CHANNEL_STRIDE
    mask, here = _mask(p, c, pixels, channels, ROWS, BLOCK), c < channels
    outer = tl.load(dz + at, mask=mask, other=0.0).to(tl.float32)
    root = tl.load(r + example * channels + c, mask=here, other=0.0)[None, :]
    wide = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + _load_vector(bias, group * bias_stride, c, channels)
    v = tl.where(mask, wide * root, 0.0)
    g = _load_vector(gamma, group * gamma_stride, c, channels)
    b = _load_vector(beta, group * beta_stride, c, channels)
    above = g * v + b - _load_vector(tau, group * tau_stride, c, channels)
    dy = outer * tl.where(above > 0, 1.0, tl.where(above == 0, 0.5, 0.0))
    of_dyv, of_dy, of_v, of_dz = tl.reduce((dy * v, dy, v, outer), 0, _add)
    inner = g * root * (dy - v * (of_dyv / pixels)[None, :])
    tl.store(dx + at, inner.to(dx.dtype.element_ty), mask=mask)
    to = sums + example * 4 * channels + c
    scale = tl.sum(g * root, 0)  # a sum over one row, which removes the first dimension
    tl.store(to, scale * (of_dy - of_v * (of_dyv / pixels)), mask=here)
    tl.store(to + channels, of_dyv, mask=here)
    tl.store(to + 2 * channels, of_dy, mask=here)
    tl.store(to + 3 * channels, of_dz - of_dy, mask=here)


def forward(x: Tensor, vectors: Vectors, skip: Tensor | None, eps: float, z: Tensor, r: Tensor) -> None:
    """Compute z and r. z has the strides of x and skip."""
    pixels = x.shape[2] * x.shape[3]
    rows, block = min(256, max(64, power_of_2(pixels) // 2)), min(32, power_of_2(x.shape[1]))
    grid, sizes = _sizes(x, vectors, rows, block)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _forward_kernel[grid](
            x,
            *_rows(vectors),
            x if skip is None else skip,
            eps,
            z,
            r,
            *sizes,
            skip is not None,
            num_warps=max(1, rows * block // 1024),
        )


def backward(dz: Tensor, x: Tensor, vectors: Vectors, r: Tensor, dx: Tensor, sums: Tensor) -> None:
    """Compute dx and the sums over the pixels. dx has the strides of x and dz."""
    rows = power_of_2(x.shape[2] * x.shape[3])
    block = min(32, max(8, 16384 // rows), power_of_2(x.shape[1]))
    grid, sizes = _sizes(x, vectors, rows, block)
    warps = max(2, min(16, rows * block // 2048))
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _backward_kernel[grid](dz, x, *_rows(vectors), r, dx, sums, *sizes, num_warps=warps)


def _rows(vectors: Vectors) -> list[Tensor | int]:
    rows = [t if t.stride(1) == 1 else t.contiguous() for t in vectors]
    return [*rows, *(t.stride(0) for t in rows)]


def _sizes(x: Tensor, vectors: Vectors, rows: int, block: int) -> tuple[tuple[int, int], tuple[int, ...]]:
    """The grid of programs with `rows` pixels and `block` channels each, and their size and stride arguments."""
    examples, channels, height, width = x.shape
    pixels = height * width
    strides = (channels, 1) if x.is_contiguous(memory_format=torch.channels_last) else (1, pixels)
    grid = (examples, triton.cdiv(channels, block))
    return grid, (pixels, channels, examples // len(vectors[0]), *strides, rows, block)
