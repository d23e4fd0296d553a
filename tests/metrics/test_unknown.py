"""Known against unknown inputs: scikit-learn's numbers, and intervals."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from bsam import metrics as M
from bsam.metrics.scores import Score
from tests.metrics.data import random_predictions, with_everything

NAMES = M.UnknownSummary.names


def scores(n, m, levels=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    known = torch.randn(n, generator=g, dtype=torch.float64)
    unknown = torch.randn(m, generator=g, dtype=torch.float64) + 1
    return tuple((s * levels).round() / levels if levels else s for s in (known, unknown))


def by_sklearn(known, unknown):
    s = torch.cat([known, unknown]).numpy()
    is_unknown = np.r_[np.zeros(len(known)), np.ones(len(unknown))]
    fpr, tpr, _ = roc_curve(1 - is_unknown, -s, drop_intermediate=False)
    return [
        roc_auc_score(is_unknown, s),
        average_precision_score(1 - is_unknown, -s),
        average_precision_score(is_unknown, s),
        fpr[np.argmax(tpr >= 0.95 - 1e-12)],
    ]


def numbers(summary):
    return [getattr(summary, name) for name in NAMES]


@pytest.mark.parametrize("levels", [None, 1, 3])
@pytest.mark.parametrize(("n", "m"), [(200, 100), (17, 400), (1, 1), (20, 1)])
def test_scikit_learn(levels, n, m):
    pair = scores(n, m, levels)
    assert numbers(M.rate_unknown(*pair, num_bootstrap=0)) == pytest.approx(by_sklearn(*pair), abs=1e-13)


def test_by_hand():
    s = M.rate_unknown(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9]), num_bootstrap=0)
    assert (s.num_examples, s.num_unknown) == (5, 2)
    assert s.auroc == pytest.approx(5 / 6)
    assert s.fpr_95 == 0.5  # all known must be accepted: up to 0.6
    perfect = M.rate_unknown(torch.zeros(4), torch.ones(3), num_bootstrap=0)
    assert numbers(perfect) == [1, 1, 1, 0]
    worst = M.rate_unknown(torch.ones(4), torch.zeros(3), num_bootstrap=0)
    assert (worst.auroc, worst.fpr_95) == (0, 1)
    none = M.rate_unknown(torch.ones(4), torch.ones(4), num_bootstrap=0)
    assert numbers(none) == [0.5, 0.5, 0.5, 1]


@pytest.mark.parametrize("score", Score.__args__)
def test_predictions(score):
    known, unknown = with_everything(60), with_everything(40, seed=7)
    found = M.rate_unknown(known, unknown, score, num_bootstrap=20)
    assert found == M.rate_unknown(M.doubt(known, score), M.doubt(unknown, score), num_bootstrap=20)
    if score in ("confidence", "entropy"):
        tuples = [(p.log_probs, None) for p in (known, unknown)]  # no labels are needed
        assert M.rate_unknown(*tuples, score, num_bootstrap=20) == found


def test_bootstrap_resamples_both_sets():
    known, unknown = scores(30, 20, levels=2)
    s = M.rate_unknown(known, unknown, num_bootstrap=41, level=0.9, seed=5)
    g = torch.Generator().manual_seed(5)
    first = torch.randint(30, (41, 30), generator=g)
    second = torch.randint(20, (41, 20), generator=g)
    found = np.array([by_sklearn(known[i], unknown[j]) for i, j in zip(first, second, strict=True)])
    for k, name in enumerate(NAMES):
        values = sorted(found[:, k])
        assert s.intervals[name] == pytest.approx((values[2], values[38]), abs=1e-13)
    assert json.loads(json.dumps(s.as_dict()))["auroc"] == s.auroc
    assert str(s).splitlines()[0] == "50 examples, 90% bootstrap intervals"


def test_intervals_cover_the_truth():
    known, unknown = scores(20_000, 20_000, seed=3)
    truth, covered, g = M.rate_unknown(known, unknown, num_bootstrap=0), [0] * 4, torch.Generator().manual_seed(0)
    for seed in range(50):
        i, j = (torch.randint(20_000, (200,), generator=g) for _ in range(2))
        s = M.rate_unknown(known[i], unknown[j], num_bootstrap=100, seed=seed)
        for k, name in enumerate(NAMES):
            low, high = s.intervals[name]
            covered[k] += low <= getattr(truth, name) <= high
    assert all(42 <= count <= 50 for count in covered), covered


def test_ignores_the_default_device():
    with torch.device("meta"):
        pair = torch.tensor([0.1, 0.2], device="cpu"), torch.tensor([0.3], device="cpu")
        assert M.rate_unknown(*pair, num_bootstrap=10).auroc == 1


def test_bad_input():
    good, other = random_predictions(5, 3), random_predictions(5, 4)
    tokens = torch.zeros(2, 3, 4).log_softmax(-1), torch.zeros(2, 3, dtype=torch.long)
    for known, unknown, error, message in [
        (good, other, ValueError, "known has 3 classes, unknown 4; predict both with the same network"),
        (good, torch.ones(3), TypeError, "both be predictions, or both be tensors"),
        (good, (good[0][:0], None), ValueError, "unknown has no examples"),
        (torch.ones(0), torch.ones(1), ValueError, "known has no examples"),
        (torch.ones(2), torch.tensor([torch.nan]), ValueError, "scores of unknown must be numbers, got NaN"),
        (torch.ones(2, 2), torch.ones(2), ValueError, r"one score per example, got shape \(2, 2\)"),
        (tokens, tokens, ValueError, "one score per example"),
        ((good[0].exp(), None), good, ValueError, "must be normalised"),
        ((torch.zeros(3), None), good, ValueError, r"log_probs of shape \(n, K\)"),
        ((good[0][:, :1] * 0, None), (good[0][:, :1] * 0, None), ValueError, "at least 2 classes"),
        (good, 3, TypeError, "must have .log_probs"),
    ]:
        with pytest.raises(error, match=message):
            M.rate_unknown(known, unknown)
    with pytest.raises(ValueError, match="num_bootstrap"):
        M.rate_unknown(good, good, num_bootstrap=-1)
    with pytest.raises(ValueError, match="score='x'"):
        M.rate_unknown(torch.ones(1), torch.ones(1), "x")
