"""Suites of ensembles: the averaged predictions of the members, rated like those of one run."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

import bsam
from bsam.experiments.commands import app
from bsam.experiments.ensemble import average
from bsam.experiments.paper.presets import preset
from bsam.experiments.record import read_json
from bsam.experiments.recorded_runs import read_record
from bsam.experiments.reproduce.execute import execute
from bsam.experiments.reproduce.plan import Task


def test_an_ensemble_is_rated_by_its_average(digit_runs, tmp_path):
    runs = [digit_runs / "sgd0", digit_runs / "sgd1"]
    options = ["--suite", "shift", "--samples", "1", "--device", "cpu", "--out", str(tmp_path / "both")]
    result = CliRunner().invoke(app, ["evaluate", *map(str, runs), *options])
    assert result.exit_code == 0, result.exception
    numbers = read_json(tmp_path / "both" / "record.json")["suites"]["unknown"]["1"]["sets"]["photographs"]["scores"]
    files = ["predictions-test-1.safetensors", "suites/unknown-1/photographs.safetensors"]
    test, unknown = (average([bsam.Predictions.load(run / file) for run in runs]) for file in files)
    wanted = bsam.metrics.rate_unknown(test, unknown, "mutual_information", num_bootstrap=0)
    assert numbers["mutual_information"]["auroc"] == pytest.approx(wanted.auroc, rel=1e-5)  # two points disagree


def test_runs_that_end_together_leave_suites_of_their_ensemble_and_of_pairs(tmp_path):
    config = replace(preset("digits/sgd"), epochs=1, batch_size=200)
    tasks = [
        Task(
            name="table1/cifar10/sgd",
            preset="table1/cifar10/sgd",
            seed=seed,
            scale="full",
            config=config,
            changes=(),
            samples=(4,),
            folder=tmp_path / "runs" / "sgd" / f"seed{seed}",
            record=tmp_path / "records" / f"seed{seed}.json",
            suites=("rejection", "unknown"),
        )
        for seed in (5, 6, 7)
    ]
    for task in tasks:  # one by one: together they would be compiled
        execute([task], lambda share: None, device="cpu")
    execute(tasks, lambda share: None, device="cpu")
    record = read_record(tmp_path / "records" / "seed5.json")
    assert set(record.suites) == {"rejection", "unknown"}
    ensemble = read_json(tmp_path / "records" / "ensemble.json")
    assert ensemble["members"] == 3
    assert set(ensemble["suites"]) == {"rejection", "unknown"}
    pairs = read_json(tmp_path / "records" / "pairs.json")
    assert pairs["members"] == 2
    assert [pair["runs"] for pair in pairs["pairs"]] == [["seed5", "seed6"], ["seed6", "seed7"], ["seed7", "seed5"]]
    assert pairs["pairs"][0]["evaluations"]["test"]["4"]["nll"] > 0
    assert "4" in pairs["pairs"][2]["suites"]["unknown"]
    execute(tasks, lambda share: None, device="cpu")  # nothing is left to do, and nothing changes
    assert read_record(tmp_path / "records" / "seed5.json").suites == record.suites
