r"""Predictions averaged over a posterior.

With samples $\theta_1 \dots \theta_S$ of the weights and the model's output $f_i(x)$ at $\theta_i$,

- classes: $p(y \mid x) = \frac1S \sum_i p(y \mid f_i(x))$, averaged in log space. Its entropy $H$ is all uncertainty;
  the mutual information $H - \frac1S \sum_i H_i$ between label and weights is the part that more data would remove
  (epistemic); $H_i$ is the entropy of $p(y \mid f_i(x))$.
- regression: $p(y \mid x) = \frac1S \sum_i N(y \mid f_i(x), noise^2)$, whose variance is that of the $f_i(x)$ over the
  samples (epistemic) plus $noise^2$ (aleatoric).

One set of samples serves the whole data set: sample i is the i-th draw of `torch.Generator().manual_seed(seed)` (a
generator on the model's device where that is CUDA), whatever the batch size, the chunk or the way it is computed.

The data is read once, and each batch runs at all samples: on an accelerator `chunk` at a time in one vmapped pass where
the model allows it, otherwise in a loop. Both give the same numbers up to rounding.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, ClassVar, Literal, Protocol, Self, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import Dataset, IterableDataset

from bsam.posterior.base import Posterior, clean_names, named_parameters, naming, preserved, read_file, write_file

__all__ = ["GaussianPredictions", "Predictions", "predict"]

Forward = Callable[[nn.Module, Any], Any]
"""How to run a model on the inputs of one batch."""

_STACK_BYTES = 256 * 2**20
"""The most memory that the weights of one chunk take, unless `chunk` says otherwise."""


# ------------------------------------------------------------------ results


class _Saved:
    """Saving and loading of a dataclass of tensors and plain values."""

    kind: ClassVar[str]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything into one safetensors file; a file that is there is replaced in one go or stays."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        settings = {name: value for name, value in values.items() if name not in tensors}
        write_file(path, tensors, format="bsam.predictions", kind=self.kind, settings=settings)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote."""
        _, tensors, settings = read_file(path, format="bsam.predictions", kinds=(cls.kind,))
        with naming(path):
            return cls(**{name: tensor.clone() for name, tensor in tensors.items()}, **settings)


