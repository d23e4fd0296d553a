"""Tuning: every try of the grid on the validation part, one record, the best chosen; also after a kill."""

import dataclasses
import functools
import json
import re

import pytest
from typer.testing import CliRunner

import bsam
from bsam.experiments import evaluate as evaluation
from bsam.experiments.commands import app
from bsam.experiments.data import load
from bsam.experiments.paper.presets import preset
from bsam.experiments.recorded_runs import read_record
from bsam.experiments.reproduce.carry_out import stack_tasks
from bsam.experiments.reproduce.execute import execute
from bsam.experiments.reproduce.show import tuning_rows
from bsam.experiments.reproduce.tuning import TUNINGS, collect_tries, execute_tries, plan_tries, read_tuning
from tools.markdown import tuning_markdown
from tools.tables import render

pytestmark = pytest.mark.filterwarnings("ignore:after .* steps:UserWarning")  # the runs are short
GRID = """
base = "digits/bsam"
validation = 300
epochs = 2
seeds = 2

[[grid]]
lr = [0.001, 1.0]

[[grid]]
lr = [1.0]
schedule = ["cosine", "constant"]
"""


def write_grid(folder, text=GRID):
    path = folder / "tuning_small.toml"
    path.write_text(text)
    return path


def do_all(tuning, runs):
    for task in plan_tries(tuning, runs).tasks:
        execute_tries([task], lambda share: None, device="cpu")


def test_a_grid_is_all_combinations_and_each_once(tmp_path):
    tuning = read_tuning(str(write_grid(tmp_path)))
    assert [options for options, _ in tuning.tries] == [
        {"lr": 0.001},
        {"lr": 1.0},  # with "cosine", the preset's own schedule, it is the same
        {"lr": 1.0, "schedule": "constant"},
    ]
    for options, config in tuning.tries:
        whole = dataclasses.replace(preset("digits/bsam"), **options)
        assert config == dataclasses.replace(whole, validation=300, epochs=2, swag_interval=config.swag_interval)


def test_every_try_has_a_folder_of_its_own(tmp_path):
    tuning = read_tuning(str(write_grid(tmp_path, GRID.replace("[0.001, 1.0]", "[1e-30, 1e30, 1.0]"))))
    tasks = plan_tries(tuning, tmp_path).tasks
    assert len({task.folder for task in tasks}) == len({task.record for task in tasks}) == 2 * 4


def test_the_dtype_is_that_of_all_tries(tmp_path):
    tuning = dataclasses.replace(read_tuning(str(write_grid(tmp_path))), dtype="bfloat16")
    assert {config.precision for _, config in tuning.tries} == {"bfloat16"}
    assert all('precision="bfloat16"' in task.changes for task in plan_tries(tuning, tmp_path).tasks)


def test_the_schedule_shrinks_with_the_epochs():
    tuning = read_tuning("cifar10")
    first, config = tuning.tries[0]
    paper = preset("table1/cifar10/bsam")
    assert {name: getattr(paper, name) for name in first} == first  # the paper's settings are the first try
    factor = paper.epochs / tuning.epochs
    assert (config.epochs, config.validation) == (tuning.epochs, tuning.validation)
    assert config.milestones == tuple(round(milestone / factor) for milestone in paper.milestones)


def test_the_command_tries_all_and_writes_one_record(tmp_path):
    arguments = ["tune", write_grid(tmp_path), "--runs", tmp_path / "runs", "--out", tmp_path / "r" / "t.json"]
    arguments = [*map(str, arguments), "--jobs", "1", "--device", "cpu"]
    planned = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert "6 runs to do, 0 recorded" in re.sub(r"\s+", " ", planned.output)
    assert not (tmp_path / "runs").exists()
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "r" / "t.json").read_text())
    assert record["tries"][0]["settings"] == {"lr": 0.001}
    assert (record["base"], record["validation"], record["epochs"]) == ("digits/bsam", 300, 2)
    for each in record["tries"]:
        assert [seed["seed"] for seed in each["seeds"]] == [100, 101]
        assert each["nll"] == pytest.approx(sum(seed["nll"] for seed in each["seeds"]) / 2)
        assert each["config"]["validation"] == 300
    best = min(record["tries"], key=lambda each: each["nll"])
    assert record["chosen"] == {"settings": best["settings"], "nll": best["nll"]}
    assert best["settings"]["lr"] == 1.0
    assert record["environments"][0]["packages"]["torch"]
    assert "Chosen: settings = { lr = 1.0" in done.output
    again = CliRunner().invoke(app, arguments)
    assert "All 6 runs are recorded" in re.sub(r"\s+", " ", again.output)
    assert json.loads((tmp_path / "r" / "t.json").read_text()) == record


