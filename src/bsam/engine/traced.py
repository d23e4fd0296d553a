"""One step of a method as a function of tensors, for one run or several; it is traced and compiled.

The method's own probe and update run on packs in place of parameters: the probe under vmap over the splits, the whole
step under vmap over the runs. No formula of a method is written a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bsam.compiler.program import Program
from bsam.engine.methods import Method
from bsam.engine.packs import Pack, PackSlot
from bsam.engine.rates import Rates
from bsam.modules import LossFunction, LossModule
from bsam.optim.arithmetic import all_finite, clip_gradient
from bsam.optim.probing import Slot
from bsam.optim.together import GradAtStack, probe_stack
from bsam.torch_private import pytree

__all__ = ["TracedStep"]


class TracedStep:
    """The step as a function of all tensors that it reads; it writes into these tensors.

    Args:
        method: The method of the first run; the other methods differ only in rates and seeds.
        module: The model of the first run.
        loss_fn: The loss function of the first run.
        packs: The parameters of all runs.
        group_of: The number of each pack's group.
        rates: The rates of all methods.
        sampled: For each pack, whether it is sampled in the first pass.
        part: A sub-batch, for its structure.
        splits: Number of sub-batches.
    """

    def __init__(
        self,
        method: Method,
        module: nn.Module,
        loss_fn: LossFunction,
        packs: list[Pack],
        group_of: list[int],
        rates: Rates,
        sampled: list[bool],
        part: tuple[Any, ...],
        splits: int,
    ) -> None:
        self._method, self._loss_module = method, LossModule(module, loss_fn)
        self._packs, self._group_of, self._rates, self._sampled = packs, group_of, rates, sampled
        self._part, self._splits = part, splits
        self._runs = len(packs[0].runs)
        self._has_base = method._base_step() is not None
        self._ends = {number: ends for number, pack in enumerate(packs) if (ends := pack.ends()) is not None}
        self._program: Callable[..., Any] | None = None
        self._spec: Any = None

    def flatten(self, inputs: dict[str, Any]) -> list[Tensor]:
        """Return all tensors that a step reads and writes, in the order of its arguments.

        Args:
            inputs: `theta`, `weights`, `state`, `buffers`, `batch`, `losses`, `skipped`, `refused` and `gradients`;
                dimension 0 of each is the run.
        """
        flat, self._spec = pytree.tree_flatten({**inputs, "rates": self._rates.tensor, "ends": self._ends})
        return flat

    def compile_gradient(self, batch: list[Tensor], buffers: dict[str, Tensor]) -> None:
        """Compile the gradients separately, because a step may compute them twice."""
        if self._method.per_example:
            return

        def stack(tensors: Iterable[Tensor]) -> list[Tensor]:
            return [t[:, None].expand(-1, self._splits, *t.shape[1:]) for t in tensors]

        weights = stack(pack.weights.to(pack.runs[0][0].dtype) for pack in self._packs)
        rows = [t.reshape(len(t), self._splits, -1, *t.shape[2:]) for t in batch]
        stacks = dict(zip(buffers, stack(buffers.values()), strict=True))
        grad_at = GradAtStack(self._loss_module, self._unpack, self._pack, self._part, [], {}, lambda _: frozenset())
        if self._runs == 1:
            arguments = pytree.tree_map(lambda t: t[0], (weights, rows, stacks))
            self._program = Program(grad_at.evaluate_all, arguments, stacked=False)
        else:
            together = torch.vmap(grad_at.evaluate_all, randomness="different")
            self._program = Program(together, (weights, rows, stacks), stacked=True)

    def __call__(self, *flat: Tensor) -> list[Tensor]:
        """Take one step of each run."""
        given = pytree.tree_unflatten(list(flat), self._spec)
        outputs = {name: given[name] for name in ("weights", "state", "buffers", "losses", "refused", "gradients")}
        read = {name: given[name] for name in ("theta", "weights", "state", "buffers", "batch", "rates")}
        ends = given["ends"]
        if self._runs == 1:
            results = pytree.tree_map(lambda t: t[None], self._one(pytree.tree_map(lambda t: t[0], read), ends))
        else:
            results = torch.vmap(lambda each: self._one(each, ends), randomness="different")(read)
        given["skipped"].add_(results["refused"].long())
        for name, target in outputs.items():
            for to, value in zip(pytree.tree_leaves(target), pytree.tree_leaves(results[name]), strict=True):
                to.copy_(value)
        return []

    def _one(self, given: dict[str, Any], ends: dict[int, Tensor]) -> dict[str, Any]:
        """Compute the step of one run, as formulas."""
        slots = self._pack_slots(given, ends)
        drawn = iter(given["theta"])
        theta = [
            next(drawn) if sampled else slot.mean.expand(self._splits, *slot.mean.shape)
            for slot, sampled in zip(slots, self._sampled, strict=True)
        ]
        losses, averages, moved = probe_stack(
            self._method,
            slots,
            self._loss_module,
            self._unpack,
            self._pack,
            theta,
            self._part,
            [t.unflatten(0, (self._splits, -1)) for t in given["batch"]],
            {name: b.expand(self._splits, *b.shape) for name, b in given["buffers"].items()},
            self._program,
        )
        finite = all_finite([*losses, *(t for tensors in averages.values() for t in tensors)])
        clip_gradient(averages["gradient"], self._method._option("max_grad_norm"))
        gradients = []
        if self._has_base:
            gradients = [g.to(slot.mean.dtype) for g, slot in zip(averages["gradient"], slots, strict=True)]
        else:
            self._method._apply(slots, averages, finite)
        return {
            "weights": [slot.parameter for slot in slots],
            "state": [slot.state for slot in slots],
            "buffers": {name: torch.where(finite, moved[name], b) for name, b in given["buffers"].items()},
            "losses": losses[0],
            "refused": (~finite).float(),
            "gradients": gradients,
        }

    def _pack_slots(self, given: dict[str, Any], ends: dict[int, Tensor]) -> list[Slot]:
        slots: list[Slot] = []
        columns = zip(self._packs, self._group_of, given["weights"], given["state"], strict=True)
        for number, (pack, index, weights, state) in enumerate(columns):
            own = {name: value.clone() for name, value in state.items()}  # the update writes to state and parameter
            group = self._rates.read(self._method.param_groups[index], given["rates"][index])
            first = pack.runs[0][0].index
            slots.append(PackSlot(first, weights.clone(), group, weights, own, ends=ends.get(number)))
        return slots

    def _unpack(self, weights: list[Tensor]) -> dict[str, Tensor]:
        return {
            name: w for pack, flat in zip(self._packs, weights, strict=True) for name, w in pack.unpack(flat).items()
        }

    def _pack(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        left = iter(gradients)
        return [pack.pack([next(left) for _ in pack.names], pack.runs[0][0].dtype) for pack in self._packs]
