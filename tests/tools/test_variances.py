"""The tables of pruning and of wrong labels."""

from tools import variances


def test_pruning_has_a_row_per_share():
    rows = [
        {"by": by, "keep": keep, "averaged": {"accuracy": accuracy, "nll": 1 - accuracy}}
        for by, accuracies in (("signal_to_noise", (0.9, 0.85)), ("magnitude", (0.9, 0.8)))
        for keep, accuracy in zip((1.0, 0.05), accuracies, strict=True)
    ]
    *_, last = variances.pruning_markdown({"rows": rows}).splitlines()
    assert last == "| 5% | 85.00% | 80.00% | 0.150 | 0.200 |"


def test_sensitivity_has_a_row_per_score():
    scores = {name: {"precision_at_5%": 0.5} for name in variances._SCORES}
    scores["loss"] = {"precision_at_5%": 0.875}
    header, _, first, *_ = variances.sensitivity_markdown({"epochs": [{"epoch": 5, "scores": scores}]}).splitlines()
    assert header == "| ordered by | after 5 epochs |"
    assert first == "| loss | 87.5% |"
