r"""Predictions averaged over a posterior.

With samples $\theta_1, \dots, \theta_S$ of the weights and the model's output $f_i(x)$ at $\theta_i$, a prediction is

```math
p(y \mid x) = \frac1S \sum_i p(y \mid f_i(x))
```

- Classes: the probabilities are averaged in log space. The entropy $H$ of $p(y \mid x)$ is the total uncertainty. The
  mutual information between label and weights, $H - \frac1S \sum_i H_i$, is the part that more data would remove
  (epistemic), where $H_i$ is the entropy of $p(y \mid f_i(x))$.
- Regression: $p(y \mid f_i(x))$ is $\mathcal N(f_i(x), \tau^2)$ with the noise $\tau$, `noise_std`. The variance of the
  average is the variance of the $f_i(x)$ over the samples (epistemic) plus $\tau^2$ (aleatoric).

All batches use the same samples: sample $i$ is the $i$-th draw of `torch.Generator().manual_seed(seed)` (on the model's
device if that is CUDA, else on the CPU), for every batch size, every chunk, vmap and loop. Those of the first part of a
mixture come first, and a sample counts in the averages what its part's weight says (`bsam.posterior.mixture`).

The data is read once, and each batch runs at all samples: on an accelerator `chunk` samples at a time in one vmapped
pass if the model allows it, otherwise in a loop. Both give the same numbers up to rounding.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from bsam.batches import as_tensor, batches_of, inputs_and_labels, moved
from bsam.interrupts import deferred, reading
from bsam.likelihood import LearnedNoise
from bsam.modules import Forward, evaluating, floating_type, preserved, unwrapped
from bsam.posterior.base import Posterior
from bsam.prediction.averages import average_for
from bsam.prediction.passes import Passes, calibration_batches
from bsam.prediction.results import GaussianPredictions, Predictions

__all__ = ["at_mean", "check_integer", "collect", "noise_of", "predict", "result_of"]


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
    class_dim: int | None = ...,
    ignore_index: int = ...,
    keep_samples: bool = ...,
    forward: Forward | None = ...,
    vectorise: bool | None = ...,
    recalibrate: Any = ...,
    compile: bool = ...,
    progress: bool | None = ...,
) -> Predictions: ...


@overload
def predict(
    model: nn.Module,
    posterior: Posterior,
    data: Any,
    *,
    likelihood: Literal["gaussian"],
    noise_std: float | None = ...,
    num_samples: int = ...,
    seed: int = ...,
    chunk: int | None = ...,
    batch_size: int = ...,
    keep_samples: bool = ...,
    forward: Forward | None = ...,
    vectorise: bool | None = ...,
    recalibrate: Any = ...,
    compile: bool = ...,
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
    class_dim: int | None = None,
    ignore_index: int = -100,
    keep_samples: bool = False,
    forward: Forward | None = None,
    vectorise: bool | None = None,
    recalibrate: Any = None,
    compile: bool = False,
    progress: bool | None = None,
) -> Predictions | GaussianPredictions:
    """Predict with the average over samples of a posterior.

    The model predicts in evaluation mode. Afterwards weights, buffers, each layer's mode and the global (CPU) generator
    are unchanged, also after an exception. Memory holds the weights, samples of them, and the activations of `chunk`
    samples for one batch; results are on the CPU.

    Args:
        model: The model. It need not hold the weights of the posterior. Predictions are made on its device.
        posterior: The distribution of its weights.
        data: A tensor of inputs, a tuple (inputs, labels) of tensors, a dictionary of tensors, or batches, such as a
            DataLoader or a generator. It is read once. A batch is a tensor of inputs, (inputs, labels), (inputs,) or a
            dictionary whose "labels" (or "label") are the labels. A dictionary of inputs becomes keyword arguments of
            the model, a tuple or list becomes positional arguments. NumPy arrays may stand in the place of tensors;
            arrays of real numbers get the type of the model's weights.
        num_samples: Number of samples; 0 predicts with the mean. Of a `Mixture`, they are spread over the parts by
            their weights; a part that is a point has one pass, whatever the number is, and 0 is one pass at the mean
            of each part.
        seed: Seed of the samples.
        chunk: Number of samples in one vmapped pass, or held by a loop. It multiplies the memory for weights and
            activations. By default as many as fit into half of a GPU's free memory, or 256 MB on the CPU, and at most
            64 if compiled. Samples are drawn once if memory can hold all of them, or if `chunk` covers all of them;
            otherwise they are drawn again for each batch.
        batch_size: Largest batch when `data` is tensors, which are cut evenly.
        likelihood: `"categorical"`: outputs are logits of K classes, (n, K), (n, T, K) for tokens, or (n, K, H, W) for
            pixels. `"bernoulli"`: logits (n,) or (n, 1) of class 1 of two, or (n, ...) of several yes/no questions,
            each with its own label (multi-label). `"gaussian"`: outputs (n,) or (n, D) are means of real targets.
        noise_std: Standard deviation of the targets around the true output, for `"gaussian"`. None: that of a
            `bsam.LearnedNoise`, at the posterior's mean; of a `Mixture`, the root mean square over its parts.
        class_dim: The dimension of the outputs that has the classes, for `"categorical"`. By default the last of
            three dimensions, and dimension 1 of four or more. The result has the classes in the last dimension.
        ignore_index: Labels with this number have no say in metrics, as in `torch.nn.functional.cross_entropy`. If the
            batches have examples of different lengths, they are padded: predictions with NaN, labels with this number.
        keep_samples: Also return the probabilities (or outputs) of each sample: `sample_log_probs` and `sample_probs`
            (or `sample_means`). They take `num_samples` times the memory.
        forward: `forward(model, inputs)` runs the model, if `model(inputs)` is not the right call. Outputs that are not
            tensors must have `.logits` or `["logits"]`.
        vectorise: True: vmap, or an error. False: a loop. None: vmap on an accelerator, unless it fails or differs
            from the loop; a loop on the CPU, where vmap is faster only for tiny models.
        recalibrate: Training data, in the form of `data`, to estimate BatchNorm's running statistics again at each
            sample, as `bsam.recalibrate_batch_norm` does. Labels are ignored. It is read once per sample, so it must
            not be a generator. False: use the posterior's buffers, which training left. None: the same, with a
            warning if BatchNorm comes after weights that have a width.
        compile: Compile the vmapped pass, and capture it on CUDA. Compiling takes tens of seconds, so this is useful
            for many batches of one size.
        progress: Show a progress bar (if `rich` is installed). None: if stderr is a terminal, after two seconds.

    Returns:
        `Predictions`, or `GaussianPredictions` for `likelihood="gaussian"`.

    Examples:
        >>> from bsam.posterior import PointMass
        >>> model = nn.Linear(4, 3)
        >>> predict(model, PointMass.from_model(model), torch.randn(5, 4))
        Predictions(5 examples, 3 classes, no labels, num_samples=32, seed=0, computed_by='mean')
    """
    check_integer("num_samples", num_samples, 0, "Write 0 to predict with the mean.")
    check_integer("batch_size", batch_size, 1)
    if chunk is not None:
        check_integer("chunk", chunk, 1, "Write None to choose by memory.")
    check_integer("seed", seed, -(2**63))
    check_integer("ignore_index", ignore_index, -(2**63))
    noise_std = noise_of(model, posterior, likelihood, noise_std)
    start = average_for(likelihood, noise_std, class_dim=class_dim, keep_samples=keep_samples)
    batches = batches_of(data, batch_size)
    calibration = calibration_batches(recalibrate, batch_size)
    with at_mean(model, posterior) as device, _progress(batches, progress) as advance:
        passes = Passes(
            model,
            posterior.to(device),
            forward=forward,
            num_samples=num_samples,
            seed=seed,
            chunk=chunk,
            vectorise=vectorise,
            device=device,
            recalibrate=calibration,
            compile=compile,
        )

        def average(inputs: Any, labels: Any) -> dict[str, Tensor | None]:
            if forward is None:
                _check_keywords(model, inputs)
            columns = passes.average(inputs, functools.partial(start, labels))
            advance()
            return columns

        next_tokens = forward is None and getattr(model, "loss_type", None) == "ForCausalLM"
        rows = collect(
            batches,
            device,
            average,
            dtype=floating_type(model),
            ignore_index=ignore_index,
            next_tokens=next_tokens,
        )
    settings = {"num_samples": passes.num_samples, "seed": seed, "computed_by": passes.computed_by}
    weights = passes.weights if keep_samples else None
    if weights is not None:
        settings["sample_weights"] = torch.tensor(weights)
    return result_of(rows, noise_std, ignore_index, **settings)


def noise_of(model: nn.Module, posterior: Posterior, likelihood: str, noise_std: float | None) -> float | None:
    """Return `noise_std`, or if it is None the learned noise of the posterior, if the model has one.

    The mixture over the parts of an ensemble has the mean of their variances. So mean and variance of its predictions
    are exact, and all its samples have one noise.
    """
    _check_posterior(posterior)
    if likelihood != "gaussian" or noise_std is not None or not isinstance(unwrapped(model), LearnedNoise):
        return noise_std
    posterior.check_fits(model)
    logs = [float(part.mean["log_noise_std"]) for part in posterior.parts]
    return math.sqrt(math.fsum(w * math.exp(2 * log) for w, log in zip(posterior.weights, logs, strict=True)))


def _check_posterior(posterior: Any) -> None:
    """Raise if the second argument of a prediction is something else."""
    if not hasattr(posterior, "parts"):
        raise TypeError(
            f"posterior is of type {type(posterior).__name__}: write predict(model, optimizer.posterior(model), data), "
            "or bsam.PointMass.from_model(model) for the weights of a network as they are."
        )


@contextlib.contextmanager
def at_mean(model: nn.Module, posterior: Posterior) -> Iterator[torch.device]:
    """Write the posterior's mean into `model`, in evaluation mode, until the block ends. Yields the device.

    Of a mixture, the mean of its first part.
    """
    _check_posterior(posterior)
    posterior.check_fits(model)
    device = next((t.device for t in chain(model.parameters(), model.buffers())), torch.device("cpu"))
    with (
        deferred(),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),  # a DataLoader draws its workers' seed from the global generator
        preserved(model, posterior.parts[0].mean),
        evaluating(model),
    ):
        posterior.parts[0].write_mean(model)
        yield device


def _check_keywords(model: nn.Module, inputs: Any) -> None:
    """Raise if the inputs are a dictionary with other keys than the names of the model's arguments."""
    if not isinstance(inputs, Mapping):
        return
    try:
        inspect.signature(model.forward).bind(**inputs)
    except TypeError as error:
        raise TypeError(
            f"the model cannot take the batch, a dictionary of {', '.join(inputs)}, as keywords: {error}. Write "
            'forward=lambda model, inputs: model(inputs["..."]), or leave these keys out.'
        ) from error


