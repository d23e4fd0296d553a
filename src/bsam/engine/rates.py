"""The rates of all runs on the device, where a compiled step reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bsam.engine.methods import Method

__all__ = ["Rates"]


class Rates:
    """The options that methods declare as rates, one number per column: a pair such as `betas` takes two.

    Args:
        methods: One method per run.
        device: The device that reads the rates.
    """

    def __init__(self, methods: Sequence[Method], device: torch.device) -> None:
        self._methods = methods
        self._names = methods[0].rates
        self._known: list[list[list[float]]] = []
        values = self._present()
        self.tensor = torch.zeros((len(values), len(values[0]), len(values[0][0])), dtype=torch.float64, device=device)
        """(runs, groups, columns)."""

    def send(self) -> bool:
        """Copy the present rates to the device; returns whether they have changed."""
        values = self._present()
        if values == self._known:
            return False
        self.tensor.copy_(torch.tensor(values, dtype=torch.float64).reshape(self.tensor.shape))
        self._known = values
        return True

    def read(self, group: dict[str, Any], columns: Tensor) -> dict[str, Any]:
        """Return the group with its rates as tensors, taken from the last dimension of `columns`."""
        left = iter(columns.unbind(-1))
        rates: dict[str, Any] = {}
        for name in self._names:
            value = group.get(name)
            rates[name] = tuple(next(left) for _ in value) if isinstance(value, Sequence) else next(left)
        return {**group, **rates}

    def column(self, name: str) -> Tensor:
        """Return one rate of every group, (runs, groups)."""
        groups = [self.read(group, self.tensor[:, i]) for i, group in enumerate(self._methods[0].param_groups)]
        return torch.stack([group[name] for group in groups], -1)

    def _present(self) -> list[list[list[float]]]:
        return [[self._row(group) for group in method.param_groups] for method in self._methods]

    def _row(self, group: dict[str, Any]) -> list[float]:
        row: list[float] = []
        for name in self._names:
            value = group.get(name, 0.0)  # a base optimizer may have no learning rate
            row += [float(each) for each in (value if isinstance(value, Sequence) else (value,))]
        return row
