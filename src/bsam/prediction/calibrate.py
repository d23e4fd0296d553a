r"""The width of a posterior, chosen after training by the negative log-likelihood (NLL) of validation data.

A temperature $T$ multiplies the variance of the posterior. With the predictions $p_T$ of `bsam.predict` for $n$
examples,

```math
\mathrm{NLL}(T) = -\frac1n \sum_i \log p_T(y_i \mid x_i)
```

is computed at $T = 0$ (the mean), at $T = 1$ (the posterior as it is), and on a grid that is even in $\log T$. Then the
two neighbours of the best $T$ are tried at half the distance, again and again. All temperatures share one set of
standard normal numbers, so that the NLL is a smooth curve of $T$ and the same call gives the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bsam.batches import batches_of
from bsam.modules import Forward
from bsam.posterior.base import Posterior
from bsam.prediction.predict import check_integer, predict
from bsam.prediction.results import GaussianPredictions, Predictions

__all__ = ["Calibration", "calibrate"]

_RANGE = (2.0**-10, 2.0**10)
"""The temperatures that are searched by default: standard deviations from 1/32 to 32 times those given."""
_COARSE, _FINE = 2.0, 0.125
"""Distances of temperatures, in powers of 2: of the grid, at most, and of the last two that are tried."""


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """A posterior of another width, and what the change is worth; printed, it says so in a sentence."""

    posterior: Posterior
    """The tempered posterior, for `bsam.predict`."""
    temperature: float
    """What its variance was multiplied by."""
    nll: float
    """Validation NLL with it, per label; an example of tokens or pixels has several."""
    nll_before: float
    """Validation NLL of the posterior as it was given (temperature 1)."""
    nll_at_mean: float
    """Validation NLL of the mean alone (temperature 0)."""
    standard_error: float
    """Of the change `nll - nll_before`, over the validation examples: a change not much larger may be chance."""
    table: tuple[dict[str, float], ...]
    """A row for each temperature that was tried, in increasing order: "temperature", "nll", and "accuracy" of classes.

    `pandas.DataFrame(calibration.table)` shows and plots it.
    """

    def __repr__(self) -> str:
        gain = f" ({self.nll - self.nll_before:+.4f}, standard error {self.standard_error:.4f})"
        change = (
            f"validation NLL stays {self.nll:.4f}, the lowest of all temperatures tried"
            if self.temperature == 1
            else f"validation NLL {self.nll_before:.4f} -> {self.nll:.4f}{gain}"
        )
        mean = "" if self.temperature == 0 else f"; the mean alone has {self.nll_at_mean:.4f}"
        return f"temperature {self.temperature:.3g}: {change}{mean}.{self._at_the_edge()}"

    def _at_the_edge(self) -> str:
        """What it means that the best temperature is the smallest or largest of all."""
        positive = [row["temperature"] for row in self.table if row["temperature"] > 0]
        T, smallest, largest = self.temperature, min(positive), max(positive)
        if T == 0:
            return (
                " The mean alone is best: no width that was tried helps on this data. If the posterior was too wide in "
                "training already, train again with a narrower one (for bSAM: more damping)."
            )
        if largest == T:
            wider = " The posterior is too narrow: for bSAM, less damping makes it wider." if T > 1 else ""
            return (
                " This is the largest temperature that was tried, and the best may be larger: search further with "
                f"temperatures=({T:g}, {64 * T:g}).{wider}"
            )
        if smallest == T:
            narrower = " The posterior is too wide: for bSAM, more damping makes it narrower." if T < 1 else ""
            return (
                " This is the smallest temperature above 0 that was tried, and the best may be smaller: search further "
                f"with temperatures=({T / 64:g}, {T:g}).{narrower}"
            )
        return ""


def calibrate(
    model: nn.Module,
    posterior: Posterior,
    data: Any,
    *,
    likelihood: Literal["categorical", "bernoulli", "gaussian"] = "categorical",
    noise_std: float | None = None,
    class_dim: int | None = None,
    ignore_index: int = -100,
    num_samples: int = 32,
    seed: int = 0,
    temperatures: tuple[float, float] | None = None,
    chunk: int | None = None,
    batch_size: int = 512,
    forward: Forward | None = None,
    vectorise: bool | None = None,
    recalibrate: Any = None,
    compile: bool = False,
    progress: bool | None = None,
) -> Calibration:
    """Choose the width of a posterior by the NLL of validation data, without training again.

    The variance of all weights is multiplied by one number, the temperature with the lowest NLL; the mean stays. 0 (the
    mean alone) and 1 (no change) are always among the temperatures that are tried, so the NLL on this data never gets
    worse. About 20 predictions are made, and the data is read once for each. The model is as before when it returns.

    Args:
        model: The model; it need not hold the weights of the posterior. Its device is where predictions are made.
        posterior: A distribution of its weights that has a width: a `DiagonalGaussian`, a `LowRankGaussian`, or a
            `Mixture` of them, whose parts get one temperature.
        data: Validation data with labels, as for `bsam.predict`, but not a generator. Neither training data, on which
            a posterior that is too narrow looks good, nor the test set, which would be no test afterwards.
        likelihood: As for `bsam.predict`.
        noise_std: As for `bsam.predict`.
        class_dim: As for `bsam.predict`.
        ignore_index: As for `bsam.predict`.
        num_samples: How many samples to average over. Choose with as many as you will predict with.
        seed: Seed of the samples.
        temperatures: The lowest and the highest temperature of the search, by default 1/1024 and 1024. The range is
            extended to 1 where it does not hold it.
        chunk: As for `bsam.predict`.
        batch_size: As for `bsam.predict`.
        forward: As for `bsam.predict`.
        vectorise: As for `bsam.predict`.
        recalibrate: As for `bsam.predict`. Give it here if you give it there.
        compile: As for `bsam.predict`. It is compiled once for all temperatures.
        progress: As for `bsam.predict`: one bar for each temperature.

    Returns:
        A `Calibration`: the tempered posterior, its temperature, the NLL before and after, and all that was tried.

    Raises:
        ValueError: the posterior is a point, the data has no labels, or no temperature gives a finite NLL.

    Examples:
        >>> import torch
        >>> from bsam.posterior import DiagonalGaussian
        >>> model, x = nn.Linear(1, 1, bias=False), torch.ones(100, 1)
        >>> posterior = DiagonalGaussian({"weight": torch.zeros(1, 1)}, {"weight": torch.full((1, 1), 8.0)})
        >>> options = {"likelihood": "gaussian", "noise_std": 0.1, "num_samples": 256}
        >>> calibration = calibrate(model, posterior, (x, x), **options)
        >>> calibration.temperature < 1 and calibration.nll < calibration.nll_before
        True
    """
    check_integer("num_samples", num_samples, 1, "0 predicts with the mean, which has no width to choose.")
    if not any(part.sampled_names for part in posterior.parts):
        raise ValueError(
            f"the posterior, {posterior!r}, has no width: it is a point, and a temperature changes nothing. Give the "
            "posterior of bSAM, VOGN, IVON, SWAG or bsam.laplace."
        )
    if isinstance(batches_of(data, batch_size), Iterator):
        raise TypeError("data is a generator, but is read once for each temperature: give a list or a DataLoader.")
    low, high = _checked_range(temperatures)
    options: dict[str, Any] = {
        "likelihood": likelihood,
        "noise_std": noise_std,
        "class_dim": class_dim,
        "ignore_index": ignore_index,
        "num_samples": num_samples,
        "seed": seed,
        "chunk": chunk,
        "batch_size": batch_size,
        "forward": forward,
        "vectorise": vectorise,
        "recalibrate": recalibrate,
        "compile": compile,
        "progress": progress,
    }
    rows: dict[float, dict[str, float]] = {}
    sums: dict[float, Tensor] = {}  # the log-likelihood of each example, over its labels
    counts = torch.ones(1)

    def nll_at(temperature: float) -> float:
        nonlocal counts
        if temperature not in rows:
            predictions = predict(model, posterior.temper(temperature), data, **options)
            if recalibrate is None and temperature > 0:
                options["recalibrate"] = False  # it has warned, if it had to
            sums[temperature], counts = _log_likelihood(predictions)
            nll = -float(sums[temperature].sum() / counts.sum())
            row = rows[temperature] = {"temperature": temperature, "nll": nll}
            if isinstance(predictions, Predictions):
                assert predictions.labels is not None  # else there were no likelihood
                rated = predictions.labels != ignore_index
                row["accuracy"] = float((predictions.classes == predictions.labels)[rated].double().mean())
        nll = rows[temperature]["nll"]
        return nll if math.isfinite(nll) else math.inf

    best = _lowest(nll_at, low, high)
    if nll_at(best) == math.inf:
        raise ValueError(
            f"the validation NLL is not finite at any of {len(rows)} temperatures, nor at the mean: look at "
            "bsam.predict(model, posterior, data, num_samples=0). Did training diverge?"
        )
    return Calibration(
        posterior=posterior.temper(best),
        temperature=best,
        nll=rows[best]["nll"],
        nll_before=rows[1.0]["nll"],
        nll_at_mean=rows[0.0]["nll"],
        standard_error=_standard_error(sums[best] - sums[1.0], counts),
        table=tuple(rows[temperature] for temperature in sorted(rows)),
    )


def _lowest(nll_at: Callable[[float], float], low: float, high: float) -> float:
    """The temperature with the lowest NLL: of 0, 1 and an even grid in log T, then of ever closer neighbours.

    Each round keeps the best of all temperatures so far, so a curve with several minima does no harm.
    """
    start, stop = math.log2(low), math.log2(high)
    num_steps = math.ceil((stop - start) / _COARSE)
    distance = (stop - start) / num_steps
    # The mean is the quickest, and the first to say if something is wrong with the data.
    tried = [0.0, 1.0, low, *(math.exp2(start + i * distance) for i in range(1, num_steps)), high]
    best = min(tried, key=nll_at)
    while best > 0 and distance > _FINE:
        distance /= 2
        neighbours = [best * math.exp2(step) for step in (-distance, distance)]
        best = min([best, *(t for t in neighbours if low <= t <= high)], key=nll_at)
    return best


def _checked_range(temperatures: tuple[float, float] | None) -> tuple[float, float]:
    try:
        low, high = _RANGE if temperatures is None else (float(end) for end in temperatures)
    except (TypeError, ValueError):
        low = high = math.nan
    if not 0 < low < high < math.inf:
        raise ValueError(
            f"temperatures={temperatures!r} must be two finite numbers, 0 < low < high, like (0.01, 100). "
            "0 and 1 are tried in any case."
        )
    return min(low, 1.0), max(high, 1.0)


def _log_likelihood(predictions: Predictions | GaussianPredictions) -> tuple[Tensor, Tensor]:
    """Sum the log-probabilities, or log-densities, of the labels of each example, and count its labels, in float64."""
    labels = predictions.targets if isinstance(predictions, GaussianPredictions) else predictions.labels
    if labels is None:
        raise ValueError("the data has no labels to choose the width by: give (inputs, labels), or such batches.")
    if isinstance(predictions, GaussianPredictions):
        assert predictions.log_density is not None  # there are targets
        return predictions.log_density.double(), torch.ones(len(predictions), dtype=torch.float64)
    num_classes, rated = predictions.log_probs.shape[-1], labels != predictions.ignore_index
    wrong = labels[rated & ((labels < 0) | (labels >= num_classes))]
    if len(wrong) or not bool(rated.any()):
        found = int(wrong[0]) if len(wrong) else f"{predictions.ignore_index} everywhere, which is ignored"
        raise ValueError(f"labels must be class numbers 0 to {num_classes - 1}, not {found}.")
    log_p = predictions.log_probs.double().gather(-1, labels.where(rated, 0)[..., None])[..., 0].where(rated, 0.0)
    return log_p.reshape(len(labels), -1).sum(dim=1), rated.double().reshape(len(labels), -1).sum(dim=1)


def _standard_error(sums: Tensor, counts: Tensor) -> float:
    """Return the standard error of sum(sums) / sum(counts), over independent examples; NaN for a single one.

    With one label per example it is that of a mean. Otherwise it is that of a ratio of two means: labels of one example
    may be dependent.
    """
    n = len(sums)
    rest = sums - counts * (sums.sum() / counts.sum())
    return math.sqrt(float(rest.square().sum()) * n / (n - 1)) / float(counts.sum()) if n > 1 else math.nan
