"""Seeds trained together: stopped anywhere they go on together, and end as runs like those trained alone."""

import functools
import os
import shutil
import signal

import pytest
import torch
from typer.testing import CliRunner

import bsam
from bsam.experiments.checkpoint import load_checkpoint, save_checkpoint
from bsam.experiments.commands import app
from bsam.experiments.evaluate import evaluate
from bsam.experiments.runs import Run, RunInterruptedError
from bsam.experiments.stacks import Stack
from tests.experiments.test_runs import short
from tests.networks import assert_close
from tests.optim.contract import assert_same

SEEDS = [0, 3]


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps:UserWarning")  # the runs are short


@pytest.fixture(autouse=True)
def _not_compiled(monkeypatch):
    """The traced formulas as they are: compiling would take most of the time."""
    monkeypatch.setattr(bsam, "TrainStep", functools.partial(bsam.TrainStep, compile=False))


def start(folder, method="bsam", *changes, seeds=SEEDS):
    config = short(method, *changes)
    return Stack.start([Run(folder / f"seed{seed}", config, seed, f"digits/{method}") for seed in seeds], device="cpu")


def start_alone(folder, seed, config, **options):
    return Stack.start([Run(folder, config, seed, "p")], device="cpu", **options)


def results(folder, seeds=SEEDS):
    """What training wrote, without what depends on the clock."""
    checkpoints = [load_checkpoint(folder / f"seed{seed}" / "checkpoint.safetensors") for seed in seeds]
    for checkpoint in checkpoints:
        del checkpoint["seconds"], checkpoint["generator"]
        for entry in checkpoint["log"]:
            del entry["seconds"]
    posteriors = [bsam.load_posterior(folder / f"seed{seed}" / "posterior.safetensors") for seed in seeds]
    return checkpoints, [posterior.mean for posterior in posteriors]


@pytest.mark.parametrize("method", ["bsam", "sam-adam", "vogn", "swag", "sgd", "ivon"])
def test_seeds_together_are_seeds_alone(method, tmp_path):
    start(tmp_path / "together", method).train()
    together, _ = results(tmp_path / "together")
    for seed, ours in zip(SEEDS, together, strict=True):
        run = start_alone(tmp_path / f"{seed}", seed, short(method), compiled=False)
        run.train()
        alone = load_checkpoint(run.checkpoint)
        assert_close(ours["model"], alone["model"], tolerance=2e-3)  # rounding, over three epochs of float32
        assert ours["log"][-1]["loss"] == pytest.approx(alone["log"][-1]["loss"], rel=1e-3)
    assert not torch.equal(*(next(iter(each["model"].values())) for each in together))


@pytest.mark.parametrize("method", ["bsam", "sam-sgd", "swag", "ivon"])
def test_killed_anywhere_they_go_on_as_if_nothing_had_happened(method, tmp_path):
    start(tmp_path / "whole", method).train()
    expected = results(tmp_path / "whole")
    folder = tmp_path / "killed"
    stack = start(folder, method)
    for after in (1, 6, 9):
        count = 0

        def stop(trainer, after=after):
            nonlocal count
            count += 1
            if count == after:
                raise KeyboardInterrupt  # as a kill: nothing is saved now

        with pytest.raises(KeyboardInterrupt):
            stack.train(every_minutes=0, on_step=stop)
        (folder / "seed0" / ".log.jsonl.0123456789abcdef.bsam-tmp").mkdir()
        stack = Stack.resume(folder, device="cpu")
    assert stack.trainers[0].epoch >= 1
    stack.train()
    assert_same(results(folder), expected)
    assert Stack.resume(folder, device="cpu").finished
    assert sorted(path.name for path in folder.iterdir()) == ["seed0", "seed3", "stack.toml"]
    assert not list(folder.glob("*/.*"))


