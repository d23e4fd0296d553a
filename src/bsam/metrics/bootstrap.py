"""Percentile intervals over resampled examples, and tables of numbers with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

__all__ = ["Numbers", "check_bootstrap", "num_times", "with_intervals"]


class Numbers:
    """A dataclass of metrics of one set of predictions, with intervals: prints them as a table."""

    names: ClassVar[tuple[str, ...]]

    if TYPE_CHECKING:  # each subclass has these fields, in its own order
        num_examples: int
        intervals: dict[str, tuple[float, float]]
        level: float

    def __str__(self) -> str:
        head = f"{self.num_examples} examples"
        if self.intervals:
            head += f", {100 * self.level:g}% bootstrap intervals"
        lines, width = [head], max(map(len, self.names))
        for name in self.names:
            line = f"{name:<{width}} {getattr(self, name):>z8.4f}"
            if name in self.intervals:
                low, high = self.intervals[name]
                line += f"   [{low:>z6.4f}, {high:>z6.4f}]"
            lines.append(line)
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain numbers, lists and dicts. `json.dumps` writes NaN and inf as Python does."""
        fields: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return fields | {"intervals": {name: list(ends) for name, ends in self.intervals.items()}}


def check_bootstrap(num_bootstrap: int, level: float) -> None:
    """Raise unless the number of resamples and the coverage of intervals are possible."""
    if not isinstance(num_bootstrap, int) or num_bootstrap < 0:
        raise ValueError(f"num_bootstrap must be an integer >= 0, got {num_bootstrap!r}; write 0 for no intervals")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level!r}; write 0.95 for 95% intervals")


def num_times(index: Tensor) -> Tensor:
    """Return how often each of n examples is in each resample (R, n), as float64."""
    ones = torch.ones(index.shape, dtype=torch.float64, device=index.device)
    return torch.zeros_like(ones).scatter_add_(1, index, ones)


def with_intervals(
    names: Sequence[str],
    metrics_of: Callable[[Tensor], Tensor],
    num_examples: int | Sequence[int],
    num_numbers: int,
    *,
    num_bootstrap: int,
    level: float,
    seed: int,
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Return the metrics of all examples, and their percentile intervals over resamples.

    Args:
        names: The names of the metrics.
        metrics_of: Returns the metrics, (R, len(names)), of R resamples, given as the numbers of examples (R, n).
        num_examples: n; of several sets that are resampled apart, their sizes: their examples are numbered together.
        num_numbers: How many numbers all examples have, to limit the memory.
        num_bootstrap: Number of resamples.
        level: Coverage of the intervals.
        seed: Seed of the resamples.
    """
    sizes = [num_examples] if isinstance(num_examples, int) else list(num_examples)
    values = metrics_of(torch.arange(sum(sizes), device="cpu")[None])[0].tolist()
    intervals = {}
    if num_bootstrap > 0:
        generator = torch.Generator("cpu").manual_seed(seed)
        rows = max(1, 2**20 // num_numbers)  # resamples at a time: about 100 MB
        resampled = []
        for start in range(0, num_bootstrap, rows):
            count = min(rows, num_bootstrap - start)
            index = [torch.randint(n, (count, n), generator=generator, device="cpu") for n in sizes]
            index = [part + sum(sizes[:i]) for i, part in enumerate(index)]
            resampled.append(metrics_of(torch.cat(index, dim=1)))
        # "nearest": interpolating between two infinite NLLs would give NaN.
        low, high = (
            torch.cat(resampled).nanquantile(q, dim=0, interpolation="nearest").tolist()
            for q in ((1 - level) / 2, (1 + level) / 2)
        )
        intervals = dict(zip(names, zip(low, high, strict=True), strict=True))
    return dict(zip(names, values, strict=True)), intervals
