"""Samples the posterior in one pass over memory: noise from Philox in registers, weights written once.

The numbers are those of `bsam.noise_cuda`: the key is the seed, the counter is (block of four elements of a parameter,
step, split, parameter).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bsam.noise_cuda import four_normals

__all__ = ["BLOCK", "block_table", "sample_posterior"]

QUADS = 256
BLOCK = 4 * QUADS
"""Elements per program."""


@triton.jit  # type: ignore[untyped-decorator]
def _sample_kernel(  # type: ignore[no-untyped-def]
    theta, omega, s, table, steps, seeds, N, numel, num_parameters, splits, QUADS: tl.constexpr
):
    block, split, run = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    entry = table + block * 5
    parameter, place = tl.load(entry).to(tl.int32), tl.load(entry + 1)
    # Parameters begin and packs end at multiples of four: loads and stores are of four elements, padding included.
    flat, local = tl.multiple_of(tl.load(entry + 2), 4), tl.multiple_of(tl.load(entry + 3), 4)
    size = tl.multiple_of((tl.load(entry + 4) + 3) // 4 * 4, 4)
    numel = tl.multiple_of(numel, 4)
    step = tl.load(steps + run * num_parameters + place).to(tl.int32)
    quad = (local // 4).to(tl.int32) + tl.arange(0, QUADS)
    z1, z2, z3, z4 = four_normals(tl.load(seeds + run), quad, step, split, parameter)
    z = tl.interleave(tl.interleave(z1, z3), tl.interleave(z2, z4))
    i = tl.arange(0, 4 * QUADS)
    mask = local + i < size
    at = run * numel + flat + i
    w = tl.load(omega + at, mask=mask, other=0.0).to(tl.float32)
    precision = tl.load(s + at, mask=mask, other=1.0)
    to = (run * splits + split) * numel + flat + i
    tl.store(theta + to, w + z * tl.rsqrt(N * precision), mask=mask)


def block_table(indices: list[int], offsets: list[int], sizes: list[int], device: torch.device) -> Tensor:
    """Make a table with one row per block of a pack.

    A row holds the parameter's noise index, its place in the pack, the start of the block in the pack and in the
    parameter, and the parameter's size.

    Args:
        indices: The index of each parameter's noise.
        offsets: The start of each parameter in the pack.
        sizes: The number of elements of each parameter.
        device: The device that reads the table.
    """
    rows = [
        (index, place, offset + local, local, size)
        for place, (index, offset, size) in enumerate(zip(indices, offsets, sizes, strict=True))
        for local in range(0, size, BLOCK)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def sample_posterior(
    theta: Tensor, omega: Tensor, s: Tensor, table: Tensor, steps: Tensor, seeds: Tensor, N: float
) -> None:
    """Write omega + e with e ~ N(0, 1 / (N s)) into theta.

    Args:
        theta: (runs, splits, elements).
        omega: (runs, elements).
        s: (runs, elements).
        table: From `block_table`.
        steps: Number of steps taken by each parameter of each run, (runs, parameters).
        seeds: One seed per run.
        N: Number of examples.
    """
    runs, splits, numel = theta.shape
    with torch.cuda.device_of(theta):  # type: ignore[no-untyped-call]
        _sample_kernel[(len(table), splits, runs)](
            theta, omega, s, table, steps, seeds, N, numel, steps.shape[1], splits, QUADS
        )
