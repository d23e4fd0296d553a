"""The random numbers of a corruption: drawn on the CPU, so that every device gets the same corrupted images."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

__all__ = ["Draw"]


class Draw:
    """Draws random numbers that depend on an address only: the seed, the kind and the strength of a corruption.

    Args:
        address: Integers and names.
        device: Where the numbers are moved to.
    """

    def __init__(self, *address: int | str, device: torch.device) -> None:
        digest = hashlib.blake2b(repr(address).encode(), digest_size=8, person=b"corruption").digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
        self._device = device

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers."""
        return torch.randn(shape, generator=self._generator, device="cpu").to(self._device)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Draw numbers between `low` and `high`."""
        unit = torch.rand(shape, generator=self._generator, device="cpu")
        return (low + (high - low) * unit).to(self._device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Draw integers from `low` to `high` - 1."""
        return torch.randint(low, high, shape, generator=self._generator, device="cpu").to(self._device)
