import json
import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, mean_squared_error, r2_score, roc_auc_score
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

from bsam import metrics as M
from tests.metrics.data import random_predictions

WITH_INTERVAL = ("accuracy", "nll", "auroc", "brier")
NAMES = ("accuracy", "nll", "ece", "auroc", "brier")

# Five examples of three classes. Confidences 0.9, 0.6, 0.6, 0.5, 0.4; correct 1, 1, 0, 0, 1.
P = torch.tensor(
    [[0.9, 0.1, 0.0], [0.2, 0.6, 0.2], [0.3, 0.1, 0.6], [0.5, 0.25, 0.25], [0.3, 0.3, 0.4]], dtype=torch.float64
)
Y = torch.tensor([0, 1, 0, 2, 2])


def row_with_confidence(p, num_classes=40):
    """One row of float64 log-probabilities whose largest probability is p."""
    row = torch.full((1, num_classes), (1 - p) / (num_classes - 1), dtype=torch.float64)
    row[0, 7] = p
    return row.log()


@st.composite
def predictions(draw):
    n = draw(st.integers(1, 40))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    levels = draw(st.sampled_from([None, 1, 2]))
    return random_predictions(n, draw(st.integers(2, 9)), draw(st.integers(0, 2**32)), dtype, levels)


def same(a, b):
    """Equal as dicts of floats, NaN being equal to NaN."""
    return json.dumps(a.as_dict()) == json.dumps(b.as_dict())


# The definitions, by hand and by literal loops.


def test_hand_computed():
    s = M.summary((P.log(), Y), num_bootstrap=0)
    assert s.num_examples == 5
    assert s.accuracy == pytest.approx(3 / 5)
    assert s.nll == pytest.approx(-(math.log(0.9) + math.log(0.6) + math.log(0.3) + math.log(0.25) + math.log(0.4)) / 5)
    # Bins end at 0.9, 0.6 (one right, one wrong), 0.5 and 0.4.
    assert s.ece == pytest.approx((0.1 + 2 * abs(0.5 - 0.6) + 0.5 + 0.6) / 5)
    # Right {0.9, 0.6, 0.4} against wrong {0.6, 0.5}: 2 + 1.5 + 0 of 6 pairs.
    assert s.auroc == pytest.approx(3.5 / 6)
    brier = (
        (0.01 + 0.01) + (0.04 + 0.16 + 0.04) + (0.49 + 0.01 + 0.36) + (0.25 + 0.0625 + 0.5625) + (0.09 + 0.09 + 0.36)
    )
    assert s.brier == pytest.approx(brier / 5)
    assert s.intervals == {}


def test_functions_are_the_summary():
    log_probs, labels = random_predictions(200)
    s = M.summary((log_probs, labels), num_bootstrap=0)
    assert tuple(getattr(M, name)(log_probs, labels) for name in NAMES) == tuple(getattr(s, name) for name in NAMES)
    assert M.ece(log_probs, labels, num_bins=7) == M.summary((log_probs, labels), num_bins=7, num_bootstrap=0).ece
    assert all(isinstance(getattr(M, name)(log_probs, labels), float) for name in NAMES)


def test_predictions_object_and_dtypes():
    log_probs, labels = random_predictions(50)
    whole = M.summary((log_probs, labels))
    assert M.summary(SimpleNamespace(log_probs=log_probs, labels=labels)) == whole
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert M.summary((log_probs, labels.to(dtype))) == whole
    strided = log_probs.T.contiguous().T
    assert M.summary((strided.requires_grad_(), labels)) == whole


def test_ignores_the_default_device():
    log_probs, labels = random_predictions(50)
    whole = M.summary((log_probs, labels))
    with torch.device("meta"):
        assert M.summary((log_probs, labels)) == whole


def slow_ece(log_probs, labels, num_bins):
    n = len(labels)
    bins = [[] for _ in range(num_bins)]
    for row, y in zip(log_probs.double().tolist(), labels.tolist(), strict=True):
        confidence = math.exp(max(row))
        for b in range(1, num_bins + 1):
            if (b - 1) / num_bins < confidence <= b / num_bins:
                bins[b - 1].append((confidence, row.index(max(row)) == y))
    total = 0.0
    for members in bins:
        if members:
            conf = sum(c for c, _ in members) / len(members)
            acc = sum(a for _, a in members) / len(members)
            total += len(members) / n * abs(acc - conf)
    return total


