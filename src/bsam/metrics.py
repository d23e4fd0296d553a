"""Metrics of class probabilities: accuracy, NLL, ECE, AUROC and Brier score.

Every example i has log-probabilities log p_ik over K classes and a label y_i. Its prediction is the class with the
largest probability (the lowest index among equals). Its confidence c_i is this probability. a_i is 1 if the prediction
is correct and 0 if not. Over n examples:

    accuracy  =  1/n sum_i a_i
    NLL       =  -1/n sum_i log p_i,y_i                        natural logarithm
    ECE       =  sum_b n_b/n |acc_b - conf_b|                  B bins of equal width, bin b: (b - 1)/B < c_i <= b/B
    AUROC     =  P(c_i > c_j) + 1/2 P(c_i = c_j)               for i correct and j misclassified
    Brier     =  1/n sum_i sum_k (p_ik - [y_i = k])^2          from 0 to 2

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
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = ("accuracy", "nll", "ece", "auroc", "brier")
_WITH_INTERVAL = ("accuracy", "nll", "auroc", "brier")


class _HasPredictions(Protocol):
    @property
    def log_probs(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor | None: ...


_Predictions = _HasPredictions | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Summary:
    """The five metrics of one set of predictions. `intervals` has (low, high) per metric but the ECE, or is empty."""

    num_examples: int
    accuracy: float
    nll: float
    ece: float
    auroc: float
    brier: float
    intervals: dict[str, tuple[float, float]]
    level: float

    def __str__(self) -> str:
        head = f"{self.num_examples} examples"
        if self.intervals:
            head += f", {100 * self.level:g}% bootstrap intervals"
        lines = [head]
        for name in _NAMES:
            line = f"{name:<8} {getattr(self, name):>z8.4f}"
            if name in self.intervals:
                low, high = self.intervals[name]
                line += f"   [{low:>z6.4f}, {high:>z6.4f}]"
            lines.append(line)
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain numbers, lists and dicts. `json.dumps` writes NaN and inf as Python does."""
        return asdict(self) | {"intervals": {name: list(ends) for name, ends in self.intervals.items()}}


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


def _per_example(log_probs: Tensor, labels: Tensor) -> _Examples:
    # Each row separately, so that no number depends on the other examples of the batch.
    log_p, y = _checked(log_probs, labels)
    rows = torch.arange(len(y), device=y.device)
    log_confidence, predicted = log_p.max(dim=1)  # the first of equal maxima
    error = log_p.exp()
    error[rows, y] -= 1  # p_k - 1[y = k]
    return _Examples(
        nll=-log_p[rows, y],
        confidence=log_confidence.exp(),
        correct=(predicted == y).double(),
        # A sum from left to right: sum() would split a single very long row over the threads.
        brier=error.square_().cumsum(dim=1)[:, -1].clone(),
    )


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


def _auroc(rank: Tensor, correct: Tensor) -> Tensor:
    # `rank` numbers the distinct confidences in increasing order. Per rank: how many are right, and how many wrong.
    empty = correct.new_zeros(*correct.shape[:-1], int(rank.max()) + 1)
    right = empty.scatter_add(-1, rank, correct)
    wrong = empty.scatter_add(-1, rank, 1 - correct)
    wrong_below = wrong.cumsum(dim=-1) - wrong
    pairs = right.sum(dim=-1) * wrong.sum(dim=-1)
    return (right * (wrong_below + wrong / 2)).sum(dim=-1) / pairs


def _metrics(columns: Iterable[Tensor]) -> Tensor:
    # In the order of _WITH_INTERVAL, along a new last dimension.
    nll, correct, brier, rank = columns
    return torch.stack(
        [correct.mean(dim=-1), nll.mean(dim=-1), _auroc(rank, correct), brier.mean(dim=-1)],
        dim=-1,
    )


