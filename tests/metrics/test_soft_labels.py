"""Soft labels: against scikit-learn, scipy and the NLL."""

import math

import pytest
import torch
from scipy.stats import entropy
from sklearn.metrics import log_loss

from bsam import metrics as M
from tests.metrics.data import random_predictions


def soft(n, num_classes=4, seed=1):
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(5, (n, num_classes), generator=g).double()
    counts[:, 0] += 1
    return counts / counts.sum(1, keepdim=True)


def test_scipy_and_scikit_learn():
    log_probs, labels = random_predictions(50, 4)
    q = soft(50)
    s = M.rate_soft_labels((log_probs, labels), q, num_bootstrap=0)
    p = log_probs.exp().numpy()
    kl = [entropy(q[i].numpy(), p[i]) for i in range(50)]
    assert s.kl == pytest.approx(sum(kl) / 50)
    assert s.cross_entropy == pytest.approx(s.kl + sum(entropy(row) for row in q.numpy()) / 50)
    # A row of several answers is the weighted mean of rows with one answer.
    repeated = torch.arange(50).repeat_interleave(4)
    one_answer = torch.arange(4).repeat(50)
    theirs = log_loss(one_answer.numpy(), p[repeated.numpy()], sample_weight=q.flatten().numpy(), labels=range(4))
    assert s.cross_entropy == pytest.approx(theirs)


def test_one_hot_is_the_nll():
    log_probs, labels = random_predictions(50, 4)
    s = M.rate_soft_labels(log_probs, torch.eye(4)[labels], num_bootstrap=30)
    assert s.cross_entropy == pytest.approx(M.nll(log_probs, labels))
    assert s.kl == pytest.approx(s.cross_entropy)
    assert s.intervals["cross_entropy"] == pytest.approx(
        M.summary((log_probs, labels), num_bootstrap=30).intervals["nll"]
    )


def test_probability_zero():
    log_probs = torch.tensor([[1.0, 0.0]]).log()
    assert M.rate_soft_labels(log_probs, torch.tensor([[1.0, 0.0]])).cross_entropy == 0
    assert M.rate_soft_labels(log_probs, torch.tensor([[0.5, 0.5]])).cross_entropy == math.inf


def test_bad_input():
    log_probs, labels = random_predictions(3, 4)
    q = soft(3)
    for predictions, shares, error, message in [
        (log_probs, q[:, :3], ValueError, "the same examples and the same classes"),
        (log_probs, q[:2], ValueError, "the same examples"),
        (log_probs, labels, ValueError, r"got \(3,\) and \(3, 4\)"),
        (log_probs, 10 * q, ValueError, r"sum to 1, got .* in row 0; write counts / counts.sum"),
        (log_probs, q - 0.5, ValueError, "shares >= 0"),
        (log_probs, q * math.nan, ValueError, "shares >= 0"),
        (log_probs[:0], q[:0], ValueError, "at least one example"),
        (log_probs.exp(), q, ValueError, "must be normalised"),
        (log_probs, q.tolist(), TypeError, "soft_labels must be a tensor, got list"),
    ]:
        with pytest.raises(error, match=message):
            M.rate_soft_labels(predictions, shares)