def collect(
    batches: Iterable[Any],
    device: torch.device,
    columns_of: Callable[[Any, Any], dict[str, Tensor | None]],
    *,
    dtype: torch.dtype | None = None,
    ignore_index: int = -100,
    next_tokens: bool = False,
) -> dict[str, Tensor | None]:
    """Concatenate the columns that `columns_of(inputs, labels)` returns for each batch.

    Args:
        batches: The batches.
        device: Where the inputs are moved to.
        columns_of: Returns tensors with one row per example, first those that have the classes or outputs.
        dtype: The type of inputs that are arrays of real numbers.
        ignore_index: What labels are padded with.
        next_tokens: The model's answer at a position is the next token, as that of Transformers' causal language
            models. The labels in a dictionary, which are its own tokens, are shifted by one, as these models do.
    """
    columns: list[dict[str, Tensor | None]] = []
    labelled: bool | None = None
    for i, batch in enumerate(reading(batches)):
        inputs, labels = inputs_and_labels(batch)
        if next_tokens and isinstance(batch, Mapping) and labels is not None:
            labels = nn.functional.pad(as_tensor(labels)[:, 1:], (0, 1), value=ignore_index)
        if labelled is not None and labelled != (labels is not None):
            raise ValueError(f"batch {i} has {'no ' if labelled else ''}labels, unlike earlier batches: all or none.")
        labelled = labels is not None
        columns.append(columns_of(moved(inputs, device, dtype), labels))
    if not columns:
        raise ValueError("data has no batches: there is nothing to predict. Was it a generator that was read before?")
    _check_same_outputs(columns)
    rows: dict[str, Tensor | None] = {}
    for name in columns[0]:
        parts = [part for batch in columns if (part := batch[name]) is not None]
        rows[name] = _concatenate(parts, ignore_index) if parts else None
    return rows