def test_the_test_part_is_never_looked_at(tmp_path, monkeypatch):
    blind = dataclasses.replace(load("digits", validation=300), test=None)
    monkeypatch.setattr(evaluation, "load", lambda *arguments, **options: blind)
    tuning = dataclasses.replace(read_tuning(str(write_grid(tmp_path))), seeds=1, grid=({"lr": [1.0]},))
    do_all(tuning, tmp_path / "runs")
    (record,) = (tmp_path / "runs").rglob("seed100.json")
    assert set(json.loads(record.read_text())["evaluations"]) == {"validation"}
    assert read_record(record).scale == "full"  # the preset, with the changes that the record names
    assert collect_tries(tuning, tmp_path / "runs", "c")["chosen"]["settings"] == {"lr": 1.0}


def test_what_is_left_goes_on(tmp_path):
    tuning = read_tuning(str(write_grid(tmp_path)))
    first, *_ = plan_tries(tuning, tmp_path).tasks
    execute([first], lambda share: None, device="cpu")
    plan = plan_tries(tuning, tmp_path)
    assert (len(plan.tasks), plan.recorded) == (5, (first,))
    with pytest.raises(ValueError, match="5 tries are not done: go on with `bsam tune"):
        collect_tries(tuning, tmp_path, "bsam tune small")


def test_a_try_has_the_temperature_that_suits_it(tmp_path):
    text = GRID.replace("seeds = 2", "seeds = 2\ntemperatures = [0.0, 1.0, 30.0]")
    tuning = dataclasses.replace(read_tuning(str(write_grid(tmp_path, text))), grid=({"lr": [1.0]},))
    runs = tmp_path / "runs"
    do_all(dataclasses.replace(tuning, temperatures=()), runs)
    assert len(plan_tries(tuning, runs).tasks) == 2  # trained, but not evaluated with the others
    checkpoints = {path: path.stat().st_mtime_ns for path in runs.rglob("checkpoint.safetensors")}
    do_all(tuning, runs)
    assert {path: path.stat().st_mtime_ns for path in checkpoints} == checkpoints
    (found,) = collect_tries(tuning, runs, "c")["tries"]
    rated = {float(t): nll for t, nll in found["nll_by_temperature"].items()}
    assert rated.keys() == {0.0, 1.0, 30.0}
    best = min(rated, key=rated.get)
    assert best != 30.0
    assert found["nll"] == rated[best] < rated[30.0]
    assert found["settings"] == ({"lr": 1.0} if best == 1.0 else {"lr": 1.0, "temperature": best})
    assert found["config"]["temperature"] == best
    (plain,) = collect_tries(dataclasses.replace(tuning, temperatures=()), runs, "c")["tries"]
    assert plain["nll"] == rated[1.0]
    assert "nll_by_temperature" not in plain


@pytest.mark.parametrize("values", [[1e30], [1e30, 1.0]])
def test_what_diverges_is_recorded_and_never_chosen(values, tmp_path):
    tuning = dataclasses.replace(read_tuning(str(write_grid(tmp_path))), seeds=1, grid=({"lr": values},))
    do_all(tuning, tmp_path / "runs")
    assert plan_tries(tuning, tmp_path / "runs").tasks == ()
    record = collect_tries(tuning, tmp_path / "runs", "c")
    assert "not finite" in record["tries"][0]["seeds"][0]["diverged"]
    assert record["chosen"] is None if len(values) == 1 else record["chosen"]["settings"] == {"lr": 1.0}
    assert tuning_rows(record)[-1] == ("lr = 1e+30", ["diverged"] * 4)


