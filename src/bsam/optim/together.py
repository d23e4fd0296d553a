"""All sub-batches probed at once: the method's own probe under `torch.vmap`.

The loop over the splits of a batch, m forward and backward passes one after the other, becomes one pass with a stack
of m weights and m sub-batches. The model's weights and buffers are handed to the loss function by `functional_call`,
so it must look them up in the module when it is called. BatchNorm's buffers are stacked too: each split has its own,
and those of the first are kept (the policy `"first_split"`).

Where this cannot be done the loop does it, after one warning that says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp
from torch.nn.modules.batchnorm import _NormBase

from bsam import batch_norm as bn
from bsam.forward import map_tensors
from bsam.gradients import LossFunction, LossModule, keys_of, reached_by, without_autocast

if TYPE_CHECKING:
    from bsam.optim.base import Gradients, ProbingOptimizer, Slot, Tally

__all__ = ["Parts", "Prober", "Together", "probe_stack", "stack_parts", "why_not"]

Parts = list[tuple[tuple[Any, ...], int]]
Unpack = Callable[[list[Tensor]], dict[str, Tensor]]
Pack = Callable[[Sequence[Tensor]], list[Tensor]]


class Prober(Protocol):
    """What looks at sub-batches: an optimizer, see `ProbingOptimizer`."""

    def _option(self, name: str) -> Any: ...

    def _probe(self, slots: list[Slot], theta: Iterable[Tensor], grad_at: Gradients, tally: Tally) -> None: ...


def why_not(module: nn.Module, policy: str, parts: Parts) -> str | None:
    """Why these parts cannot be probed together, or None if they can."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "module= is a DistributedDataParallel, whose hooks run in a loop only"
    if len({size for _, size in parts}) > 1:
        return "the sub-batches are not of one size"
    moving = any(
        layer.training and layer.running_mean is not None for layer in module.modules() if isinstance(layer, _NormBase)
    )
    if moving and policy in ("all", "first_pass"):
        return f"batch_norm={policy!r} moves running statistics from split to split"
    return None


def stack_parts(parts: Parts) -> tuple[tuple[Any, ...], list[Tensor]]:
    """The first part, and the tensors of all parts, each stacked along a new dimension 0."""
    columns: list[list[Tensor]] = []
    for part, _ in parts:
        columns.append([])
        map_tensors(columns[-1].append, part)
    return parts[0][0], [torch.stack(column) for column in zip(*columns, strict=True)]


def _prefers_loop(device: torch.device) -> bool:
    """Whether a loop over the splits is faster: a CPU is busy with one of them."""
    return device.type == "cpu"


