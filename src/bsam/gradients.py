"""Gradients of a loss function: of a batch, and of each of its examples.

A loss function has its model in its closure and returns the mean loss of a batch. `PerExample` calls it with batches of
one example, many at once by `torch.func`: `functional_call` of a module whose forward is the loss function gives it the
weights. Where that is not possible, a loop gives the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp

from bsam.backward import watched_backward
from bsam.batches import map_tensors, num_examples, some_examples
from bsam.executor import Executor, quiet_vmap
from bsam.interrupts import interruptible
from bsam.modules import (
    BufferSnapshot,
    GradientSnapshot,
    LossFunction,
    LossModule,
    all_buffers,
    checked_loss,
    keys_of,
)

__all__ = [
    "Moments",
    "PerExample",
    "batch_gradient",
    "chunk_size",
    "output_sums",
    "reached_by",
    "without_autocast",
]

_STACK_BYTES = 256 * 2**20
"""Largest memory of the gradients of one chunk of examples."""
_CPU_STACK_BYTES = 8 * 2**20
"""The same on the CPU, where the gradients should fit into its cache."""
_LOOP_BYTES = 2**20
"""Largest size of all weights for which vmap is faster than a loop on the CPU: stacked gradients are memory traffic.
Measured in one thread with 8 examples, vmap against a loop: 0.8 ms against 1.4 for 122 weights, 5.8 against 10.3 for
LeNet-5 (0.3 MB), 15 against 4 for an MLP (2.2 MB)."""


def batch_gradient(
    parameters: Sequence[Tensor], loss_fn: LossFunction, batch: tuple[Any, ...]
) -> tuple[list[Tensor | None], Tensor]:
    """Return the gradient of `loss_fn(*batch)`, None for a parameter that it does not reach, and the loss.

    `loss_fn` may call `backward()` itself: `.grad` is cleared before it runs, and a `.grad` afterwards means that it
    did. All other tensors keep their `.grad`.
    """
    for parameter in parameters:
        parameter.grad = None
    with torch.enable_grad(), watched_backward(parameters) as calls, _explained():
        with interruptible():
            loss = checked_loss(loss_fn(*batch))
        if loss.requires_grad and all(parameter.grad is None for parameter in parameters):
            with without_autocast(loss.device), interruptible():
                torch.autograd.backward(loss)
    calls.check(loss)
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(
                f"a gradient has layout {parameter.grad.layout} (an embedding with sparse=True?): only dense gradients "
                "are supported."
            )
    return [parameter.grad for parameter in parameters], loss.detach().reshape(())


_HINTS = {
    "modified by an inplace operation": "bsam: the loss function must run the model itself, in each call. An output or "
    "a loss that was computed before the step belongs to other weights.",
    "Expected more than 1 value per channel": "bsam: a part of the batch has one example, and BatchNorm needs two: use "
    "fewer splits, or a loader with drop_last=True.",
}
"""What to do, by a piece of torch's message."""


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Add a note to errors of torch that have another reason here than their message says."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        for piece, hint in _HINTS.items():
            if piece in str(error):
                error.add_note(hint)
        raise


class Moments(NamedTuple):
    """Moments of the examples' gradients, one tensor per parameter; float32 for 16-bit parameters."""

    mean: list[Tensor]
    mean_square: list[Tensor]
    loss: Tensor
    """The mean loss over the examples."""