def test_tries_that_are_trained_together_are_tries_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(bsam, "TrainStep", functools.partial(bsam.TrainStep, compile=False))
    tuning = dataclasses.replace(read_tuning(str(write_grid(tmp_path))), grid=({"lr": [0.1, 1e30, 1.0]},))
    (tasks,) = stack_tasks(plan_tries(tuning, tmp_path / "together").tasks, 8)
    assert len(tasks) == 6
    execute_tries(tasks, lambda share: None, device="cpu")
    do_all(tuning, tmp_path / "alone")
    together, alone = (collect_tries(tuning, tmp_path / where, "c")["tries"] for where in ("together", "alone"))
    for ours, theirs in zip(together, alone, strict=True):
        assert ours["settings"] == theirs["settings"]
        assert ours["nll"] == pytest.approx(theirs["nll"], rel=1e-3)
    assert [seed["seed"] for seed in together[1]["seeds"] if "not finite" in seed["diverged"]] == [100, 101]


def test_the_record_is_a_table_of_the_docs(tmp_path):
    assert render("tuning_cifar10", tmp_path) == "Not recorded yet: `bsam tune cifar10`."
    seed = {"seed": 100, "accuracy": 0.9, "nll": 0.4, "ece": 0.02, "auroc": 0.9}
    tries = [
        {"settings": {"lr": 0.1}, "nll": 0.4, "seeds": [seed]},
        {"settings": {"lr": 0.3}, "nll": 0.3, "seeds": [seed | {"nll": 0.3}]},
        {"settings": {"lr": 9.0}, "nll": None, "seeds": [{"seed": 100, "diverged": "x"}]},
    ]
    record = {"base": "b", "rule": "the lowest NLL", "validation": 5000, "epochs": 60, "tries": tries}
    record["chosen"] = {"settings": {"lr": 0.3}, "nll": 0.3}
    (tmp_path / "tuning_cifar10.json").write_text(json.dumps(record))
    shown = render("tuning_cifar10", tmp_path)
    assert shown == tuning_markdown(record)
    assert shown.startswith("3 settings, each with 60 epochs, 1 seed, rated on 5,000 training examples")
    assert [line.split(" | ")[0] for line in shown.splitlines()[4:]] == ["| **lr = 0.3**", "| lr = 0.1", "| lr = 9.0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GRID.replace("validation = 300", ""), "the key 'validation' is missing"),
        (GRID.replace("epochs = 2", "epochs = 0"), "must be at least 1"),
        (GRID.replace("seeds = 2", "seeds = 2\njobs = 3"), "unknown key 'jobs': there are base, validation"),
        (GRID.replace("seeds = 2", "seeds = 2\ntemperatures = [-1.0]"), "temperature=-1.0 must be"),
        (GRID.replace("schedule =", "shedule ="), "did you mean 'schedule'"),
        (GRID.replace("lr = [0.001, 1.0]", "lr = ['fast']"), "lr='fast' must be a finite number"),
        (GRID.replace("lr = [0.001, 1.0]", "lr = 0.3"), r"lr=0.3 must be a list, like \[0.3\]"),
        (GRID.replace("schedule =", "splits = [1000] #"), "splits=1000 is more than the"),
        (GRID.replace("lr = [0.001, 1.0]", "lr = [-1.0]"), "lr=-1.0 must be a finite number >= 0"),
        (GRID.replace("validation = 300", "validation = 2000"), "validation=2000 must be from 0 to 996"),
        (GRID.replace("digits/bsam", "digits/bsma"), "there is no preset 'digits/bsma'"),
        (GRID.replace("[0.001, 1.0]", "[]").partition("\n\n[[grid]]\nlr = [1.0]")[0], "the grid is empty"),
    ],
)
def test_bad_grids_are_named(text, message, tmp_path):
    path = write_grid(tmp_path, text)
    with pytest.raises(ValueError, match=f"{path}: .*{message}"):
        read_tuning(str(path))


def test_unknown_grids_are_refused(tmp_path):
    assert list(TUNINGS) == ["cifar10"]
    with pytest.raises(ValueError, match="there is no grid 'mnist': choose one of cifar10, or name a TOML file"):
        read_tuning("mnist")
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none\.toml"):
        read_tuning(str(tmp_path / "none.toml"))
