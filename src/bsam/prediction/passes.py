"""Runs a model on a batch at each sample of its weights: in one vmapped pass, or in a loop."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bsam.batch_norm import recalibrate_batch_norm
from bsam.batches import batches_of, inputs_and_labels, map_tensors, moved
from bsam.compiler.layers import our_layers
from bsam.executor import Executor, callers_level, quiet_vmap
from bsam.interrupts import interruptible
from bsam.modules import (
    Forward,
    OutputModel,
    clean_names,
    floating_type,
    named_buffers,
    named_parameters,
    normalisation_layers,
    running_statistics,
)
from bsam.posterior.base import Posterior
from bsam.prediction.averages import Average
from bsam.shards import refuse_sharded
from bsam.torch_private import foreach_copy_, own_buffers

__all__ = ["Passes", "calibration_batches", "run_together"]

_CPU_BYTES = 256 * 2**20
"""Largest memory of a chunk of samples on the CPU, unless `chunk` is given."""
_NUM_LARGE_OUTPUTS = 4
"""Estimated number of outputs, each as large as the largest layer's, that a pass holds at once."""
_LARGEST_COMPILED_CHUNK = 64
"""Largest number of samples of a compiled chunk; with 128 a sample of ResNet-20 took only 2% less time."""
_SHORT_TYPES = (torch.bfloat16, torch.float16)


