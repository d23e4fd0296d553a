"""An optimizer that looks at its own weights and state: `diagnose()`, and one warning in training."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from bsam import shards
from bsam.executor import callers_level
from bsam.optim.diagnosis import (
    CHECKED_AT,
    FEWEST_WEIGHTS,
    SIZE_RULES,
    Diagnosis,
    Finding,
    full_rate,
    growth,
    pace,
    ratio,
)
from bsam.optim.probing import Slot
from bsam.optim.slotted import SlottedOptimizer

__all__ = ["DiagnosingOptimizer"]


class DiagnosingOptimizer(SlottedOptimizer):
    """An optimizer that measures its steps, noise and perturbations against the weights, by `bsam.optim.diagnosis`."""

    def _reset(self) -> None:
        super()._reset()
        self._warned: set[int | str] = set()  # parameters and reasons for which a warning was given
        self._num_steps = 0  # since this object was made
        self._start: dict[Tensor, Tensor] = {}  # the norm of each parameter before the first of them
        self._pace: Finding | None = None  # of the first steps
        self._most_examples = 0.0  # in a step

    def _sizes(self, slot: Slot) -> dict[str, Tensor]:
        """Return what is added to the weights of a slot, as far as the state tells, under names of `SIZE_RULES`."""
        return {}

    def diagnose(self) -> Diagnosis:
        """Say what the weights tell about the settings: `print(optimizer.diagnose())`."""
        self._refuse_if_away("diagnose the optimizer")
        with torch.no_grad():
            return Diagnosis(tuple(self._ratios(self._measured_slots())))

    def _ratios(self, slots: list[Slot]) -> list[Finding]:
        """Return what weights and state of measured slots say: the findings that training warns of."""
        all_sizes = [(slot, name, size.norm()) for slot in slots for name, size in self._sizes(slot).items()]
        whole = shards.whole_norms([size for _, _, size in all_sizes], [slot.parameter for slot, _, _ in all_sizes])
        sizes = [(slot.index, name, size) for (slot, name, _), size in zip(all_sizes, whole, strict=True)]
        norms = [slot.mean.norm(dtype=slot.dtype) if slot.norm is None else slot.norm() for slot in slots]
        starts = [self._start.get(slot.parameter, norm) for slot, norm in zip(slots, norms, strict=True)]
        numbers = iter(_read([*norms, *starts, *(size for _, _, size in sizes)]))
        weights = {slot.index: next(numbers) for slot in slots}
        grown = ratio({str(index): (now, next(numbers)) for index, now in weights.items()})
        names = {slot.index: self._name(slot) for slot in slots}
        pairs: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in SIZE_RULES}
        for index, name, _ in sizes:
            pairs[name][names[index]] = (next(numbers), weights[index])
        findings = [growth(grown.total, self._num_steps)] if grown is not None and self._start else []
        for name, (rule, option) in SIZE_RULES.items():
            found = ratio(pairs[name])
            if found is not None:
                findings.append(rule(found, self._values(option)))
        return findings if self._pace is None else [*findings, self._pace]

    def _values(self, option: str) -> list[float]:
        """Return an option of each group; of the learning rate, its largest value."""
        return [full_rate(group) if option == "lr" else float(group[option]) for group in self.param_groups]

    def _measured_slots(self) -> list[Slot]:
        """Return the slots whose weights carry the model, see `bsam.optim.diagnosis`."""
        slots = self._slots()
        if self._start:
            slots = [slot for slot in slots if slot.parameter in self._start]
            norms = _read([self._start[slot.parameter] for slot in slots])
            slots = [slot for slot, norm in zip(slots, norms, strict=True) if norm > 0]
        return [slot for slot in slots if slot.parameter.dim() > 1] or slots

    def _note_start(self) -> None:
        """Note how large the weights are, before the first step of this object."""
        if not self._num_steps:
            trained = self._trained()
            norms = [shards.local(p).norm(dtype=torch.promote_types(p.dtype, torch.float32)) for p in trained]
            self._start = dict(zip(trained, shards.whole_norms(norms, trained), strict=True))

    def _count_step(self, examples: float) -> None:
        """Count a step over some examples. After some steps, look at the ratios, and warn once if one is bad."""
        self._num_steps += 1
        self._most_examples = max(self._most_examples, examples)
        if self._num_steps in CHECKED_AT and "ratios" not in self._warned:
            slots = self._measured_slots()
            many = sum(slot.parameter.numel() for slot in slots) >= FEWEST_WEIGHTS
            found = self._ratios(slots) if many else []
            for finding in found:
                if finding.name == "step" and self._num_steps == CHECKED_AT[0]:
                    self._pace = pace(finding.value, self._values("lr"))
                    found = [*found, self._pace]
            bad = [finding.sentence for finding in found if finding.is_bad]
            if bad:
                self._warned.add("ratios")
                text = f"after {self._num_steps} steps: {' '.join(bad)} optimizer.diagnose() says more."
                warnings.warn(text, stacklevel=callers_level())


def _read(numbers: Sequence[Tensor]) -> list[float]:
    """Read numbers from the device, all at once."""
    found: list[float] = (
        torch.stack([each.float().to(numbers[0].device) for each in numbers]).tolist() if numbers else []
    )
    return found