def slow_auroc(log_probs, labels):
    right, wrong = [], []
    for row, y in zip(log_probs.double().tolist(), labels.tolist(), strict=True):
        (right if row.index(max(row)) == y else wrong).append(math.exp(max(row)))
    wins = sum((r > w) + (r == w) / 2 for r in right for w in wrong)
    return wins / (len(right) * len(wrong))


@pytest.mark.parametrize("num_bins", [1, 2, 15, 20, 100])
@pytest.mark.parametrize("num_classes", [2, 10])
def test_ece_is_the_literal_definition(num_bins, num_classes):
    log_probs, labels = random_predictions(300, num_classes)
    assert M.ece(log_probs, labels, num_bins) == pytest.approx(slow_ece(log_probs, labels, num_bins), abs=1e-14)


@pytest.mark.parametrize("levels", [None, 1, 2])
def test_auroc_is_the_literal_definition(levels):
    log_probs, labels = random_predictions(200, 4, levels=levels)
    assert M.auroc(log_probs, labels) == pytest.approx(slow_auroc(log_probs, labels), abs=1e-14)


# Against other packages.


@pytest.mark.parametrize("num_classes", [2, 10])
@pytest.mark.parametrize("levels", [None, 1])
def test_scikit_learn(num_classes, levels):
    log_probs, labels = random_predictions(500, num_classes, levels=levels)
    p, y = log_probs.exp().numpy(), labels.numpy()
    correct = p.argmax(1) == y
    classes = np.arange(num_classes)
    assert M.accuracy(log_probs, labels) == pytest.approx(accuracy_score(y, p.argmax(1)))
    assert M.nll(log_probs, labels) == pytest.approx(log_loss(y, p, labels=classes))
    assert M.auroc(log_probs, labels) == pytest.approx(roc_auc_score(correct, p.max(1)), abs=1e-14)
    assert M.brier(log_probs, labels) == pytest.approx(brier_score_loss(y, p, labels=classes, scale_by_half=False))


@pytest.mark.parametrize("num_bins", [10, 20])
def test_torchmetrics(num_bins):
    log_probs, labels = random_predictions(500)
    p = log_probs.exp()
    assert M.accuracy(log_probs, labels) == pytest.approx(
        multiclass_accuracy(p, labels, num_classes=10, average="micro").item()
    )
    theirs = multiclass_calibration_error(p, labels, num_classes=10, n_bins=num_bins, norm="l1").item()
    assert M.ece(log_probs, labels, num_bins) == pytest.approx(theirs, abs=1e-7)


def test_torchmetrics_issue_3510_gives_confidence_one_a_bin_of_its_own():
    p = torch.tensor([[1.0, 0.0], [0.96, 0.04]], dtype=torch.float64)
    labels = torch.tensor([1, 0])  # the certain one is wrong, the other right
    # One bin (0.95, 1]: accuracy 0.5, confidence 0.98. Two bins: (1 + 0.04) / 2.
    assert M.ece(p.log(), labels) == pytest.approx(0.48)
    theirs = multiclass_calibration_error(p, labels, num_classes=2, n_bins=20, norm="l1").item()
    assert theirs == pytest.approx(0.52), "torchmetrics#3510 is fixed: correct the docstring of bsam.metrics"


# Bins.


@pytest.mark.parametrize("b", range(1, 21))
def test_edges_belong_to_the_bin_below(b):
    labels = torch.tensor([7])
    for p in (0.05 * b, b / 20):  # 0.05 * 3 > 3 / 20 in floating point; exp(log(p)) need not be p
        count = M.reliability(row_with_confidence(min(p, 1.0)), labels).count
        assert count.tolist() == [float(i == b - 1) for i in range(20)]
    if b < 20:
        assert M.reliability(row_with_confidence(b / 20 + 1e-9), labels).count[b] == 1


@pytest.mark.parametrize("num_bins", [3, 7, 10, 15, 30])
def test_edges_for_other_numbers_of_bins(num_bins):
    for b in range(1, num_bins + 1):
        count = M.reliability(row_with_confidence(b / num_bins), torch.tensor([7]), num_bins).count
        assert count.argmax() == b - 1