def test_a_signal_saves_all_and_says_how_to_go_on(tmp_path):
    stack = start(tmp_path / "runs")
    with pytest.raises(RunInterruptedError, match=rf"stopped by SIGTERM; saved. .* --resume {tmp_path / 'runs'}$"):
        stack.train(on_step=lambda trainer: os.kill(os.getpid(), signal.SIGTERM) if trainer.batch == 2 else None)
    again = Stack.resume(tmp_path / "runs", device="cpu")
    assert [trainer.batch for trainer in again.trainers] == [2, 2]
    assert not again.finished


def test_without_a_checkpoint_they_start_again(tmp_path):
    start(tmp_path / "runs")
    stack = Stack.resume(tmp_path / "runs", device="cpu")
    assert [trainer.epoch for trainer in stack.trainers] == [0, 0]
    stack.train()
    start(tmp_path / "whole").train()
    assert_same(results(tmp_path / "runs"), results(tmp_path / "whole"))


def test_finished_runs_are_like_those_trained_alone(tmp_path):
    start(tmp_path / "runs").train()
    for seed in SEEDS:
        folder = tmp_path / "runs" / f"seed{seed}"
        names = {path.name for path in folder.iterdir()}
        assert names == {"config.toml", "log.jsonl", "checkpoint.safetensors", "posterior.safetensors", "record.json"}
        summary = evaluate(folder, samples=[0, 4], device="cpu")
        assert set(summary) == {"0", "4"}
        run = Stack.resume(folder, device="cpu")
        assert run.finished
        assert [each.seed for each in run.runs] == [seed]
        assert len((folder / "log.jsonl").read_text().splitlines()) == 3
    said = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "runs"), "--device", "cpu"])
    assert said.exit_code == 0
    assert "are finished" in said.output


def test_one_of_them_is_not_trained_alone(tmp_path):
    start(tmp_path / "runs")
    said = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "runs" / "seed0"), "--device", "cpu"])
    assert isinstance(said.exception, ValueError)
    command = f"bsam train --resume {tmp_path / 'runs'}"
    assert str(said.exception) == f"{tmp_path / 'runs' / 'seed0'} is trained together with others: {command}"


def test_the_command_trains_and_resumes_them(tmp_path):
    changes = ["--set", "epochs=1", "--set", "batch_size=200", "--set", "beta2=0.5", "--set", "validation=0"]
    arguments = ["--out", str(tmp_path / "runs"), "--seeds", "2", "--first-seed", "5", "--stack-seeds"]
    said = CliRunner().invoke(app, ["train", "digits/bsam", *arguments, "--device", "cpu", *changes])
    assert said.exit_code == 0, said.output
    assert Stack.resume(tmp_path / "runs", device="cpu").finished
    again = CliRunner().invoke(app, ["train", "digits/bsam", *arguments, "--device", "cpu", *changes])
    assert isinstance(again.exception, FileExistsError)


def test_folders_with_runs_are_not_overwritten(tmp_path):
    start_alone(tmp_path / "a" / "seed3", 3, short("bsam"))
    with pytest.raises(FileExistsError, match=r"a/seed3 holds a run already"):
        start(tmp_path / "a")
    assert not (tmp_path / "a" / "seed0").exists()
    stack = start(tmp_path / "b")
    with pytest.raises(FileExistsError, match=rf"{tmp_path / 'b'} holds runs that are not finished: bsam train --res"):
        start(tmp_path / "b", seeds=[7, 8])
    assert not (tmp_path / "b" / "seed7").exists()
    stack.train()
    start(tmp_path / "b", seeds=[7, 8]).train()
    assert Stack.resume(tmp_path / "b", device="cpu").finished


@pytest.mark.parametrize("seeds", [[], [1, 1]])
def test_seeds_are_different(tmp_path, seeds):
    with pytest.raises(ValueError, match=r"seeds=.* must be one or more different integers"):
        start(tmp_path / "runs", seeds=seeds)
    assert not (tmp_path / "runs").exists()


