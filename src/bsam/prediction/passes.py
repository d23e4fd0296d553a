"""Running a model on a batch at each sample of its weights: in one vmapped pass, or in a loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bsam.posterior.base import Posterior, clean_names, named_parameters
from bsam.prediction.averages import Average

__all__ = ["Forward", "Passes"]

Forward = Callable[[nn.Module, Any], Any]
"""How to run a model on the inputs of one batch."""

_STACK_BYTES = 256 * 2**20
"""The most memory that the weights of one chunk take, unless `chunk` says otherwise."""


class _Model(nn.Module):
    """The model with `forward` around it, so that weights can be handed to the whole by `functional_call`."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model = model
        self._call = forward or _call

    def forward(self, inputs: Any) -> Tensor:
        outputs = self._call(self.model, inputs)
        if isinstance(outputs, Mapping) and "logits" in outputs:
            outputs = outputs["logits"]
        outputs = getattr(outputs, "logits", outputs)
        if not isinstance(outputs, Tensor):
            raise TypeError(
                f"the model returned {type(outputs).__name__}: a tensor, or something with .logits, is needed. Write "
                "forward=lambda model, inputs: ... that returns the tensor."
            )
        return outputs


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, list | tuple):
        return model(*inputs)
    return model(inputs)


class Passes:
    """Runs a model on batches at each sample of its weights.

    The model holds the posterior's mean or, after a loop, some sample: only weights that are sampled are written or
    handed in.
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
    ) -> None:
        self._model = _Model(model, forward)
        self._posterior, self._num_samples, self._seed, self._device = posterior, num_samples, seed, device
        sampled = set(posterior.sampled_names) if num_samples else set()
        self._parameters = {name: p for name, p in named_parameters(model).items() if name in sampled}
        names = clean_names(name for name, _ in model.named_parameters())
        self._keys = {short: f"model.{name}" for name, short in names.items()}

        size = sum(p.numel() * p.element_size() for p in self._parameters.values())
        self._chunk = chunk or max(1, min(num_samples, _STACK_BYTES // max(size, 1)))
        # All samples in one chunk are drawn once and kept; several chunks are drawn again for every batch.
        self._kept = list(self._draw()) if self._parameters and self._chunk >= num_samples else None

        vectorised = _launch_bound(device) if vectorise is None else vectorise
        self.computed_by = "mean" if not self._parameters else "vmap" if vectorised else "loop"
        self._forced = vectorise is True
        self._checked = False

    def average(self, inputs: Any, start: Callable[[], Average]) -> dict[str, Tensor | None]:
        """The columns of one batch, averaged over all samples; `start` makes an empty average."""
        if self.computed_by == "vmap":
            try:
                if not (self._forced or self._checked):
                    self._check_vmap(inputs)
                return _columns(start(), (self._vmapped(stack, inputs) for stack in self._stacks()))
            except Exception as error:
                # What vmap cannot do comes out in many ways. A mistake of the user's will come again in the loop.
                if self._forced:
                    raise
                reason = str(error).strip().partition("\n")[0]
                self.computed_by = f"loop, because vmap failed with {type(error).__name__}: {reason}"
        if self.computed_by == "mean":
            return _columns(start(), [self._model(inputs)[None]])
        return _columns(
            start(),
            (self._at(stack, i, inputs)[None] for stack in self._stacks() for i in range(_num_samples(stack))),
        )

    def _stacks(self) -> Iterable[dict[str, Tensor]]:
        return self._draw() if self._kept is None else self._kept

    def _draw(self) -> Iterator[dict[str, Tensor]]:
        """The samples in order, stacked along dimension 0 in chunks."""
        generator = torch.Generator(self._device if self._device.type == "cuda" else "cpu").manual_seed(self._seed)
        for start in range(0, self._num_samples, self._chunk):
            count = min(self._chunk, self._num_samples - start)
            stack = {name: p.new_empty((count, *p.shape)) for name, p in self._parameters.items()}
            for i in range(count):
                sample = self._posterior.sample(generator)
                for name, weights in stack.items():
                    weights[i] = sample[name]
            yield stack

    def _vmapped(self, stack: dict[str, Tensor], inputs: Any) -> Tensor:
        def run(weights: dict[str, Tensor]) -> Tensor:
            handed = {self._keys[name]: w for name, w in weights.items()}
            outputs: Tensor = functional_call(self._model, handed, (inputs,))
            return outputs

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")  # not in the user's hands
            outputs: Tensor = torch.vmap(run)(stack)
        return outputs

    def _at(self, stack: dict[str, Tensor], i: int, inputs: Any) -> Tensor:
        for name, weights in stack.items():
            self._parameters[name].copy_(weights[i])
        torch.clear_autocast_cache()  # a surrounding autocast region would go on with the old weights
        outputs: Tensor = self._model(inputs)
        return outputs

    def _check_vmap(self, inputs: Any) -> None:
        """Raise if a vmapped pass gives other outputs than a plain one at the same weights.

        A model that keeps its weights in a list of its own, say, does not see those that are handed in: it would
        predict with the mean at every sample and look certain.
        """
        stack = {name: weights[:1] for name, weights in next(iter(self._stacks())).items()}
        handed, written = self._vmapped(stack, inputs)[0], self._at(stack, 0, inputs)
        # Generous: kernels for stacked weights round in other places, and TensorFloat-32 has 11 bits.
        scale = float(written.nan_to_num(0, 0, 0).abs().max())
        tolerance = {torch.float64: 1e-8, torch.float32: 1e-3}.get(written.dtype, 5e-2) * scale
        if not torch.allclose(handed, written, rtol=0, atol=tolerance, equal_nan=True):
            raise RuntimeError("the model does not use the weights that torch.func.functional_call hands to it")
        self._checked = True


def _launch_bound(device: torch.device) -> bool:
    """Whether launching a pass takes longer than running it, so that one vmapped pass beats several plain ones.

    On the CPU vmap was measured to be twice as fast for a network of 400 weights, no faster for one of 500,000, and
    half as fast for convolutions, with `chunk` times the memory.
    """
    return device.type != "cpu"


def _columns(average: Average, outputs: Iterable[Tensor]) -> dict[str, Tensor | None]:
    for output in outputs:
        average.add(output)
    return {name: None if column is None else column.cpu() for name, column in average.columns().items()}


def _num_samples(stack: dict[str, Tensor]) -> int:
    return len(next(iter(stack.values())))
