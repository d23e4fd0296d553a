"""What an optimizer needs to know of a sharded model: whether it can train it, and what the ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bsam import shards
from bsam.distributed import all_equal
from bsam.optim import options
from bsam.optim.splits import SplittingOptimizer

__all__ = ["Hooks", "agreed_weight", "check_sharding", "refuse_batch"]


def check_sharding(optimizer: SplittingOptimizer, trained: Sequence[Tensor]) -> bool:
    """Return whether the parameters are sharded; raise unless the optimizer can train them. Drops gathered weights.

    Args:
        optimizer: The optimizer.
        trained: Its parameters that require a gradient.
    """
    shards.reshard(optimizer.module)
    if not shards.check_model(optimizer.module, trained):
        return False
    if optimizer.process_group is not None:
        raise ValueError(
            "process_group= does not go with a sharded model, whose gradients fully_shard averages over the ranks: "
            "leave process_group= out."
        )
    if isinstance(optimizer.module, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "DistributedDataParallel does not go with a sharded model: for replicas of shards, give fully_shard a mesh "
            "of two dimensions, and give the optimizer the model without DistributedDataParallel."
        )
    if optimizer.per_example:
        raise ValueError(
            f"{type(optimizer).__name__} needs the gradients of single examples, which a sharded model does not have: "
            "use bsam.BSAM or bsam.IVON."
        )
    if optimizer.vectorise:
        raise ValueError(
            "vectorise=True is not possible here: the model is sharded, and the hooks of fully_shard run in a loop "
            "only. Leave vectorise= out."
        )
    return True


def agreed_weight(trained: Sequence[Tensor], weight: float, size: int, groups: Sequence[dict[str, Any]]) -> float:
    """Return the mean weight of a micro-batch over the ranks; raise if the ranks do not fit each other.

    With different weights the averages of one rank's elements would not be those of another's. With different options
    replicas would move apart.

    Args:
        trained: The parameters, which are sharded.
        weight: The weight on this rank.
        size: The number of examples on this rank.
        groups: The parameter groups, with the options of the optimizer.
    """
    found = shards.position(trained)
    assert found is not None
    world = found[1]
    total, first, second = _sums(trained, weight, [size, options.fingerprint(groups)])
    if total.isnan():
        raise RuntimeError(
            "another rank has refused its batch, so no rank takes this step: see the error of that rank. Is its batch "
            "empty? Give every rank at least one example per step, for example by drop_last=True in the DataLoader."
        )
    same_size, same_options = all_equal(first, second, world)
    if not same_options:
        raise options.different(groups)
    splits = groups[0]["splits"]
    if splits > 1 and not same_size:
        raise ValueError(
            f"the ranks have batches of different sizes, this one {size} examples: with a sharded model and "
            f"splits={splits} all ranks must have the same number of examples."
        )
    return float(total) / world


def refuse_batch(trained: Sequence[Tensor]) -> None:
    """Tell the other ranks, which wait in `agreed_weight`, that this rank refuses its batch: they raise, too."""
    _sums(trained, math.nan, [0, 0])


def _sums(trained: Sequence[Tensor], weight: float, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums over the ranks of a weight, of numbers, and of their squares, which are exact."""
    own = torch.tensor(numbers, dtype=torch.float64)
    sums = torch.tensor(weight, dtype=torch.float64), own, own.square()
    shards.sum_everywhere(list(sums), trained)
    return sums


class Hooks:
    """The hooks of a sharded model, as they are before a pass."""

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module

    def restore(self) -> None:
        """Let the model forget a pass that raised."""
        shards.reset(self._module)