def test_batches_must_be_cut_evenly(tmp_path):
    message = "batch_size=50 is no multiple of splits=4, as a compiled step needs it: train with --loop"
    with pytest.raises(ValueError, match=message):
        start(tmp_path / "runs", "bsam", "batch_size=50", "splits=4")
    assert not (tmp_path / "runs").exists()
    start_alone(tmp_path / "loop", 0, short("bsam", "batch_size=50", "splits=4"))


@pytest.mark.parametrize(
    "text", ["", "seeds = 3\n", "seeds = []\n", 'seeds = ["a"]\n', "seeds = [0", "seeds = [0, 0]\n"]
)
def test_a_wrong_list_of_seeds_is_named(tmp_path, text):
    start(tmp_path / "runs")
    (tmp_path / "runs" / "stack.toml").write_text(text)
    with pytest.raises(ValueError, match=rf"{tmp_path / 'runs' / 'stack.toml'} does not list the seeds of runs: "):
        Stack.resume(tmp_path / "runs", device="cpu")


def stopped(folder):
    """Runs that were saved in the middle."""
    stack = start(folder)
    with pytest.raises(RunInterruptedError):
        stack.train(on_step=lambda trainer: os.kill(os.getpid(), signal.SIGTERM) if trainer.batch == 2 else None)
    return stack.checkpoint


def test_a_checkpoint_of_other_runs_is_named(tmp_path):
    checkpoint = stopped(tmp_path / "runs")
    (tmp_path / "runs" / "stack.toml").write_text("seeds = [3, 0]\n")
    with pytest.raises(ValueError, match=rf"{checkpoint} belongs to other runs than .*stack.toml: one of them was"):
        Stack.resume(tmp_path / "runs", device="cpu")


def test_a_torn_checkpoint_is_named(tmp_path):
    checkpoint = stopped(tmp_path / "runs")
    state = load_checkpoint(checkpoint)
    del state["runs"][1]["model"]
    save_checkpoint(checkpoint, state)
    with pytest.raises(ValueError, match=rf"{checkpoint} does not hold a run of this version: KeyError: 'model'"):
        Stack.resume(tmp_path / "runs", device="cpu")
    save_checkpoint(checkpoint, {"seeds": SEEDS, "runs": 3})
    with pytest.raises(ValueError, match=rf"{checkpoint} belongs to other runs"):
        Stack.resume(tmp_path / "runs", device="cpu")
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    with pytest.raises(ValueError, match=str(checkpoint)):
        Stack.resume(tmp_path / "runs", device="cpu")


def test_a_damaged_checkpoint_of_all_costs_minutes(tmp_path):
    stack = start(tmp_path / "runs")
    with pytest.raises(RunInterruptedError):
        stack.train(
            every_minutes=0,
            on_step=lambda trainer: os.kill(os.getpid(), signal.SIGTERM) if trainer.batch == 3 else None,
        )
    content = bytearray(stack.checkpoint.read_bytes())
    content[-1] ^= 1
    stack.checkpoint.write_bytes(content)
    with pytest.warns(UserWarning, match=r"stack.safetensors is damaged: .*stack.previous.safetensors"):
        again = Stack.resume(tmp_path / "runs", device="cpu")
    assert [trainer.batch for trainer in again.trainers] == [2, 2]
    again.train()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["seed0", "seed3", "stack.toml"]
    start(tmp_path / "whole").train()
    assert_same(results(tmp_path / "runs"), results(tmp_path / "whole"))


@pytest.mark.parametrize("change", [("epochs = 3", "epochs = 4"), ("seed = 3", "seed = 7")])
def test_settings_of_one_run_that_were_changed_are_named(tmp_path, change):
    start(tmp_path / "runs")
    path = tmp_path / "runs" / "seed3" / "config.toml"
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(ValueError, match=rf"{path} has other settings than .*seed0/config.toml, or another seed than"):
        Stack.resume(tmp_path / "runs", device="cpu")


def test_a_run_that_is_missing_is_named(tmp_path):
    start(tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "seed3")
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path / 'runs' / 'seed3'} holds no run"):
        Stack.resume(tmp_path / "runs", device="cpu")
