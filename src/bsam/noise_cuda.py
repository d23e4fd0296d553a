"""Philox-4x32-10 and Box-Muller on CUDA: the noise of `bsam.noise` in one kernel, with the step in device memory.

Salmon, Moraes, Dror and Shaw (2011), "Parallel random numbers: as easy as 1, 2, 3". The key is the seed, the
counter is (block of four elements, step, split, parameter); each call of the cipher gives two pairs of normals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

__all__ = ["four_normals", "philox_normal"]

BLOCK = 512


@triton.jit
def _box_muller(a, b):  # type: ignore[no-untyped-def]
    # In [0, 2 pi) the fast sine and cosine are exact to 7e-7; the general ones take longer than all the rest.
    r = tl.sqrt(-2.0 * tl.log(tl.maximum(tl.uint_to_uniform_float(a), 1e-7)))
    angle = 6.283185307179586 * tl.uint_to_uniform_float(b)
    return r * libdevice.fast_cosf(angle), r * libdevice.fast_sinf(angle)


@triton.jit
def four_normals(seed, quad, step, split, parameter):  # type: ignore[no-untyped-def]
    """Draw four normals for each block of four elements."""
    zero = tl.zeros_like(quad)
    a, b, c, d = tl.philox(seed, quad, zero + step, zero + split, zero + parameter)
    z1, z2 = _box_muller(a, b)
    z3, z4 = _box_muller(c, d)
    return z1, z2, z3, z4


@triton.jit  # type: ignore[untyped-decorator]
def _philox_kernel(out, step, numel, seed, split, parameter, start, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    quad = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z1, z2, z3, z4 = four_normals(seed, quad + start, tl.load(step).to(tl.int32), split, parameter)
    first = quad.to(tl.int64) * 4
    tl.store(out + first, z1, mask=first < numel)
    tl.store(out + first + 1, z2, mask=first + 1 < numel)
    tl.store(out + first + 2, z3, mask=first + 2 < numel)
    tl.store(out + first + 3, z4, mask=first + 3 < numel)


def philox_normal(
    seed: int,
    step: int | Tensor,
    split: int,
    parameter: int,
    shape: Sequence[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    part: tuple[int, int, int] | None = None,
) -> Tensor:
    """`bsam.noise.standard_normal` on a CUDA device."""
    shape = tuple(shape)
    if part is not None and part[0] > 0:  # not one piece of memory
        whole = philox_normal(seed, step, split, parameter, shape, device=device, dtype=dtype)
        return whole.narrow(*part).contiguous()
    first, size = 0, math.prod(shape)
    if part is not None:
        shape = (part[2], *shape[1:])
        first, size = part[1] * math.prod(shape[1:]), math.prod(shape)
    start, before = divmod(first, 4)  # the first block of four elements, and how many of them are not wanted
    out = torch.empty(size + before if size else 0, device=device, dtype=torch.float32)
    if out.numel():
        if not isinstance(step, Tensor):
            step = torch.tensor(step, device=device, dtype=torch.int64)
        blocks = triton.cdiv(out.numel(), 4 * BLOCK)
        with torch.cuda.device(device):
            _philox_kernel[(blocks,)](out, step, out.numel(), seed, split, parameter, start, BLOCK)
    return out[before:].view(shape).to(dtype)
