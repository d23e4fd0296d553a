"""Search: Optuna proposes within the grid, bad tries are pruned, and many processes may ask at once."""

import dataclasses
import json
import re

import pytest
import torch
from typer.testing import CliRunner

from bsam.experiments import evaluate as evaluation
from bsam.experiments import stacks
from bsam.experiments.commands import app
from bsam.experiments.data import load
from bsam.experiments.record import read_json
from bsam.experiments.reproduce import search as search_module
from bsam.experiments.reproduce.search import Search, _tries, collect_search, propose, validation_nll, work_on_try
from bsam.experiments.reproduce.tuning import collect_tries, execute_tries, plan_tries, read_tuning
from bsam.experiments.runs import RunBusyError
from bsam.experiments.trainer import Trainer
from bsam.files import locked

optuna = pytest.importorskip("optuna")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore:after .* steps:UserWarning"),  # the runs are short
]
GRID = """
base = "digits/bsam"
validation = 300
epochs = 3
seeds = 1

[[grid]]
lr = [1e-5, 1.0]
schedule = ["cosine", "constant"]
"""


def write_grid(folder, text=GRID):
    path = folder / "small.toml"
    path.write_text(text)
    return path


def make_search(folder, count, **changes):
    tuning = dataclasses.replace(read_tuning(str(write_grid(folder))), **changes)
    search = Search(tuning, count, folder / "runs")
    search.folder.mkdir(parents=True)
    return search