class GradAtStack:
    """`GradAt` for one sub-batch of many: functional, to be run under vmap.

    Args:
        loss_module: A module whose forward is the loss of a part.
        unpack: Makes the weights of the loss module, by name, of those of the slots.
        pack: Makes gradients of the slots of those of the weights, in the same order.
        part: The sub-batch.
        buffers: The buffers of the loss module, by name.
        frozen: Names of the buffers that must not move, for each pass.
    """

    def __init__(
        self,
        loss_module: nn.Module,
        unpack: Unpack,
        pack: Pack,
        part: tuple[Any, ...],
        buffers: dict[str, Tensor],
        frozen: Callable[[int], frozenset[str]],
    ) -> None:
        self._loss_module, self._unpack, self._pack, self._part = loss_module, unpack, pack, part
        self._frozen = frozen
        self.buffers = buffers
        """Of the loss module, as the passes so far left them."""
        self.losses: list[Tensor] = []
        """Of each pass."""

    def __call__(self, weights: Iterable[Tensor]) -> list[Tensor]:
        """The gradients, one a slot."""
        named = self._unpack(list(weights))

        def loss_at(*tensors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            handed = dict(zip(named, tensors, strict=True))
            handed |= {name: b.clone() for name, b in self.buffers.items()}  # torch.func lets only such be written to
            loss = functional_call(self._loss_module, handed, (self._part,))
            return loss, {name: handed[name] for name in self.buffers}  # a buffer that was replaced is in the dict

        loss, pullback, moved = vjp(loss_at, *named.values(), has_aux=True)  # type: ignore[misc]
        frozen = self._frozen(len(self.losses))
        self.buffers = {name: self.buffers[name] if name in frozen else b for name, b in moved.items()}
        with without_autocast(loss.device):
            gradients = pullback(torch.ones_like(loss))
        self.losses.append(loss.detach())
        return self._pack([gradient.detach() for gradient in gradients])

    def moments(self, weights: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Mean and mean square of the gradients of the examples, one tensor a slot each; buffers do not move."""
        named = self._unpack(list(weights))
        rows: list[Tensor] = []
        map_tensors(rows.append, self._part)

        def one(*example: Tensor) -> tuple[list[Tensor], Tensor]:
            left = iter(example)
            part = map_tensors(lambda _: next(left)[None], self._part)

            def loss_at(*tensors: Tensor) -> Tensor:
                loss: Tensor = functional_call(self._loss_module, dict(zip(named, tensors, strict=True)), (part,))
                return loss

            loss, pullback = vjp(loss_at, *named.values())[:2]
            with without_autocast(loss.device):
                return list(pullback(torch.ones_like(loss))), loss

        gradients, losses = torch.vmap(one, randomness="different")(*rows)
        self.losses.append(losses.mean().detach())
        stacks = [gradient.detach() for gradient in gradients]
        return self._pack([g.mean(0) for g in stacks]), self._pack([g.square().mean(0) for g in stacks])


class Together:
    """Decides whether the splits of a step are probed together, and does it."""

    def __init__(self) -> None:
        self.off = False
        self._checked: Any = None  # the code of the last loss function: whether it can be done does not change

    def probe(
        self, optimizer: ProbingOptimizer, slots: list[Slot], closure: LossFunction, parts: Parts, first: int
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]] | None:
        """The mean losses of each pass and the mean statistics over the parts, or None if a loop is to find them."""
        asked, module = optimizer.vectorise, optimizer.module
        if self.off or asked is False or len(parts) == 1 or not slots:
            return None
        if asked is None and (module is None or _prefers_loop(slots[0].parameter.device)):
            return None
        if module is None:
            raise ValueError("vectorise=True needs the model: make the optimizer with module=model.")
        reason = why_not(module, optimizer._option("batch_norm"), parts)
        if reason is not None:
            if asked and len({size for _, size in parts}) == 1:  # a ragged last batch is no mistake
                raise ValueError(f"vectorise=True cannot be had: {reason}.")
            return None
        buffers = bn.BufferSnapshot(bn.all_buffers(module))
        try:
            self._check(module, slots, closure, parts[0][0])
            losses, statistics = _probe_together(optimizer, module, slots, closure, parts, first)
            _mark_seen(module, slots, closure, parts[0][0], statistics["gradient"])
            return losses, statistics
        except RuntimeError as error:  # of torch.func; a mistake of the user's will come again in the loop
            if asked:
                raise
            buffers.restore()
            self.off = True
            reason = str(error).strip().partition("\n")[0].partition(". ")[0]
            warnings.warn(f"the splits are computed in a loop, because vmap failed: {reason}", stacklevel=6)
            return None

    def _check(self, module: nn.Module, slots: list[Slot], closure: LossFunction, part: tuple[Any, ...]) -> None:
        """Raise, for a loss function not met before, if the weights that are handed to it are not all it uses."""
        code = getattr(closure, "__code__", closure)
        if self._checked is not code:
            reached_by(module, [slot.parameter for slot in slots], closure, part)
            self._checked = code


def _mark_seen(
    module: nn.Module, slots: list[Slot], closure: LossFunction, part: tuple[Any, ...], gradients: list[Tensor]
) -> None:
    """Mark the slots that are part of the loss: zeros may be a gradient, or stand for none."""
    device = gradients[0].device
    seen = torch.stack([gradient.any().to(device) for gradient in gradients]).tolist()
    if not all(seen):
        reached = reached_by(module, [slot.parameter for slot in slots], closure, part)
        seen = [a or b for a, b in zip(seen, reached, strict=True)]
    for slot, is_seen in zip(slots, seen, strict=True):
        slot.seen = is_seen


def _probe_together(
    optimizer: ProbingOptimizer,
    module: nn.Module,
    slots: list[Slot],
    closure: LossFunction,
    parts: Parts,
    first: int,
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    keys = keys_of(module, [slot.parameter for slot in slots])
    example, tensors = stack_parts(parts)
    splits = range(first, first + len(parts))
    theta = [torch.stack([optimizer._theta(slot, k) for k in splits]) for slot in slots]
    buffers = {f"module.{name}": b for name, b in module.named_buffers()}
    with torch.enable_grad():
        losses, statistics, moved = probe_stack(
            optimizer,
            slots,
            LossModule(module, closure),
            lambda weights: {key: w.to(slot.mean.dtype) for key, w, slot in zip(keys, weights, slots, strict=True)},
            lambda gradients: [g.to(slot.dtype) for g, slot in zip(gradients, slots, strict=True)],
            theta,
            example,
            tensors,
            {name: b.expand(len(parts), *b.shape).clone() for name, b in buffers.items()},
        )
    for name, buffer in buffers.items():
        buffer.copy_(moved[name][0])
    return [loss.mean(0) for loss in losses], {name: [t.mean(0) for t in s] for name, s in statistics.items()}


def probe_stack(
    optimizer: Prober,
    slots: list[Slot],
    loss_module: nn.Module,
    unpack: Unpack,
    pack: Pack,
    theta: list[Tensor],
    example: tuple[Any, ...],
    tensors: list[Tensor],
    buffers: dict[str, Tensor],
) -> tuple[list[Tensor], dict[str, list[Tensor]], dict[str, Tensor]]:
    """Losses of each pass, statistics and buffers of all sub-batches, stacked along dimension 0.

    Args:
        optimizer: Whose `_probe` looks at each sub-batch.
        slots: What it looks at.
        loss_module: See `GradAtStack`.
        unpack: See `GradAtStack`.
        pack: See `GradAtStack`.
        theta: Weights of the slots in the first pass, stacked over the sub-batches.
        example: One sub-batch, for its structure.
        tensors: Its tensors, stacked over the sub-batches.
        buffers: Buffers of the loss module by name, stacked over the sub-batches.
    """
    from bsam.optim.base import Tally

    statistics_of_norms = frozenset(
        f"module.{name}.{buffer}"
        for name, layer in loss_module.get_submodule("module").named_modules()
        if isinstance(layer, _NormBase)
        for buffer in layer._buffers
    )
    policy = optimizer._option("batch_norm")

    def frozen(pass_index: int) -> frozenset[str]:
        return frozenset() if bn.moves_statistics(policy, 0, pass_index) else statistics_of_norms

    def one(
        theta: list[Tensor], rows: list[Tensor], buffers: dict[str, Tensor]
    ) -> tuple[list[Tensor], dict[str, list[Tensor]], dict[str, Tensor]]:
        left = iter(rows)
        part = map_tensors(lambda _: next(left), example)
        grad_at = GradAtStack(loss_module, unpack, pack, part, buffers, frozen)
        tally = Tally()
        optimizer._probe(slots, theta, grad_at, tally)
        return grad_at.losses, tally.means, grad_at.buffers

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # not in the user's hands
        return torch.vmap(one, randomness="different")(theta, tensors, buffers)
