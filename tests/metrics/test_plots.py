"""Diagrams: what is drawn is what is computed."""

import sys
from types import SimpleNamespace

import pytest
import torch

from bsam import metrics as M
from tests.metrics.data import random_predictions, with_everything


def test_reliability_diagram(plt):
    log_probs, labels = random_predictions(500)
    table = M.reliability(log_probs, labels, num_bins=12)
    filled = table.count > 0
    ax = M.reliability_diagram((log_probs, labels), num_bins=12)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("confidence", "accuracy")
    bars, gaps = ax.containers
    assert [bar.get_height() for bar in bars] == table.accuracy[filled].tolist()
    tops = [gap.get_y() + gap.get_height() for gap in gaps]
    assert tops == pytest.approx(torch.maximum(table.accuracy, table.confidence)[filled].tolist())
    assert [bar.get_x() * 12 for bar in bars] == pytest.approx(filled.nonzero().flatten().tolist())
    (histogram,) = ax.child_axes
    shares = [bar.get_height() for bar in histogram.containers[0]]
    assert shares == pytest.approx((table.count[filled] / 500).tolist())
    assert f"ECE {M.ece(log_probs, labels, 12):.4f}" in ax.get_legend().get_title().get_text()
    assert [line.get_xydata().tolist() for line in ax.lines] == [[[0, 0], [1, 1]]]
    ax.figure.canvas.draw()


def test_reliability_diagram_of_a_table(plt):
    log_probs, labels = random_predictions(500)
    table = M.reliability(log_probs, labels, num_bins=12)
    ours, theirs = (M.reliability_diagram(x, num_bins=12) for x in (table, (log_probs, labels)))
    for mine, other in zip(ours.patches, theirs.patches, strict=True):
        assert mine.get_bbox().bounds == other.get_bbox().bounds
    assert ours.get_legend().get_title().get_text() == theirs.get_legend().get_title().get_text()


def test_reliability_diagram_on_given_axes(plt):
    fig, axes = plt.subplots(1, 2)
    log_probs, labels = random_predictions(50)
    predictions = SimpleNamespace(log_probs=log_probs, labels=labels)
    assert M.reliability_diagram(predictions, ax=axes[1]) is axes[1]
    assert not axes[0].containers
    fig.canvas.draw()


def test_reliability_diagram_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"which is missing: pip install matplotlib$"):
        M.reliability_diagram(random_predictions(5))


def test_risk_coverage_diagram(plt):
    named = {"one": random_predictions(200), "two": random_predictions(300, seed=1)}
    ax = M.risk_coverage_diagram(named)
    for line, data in zip(ax.lines, named.values(), strict=True):
        curve = M.risk_coverage(data)
        assert line.get_xdata().tolist() == curve.coverage.tolist()
        assert line.get_ydata().tolist() == curve.risk.tolist()
    said = [text.get_text() for text in ax.get_legend().get_texts()]
    assert said == [f"{n}, area {M.rate_rejection(d, num_bootstrap=0).area:.4f}" for n, d in named.items()]
    assert ax.get_legend().get_title().get_text() == "rejected by 1 - largest probability"
    (single,) = M.risk_coverage_diagram(with_everything(30), "energy").get_legend().get_texts()
    assert single.get_text().startswith("area 0.")
    log_probs, _ = named["one"]
    with pytest.raises(ValueError, match="predictions is empty"):
        M.risk_coverage_diagram({})
    perfect = M.risk_coverage_diagram((log_probs, log_probs.argmax(1)))
    assert perfect.get_ylim() == (0, 1)
    ax.figure.canvas.draw()


def test_unknown_diagram(plt):
    known, unknown = random_predictions(100), random_predictions(50, seed=1)
    ax = M.unknown_diagram(known, unknown, "entropy", num_bins=10)
    for container, data in zip(ax.containers, (known, unknown), strict=True):
        shares = torch.tensor([bar.get_height() for bar in container])
        both = torch.cat([M.doubt(d, "entropy") for d in (known, unknown)])
        counts = torch.histc(M.doubt(data, "entropy"), 10, float(both.min()), float(both.max()))
        torch.testing.assert_close(shares.double(), counts / len(data[1]))
    found = M.rate_unknown(known, unknown, "entropy", num_bootstrap=0)
    title = ax.get_legend().get_title().get_text()
    assert title == f"AUROC {found.auroc:.4f}, FPR at 95% {found.fpr_95:.4f}"
    threshold = ax.lines[0].get_xdata()[0]
    assert float((M.doubt(known, "entropy") <= threshold).double().mean()) == 0.95
    assert float((M.doubt(unknown, "entropy") <= threshold).double().mean()) == pytest.approx(found.fpr_95)
    ax.figure.canvas.draw()
    scores = M.unknown_diagram(torch.ones(3), torch.ones(2))
    assert scores.get_xlabel() == "scores"
    scores.figure.canvas.draw()


def test_quantile_diagram(plt):
    u = torch.rand(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64).square()
    p = SimpleNamespace(mean=u, targets=u, log_density=u, cdf=u)
    ax = M.quantile_diagram(p, num_levels=10)
    table = M.quantile_calibration(p, 10)
    assert ax.lines[0].get_ydata().tolist() == table.observed.tolist()
    assert ax.get_legend().get_title().get_text() == f"area between {table.error:.4f}"
    (histogram,) = ax.child_axes
    shares = [bar.get_height() for bar in histogram.containers[0]]
    assert shares == pytest.approx((torch.histc(u, 10, 0, 1) / 200).tolist())
    ax.figure.canvas.draw()


@pytest.mark.parametrize("name", ["risk_coverage_diagram", "unknown_diagram", "quantile_diagram"])
def test_diagrams_on_given_axes_and_without_matplotlib(plt, name, monkeypatch):
    arguments = {
        "risk_coverage_diagram": (random_predictions(50),),
        "unknown_diagram": (random_predictions(50), random_predictions(50, seed=1)),
        "quantile_diagram": (SimpleNamespace(cdf=torch.rand(50)),),
    }[name]
    _, axes = plt.subplots(1, 2)
    assert getattr(M, name)(*arguments, ax=axes[1]) is axes[1]
    assert not axes[0].lines
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=f"{name} needs matplotlib, which is missing"):
        getattr(M, name)(*arguments)
