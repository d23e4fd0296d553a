"""Parameters and their state packed into few long buffers, so that a formula is one kernel, not one per parameter.

A pack holds the small parameters of one group, or one large parameter, of all runs that are trained together:
(runs, elements). The parameters and the tensors of their state become views of the pack. They remain the same objects
in the model and in the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bsam.optim.probing import SMALLEST_SQUARE, Slot, matrix_size
from bsam.torch_private import foreach_norm

__all__ = ["Pack", "PackSlot", "make_packs"]

ALIGNMENT = 4
"""Parameters begin at multiples of this number of elements, for wide loads."""
LARGE = 2**21
"""A parameter with this number of elements or more is a pack by itself: it fills the device alone."""


@dataclass
class PackSlot(Slot):
    """A pack in the place of a parameter, in the formulas of a method."""

    ends: Tensor | None = None
    """The end of each parameter in the pack, padding included; None if there is only one parameter."""
    pack: Pack | None = None
    """The pack, where the norm of each parameter is asked for."""

    def per_element(self, value: Tensor) -> Tensor:
        """Broadcast one number per parameter of the pack to the elements."""
        if self.ends is None:
            return value
        elements = torch.arange(self.mean.shape[-1], device=self.ends.device)
        return value.index_select(-1, torch.bucketize(elements, self.ends, right=True))

    def inverse_mean_square(self) -> Tensor:
        """Return one number for each parameter of the pack, (runs, parameters)."""
        assert self.pack is not None
        return self.pack.inverse_mean_squares()


@dataclass
class Pack:
    """Slots of all runs, packed; slots at the same place have the same shape in all runs."""

    runs: list[list[Slot]]
    """The slots of each run."""
    names: list[str]
    """The names of their parameters in the model."""
    weights: Tensor = field(init=False)
    """(runs, elements)."""
    state: dict[str, Tensor] = field(init=False)
    """(runs, elements), or (runs, parameters) for per-parameter scalars."""

    def __post_init__(self) -> None:
        self.shapes = [slot.parameter.shape for slot in self.runs[0]]
        self.sizes = [slot.parameter.numel() for slot in self.runs[0]]
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes]
        self.offsets = [sum(padded[:i]) for i in range(len(padded))]
        self.numel = sum(padded)
        first = self.runs[0][0]
        runs = len(self.runs)
        self.weights = first.parameter.new_zeros((runs, self.numel))
        self.state = {
            name: torch.zeros((runs, len(self.sizes)), dtype=value.dtype, device=value.device)
            if value.dim() == 0 and (first.parameter.dim() > 0 or name == "step")  # of a parameter that is a number
            else torch.ones((runs, self.numel), dtype=value.dtype, device=value.device)  # a precision must be > 0
            for name, value in first.state.items()
        }
        self._matrix_sizes = torch.tensor([matrix_size(shape) for shape in self.shapes], device=self.weights.device)
        self.adopt()

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy the present values into the pack, and make parameters and states views of it."""
        for run, slots in enumerate(self.runs):
            for place, slot in enumerate(slots):
                view = self.view(self.weights, run, place)
                view.copy_(slot.parameter)
                slot.parameter.data = view
                slot.mean = slot.parameter.detach()
                for name, buffer in self.state.items():
                    scalar = buffer.shape[1:] != (self.numel,)
                    part = buffer[run, place] if scalar else self.view(buffer, run, place)
                    part.copy_(slot.state[name])
                    slot.state[name] = part

    def view(self, buffer: Tensor, run: int, place: int) -> Tensor:
        """Return the part of a buffer (runs, elements) that belongs to one parameter of one run."""
        start = self.offsets[place]
        return buffer[run, start : start + self.sizes[place]].view(self.shapes[place])

    def ends(self) -> Tensor | None:
        """See `PackSlot`."""
        if len(self.sizes) == 1:
            return None
        return torch.tensor([*self.offsets[1:], self.numel], device=self.weights.device)

    def inverse_mean_squares(self) -> Tensor:
        """Return `Slot.inverse_mean_square` of each parameter, (runs, parameters)."""
        runs, places = range(len(self.runs)), range(len(self.sizes))
        norms = foreach_norm([self.view(self.weights, run, place) for run in runs for place in places])
        squares = torch.stack(norms).view(len(runs), len(places)).square()
        return self._matrix_sizes / squares.clamp_min(SMALLEST_SQUARE)

    # ------------------------------------------------------------------ in a traced step, for one run and one split

    def unpack(self, flat: Tensor) -> dict[str, Tensor]:
        """Split flat weights into the parameters, by name."""
        dtype = self.weights.dtype
        return {
            name: flat[start : start + size].view(shape).to(dtype)
            for name, start, size, shape in zip(self.names, self.offsets, self.sizes, self.shapes, strict=True)
        }

    def pack(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Concatenate one tensor per parameter."""
        pieces = []
        ends = [*self.offsets[1:], self.numel]
        for tensor, start, end in zip(tensors, self.offsets, ends, strict=True):
            pieces.append(tensor.reshape(-1).to(dtype))
            if end - start > tensor.numel():
                pieces.append(tensor.new_zeros(end - start - tensor.numel(), dtype=dtype))
        return torch.cat(pieces)


def make_packs(runs: list[list[Slot]], names: list[str], noisy: Sequence[bool]) -> list[Pack]:
    """Pack the slots of all runs: by group, type, and whether they have noise, each large parameter by itself."""
    places: dict[Any, list[int]] = {}
    for place, (slot, has_noise) in enumerate(zip(runs[0], noisy, strict=True)):
        key = (id(slot.group), slot.parameter.dtype, slot.parameter.device, has_noise)
        places.setdefault((key, place) if slot.parameter.numel() >= LARGE else key, []).append(place)
    return [
        Pack([[slots[p] for p in chosen] for slots in runs], [names[p] for p in chosen]) for chosen in places.values()
    ]
