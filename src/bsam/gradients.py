"""Gradients of a loss function: of a batch, and of each of its examples.

A loss function closes over its model and returns the mean loss of the batch it is given. `PerExample` calls it with
batches of one example. `torch.func` runs many of them at once: the model's weights are handed to the loss function by
`functional_call` of a module whose forward is the loss function. Where that cannot be done, a loop gives the same
numbers.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp

from bsam.backward import watched_backward
from bsam.batch_norm import BufferSnapshot, all_buffers
from bsam.forward import map_tensors
from bsam.interrupts import interruptible

__all__ = [
    "LossFunction",
    "LossModule",
    "Moments",
    "PerExample",
    "batch_gradient",
    "chunk_size",
    "differentiable",
    "fails_again",
    "keys_of",
    "output_sums",
    "reached_by",
    "some_examples",
    "without_autocast",
]

LossFunction = Callable[..., Tensor | float]

_STACK_BYTES = 256 * 2**20
"""The most memory that the gradients of one chunk of examples take."""
_CPU_STACK_BYTES = 8 * 2**20
"""The same on the CPU, where they should fit into its cache."""
_LOOP_BYTES = 2**20
"""From this size of all weights on a loop is faster on the CPU: stacked gradients are memory traffic. Measured in one
thread with 8 examples: 0.8 ms against 1.4 in a loop for 122 weights, 5.8 against 10.3 for LeNet-5 (0.3 MB), 15 against
4 for an MLP (2.2 MB)."""


def batch_gradient(
    parameters: Sequence[Tensor], loss_fn: LossFunction, batch: tuple[Any, ...]
) -> tuple[list[Tensor | None], Tensor]:
    """The gradient of `loss_fn(*batch)`, None where it does not reach a parameter, and the loss.

    `loss_fn` may call `backward()` itself: `.grad` is cleared before, and one that appears means that it did. All other
    tensors have the same `.grad` afterwards.
    """
    for parameter in parameters:
        parameter.grad = None
    with torch.enable_grad(), watched_backward(parameters) as calls:
        with interruptible():
            loss = _checked_loss(loss_fn(*batch))
        if loss.requires_grad and all(parameter.grad is None for parameter in parameters):
            with without_autocast(loss.device), interruptible():
                torch.autograd.backward(loss)
    calls.check(loss)
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(
                f"a gradient of layout {parameter.grad.layout} arrived (an embedding with sparse=True?): dense "
                "gradients only."
            )
    return [parameter.grad for parameter in parameters], loss.detach().reshape(())


class Moments(NamedTuple):
    """Of the gradients of the examples of a batch, one tensor a parameter; float32 for 16-bit parameters."""

    mean: list[Tensor]
    mean_square: list[Tensor]
    loss: Tensor
    """The mean over the examples."""


class PerExample:
    """Differentiates a loss function example by example.

    Args:
        module: The model that the loss function closes over.
        vectorise: True: vmap, or an error. False: a loop. None: whichever is faster, and a loop, with one warning
            that says why, where vmap fails.
    """

    def __init__(self, module: nn.Module, vectorise: bool | None = None) -> None:
        self._module = module
        self._vectorise = vectorise
        self._failed = False
        self._checked = False

    def moments(
        self, parameters: Sequence[Tensor], loss_fn: LossFunction, batch: tuple[Any, ...], reached: list[bool]
    ) -> Moments:
        """Mean and mean square of the gradients at the present weights.

        Args:
            parameters: Parameters of the module.
            loss_fn: `loss_fn(*batch)` is the mean loss of a batch.
            batch: Its tensors, at any depth, hold one example a row; other things are handed on as they are.
            reached: Which parameters are known to be part of the loss; those that turn out to be are marked.
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
        size = _num_examples(batch)
        for tensor in (*first, *second):
            tensor.div_(size)
        return Moments(first, second, torch.as_tensor(total / size))

    def gradients(
        self, parameters: Sequence[Tensor], loss_fn: LossFunction, batch: tuple[Any, ...], reached: list[bool]
    ) -> Iterator[tuple[list[Tensor], Tensor]]:
        """The gradients of chunks of examples, stacked along dimension 0, and their losses; arguments as above.

        Vmapped passes leave the buffers as they are: which example's would they be?
        """
        size, start, failure = _num_examples(batch), 0, None
        while start < size:
            many = failure is None and self._vectorises(parameters)
            stop = start + (chunk_size(parameters) if many else 1)
            piece = some_examples(batch, start, stop)
            if many:
                attempt = functools.partial(self._vmapped, parameters, loss_fn, piece, reached)
                buffers = BufferSnapshot(all_buffers(self._module))
                try:
                    result = attempt()
                except RuntimeError as error:
                    if self._vectorise or not fails_again(attempt, error, buffers):
                        raise
                    failure = error  # a mistake of the user's will come again in the loop
                    continue
                finally:
                    buffers.restore()  # one that was replaced holds a tensor of torch.func
            else:
                result = self._single(parameters, loss_fn, piece, reached)
            yield result
            start = stop
        if failure is not None:
            self._failed = True
            reason = str(failure).strip().partition("\n")[0]
            warnings.warn(
                f"gradients are computed one example at a time, because vmap failed with {type(failure).__name__}: "
                f"{reason}",
                stacklevel=2,
            )

    def _vectorises(self, parameters: Sequence[Tensor]) -> bool:
        if self._failed or not parameters:
            return False
        if self._vectorise is not None:
            return self._vectorise
        return parameters[0].device.type != "cpu" or _num_bytes(parameters) <= _LOOP_BYTES

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

        with warnings.catch_warnings(), torch.enable_grad():
            warnings.filterwarnings("ignore", message="There is a performance drop")  # not in the user's hands
            stacks, losses = torch.vmap(one, randomness="different")(*tensors)
        return [stack.detach() for stack in stacks], losses.detach()

    def _check(
        self, parameters: Sequence[Tensor], loss_fn: LossFunction, batch: tuple[Any, ...], reached: list[bool]
    ) -> None:
        """Find out by the first example which parameters are part of the loss, and whether vmap can do it."""
        example = some_examples(batch, 0, 1)
        buffers = BufferSnapshot(all_buffers(self._module))
        try:
            with _same_randomness(parameters):
                self._vmap(parameters, loss_fn, example)
        finally:
            buffers.restore()
        for i, found in enumerate(reached_by(self._module, parameters, loss_fn, example)):
            reached[i] |= found


