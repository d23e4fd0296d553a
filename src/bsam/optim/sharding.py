"""What an optimizer needs to know of a sharded model: whether it can train it, and what the ranks agree on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bsam import shards
from bsam.optim.splits import SplittingOptimizer

__all__ = ["Hooks", "agreed_weight", "check_sharding"]


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


def agreed_weight(trained: Sequence[Tensor], weight: float, sizes: list[int], splits: int) -> float:
    """Return the mean weight of a micro-batch over the ranks; raise if their parts have different sizes.

    With different weights the averages of one rank's elements would not be those of another's.

    Args:
        trained: The parameters, which are sharded.
        weight: The weight on this rank.
        sizes: The number of examples of each part on this rank.
        splits: The number of parts that the optimizer asks for.
    """
    found = shards.position(trained)
    assert found is not None
    world = found[1]
    own = torch.tensor(sizes + [0] * (splits - len(sizes)), dtype=torch.float64)
    total, first, second = torch.tensor(weight, dtype=torch.float64), own.clone(), own.square()
    shards.sum_everywhere([total, first, second], trained)
    if splits > 1 and not torch.equal(world * second, first.square()):  # equal if and only if all sizes are
        raise ValueError(
            f"the ranks have batches of different sizes, this one {sum(sizes)} examples in {len(sizes)} parts: with a "
            f"sharded model and splits={splits} all ranks must have the same number of examples."
        )
    return float(total) / world


class Hooks:
    """The hooks of a sharded model, as they are before a pass."""

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module

    def restore(self) -> None:
        """Let the model forget a pass that raised."""
        shards.reset(self._module)
