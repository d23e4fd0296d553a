"""Probes all sub-batches at once: the method's own probe on stacked weights, gradients by `torch.vmap`.

The loop over the splits of a batch, m forward and backward passes one after the other, becomes one pass with a stack
of m weights and m sub-batches. `functional_call` gives the model's weights and buffers to the loss function, which must
look them up in the module when it is called. BatchNorm's buffers are stacked too: each split has its own, and those of
the first split are kept (the policy `"first_split"`). `bsam.executor` decides between this and a loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp

from bsam.batch_norm import moves_statistics
from bsam.batches import map_tensors
from bsam.compiler.layers import our_layers
from bsam.executor import quiet_vmap
from bsam.gradients import reached_by, without_autocast
from bsam.modules import LossFunction, LossModule, keys_of, normalisation_layers
from bsam.optim.probing import Prober, Slot, Tally
from bsam.shards import is_sharded_model
from bsam.torch_private import own_buffers

__all__ = ["GradAtStack", "Parts", "obstacle_to_stacking", "probe_stack", "probe_together", "stack_parts"]

Parts = list[tuple[tuple[Any, ...], int]]
Unpack = Callable[[list[Tensor]], dict[str, Tensor]]
Pack = Callable[[Sequence[Tensor]], list[Tensor]]
_vmap = functools.partial(quiet_vmap, randomness="different")
Evaluate = Callable[[list[Tensor], list[Tensor], dict[str, Tensor]], tuple[list[Tensor], Tensor, dict[str, Tensor]]]
"""Weights, tensors of the batch and buffers, stacked, to gradients, losses and moved buffers."""


def obstacle_to_stacking(module: nn.Module, policy: str, parts: Parts) -> str | None:
    """Return why these parts cannot be probed together, or None if they can."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "module= is a DistributedDataParallel, whose hooks run in a loop only"
    if is_sharded_model(module):
        return "module= is sharded, and the hooks of fully_shard run in a loop only"
    if len({size for _, size in parts}) > 1:
        return "the sub-batches have different sizes"
    moving = any(layer.training and layer.running_mean is not None for _, layer in normalisation_layers(module))
    if moving and policy in ("all", "first_pass"):
        return f"batch_norm={policy!r} moves running statistics from split to split"
    return None


