"""The weights of the first pass of a compiled step: one sample per split, drawn before the traced step reads it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bsam.engine.methods import Method
from bsam.engine.packs import Pack, PackSlot
from bsam.engine.rates import Rates

__all__ = ["Draws"]


class Draws:
    """Draws the sampled weights of all runs and splits.

    On CUDA one kernel samples a whole pack and keeps the noise in registers. Elsewhere the method's `_theta` samples
    one parameter at a time.

    Args:
        methods: One method per run.
        packs: Their parameters.
        group_of: The number of each pack's group.
        rates: The rates of the methods.
        splits: Number of samples per step.
    """

    def __init__(
        self, methods: Sequence[Method], packs: list[Pack], group_of: list[int], rates: Rates, splits: int
    ) -> None:
        self._methods, self._rates = methods, rates
        self.sampled = [methods[0]._noise_precision(pack.runs[0][0]) is not None for pack in packs]
        """For each pack, whether it is sampled in the first pass."""
        chosen = [(pack, group) for pack, group, noisy in zip(packs, group_of, self.sampled, strict=True) if noisy]
        self._packs = [pack for pack, _ in chosen]
        self._groups = [group for _, group in chosen]
        device = packs[0].weights.device
        self.theta = [
            torch.zeros((len(methods), splits, pack.numel), device=device, dtype=pack.runs[0][0].dtype)
            for pack in self._packs
        ]
        """One tensor (runs, splits, elements) per sampled pack."""
        self._ends = [pack.ends() for pack in self._packs]
        self._seeds: Tensor | None = None
        if self._packs:
            self._seeds = torch.tensor([m._option("seed") for m in methods], dtype=torch.int64, device=device)
        self._tables: list[Tensor] = []
        if device.type == "cuda":
            from bsam.engine.sampling_triton import block_table

            self._tables = [
                block_table([slot.index for slot in pack.runs[0]], pack.offsets, pack.sizes, device)
                for pack in self._packs
            ]

    def __call__(self) -> None:
        """Write the weights of the first pass of the next step into `theta`."""
        for i, theta in enumerate(self.theta):
            if theta.device.type == "cuda" and theta.dtype == torch.float32:
                self._by_kernel(i, theta)
                self._without_noise(i, theta)
            else:
                self._by_method(i, theta)

    def noise_precision(self, i: int) -> Tensor:
        """Return `_noise_precision` of a whole pack, (runs, elements)."""
        pack, method, index = self._packs[i], self._methods[0], self._groups[i]
        rates = self._rates.tensor[:, index, None].to(pack.runs[0][0].dtype)  # (runs, 1, columns)
        group = self._rates.read(method.param_groups[index], rates)
        slot = PackSlot(0, pack.weights, group, pack.weights, pack.state, ends=self._ends[i], pack=pack)
        s = method._noise_precision(slot)
        assert s is not None
        return s

    def _by_kernel(self, i: int, theta: Tensor) -> None:
        from bsam.engine.sampling_triton import sample_posterior

        pack, N = self._packs[i], self._methods[0].effective_num_data
        s, steps = self.noise_precision(i), pack.state["step"]
        assert self._seeds is not None
        sample_posterior(theta, pack.weights, s, self._tables[i], steps, self._seeds, N)

    def _without_noise(self, i: int, theta: Tensor) -> None:
        """Write the mean of rows that stand for padding, which the kernel does not know."""
        pack = self._packs[i]
        for run, slots in enumerate(pack.runs):
            for place, slot in enumerate(slots):
                if slot.padding is not None:
                    size = slot.parameter[0].numel()
                    start = pack.offsets[place] + slot.padding * size
                    theta[run, :, start : start + size] = pack.weights[run, start : start + size]

    def _by_method(self, i: int, theta: Tensor) -> None:
        pack = self._packs[i]
        for run, (method, slots) in enumerate(zip(self._methods, pack.runs, strict=True)):
            for slot, start, size in zip(slots, pack.offsets, pack.sizes, strict=True):
                for split in range(theta.shape[1]):
                    theta[run, split, start : start + size].copy_(method._theta(slot, split).flatten())
