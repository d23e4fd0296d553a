"""Rejection: literal definitions, ties, intervals, and what a threshold promises."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import binom

from bsam import metrics as M
from bsam.metrics.rejection import _fewest, _probability_of_fewer
from bsam.metrics.scores import Score
from tests.metrics.data import random_predictions, with_everything

NAMES = M.RejectionSummary.names


def literal(log_probs, labels):
    """Area and accuracies, label by label in the order of doubt; without ties."""
    rows = sorted(
        zip((1 - log_probs.max(1).values.exp()).tolist(), (log_probs.argmax(1) != labels).tolist(), strict=True)
    )
    n, errors, risks = len(rows), 0, []
    for k, (_, wrong) in enumerate(rows, 1):
        errors += wrong
        risks.append(errors / k)
    accepted = [math.ceil(round(n * c / 100, 6)) for c in (80, 90, 95)]
    return [sum(risks) / n, *(1 - risks[k - 1] for k in accepted)]


def numbers(summary):
    return [getattr(summary, name) for name in NAMES]


@pytest.mark.parametrize("n", [1, 2, 19, 20, 100, 333])
def test_the_literal_definition(n):
    data = random_predictions(n, 5, seed=n)
    assert numbers(M.rate_rejection(data, num_bootstrap=0)) == pytest.approx(literal(*data), abs=1e-13)


def test_ties_are_the_mean_over_all_orders():
    log_probs, labels = random_predictions(40, 3, levels=1)
    found = numbers(M.rate_rejection((log_probs, labels), num_bootstrap=0))
    g, total = torch.Generator().manual_seed(0), torch.zeros(4, dtype=torch.float64)
    for _ in range(3000):
        order = torch.randperm(40, generator=g)
        doubt, wrong = 1 - log_probs[order].max(1).values.exp(), log_probs[order].argmax(1) != labels[order]
        rank = doubt.mul(1e9).round().argsort(stable=True)
        risks = wrong[rank].double().cumsum(0) / torch.arange(1, 41)
        total += torch.tensor([risks.mean(), 1 - risks[31], 1 - risks[35], 1 - risks[37]])
    assert found == pytest.approx((total / 3000).tolist(), abs=0.005)
    same = torch.tensor([[0.6, 0.4]], dtype=torch.float64).log().expand(8, 2)
    tied = M.rate_rejection((same, torch.tensor([0, 1] * 4)), num_bootstrap=0)
    assert numbers(tied) == pytest.approx([0.5] * 4)


@pytest.mark.parametrize("score", Score.__args__)
def test_the_curve(score):
    p = with_everything(50, 4)
    curve = M.risk_coverage(p, score)
    doubt, wrong = M.doubt(p, score), p.log_probs.argmax(1) != p.labels
    for i in range(0, 50, 7):
        accepted = doubt <= curve.threshold[i]
        assert curve.coverage[i] == pytest.approx(float(accepted.double().mean()))
        assert curve.risk[i] == pytest.approx(float(wrong[accepted].double().mean()))
    assert curve.coverage[-1] == 1
    assert M.rate_rejection(p, score, num_bootstrap=0).area == pytest.approx(float(curve.risk.mean()))  # no ties


def test_several_labels_per_example_are_resampled_together():
    log_probs, labels = random_predictions(60, 3)
    together = SimpleNamespace(log_probs=log_probs.reshape(20, 3, 3), labels=labels.reshape(20, 3), ignore_index=-1)
    found = M.rate_rejection(together, num_bootstrap=30)
    assert numbers(found) == pytest.approx(numbers(M.rate_rejection((log_probs, labels), num_bootstrap=0)))
    assert found.num_examples == 60
    g = torch.Generator().manual_seed(0)
    index = torch.randint(20, (30, 20), generator=g)
    areas = sorted(M.rate_rejection((together.log_probs[i], together.labels[i]), num_bootstrap=0).area for i in index)
    assert found.intervals["area"] == pytest.approx((areas[1], areas[28]), abs=1e-12)
    marked = labels.clone()
    marked[::4] = -1
    ignoring = SimpleNamespace(log_probs=log_probs, labels=marked, ignore_index=-1)
    kept = marked != -1
    assert M.rate_rejection(ignoring) == M.rate_rejection((log_probs[kept], labels[kept]))


def test_all_right_and_all_wrong():
    log_probs, _ = random_predictions(30)
    right = M.rate_rejection((log_probs, log_probs.argmax(1)), num_bootstrap=20)
    assert numbers(right) == [0, 1, 1, 1]
    assert right.intervals["area"] == (0, 0)
    wrong = M.rate_rejection((log_probs, log_probs.argmin(1)), num_bootstrap=0)
    assert numbers(wrong) == pytest.approx([1, 0, 0, 0])
    assert json.loads(json.dumps(right.as_dict()))["area"] == 0


# ---------------------------------------------------------------- the threshold for a wanted risk


def population(n, seed):
    """Two classes whose probability of an error is the doubt itself, uniform between 0 and 0.5."""
    g = torch.Generator().manual_seed(seed)
    doubt = 0.5 * torch.rand(n, generator=g, dtype=torch.float64)
    labels = (torch.rand(n, generator=g, dtype=torch.float64) < doubt).long()
    return torch.stack([1 - doubt, doubt], dim=1).log(), labels


def test_the_binomial_is_scipys():
    for k, e, risk in [(10, 0, 0.1), (100, 7, 0.05), (5000, 300, 0.07), (3, 3, 0.5), (0, 0, 0.3)]:
        assert _probability_of_fewer(k, e, risk) == pytest.approx(binom.cdf(e, k, risk), rel=1e-9)
    n = _fewest(0.05, 0.95)
    assert binom.cdf(0, n, 0.05) <= 0.05 / 20 < binom.cdf(0, n - 1, 0.05)


def test_the_guarantee_holds():
    """The risk of accepting doubt < t is t / 2, so that a threshold above 0.2 breaks the promise of 10%."""
    broken, coverages = 0, []
    for seed in range(60):
        rule = M.threshold_for_risk(population(3000, seed), 0.1, level=0.8)
        broken += rule.threshold > 0.2
        coverages.append(rule.coverage)
    assert broken <= 0.2 * 60
    assert sum(coverages) / 60 > 0.2  # of at most 0.4
    without = [M.threshold_for_risk(population(200, seed), 0.1, level=None) for seed in range(40)]
    assert all(rule.found_risk <= 0.1 for rule in without if rule.coverage > 0)
    assert sum(rule.threshold > 0.2 for rule in without) >= 20  # nothing is promised


def test_what_is_accepted():
    data = population(2000, 0)
    rule = M.threshold_for_risk(data, 0.1)
    accepted = rule.accepts(data)
    assert float(accepted.double().mean()) == rule.coverage
    wrong = data[0].argmax(1) != data[1]
    assert float(wrong[accepted].double().mean()) == pytest.approx(rule.found_risk)
    assert rule.found_risk < 0.1
    assert str(rule).startswith(f"Accept predictions whose largest probability is above {1 - rule.threshold:.4g}. Of ")
    assert "right for at least 95% of all sets" in str(rule)
    entropy = M.threshold_for_risk(data, 0.1, "entropy", level=None)
    assert f"whose entropy is below {entropy.threshold:.4g}" in str(entropy)
    assert "nothing is guaranteed" in str(entropy)
    best = M.risk_coverage(data, "entropy")
    assert entropy.coverage == pytest.approx(float(best.coverage[best.risk <= 0.1].max()))


def test_a_rule_of_a_very_sure_network_can_be_followed():
    """Without this, the sentence said "above 1", which no probability is."""
    doubt = torch.logspace(-9, -4, 600, dtype=torch.float64)
    log_probs = torch.stack([torch.log1p(-doubt), doubt.log()], dim=1)
    rule = M.threshold_for_risk((log_probs, (doubt > 1e-6).long()), 0.05)
    assert 1e-8 < rule.threshold < 1e-5
    assert str(rule).startswith(f"Accept predictions whose largest probability is above 1 - {rule.threshold:.4g}. Of ")


def test_a_rule_does_not_take_probabilities_or_logits_for_certainty():
    """Their doubt would be below every threshold, so that all of them were accepted."""
    log_probs, labels = population(2000, 0)
    rule = M.threshold_for_risk((log_probs, labels), 0.1)
    for wrong, cure in ((log_probs.exp(), "probs.log()"), (log_probs + 5, "log_softmax")):
        with pytest.raises(ValueError, match=rf"must be normalised.*write {re.escape(cure)}"):
            rule.accepts((wrong, labels))


def test_everything_or_nothing():
    log_probs, labels = population(1000, 0)
    everything = M.threshold_for_risk((log_probs, labels), 0.5)
    assert (everything.threshold, everything.coverage) == (math.inf, 1)
    assert str(everything).startswith("Accept all predictions. ")
    nothing = M.threshold_for_risk((log_probs[:50], labels[:50]), 0.01)
    assert (nothing.threshold, nothing.coverage) == (-math.inf, 0)
    assert math.isnan(nothing.found_risk)
    assert not nothing.accepts((log_probs, labels)).any()
    assert "reject everything. This takes at least 597 accepted examples without an error" in str(nothing)
    hopeless = M.threshold_for_risk((log_probs, log_probs.argmin(1)), 0.5, level=None)
    assert str(hopeless) == "No threshold has a risk that low on these 1000 examples: reject everything."


def test_bad_input():
    log_probs, labels = random_predictions(6, 3)
    for risk in (0, 1, -0.1, "2%", math.nan):
        with pytest.raises(ValueError, match=r"must lie between 0 and 1; write 0\.02"):
            M.threshold_for_risk((log_probs, labels), risk)
    with pytest.raises(ValueError, match="level must lie between 0 and 1, got 95"):
        M.threshold_for_risk((log_probs, labels), 0.1, level=95)
    with pytest.raises(ValueError, match="each example must have one label"):
        M.threshold_for_risk((log_probs.reshape(2, 3, 3), labels.reshape(2, 3)), 0.1)
    for function in (M.rate_rejection, M.risk_coverage, lambda p: M.threshold_for_risk(p, 0.1)):
        with pytest.raises(ValueError, match="at least one example"):
            function((log_probs[:0], labels[:0]))
        with pytest.raises(ValueError, match="no labels"):
            function((log_probs, None))
        with pytest.raises(ValueError, match=r"labels must lie in 0\.\.2"):
            function((log_probs, labels + 3))
    nan = SimpleNamespace(log_probs=log_probs, labels=labels, energy=torch.full((6,), math.nan))
    with pytest.raises(ValueError, match="energy of doubt must be a number"):
        M.rate_rejection(nan, "energy")
