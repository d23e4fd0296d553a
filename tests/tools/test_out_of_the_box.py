"""The tables of the page "Out of the box" have the numbers of the record."""

import pytest

from bsam.experiments.record import write_json
from tools import out_of_the_box


def cell(accuracy, nll, ece, failures=0):
    numbers = {"accuracy": accuracy, "nll": nll, "ece": ece, "accuracy_regret": 1 - accuracy, "nll_regret": nll - 0.1}
    return {**numbers, "failures": failures, "runs": 6, "problems": 2}


RECORD = {
    "means": {
        "SGD defaults": cell(0.9, 0.2, 0.01),
        "BSAM defaults": cell(0.95, 0.15, None),
        "BSAM converted-sgd": cell(0.94, 0.16, 0.02, failures=1),
        "BSAM variant:lr 0.7": cell(0.5, 0.7, 0.02),
    },
    "summary": {
        "digits": {"SGD defaults": cell(0.9, 0.2, 0.01), "BSAM defaults": cell(0.95, 0.15, 0.0)},
        "wine": {"BSAM defaults": cell(0.6, 0.9, 0.0)},
    },
}


def test_means_have_a_row_per_optimizer_and_kind():
    lines = out_of_the_box.means_markdown(RECORD).splitlines()
    assert lines[2] == "| SGD | defaults | 0.100 | 0.100 | 0.010 | 0 of 6 | 2 |"
    assert lines[3] == "| bSAM | defaults | 0.050 | 0.050 | - | 0 of 6 | 2 |"
    assert lines[4] == "| bSAM | from SGD's | 0.060 | 0.060 | 0.020 | 1 of 6 | 2 |"
    assert lines[5].startswith("| bSAM | lr 0.7 | 0.500 ")


def test_problems_have_the_defaults_of_every_optimizer():
    lines = out_of_the_box.problems_markdown(RECORD).splitlines()
    assert lines[0] == "| problem | SGD | bSAM |"
    assert lines[2] == "| `digits` | 0.900 / 0.200 | 0.950 / 0.150 |"
    assert lines[3] == "| `wine` | - | 0.600 / 0.900 |"


def test_rates_have_a_row_per_rule():
    lines = out_of_the_box.rates_markdown({"means": {"AdamW, best rate": cell(0.9, 0.2, None)}}).splitlines()
    assert lines[2] == "| AdamW, best rate | 0.900 | 0.200 |"


def test_the_choice_has_the_rows_of_all_three_sets_and_counts_every_problem_once(tmp_path):
    fewer = {
        "means": {"BSAM defaults": cell(0.5, 0.5, 0.0)},
        "summary": {"deep": {"BSAM defaults": cell(0.5, 0.5, 0.0)}},
    }
    for name, record in (("choosing", RECORD), ("few_choosing", fewer), ("hard_choosing", fewer)):
        write_json(tmp_path / f"out_of_the_box_{name}.json", with_seeds(record))
    (row,) = out_of_the_box.choice_markdown(tmp_path).splitlines()[2:]
    cells = [each.strip() for each in row.strip("|").split("|")]
    assert cells[:2] == ["bSAM", "defaults"]
    assert float(cells[2]) == pytest.approx((0.05 + 0.4 + 0.5 + 0.5) / 4, abs=6e-4)
    assert float(cells[3]) == pytest.approx((0.05 + 0.8 + 0.4 + 0.4) / 4, abs=6e-4)
    assert cells[4:] == ["0.050", "0.400", "0.400", "0 of 12"]


def with_seeds(record):
    summary = {
        name: {row: {**each, "seeds": 3} for row, each in rows.items()} for name, rows in record["summary"].items()
    }
    return {**record, "summary": summary}