def stack_parts(parts: Parts) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Return the first part, and the tensors of all parts, stacked along a new dimension 0."""
    columns: list[list[Tensor]] = []
    for part, _ in parts:
        columns.append([])
        map_tensors(columns[-1].append, part)
    return parts[0][0], [torch.stack(column) for column in zip(*columns, strict=True)]


class GradAtStack:
    """`GradAt` for all sub-batches at once: weights, gradients and losses are stacked along dimension 0.

    Args:
        loss_module: A module whose forward is the loss of a part.
        unpack: Maps the slots' weights to the loss module's named parameters, for one sub-batch.
        pack: Maps gradients in the order of these parameters to the slots' gradients, for one sub-batch.
        example: One sub-batch, for its structure.
        tensors: The tensors of all sub-batches, stacked.
        buffers: The buffers of the loss module by name, stacked.
        frozen: Maps the number of a pass to the names of the buffers that it must not move.
    """

    def __init__(
        self,
        loss_module: nn.Module,
        unpack: Unpack,
        pack: Pack,
        example: tuple[Any, ...],
        tensors: list[Tensor],
        buffers: dict[str, Tensor],
        frozen: Callable[[int], frozenset[str]],
    ) -> None:
        self._loss_module, self._unpack, self._pack = loss_module, unpack, pack
        self._example, self._tensors, self._frozen = example, tensors, frozen
        self.evaluate: Evaluate = self.evaluate_all
        """Computes the gradients: `evaluate_all`, or a compiled form of it."""
        self.buffers = buffers
        """The buffers of the loss module after the passes so far."""
        self.losses: list[Tensor] = []
        """One stack of losses per pass."""

    def __call__(self, weights: Iterable[Tensor]) -> list[Tensor]:
        """The gradients, one per slot."""
        gradients, losses, moved = self.evaluate(list(weights), self._tensors, self.buffers)
        frozen = self._frozen(len(self.losses))
        self.buffers = {name: self.buffers[name] if name in frozen else b for name, b in moved.items()}
        self.losses.append(losses.detach())
        return [gradient.detach() for gradient in gradients]

    def with_weights(self, weights: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients, and the weights themselves, stacked."""
        weights = list(weights)
        return self(weights), weights

    def evaluate_all(
        self, weights: list[Tensor], tensors: list[Tensor], buffers: dict[str, Tensor]
    ) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
        """Compute gradients, losses and moved buffers of all sub-batches: a pure function of tensors."""

        def one(
            weights: list[Tensor], rows: list[Tensor], buffers: dict[str, Tensor]
        ) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
            named, part = self._unpack(weights), self._part(rows)

            def loss_at(*tensors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                handed = dict(zip(named, tensors, strict=True))
                handed |= {name: b.clone() for name, b in buffers.items()}  # torch.func allows writes to copies only
                loss = functional_call(self._loss_module, handed, (part,))
                return loss, {name: handed[name] for name in buffers}  # also buffers that forward has replaced

            loss, pullback, moved = vjp(loss_at, *named.values(), has_aux=True)  # type: ignore[misc]
            with without_autocast(loss.device):
                gradients = pullback(torch.ones_like(loss))
            return self._pack(gradients), loss, moved

        with our_layers(tensors[0].device):
            found: tuple[list[Tensor], Tensor, dict[str, Tensor]] = _vmap(one)(weights, tensors, buffers)
        return found

    def moments(self, weights: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return mean and mean square of the examples' gradients, one tensor per slot each; buffers do not move.

        The mean is over all sub-batches: dimension 0 has size 1.
        """

        def one(weights: list[Tensor], rows: list[Tensor], buffers: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
            named = self._unpack(weights)

            def gradient(*example: Tensor) -> tuple[list[Tensor], Tensor]:
                part = self._part([row[None] for row in example])

                def loss_at(*tensors: Tensor) -> Tensor:
                    handed = dict(zip(named, tensors, strict=True)) | buffers  # else a replaced buffer would stay
                    loss: Tensor = functional_call(self._loss_module, handed, (part,))
                    return loss

                loss, pullback = vjp(loss_at, *named.values())[:2]
                with without_autocast(loss.device):
                    return list(pullback(torch.ones_like(loss))), loss

            found: tuple[list[Tensor], Tensor] = _vmap(gradient)(*rows)
            return found

        with our_layers(self._tensors[0].device):
            gradients, losses = _vmap(one)(list(weights), self._tensors, self.buffers)  # (splits, examples, ...)
        self.losses.append(losses.detach().mean(1))
        wide = [g.detach().to(torch.promote_types(g.dtype, torch.float32)) for g in gradients]
        means = self._pack([g.mean((0, 1)) for g in wide])
        squares = self._pack([g.square().mean((0, 1)) for g in wide])
        return [mean[None] for mean in means], [square[None] for square in squares]

    def per_split(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Map the function over the sub-batches."""
        return lambda *arguments, **constants: _vmap(functools.partial(function, **constants))(*arguments)

    def _part(self, rows: list[Tensor]) -> tuple[Any, ...]:
        left = iter(rows)
        part: tuple[Any, ...] = map_tensors(lambda _: next(left), self._example)
        return part


class StackTally(Tally):
    """Averages over the stack when results are added: it holds one tensor for all sub-batches."""

    def add(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Add results of all sub-batches."""
        super().add(name, (tensor.mean(0) for tensor in tensors))

    def add_abs(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Add absolute values of all sub-batches' results."""
        Tally.add(self, name, (_mean_of_absolute_values(tensor) for tensor in tensors))


def _mean_of_absolute_values(stack: Tensor) -> Tensor:
    """The mean of |x| over the stack; on a GPU without a second stack in memory, on a CPU twice as fast."""
    if stack.device.type == "cpu":
        return stack.abs().mean(0)
    norm: Tensor = torch.linalg.vector_norm(stack, 1, dim=0)
    return norm.div_(len(stack))


def probe_together(
    optimizer: Prober,
    module: nn.Module,
    slots: list[Slot],
    closure: LossFunction,
    parts: Parts,
    first: int,
    on_this_rank: int,
    *,
    check: bool,
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Probe all parts at once; return the mean loss of each pass and the averages over the parts.

    Args:
        optimizer: The method, which defines `_probe`.
        module: The model.
        slots: The optimizer's parameters.
        closure: The loss function.
        parts: The sub-batches, with their sizes.
        first: Number of the first sub-batch in the step, counted over all ranks.
        on_this_rank: The same number, counted on this rank.
        check: Raise if the loss function uses parameters other than those it is given.
    """
    if check:
        reached_by(module, [slot.parameter for slot in slots], closure, parts[0][0])
    keys = keys_of(module, [slot.parameter for slot in slots])
    example, tensors = stack_parts(parts)
    splits = range(first, first + len(parts))
    buffers = {f"module.{name}": b for name, b in module.named_buffers()}
    losses, averages, moved = probe_stack(
        optimizer,
        slots,
        LossModule(module, closure),
        lambda weights: {key: w.to(slot.mean.dtype) for key, w, slot in zip(keys, weights, slots, strict=True)},
        lambda gradients: [g.to(slot.dtype) for g, slot in zip(gradients, slots, strict=True)],
        (torch.stack([optimizer._theta(slot, k) for k in splits]) for slot in slots),
        example,
        tensors,
        {name: b.expand(len(parts), *b.shape) for name, b in buffers.items()},
        None,
        on_this_rank,
    )
    for name, buffer in buffers.items():
        buffer.copy_(moved[name])
    _mark_seen(module, slots, closure, parts[0][0], averages["gradient"])
    return losses, averages


def _mark_seen(
    module: nn.Module, slots: list[Slot], closure: LossFunction, part: tuple[Any, ...], gradients: list[Tensor]
) -> None:
    """Mark the slots that are part of the loss: a gradient of zeros may mean that there is none."""
    device = gradients[0].device
    seen = torch.stack([gradient.any().to(device) for gradient in gradients]).tolist()
    if not all(seen):
        reached = reached_by(module, [slot.parameter for slot in slots], closure, part)
        seen = [a or b for a, b in zip(seen, reached, strict=True)]
    for slot, is_seen in zip(slots, seen, strict=True):
        slot.seen |= is_seen


def probe_stack(
    optimizer: Prober,
    slots: list[Slot],
    loss_module: nn.Module,
    unpack: Unpack,
    pack: Pack,
    theta: Iterable[Tensor],
    example: tuple[Any, ...],
    tensors: list[Tensor],
    buffers: dict[str, Tensor],
    evaluate: Evaluate | None = None,
    first: int = 0,
) -> tuple[list[Tensor], dict[str, list[Tensor]], dict[str, Tensor]]:
    """Return the mean loss of each pass, the averages over all sub-batches, and the buffers of the first.

    Args:
        optimizer: The method, which defines `_probe`.
        slots: The optimizer's parameters.
        loss_module: See `GradAtStack`.
        unpack: See `GradAtStack`.
        pack: See `GradAtStack`.
        theta: Weights of the slots in the first pass, stacked over the sub-batches.
        example: See `GradAtStack`.
        tensors: See `GradAtStack`.
        buffers: See `GradAtStack`.
        evaluate: Computes the gradients in place of `GradAtStack.evaluate_all`.
        first: Number of the first sub-batch in the step: only sub-batch 0 may move the buffers under "first_split".
    """
    running_statistics = frozenset(
        f"module.{name}.{buffer}"
        for name, layer in normalisation_layers(loss_module.get_submodule("module"))
        for buffer in own_buffers(layer)
    )
    policy = optimizer._option("batch_norm")

    def frozen(pass_index: int) -> frozenset[str]:
        return frozenset() if moves_statistics(policy, first, pass_index) else running_statistics

    grad_at = GradAtStack(loss_module, unpack, pack, example, tensors, buffers, frozen)
    tally = StackTally()
    if evaluate is not None:
        grad_at.evaluate = evaluate
    optimizer._probe(slots, theta, grad_at, tally)
    losses = [loss.mean(0) for loss in grad_at.losses]
    return losses, tally.means, {name: b[0] for name, b in grad_at.buffers.items()}