def _check_same_outputs(columns: list[dict[str, Tensor | None]]) -> None:
    """Raise unless all batches have the same number of classes or outputs; classes may have more or fewer positions."""
    name = next(iter(columns[0]))  # the first column has the outputs
    shapes = [tuple(part.shape) for batch in columns if (part := batch[name]) is not None]
    fixed = {(len(shape), shape[-1]) if name == "log_probs" else shape[1:] for shape in shapes}
    if len(fixed) > 1:
        other = next(i for i, shape in enumerate(shapes) if (len(shape), shape[1:]) != (len(shapes[0]), shapes[0][1:]))
        raise ValueError(
            f"the batches have different outputs: {name} of batch 0 has shape {shapes[0]}, of batch {other} "
            f"{shapes[other]}. All examples must have the same number of classes or outputs."
        )


def _concatenate(parts: list[Tensor], ignore_index: int) -> Tensor:
    """Concatenate tensors (n, ...). Those with fewer positions are padded by NaN, or by ignore_index if they count."""
    longest = [max(lengths) for lengths in zip(*(part.shape[1:] for part in parts), strict=True)]
    if all(list(part.shape[1:]) == longest for part in parts):
        return torch.cat(parts)
    filling = math.nan if parts[0].is_floating_point() else ignore_index
    padded = [part.new_full((len(part), *longest), filling) for part in parts]
    for whole, part in zip(padded, parts, strict=True):
        whole[(slice(None), *map(slice, part.shape[1:]))] = part
    return torch.cat(padded)


def result_of(
    rows: dict[str, Any], noise_std: float | None, ignore_index: int = -100, **settings: Any
) -> Predictions | GaussianPredictions:
    """Make the result of `predict` from its columns; `noise_std` is None for classes."""
    rows = {name: t.movedim(1, 0) if name.startswith("sample_") and t is not None else t for name, t in rows.items()}
    if noise_std is None:
        return Predictions(**rows, ignore_index=ignore_index, **settings)
    return GaussianPredictions(**rows, noise_std=float(noise_std), **settings)


@contextlib.contextmanager
def _progress(batches: Iterable[Any], show: bool | None) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr; yield the function to call after each batch."""
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


def check_integer(name: str, value: Any, least: int, hint: str = "") -> None:
    """Accept integers of 64 bits that are not below `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise ValueError(f"{name}={value!r} must be an integer >= {least}. {hint}".rstrip())
