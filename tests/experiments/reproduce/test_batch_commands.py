"""The commands: a tiny block from plan to table, twice; what they refuse."""

import dataclasses
import json
import re

import pytest
from typer.testing import CliRunner

from bsam.experiments.commands import app
from bsam.experiments.comparison import compare
from bsam.experiments.reproduce import scales, studies
from bsam.experiments.reproduce.scales import scaled
from bsam.experiments.runs import Run
from bsam.experiments.stacks import Stack
from bsam.files import locked
from tests.experiments.data.test_uci import write_set


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Options that keep everything below `tmp_path`; three epochs are enough here."""
    monkeypatch.setattr(scales, "_TINY_EPOCHS", 3)
    monkeypatch.chdir(tmp_path)
    return ["--scale", "tiny", "--seeds", 1, "--jobs", 1, "--records", tmp_path / "records"]


def test_a_block_is_planned_run_recorded_compared_and_not_run_again(places, tmp_path):
    block = ["reproduce", "table3", "--block", "mnist", *places]
    planned = invoke(*block, "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert "2 runs to do, 0 recorded" in planned.output
    assert " timed" in planned.output
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "records").exists()

    done = invoke(*block)
    assert done.exit_code == 0, done.output
    shown = re.sub(r"\s+", " ", done.output)
    assert "table3: The effect of Gaussian sampling. MLP on MNIST" in shown
    assert "bSAM w/o noise" in shown
    assert "1 × 3 epochs" in shown
    assert "98.67 (0.04)" in shown
    assert "reduced" in shown
    assert "embedded digits" in shown
    assert "table3. Of 32 printed numbers: 0 equal, 0 better, 0 worse, 0 open, 8 reduced, 24 not run." in shown
    assert "Bold: the best, or not significantly worse (Welch, 5%)" in shown
    records = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "records").rglob("*.json"))
    assert records == ["records/table3/mnist/bsam-no-noise/seed0.json", "records/table6/mnist/bsam/seed0.json"]
    content = json.loads((tmp_path / records[0]).read_text())
    assert content["config"]["sample_noise"] is False
    row = compare("table3", tmp_path / "records").blocks[0].rows[0]
    assert row.cells[0].values == (100 * content["evaluations"]["test"]["32"]["accuracy"],)
    assert re.search(rf"\b{row.cells[0].mean:.2f} +(?!\()", done.output)  # one seed has no standard deviation

    times = [(tmp_path / path).stat().st_mtime_ns for path in records]
    again = invoke(*block)
    assert "All 2 runs are recorded" in re.sub(r"\s+", " ", again.output)
    assert re.search(rf"\b{row.cells[0].mean:.2f} +(?!\()", again.output)
    assert [(tmp_path / path).stat().st_mtime_ns for path in records] == times

    (tmp_path / records[0]).unlink()  # trained all the same
    left = re.sub(r"\s+", " ", invoke(*block, "--dry-run").output)
    assert "1 runs to do, 1 recorded; about 0.0 s of training" in left


def test_an_ablation_leaves_numbers_a_figure_and_a_table(places, tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "_COUNTS", (0, 1, 4))
    done = invoke("ablate", "samples", *places)
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "records" / "ablate_samples.json").read_text())
    assert (record["what"], record["scale"]) == ("samples", "tiny")
    assert record["command"] == "bsam ablate samples --scale tiny --seeds 1"
    assert record["series"][0]["x"] == [0, 1, 4]
    assert (tmp_path / "records" / "ablate_samples.png").stat().st_size > 10_000
    mean, sd = record["series"][0]["metrics"]["nll"][2]
    assert sd is None
    assert re.search(rf"\b{mean:.3f} +(?!\()", done.output)


def test_a_failure_is_shown_and_is_the_exit_status(places, tmp_path):
    config = dataclasses.replace(scaled("table6/mnist/sgd", "tiny"), lr=0.5)
    run = Run(tmp_path / "runs/tiny/table6/mnist/sgd/seed0", config, 0, "table6/mnist/sgd")
    Stack.start([run], device="cpu")
    done = invoke("reproduce", "table6", "--block", "mnist", "--methods", "sgd", *places)
    assert done.exit_code == 1
    shown = re.sub(r"\s+", " ", done.output)
    assert "table6/mnist/sgd seed 0: runs/tiny/table6/mnist/sgd/seed0 holds a run with other settings" in shown
    assert "not run" in shown


def test_a_run_that_another_process_is_at_is_left_to_it(places, tmp_path):
    """The lock is held as a worker of another machine holds it; the other run of the block is done."""
    block = ["reproduce", "table3", "--block", "mnist", *places]
    busy = tmp_path / "runs/tiny/table6/mnist/bsam/.seed0.lock"
    busy.parent.mkdir(parents=True)
    with locked(busy):
        done = invoke(*block)
    assert done.exit_code == 0, done.output
    shown = re.sub(r"\s+", " ", done.output)
    assert "Left to other processes, which are at them: table6/mnist/bsam seed 0. When they are done, the" in shown
    records = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "records").rglob("*.json"))
    assert records == ["records/table3/mnist/bsam-no-noise/seed0.json"]
    assert "1 runs to do, 1 recorded" in re.sub(r"\s+", " ", invoke(*block, "--dry-run").output)


def test_a_folder_that_a_kill_left_with_empty_settings_is_used(places, tmp_path):
    folder = tmp_path / "runs/tiny/table6/mnist/sgd/seed0"
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    done = invoke("reproduce", "table6", "--block", "mnist", "--methods", "sgd", *places)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "records/table6/mnist/sgd/seed0.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "table7"], "there is no table 'table7'"),
        (["reproduce", "table1", "--block", "mnist"], "table1 has no such block"),
        (["reproduce", "table1", "--methods", "sgd,sdg"], "--methods sdg"),
        (["reproduce", "all", "--block", "mnist"], "choose within one table"),
        (["sweep", "lr"], "there is no sweep of 'lr': write rho"),
        (["sweep", "rho", "--on", "spark"], "--on spark: write ray for this machine, or ray://HOST:PORT for a cluster"),
        (["sweep", "rho", "--on", "ray://host:port"], "--on ray://host:port: write ray for this machine"),
        (["sweep", "rho", "--storage", "s3://runs"], "--storage, --cores and --gpus are for Ray: write also --on ray"),
        (["ablate", "rho"], "choose one of noise, samples, splits, curvature"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments, "--scale", "tiny")
    assert result.exit_code == 1
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_help_teaches():
    assert "bsam reproduce all --scale tiny" in invoke("reproduce", "--help").output
    assert "bsam sweep rho --scale tiny" in invoke("sweep", "--help").output
    assert "bsam ablate splits --scale tiny" in invoke("ablate", "--help").output
    assert invoke("reproduce", "table1", "--scale", "small").exit_code == 2


@pytest.mark.filterwarnings("ignore:after .* steps .* of the precision")
def test_uci_is_a_study_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_set(tmp_path / "data", rows=60)
    command = [
        "reproduce",
        "uci",
        "--data",
        tmp_path / "data",
        "--scale",
        "tiny",
        "--block",
        "yacht",
        "--methods",
        "adam",
    ]
    assert "1 of 1 sets and methods are to be run" in invoke(*command, "--dry-run").output
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    assert re.search(r"yacht +Adam +log-likelihood", done.output)
    assert (tmp_path / "runs" / "uci" / "part.json").exists()  # a part does not replace the record of everything
    assert "0 of 1" in invoke(*command, "--dry-run").output
    one = invoke(*command, "--seeds", 1, "--records", tmp_path / "records")
    assert re.search(r"log-likelihood +-?\d+\.\d+$", one.output, re.MULTILINE)  # no deviation
    assert "regression yacht adam: 1 of 1" in one.output
    assert (tmp_path / "records" / "part.json").exists()
    for wrong, message in (
        (["reproduce", "uci", "table1"], "uci is a study of its own"),
        (["reproduce", "uci", "--scale", "reduced"], "no reduced scale"),
        (["reproduce", "uci", "--first-seed", "3"], "leave out --suite, --on, --device and --first-seed"),
        (["reproduce", "uci", "--block", "cars"], "there is no UCI set 'cars'"),
    ):
        assert message in str(invoke(*wrong).exception)