def reached_by(
    module: nn.Module, parameters: Sequence[Tensor], loss_fn: LossFunction, batch: tuple[Any, ...]
) -> list[bool]:
    """Which parameters are part of the loss, found out by handing other weights to the module.

    Raises a RuntimeError if the loss function does not (or not only) use the weights that are handed to it: it may
    hold on to parameters by itself, in a list say. Their gradient would be lost. Buffers, the state of the generators
    and all `.grad` stay what they are.
    """
    buffers, grads = BufferSnapshot(all_buffers(module)), [p.grad for p in parameters]
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
                "the loss function uses parameters of module= that it did not look up in the module just now"
            )
        return [gradient is not None for gradient in found[: len(handed)]]
    finally:
        buffers.restore()
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad


def fails_again(attempt: Callable[[], Any], error: RuntimeError, buffers: BufferSnapshot) -> bool:
    """Whether a vmapped attempt that raised `error` raises again: only then vmap is to blame, and a loop may help.

    An error of torch.func comes every time. One that does not was raised by the user's loss function.
    """
    buffers.restore()
    try:
        attempt()
    except RuntimeError as again:
        return type(again) is type(error)
    finally:
        buffers.restore()
    return False


def keys_of(module: nn.Module, parameters: Sequence[Tensor]) -> list[str]:
    """The names of the parameters in a `LossModule` of the module."""
    names = {id(p): f"module.{name}" for name, p in module.named_parameters()}
    if any(id(p) not in names for p in parameters):
        raise RuntimeError("some parameters do not belong to module=")
    return [names[id(p)] for p in parameters]


def output_sums(net: nn.Module, inputs: Any, rows: Tensor) -> tuple[LossFunction, tuple[Any, ...]]:
    """A loss function and a batch for `PerExample`, to differentiate outputs instead of a loss.

    With rows (n, R, C) for the C outputs of n examples, the batch has each example R times, and the "loss" of one is
    its row times the outputs: the gradients are the products of the rows with the Jacobian.
    """

    def weighted_sum(inputs: Any, row: Tensor) -> Tensor:
        outputs: Tensor = net(inputs)
        return (outputs.reshape(1, -1) * row).sum()

    repeated = map_tensors(lambda t: t.repeat_interleave(rows.shape[1], dim=0), inputs)
    return weighted_sum, (repeated, rows.flatten(0, 1))


@contextlib.contextmanager
def differentiable(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let the parameters take gradients; afterwards each has its own flag and `.grad` again."""
    before = [(p, p.requires_grad, p.grad) for p in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_()
        yield
    finally:
        for parameter, flag, grad in before:
            parameter.grad = grad
            parameter.requires_grad_(flag)


class LossModule(nn.Module):
    """A module whose forward is the loss function, and whose weights are those of the model it closes over."""

    def __init__(self, module: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.module = module
        self._function = [loss_fn]  # in a list: it may be a module, and would be registered as a part of this one

    def forward(self, batch: tuple[Any, ...]) -> Tensor:
        """The loss."""
        with interruptible():  # here: functional_call writes into the module, and that must be whole
            loss = _checked_loss(self._function[0](*batch))
        return loss.reshape(())


def _num_examples(batch: tuple[Any, ...]) -> int:
    lengths: list[int] = []
    map_tensors(lambda t: lengths.append(len(t)), batch)
    return lengths[0]


@torch.enable_grad()
def some_examples(batch: Any, start: int, stop: int) -> Any:
    """A part of a batch, or of the inputs of one."""
    return map_tensors(lambda t: t[start:stop], batch)


def _num_bytes(parameters: Sequence[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def chunk_size(parameters: Sequence[Tensor]) -> int:
    """How many gradients are held at a time."""
    room = _CPU_STACK_BYTES if parameters[0].device.type == "cpu" else _STACK_BYTES
    return max(1, room // max(1, _num_bytes(parameters)))


@contextlib.contextmanager
def _same_randomness(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Give the global generators their state back: what is drawn inside will be drawn again."""
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices), device_type="cuda"):
        yield


@contextlib.contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Leave a surrounding autocast region: a backward pass belongs outside of it."""
    with torch.autocast(device.type, enabled=False):
        yield


def _checked_loss(loss: Any) -> Tensor:
    if isinstance(loss, int | float):
        return torch.tensor(float(loss))
    if not isinstance(loss, Tensor):
        raise TypeError(f"the closure returned {type(loss).__name__}: it must return the loss, a scalar tensor.")
    if loss.numel() != 1:
        raise ValueError(
            f"the closure returned a tensor of shape {tuple(loss.shape)}: it must return one number, the mean loss "
            "over the examples it was given."
        )
    return loss