class Passes:
    """Runs a model on batches at each sample of its weights.

    The model holds the posterior's mean or, after a loop, some sample: only sampled weights are written or passed. The
    arguments are those of `predict`, and `room`: the number of bytes for weights and outputs of one chunk, by default
    chosen from the device's free memory.
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
        recalibrate: Iterable[Any] | Literal[False] | None,
        compile: bool = False,
        room: int | None = None,
    ) -> None:
        refuse_sharded(
            "bsam.predict",
            model,
            "save the posterior, posterior.save(path), and load it with bsam.load_posterior(path) in one process, or "
            "average outputs of `with posterior.sampled(model, generator)` yourself",
        )
        self._model = OutputModel(model, forward)
        self._posterior, self._seed, self._device = posterior, seed, device
        self._counts = posterior.num_draws(num_samples)  # of the parts of a mixture
        self._num_samples = sum(self._counts)
        self._draws = num_samples > 0
        varies = self._draws or len(posterior.parts) > 1
        sampled = set(posterior.sampled_names) if varies else set()
        self._parameters = {name: p for name, p in named_parameters(model).items() if name in sampled}
        self._tensors: dict[str, Tensor] = dict(self._parameters)  # the targets that a sample is written to
        names = clean_names(name for name, _ in model.named_parameters())
        self._keys = {short: f"model.{name}" for name, short in names.items()}

        self._weight_bytes = sum(p.numel() * p.element_size() for p in self._parameters.values())
        most = _CPU_BYTES // max(1, self._weight_bytes)
        self._chunk = chunk or max(1, min(self._num_samples, most))  # held by a loop
        self._fits = chunk is not None
        self._sample_buffers: dict[str, list[Tensor]] = {}  # one per sample, by their names in the model
        self._take_buffers_of_parts()
        if recalibrate is None:
            self._warn_of_statistics()
        elif recalibrate is not False:
            self._recalibrate(recalibrate)
        self._holds_all_samples = self._chunk >= self._num_samples
        self._held_samples: list[dict[str, Tensor]] | None = None

        if compile and vectorise is False:
            raise ValueError("compile=True compiles the vmapped pass, so leave vectorise=False out.")
        self._executor = Executor(
            vectorise, "predictions are computed in a loop over the samples", model, errors=Exception
        )
        self._pays = compile or Executor.launch_bound(device)
        self._compile, self._room = compile, room
        self._checked = vectorise is True
        self._samples_differ = not self._draws or self._num_samples < 2  # known, or nothing to know
        self._compared: set[Any] = set()  # keys of older programs whose outputs were compared with a plain pass

    @property
    def num_samples(self) -> int:
        """The number of samples that are averaged; 0 if there are none, but a mean, or that of each part."""
        return self._num_samples if self._draws else 0

    @property
    def weights(self) -> list[float] | None:
        """What each sample counts in the average; None if all count the same. They sum to 1."""
        if not self._tensors:
            return None
        found = [
            weight / count
            for weight, count in zip(self._posterior.weights, self._counts, strict=True)
            for _ in range(count)
        ]
        return None if len(set(found)) == 1 else found

    @property
    def computed_by(self) -> str:
        """How the samples are computed: "mean", "vmap" or "loop", with the reason if vmap failed."""
        if not self._tensors:
            return "mean"
        if self._executor.tries_vmap(self._pays):
            return "vmap"
        return "loop" if self._executor.failure is None else f"loop, because {self._executor.failure}"

    def average(self, inputs: Any, start: Callable[[], Average]) -> dict[str, Tensor | None]:
        """Return the columns of one batch, averaged over all samples; `start` makes an empty average."""
        if not self._tensors:
            return _columns(start(), [self._model(inputs)[None]])

        def together() -> dict[str, Tensor | None]:
            if not self._checked:
                self._check_vmap(inputs)
            if not self._fits:
                self._fit(inputs)
            return self._together(inputs, start)

        def loop() -> dict[str, Tensor | None]:
            outputs = (self._at(stack, i, inputs)[None] for stack in self._stacks() for i in range(_num_samples(stack)))
            return _columns(start(), self._watched(outputs), self.weights)

        return self._executor.run(together, loop, pays=self._pays)

    def _watched(self, outputs: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the outputs; warn if those of all samples are the same in the first batch."""
        first: Tensor | None = None
        for stack in outputs:
            if not self._samples_differ:
                first = stack[0].clone() if first is None else first
                self._samples_differ = any(not torch.equal(first, output) for output in stack)
            yield stack
        if not self._samples_differ:
            self._samples_differ = True  # one warning is enough
            two = next(self._draw(2)).values()
            if all(torch.equal(weights[0], weights[1]) for weights in two):  # a posterior without width
                return
            warnings.warn(
                "all samples of the posterior have the same outputs, so that predictions have none of its doubt: does "
                "the model use the sampled weights? Adapters that are merged or disabled are not used.",
                stacklevel=callers_level(),
            )

    def _together(self, inputs: Any, start: Callable[[], Average]) -> dict[str, Tensor | None]:
        run = self._compiled if self._compile else self._vmapped
        while True:
            try:
                return _columns(start(), self._watched(run(stack, inputs) for stack in self._stacks()), self.weights)
            except torch.OutOfMemoryError:
                if self._chunk == 1 and not self._holds_all_samples:
                    raise
                self._chunk, self._held_samples, self._holds_all_samples = max(1, self._chunk // 2), None, False
            torch.cuda.empty_cache()  # outside the handler, because the exception keeps the computed tensors alive

    def _fit(self, inputs: Any) -> None:
        """Choose a chunk that fits into memory, by the size of the layers' outputs, and whether to hold all samples."""
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
        most = room // max(1, self._weight_bytes + _NUM_LARGE_OUTPUTS * largest)
        most = min(most, _LARGEST_COMPILED_CHUNK) if self._compile else most
        self._chunk, self._fits = _choose_chunk(self._num_samples, max(1, most)), True
        all_bytes = self._num_samples * self._weight_bytes
        self._holds_all_samples = self._chunk == self._num_samples or all_bytes <= room // 2

    def _stacks(self) -> Iterable[dict[str, Tensor]]:
        """Return the samples in order: drawn once and held if all fit into memory, else drawn again per batch."""
        if not self._holds_all_samples:
            return self._draw(self._chunk)
        if self._held_samples is None:
            self._held_samples = list(self._draw(self._chunk))
        return self._held_samples

    def _draw(self, chunk: int) -> Iterator[dict[str, Tensor]]:
        """Draw the samples in order, in chunks that are stacked along dimension 0."""
        samples = self._samples()
        for start in range(0, self._num_samples, chunk):
            count = min(chunk, self._num_samples - start)
            stack = {name: p.new_empty((count, *p.shape)) for name, p in self._parameters.items()}
            for i in range(count):
                with interruptible():
                    sample = next(samples)
                given = [sample[name].to(weights.dtype) for name, weights in stack.items()]
                if given:  # of a mixture, only buffers may differ
                    foreach_copy_([weights[i] for weights in stack.values()], given)
            buffers = self._sample_buffers.items()
            yield stack | {name: torch.stack(each[start : start + count]) for name, each in buffers}

    def _samples(self) -> Iterator[dict[str, Tensor]]:
        """Draw the samples one by one, those of the first part of a mixture first."""
        generator = torch.Generator(self._device if self._device.type == "cuda" else "cpu").manual_seed(self._seed)
        for part, count in zip(self._posterior.parts, self._counts, strict=True):
            draws = self._draws and bool(part.sampled_names)
            for _ in range(count):
                yield part.sample(generator) if draws else part.mean

    def _take_buffers_of_parts(self) -> None:
        """Let each sample have the buffers of its part, where the parts of a mixture have different ones."""
        first, *others = self._posterior.parts
        targets = named_buffers(self._model.model)
        keys = {id(buffer): key for key, buffer in self._model.named_buffers()}
        for name, buffer in first.buffers.items():
            if any(not torch.equal(other.buffers[name], buffer) for other in others):
                key = keys[id(targets[name])]
                parts = zip(self._posterior.parts, self._counts, strict=True)
                self._sample_buffers[key] = [
                    part.buffers[name].to(targets[name].dtype) for part, count in parts for _ in range(count)
                ]
                self._tensors[key] = targets[name]
                self._keys[key] = key

    def _warn_of_statistics(self) -> None:
        """Warn if a sample changes what BatchNorm sees: a weight before a layer of it, in the order of the modules."""
        modules = list(self._model.modules())
        layers = [layer for _, layer in normalisation_layers(self._model) if layer.running_mean is not None]
        last = modules.index(layers[-1]) if layers else 0
        before = {id(p) for module in modules[:last] for p in module.parameters(recurse=False)}
        drawn = {name for part in self._posterior.parts for name in part.sampled_names} if self._draws else set()
        if any(id(parameter) in before for name, parameter in self._parameters.items() if name in drawn):
            warnings.warn(
                "the running statistics of BatchNorm belong to the posterior's mean, so that predictions at samples of "
                "the weights are too uncertain: write recalibrate=train_loader to estimate the statistics at each "
                "sample, from training data or a part of it, or recalibrate=False to use those of the mean.",
                stacklevel=callers_level(),
            )

    def _recalibrate(self, data: Iterable[Any]) -> None:
        """Estimate BatchNorm's running statistics at the mean, or at each sample, as a part of that sample."""
        own = {id(own_buffers(layer)[name]) for layer, name in running_statistics(self._model)}
        buffers = {key: buffer for key, buffer in self._model.named_buffers() if id(buffer) in own}

        def run(batch: Any) -> None:
            self._model(moved(inputs_and_labels(batch)[0], self._device, floating_type(self._model)))

        if not self._tensors:
            recalibrate_batch_norm(self._model, data, forward=run)
            return
        estimates: dict[str, list[Tensor]] = {key: [] for key in buffers}
        for stack in self._draw(self._chunk):
            for i in range(_num_samples(stack)):
                self._write(stack, i)
                recalibrate_batch_norm(self._model, data, forward=run)
                for key, buffer in buffers.items():
                    estimates[key].append(buffer.clone())
        self._sample_buffers |= estimates
        self._tensors |= buffers
        self._keys |= {key: key for key in buffers}

    def samples(self) -> dict[str, Tensor]:
        """Draw all samples: stacked weights, and recalibrated statistics, by their names in the model."""
        if not self._tensors:
            return {}
        stack = next(self._draw(self._num_samples))
        return {self._keys[name].removeprefix("model."): values for name, values in stack.items()}

    def _vmapped(self, stack: dict[str, Tensor], inputs: Any, fixed: dict[str, Tensor] | None = None) -> Tensor:
        handed = {self._keys[name]: weights for name, weights in stack.items()}
        return run_together(self._model, handed, (inputs,), fixed)

    def _compiled(self, stack: dict[str, Tensor], inputs: Any) -> Tensor:
        """Run `_vmapped`, compiled for the shapes of this batch and kept for later calls with this model.

        A program has fixed what the model reads apart from tensors, like a number. So one from an earlier call is
        compared with a plain pass, and compiled again if they differ by more than rounding may (`_close`).
        """
        tensors: list[Tensor] = []
        map_tensors(tensors.append, inputs)
        handed = {self._keys[name] for name in stack}
        own = chain(self._model.named_parameters(), self._model.named_buffers())
        rest = {name: tensor.detach() for name, tensor in own if name not in handed}  # not constants of the program
        shapes = repr(map_tensors(lambda t: (tuple(t.shape), t.dtype), inputs))
        call = self._model.call
        fixed_shapes = tuple((name, tuple(t.shape), t.dtype) for name, t in rest.items())
        layers = tuple(type(layer) for layer in self._model.modules())
        key = (id(call), _num_samples(stack), tuple(stack), shapes, fixed_shapes, layers)
        programs = _PROGRAMS.setdefault(self._model.model, {})
        weights, others = [*stack.values()], [*rest.values(), *tensors]

        def run(*flat: Tensor) -> list[Tensor]:
            left = iter(flat)
            weights = {name: next(left) for name in stack}
            fixed = {name: next(left) for name in rest}
            return [self._vmapped(weights, map_tensors(lambda _: next(left), inputs), fixed)]

        is_older = key in programs and programs[key].function() is call and key not in self._compared
        self._compared.add(key)
        if is_older and not _close(programs[key](weights, others)[0], self._at(stack, 0, inputs)):
            del programs[key]
        if key not in programs or programs[key].function() is not call:
            programs[key] = _Program(run, weights, others, weakref.ref(call))
        return programs[key](weights, others)

    def _write(self, stack: dict[str, Tensor], i: int) -> None:
        for name, values in stack.items():
            self._tensors[name].copy_(values[i])
        torch.clear_autocast_cache()  # a surrounding autocast region would keep using the old weights

    def _at(self, stack: dict[str, Tensor], i: int, inputs: Any) -> Tensor:
        self._write(stack, i)
        outputs: Tensor = self._model(inputs)
        return outputs

    def _check_vmap(self, inputs: Any) -> None:
        """Raise if a vmapped pass and a plain pass at the same weights have different outputs.

        For example, a model that keeps its weights in a list does not see the weights that it is given. It would
        predict with the mean at every sample and look certain.
        """
        stack = next(self._draw(1))
        before = {name: tensor.clone()[None] for name, tensor in self._tensors.items()}
        handed, written = self._vmapped(stack, inputs)[0], self._at(stack, 0, inputs)
        self._write(before, 0)  # so that a second check starts from the same weights
        if not _close(handed, written):
            raise RuntimeError("the model does not use the weights that torch.func.functional_call gives to it")
        self._checked = True


def _close(handed: Tensor, written: Tensor) -> bool:
    """Whether the outputs of a vmapped pass are those of a plain pass, up to rounding.

    Generous: kernels for stacked weights round in other places, and TensorFloat-32 has 11 bits. Under autocast a model
    may return float32 numbers that have only 8 or 11 bits.
    """
    scale = float(written.nan_to_num(0, 0, 0).abs().max())
    rounded = any(torch.equal(written.to(short).to(written.dtype), written) for short in _SHORT_TYPES)
    tolerance = 5e-2 if rounded else {torch.float64: 1e-8, torch.float32: 1e-3}[written.dtype]
    return torch.allclose(handed.to(written.dtype), written, rtol=0, atol=tolerance * scale, equal_nan=True)


def calibration_batches(recalibrate: Any, batch_size: int) -> Iterable[Any] | Literal[False] | None:
    """Return the batches of the argument `recalibrate` of `predict`, or None or False as they are."""
    if recalibrate is None or recalibrate is False:
        return recalibrate
    batches = batches_of(recalibrate, batch_size)
    if isinstance(batches, Iterator):
        raise TypeError("recalibrate is a generator, but is read once per sample: give a list or a DataLoader.")
    return batches


def run_together(
    network: nn.Module, stack: dict[str, Tensor], arguments: tuple[Any, ...], fixed: dict[str, Tensor] | None = None
) -> Tensor:
    """Run a network at all weights of a stack (samples, ...) by one vmapped pass, and return its stacked outputs."""

    def run(weights: dict[str, Tensor]) -> Tensor:
        outputs: Tensor = functional_call(network, weights | (fixed or {}), arguments)
        return outputs

    device = next(iter(stack.values())).device
    with our_layers(device) if _num_samples(stack) > 1 else nullcontext():
        outputs: Tensor = quiet_vmap(run)(stack)
    return outputs


class _Program:
    """A compiled function, captured in a CUDA graph on CUDA. Its inputs are copied to fixed tensors.

    Args:
        function: Takes `weights` and `others`, returns a list of one tensor.
        weights: Tensors that are copied again only if one of them is another object.
        others: Tensors that are copied in every call.
        made_for: Weak reference to the function that runs the model, which may hold the model.
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
        """Return the output, which the next call overwrites."""
        if any(seen() is not tensor for seen, tensor in zip(self._seen, weights, strict=True)):
            foreach_copy_(self._weights, weights)
            self._seen = [weakref.ref(t) for t in weights]
        foreach_copy_(self._others, others)
        return self._run()[0]


_PROGRAMS: weakref.WeakKeyDictionary[nn.Module, dict[Any, _Program]] = weakref.WeakKeyDictionary()
"""Compiled passes of each living model, by function, number of samples, names and shapes."""


def _room(device: torch.device) -> int:
    """Return the number of bytes for weights and outputs of one chunk: half of the free memory of a GPU."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else _CPU_BYTES


def _choose_chunk(num_samples: int, most: int) -> int:
    """Return a divisor of num_samples above half of `most`, or else `most`: each size is compiled again."""
    if most >= num_samples:
        return num_samples
    return next((n for n in range(most, most // 2, -1) if num_samples % n == 0), most)


def _columns(
    average: Average, outputs: Iterable[Tensor], weights: Sequence[float] | None = None
) -> dict[str, Tensor | None]:
    start = 0
    for output in outputs:
        stop = start + len(output)
        average.add(output, None if weights is None else weights[start:stop])
        start = stop
    return {name: None if column is None else column.cpu() for name, column in average.columns().items()}


def _num_samples(stack: dict[str, Tensor]) -> int:
    return len(next(iter(stack.values())))
