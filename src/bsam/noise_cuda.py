"""Philox-4x32-10 and Box-Muller on CUDA: the noise of `bsam.noise` in one kernel, its step in device memory.

Salmon, Moraes, Dror and Shaw (2011), "Parallel random numbers: as easy as 1, 2, 3". The key is the seed, the
counter is (block of four elements, step, split, parameter); each call of the cipher gives two pairs of normals.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit  # type: ignore[untyped-decorator]
def _philox_kernel(out, step, numel, seed, split, parameter, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    quad = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros_like(quad)
    now = tl.load(step).to(tl.int32)
    a, b, c, d = tl.philox(seed, quad, zero + now, zero + split, zero + parameter)
    u1, u2 = tl.uint_to_uniform_float(a), tl.uint_to_uniform_float(b)
    u3, u4 = tl.uint_to_uniform_float(c), tl.uint_to_uniform_float(d)
    z1, z2 = tl.pair_uniform_to_normal(u1, u2)
    z3, z4 = tl.pair_uniform_to_normal(u3, u4)
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
) -> Tensor:
    """`bsam.noise.standard_normal` on a CUDA device."""
    out = torch.empty(tuple(shape), device=device, dtype=torch.float32)
    if out.numel():
        if not isinstance(step, Tensor):
            step = torch.tensor(step, device=device, dtype=torch.int64)
        blocks = triton.cdiv(out.numel(), 4 * BLOCK)
        with torch.cuda.device(device):
            _philox_kernel[(blocks,)](out, step, out.numel(), seed, split, parameter, BLOCK)
    return out.to(dtype)