@dataclass(frozen=True, eq=False, repr=False)
class Predictions(_Saved):
    """Probabilities of K classes for n examples, on the CPU; `bsam.metrics.summary` rates them."""

    log_probs: Tensor
    """Logarithms of the averaged probabilities, (n, K)."""
    mutual_information: Tensor
    """What knowing the weights would tell about the label, in nats, (n,): epistemic uncertainty. 0 at the mean."""
    labels: Tensor | None
    """(n,), or None if the data had none."""
    num_samples: int
    """0: the mean of the posterior predicted."""
    seed: int
    computed_by: str = ""
    """`"vmap"`, `"loop"` (with the reason, if vmap failed) or `"mean"`."""

    kind: ClassVar[str] = "classes"

    def __post_init__(self) -> None:
        _check_shape("log_probs", self.log_probs, (-1, -1))
        _check_shape("mutual_information", self.mutual_information, (len(self),))
        if self.labels is not None:
            _check_shape("labels", self.labels, (len(self),))

    @property
    def probs(self) -> Tensor:
        """The averaged probabilities, (n, K)."""
        return self.log_probs.exp()

    @property
    def classes(self) -> Tensor:
        """The most probable class of each example, (n,)."""
        return self.log_probs.argmax(dim=1)

    @property
    def entropy(self) -> Tensor:
        """The entropy of the averaged probabilities, in nats, (n,): total uncertainty."""
        return _entropy(self.log_probs)

    def __len__(self) -> int:
        return len(self.log_probs)

    def __repr__(self) -> str:
        labels = "no labels" if self.labels is None else "with labels"
        return (
            f"Predictions({len(self)} examples, {self.log_probs.shape[1]} classes, {labels}, "
            f"num_samples={self.num_samples}, seed={self.seed}, computed_by={self.computed_by!r})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class GaussianPredictions(_Saved):
    """Real outputs for n examples, on the CPU; a model with one output, (n,) or (n, 1), gives (n,)."""

    mean: Tensor
    """The average output, (n,) or (n, D)."""
    epistemic_variance: Tensor
    """The variance of the output over the samples, of the same shape."""
    noise_std: float
    """The standard deviation of a measurement around the true output."""
    targets: Tensor | None
    """Of the same shape, or None if the data had none."""
    log_density: Tensor | None
    """The log-density of the mixture at each target, (n,), summed over the D outputs of an example."""
    num_samples: int
    """0: the mean of the posterior predicted."""
    seed: int
    computed_by: str = ""
    """`"vmap"`, `"loop"` (with the reason, if vmap failed) or `"mean"`."""

    kind: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        _check_shape("mean", self.mean, (-1,) if isinstance(self.mean, Tensor) and self.mean.ndim == 1 else (-1, -1))
        _check_shape("epistemic_variance", self.epistemic_variance, tuple(self.mean.shape))
        if self.targets is not None:
            _check_shape("targets", self.targets, tuple(self.mean.shape))
        if self.log_density is not None:
            _check_shape("log_density", self.log_density, (len(self),))

    @property
    def variance(self) -> Tensor:
        """The variance of a measurement: epistemic variance plus noise_std squared."""
        return self.epistemic_variance + self.noise_std**2

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        targets = "no targets" if self.targets is None else "with targets"
        return (
            f"GaussianPredictions({len(self)} examples, {targets}, noise_std={self.noise_std}, "
            f"num_samples={self.num_samples}, seed={self.seed}, computed_by={self.computed_by!r})"
        )


# ------------------------------------------------------------------ the average over samples


_LOG_ZERO = torch.tensor(-math.inf, device="cpu")
"""The logarithm of an empty sum; a tensor without dimensions, it goes with any device and type."""


class _Average(Protocol):
    """An average over samples, made for one batch and its labels."""

    def add(self, outputs: Tensor) -> None:
        """Take in the outputs of some samples, (samples, n, ...)."""

    def columns(self) -> dict[str, Tensor | None]:
        """The fields of the result that have one row an example."""


def _entropy(log_p: Tensor) -> Tensor:
    terms: Tensor = torch.special.entr(log_p.exp())  # -p log p, and 0 at p = 0
    return terms.sum(dim=-1)


class _ClassAverage:
    """The mean of probabilities over the samples of one batch, in log space, one chunk of samples after another."""

    def __init__(self, log_probs: Callable[[Tensor], Tensor], labels: Any) -> None:
        self._log_probs = log_probs
        self._labels = labels
        self._log_sum = _LOG_ZERO
        self._entropy_sum: Tensor | float = 0.0
        self._count = 0

    def add(self, outputs: Tensor) -> None:
        log_p = self._log_probs(outputs.to(torch.promote_types(outputs.dtype, torch.float32)))
        self._log_sum = torch.logaddexp(self._log_sum, log_p.logsumexp(dim=0))
        self._entropy_sum = self._entropy_sum + _entropy(log_p).sum(dim=0)
        self._count += len(outputs)

    def columns(self) -> dict[str, Tensor | None]:
        log_probs = self._log_sum - math.log(self._count)
        information = _entropy(log_probs) - self._entropy_sum / self._count
        labels = None if self._labels is None else _class_labels(self._labels, len(log_probs))
        # Rounding may take the mutual information below 0.
        return {"log_probs": log_probs, "mutual_information": information.clamp(min=0), "labels": labels}


def _categorical(outputs: Tensor) -> Tensor:
    """(samples, n, K) logits to log-probabilities."""
    shape = tuple(outputs.shape[1:])
    if outputs.ndim == 2 or shape[1:] == (1,):
        raise ValueError(
            f'the model gives one number an example, shape {shape}, but likelihood="categorical" needs K >= 2 logits. '
            'Write likelihood="bernoulli" for two classes, or "gaussian" for regression.'
        )
    if outputs.ndim != 3:
        raise ValueError(
            f'the model gives outputs of shape {shape}, but likelihood="categorical" needs (n, K) logits. Bring them '
            "to it by forward=lambda model, inputs: ..."
        )
    return outputs.log_softmax(dim=-1)


def _bernoulli(outputs: Tensor) -> Tensor:
    """(samples, n) logits of class 1 to log-probabilities of both classes."""
    logit = _one_output(outputs)
    if logit.ndim != 2:
        raise ValueError(
            f'the model gives outputs of shape {tuple(outputs.shape[1:])}, but likelihood="bernoulli" needs one logit '
            'an example, (n,) or (n, 1). Write likelihood="categorical" for K logits.'
        )
    return torch.stack([F.logsigmoid(-logit), F.logsigmoid(logit)], dim=-1)


_LOG_PROBS = {"categorical": _categorical, "bernoulli": _bernoulli}


def _class_labels(labels: Any, n: int) -> Tensor:
    given = torch.as_tensor(labels).detach().cpu()
    flat = given.squeeze(1) if given.shape == (n, 1) else given
    if flat.shape != (n,):
        raise ValueError(
            f"labels of shape {tuple(given.shape)} came with outputs for {n} examples: one class number an example, "
            f"({n},), is needed. Write one_hot.argmax(dim=1) for one-hot labels."
        )
    whole = flat.long()
    if not torch.equal(whole.to(flat.dtype), flat):
        raise ValueError(f"labels must be class numbers 0, 1, ..., not {flat[whole != flat][0].item()}.")
    return whole


class _GaussianAverage:
    """Mean and variance of the outputs over the samples of one batch, and the density of the targets."""

    def __init__(self, noise_std: float, targets: Any) -> None:
        self._noise_std = noise_std
        self._targets: Tensor | None = None if targets is None else torch.as_tensor(targets).detach()
        self._mean: Tensor | float = 0.0
        self._squares: Tensor | float = 0.0  # sum of squared distances from the mean
        self._log_sum = _LOG_ZERO
        self._count = 0

    def add(self, outputs: Tensor) -> None:
        f = _one_output(outputs.to(torch.promote_types(outputs.dtype, torch.float32)))
        if f.ndim not in (2, 3):
            raise ValueError(
                f'the model gives outputs of shape {tuple(outputs.shape[1:])}, but likelihood="gaussian" needs (n,) or '
                "(n, D)."
            )
        count, total = len(f), self._count + len(f)
        mean, squares = f.mean(dim=0), f.var(dim=0, correction=0) * count
        shift = mean - self._mean  # Chan et al. (1983): two sets of samples into one
        self._mean = self._mean + shift * (count / total)
        self._squares = self._squares + squares + shift.square() * (self._count * count / total)
        self._count = total
        if self._targets is not None:
            self._targets = y = _targets(self._targets, f)
            z = (y - f) / self._noise_std
            log_p = -0.5 * z.square() - math.log(self._noise_std) - 0.5 * math.log(2 * math.pi)
            log_p = log_p.sum(dim=2) if log_p.ndim == 3 else log_p
            self._log_sum = torch.logaddexp(self._log_sum, log_p.logsumexp(dim=0))

    def columns(self) -> dict[str, Tensor | None]:
        return {
            "mean": torch.as_tensor(self._mean),
            "epistemic_variance": torch.as_tensor(self._squares / self._count),
            "targets": self._targets,
            "log_density": None if self._targets is None else self._log_sum - math.log(self._count),
        }


def _one_output(outputs: Tensor) -> Tensor:
    """(samples, n, 1) as (samples, n)."""
    return outputs.squeeze(2) if outputs.ndim == 3 and outputs.shape[2] == 1 else outputs


def _targets(targets: Tensor, f: Tensor) -> Tensor:
    y = targets.to(f.device, f.dtype)
    y = y.squeeze(1) if y.ndim == 2 and y.shape[1] == 1 else y
    if y.shape != f.shape[1:]:
        raise ValueError(f"targets of shape {tuple(targets.shape)} came with outputs of shape {tuple(f.shape[1:])}.")
    return y


# ------------------------------------------------------------------ passes through the model


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


class _Passes:
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

    def average(self, inputs: Any, start: Callable[[], _Average]) -> dict[str, Tensor | None]:
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


def _columns(average: _Average, outputs: Iterable[Tensor]) -> dict[str, Tensor | None]:
    for output in outputs:
        average.add(output)
    return {name: None if column is None else column.cpu() for name, column in average.columns().items()}


def _num_samples(stack: dict[str, Tensor]) -> int:
    return len(next(iter(stack.values())))


# ------------------------------------------------------------------ data


def _batches(data: Any, batch_size: int) -> Iterable[Any]:
    """The batches of `data`; only tensors are cut here."""
    tensors = data if isinstance(data, tuple) else (data,)
    if any(isinstance(part, Tensor) and len(part) == 0 for part in tensors):
        raise ValueError("data is empty: there is nothing to predict.")
    if isinstance(data, Tensor):
        return torch.split(data, batch_size)
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        inputs, labels = data
        if len(inputs) != len(labels):
            raise ValueError(f"data has {len(inputs)} inputs and {len(labels)} labels: one label an input is needed.")
        return list(zip(torch.split(inputs, batch_size), torch.split(labels, batch_size), strict=True))
    if isinstance(data, Mapping):
        raise TypeError("data is a dictionary, which is one batch: write [data], or a DataLoader of such batches.")
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise TypeError(
            "data is a Dataset of single examples: write torch.utils.data.DataLoader(data, batch_size=512)."
        )
    if not isinstance(data, Iterable):
        raise TypeError(f"data is of type {type(data).__name__}: a tensor, (inputs, labels) or batches are needed.")
    return data


def _inputs_and_labels(batch: Any) -> tuple[Any, Any]:
    """The two parts of a batch; labels are None where there are none."""
    if isinstance(batch, Mapping):
        inputs = dict(batch)
        key = "labels" if "labels" in inputs else "label"
        return inputs, inputs.pop(key, None)
    if isinstance(batch, list | tuple):
        if len(batch) not in (1, 2):
            raise ValueError(
                f"a batch has {len(batch)} parts: (inputs, labels) or (inputs,) are understood. Several inputs go "
                "into a tuple or dictionary of their own: ((a, b), labels)."
            )
        return batch[0], batch[1] if len(batch) == 2 else None
    return batch, None


def _moved(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, Mapping):
        return {key: _moved(value, device) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(_moved(value, device) for value in tree)
    return tree.to(device) if hasattr(tree, "to") else tree


# ------------------------------------------------------------------ predict


@overload
def predict(
    model: nn.Module,
    posterior: Posterior,
    data: Any,
    *,
    num_samples: int = ...,
    seed: int = ...,
    chunk: int | None = ...,
    batch_size: int = ...,
    likelihood: Literal["categorical", "bernoulli"] = ...,
    forward: Forward | None = ...,
    vectorise: bool | None = ...,
    progress: bool | None = ...,
) -> Predictions: ...


@overload
def predict(
    model: nn.Module,
    posterior: Posterior,
    data: Any,
    *,
    likelihood: Literal["gaussian"],
    noise_std: float,
    num_samples: int = ...,
    seed: int = ...,
    chunk: int | None = ...,
    batch_size: int = ...,
    forward: Forward | None = ...,
    vectorise: bool | None = ...,
    progress: bool | None = ...,
) -> GaussianPredictions: ...


def predict(
    model: nn.Module,
    posterior: Posterior,
    data: Any,
    *,
    num_samples: int = 32,
    seed: int = 0,
    chunk: int | None = None,
    batch_size: int = 512,
    likelihood: Literal["categorical", "bernoulli", "gaussian"] = "categorical",
    noise_std: float | None = None,
    forward: Forward | None = None,
    vectorise: bool | None = None,
    progress: bool | None = None,
) -> Predictions | GaussianPredictions:
    """Predict with the average over samples of a posterior.

    The model predicts in evaluation mode; afterwards weights, buffers, each layer's mode and the global (CPU)
    generator are what they were, also after an exception. The memory it takes is that of the weights, `chunk` samples
    of them, and one batch; the results wait on the CPU.

    Args:
        model: The model; it need not hold the weights of the posterior. Its device is where predictions are made.
        posterior: The distribution of its weights.
        data: A tensor of inputs, a tuple (inputs, labels) of tensors, or batches, say a DataLoader or a generator;
            it is read once. A batch is a tensor of inputs, (inputs, labels), (inputs,) or a dictionary whose
            "labels" (or "label") are the labels. Inputs that are a dictionary are given to the model as keywords, a
            tuple or list as positional arguments.
        num_samples: How many samples to average over; 0 predicts with the mean.
        seed: Seed of the samples.
        chunk: How many samples are held, and run in one vmapped pass, at a time. It multiplies the memory for
            weights and activations. By default as many as fit into 256 MB of weights. If that is all of them, they
            are drawn once, otherwise anew for each batch.
        batch_size: Into what batches tensors are cut.
        likelihood: `"categorical"`: outputs are logits (n, K). `"bernoulli"`: logits (n,) or (n, 1) of class 1 of
            two. `"gaussian"`: outputs (n,) or (n, D) are means of real targets.
        noise_std: Standard deviation of the targets around the true output, for `"gaussian"`.
        forward: `forward(model, inputs)` runs the model where calling it is not enough. Outputs that are not
            tensors must have `.logits` or `["logits"]`.
        vectorise: True: vmap, or an error. False: a loop. None: vmap on an accelerator, unless it fails or differs
            from the loop; a loop on the CPU, where vmap pays for tiny models only.
        progress: Show a progress bar (if `rich` is installed). None: where stderr is a terminal, after two seconds.

    Returns:
        `Predictions`, or `GaussianPredictions` for `likelihood="gaussian"`.

    >>> from bsam.posterior import PointMass
    >>> model = nn.Linear(4, 3)
    >>> predict(model, PointMass.from_model(model), torch.randn(5, 4))
    Predictions(5 examples, 3 classes, no labels, num_samples=32, seed=0, computed_by='mean')
    """
    _check_integer("num_samples", num_samples, 0, "Write 0 to predict with the mean.")
    _check_integer("batch_size", batch_size, 1)
    if chunk is not None:
        _check_integer("chunk", chunk, 1, "Write None to choose by memory.")
    _check_integer("seed", seed, -(2**63))
    start = _average_for(likelihood, noise_std)
    batches = _batches(data, batch_size)
    posterior.check_fits(model)
    device = next((t.device for t in chain(model.parameters(), model.buffers())), torch.device("cpu"))

    columns: list[dict[str, Tensor | None]] = []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),  # a DataLoader draws its workers' seed from the global generator
        preserved(model),
        _evaluating(model),
        _progress(batches, progress) as advance,
    ):
        posterior.write_mean(model)
        passes = _Passes(
            model,
            posterior.to(device),
            forward=forward,
            num_samples=num_samples,
            seed=seed,
            chunk=chunk,
            vectorise=vectorise,
            device=device,
        )
        labelled: bool | None = None
        for i, batch in enumerate(batches):
            inputs, labels = _inputs_and_labels(batch)
            if labelled is not None and labelled != (labels is not None):
                raise ValueError(f"batch {i} has {'no ' if labelled else ''}labels, unlike those before: all or none.")
            labelled = labels is not None
            columns.append(passes.average(_moved(inputs, device), functools.partial(start, labels)))
            advance()
    if not columns:
        raise ValueError("data has no batches: there is nothing to predict. Was it a generator that was read before?")

    rows: dict[str, Any] = {}
    for name in columns[0]:
        parts = [part for batch in columns if (part := batch[name]) is not None]
        rows[name] = torch.cat(parts) if parts else None
    if noise_std is not None:
        rows["noise_std"] = float(noise_std)
    result = GaussianPredictions if likelihood == "gaussian" else Predictions
    return result(**rows, num_samples=num_samples, seed=seed, computed_by=passes.computed_by)


