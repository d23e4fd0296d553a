"""Calibration errors: against literal definitions, and against torchmetrics and scikit-learn where they agree."""

import math

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from torchmetrics.functional.classification import binary_calibration_error

from bsam import metrics as M
from tests.metrics.data import random_predictions


def slow_error(confidence, correct, bins):
    """sum_b n_b/n |acc_b - conf_b|, for bins that are lists of numbers of examples."""
    total = 0.0
    for members in bins:
        if members:
            conf = sum(confidence[i] for i in members) / len(members)
            acc = sum(correct[i] for i in members) / len(members)
            total += len(members) / len(confidence) * abs(acc - conf)
    return total


def equal_width(confidence, num_bins):
    edges = [(b / num_bins, (b + 1) / num_bins) for b in range(num_bins)]
    return [[i for i, c in enumerate(confidence) if low < c <= high or (low == 0 and c == 0)] for low, high in edges]


def equal_size(confidence, num_bins):
    order = sorted(range(len(confidence)), key=lambda i: confidence[i])
    return [part.tolist() for part in np.array_split(order, min(num_bins, len(order)))]


@pytest.mark.parametrize("num_bins", [1, 7, 20, 500])
def test_the_literal_definitions(num_bins):
    log_probs, labels = random_predictions(200, 4)
    p, y = log_probs.exp().tolist(), labels.tolist()
    top, hit = [max(row) for row in p], [float(row.index(max(row)) == c) for row, c in zip(p, y, strict=True)]
    wanted = slow_error(top, hit, equal_size(top, num_bins))
    assert M.adaptive_ece(log_probs, labels, num_bins) == pytest.approx(wanted, abs=1e-13)
    for adaptive, cut in ((False, equal_width), (True, equal_size)):
        errors = []
        for k in range(4):
            own, is_k = [row[k] for row in p], [float(c == k) for c in y]
            errors.append(slow_error(own, is_k, cut(own, num_bins)))
        found = M.classwise_ece(log_probs, labels, num_bins, adaptive=adaptive)
        assert found == pytest.approx(sum(errors) / 4, abs=1e-13)


def test_torchmetrics():
    log_probs, labels = random_predictions(500, 5)
    theirs = [
        binary_calibration_error(log_probs[:, k].exp(), (labels == k).long(), n_bins=20, norm="l1").item()
        for k in range(5)
    ]
    assert M.classwise_ece(log_probs, labels) == pytest.approx(np.mean(theirs), abs=1e-6)


def test_scikit_learn():
    log_probs, labels = random_predictions(400, 5)
    confidence, correct = log_probs.max(1).values.exp().numpy(), (log_probs.argmax(1) == labels).numpy()
    true, predicted = calibration_curve(correct, confidence, n_bins=20, strategy="quantile")
    assert len(true) == 20  # of 20 examples each
    assert M.adaptive_ece(log_probs, labels) == pytest.approx(np.abs(true - predicted).mean(), abs=1e-12)


def test_equal_confidences_count_the_same_in_any_order():
    log_probs, labels = random_predictions(120, 3, levels=1)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1))
    for function in (M.adaptive_ece, lambda p, y: M.classwise_ece(p, y, adaptive=True)):
        assert function(log_probs, labels) == pytest.approx(function(log_probs[order], labels[order]), abs=1e-14)
    same = torch.tensor([[0.7, 0.3]]).log().expand(10, 2)
    assert M.adaptive_ece(same, torch.tensor([0, 1] * 5), 3) == pytest.approx(0.2, abs=1e-7)


def test_calibrated_and_certain_predictions():
    certain = torch.tensor([[1.0, 0.0]] * 30 + [[0.0, 1.0]] * 10).log()
    labels = torch.tensor([0] * 30 + [1] * 10)
    assert M.adaptive_ece(certain, labels) == M.classwise_ece(certain, labels) == 0
    assert M.adaptive_ece(certain, 1 - labels) == M.classwise_ece(certain, 1 - labels) == 1


@pytest.mark.parametrize("function", [M.adaptive_ece, M.classwise_ece])
def test_bad_input(function):
    log_probs, labels = random_predictions(5, 3)
    with pytest.raises(ValueError, match="num_bins must be a positive integer, got 0"):
        function(log_probs, labels, 0)
    with pytest.raises(ValueError, match=r"labels must lie in 0..2"):
        function(log_probs, labels + 2)
    with pytest.raises(ValueError, match="at least one example"):
        function(log_probs[:0], labels[:0])
    with pytest.raises(ValueError, match="at least 2 classes"):
        function(log_probs[:, :1] * 0, labels)
    assert math.isfinite(function(log_probs, labels))
