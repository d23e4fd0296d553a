"""Running a model on a batch at each sample of its weights: in one vmapped pass, or in a loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bsam.batch_norm import recalibrate_batch_norm
from bsam.batches import inputs_and_labels, map_tensors, moved
from bsam.compiler.layers import our_layers
from bsam.executor import Executor, quiet_vmap
from bsam.interrupts import interruptible
from bsam.modules import Forward, OutputModel, clean_names, named_parameters, running_statistics
from bsam.posterior.base import Posterior
from bsam.prediction.averages import Average
from bsam.torch_private import foreach_copy_, own_buffers

__all__ = ["Passes"]

_ON_CPU = 256 * 2**20
"""Bytes that a chunk of samples may take on the CPU, unless `chunk` says otherwise."""
_OUTPUTS_AT_ONCE = 4
"""How many outputs as large as the largest layer's a pass is taken to hold."""
_MOST = 64
"""Samples of a compiled chunk, which serves all multiples; with 128 a sample of ResNet-20 took 2% less time."""
_SHORT = (torch.bfloat16, torch.float16)


class Passes:
    """Runs a model on batches at each sample of its weights.

    The model holds the posterior's mean or, after a loop, some sample: only weights that are sampled are written or
    handed in. The arguments are those of `predict`, and `room`: how many bytes the weights and outputs of one chunk may
    take, by default what the device has.
    """

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior,
        *,
        forward: Forward | None,
        num_samples: int,
        seed: int,
        chunk: int | None,
        vectorise: bool | None,
        device: torch.device,
        recalibrate: Iterable[Any] | None,
        compile: bool = False,
        room: int | None = None,
    ) -> None:
        self._model = OutputModel(model, forward)
        self._posterior, self._num_samples, self._seed, self._device = posterior, num_samples, seed, device
        sampled = set(posterior.sampled_names) if num_samples else set()
        self._parameters = {name: p for name, p in named_parameters(model).items() if name in sampled}
        self._tensors: dict[str, Tensor] = dict(self._parameters)  # what a sample is written to
        names = clean_names(name for name, _ in model.named_parameters())
        self._keys = {short: f"model.{name}" for name, short in names.items()}

        self._weight_bytes = sum(p.numel() * p.element_size() for p in self._parameters.values())
        self._chunk = chunk or max(1, min(num_samples, _ON_CPU // max(1, self._weight_bytes)))  # held by a loop
        self._fits = chunk is not None
        self._statistics: dict[str, list[Tensor]] = {}  # BatchNorm's, one a sample, where they are estimated anew
        if recalibrate is not None:
            self._recalibrate(recalibrate)
        self._keep = self._chunk >= num_samples
        self._kept: list[dict[str, Tensor]] | None = None

        if compile and vectorise is False:
            raise ValueError("compile=True compiles the vmapped pass: leave vectorise=False out.")
        self._executor = Executor(
            vectorise, "predictions are computed in a loop over the samples", model, errors=Exception
        )
        self._pays = compile or Executor.launch_bound(device)
        self._compile, self._room = compile, room
        self._checked = vectorise is True

    @property
    def computed_by(self) -> str:
        """How the samples are run: "mean", "vmap" or "loop", and why."""
        if not self._parameters:
            return "mean"
        if self._executor.tries_vmap(self._pays):
            return "vmap"
        return "loop" if self._executor.failure is None else f"loop, because {self._executor.failure}"

    def average(self, inputs: Any, start: Callable[[], Average]) -> dict[str, Tensor | None]:
        """The columns of one batch, averaged over all samples; `start` makes an empty average."""
        if not self._parameters:
            return _columns(start(), [self._model(inputs)[None]])

        def together() -> dict[str, Tensor | None]:
            if not self._checked:
                self._check_vmap(inputs)
            if not self._fits:
                self._fit(inputs)
            return self._together(inputs, start)

        def loop() -> dict[str, Tensor | None]:
            outputs = (self._at(stack, i, inputs)[None] for stack in self._stacks() for i in range(_num_samples(stack)))
            return _columns(start(), outputs)

        return self._executor.run(together, loop, pays=self._pays)

    def _together(self, inputs: Any, start: Callable[[], Average]) -> dict[str, Tensor | None]:
        run = self._compiled if self._compile else self._vmapped
        while True:
            try:
                return _columns(start(), (run(stack, inputs) for stack in self._stacks()))
            except torch.OutOfMemoryError:
                if self._chunk == 1 and not self._keep:
                    raise
                self._chunk, self._kept, self._keep = max(1, self._chunk // 2), None, False
            torch.cuda.empty_cache()  # here: the exception held what was computed

    def _fit(self, inputs: Any) -> None:
        """Choose a chunk that fits into memory, from the outputs of all layers in a plain pass, and what to keep."""
        largest = 0

        def look(layer: nn.Module, arguments: Any, output: Any) -> None:
            nonlocal largest
            if isinstance(output, Tensor):
                largest = max(largest, output.numel() * output.element_size())

        hooks = [layer.register_forward_hook(look) for layer in self._model.modules()]
        try:
            self._model(inputs)
        finally:
            for hook in hooks:
                hook.remove()
        room = _room(self._device) if self._room is None else self._room
        most = room // max(1, self._weight_bytes + _OUTPUTS_AT_ONCE * largest)
        most = min(most, _MOST) if self._compile else most
        self._chunk, self._fits = _share(self._num_samples, max(1, most)), True
        self._keep = self._chunk == self._num_samples or self._num_samples * self._weight_bytes <= room // 2

    def _stacks(self) -> Iterable[dict[str, Tensor]]:
        """The samples in order: drawn once and kept for all batches if they fit into memory, else drawn for each."""
        if not self._keep:
            return self._draw(self._chunk)
        if self._kept is None:
            self._kept = list(self._draw(self._chunk))
        return self._kept

    def _draw(self, chunk: int) -> Iterator[dict[str, Tensor]]:
        """The samples in order, stacked along dimension 0 in chunks."""
        generator = torch.Generator(self._device if self._device.type == "cuda" else "cpu").manual_seed(self._seed)
        for start in range(0, self._num_samples, chunk):
            count = min(chunk, self._num_samples - start)
            stack = {name: p.new_empty((count, *p.shape)) for name, p in self._parameters.items()}
            for i in range(count):
                with interruptible():
                    sample = self._posterior.sample(generator)
                given = [sample[name].to(weights.dtype) for name, weights in stack.items()]
                foreach_copy_([weights[i] for weights in stack.values()], given)
            yield stack | {name: torch.stack(each[start : start + count]) for name, each in self._statistics.items()}

    def _recalibrate(self, data: Iterable[Any]) -> None:
        """Estimate BatchNorm's statistics at the mean, or at each sample: they are then a part of it."""
        own = {id(own_buffers(layer)[name]) for layer, name in running_statistics(self._model)}
        buffers = {key: buffer for key, buffer in self._model.named_buffers() if id(buffer) in own}

        def run(batch: Any) -> None:
            self._model(moved(inputs_and_labels(batch)[0], self._device))

        if not self._parameters:
            recalibrate_batch_norm(self._model, data, forward=run)
            return
        statistics: dict[str, list[Tensor]] = {key: [] for key in buffers}
        for stack in self._draw(self._chunk):
            for i in range(_num_samples(stack)):
                self._write(stack, i)
                recalibrate_batch_norm(self._model, data, forward=run)
                for key, buffer in buffers.items():
                    statistics[key].append(buffer.clone())
        self._statistics = statistics
        self._tensors |= buffers
        self._keys |= {key: key for key in buffers}

    def _vmapped(self, stack: dict[str, Tensor], inputs: Any, fixed: dict[str, Tensor] | None = None) -> Tensor:
        def run(weights: dict[str, Tensor]) -> Tensor:
            handed = {self._keys[name]: w for name, w in weights.items()} | (fixed or {})
            outputs: Tensor = functional_call(self._model, handed, (inputs,))
            return outputs

        with our_layers(self._device) if _num_samples(stack) > 1 else nullcontext():
            outputs: Tensor = quiet_vmap(run)(stack)
        return outputs

    def _compiled(self, stack: dict[str, Tensor], inputs: Any) -> Tensor:
        """`_vmapped`, compiled for the shapes of this batch, and kept for the next call with this model."""
        tensors: list[Tensor] = []
        map_tensors(tensors.append, inputs)
        handed = {self._keys[name] for name in stack}
        own = chain(self._model.named_parameters(), self._model.named_buffers())
        rest = {name: tensor.detach() for name, tensor in own if name not in handed}  # else compiled in as constants
        shapes = repr(map_tensors(lambda t: (tuple(t.shape), t.dtype), inputs))
        call = self._model.call
        key = (id(call), _num_samples(stack), tuple(stack), shapes)
        programs = _PROGRAMS.setdefault(self._model.model, {})
        if key not in programs or programs[key].function() is not call:

            def run(*flat: Tensor) -> list[Tensor]:
                left = iter(flat)
                weights = {name: next(left) for name in stack}
                fixed = {name: next(left) for name in rest}
                return [self._vmapped(weights, map_tensors(lambda _: next(left), inputs), fixed)]

            programs[key] = _Program(run, [*stack.values()], [*rest.values(), *tensors], weakref.ref(call))
        return programs[key]([*stack.values()], [*rest.values(), *tensors])

    def _write(self, stack: dict[str, Tensor], i: int) -> None:
        for name, values in stack.items():
            self._tensors[name].copy_(values[i])
        torch.clear_autocast_cache()  # a surrounding autocast region would go on with the old weights

    def _at(self, stack: dict[str, Tensor], i: int, inputs: Any) -> Tensor:
        self._write(stack, i)
        outputs: Tensor = self._model(inputs)
        return outputs

    def _check_vmap(self, inputs: Any) -> None:
        """Raise if a vmapped pass gives other outputs than a plain one at the same weights.

        A model that keeps its weights in a list of its own, say, does not see those that are handed in: it would
        predict with the mean at every sample and look certain.
        """
        stack = next(self._draw(1))
        before = {name: tensor.clone()[None] for name, tensor in self._tensors.items()}
        handed, written = self._vmapped(stack, inputs)[0], self._at(stack, 0, inputs)
        self._write(before, 0)  # a second look must find what the first one did
        # Generous: kernels for stacked weights round in other places, and TensorFloat-32 has 11 bits. Under autocast
        # a model may well return float32, but of numbers that have 8 or 11.
        scale = float(written.nan_to_num(0, 0, 0).abs().max())
        rounded = any(torch.equal(written.to(short).to(written.dtype), written) for short in _SHORT)
        tolerance = 5e-2 if rounded else {torch.float64: 1e-8, torch.float32: 1e-3}[written.dtype]
        if not torch.allclose(handed.to(written.dtype), written, rtol=0, atol=tolerance * scale, equal_nan=True):
            raise RuntimeError("the model does not use the weights that torch.func.functional_call hands to it")
        self._checked = True


class _Program:
    """A compiled function of tensors that are copied to where it reads them, captured in a CUDA graph on CUDA.

    Args:
        function: Takes `weights` and `others`, returns a list of one tensor.
        weights: Tensors that are copied again only when one of them is another.
        others: Tensors that are copied in every call.
        made_for: What the program belongs to; it may hold the model, so it is not kept alive.
    """

    def __init__(
        self,
        function: Callable[..., list[Tensor]],
        weights: list[Tensor],
        others: list[Tensor],
        made_for: weakref.ref[Any],
    ) -> None:
        from bsam.compiler.capture import Captured
        from bsam.compiler.tracing import compile_function

        inputs = [t.clone() for t in (*weights, *others)]
        self._weights, self._others = inputs[: len(weights)], inputs[len(weights) :]
        self.function = made_for
        self._seen = [weakref.ref(t) for t in weights]
        compiled = compile_function(function, inputs)
        device = others[-1].device
        self._run: Callable[[], Sequence[Tensor]] = lambda: compiled(*inputs)
        if device.type == "cuda":
            self._run = Captured(self._run, device, undo=lambda: None)

    def __call__(self, weights: list[Tensor], others: list[Tensor]) -> Tensor:
        """The output; it is overwritten by the next call."""
        if any(seen() is not tensor for seen, tensor in zip(self._seen, weights, strict=True)):
            foreach_copy_(self._weights, weights)
            self._seen = [weakref.ref(t) for t in weights]
        foreach_copy_(self._others, others)
        return self._run()[0]


_PROGRAMS: weakref.WeakKeyDictionary[nn.Module, dict[Any, _Program]] = weakref.WeakKeyDictionary()
"""Compiled passes of each model that is alive, by what they were compiled for."""


def _room(device: torch.device) -> int:
    """How many bytes the weights and outputs of one chunk may take: half of what is free on a GPU."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else _ON_CPU


def _share(num_samples: int, most: int) -> int:
    """The largest chunk, or one that leaves no rest if there is such of half the size: each size is compiled anew."""
    if most >= num_samples:
        return num_samples
    return next((n for n in range(most, most // 2, -1) if num_samples % n == 0), most)


def _columns(average: Average, outputs: Iterable[Tensor]) -> dict[str, Tensor | None]:
    for output in outputs:
        average.add(output)
    return {name: None if column is None else column.cpu() for name, column in average.columns().items()}


def _num_samples(stack: dict[str, Tensor]) -> int:
    return len(next(iter(stack.values())))
