"""Watches calls of `backward()` by a closure: which tensors they differentiate, and which gradients they leave.

A closure may call `backward()` itself, perhaps on another tensor than the loss that it returns, and `backward()`
reaches every leaf of the graph, also parameters of another optimizer, in each pass of a step. While a closure runs,
`torch.autograd.backward`, which `Tensor.backward` calls, is replaced by a function that records its tensors and then
calls torch's function. In the same way `GradScaler.scale` is replaced by a function that refuses: gradients of a loss
that a closure has scaled itself would be taken for true ones. And gradients that a closure changes after `backward()`,
for example by clipping, would be another pass's than the one they are meant for.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from bsam.interrupts import deferred, interruptible
from bsam.torch_private import version_of

__all__ = ["watched_backward"]

_TOLERANCE = 1e-2
"""Largest relative difference between the loss and the differentiated tensor: bfloat16 sums have this precision."""


class watched_backward:  # noqa: N801  # used like a function
    """Watches the calls of `backward()` by this thread in the block.

    When the block ends, every tensor except `own` has its earlier `.grad` again.

    Args:
        own: The parameters whose gradients are wanted.
    """

    def __init__(self, own: Sequence[Tensor]) -> None:
        self._own = {id(tensor) for tensor in own}
        self._parameters = own
        self._gradients: list[tuple[Tensor, int]] = []  # with their versions, after the last call
        self._aside: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._differentiated: list[tuple[Tensor, Tensor | None]] = []
        self.depth = 0
        """Number of nested calls in progress."""

    def __enter__(self) -> watched_backward:
        self._outer = getattr(_innermost, "watch", None)
        _innermost.watch = self
        _start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _stop()
        _innermost.watch = self._outer
        for leaf, grad in self._aside.values():
            leaf.grad = grad

    def look(self, tensors: list[Tensor], grad_tensors: list[Tensor | None]) -> None:
        """Record a call of `backward()` before it runs."""
        leaves = _leaves(tensors)
        others = [leaf for leaf in leaves if id(leaf) not in self._own]
        if self.depth == 0 and len(others) < len(leaves):  # deeper calls are torch's: activation checkpointing
            grads = grad_tensors if len(grad_tensors) == len(tensors) else [None] * len(tensors)
            self._differentiated += [(t.detach(), g) for t, g in zip(tensors, grads, strict=True)]
        for leaf in others:
            if id(leaf) not in self._aside:
                self._aside[id(leaf)] = leaf, leaf.grad
                leaf.grad = None

    def note_gradients(self) -> None:
        """Remember the gradients that a call of `backward()` has left."""
        self._gradients = [(p.grad, version_of(p.grad)) for p in self._parameters if p.grad is not None]

    def check(self, loss: Tensor) -> None:
        """Raise unless the closure differentiated the loss that it returned, and left the gradients as they were."""
        if any(version_of(gradient) != version for gradient, version in self._gradients):
            raise RuntimeError(
                "the closure changed .grad after backward(), for example by clipping. It is called in every pass of a "
                "step, so this would also change the gradient that sets the perturbation. To clip the gradient that is "
                "applied, make the optimizer with max_grad_norm=, or clip between optimizer.probe(loss_fn, x, y) and "
                "optimizer.step(); in a trainer, with its adapter in bsam.integrations."
            )
        calls = self._differentiated
        if not calls or (len(calls) == 1 and calls[0][1] is None and _same_memory(calls[0][0], loss)):
            return
        total = sum(float((t if g is None else t * g).sum()) for t, g in calls)
        value = float(loss.detach().sum())
        near = abs(total - value) <= _TOLERANCE * max(abs(total), abs(value)) + 1e-6
        if math.isfinite(total) and math.isfinite(value) and not near:
            raise ValueError(
                f"the closure called backward() on {total:.6g} and returned the loss {value:.6g}: the gradient would "
                "belong to another loss, for example a scaled one. Return the tensor that you call backward() on, or "
                "leave backward() out."
            )


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel() == 1 and a.dtype == b.dtype


def _leaves(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves of the graph that a backward pass would give gradients to."""
    leaves = [t for t in tensors if t.requires_grad and t.is_leaf]
    nodes = [t.grad_fn for t in tensors if t.grad_fn is not None]
    met = set(nodes)
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)  # type: ignore[attr-defined]
        for following, _ in node.next_functions:
            if following is not None and following not in met:
                met.add(following)
                nodes.append(following)
    return leaves


# ------------------------------------------------------------------ replacing torch's function

_innermost = threading.local()
"""`watch`: the innermost block of each thread."""
_lock = threading.Lock()
_blocks = 0
"""Number of open blocks, in all threads."""
_exchanged: functools.partial[None] | None = None
"""The function in place of torch's while a block is open."""
_scale = GradScaler.scale


def _start() -> None:
    global _blocks, _exchanged
    with _lock:
        _blocks += 1
        if _blocks == 1:
            _exchanged = functools.partial(_watched, torch.autograd.backward)
            torch.autograd.backward = _exchanged
            GradScaler.scale = _refused_scale  # type: ignore[assignment,method-assign]


def _stop() -> None:
    global _blocks
    with _lock:
        _blocks -= 1
        if _blocks == 0:
            GradScaler.scale = _scale  # type: ignore[method-assign]
        if _blocks == 0 and _exchanged is not None and torch.autograd.backward is _exchanged:
            torch.autograd.backward = _exchanged.args[0]


def _watched(backward: Callable[..., None], tensors: Any, grad_tensors: Any = None, *rest: Any, **options: Any) -> None:
    """Call `backward(...)`, and record the call in this thread's innermost block."""
    watch: watched_backward | None = getattr(_innermost, "watch", None)
    if watch is None:
        backward(tensors, grad_tensors, *rest, **options)
        return
    with deferred():
        watch.look([t for t in _listed(tensors) if isinstance(t, Tensor)], _listed(grad_tensors))
        watch.depth += 1
        try:
            with interruptible():
                backward(tensors, grad_tensors, *rest, **options)
        finally:
            watch.depth -= 1
        if watch.depth == 0:
            watch.note_gradients()


def _refused_scale(scaler: GradScaler, outputs: Any) -> Any:
    """Raise if a closure scales its loss, in this thread."""
    if getattr(_innermost, "watch", None) is None or not scaler.is_enabled():
        return _scale(scaler, outputs)
    raise ValueError(
        "the closure called scaler.scale(): the optimizer evaluates several gradients, and would take scaled ones for "
        "true ones. Return the loss without a scale, and write optimizer.probe(loss_fn, x, y, scaler=scaler)."
    )


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) or tensors is None else list(tensors)
