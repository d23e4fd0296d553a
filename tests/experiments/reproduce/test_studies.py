"""Sweeps and ablations: which runs they need, what they write, what is drawn."""

import json

import pytest

from bsam.experiments.paper.results import METRICS, paper_tables
from bsam.experiments.reproduce.plan import settle
from bsam.experiments.reproduce.studies import ABLATIONS, collect, refuse_to_replace, sweep_rho
from tests.experiments.reproduce.records import write_record
from tools.markdown import study_markdown

STUDIES = {"rho": sweep_rho("full"), **{name: make() for name, make in ABLATIONS.items()}}


def names(study, scale="full"):
    return [settle(want, scale)[0] for want in study.wanted]


def test_rho_is_swept_and_shares_the_runs_of_table_1():
    settled = [settle(want, "full") for want in STUDIES["rho"].wanted]
    assert len(settled) == len({name for name, _ in settled}) == 18
    shared = [name for name, _ in settled if not name.startswith("sweep/")]
    assert shared == [f"table1/cifar100/{method}" for method in ("sam-sgd", "sam-adam", "bsam")]
    points = STUDIES["rho"].series["bSAM, at 100 ρ"]
    for point in points:
        assert settle(point.wanted, "full")[1].rho == pytest.approx(point.x / 100)
    for scale in ("reduced", "tiny"):
        assert len(set(names(sweep_rho(scale), scale))) == 18


def test_ablations_are_those_of_the_papers_tables():
    for study, table in (("noise", "table3"), ("splits", "table5")):
        rows = [row for block in paper_tables()[table].blocks for row in block.rows]
        assert {want.preset for want in STUDIES[study].wanted} == {row.preset for row in rows}
    counts = [point.samples for point in STUDIES["samples"].series["bSAM"]]
    assert {0, 8, 64, 512, 2048} <= set(counts)
    assert set(names(STUDIES["samples"])) == {"table1/cifar10/bsam"}


def test_the_curvature_shares_the_runs_of_table_5():
    settled = dict(settle(want, "full") for want in STUDIES["curvature"].wanted)
    assert len(settled) == 10
    assert sum(config.curvature == "abs_mean" for config in settled.values()) == 5
    assert sum(name.startswith("ablate/curvature/abs_mean") for name in settled) == 5


def test_a_study_is_collected_from_records(tmp_path):
    study = STUDIES["splits"]
    for m, accuracy in ((1, 0.6), (4, 0.7)):
        for seed in range(2):
            write_record(tmp_path, f"table5/cifar100/bsam-{m}", seed, accuracy=accuracy + seed / 10)
    write_record(tmp_path, "table1/cifar100/sam-sgd", 0, nll=1.5)  # is m = 8
    record = collect(study, "full", tmp_path, "bsam ablate splits")
    assert set(record) == {"what", "title", "x", "scale", "series", "environment", "command"}
    bsam, sam = record["series"]
    assert (bsam["label"], bsam["x"], bsam["seeds"]) == ("bSAM", [1, 4], [2, 2])
    assert set(bsam["metrics"]) == set(METRICS)
    assert bsam["metrics"]["accuracy"] == [pytest.approx([65.0, 50**0.5]), pytest.approx([75.0, 50**0.5])]
    assert (sam["x"], sam["metrics"]["nll"]) == ([8], [[1.5, None]])
    assert json.loads(json.dumps(record)) == record
    assert "| SAM-SGD | 8 | 90.00 | 1.500 |" in study_markdown(record)


def test_a_fuller_study_is_not_replaced(tmp_path):
    path = tmp_path / "sweep_rho.json"
    refuse_to_replace(path, "tiny")
    path.write_text('{"scale": "reduced"}')
    refuse_to_replace(path, "reduced")
    refuse_to_replace(path, "full")
    with pytest.raises(FileExistsError, match="holds this study at the reduced scale: choose another folder"):
        refuse_to_replace(path, "tiny")