class Metrics:
    """The metrics of a set that comes in batches. They are exactly those of the whole set, for any batches.

    Four float64 numbers per example are kept, on the CPU.

    Args:
        num_bins: number of confidence bins of the ECE.

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

    def __init__(self, num_bins: int = 20) -> None:
        if not isinstance(num_bins, int) or num_bins < 1:
            raise ValueError(
                f"num_bins must be a positive integer, got {num_bins!r}; write num_bins=20 for the default"
            )
        self.num_bins = num_bins
        self._batches: list[_Examples] = []

    def update(self, log_probs: Tensor, labels: Tensor) -> None:
        """Adds a batch: log-probabilities (n, K) and integer labels (n,)."""
        self._batches.append(_per_example(log_probs, labels))

    def merge(self, other: Metrics) -> None:
        """Adds all examples of `other`, for example those of another worker."""
        if other.num_bins != self.num_bins:
            raise ValueError(
                f"cannot merge metrics of {other.num_bins} bins into metrics of {self.num_bins}; "
                f"write Metrics(num_bins={self.num_bins}) for both"
            )
        self._batches = self._batches + other._batches

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
        if not isinstance(num_bootstrap, int) or num_bootstrap < 0:
            raise ValueError(f"num_bootstrap must be an integer >= 0, got {num_bootstrap!r}; write 0 for no intervals")
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level!r}; write 0.95 for 95% intervals")
        examples = self._examples()
        rank = torch.unique(examples.confidence, return_inverse=True)[1]
        columns = (examples.nll, examples.correct, examples.brier, rank)
        values = dict(zip(_WITH_INTERVAL, _metrics(columns).tolist(), strict=True))
        ece = _ece(_reliability(examples.confidence, examples.correct, self.num_bins)).item()

        intervals = {}
        if num_bootstrap > 0:
            n = len(rank)
            generator = torch.Generator("cpu").manual_seed(seed)
            rows = max(1, 2**20 // n)  # resamples at a time: about 100 MB
            resampled = []
            for start in range(0, num_bootstrap, rows):
                size = (min(rows, num_bootstrap - start), n)
                index = torch.randint(n, size, generator=generator, device="cpu")
                resampled.append(_metrics(column[index] for column in columns))
            # "nearest": interpolating between two infinite NLLs would give NaN.
            low, high = (
                torch.cat(resampled).nanquantile(q, dim=0, interpolation="nearest").tolist()
                for q in ((1 - level) / 2, (1 + level) / 2)
            )
            intervals = dict(zip(_WITH_INTERVAL, zip(low, high, strict=True), strict=True))
        return Summary(num_examples=len(rank), **values, ece=ece, intervals=intervals, level=level)

    def _examples(self) -> _Examples:
        if not any(len(batch.nll) for batch in self._batches):
            raise ValueError("the metrics need at least one example, got none; update with a batch of n > 0 rows first")
        return _Examples(*(torch.cat(column) for column in zip(*self._batches, strict=True)))


def summary(
    predictions: _Predictions,
    *,
    num_bins: int = 20,
    num_bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Summary:
    """All metrics of a set of predictions, with bootstrap intervals except for the ECE (see `Metrics.compute`).

    Args:
        predictions: an object with `.log_probs` (n, K) and `.labels` (n,), or the tuple of the two.
        num_bins: number of confidence bins of the ECE.
        num_bootstrap: number of resamples; 0 gives no intervals.
        level: coverage of the intervals.
        seed: seed of the bootstrap's separate generator.
    """
    metrics = _whole(predictions, num_bins)
    return metrics.compute(num_bootstrap=num_bootstrap, level=level, seed=seed)


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


def _whole(predictions: _Predictions, num_bins: int) -> Metrics:
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
    metrics = Metrics(num_bins)
    metrics.update(log_probs, labels)
    return metrics


def _checked(log_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the arguments as float64 and int64 on the CPU, or raise an error that says what to write instead."""
    for name, value in (("log_probs", log_probs), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}; write torch.as_tensor({name})")
    if log_probs.ndim != 2:
        raise ValueError(
            f"log_probs must have shape (n, K), got {tuple(log_probs.shape)}; "
            "write log_probs.reshape(-1, K) for K classes"
        )
    n, num_classes = log_probs.shape
    if num_classes < 2:
        raise ValueError(
            f"log_probs must have at least 2 classes, got {num_classes}; for one logit of a yes/no question "
            "write log_softmax(torch.cat([torch.zeros_like(logit), logit], dim=1), dim=1)"
        )
    if labels.shape != (n,):
        raise ValueError(
            f"labels must have shape ({n},), one per row of log_probs, got {tuple(labels.shape)}; "
            "write one_hot.argmax(dim=1) if each row has a single 1; if rows may have several (multi-label), compute "
            "the metrics of one label at a time"
        )
    if not log_probs.is_floating_point():
        raise TypeError(f"log_probs must be floating point, got {log_probs.dtype}; apply log_softmax to logits")
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"labels must be integers, got {labels.dtype}; write labels.long()")
    log_p = log_probs.detach().cpu().double().contiguous()
    y = labels.detach().cpu().long()

    bad = (~(log_p < torch.inf)).nonzero()  # NaN is not below inf
    if len(bad):
        row, column = bad[0].tolist()
        raise ValueError(
            f"log_probs must be numbers below inf (-inf, probability 0, is fine), got {log_p[row, column]:g} "
            f"in row {row}, column {column}; look for inf or NaN in the logits given to log_softmax"
        )
    log_total = log_p.logsumexp(dim=1)
    bad = (log_total.abs() > 1e-3).nonzero()
    if len(bad):
        row = int(bad[0])
        probabilities = log_p.min() >= 0 and log_p.max() <= 1
        cure = "probs.log() for probabilities" if probabilities else "log_softmax(logits.float(), dim=1)"
        raise ValueError(
            "log_probs must be normalised, |logsumexp| <= 1e-3 in every row, "
            f"got logsumexp = {log_total[row]:.4g} in row {row}; write {cure}"
        )
    bad = ((y < 0) | (y >= num_classes)).nonzero()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"labels must lie in 0..{num_classes - 1}, got {y[row]} in row {row}; "
            "renumber the classes, or drop the examples without a label"
        )
    return log_p, y