@pytest.mark.parametrize("num_classes", [2, 4, 5, 10, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_predictions_are_in_the_bin_that_ends_at_one_over_k(num_classes, dtype):
    log_probs = torch.zeros(1, num_classes, dtype=dtype).log_softmax(1)
    assert M.reliability(log_probs, torch.tensor([0])).count[20 // num_classes - 1] == 1


def test_confidence_above_one_by_rounding_is_in_the_last_bin():
    log_probs = torch.tensor([[1e-6, -20.0]])
    assert M.reliability(log_probs, torch.tensor([0])).count[-1] == 1


def test_reliability_table():
    table = M.reliability(P.log(), Y, num_bins=10)  # bins end at 0.4, 0.5, 0.6, 0.9
    nan = math.nan
    expected = {
        "count": [0, 0, 0, 1, 1, 2, 0, 0, 1, 0],
        "confidence": [nan, nan, nan, 0.4, 0.5, 0.6, nan, nan, 0.9, nan],
        "accuracy": [nan, nan, nan, 1, 0, 0.5, nan, nan, 1, nan],
    }
    for name, values in expected.items():
        torch.testing.assert_close(
            getattr(table, name), torch.tensor(values, dtype=torch.float64), equal_nan=True, msg=name
        )


# Streaming.


@settings(deadline=None, max_examples=100)
@given(predictions(), st.data())
def test_streaming_is_the_whole_set_exactly(data, draw):
    log_probs, labels = data
    n = len(labels)
    cuts = draw.draw(st.lists(st.integers(0, n), max_size=8).map(sorted))
    metrics = M.Metrics()
    for start, end in pairwise([0, *cuts, n]):  # some batches are empty
        metrics.update(log_probs[start:end], labels[start:end])
    assert same(metrics.compute(num_bootstrap=10), M.summary((log_probs, labels), num_bootstrap=10))
    assert metrics.reliability().count.equal(M.reliability(log_probs, labels).count)


def test_streaming_of_very_long_rows_one_by_one():
    torch.set_num_threads(2)  # over which sum() would split a row
    log_probs, labels = random_predictions(4, 40_000)
    metrics = M.Metrics()
    for i in range(4):
        metrics.update(log_probs[i : i + 1], labels[i : i + 1])
    assert same(metrics.compute(num_bootstrap=0), M.summary((log_probs, labels), num_bootstrap=0))


def test_streaming_keeps_four_numbers_per_example():
    metrics = M.Metrics()
    metrics.update(*random_predictions(30, 100))
    assert [column.untyped_storage().nbytes() for column in metrics._batches[0]] == [8 * 30] * 4


def test_merge():
    log_probs, labels = random_predictions(90)
    parts = []
    for i in range(0, 90, 30):
        parts.append(M.Metrics(num_bins=15))
        parts[-1].update(log_probs[i : i + 30], labels[i : i + 30])
    total = M.Metrics(num_bins=15)
    for part in parts:
        total.merge(part)
    assert total.compute() == M.summary((log_probs, labels), num_bins=15)
    assert parts[0].compute() == M.summary((log_probs[:30], labels[:30]), num_bins=15)
    with pytest.raises(ValueError, match=r"20 bins into metrics of 15; write Metrics\(num_bins=15\)"):
        total.merge(M.Metrics())


@settings(deadline=None, max_examples=50)
@given(predictions(), st.randoms(use_true_random=False))
def test_order_does_not_matter(data, random):
    log_probs, labels = data
    order = list(range(len(labels)))
    random.shuffle(order)
    a = M.summary((log_probs, labels), num_bootstrap=0)
    b = M.summary((log_probs[order], labels[order]), num_bootstrap=0)
    for name in NAMES:
        assert getattr(a, name) == pytest.approx(getattr(b, name), abs=1e-13, nan_ok=True)


@settings(deadline=None, max_examples=50)
@given(predictions())
def test_ranges(data):
    s = M.summary(data, num_bootstrap=0)
    assert 0 <= s.accuracy <= 1
    assert s.nll >= 0
    assert 0 <= s.ece <= 1
    assert math.isnan(s.auroc) == (s.accuracy in (0, 1))
    assert math.isnan(s.auroc) or 0 <= s.auroc <= 1
    assert 0 <= s.brier <= 2


# Several labels per example.


def several(n=30, shape=(4,), num_classes=3, seed=0):
    """Log-probabilities (n, *shape, K) and labels (n, *shape); those of one example have one difficulty."""
    g = torch.Generator().manual_seed(seed)
    sharpness = 3 * torch.rand(n, *[1] * len(shape), 1, generator=g, dtype=torch.float64)
    logits = sharpness * torch.randn(n, *shape, num_classes, generator=g, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(-1).reshape(-1, num_classes), 1, generator=g)
    return (2 * logits).log_softmax(-1), labels.reshape(n, *shape)


def close(a, b):
    """Equal up to the order of sums."""
    assert a.num_examples == b.num_examples
    assert [getattr(a, name) for name in NAMES] == pytest.approx([getattr(b, name) for name in NAMES], abs=1e-13)


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_all_labels_count_alike(shape):
    log_probs, labels = several(shape=shape)
    s = M.summary((log_probs, labels), num_bootstrap=0)
    close(s, M.summary((log_probs.reshape(-1, 3), labels.flatten()), num_bootstrap=0))
    assert s.num_examples == labels.numel()
    assert M.reliability(log_probs, labels).count.sum() == labels.numel()


def test_ignored_labels_have_no_say():
    log_probs, labels = several()
    ignored = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    ignored[3] = True  # a whole example
    expected = M.summary((log_probs[~ignored], labels[~ignored]), num_bootstrap=0)
    log_probs[ignored] = math.nan
    for number in (-100, 255, 1):
        marked = labels.where(~ignored, number)
        if number == 1:
            labels = labels.where(labels != 1, 2)  # 1 is a class, but this one is not rated
            expected = M.summary((log_probs[~ignored], labels[~ignored]), num_bootstrap=0)
            marked = labels.where(~ignored, number)
        close(M.summary((log_probs, marked), ignore_index=number, num_bootstrap=0), expected)
        predictions = SimpleNamespace(log_probs=log_probs, labels=marked, ignore_index=number)
        close(M.summary(predictions, num_bootstrap=0), expected)
        metrics = M.Metrics(ignore_index=number)
        for part in (slice(0, 7), slice(7, 30)):
            metrics.update(log_probs[part], marked[part])
        assert metrics.compute(num_bootstrap=5) == M.summary(predictions, num_bootstrap=5)


def test_ignored_examples_are_as_if_they_were_not_there():
    log_probs, labels = random_predictions(50)
    marked = labels.clone()
    marked[::3] = -100
    kept = marked != -100
    assert M.summary((log_probs, marked), ignore_index=-100) == M.summary((log_probs[kept], labels[kept]))
    with pytest.raises(ValueError, match="need at least one example"):
        M.summary((log_probs, torch.full_like(labels, -100)), ignore_index=-100)
    with pytest.raises(ValueError, match=r"got -100 in row 0; .*write ignore_index=-100"):
        M.summary((log_probs, marked))


def test_the_bootstrap_resamples_whole_examples():
    log_probs, labels = several(20, (4,))
    labels[::2, 2:] = -100
    intervals = M.summary((log_probs, labels), num_bootstrap=41, level=0.9, seed=5, ignore_index=-100).intervals
    index = torch.randint(20, (41, 20), generator=torch.Generator().manual_seed(5))
    for name in WITH_INTERVAL:
        values = []
        for i in index:
            rated = labels[i] != -100
            values.append(getattr(M, name)(log_probs[i][rated], labels[i][rated]))
        values.sort()
        assert intervals[name] == pytest.approx((values[2], values[38]), abs=1e-13)


def test_intervals_of_dependent_labels_cover_the_truth():
    """A bootstrap over single labels would not: it takes ten labels that are the same for ten observations."""
    log_probs, labels = several(5000, (1,), seed=1)
    log_probs, labels = log_probs.expand(-1, 10, -1), labels.expand(-1, 10)
    truth = M.summary((log_probs, labels), num_bootstrap=0)
    g = torch.Generator().manual_seed(0)
    covered = {"examples": 0, "labels": 0}
    for seed in range(200):
        index = torch.randint(5000, (60,), generator=g)
        p, y = log_probs[index], labels[index]
        for name, data in (("examples", (p, y)), ("labels", (p.reshape(-1, 3), y.flatten()))):
            low, high = M.summary(data, num_bootstrap=100, seed=seed).intervals["nll"]
            covered[name] += low <= truth.nll <= high
    assert 0.88 <= covered["examples"] / 200 <= 0.99
    assert covered["labels"] / 200 < 0.7


def test_several_labels_of_a_bad_shape():
    log_probs, labels = several()
    with pytest.raises(ValueError, match=r"shape \(30, 4\), one per row of log_probs, got \(30, 3\).*movedim\(1, -1\)"):
        M.summary((log_probs, labels[:, :3]))
    log_probs[2, 1, 0] = math.nan
    with pytest.raises(ValueError, match=r"got nan in position \[2, 1\], column 0"):
        M.summary((log_probs, labels))


# Real predictions.


def gaussian_predictions(n=80, outputs=None, seed=0, std=1.0, noise=0.5):
    """Means that are off by N(0, noise^2), predicted with another std."""
    g = torch.Generator().manual_seed(seed)
    shape = (n,) if outputs is None else (n, outputs)
    y = torch.randn(shape, generator=g, dtype=torch.float64)
    mean = y + noise * torch.randn(shape, generator=g, dtype=torch.float64)
    predicted = torch.distributions.Normal(mean, std * noise)
    density = predicted.log_prob(y) if outputs is None else predicted.log_prob(y).sum(1)
    return SimpleNamespace(mean=mean, targets=y, log_density=density, cdf=predicted.cdf(y))


GAUSSIAN = ("nll", "rmse", "r2", "coverage_50", "coverage_95")


@pytest.mark.parametrize("outputs", [None, 1, 3])
def test_real_predictions(outputs):
    p = gaussian_predictions(outputs=outputs)
    s = M.summary(p)
    y, f = p.targets.numpy().reshape(80, -1), p.mean.numpy().reshape(80, -1)
    assert s.num_examples == 80
    assert s.nll == pytest.approx(-float(p.log_density.mean()))
    assert s.rmse == pytest.approx(math.sqrt(mean_squared_error(y, f)))
    assert s.r2 == pytest.approx(r2_score(y, f))
    z = np.abs((y - f) / 0.5)
    assert s.coverage_50 == pytest.approx((z <= 0.6744897501960817).mean())
    assert s.coverage_95 == pytest.approx((z <= 1.959963984540054).mean())
    assert set(s.intervals) == set(GAUSSIAN)
    assert all(low <= getattr(s, name) <= high for name, (low, high) in s.intervals.items())
    assert list(json.loads(json.dumps(s.as_dict()))) == ["num_examples", *GAUSSIAN, "intervals", "level"]
    assert str(s).splitlines()[0] == "80 examples, 95% bootstrap intervals"
    assert str(s).splitlines()[4].startswith("coverage_50   ")
    same_numbers = SimpleNamespace(**{name: t.reshape(80, -1)[:, 0] for name, t in vars(p).items() if t.ndim == 2})
    if outputs == 1:
        assert M.summary(SimpleNamespace(**vars(same_numbers), log_density=p.log_density)) == s


def test_real_predictions_resampled():
    p = gaussian_predictions(40, 2)
    intervals = M.summary(p, num_bootstrap=41, level=0.9, seed=5).intervals
    index = torch.randint(40, (41, 40), generator=torch.Generator().manual_seed(5))
    for name in GAUSSIAN:
        parts = (SimpleNamespace(**{key: column[i] for key, column in vars(p).items()}) for i in index)
        values = sorted(getattr(M.summary(part, num_bootstrap=0), name) for part in parts)
        assert intervals[name] == pytest.approx((values[2], values[38]), abs=1e-13)


@pytest.mark.parametrize(("std", "right"), [(1.0, True), (0.5, False), (2.0, False)])
def test_coverage_says_if_the_width_is_right(std, right):
    s = M.summary(gaussian_predictions(4000, std=std))
    for name, level in (("coverage_50", 0.5), ("coverage_95", 0.95)):
        low, high = s.intervals[name]
        assert (low <= level <= high) == right
        if not right:
            assert (getattr(s, name) < level) == (std < 1)


def test_real_predictions_that_cannot_be_rated():
    p = gaussian_predictions(5)
    assert math.isnan(M.summary(SimpleNamespace(**{**vars(p), "cdf": None})).coverage_50)
    constant = SimpleNamespace(**{**vars(p), "targets": torch.ones(5)})
    assert math.isnan(M.summary(constant).r2)
    for name in ("targets", "log_density"):
        with pytest.raises(ValueError, match=r"no targets.*predict on \(inputs, targets\)"):
            M.summary(SimpleNamespace(**{**vars(p), name: None}))
    for name in ("mean", "targets", "log_density"):
        with pytest.raises(ValueError, match=f"{name} must be finite everywhere; look for inf or NaN"):
            M.summary(SimpleNamespace(**{**vars(p), name: torch.full((5,), math.nan)}))
    assert M.summary(SimpleNamespace(**{**vars(p), "log_density": torch.full((5,), -math.inf)})).nll == math.inf
    with pytest.raises(ValueError, match="at least one example"):
        M.summary(SimpleNamespace(**{name: t[:0] for name, t in vars(p).items()}))
    with pytest.raises(ValueError, match="num_bootstrap"):
        M.summary(p, num_bootstrap=-1)


# Degenerate sets.


def test_ties_of_the_argmax_go_to_the_lowest_class():
    log_probs = torch.tensor([[0.2, 0.4, 0.4]]).log()
    assert M.accuracy(log_probs, torch.tensor([1])) == 1
    assert M.accuracy(log_probs, torch.tensor([2])) == 0


@pytest.mark.parametrize("right", [True, False])
def test_auroc_is_nan_without_both_kinds(right):
    log_probs, _ = random_predictions(20)
    labels = log_probs.argmax(1) if right else log_probs.argmin(1)
    s = M.summary((log_probs, labels), num_bootstrap=50)
    assert s.accuracy == right
    assert math.isnan(s.auroc)
    assert all(math.isnan(end) for end in s.intervals["auroc"])
    assert all(math.isfinite(getattr(s, name)) for name in NAMES if name != "auroc")
    assert all(low <= high for name, (low, high) in s.intervals.items() if name != "auroc")
    assert "nan" in str(s)


def test_auroc_interval_of_the_defined_resamples():
    s = M.summary((P[:3].log(), Y[:3]))  # one wrong of three: absent from 30% of the resamples
    assert s.auroc == 0.75
    assert s.intervals["auroc"] == (0.5, 1.0)


def test_zero_probability():
    log_probs = torch.tensor([[0.0, -math.inf], [0.0, -math.inf], [0.0, -math.inf]])
    s = M.summary((log_probs, torch.tensor([0, 0, 1])))
    assert (s.accuracy, s.nll, s.auroc) == (2 / 3, math.inf, 0.5)
    assert s.ece == pytest.approx(1 / 3)
    assert s.brier == pytest.approx(2 / 3)
    assert s.intervals["nll"] == (0.0, math.inf)
    assert M.nll(log_probs, torch.tensor([0, 0, 0])) == 0


def test_one_example():
    s = M.summary((P[:1].log(), Y[:1]))
    assert (s.num_examples, s.accuracy, s.intervals["accuracy"]) == (1, 1.0, (1.0, 1.0))


# Errors.

GOOD = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
LABELS = torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("log_probs", "labels", "error", "message"),
    [
        ([[0.0]], LABELS, TypeError, r"log_probs must be a tensor, got list; write torch.as_tensor\(log_probs\)"),
        (GOOD, [0, 2], TypeError, r"labels must be a tensor, got list; write torch.as_tensor\(labels\)"),
        (GOOD[0], LABELS, ValueError, r"shape \(n, K\), got \(3,\); write log_probs.reshape"),
        (GOOD[:, :1] * 0, LABELS, ValueError, "at least 2 classes, got 1; for one logit"),
        (GOOD, LABELS[:1], ValueError, r"labels must have shape \(2,\), one per row of log_probs, got \(1,\)"),
        (GOOD, torch.eye(3)[LABELS], ValueError, r"got \(2, 3\); write one_hot.argmax\(dim=1\)"),
        (GOOD.long(), LABELS, TypeError, "log_probs must be floating point, got torch.int64; apply log_softmax"),
        (GOOD, LABELS.float(), TypeError, r"labels must be integers, got torch.float32; write labels.long\(\)"),
        (GOOD, LABELS > 0, TypeError, "labels must be integers, got torch.bool"),
        (GOOD, LABELS + 1, ValueError, r"labels must lie in 0..2, got 3 in row 1"),
        (GOOD, LABELS - 1, ValueError, r"labels must lie in 0..2, got -1 in row 0"),
        (GOOD.exp(), LABELS, ValueError, r"normalised.*got logsumexp = 1.44 in row 0; write probs.log\(\)"),
        (GOOD + 5, LABELS, ValueError, r"normalised.*got logsumexp = 5 in row 0; write log_softmax"),
        (GOOD - math.inf, LABELS, ValueError, r"normalised.*got logsumexp = -inf in row 0; write log_softmax"),
        (GOOD * math.nan, LABELS, ValueError, "below inf .* got nan in row 0, column 0; look for inf or NaN"),
        (GOOD + math.inf, LABELS, ValueError, "below inf .* got inf in row 0, column 0; look for inf or NaN"),
        (GOOD[:0], LABELS[:0], ValueError, "need at least one example, got none"),
    ],
)
@pytest.mark.parametrize("function", [*(getattr(M, name) for name in NAMES), M.reliability])
def test_bad_input(function, log_probs, labels, error, message):
    with pytest.raises(error, match=message):
        function(log_probs, labels)


def test_bad_options():
    for num_bins in (0, -1, 2.5):
        with pytest.raises(ValueError, match=f"num_bins must be a positive integer, got {num_bins}; write"):
            M.ece(GOOD, LABELS, num_bins)
    for num_bootstrap in (-1, 1.5):
        with pytest.raises(ValueError, match=f"integer >= 0, got {num_bootstrap}; write 0"):
            M.summary((GOOD, LABELS), num_bootstrap=num_bootstrap)
    for level in (0, 1, 95):
        with pytest.raises(ValueError, match=f"level must lie between 0 and 1, got {level}; write 0.95"):
            M.summary((GOOD, LABELS), level=level)
    with pytest.raises(ValueError, match="need at least one example"):
        M.Metrics().compute()
    for bad in (GOOD, (GOOD, LABELS, LABELS)):
        with pytest.raises(TypeError, match=rf"got {type(bad).__name__}; write \(log_probs, labels\)"):
            M.summary(bad)


def test_a_failed_update_adds_nothing():
    metrics = M.Metrics()
    metrics.update(GOOD, LABELS)
    with pytest.raises(ValueError, match="normalised"):
        metrics.update(GOOD + 1, LABELS)
    assert same(metrics.compute(), M.summary((GOOD, LABELS)))


# The bootstrap.


def test_bootstrap_is_reproducible_and_leaves_the_global_generator_alone():
    data = random_predictions(300)
    state = torch.get_rng_state()
    a = M.summary(data, num_bootstrap=100)
    assert torch.get_rng_state().equal(state)
    torch.manual_seed(123)
    assert M.summary(data, num_bootstrap=100) == a
    assert M.summary(data, num_bootstrap=100, seed=1).intervals != a.intervals


@pytest.mark.parametrize("levels", [None, 1])
def test_bootstrap_is_recomputing_from_resampled_examples(levels):
    log_probs, labels = random_predictions(60, 4, levels=levels)
    intervals = M.summary((log_probs, labels), num_bootstrap=41, level=0.9, seed=5).intervals
    index = torch.randint(60, (41, 60), generator=torch.Generator().manual_seed(5))
    for name in WITH_INTERVAL:
        values = sorted(getattr(M, name)(log_probs[i], labels[i]) for i in index)
        assert intervals[name] == pytest.approx((values[2], values[38]), abs=1e-13)  # 5% and 95% of 0..40
    correct = log_probs.argmax(1) == labels
    by_sklearn = sorted(roc_auc_score(correct[i], log_probs[i].max(1).values) for i in index)
    assert intervals["auroc"] == pytest.approx((by_sklearn[2], by_sklearn[38]), abs=1e-13)


def test_bootstrap_in_several_chunks():
    data = random_predictions(20_000, 3)
    s = M.summary(data, num_bootstrap=105)  # 52 resamples at a time
    standard_error = math.sqrt(s.accuracy * (1 - s.accuracy) / 20_000)
    low, high = s.intervals["accuracy"]
    assert high - low == pytest.approx(2 * 1.96 * standard_error, rel=0.4)


def test_intervals_cover_the_truth():
    population = random_predictions(20_000, 3, seed=1)
    truth = M.summary(population, num_bootstrap=0)
    covered = dict.fromkeys(WITH_INTERVAL, 0)
    g = torch.Generator().manual_seed(0)
    for seed in range(200):
        index = torch.randint(20_000, (150,), generator=g)
        s = M.summary((population[0][index], population[1][index]), num_bootstrap=200, seed=seed)
        for name, (low, high) in s.intervals.items():
            covered[name] += low <= getattr(truth, name) <= high
    assert all(0.89 <= count / 200 <= 0.99 for count in covered.values()), covered  # 95% nominal


def test_the_ece_has_no_interval_for_the_bootstrap_of_a_biased_number_covers_nothing():
    """Calibrated probabilities: no resample comes down to the ECE of the population, which is nearly 0."""
    log_probs, _ = random_predictions(20_000, 3, seed=1)
    g = torch.Generator().manual_seed(0)
    labels = torch.multinomial(log_probs.exp(), 1, generator=g)[:, 0]
    truth = M.ece(log_probs, labels)
    sample = torch.randint(20_000, (200,), generator=g)
    resamples = [sample[torch.randint(200, (200,), generator=g)] for _ in range(100)]
    assert truth < min(M.ece(log_probs[index], labels[index]) for index in resamples)
    s = M.summary((log_probs[sample], labels[sample]), num_bootstrap=20)
    assert set(s.intervals) == set(WITH_INTERVAL) == set(NAMES) - {"ece"}
    assert "[" not in next(line for line in str(s).splitlines() if line.startswith("ece"))


def test_intervals_shrink_with_n_and_grow_with_level():
    def widths(n, level=0.95):
        s = M.summary(random_predictions(n), num_bootstrap=200, level=level)
        return torch.tensor([high - low for low, high in s.intervals.values()])

    ratio = widths(200) / widths(3200)
    assert ((ratio > 2.5) & (ratio < 6)).all(), ratio  # about sqrt(16)
    assert (widths(200, 0.5) < widths(200)).all()


# The summary as text and as a dict.


def test_str():
    s = M.Summary(10_000, 0.943, 0.18123, 0.0123, math.nan, 0.08, {"accuracy": (0.9381, 0.94761)}, 0.95)
    assert str(s).splitlines() == [
        "10000 examples, 95% bootstrap intervals",
        "accuracy   0.9430   [0.9381, 0.9476]",
        "nll        0.1812",
        "ece        0.0123",
        "auroc         nan",
        "brier      0.0800",
    ]
    assert "intervals" not in str(M.summary((GOOD, LABELS), num_bootstrap=0))
    rounded = torch.tensor([[1e-6, -20.0]])  # an NLL of -1e-6
    assert "-0" not in str(M.summary((rounded, torch.tensor([0]))))


def test_as_dict_survives_json():
    s = M.summary(random_predictions(100), num_bootstrap=20)
    d = s.as_dict()
    assert json.loads(json.dumps(d)) == d
    assert list(d) == ["num_examples", *NAMES, "intervals", "level"]
    assert d["intervals"]["nll"] == list(s.intervals["nll"])


# The table as rows.


def test_reliability_table_goes_through_json():
    table = M.reliability(P.log(), Y, num_bins=10)
    rows = json.loads(json.dumps(table.as_rows(), allow_nan=False))
    assert rows[0] == [0, None, None]
    back = M.ReliabilityTable.from_rows(rows)
    for name in ("count", "confidence", "accuracy"):
        torch.testing.assert_close(getattr(back, name), getattr(table, name), equal_nan=True, rtol=0, atol=0)


def test_predictions_without_labels_are_refused():
    with pytest.raises(ValueError, match="no labels"):
        M.summary(SimpleNamespace(log_probs=torch.zeros(3, 2).log_softmax(1), labels=None))
