"""Metrics of class probabilities (accuracy, NLL, ECE, AUROC, Brier score), and of real predictions (NLL, RMSE, R^2).

Classes
-------
Every example i has log-probabilities log p_ik over K classes and a label y_i. Its prediction is the class with the
largest probability (the lowest index among equals). Its confidence c_i is this probability. a_i is 1 if the prediction
is correct and 0 if not. Over n examples:

    accuracy  =  1/n sum_i a_i
    NLL       =  -1/n sum_i log p_i,y_i                        natural logarithm
    ECE       =  sum_b n_b/n |acc_b - conf_b|                  B bins of equal width, bin b: (b - 1)/B < c_i <= b/B
    AUROC     =  P(c_i > c_j) + 1/2 P(c_i = c_j)               for i correct and j misclassified
    Brier     =  1/n sum_i sum_k (p_ik - [y_i = k])^2          from 0 to 2

If an example has several labels (tokens, pixels, the questions of a multi-label problem), i runs over all labels of all
examples, except those that are ignored. The bootstrap resamples whole examples, because the labels of one example may
depend on each other: a bootstrap over labels would give intervals that are too narrow.

- ECE: Guo et al. (2017), https://arxiv.org/abs/1706.04599; acc_b and conf_b are the means of a_i and c_i in a bin.
- AUROC of misclassification: Osawa et al. (2019), appendix H, https://arxiv.org/abs/1906.02506. It is exact, without a
  grid of thresholds. It is NaN if all examples are correct or all are wrong.

Other packages may give other numbers. torchmetrics <= 1.9 counts a confidence of exactly 1.0 in a separate
extra bin (https://github.com/Lightning-AI/torchmetrics/issues/3510), which changes the ECE of a network
that saturates; here 1.0 belongs to the last bin. Its bins are also closed on the left, while those of
Guo et al. are closed on the right. scikit-learn halves the Brier score of two classes.

The ECE has no bootstrap interval. Noise in a bin always adds to |acc_b - conf_b|, so the ECE of a sample is biased
upwards, and the ECE of a resample is biased twice. If the probabilities are calibrated, a percentile interval never
covers the ECE of the population, and a basic or a bias-corrected interval covers it in about half of the samples at
best. The bias depends on the number of examples: compare the ECE of two methods on sets of the same size, over several
seeds.

Real numbers
------------
Every example i has D targets y_id, their predicted means f_id, the log-density log p(y_i) of all its targets, and the
predicted probability F_id of a smaller target. Over n examples:

    NLL          =  -1/n sum_i log p(y_i)                        natural logarithm
    RMSE         =  sqrt(1/(n D) sum_id (y_id - f_id)^2)
    R^2          =  1/D sum_d (1 - sum_i (y_id - f_id)^2 / sum_i (y_id - mean_d)^2)
    coverage_q   =  1/(n D) sum_id [|2 F_id - 1| <= q/100]       targets inside the central interval of q%

R^2 is NaN if all targets of an output are equal. The coverage of calibrated predictions is q%, up to chance. It is
exact for the mixture of Gaussians that `bsam.predict` averages, which is not a Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, cast, overload

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WITH_INTERVAL = ("accuracy", "nll", "auroc", "brier")
_COVERED = (0.5, 0.95)
"""The probabilities of the central intervals whose coverage is computed."""


class _HasPredictions(Protocol):
    @property
    def log_probs(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor | None: ...


class _HasGaussianPredictions(Protocol):
    @property
    def mean(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor | None: ...
    @property
    def log_density(self) -> Tensor | None: ...
    @property
    def cdf(self) -> Tensor | None: ...


_Predictions = _HasPredictions | tuple[Tensor, Tensor]


class _Numbers:
    """A dataclass of metrics of one set of predictions, with intervals: prints them as a table."""

    names: ClassVar[tuple[str, ...]]

    if TYPE_CHECKING:  # each subclass has these fields, in its own order
        num_examples: int
        intervals: dict[str, tuple[float, float]]
        level: float

    def __str__(self) -> str:
        head = f"{self.num_examples} examples"
        if self.intervals:
            head += f", {100 * self.level:g}% bootstrap intervals"
        lines, width = [head], max(map(len, self.names))
        for name in self.names:
            line = f"{name:<{width}} {getattr(self, name):>z8.4f}"
            if name in self.intervals:
                low, high = self.intervals[name]
                line += f"   [{low:>z6.4f}, {high:>z6.4f}]"
            lines.append(line)
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain numbers, lists and dicts. `json.dumps` writes NaN and inf as Python does."""
        fields: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return fields | {"intervals": {name: list(ends) for name, ends in self.intervals.items()}}


