"""The parameters of an optimizer as slots, with the model and the ranks around them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bsam import shards
from bsam.distributed import all_equal, all_reduce_sum, average_over_ranks, broadcast, rank_of
from bsam.modules import padding_rows, running_statistics, shortened
from bsam.optim import options
from bsam.optim.base_step import BaseStep
from bsam.optim.checked import slots_of
from bsam.optim.probing import Slot
from bsam.optim.sharding import check_sharding
from bsam.optim.splits import SplittingOptimizer
from bsam.torch_private import own_buffers

__all__ = ["SlottedOptimizer"]


class SlottedOptimizer(SplittingOptimizer):
    """An optimizer that knows the names of its parameters, whether they are sharded, and which ranks share them."""

    def _reset(self) -> None:
        super()._reset()
        self._synchronised = False
        self._sharded = False  # whether the parameters are sharded
        self._padding: dict[int, int] | None = None  # `padding_rows` of the model
        self._shortened: set[int] = set()  # its `shortened` weights

    # ------------------------------------------------------------------ slots and state

    def _make_state(self) -> None:
        base = self._base_step()
        if base is None:
            super()._make_state()
        else:
            base.make_state()

    def _own(self, slots: list[Slot]) -> None:
        """Store the state of the slots in the optimizer's `state`."""
        for slot in slots:
            if slot.state and not (shards.is_sharded(slot.parameter) and slot.parameter in self.state):
                self.state[slot.parameter] = shards.whole_values(slot.state, slot.parameter)

    def _state_of(self, slot: Slot) -> dict[str, Tensor]:
        """Return the state of a slot in the optimizer's `state`, or a fresh one."""
        own: dict[str, Tensor] | None = self.state.get(slot.parameter)
        return own or self._fresh_state(slot.parameter, slot.group)

    def _base_step(self) -> BaseStep | None:
        """Return the step of the base optimizer, or None without a base optimizer."""
        return None if self.base_optimizer is None else BaseStep(self.base_optimizer, hooks=False)

    def _slots(self, *, copied: bool = True) -> list[Slot]:
        """Return one slot per parameter that requires a gradient, with the weights or a copy of them."""
        for group in self.param_groups:
            for name in self.group_aliases:
                if name in group:
                    raise ValueError(
                        f"{name}={group[name]} was written into a parameter group, and would be ignored: write "
                        'group["prior_precision"] = weight_decay * optimizer.effective_num_data, and remove this key.'
                    )
            lr = group.get("lr")
            if isinstance(lr, Tensor) and lr.shape == (1,):  # torch accepts this shape, formulas take numbers
                group["lr"] = lr.reshape(())
        self._check_changes()
        self._sharded = check_sharding(self, self._trained())
        slots = slots_of(self, self._fresh_state if self.base_optimizer is None else None, copied=copied)
        if self._padding is None:
            self._padding = {} if self.module is None else padding_rows(self.module)
            self._shortened = set() if self.module is None else shortened(self.module)
        for slot in slots if self._padding or self._shortened else ():
            slot.padding = shards.row_here(slot.parameter, self._padding.get(id(slot.parameter)))
            if id(slot.parameter) in self._shortened:
                raise ValueError(
                    f"{self._name(slot)} is an embedding with max_norm, which shortens rows in every pass, at weights "
                    "that a step takes back. Leave max_norm out: the prior keeps the weights small."
                )
        return slots

    # ------------------------------------------------------------------ the model

    def _name(self, slot: Slot) -> str:
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        if not names and self.module is not None:
            by_id = {id(p): name for name, p in self.module.named_parameters()}
            if id(slot.parameter) in by_id:  # not while a sharded model has gathered its weights
                return by_id[id(slot.parameter)]
        return names[slot.index] if names else f"parameter {slot.index} of shape {tuple(slot.parameter.shape)}"

    def _trained(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _check_module(self) -> None:
        self._sharded = check_sharding(self, self._trained())
        if self.module is None:
            return
        if self.process_group is not None and isinstance(self.module, nn.parallel.DistributedDataParallel):
            raise ValueError(
                "give process_group= or a DistributedDataParallel module, not both: with process_group= the optimizer "
                "averages over the ranks itself, so give it the bare module."
            )
        self._check_belongs(p for group in self.param_groups for p in group["params"])

    def _check_belongs(self, params: Iterable[Any]) -> None:
        known = {id(p) for p in self.module.parameters()} if self.module is not None else set()
        tensors = [p[1] if isinstance(p, tuple) else p for p in params]
        leaves = [p for p in tensors if isinstance(p, Tensor) and p.is_leaf]  # torch refuses anything else
        if self.module is not None and any(id(p) not in known for p in leaves):
            raise ValueError("some parameters given to the optimizer do not belong to module=: is it another model?")

    # ------------------------------------------------------------------ the ranks

    def _num_ranks(self) -> int:
        """Return how many ranks share a step."""
        if self.process_group is not None:
            return dist.get_world_size(self.process_group)
        found = shards.position(self._trained()) if self._sharded else None
        return 1 if found is None else found[1]

    def _synchronise(self) -> None:
        """Start every rank from the weights and buffers of rank 0; raise if the ranks have different options."""
        assert self.process_group is not None
        tensors = [p for group in self.param_groups for p in group["params"]]
        own = torch.tensor([options.fingerprint(self.param_groups)], dtype=torch.float64, device=tensors[0].device)
        total, squares = own.clone(), own.square()
        all_reduce_sum([total, squares], self.process_group)
        if not all(all_equal(total, squares, dist.get_world_size(self.process_group))):
            raise options.different(self.param_groups)
        if self.module is not None:
            tensors += list(self.module.buffers())
        broadcast(tensors, self.process_group)
        self._synchronised = True

    def _average_over_ranks(
        self, slots: list[Slot], weight: float, losses: list[Tensor], averages: dict[str, list[Tensor]]
    ) -> None:
        """Turn this rank's means into means over all ranks, in place."""
        assert self.process_group is not None
        rank, world = rank_of(self.process_group), dist.get_world_size(self.process_group)
        buffers = self._shares_of_running_statistics(rank, world)
        means = [t for tensors in averages.values() for t in tensors]
        seen = [slot.seen for slot in slots]
        reached = average_over_ranks(self.process_group, weight, means, losses, seen, buffers)
        for slot, is_seen in zip(slots, reached, strict=True):
            slot.seen = is_seen

    def _average_running_statistics(self, slots: list[Slot]) -> None:
        """Give all ranks of a sharded model the same running statistics."""
        parameters = [slot.parameter for slot in slots]
        found = shards.position(parameters)
        if found is not None:
            shards.sum_everywhere(self._shares_of_running_statistics(*found), parameters)

    def _shares_of_running_statistics(self, rank: int, world: int) -> list[Tensor]:
        """Multiply this rank's running statistics by their share in the sum over ranks; none if they do not move.

        The policy "first_split" takes those of rank 0, all others the mean. Counters are equal on all ranks.
        """
        policy = self._option("batch_norm")
        if policy == "none" or self.module is None:
            return []
        share = float(rank == 0) if policy == "first_split" else 1 / world
        found = [own_buffers(owner)[name] for owner, name in running_statistics(self.module)]
        return [b.mul_(share) for b in found if b is not None and b.is_floating_point()]
