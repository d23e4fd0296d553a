"""Standard normal noise as a function of where it is used.

`standard_normal` is a pure function of (seed, step, split, parameter). To resume a run, no state of the noise has to be
saved; the ranks of a cluster draw the same noise as a loop; and the global generator is never used.

On the CPU the four numbers are hashed into the seed of a private `torch.Generator`. (Its Mersenne twister keeps
32 bits of a seed, so two draws of a long run may coincide: one pair in four billion.) On CUDA they are the key and
counter of Philox-4x32-10, and the step is read from device memory, so that a captured graph draws new noise in every
replay. Other devices, and CUDA without triton, get the CPU's numbers. CPU and CUDA have the same distribution, but
different numbers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["standard_normal"]


def standard_normal(
    seed: int,
    step: int | Tensor,
    split: int,
    parameter: int,
    shape: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    part: tuple[int, int, int] | None = None,
) -> Tensor:
    """Draw the noise of one parameter in one split of one step.

    Args:
        seed: The run's seed.
        step: Number of steps taken before; an integer, or a 0-dim integer tensor on `device`.
        split: Index of the sub-batch, counted over all ranks. Negative indices are the draws of
            `optimizer.sampled()`, so that they never repeat the noise of training.
        parameter: Index of the parameter, counted over all parameter groups.
        shape: Shape of the parameter.
        device: Device of the result.
        dtype: Floating point type of the result.
        part: Dimension, start and length of the elements that this rank holds of a sharded parameter. An element has
            the same noise on whatever rank it is. On the CPU the whole noise of the parameter is drawn and cut.

    Examples:
        >>> a = standard_normal(0, 7, 0, 3, (2, 2))
        >>> torch.equal(a, standard_normal(0, 7, 0, 3, (2, 2)))
        True
        >>> torch.equal(a, standard_normal(0, 8, 0, 3, (2, 2)))
        False
    """
    device = torch.device(device)
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from bsam.noise_cuda import philox_normal

        return philox_normal(seed, step, split, parameter, shape, device=device, dtype=dtype, part=part)
    address = struct.pack("<4q", seed, int(step), split, parameter)
    digest = hashlib.blake2b(address, digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
    noise = torch.randn(tuple(shape), generator=generator, dtype=dtype)
    return (noise if part is None else noise.narrow(*part).clone()).to(device)