class PerExample:
    """Differentiates a loss function example by example.

    Args:
        module: The model in the closure of the loss function.
        vectorise: True: vmap, or an error. False: a loop. None: the faster of the two; if vmap fails, a loop, with one
            warning that says why.
    """

    def __init__(self, module: nn.Module, vectorise: bool | None = None) -> None:
        self._module = module
        self._executor = Executor(vectorise, "gradients are computed one example at a time", module)
        self._checked = False

    def moments(
        self, parameters: Sequence[Tensor], loss_fn: LossFunction, batch: tuple[Any, ...], reached: list[bool]
    ) -> Moments:
        """Return mean and mean square of the gradients at the present weights.

        Args:
            parameters: Parameters of the module.
            loss_fn: `loss_fn(*batch)` is the mean loss of a batch.
            batch: Tensors, at any depth, with one example per row; other objects are passed unchanged.
            reached: For each parameter, whether it is known to be part of the loss; updated in place.
        """
        types = [torch.promote_types(p.dtype, torch.float32) for p in parameters]
        first = [torch.zeros_like(p, dtype=dtype) for p, dtype in zip(parameters, types, strict=True)]
        second = [torch.zeros_like(t) for t in first]
        total: Tensor | float = 0.0
        for gradients, losses in self.gradients(parameters, loss_fn, batch, reached):
            for mean, square, stack in zip(first, second, gradients, strict=True):
                stack = stack.to(mean.dtype)
                mean.add_(stack.sum(dim=0))
                square.add_(stack.square().sum(dim=0))
            total = total + losses.sum()
        size = num_examples(batch)
        for tensor in (*first, *second):
            tensor.div_(size)
        return Moments(first, second, torch.as_tensor(total / size))

    def gradients(
        self, parameters: Sequence[Tensor], loss_fn: LossFunction, batch: tuple[Any, ...], reached: list[bool]
    ) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Yield the gradients of chunks of examples, stacked along dimension 0, and their losses; arguments as above.

        Vmapped passes do not change the buffers, because each example would have its own.
        """
        size, start = num_examples(batch), 0
        while start < size:
            pays = bool(parameters) and _vmap_pays(parameters)
            stop = start + (chunk_size(parameters) if self._executor.tries_vmap(pays) and parameters else 1)
            piece = some_examples(batch, start, stop)
            yield from self._executor.run(
                lambda: [self._vmapped(parameters, loss_fn, piece, reached)],  # noqa: B023  # called at once
                lambda: [  # one after the other
                    self._single(parameters, loss_fn, some_examples(piece, i, i + 1), reached)  # noqa: B023
                    for i in range(num_examples(piece))  # noqa: B023
                ],
                pays=pays,
            )
            start = stop

    def _single(
        self, parameters: Sequence[Tensor], loss_fn: LossFunction, example: tuple[Any, ...], reached: list[bool]
    ) -> tuple[list[Tensor], Tensor]:
        gradients, loss = batch_gradient(parameters, loss_fn, example)
        for i, gradient in enumerate(gradients):
            reached[i] |= gradient is not None
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        return [gradient[None] for gradient in filled], loss[None]

    def _vmapped(
        self, parameters: Sequence[Tensor], loss_fn: LossFunction, batch: tuple[Any, ...], reached: list[bool]
    ) -> tuple[list[Tensor], Tensor]:
        if not self._checked:
            self._check(parameters, loss_fn, batch, reached)
            self._checked = True
        stacks, losses = self._vmap(parameters, loss_fn, batch)
        unknown = [i for i, known in enumerate(reached) if not known]
        if unknown:
            # A gradient of zeros may mean that the parameter is not part of the loss.
            found = torch.stack([stacks[i].any().to(losses.device) for i in unknown]).tolist()
            for i, is_found in zip(unknown, found, strict=True):
                reached[i] = is_found
            if not all(reached):
                self._check(parameters, loss_fn, batch, reached)
        return stacks, losses

    def _vmap(
        self, parameters: Sequence[Tensor], loss_fn: LossFunction, batch: tuple[Any, ...]
    ) -> tuple[list[Tensor], Tensor]:
        keys, loss_module = keys_of(self._module, parameters), LossModule(self._module, loss_fn)
        weights = [p.detach() for p in parameters]
        tensors: list[Tensor] = []
        map_tensors(tensors.append, batch)

        def one(*example: Tensor) -> tuple[list[Tensor], Tensor]:
            rows = iter(example)
            whole = map_tensors(lambda _: next(rows)[None], batch)

            def loss_at(handed: list[Tensor]) -> Tensor:
                loss: Tensor = functional_call(loss_module, dict(zip(keys, handed, strict=True)), (whole,))
                return loss

            loss, pullback = vjp(loss_at, weights)[:2]
            with without_autocast(loss.device):
                (gradients,) = pullback(torch.ones_like(loss))
            return gradients, loss

        buffers = BufferSnapshot(all_buffers(self._module))
        try:
            with torch.enable_grad(), watched_backward(parameters):  # also refuses a loss that is scaled
                stacks, losses = quiet_vmap(one, randomness="different")(*tensors)
        finally:
            buffers.restore()  # a replaced buffer would hold a tensor of torch.func
        return [stack.detach() for stack in stacks], losses.detach()

    def _check(
        self, parameters: Sequence[Tensor], loss_fn: LossFunction, batch: tuple[Any, ...], reached: list[bool]
    ) -> None:
        """Check with the first example that vmap works, and which parameters are part of the loss."""
        example = some_examples(batch, 0, 1)
        with _same_randomness(parameters):
            self._vmap(parameters, loss_fn, example)
        for i, found in enumerate(reached_by(self._module, parameters, loss_fn, example)):
            reached[i] |= found


def reached_by(
    module: nn.Module, parameters: Sequence[Tensor], loss_fn: LossFunction, batch: tuple[Any, ...]
) -> list[bool]:
    """Return which parameters are part of the loss, found by giving other weights to the module.

    Raises a RuntimeError if the loss function also uses parameters that it did not look up in the module, for example
    from a list of its own: their gradient would be lost. Buffers, the state of the generators and all `.grad` are
    unchanged.
    """
    buffers, grads = BufferSnapshot(all_buffers(module)), GradientSnapshot(parameters)
    try:
        for parameter in parameters:
            parameter.grad = None
        handed = [p.detach().requires_grad_() for p in parameters]
        with _same_randomness(parameters), torch.enable_grad(), watched_backward([*handed, *parameters]):
            weights = dict(zip(keys_of(module, parameters), handed, strict=True))
            loss = functional_call(LossModule(module, loss_fn), weights, (batch,))
        if any(p.grad is not None for p in (*handed, *parameters)):
            raise RuntimeError("the loss function calls backward() itself")
        if not loss.requires_grad:
            return [False] * len(parameters)
        with without_autocast(loss.device):
            found = torch.autograd.grad(loss, [*handed, *parameters], allow_unused=True)
        if any(gradient is not None for gradient in found[len(handed) :]):
            raise RuntimeError(
                "the loss function uses parameters of module= that it did not look up in the module when called"
            )
        return [gradient is not None for gradient in found[: len(handed)]]
    finally:
        buffers.restore()
        grads.restore()


def output_sums(net: nn.Module, inputs: Any, rows: Tensor) -> tuple[LossFunction, tuple[Any, ...]]:
    """Return a loss function and a batch for `PerExample`, to differentiate outputs instead of a loss.

    With rows (n, R, C) for the C outputs of n examples, the batch has each example R times, and the "loss" of an
    example is its row times the outputs: the gradients are the products of the rows with the Jacobian.
    """

    def weighted_sum(inputs: Any, row: Tensor) -> Tensor:
        outputs: Tensor = net(inputs)
        return (outputs.reshape(1, -1) * row).sum()

    repeated = map_tensors(lambda t: t.repeat_interleave(rows.shape[1], dim=0), inputs)
    return weighted_sum, (repeated, rows.flatten(0, 1))


def _vmap_pays(parameters: Sequence[Tensor]) -> bool:
    return parameters[0].device.type != "cpu" or _num_bytes(parameters) <= _LOOP_BYTES


def _num_bytes(parameters: Sequence[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def chunk_size(parameters: Sequence[Tensor]) -> int:
    """Return the number of gradients that are held at a time."""
    room = _CPU_STACK_BYTES if parameters[0].device.type == "cpu" else _STACK_BYTES
    return max(1, room // max(1, _num_bytes(parameters)))


@contextlib.contextmanager
def _same_randomness(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Restore the state of the global generators after the block, so that later code draws the same numbers."""
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices), device_type="cuda"):
        yield


@contextlib.contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Leave a surrounding autocast region: a backward pass belongs outside of it."""
    with torch.autocast(device.type, enabled=False):
        yield
