"""How a batch is evaluated in parts: in turn, all together, or as one sub-batch that arrives in micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn

from bsam import batch_norm as bn
from bsam.distributed import rank_of
from bsam.executor import Executor
from bsam.gradients import PerExample
from bsam.modules import LossFunction, running_statistics
from bsam.optim.checked import CheckedOptimizer
from bsam.optim.micro_batches import GradAtJoined, Kept, MicroBatch
from bsam.optim.pending import Probed
from bsam.optim.probing import GradAt, Gradients, Prober, Slot, Tally
from bsam.optim.together import Parts, obstacle_to_stacking, probe_together

__all__ = ["SplittingOptimizer"]


class SplittingOptimizer(CheckedOptimizer):
    """An optimizer that evaluates the parts of a batch, each with weights of its own, and averages over them.

    The noise of a part depends on its number in the step, counted over all probes, ranks and splits:
    (probe * ranks + rank) * splits + split.
    """

    module: nn.Module | None
    process_group: dist.ProcessGroup | None
    vectorise: bool | None

    def _reset(self) -> None:
        super()._reset()
        self._executor = Executor(self.vectorise, "the splits are computed in a loop", self.module)
        self._known_closure: Any = None  # the code of the last loss function whose use of the weights was checked
        self._per_example = PerExample(self.module, self.vectorise) if self.per_example and self.module else None

    # ------------------------------------------------------------------ the method, given by a subclass

    per_example: ClassVar[bool] = False
    """Whether the probe uses only `grad_at.moments`, the moments of the gradients of single examples."""

    def _theta(self, slot: Slot, split: int) -> Tensor:
        """Return the weights of a slot in the first pass: its mean, or a sample. `split` counts over all ranks."""
        return slot.mean

    def _probe(self, slots: list[Slot], theta: Iterable[Tensor], grad_at: Gradients, tally: Tally) -> None:
        """Evaluate gradients of one sub-batch, first at the weights `theta`, and add the results to `tally`.

        The result named `"gradient"` will be applied. A slot may hold many parameters packed together, and the probe
        may run under `torch.vmap`: write formulas only, without control flow that depends on values.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------ the parts of a batch

    def _first_split(self, num_probes: int) -> int:
        """Return the number of a probe's first part, counted over all probes of the step and all ranks."""
        group = self.process_group
        rank, world = (0, 1) if group is None else (rank_of(group), dist.get_world_size(group))
        return int((num_probes * world + rank) * self._option("splits"))

    def _probe_parts(
        self, prober: Prober, slots: list[Slot], closure: LossFunction, parts: Parts, num_probes: int
    ) -> Probed:
        """Average losses and results over the parts, probed together or in turn; `num_probes` were before."""
        first, on_this_rank = self._first_split(num_probes), num_probes * self._option("splits")

        def in_turn() -> Probed:
            return self._probe_in_turn(prober, slots, closure, parts, first, on_this_rank)

        ragged = len({size for _, size in parts}) > 1  # a ragged last batch is normal: no warning
        if len(parts) == 1 or ragged or not slots or self.per_example:
            return in_turn()
        if self.module is None:
            if self.vectorise:
                raise ValueError("vectorise=True needs the model: make the optimizer with module=model.")
            return in_turn()
        module = self.module
        code = getattr(closure, "__code__", closure)

        def together() -> Probed:
            check, self._known_closure = code is not self._known_closure, None
            found = probe_together(prober, module, slots, closure, parts, first, on_this_rank, check=check)
            self._known_closure = code
            return found

        self._executor.vectorise = self.vectorise
        return self._executor.run(
            together,
            in_turn,
            pays=Executor.launch_bound(slots[0].parameter.device),
            obstacle=obstacle_to_stacking(module, self._option("batch_norm"), parts),
        )

    def _probe_in_turn(
        self, prober: Prober, slots: list[Slot], closure: LossFunction, parts: Parts, first: int, on_this_rank: int
    ) -> Probed:
        """Average losses and results over the parts, probed one after the other."""
        total = sum(size for _, size in parts)
        tally, losses = Tally(), Tally()
        for k, (part, size) in enumerate(parts):
            tally.weight = losses.weight = size / total
            grad_at = self._grad_at(slots, closure, part, on_this_rank + k)
            prober._probe(slots, self._first_weights(slots, first + k), grad_at, tally)
            losses.add("loss", grad_at.losses)
        return losses.means["loss"], tally.means

    def _first_pass(self, slots: list[Slot], micro_batch: MicroBatch, kept: Kept, num_probes: int) -> Kept:
        """Return the kept micro-batches and one more, whose first pass runs now."""
        grad_at = self._grad_at(slots, micro_batch.loss_fn, micro_batch.part, num_probes)
        theta = self._first_weights(slots, self._first_split(num_probes))
        results = grad_at.moments(theta) if self.per_example else (grad_at(theta),)
        return kept.plus(micro_batch.after(grad_at.losses), results, slots)

    def _probe_joined(
        self, prober: Prober, slots: list[Slot], kept: Kept, last: MicroBatch, num_probes: int
    ) -> tuple[list[Tensor], dict[str, list[Tensor]], Tensor]:
        """Probe the kept micro-batches and the last one as one sub-batch; return the last one's loss too."""
        all_grad_at = []
        for micro_batch in (*kept.micro_batches, last):
            all_grad_at.append(self._grad_at(slots, micro_batch.loss_fn, micro_batch.part, num_probes))
            all_grad_at[-1].losses += micro_batch.losses  # of the first pass, where it is done
        grad_at, tally = GradAtJoined(slots, kept, all_grad_at, last.weight), Tally()
        prober._probe(slots, self._first_weights(slots, self._first_split(num_probes)), grad_at, tally)
        return grad_at.losses, tally.means, all_grad_at[-1].losses[0]

    def _first_weights(self, slots: list[Slot], split: int) -> Iterator[Tensor]:
        """Yield the weights of the first pass of a sub-batch."""
        return (self._theta(slot, split) for slot in slots)

    def _grad_at(self, slots: list[Slot], closure: LossFunction, part: tuple[Any, ...], split: int) -> GradAt:
        """Return the gradients of one sub-batch; `split` is its number among those of this rank in the step."""
        frozen = functools.partial(self._frozen_running_statistics, split)
        return GradAt(slots, closure, part, frozen, self._per_example, self.module)

    def _frozen_running_statistics(self, split: int, pass_index: int) -> list[tuple[nn.Module, str]]:
        """Return owner and name of the running statistics that a pass must not move."""
        if self.module is None or bn.moves_statistics(self._option("batch_norm"), split, pass_index):
            return []
        return running_statistics(self.module)
