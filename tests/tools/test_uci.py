"""The tables of regression on UCI's sets."""

from tools import uci


def record():
    sets = {"num_train": 277, "num_test": 31, "features": 6, "hidden": 50, "steps": 10, "batch_size": 32, "splits": 20}
    means = {"adam": (-1.379, 0.2), "bsam": (-1.21, 0.05), "vogn": (None, None)}
    return {
        "config": {"sets": {"yacht": sets}, "methods": {name: {"title": name} for name in means}},
        "anchors": {"MC dropout": {"yacht": -1.25}},
        "summary": {
            "yacht": {
                name: {"log_likelihood": {"mean": m, "se": se}, "rmse": {"mean": 0.6, "se": 0.01}}
                for name, (m, se) in means.items()
            }
        },
    }


def test_log_likelihoods_have_the_anchor_and_the_best_in_bold():
    header, _, row = uci.TABLES["uci"](record()).splitlines()
    assert header == "| set | splits | adam | bsam | vogn | MC dropout |"
    assert row == "| yacht | 20 | -1.38<br>± 0.20 | **-1.21<br>± 0.05** | diverged | -1.250 |"


def test_errors_are_best_if_small():
    assert uci.TABLES["uci/rmse"](record()).splitlines()[-1].count("**0.600<br>± 0.010**") == 3


def test_sets():
    assert uci.TABLES["uci/sets"](record()).splitlines()[-1] == "| yacht | 277 | 31 | 6 | 50 | 10 | 32 | 20 |"


def test_an_error_is_never_shown_as_zero():
    found = record()
    found["summary"]["yacht"]["adam"]["rmse"] = {"mean": 0.00093, "se": 0.00002}
    found["summary"]["yacht"]["bsam"]["rmse"] = {"mean": -2.95, "se": 0.004}
    row = uci.TABLES["uci/rmse"](found).splitlines()[-1]
    assert "0.00093<br>± 0.00002" in row
    assert "-2.950<br>± 0.004" in row
