"""What doubt is worth, from records: methods, pairs at the price of bSAM, and ensembles."""

import json

from bsam.experiments.doubt_table import COLUMNS, doubt_rows, score_rows
from tests.experiments.reproduce.records import write_record

KINDS = ("fog", "snow")


def suites(value, samples="32", corrupted="8"):
    """Numbers of all suites, in which every number is `value`; corruptions take fewer samples."""
    score = {"auroc": value, "aupr_known": value, "aupr_unknown": value, "fpr_95": value}
    scores = {"confidence": score, "entropy": score, "energy": score}
    sets = {"cifar100": "near", "tinyimagenet": "near", "mnist": "far", "fashionmnist": "far"}
    metrics = {"accuracy": value, "nll": value, "ece": value}
    rejection = {"area": value, "accuracy_80": value, "accuracy_90": value, "accuracy_95": value}
    histogram = [1] * 20
    return {
        "rejection": {samples: {"scores": {"confidence": rejection}, "risk": [value] * 40}},
        "unknown": {
            samples: {
                "known": {"num_examples": 20, "histogram": histogram},
                "sets": {
                    name: {"kind": kind, "scores": scores, "num_examples": 20, "histogram": histogram}
                    for name, kind in sets.items()
                },
            }
        },
        "corruptions": {corrupted: {"mean": metrics, "kinds": {k: {m: [value] * 5 for m in metrics} for k in KINDS}}},
        "human": {samples: {"cross_entropy": value, "kl": value}},
    }


def write_all(folder):
    """Records of SGD and bSAM with suites, and of ensembles of SGD."""
    for method in ("sgd", "bsam"):
        for seed in (0, 5, 6):
            path = write_record(folder, f"table1/cifar10/{method}", seed)
            if seed:
                content = json.loads(path.read_text())
                path.write_text(json.dumps(content | {"suites": suites(0.5 + seed / 100)}))
    content = {"scale": "full", "members": 2, "pairs": [{"suites": suites(0.6)}, {"suites": suites(0.7)}]}
    (folder / "table1/cifar10/sgd/pairs.json").write_text(json.dumps(content))
    content = {"scale": "full", "members": 5, "suites": suites(0.8)}
    content |= {"evaluations": {"test": {}}, "config": json.loads(path.read_text())["config"]}
    (folder / "table1/cifar10/sgd/ensemble.json").write_text(json.dumps(content))


def test_rows_have_their_cost_and_their_numbers(tmp_path):
    assert doubt_rows(tmp_path) == []
    write_all(tmp_path)
    rows = {row.label: row for row in doubt_rows(tmp_path)}
    assert {label: row.gradients for label, row in rows.items()} == {"SGD": 1, "bSAM": 2, "2 × SGD": 2, "5 × SGD": 5}
    assert rows["SGD"].about == "2 seeds"  # seed 0 has no suites
    cells = {column.title: rows["SGD"].cell(column) for column in COLUMNS}
    assert cells["near AUROC ↑"] == "55.50 (0.71)"
    assert cells["people ↓"] == "0.5550 (0.0071)"
    assert rows["5 × SGD"].cell(COLUMNS[0]) == "80.00"
    assert rows["2 × SGD"].cell(COLUMNS[3]) == "0.650 (0.071)"


def test_a_score_that_a_method_lacks_is_a_dash(tmp_path):
    write_all(tmp_path)
    heads, (first, *_) = score_rows(doubt_rows(tmp_path))
    shown = dict(zip(heads, first[1:], strict=True))
    assert shown["near, mutual information"] == "-"
    assert shown["far, energy"] == "55.50"
