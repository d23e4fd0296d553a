"""Runs with different rates in one stack: trained as if each were alone, in folders of their own."""

import dataclasses
import functools
import os
import signal
import tomllib

import pytest
from typer.testing import CliRunner

import bsam
from bsam.experiments.checkpoint import load_checkpoint, save_checkpoint
from bsam.experiments.commands import app
from bsam.experiments.config import RATES
from bsam.experiments.record import read_json
from bsam.experiments.reproduce.execute import execute
from bsam.experiments.reproduce.plan import Task
from bsam.experiments.runs import Run, RunInterruptedError
from bsam.experiments.stacks import Stack, find_stack
from tests.experiments.test_runs import short
from tests.networks import assert_close
from tests.optim.contract import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:after .* steps:UserWarning")  # the runs are short

RATES_OF_TWO = {
    "bsam": ({"lr": 0.1, "rho": 0.001}, {"lr": 0.3, "rho": 0.01, "prior_precision": 3.0, "damping": 0.3, "beta2": 0.6}),
    "vogn": ({"lr": 0.05}, {"lr": 0.1, "damping": 0.7, "beta1": 0.8, "prior_precision": 2.0}),
    "sam-sgd": ({"rho": 0.05}, {"rho": 0.4, "beta1": 0.5, "prior_precision": 0.0}),
    "sam-adam": ({"lr": 0.003}, {"lr": 0.01, "beta1": 0.7, "beta2": 0.6, "rho": 0.0}),
    "sgd": ({"lr": 0.1, "beta1": 0.0}, {"lr": 0.3, "beta1": 0.9}),
    "swag": ({"swag_lr": 0.05}, {"swag_lr": 0.01, "swag_momentum": 0.5, "lr": 0.1}),
    "ivon": ({"lr": 0.1}, {"lr": 0.3, "prior_precision": 1.0}),
}


@pytest.fixture(autouse=True)
def _not_compiled(monkeypatch):
    """The traced formulas as they are: compiling would take most of the time."""
    monkeypatch.setattr(bsam, "TrainStep", functools.partial(bsam.TrainStep, compile=False))


def mixed(folder, method="bsam"):
    """Two settings, each with a folder of its own, and two seeds of the first."""
    first, second = (dataclasses.replace(short(method), **rates) for rates in RATES_OF_TWO[method])
    return [
        Run(folder / "first" / "seed0", first, 0, "p"),
        Run(folder / "first" / "seed4", first, 4, "p"),
        Run(folder / "second" / "seed0", second, 0, "p"),
    ]


def start(folder, method="bsam"):
    return Stack.start(mixed(folder, method), device="cpu")


def results(runs):
    """What training wrote, without what depends on the clock."""
    checkpoints = [load_checkpoint(run.folder / "checkpoint.safetensors") for run in runs]
    for checkpoint in checkpoints:
        del checkpoint["seconds"], checkpoint["generator"]
        for entry in checkpoint["log"]:
            del entry["seconds"]
    return checkpoints, [bsam.load_posterior(run.folder / "posterior.safetensors").mean for run in runs]


@pytest.mark.parametrize("method", RATES_OF_TWO)
def test_runs_together_are_runs_alone(method, tmp_path):
    start(tmp_path / "together", method).train()
    for run, alone in zip(mixed(tmp_path / "together", method), mixed(tmp_path / "alone", method), strict=True):
        Stack.start([alone], device="cpu", compiled=False).train()
        ours, theirs = (read_json(each.folder / "record.json") for each in (run, alone))
        assert ours.keys() == theirs.keys()
        assert ours["config"] == theirs["config"]
        assert ours["engine"] == {"compiled": True, "seeds_together": 3, "processes_on_device": 1}
        assert ours["final_loss"] == pytest.approx(theirs["final_loss"], rel=1e-3)
        models = (load_checkpoint(each.folder / "checkpoint.safetensors")["model"] for each in (run, alone))
        assert_close(*models, tolerance=3e-3)  # rounding, over three epochs of float32
        assert Run.read(run.folder) == run