def _average_for(likelihood: str, noise_std: float | None) -> Callable[[Any], _Average]:
    """The class of the averages, but for the labels of a batch."""
    if likelihood == "gaussian":
        if noise_std is None or not (math.isfinite(noise_std) and noise_std > 0):
            raise ValueError(
                f'noise_std={noise_std} must be a finite number > 0 for likelihood="gaussian": the standard deviation '
                "of the targets around the true output, like noise_std=0.1."
            )
        return functools.partial(_GaussianAverage, noise_std)
    if noise_std is not None:
        raise ValueError(f'noise_std={noise_std} is only for likelihood="gaussian", not {likelihood!r}: leave it out.')
    if likelihood not in _LOG_PROBS:
        raise ValueError(f"likelihood={likelihood!r} must be one of {', '.join(map(repr, _LOG_PROBS))}, 'gaussian'.")
    return functools.partial(_ClassAverage, _LOG_PROBS[likelihood])


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the time of the block; afterwards each layer has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def _progress(batches: Iterable[Any], show: bool | None) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr; yields the function to call after each batch."""
    wanted = sys.stderr.isatty() if show is None else show
    if not wanted or importlib.util.find_spec("rich") is None:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task("predicting", total=_length(batches))
    begin = time.monotonic()

    def advance() -> None:
        if not bar.live.is_started and (show or time.monotonic() - begin > 2):
            bar.start()
        bar.advance(task)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


def _length(batches: Iterable[Any]) -> int | None:
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:  # a generator, or the loader of an iterable data set
        return None


def _check_integer(name: str, value: Any, least: int, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise ValueError(f"{name}={value!r} must be an integer >= {least}. {hint}".rstrip())


def _check_shape(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Raise unless `value` is a tensor of `shape`, in which -1 stands for any length."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is of type {type(value).__name__}: it must be a tensor.")
    if value.ndim != len(shape) or any(want not in (-1, got) for want, got in zip(shape, value.shape, strict=True)):
        wanted = tuple("any" if want == -1 else want for want in shape)
        raise ValueError(f"{name} has shape {tuple(value.shape)}: it must have {wanted}.")