def work(search, **options):
    work_on_try(0, lambda share: None, search=search, stacked=False, device="cpu", **options)


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Nine tries, one after the other, with a test part of zeros: the numbers of other tests do not depend on it."""
    search = make_search(tmp_path_factory.mktemp("search"), 9)
    data = load("digits", validation=300)
    blind = dataclasses.replace(data, test=tuple(map(torch.zeros_like, data.test)))
    with pytest.MonkeyPatch.context() as patch:
        for module in (evaluation, stacks):
            patch.setattr(module, "load", lambda *arguments, **options: blind)
        for _ in range(9):
            work(search)
        work(search)  # there are enough
    return search


def test_every_try_is_recorded_and_the_lowest_nll_is_chosen(searched):
    record = collect_search(searched, "bsam tune small --search 9")
    assert len(record["tries"]) == 9
    assert record["search"]["between"] == [{"lr": [1e-5, 1.0], "schedule": ["cosine", "constant"]}]
    best = min(record["tries"], key=lambda each: each["nll"])
    assert record["chosen"] == {"settings": best["settings"], "nll": best["nll"]}
    for each in record["tries"]:
        assert 1e-5 <= each["settings"]["lr"] <= 1.0
        assert each["settings"]["schedule"] in ("cosine", "constant")
    told = {trial.value for trial in searched.tried("COMPLETE")}
    assert told == {each["nll"] for each in record["tries"] if "nll" in each["seeds"][0]}


def test_bad_tries_are_pruned_after_a_third_of_their_epochs(searched):
    pruned = searched.tried("PRUNED")
    assert 0 < len(pruned) <= 5  # the first four are trained to their end
    assert min(trial.number for trial in pruned) >= 4
    seeds = [each["seeds"][0] for each in collect_search(searched, "c")["tries"]]
    for trial in pruned:
        assert {"epochs": 1, "nll": trial.intermediate_values[1]} in [seed.get("pruned") for seed in seeds]
    assert len(list(searched.runs.rglob("posterior.safetensors"))) == 9 - len(pruned)


def test_a_try_is_the_run_of_a_grid_with_its_settings(searched, tmp_path):
    """The rating in the middle does not disturb the training, and the test part has no say."""
    trial = searched.tried("COMPLETE")[0]
    tuning = searched.alone(trial)
    (task,) = plan_tries(tuning, tmp_path).tasks
    execute_tries([task], lambda share: None, device="cpu")
    (tried,) = collect_tries(tuning, tmp_path, "c")["tries"]
    assert tried["nll"] == trial.value


def test_the_rating_in_the_middle_is_the_nll_of_a_run_that_ends_there(searched, tmp_path):
    trial = searched.tried("COMPLETE")[0]
    ((_, config),) = searched.alone(trial).tries
    trainer = Trainer(config, load("digits", validation=300), seed=100)
    for _ in trainer.steps():
        if (trainer.epoch, trainer.batch) == (1, 0):
            break
    assert validation_nll(trainer) == trial.intermediate_values[1]


def test_what_a_killed_process_leaves_is_completed_first(tmp_path):
    search = make_search(tmp_path, 2)
    study = search.study()
    first = search.ask(study)
    study.ask()  # of a process that died before it chose settings
    assert [trial.number for trial in search.tried("RUNNING")] == [first.number]
    (task,) = plan_tries(search.alone(first), search.runs).tasks
    task.folder.parent.mkdir(parents=True)
    with locked(task.folder.parent / f".{task.folder.name}.lock"):  # as of a worker that is at it
        work(search)
        with pytest.raises(RunBusyError, match="another process is training the run"):
            work(search)
    assert len(search.tried("COMPLETE")) == 1
    work(search)
    assert [trial.number for trial in search.tried("COMPLETE")] == [0, 2]
    assert len(_tries(study, "FAIL", "RUNNING")) == 0


def test_a_worker_goes_on_if_another_tells_the_result_of_its_try_first(tmp_path, monkeypatch):
    """A try ends between the moment when a worker sees it run and the moment when it gets hold of it."""
    search = make_search(tmp_path, 2)
    study = search.study()
    first = search.ask(study)

    def told_by_another(*arguments):
        monkeypatch.undo()
        assert search.tell(search.study(), first.number, 1.0)
        return collect_tries(*arguments)

    monkeypatch.setattr(search_module, "collect_tries", told_by_another)
    work(search)
    assert [(trial.number, trial.value == 1.0) for trial in search.tried("COMPLETE")] == [(0, True), (1, False)]


def test_the_command_with_two_workers_makes_as_many_tries_as_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["tune", str(write_grid(tmp_path)), "--search", "4", "--jobs", "2", "--device", "cpu"]
    planned = CliRunner().invoke(app, [*command, "--dry-run"])
    assert "4 tries to do, 0 recorded; each has 3 epochs and 1 seeds" in re.sub(r"\s+", " ", planned.output)
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    record = read_json(tmp_path / "results" / "tuning_small_search.json")
    assert len({json.dumps(each["settings"]) for each in record["tries"]}) == 4
    assert "Chosen: settings = { lr = " in done.output
    again = CliRunner().invoke(app, command)
    assert "0 tries to do, 4 recorded" in again.output
    assert read_json(tmp_path / "results" / "tuning_small_search.json") == record


def test_settings_are_proposed_within_the_parts_of_a_grid():
    grid = [
        {"lr": [0.1, 0.001], "splits": [1, 2, 8], "rho": [0.05]},
        {"prior_precision": [0.0, 10.0], "schedule": ["cosine", "constant"], "milestones": [[1, 2], [3]]},
    ]
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = [propose(study.ask(), grid) for _ in range(60)]
    first, second = ([each for each in found if name in each] for name in ("lr", "schedule"))
    assert len(first) + len(second) == 60
    assert {each["splits"] for each in first} == {1, 2, 8}
    assert {each["rho"] for each in first} == {0.05}
    assert all(0.001 <= each["lr"] <= 0.1 and each["lr"] == float(f"{each['lr']:.3g}") for each in first)
    assert sum(each["lr"] < 0.01 for each in first) > len(first) / 4  # on a logarithmic scale
    assert all(0.0 <= each["prior_precision"] <= 10.0 for each in second)
    assert {tuple(each["milestones"]) for each in second} == {(1, 2), (3,)}


def test_bad_input_is_one_sentence_before_anything_changes(tmp_path, monkeypatch, searched):
    monkeypatch.chdir(tmp_path)
    command = ["tune", str(write_grid(tmp_path)), "--search", "4"]
    refused = CliRunner().invoke(app, [*command, "--on", "ray", "--storage", "file:///tmp/x"])
    assert "--search keeps its study beside the runs: leave --storage out" in str(refused.exception)
    with pytest.raises(ValueError, match=r"search\.journal belongs to another grid: move it away"):
        dataclasses.replace(searched, tuning=dataclasses.replace(searched.tuning, validation=200)).study()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused = CliRunner().invoke(app, command)
    assert "pip install '.[tune]'" in str(refused.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]