@pytest.mark.parametrize("method", ["bsam", "sam-sgd"])
def test_killed_they_go_on_as_if_nothing_had_happened(method, tmp_path):
    start(tmp_path / "whole", method).train()
    stack = start(tmp_path / "killed", method)
    assert stack.folder == tmp_path / "killed" / "first"
    for after in (2, 7):
        count = 0

        def stop(trainer, after=after):
            nonlocal count
            count += 1
            if count == after:
                raise KeyboardInterrupt  # as a kill: nothing is saved now

        with pytest.raises(KeyboardInterrupt):
            stack.train(every_minutes=0, on_step=stop)
        stack = Stack.resume(stack.folder, device="cpu")
        assert stack.trainers[2].batch or stack.trainers[2].epoch
    stack.train()
    assert_same(results(mixed(tmp_path / "killed", method)), results(mixed(tmp_path / "whole", method)))
    assert Stack.resume(stack.folder, device="cpu").finished
    assert all(Stack.resume(run.folder, device="cpu").finished for run in stack.runs)


def test_each_run_knows_its_stack(tmp_path):
    stack = start(tmp_path)
    listed = tomllib.loads((tmp_path / "first" / "stack.toml").read_text())
    assert listed == {"seeds": [0, 4, 0], "folders": ["seed0", "seed4", "../second/seed0"]}
    assert [find_stack(run.folder) for run in stack.runs] == [tmp_path / "first"] * 3
    said = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "second" / "seed0"), "--device", "cpu"])
    assert str(said.exception).endswith(f"is trained together with others: bsam train --resume {tmp_path / 'first'}")
    stack.train()
    assert [find_stack(run.folder) for run in stack.runs] == [run.folder for run in stack.runs]


def test_a_stack_can_be_moved(tmp_path):
    stack = start(tmp_path / "here")
    with pytest.raises(RunInterruptedError):
        stack.train(on_step=lambda trainer: os.kill(os.getpid(), signal.SIGTERM) if trainer.batch == 2 else None)
    os.rename(tmp_path / "here", tmp_path / "there")
    assert find_stack(tmp_path / "there" / "second" / "seed0") == tmp_path / "there" / "first"
    assert [t.batch for t in Stack.resume(tmp_path / "there" / "first", device="cpu").trainers] == [2, 2, 2]


