"""Predictions averaged over a posterior.

With samples theta_1 .. theta_S of the weights and the model's output f_i(x) at theta_i,

- classes: p(y | x) = 1/S sum_i p(y | f_i(x)), averaged in log space. Its entropy H is the total uncertainty; the mutual
  information H - 1/S sum_i H_i between label and weights is the part that more data would remove (epistemic), where
  H_i is the entropy of p(y | f_i(x)).
- regression: p(y | x) = 1/S sum_i N(y | f_i(x), noise_std^2), whose variance is that of the f_i(x) over the samples
  (epistemic) plus noise_std^2 (aleatoric).

All batches use the same samples: sample i is the i-th draw of `torch.Generator().manual_seed(seed)` (on the model's
device if that is CUDA, else on the CPU), for every batch size, every chunk, vmap and loop.

The data is read once, and each batch runs at all samples: on an accelerator `chunk` samples at a time in one vmapped
pass if the model allows it, otherwise in a loop. Both give the same numbers up to rounding.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from bsam.batches import batches_of, inputs_and_labels, moved
from bsam.interrupts import deferred, reading
from bsam.modules import Forward, evaluating, preserved
from bsam.posterior.base import Posterior
from bsam.prediction.averages import average_for
from bsam.prediction.passes import Passes
from bsam.prediction.results import GaussianPredictions, Predictions

__all__ = ["at_mean", "check_integer", "collect", "predict", "result_of"]


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
    noise_std: float,
    num_samples: int = ...,
    seed: int = ...,
    chunk: int | None = ...,
    batch_size: int = ...,
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
        data: A tensor of inputs, a tuple (inputs, labels) of tensors, or batches, such as a DataLoader or a generator.
            It is read once. A batch is a tensor of inputs, (inputs, labels), (inputs,) or a dictionary whose
            "labels" (or "label") are the labels. A dictionary of inputs becomes keyword arguments of the model, a
            tuple or list becomes positional arguments.
        num_samples: Number of samples; 0 predicts with the mean.
        seed: Seed of the samples.
        chunk: Number of samples in one vmapped pass, or held by a loop. It multiplies the memory for weights and
            activations. By default as many as fit into half of a GPU's free memory, or 256 MB on the CPU, and at most
            64 if compiled. Samples are drawn once if memory can hold all of them, or if `chunk` covers all of them;
            otherwise they are drawn again for each batch.
        batch_size: Largest batch when `data` is tensors, which are cut evenly.
        likelihood: `"categorical"`: outputs are logits (n, K). `"bernoulli"`: logits (n,) or (n, 1) of class 1 of
            two. `"gaussian"`: outputs (n,) or (n, D) are means of real targets.
        noise_std: Standard deviation of the targets around the true output, for `"gaussian"`.
        forward: `forward(model, inputs)` runs the model, if `model(inputs)` is not the right call. Outputs that are not
            tensors must have `.logits` or `["logits"]`.
        vectorise: True: vmap, or an error. False: a loop. None: vmap on an accelerator, unless it fails or differs
            from the loop; a loop on the CPU, where vmap is faster only for tiny models.
        recalibrate: Training data, in the form of `data`, to estimate BatchNorm's running statistics again at each
            sample, as `bsam.recalibrate_batch_norm` does. Labels are ignored. It is read once per sample, so it must
            not be a generator. None: use the posterior's buffers, which belong to its mean.
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
    start = average_for(likelihood, noise_std)
    batches = batches_of(data, batch_size)
    calibration = None if recalibrate is None else batches_of(recalibrate, batch_size)
    if isinstance(calibration, Iterator):
        raise TypeError("recalibrate is a generator, but is read once per sample: give a list or a DataLoader.")
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
            columns = passes.average(inputs, functools.partial(start, labels))
            advance()
            return columns

        rows = collect(batches, device, average)
    return result_of(rows, noise_std, num_samples=num_samples, seed=seed, computed_by=passes.computed_by)


@contextlib.contextmanager
def at_mean(model: nn.Module, posterior: Posterior) -> Iterator[torch.device]:
    """Write the posterior's mean into `model`, in evaluation mode, until the block ends. Yields the device."""
    posterior.check_fits(model)
    device = next((t.device for t in chain(model.parameters(), model.buffers())), torch.device("cpu"))
    with (
        deferred(),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),  # a DataLoader draws its workers' seed from the global generator
        preserved(model),
        evaluating(model),
    ):
        posterior.write_mean(model)
        yield device


def collect(
    batches: Iterable[Any], device: torch.device, columns_of: Callable[[Any, Any], dict[str, Tensor | None]]
) -> dict[str, Tensor | None]:
    """Concatenate the columns that `columns_of(inputs, labels)` returns for each batch."""
    columns: list[dict[str, Tensor | None]] = []
    labelled: bool | None = None
    for i, batch in enumerate(reading(batches)):
        inputs, labels = inputs_and_labels(batch)
        if labelled is not None and labelled != (labels is not None):
            raise ValueError(f"batch {i} has {'no ' if labelled else ''}labels, unlike earlier batches: all or none.")
        labelled = labels is not None
        columns.append(columns_of(moved(inputs, device), labels))
    if not columns:
        raise ValueError("data has no batches: there is nothing to predict. Was it a generator that was read before?")
    rows: dict[str, Tensor | None] = {}
    for name in columns[0]:
        parts = [part for batch in columns if (part := batch[name]) is not None]
        rows[name] = torch.cat(parts) if parts else None
    return rows


def result_of(rows: dict[str, Any], noise_std: float | None, **settings: Any) -> Predictions | GaussianPredictions:
    """Make the result of `predict` from its columns; `noise_std` is None for classes."""
    if noise_std is None:
        return Predictions(**rows, **settings)
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
