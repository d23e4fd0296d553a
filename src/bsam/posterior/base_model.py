"""What a posterior of the trained parameters knows of its base model: the frozen weights, and other names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from bsam.shards import local, sum_parts, whole_norms

__all__ = ["FrozenWeights", "Rename", "new_names"]

Rename = Callable[[str], str] | Mapping[str, str]
"""Makes new names: a function of the old name, or a mapping from old prefixes to new ones."""

_LARGEST_DIFFERENCE = 0.05
"""Largest difference of the sums of equal weights, in norms. Rounding makes it 0.005 or less; of weights that are drawn
again it is about 1."""


class FrozenWeights(NamedTuple):
    """Shape, sum and Euclidean norm of a parameter that a posterior leaves to the base model."""

    shape: tuple[int, ...]
    total: float
    norm: float

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Measure a parameter."""
        part = local(tensor.detach())
        numbers = part if part.is_floating_point() else part.double()
        norms = whole_norms([torch.linalg.vector_norm(numbers, dtype=torch.float64)], [tensor])
        sums = sum_parts([numbers.sum(dtype=torch.float64)], [tensor])
        return cls(tuple(tensor.shape), float(sums[0]), float(norms[0]))

    @classmethod
    def from_file(cls, name: str, contents: Any) -> Self:
        """Return what a file says, or raise: a file is not trusted."""
        shape, total, norm = contents
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"the frozen parameter {name} has shape {shape}.")
        return cls(tuple(shape), float(total), float(norm))

    def are_those_of(self, tensor: Tensor) -> bool:
        """Whether a parameter has these weights, in any precision."""
        return self.agrees_with(self.of(tensor))

    def agrees_with(self, other: Self) -> bool:
        """Whether both describe the same weights, in any precision."""
        return other.shape == self.shape and abs(other.total - self.total) <= _LARGEST_DIFFERENCE * self.norm


def new_names(rename: Rename, names: Iterable[str]) -> dict[str, str]:
    """Map old names to new ones; raise if two of them become the same."""
    old = sorted(names)
    if isinstance(rename, Mapping):
        unused = [prefix for prefix in rename if not any(name.startswith(prefix) for name in old)]
        if unused:
            raise ValueError(
                f"rename has the prefix {unused[0]!r}, but no name begins with it: {', '.join(old[:3])}, ..."
            )
    elif not callable(rename):
        raise TypeError(f"rename={rename!r} must be a function, or a mapping of prefixes, like {{'model.': ''}}.")

    def change(name: str) -> str:
        if not isinstance(rename, Mapping):
            return rename(name)
        prefix = next((prefix for prefix in rename if name.startswith(prefix)), None)
        return name if prefix is None else rename[prefix] + name.removeprefix(prefix)

    new = {name: change(name) for name in old}
    by_new: dict[str, str] = {}
    for name, changed in new.items():
        if not isinstance(changed, str):
            raise TypeError(f"rename turns {name} into {changed!r}: it must return a string.")
        if by_new.setdefault(changed, name) != name:
            raise ValueError(
                f"rename turns both {by_new[changed]} and {name} into {changed}: names must stay different."
            )
    return new