@dataclass(frozen=True)
class Summary(_Numbers):
    """The five metrics of one set of predictions. `intervals` has (low, high) per metric but the ECE, or is empty.

    `num_examples` is the number of labels: an example of tokens or pixels has several.
    """

    names: ClassVar[tuple[str, ...]] = ("accuracy", "nll", "ece", "auroc", "brier")

    num_examples: int
    accuracy: float
    nll: float
    ece: float
    auroc: float
    brier: float
    intervals: dict[str, tuple[float, float]]
    level: float


@dataclass(frozen=True)
class GaussianSummary(_Numbers):
    """The metrics of one set of real predictions. `intervals` has (low, high) per metric, or is empty."""

    names: ClassVar[tuple[str, ...]] = ("nll", "rmse", "r2", "coverage_50", "coverage_95")

    num_examples: int
    nll: float
    rmse: float
    r2: float
    coverage_50: float
    """The share of targets inside their central interval of probability 50%."""
    coverage_95: float
    intervals: dict[str, tuple[float, float]]
    level: float


@dataclass(frozen=True, eq=False)
class ReliabilityTable:
    """Statistics per confidence bin ((b-1)/B, b/B], in order: float64 tensors of length B.

    Attributes:
        count: number of examples.
        confidence: their mean confidence, NaN in an empty bin.
        accuracy: their accuracy, NaN in an empty bin.
    """

    count: Tensor
    confidence: Tensor
    accuracy: Tensor

    def as_rows(self) -> list[list[float | None]]:
        """Count, confidence and accuracy of each bin as plain numbers for JSON, with None for NaN."""
        columns = (self.count, self.confidence, self.accuracy)
        return [[None if math.isnan(x) else x for x in row] for row in torch.stack(columns, dim=1).tolist()]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[float | None]]) -> ReliabilityTable:
        """Make the table from the result of its `as_rows`."""
        numbers = [[math.nan if x is None else x for x in row] for row in rows]
        return cls(*torch.tensor(numbers, dtype=torch.float64).unbind(dim=1))


class _Examples(NamedTuple):
    """The numbers per example that the metrics need: float64 tensors of shape (n,)."""

    nll: Tensor
    confidence: Tensor
    correct: Tensor
    brier: Tensor


def _per_example(log_probs: Tensor, labels: Tensor, ignore_index: int | None) -> tuple[_Examples, Tensor]:
    """Return the numbers of all labels that are not ignored, and how many each example has."""
    # Each row separately, so that no number depends on the other examples of the batch.
    log_p, y, counts = _checked(log_probs, labels, ignore_index)
    rows = torch.arange(len(y), device=y.device)
    log_confidence, predicted = log_p.max(dim=1)  # the first of equal maxima
    error = log_p.exp()
    error[rows, y] -= 1  # p_k - 1[y = k]
    numbers = _Examples(
        nll=-log_p[rows, y],
        confidence=log_confidence.exp(),
        correct=(predicted == y).double(),
        # A sum from left to right: sum() would split a single very long row over the threads.
        brier=error.square_().cumsum(dim=1)[:, -1].clone(),
    )
    return numbers, counts


# The formulas. All reduce over the last dimension, so that one call handles a stack of bootstrap resamples.