@pytest.mark.parametrize(
    "change", [{"epochs": 4}, {"splits": 1}, {"perturb_from": "mean"}, {"augmentation_factor": 2.0}]
)
def test_what_differs_in_more_than_rates_is_refused(tmp_path, change):
    first, _, second = mixed(tmp_path)
    second = dataclasses.replace(second, config=dataclasses.replace(second.config, **change))
    with pytest.raises(ValueError, match=r"second/seed0 and .*first/seed0 differ in more than .*rates \(lr, beta1, "):
        Stack.start([first, second], device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_settings_that_were_changed_are_named(tmp_path):
    stack = start(tmp_path)
    stack.save()
    path = tmp_path / "second" / "seed0" / "config.toml"
    text = path.read_text()
    path.write_text(text.replace("rho = 0.01", "rho = 0.02"))
    with pytest.raises(ValueError, match=rf"stack.safetensors belongs to other settings than {path}"):
        Stack.resume(stack.folder, device="cpu")
    path.write_text(text.replace("epochs = 3", "epochs = 4"))
    with pytest.raises(ValueError, match=rf"{path} has other settings than .*first/seed0/config.toml, or another seed"):
        Stack.resume(stack.folder, device="cpu")


def test_folders_of_earlier_versions_go_on(tmp_path):
    """Seeds of one run: no folders in stack.toml and in the checkpoint, no word about the stack in the settings."""
    runs = mixed(tmp_path / "new")[:2]
    Stack.start(mixed(tmp_path / "whole")[:2], device="cpu").train()
    stack = Stack.start(runs, device="cpu")
    with pytest.raises(RunInterruptedError):
        stack.train(on_step=lambda trainer: os.kill(os.getpid(), signal.SIGTERM) if trainer.batch == 2 else None)
    (stack.folder / "stack.toml").write_text("seeds = [0, 4]\n")
    state = load_checkpoint(stack.checkpoint)
    del state["folders"]
    save_checkpoint(stack.checkpoint, state)
    for run in runs:
        path = run.folder / "config.toml"
        path.write_text(path.read_text().replace('stack = ".."\n', ""))
    assert [find_stack(run.folder) for run in runs] == [stack.folder] * 2
    stack = Stack.resume(stack.folder, device="cpu")
    assert [trainer.batch for trainer in stack.trainers] == [2, 2]
    stack.train()
    assert_same(results(runs), results(mixed(tmp_path / "whole")[:2]))


# ---------------------------------------------------------------- tasks


def make_tasks(folder, method="bsam", **changes):
    return [
        Task(
            name=f"{folder.name}/{run.folder.parent.name}",
            preset="p",
            seed=run.seed,
            scale="tiny",
            config=dataclasses.replace(run.config, **changes),
            changes=(),
            samples=(2,),
            folder=run.folder,
            record=folder / "records" / run.folder.parent.name / f"{run.folder.name}.json",
        )
        for run in mixed(folder, method)
    ]


def test_tasks_of_a_stack_leave_their_records_and_ensembles(tmp_path):
    tasks = make_tasks(tmp_path)
    execute(tasks, lambda share: None, device="cpu")
    for task in tasks:
        record = read_json(task.record)
        assert (record["seed"], record["config"]["rho"]) == (task.seed, task.config.rho)
        assert record["engine"]["seeds_together"] == 3
        assert record["evaluations"]["test"].keys() == {"2"}
    assert read_json(tmp_path / "records" / "first" / "ensemble.json")["members"] == 2
    assert not (tmp_path / "records" / "second" / "ensemble.json").exists()


def test_one_task_of_a_stack_brings_all_of_it_to_the_end(tmp_path):
    stack = start(tmp_path)
    with pytest.raises(RunInterruptedError):
        stack.train(on_step=lambda trainer: os.kill(os.getpid(), signal.SIGTERM) if trainer.batch == 2 else None)
    *_, last = make_tasks(tmp_path)
    execute([last], lambda share: None, device="cpu")
    assert read_json(last.record)["engine"]["seeds_together"] == 3
    assert Stack.resume(stack.folder, device="cpu").finished


@pytest.mark.parametrize("method", ["bsam", "sgd", "ivon"])
def test_a_run_that_diverges_does_not_stop_the_others(method, tmp_path):
    *rest, last = make_tasks(tmp_path, method)
    last = dataclasses.replace(last, config=dataclasses.replace(last.config, lr=1e30))
    diverged = []
    execute([*rest, last], lambda share: None, device="cpu", on_divergence=lambda *of: diverged.append(of))
    ((task, error),) = diverged
    assert task is last
    assert "not finite" in str(error)
    assert [read_json(task.record)["seed"] for task in rest] == [0, 4]
    assert not last.record.exists()
    assert [read_json(task.record)["engine"]["seeds_together"] for task in rest] == [2] * 2
    for task, run in zip(rest, mixed(tmp_path / "alone", method), strict=False):
        Stack.start([run], device="cpu", compiled=False).train()
        ours, theirs = (read_json(folder / "record.json") for folder in (task.folder, run.folder))
        assert ours["final_loss"] == pytest.approx(theirs["final_loss"], rel=1e-3)
    with pytest.raises(FloatingPointError, match="not finite"):
        execute([*rest, last], lambda share: None, device="cpu")


def test_rates_are_what_a_step_takes_as_different():
    assert RATES == ("lr", "beta1", "prior_precision", "beta2", "rho", "damping", "swag_lr", "swag_momentum")