def _reliability(confidence: Tensor, correct: Tensor, num_bins: int) -> ReliabilityTable:
    # If p is exactly on an edge, exp(log p) may differ by some units in the last place, hence the 1e-12.
    inner_edges = torch.arange(1, num_bins, device=confidence.device).double() / num_bins + 1e-12
    bins = torch.bucketize(confidence, inner_edges)  # edges[i - 1] < confidence <= edges[i]
    empty = confidence.new_zeros(*confidence.shape[:-1], num_bins)
    count = empty.scatter_add(-1, bins, torch.ones_like(confidence))
    return ReliabilityTable(
        count=count,
        confidence=empty.scatter_add(-1, bins, confidence) / count,
        accuracy=empty.scatter_add(-1, bins, correct) / count,
    )


def _ece(table: ReliabilityTable) -> Tensor:
    share = table.count / table.count.sum(dim=-1, keepdim=True)
    return (share * (table.accuracy - table.confidence).abs()).nansum(dim=-1)  # an empty bin adds 0


def _auroc(rank: Tensor, right: Tensor, wrong: Tensor) -> Tensor:
    # `rank` numbers the distinct confidences in increasing order, `right` and `wrong` count the labels of each kind.
    empty = right.new_zeros(*right.shape[:-1], int(rank.max()) + 1)
    right = empty.scatter_add(-1, rank.expand_as(right), right)
    wrong = empty.scatter_add(-1, rank.expand_as(wrong), wrong)
    wrong_below = wrong.cumsum(dim=-1) - wrong
    pairs = right.sum(dim=-1) * wrong.sum(dim=-1)
    return (right * (wrong_below + wrong / 2)).sum(dim=-1) / pairs


class _Resampled:
    """Computes the metrics of `_WITH_INTERVAL` for resampled examples, of which each has one or several labels."""

    def __init__(self, examples: _Examples, counts: Tensor) -> None:
        counts = counts[counts > 0]
        self.num_examples = len(counts)
        self._owner = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        self._counts = counts.double()
        sums = torch.zeros(3, len(counts), dtype=torch.float64, device=counts.device)
        self._sums = sums.index_add_(1, self._owner, torch.stack([examples.correct, examples.nll, examples.brier]))
        self._correct = examples.correct
        self._rank = torch.unique(examples.confidence, return_inverse=True)[1]

    def __call__(self, index: Tensor) -> Tensor:
        """Return the metrics, (R, 4), of R resamples: the numbers of n examples, (R, n)."""
        size = self._counts[index].sum(dim=-1)
        accuracy, nll, brier = (column[index].sum(dim=-1) / size for column in self._sums)
        times = self._counts.new_zeros(index.shape).scatter_add_(
            1, index, torch.ones_like(self._counts).expand_as(index)
        )
        times = times[:, self._owner]  # of each label
        auroc = _auroc(self._rank, times * self._correct, times * (1 - self._correct))
        return torch.stack([accuracy, nll, auroc, brier], dim=-1)


def _check_bootstrap(num_bootstrap: int, level: float) -> None:
    if not isinstance(num_bootstrap, int) or num_bootstrap < 0:
        raise ValueError(f"num_bootstrap must be an integer >= 0, got {num_bootstrap!r}; write 0 for no intervals")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level!r}; write 0.95 for 95% intervals")


def _with_intervals(
    names: Sequence[str],
    metrics_of: Callable[[Tensor], Tensor],
    num_examples: int,
    num_numbers: int,
    *,
    num_bootstrap: int,
    level: float,
    seed: int,
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Return the metrics of all examples, and their percentile intervals over resamples.

    Args:
        names: The names of the metrics.
        metrics_of: Returns the metrics, (R, len(names)), of R resamples, given as the numbers of examples (R, n).
        num_examples: n.
        num_numbers: How many numbers all examples have, to limit the memory.
        num_bootstrap: Number of resamples.
        level: Coverage of the intervals.
        seed: Seed of the resamples.
    """
    values = metrics_of(torch.arange(num_examples, device="cpu")[None])[0].tolist()
    intervals = {}
    if num_bootstrap > 0:
        generator = torch.Generator("cpu").manual_seed(seed)
        rows = max(1, 2**20 // num_numbers)  # resamples at a time: about 100 MB
        resampled = []
        for start in range(0, num_bootstrap, rows):
            size = (min(rows, num_bootstrap - start), num_examples)
            resampled.append(metrics_of(torch.randint(num_examples, size, generator=generator, device="cpu")))
        # "nearest": interpolating between two infinite NLLs would give NaN.
        low, high = (
            torch.cat(resampled).nanquantile(q, dim=0, interpolation="nearest").tolist()
            for q in ((1 - level) / 2, (1 + level) / 2)
        )
        intervals = dict(zip(names, zip(low, high, strict=True), strict=True))
    return dict(zip(names, values, strict=True)), intervals


class Metrics:
    """The metrics of a set that comes in batches. They are exactly those of the whole set, for any batches.

    Four float64 numbers per label are kept, on the CPU.

    Args:
        num_bins: number of confidence bins of the ECE.
        ignore_index: labels with this number are not rated, like -100 in torch; None rates all labels.

    Example:
        >>> import torch
        >>> metrics = Metrics()
        >>> for p, y in [([0.9, 0.1], 0), ([0.2, 0.8], 1), ([0.6, 0.4], 1)]:
        ...     metrics.update(torch.tensor([p]).log(), torch.tensor([y]))
        >>> print(metrics.compute(num_bootstrap=0))
        3 examples
        accuracy   0.6667
        nll        0.4149
        ece        0.3000
        auroc      1.0000
        brier      0.2733
    """

    def __init__(self, num_bins: int = 20, ignore_index: int | None = None) -> None:
        if not isinstance(num_bins, int) or num_bins < 1:
            raise ValueError(
                f"num_bins must be a positive integer, got {num_bins!r}; write num_bins=20 for the default"
            )
        self.num_bins = num_bins
        self.ignore_index = ignore_index
        self._batches: list[_Examples] = []
        self._counts: list[Tensor] = []  # the number of labels of each example

    def update(self, log_probs: Tensor, labels: Tensor) -> None:
        """Adds a batch: log-probabilities (n, K) and integer labels (n,), or (n, ..., K) and (n, ...)."""
        numbers, counts = _per_example(log_probs, labels, self.ignore_index)
        self._batches.append(numbers)
        self._counts.append(counts)

    def merge(self, other: Metrics) -> None:
        """Adds all examples of `other`, for example those of another worker."""
        if other.num_bins != self.num_bins:
            raise ValueError(
                f"cannot merge metrics of {other.num_bins} bins into metrics of {self.num_bins}; "
                f"write Metrics(num_bins={self.num_bins}) for both"
            )
        self._batches = self._batches + other._batches
        self._counts = self._counts + other._counts

    def reliability(self) -> ReliabilityTable:
        """Count, mean confidence and accuracy of every confidence bin."""
        examples = self._examples()
        return _reliability(examples.confidence, examples.correct, self.num_bins)

    def compute(self, *, num_bootstrap: int = 1000, level: float = 0.95, seed: int = 0) -> Summary:
        """The metrics of all examples so far, with percentile bootstrap intervals over the examples.

        The interval of the AUROC uses the resamples in which it is defined. The ECE has no interval: it is biased, and
        no bootstrap interval that we tried covers the truth as often as it claims (see the module's docstring).

        Args:
            num_bootstrap: number of resamples; 0 gives no intervals. 1000 of 10,000 examples take a second.
            level: coverage of the intervals.
            seed: seed of a separate generator; the global generator is not touched.
        """
        _check_bootstrap(num_bootstrap, level)
        examples = self._examples()
        resampled = _Resampled(examples, torch.cat(self._counts))
        n = len(examples.nll)
        values, intervals = _with_intervals(
            _WITH_INTERVAL, resampled, resampled.num_examples, n, num_bootstrap=num_bootstrap, level=level, seed=seed
        )
        ece = _ece(_reliability(examples.confidence, examples.correct, self.num_bins)).item()
        return Summary(num_examples=n, **values, ece=ece, intervals=intervals, level=level)

    def _examples(self) -> _Examples:
        if not any(len(batch.nll) for batch in self._batches):
            raise ValueError("the metrics need at least one example, got none; update with a batch of n > 0 rows first")
        return _Examples(*(torch.cat(column) for column in zip(*self._batches, strict=True)))


@overload
def summary(
    predictions: _HasGaussianPredictions,
    *,
    num_bins: int = ...,
    num_bootstrap: int = ...,
    level: float = ...,
    seed: int = ...,
    ignore_index: int | None = ...,
) -> GaussianSummary: ...


@overload
def summary(
    predictions: _Predictions,
    *,
    num_bins: int = ...,
    num_bootstrap: int = ...,
    level: float = ...,
    seed: int = ...,
    ignore_index: int | None = ...,
) -> Summary: ...


def summary(
    predictions: _Predictions | _HasGaussianPredictions,
    *,
    num_bins: int = 20,
    num_bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    ignore_index: int | None = None,
) -> Summary | GaussianSummary:
    """All metrics of a set of predictions, with bootstrap intervals except for the ECE (see `Metrics.compute`).

    Args:
        predictions: an object with `.log_probs` (n, ..., K) and `.labels` (n, ...), or the tuple of the two: several
            labels per example are tokens, pixels or questions. Or `GaussianPredictions`.
        num_bins: number of confidence bins of the ECE.
        num_bootstrap: number of resamples; 0 gives no intervals.
        level: coverage of the intervals.
        seed: seed of the bootstrap's separate generator.
        ignore_index: labels with this number are not rated; by default the `ignore_index` of the predictions, if they
            have one.

    Returns:
        A `Summary`, or a `GaussianSummary` for real predictions.
    """
    if all(hasattr(predictions, name) for name in ("mean", "targets", "log_density")):
        gaussian = cast(_HasGaussianPredictions, predictions)
        return _rate_gaussian(gaussian, num_bootstrap=num_bootstrap, level=level, seed=seed)
    metrics = _whole(cast(_Predictions, predictions), num_bins, ignore_index)
    return metrics.compute(num_bootstrap=num_bootstrap, level=level, seed=seed)


def _rate_gaussian(
    predictions: _HasGaussianPredictions, *, num_bootstrap: int, level: float, seed: int
) -> GaussianSummary:
    _check_bootstrap(num_bootstrap, level)
    if predictions.targets is None or predictions.log_density is None:
        raise ValueError("the predictions have no targets, which the metrics need; predict on (inputs, targets)")
    columns = {"mean": predictions.mean, "targets": predictions.targets, "log_density": predictions.log_density}
    for name, column in columns.items():
        if bool(column.isnan().any()) or (name != "log_density" and not bool(column.isfinite().all())):
            raise ValueError(f"{name} must be finite everywhere; look for inf or NaN in the outputs and the targets")
    if not len(predictions.mean):
        raise ValueError("the metrics need at least one example, got none; predict on n > 0 examples")
    n = len(predictions.mean)
    f, y = (tensor.detach().cpu().double().reshape(n, -1) for tensor in (predictions.mean, predictions.targets))
    squares, y, nll = (y - f).square(), y - y.mean(dim=0), -predictions.log_density.detach().cpu().double()
    if predictions.cdf is None:
        inside = torch.full((len(_COVERED), n), math.nan, dtype=torch.float64)
    else:
        distance = (2 * predictions.cdf.detach().cpu().double().reshape(n, -1) - 1).abs()
        inside = torch.stack([(distance <= q).double().mean(dim=1) for q in _COVERED])

    def metrics_of(index: Tensor) -> Tensor:
        total = (y[index] - y[index].mean(dim=1, keepdim=True)).square().sum(dim=1)
        left = squares[index].sum(dim=1)
        r2 = torch.where(total > 0, 1 - left / total, math.nan).mean(dim=-1)
        rmse = squares[index].mean(dim=(1, 2)).sqrt()
        return torch.stack([nll[index].mean(dim=1), rmse, r2, *(part[index].mean(dim=1) for part in inside)], dim=-1)

    values, intervals = _with_intervals(
        GaussianSummary.names, metrics_of, n, f.numel(), num_bootstrap=num_bootstrap, level=level, seed=seed
    )
    return GaussianSummary(num_examples=n, **values, intervals=intervals, level=level)


def accuracy(log_probs: Tensor, labels: Tensor) -> float:
    """Fraction of the examples whose most probable class is the label."""
    return summary((log_probs, labels), num_bootstrap=0).accuracy


def nll(log_probs: Tensor, labels: Tensor) -> float:
    """Mean negative log-probability of the label, in nats; inf if a label has probability 0."""
    return summary((log_probs, labels), num_bootstrap=0).nll


def ece(log_probs: Tensor, labels: Tensor, num_bins: int = 20) -> float:
    """Expected calibration error over equal-width bins, closed on the right.

    Example:
        >>> import torch
        >>> p = torch.tensor([[0.9, 0.1], [0.9, 0.1]])  # confidence 0.9, accuracy 0.5
        >>> round(ece(p.log(), torch.tensor([0, 1])), 4)
        0.4
    """
    return summary((log_probs, labels), num_bins=num_bins, num_bootstrap=0).ece


def auroc(log_probs: Tensor, labels: Tensor) -> float:
    """How well the confidence separates correct from wrong predictions; NaN if there are not both kinds."""
    return summary((log_probs, labels), num_bootstrap=0).auroc


def brier(log_probs: Tensor, labels: Tensor) -> float:
    """Mean squared distance between the probabilities and the one-hot label, summed over the classes."""
    return summary((log_probs, labels), num_bootstrap=0).brier


def reliability(log_probs: Tensor, labels: Tensor, num_bins: int = 20) -> ReliabilityTable:
    """Count, mean confidence and accuracy of every confidence bin, from which the ECE is computed."""
    return _whole((log_probs, labels), num_bins).reliability()


def reliability_diagram(
    predictions: _Predictions | ReliabilityTable, *, num_bins: int = 20, ax: Axes | None = None
) -> Axes:
    """Draws accuracy against confidence, bin by bin, below a histogram of the confidences.

    Args:
        predictions: an object with `.log_probs` (n, K) and `.labels` (n,), or the tuple of the two, or their bins.
        num_bins: number of confidence bins, if `predictions` are not bins already.
        ax: where to draw; a new figure if None.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("reliability_diagram needs matplotlib, which is missing: pip install matplotlib") from error
    table = predictions if isinstance(predictions, ReliabilityTable) else _whole(predictions, num_bins).reliability()
    num_bins = len(table.count)
    filled = table.count > 0
    center = ((filled.nonzero().flatten() + 0.5) / num_bins).tolist()
    count, confidence, accuracy = (column[filled] for column in (table.count, table.confidence, table.accuracy))
    if ax is None:
        ax = plt.subplots(figsize=(4.5, 5), layout="constrained")[1]

    width = 1 / num_bins
    ax.bar(center, accuracy.tolist(), width, color="cornflowerblue", edgecolor="white", label="accuracy")
    ax.bar(
        center,
        (confidence - accuracy).tolist(),
        width,
        bottom=accuracy.tolist(),
        color="tab:red",
        alpha=0.3,
        edgecolor="tab:red",
        hatch="//",
        label="gap to the mean confidence",
    )
    ax.plot([0, 1], [0, 1], color=plt.rcParams["text.color"], linestyle="--", linewidth=1, label="perfect calibration")
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    ax.legend(loc="upper left", title=f"ECE {_ece(table).item():.4f}", alignment="left", fontsize="small")

    histogram = ax.inset_axes((0, 1.06, 1, 0.15), sharex=ax)
    histogram.bar(center, (count / count.sum()).tolist(), width, color="lightgray", edgecolor="white")
    histogram.set(ylim=(0, 1), yticks=[1])
    histogram.set_ylabel("share", fontsize="small")
    histogram.tick_params(labelbottom=False, labelsize="small")
    histogram.spines[["top", "right"]].set_visible(False)
    return ax


def _whole(predictions: _Predictions, num_bins: int, ignore_index: int | None = None) -> Metrics:
    match predictions:
        case (log_probs, labels):
            pass
        case object(log_probs=log_probs, labels=labels):
            pass
        case _:
            raise TypeError(
                "predictions must have .log_probs and .labels, or be the tuple of the two, "
                f"got {type(predictions).__name__}; write (log_probs, labels)"
            )
    if labels is None:
        raise ValueError("the predictions have no labels, which the metrics need; predict on (inputs, labels)")
    if ignore_index is None:
        ignore_index = getattr(predictions, "ignore_index", None)
    metrics = Metrics(num_bins, ignore_index)
    metrics.update(log_probs, labels)
    return metrics


def _checked(log_probs: Tensor, labels: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities (N, K) and labels (N,) without the ignored ones, and how many each example has.

    They are float64 and int64 on the CPU. Raises an error that says what to write instead.
    """
    for name, value in (("log_probs", log_probs), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}; write torch.as_tensor({name})")
    if log_probs.ndim < 2:
        raise ValueError(
            f"log_probs must have shape (n, K), got {tuple(log_probs.shape)}; "
            "write log_probs.reshape(-1, K) for K classes"
        )
    shape, num_classes = tuple(log_probs.shape[:-1]), log_probs.shape[-1]
    if num_classes < 2:
        raise ValueError(
            f"log_probs must have at least 2 classes, got {num_classes}; for one logit of a yes/no question "
            "write log_softmax(torch.cat([torch.zeros_like(logit), logit], dim=1), dim=1)"
        )
    if labels.shape != shape:
        cure = "write log_probs.movedim(1, -1) if the classes are in dimension 1"
        if len(shape) == 1:
            cure = (
                "write one_hot.argmax(dim=1) if each row has a single 1; if rows may have several (multi-label), give "
                "log_probs of shape (n, L, 2), as bsam.predict makes them"
            )
        raise ValueError(f"labels must have shape {shape}, one per row of log_probs, got {tuple(labels.shape)}; {cure}")
    if not log_probs.is_floating_point():
        raise TypeError(f"log_probs must be floating point, got {log_probs.dtype}; apply log_softmax to logits")
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"labels must be integers, got {labels.dtype}; write labels.long()")
    all_labels = labels.detach().cpu().long()
    rated = torch.ones_like(all_labels, dtype=torch.bool) if ignore_index is None else all_labels != ignore_index
    log_p, y = log_probs.detach().cpu().double()[rated].contiguous(), all_labels[rated]

    def place(i: int) -> str:
        where = rated.nonzero()[i].tolist()
        return f"row {where[0]}" if len(where) == 1 else f"position {where}"

    bad = (~(log_p < torch.inf)).nonzero()  # NaN is not below inf
    if len(bad):
        row, column = bad[0].tolist()
        raise ValueError(
            f"log_probs must be numbers below inf (-inf, probability 0, is fine), got {log_p[row, column]:g} "
            f"in {place(row)}, column {column}; look for inf or NaN in the logits given to log_softmax"
        )
    log_total = log_p.logsumexp(dim=1)
    bad = (log_total.abs() > 1e-3).nonzero()
    if len(bad):
        row = int(bad[0])
        probabilities = log_p.min() >= 0 and log_p.max() <= 1
        cure = "probs.log() for probabilities" if probabilities else "log_softmax(logits.float(), dim=1)"
        raise ValueError(
            "log_probs must be normalised, |logsumexp| <= 1e-3 in every row, "
            f"got logsumexp = {log_total[row]:.4g} in {place(row)}; write {cure}"
        )
    bad = ((y < 0) | (y >= num_classes)).nonzero()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"labels must lie in 0..{num_classes - 1}, got {y[row]} in {place(row)}; renumber the classes, or drop the "
            f"labels that mean nothing: write ignore_index={y[row]} in summary, Metrics or bsam.predict"
        )
    return log_p, y, rated.flatten(1).sum(dim=1) if rated.ndim > 1 else rated.long()
