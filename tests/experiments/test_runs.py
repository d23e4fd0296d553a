"""Runs: every method trains, stops after any step and goes on exactly there, also after a kill."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

import bsam
from bsam.experiments.checkpoint import load_checkpoint, save_checkpoint
from bsam.experiments.config import override
from bsam.experiments.data import load
from bsam.experiments.evaluate import evaluate
from bsam.experiments.methods import METHODS
from bsam.experiments.paper.presets import preset, preset_names
from bsam.experiments.runs import Run, RunBusyError, RunInterruptedError, choose_device
from bsam.experiments.stacks import Stack
from bsam.files import locked
from tests.optim.contract import assert_same

SHORT = {method: ["epochs=3", "batch_size=200", "beta2=0.5", "validation=0"] for method in METHODS}
SHORT["ivon"] = ["epochs=3", "batch_size=200", "validation=0"]  # it diverges with a beta2 that small
SHORT["swag"] = ["epochs=2", "swag_epochs=2", "swag_interval=2", "batch_size=200", "validation=0"]


def on_digits(method):
    """Settings of a method on digits: its preset, or bSAM's settings for a method that has none."""
    name = f"digits/{method}"
    return preset(name) if name in preset_names() else override(preset("digits/bsam"), [f"method={method}"])


def short(method, *changes):
    return override(on_digits(method), [*SHORT[method], *changes])


# ---------------------------------------------------------------- in a folder


def start(folder, method="bsam", *changes, **options):
    run = Run(folder, short(method, *changes), 0, f"digits/{method}")
    return Stack.start([run], device="cpu", **options)


def test_a_run_leaves_everything_that_is_needed(tmp_path):
    run = start(tmp_path / "run")
    run.train(every_epochs=1)
    assert sorted(os.listdir(tmp_path / "run")) == [
        "checkpoint.previous.safetensors",
        "checkpoint.safetensors",
        "config.toml",
        "log.jsonl",
        "posterior.safetensors",
        "record.json",
    ]
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["preset"] == "digits/bsam"
    assert record["config"]["lr"] == run.runs[0].config.lr
    assert record["seconds"] > 0
    assert record["environment"]["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert record["engine"] == {"compiled": False, "seeds_together": 1, "processes_on_device": 1}
    assert record["data_sha256"] == load("digits", validation=run.runs[0].config.validation).sha256
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [entry["epoch"] for entry in log] == [1, 2, 3]

    results = evaluate(tmp_path / "run", samples=[0, 4], device="cpu")
    assert results["4"].num_examples == 800
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert set(record["evaluations"]["test"]) == {"0", "4"}
    assert record["evaluations"]["test"]["4"]["intervals"]["nll"][0] <= results["4"].nll
    assert record["evaluations"]["test"]["4"]["environment"]["packages"] == record["environment"]["packages"]
    bins = record["evaluations"]["test"]["4"]["reliability"]
    assert sum(count for count, _, _ in bins) == results["4"].num_examples
    gap = sum(count * abs(accuracy - confidence) for count, confidence, accuracy in bins if count)
    assert gap / results["4"].num_examples == pytest.approx(results["4"].ece)
    saved = bsam.Predictions.load(tmp_path / "run" / "predictions-test-4.safetensors")
    assert bsam.metrics.summary(saved, num_bootstrap=0).nll == results["4"].nll
    assert (tmp_path / "run" / "reliability-test-4.png").stat().st_size > 5000


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    start(tmp_path)
    with pytest.raises(FileExistsError, match="--resume"):
        start(tmp_path)


def test_beside_finished_seeds_the_next_free_one_is_named(tmp_path):
    for seed in (0, 1):
        (tmp_path / f"seed{seed}").mkdir()
        for name in ("config.toml", "posterior.safetensors", "record.json"):
            (tmp_path / f"seed{seed}" / name).write_text("something")
    with pytest.raises(FileExistsError, match="seed0 holds a finished run: train other seeds with --first-seed 2, or"):
        start(tmp_path / "seed0")


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("swag", ["swag_interval=6"], "swag_interval=6 gives 1 snapshots in 10 steps of swag_epochs=2.*needs 2"),
        ("sgd", ["batch_size=1000", "drop_last=true"], "batch_size=1000 with drop_last leaves no batch of 997"),
        ("bsam", ["batch_size=4", "splits=5"], "splits=5 is more than the 4 examples of a batch"),
        ("vogn", ["batch_size=2000", "splits=998"], "splits=998 is more than the 997 examples"),
        ("sgd", ["batch_size=1000"], "batch_size=1000 is more than the 997 training examples"),
        ("sgd", ["dataset=moons", "model=moons_mlp", "augment=true"], "moons cannot be augmented"),
        ("sgd", ["dataset=imagenet"], "no data set 'imagenet'. There are: mnist"),
        ("sgd", ["model=vit"], "must be one of mlp"),
        ("sgd", ["validation=997"], "validation=997 must be from 0 to 996"),
        ("sgd", ["lr=-1"], "learning rate"),
        ("bsam", ["beta1=2"], "beta"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_folder_is_taken(tmp_path, method, changes, message):
    with pytest.raises(ValueError, match=message):
        start(tmp_path / "run", method, *changes)
    assert not (tmp_path / "run").exists()


def test_settings_that_cannot_be_written_leave_the_folder_free(tmp_path, monkeypatch):
    def full(path, text, *, new):
        raise OSError(28, "the disk is full")

    with monkeypatch.context() as disk:
        disk.setattr("bsam.experiments.runs.write_text", full)
        with pytest.raises(OSError, match="full"):
            start(tmp_path)
    assert os.listdir(tmp_path) == []
    start(tmp_path)


def test_what_a_kill_left_behind_is_removed(tmp_path):
    run = start(tmp_path)
    (tmp_path / ".predictions-test-4.safetensors.0123456789abcdef.bsam-tmp").mkdir()  # no other write would remove it
    (tmp_path / ".predictions-test-4.safetensors.0123456789abcdef.bsam-tmp" / ".tmpAbCdEf").write_bytes(b"torn")
    (tmp_path / ".notes.tmp").write_text("of somebody else")
    run.train()
    assert [path.name for path in tmp_path.glob(".*")] == [".notes.tmp"]


def test_a_log_is_json_also_when_the_loss_is_not_a_number(tmp_path):
    run = start(tmp_path, "sgd", "lr=1e30")
    with pytest.raises(ValueError, match="did training diverge"):
        run.train()

    def refuse(constant):
        raise AssertionError(constant)

    log = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(log) == 3
    assert log[-1]["loss"] is None
    assert not (tmp_path / "record.json").exists()


def test_resume_needs_a_run_and_its_own_settings(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        Stack.resume(tmp_path)
    run = start(tmp_path)
    run.save()
    path = tmp_path / "config.toml"
    path.write_text(path.read_text().replace("lr = ", "lr = 1"))
    with pytest.raises(ValueError, match=r"belongs to other settings.*: lr is 1\S+, and was 0\S+\. Change it"):
        Stack.resume(tmp_path, device="cpu")


def test_a_run_may_go_on_with_the_loop(tmp_path):
    start(tmp_path, compiled=True).save()
    assert Stack.resume(tmp_path, device="cpu").compiled
    assert not Stack.resume(tmp_path, device="cpu", compiled=False).compiled


def test_resume_without_a_checkpoint_starts_again(tmp_path):
    start(tmp_path)
    run = Stack.resume(tmp_path, device="cpu")
    assert run.trainers[0].epoch == 0
    run.train()
    assert run.finished


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number):
    run = start(tmp_path)

    def interrupt(trainer):
        if (trainer.epoch, trainer.batch) == (1, 2):
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(RunInterruptedError, match=f"stopped by {number.name}.*bsam train --resume {tmp_path}"):
        run.train(on_step=interrupt)
    assert signal.getsignal(number) is before
    resumed = Stack.resume(tmp_path, device="cpu")
    assert (resumed.trainers[0].epoch, resumed.trainers[0].batch) == (1, 2)


def test_the_log_does_not_repeat_epochs_that_are_trained_again(tmp_path):
    run = start(tmp_path)
    for _ in run.trainers[0].steps():
        run.write_logs()
        if run.trainers[0].epoch == 1 and run.trainers[0].batch == 0:
            run.save()
        if run.trainers[0].epoch == 2:
            break
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2
    Stack.resume(tmp_path, device="cpu").train()
    log = [json.loads(line)["epoch"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log == [1, 2, 3]


def test_devices():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device().type in ("cpu", "cuda", "mps", "xpu")
    for name in ("foo", "meta", "cpu:7", "cuda:x"):
        with pytest.raises(ValueError, match=f"--device {name}: write cpu, cuda or cuda:0"):
            choose_device(name)


# ---------------------------------------------------------------- in a process of its own


@pytest.mark.parametrize(
    ("method", "number"), [("bsam", signal.SIGKILL), ("swag", signal.SIGTERM), ("sam-adam", signal.SIGINT)]
)
def test_killed_at_random_moments_it_ends_as_if_nothing_had_happened(method, number, tmp_path, bsam_command):
    # Two seconds of work, so that three kills find it at it; SWAG's steps are plain SGD's and take the least time.
    epochs = ["epochs=60", "swag_epochs=20"] if method == "swag" else ["epochs=8"]
    augmented = f"augment={'false' if method == 'swag' else 'true'}"
    changes = [f for c in [*SHORT[method], *epochs, "batch_size=20", augmented] for f in ("--set", c)]
    options = ["--save-minutes", "0.001", "--device", "cpu"]
    undisturbed = bsam_command("train", f"digits/{method}", "--out", tmp_path / "whole", *changes, *options)
    rng = random.Random(0)
    folder = tmp_path / "killed" / "seed0"
    process = bsam_command("train", f"digits/{method}", "--out", tmp_path / "killed", *changes, *options)
    kills = 0
    while kills < 3:
        moment = time.monotonic() + 60
        mark = Path(folder / "checkpoint.safetensors")
        written = mark.stat().st_mtime_ns if mark.exists() else 0
        while time.monotonic() < moment and process.poll() is None:  # until it has saved again: it is in the loop
            if mark.exists() and mark.stat().st_mtime_ns != written:
                break
            time.sleep(0.01)
        if process.poll() is not None:
            break
        time.sleep(rng.random() * 0.3)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        if (folder / "record.json").exists():
            break  # it was done before the signal came
        kills += 1
        if number != signal.SIGKILL:
            assert process.returncode == 128 + number, errors
            assert f"bsam train --resume {folder}" in errors
        process = bsam_command("train", "--resume", folder, *options)
    if process.poll() is None:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert kills >= 1
    assert (folder / "record.json").exists()
    assert not list(folder.glob(".*.tmp"))
    _, errors = undisturbed.communicate(timeout=120)
    assert undisturbed.returncode == 0, errors
    states = [load_checkpoint(path / "checkpoint.safetensors") for path in (tmp_path / "whole" / "seed0", folder)]
    for key in ("model", "optimizer", "collector", "epoch"):
        assert_same(states[0][key], states[1][key])
    posteriors = [
        bsam.load_posterior(path / "posterior.safetensors") for path in (tmp_path / "whole" / "seed0", folder)
    ]
    assert_same(posteriors[0].mean, posteriors[1].mean)


def test_a_checkpoint_that_cannot_be_written_stops_the_run_and_keeps_the_last(tmp_path, monkeypatch):
    run = start(tmp_path)
    run.save()
    before = (tmp_path / "checkpoint.safetensors").read_bytes()

    def full(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bsam.files, "save_file", full)
    with pytest.raises(OSError, match=f"disk is full.*kept. Then go on with: bsam train --resume {tmp_path}"):
        run.train(every_epochs=1)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


def half_done(folder):
    """A run that was saved in its second epoch."""
    run = start(folder)
    for _ in run.trainers[0].steps():
        if run.trainers[0].epoch == 1 and run.trainers[0].batch == 2:
            break
    run.save()
    return run.checkpoint.read_bytes()


def test_a_write_that_the_system_cuts_off_keeps_the_last_checkpoint(tmp_path, bsam_command):
    pytest.importorskip("resource")
    before = half_done(tmp_path)
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) // 2},) * 2)"
    process = bsam_command("train", "--resume", tmp_path, "--device", "cpu", before=limit)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    said = [line for line in errors.splitlines() if line.startswith("bsam: ")]
    assert len(said) == 1
    assert "checkpoint.safetensors could not be written: it is larger than a file may be here" in said[0]
    assert said[0].endswith(f"Then go on with: bsam train --resume {tmp_path}")
    assert "Traceback" not in errors
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    assert not list(tmp_path.glob(".*"))
    process = bsam_command("train", "--resume", tmp_path, "--device", "cpu")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
"""Runs a script that may mount file systems, which nobody else sees."""


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("cat /dev/zero > {disk}/filling 2> /dev/null || true", "the disk is full. Free some space"),
        ("mount -o remount,ro {disk}", "the folder is on a read-only disk"),
    ],
)
def test_a_full_and_a_read_only_disk_keep_what_is_there(tmp_path, bsam_command, spoil, message):
    half_done(tmp_path / "run")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=1m none {disk}"
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, mount], capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    script = f"""
    {mount}
    cp -r {tmp_path}/run {disk}/run
    {spoil.format(disk=disk)}
    "$0" "$@" || echo exit status $?
    diff -r {tmp_path}/run {disk}/run && echo all is as it was
    """
    process = bsam_command("train", "--resume", disk / "run", "--device", "cpu", wrapper=[*NAMESPACE, script])
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output.splitlines() == ["exit status 1", "all is as it was"], errors
    assert f"could not be written: {message}" in errors
    assert f"Then go on with: bsam train --resume {disk / 'run'}" in errors
    assert "Traceback" not in errors


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_keeps_what_is_there(tmp_path):
    before = half_done(tmp_path)
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(PermissionError, match=r"may not be written to\. Change its permissions.*--resume"):
            Stack.resume(tmp_path, device="cpu").train()
    finally:
        tmp_path.chmod(0o755)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


# ---------------------------------------------------------------- damage


def saved_twice(folder):
    """A run with two checkpoints: (epoch 1, batch 1) and before it (epoch 0, batch 3)."""
    run = start(folder)
    for _ in run.trainers[0].steps():
        if (run.trainers[0].epoch, run.trainers[0].batch) in ((0, 3), (1, 1)):
            run.save()
        if run.trainers[0].epoch == 1 and run.trainers[0].batch == 1:
            return run
    raise AssertionError


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_costs_minutes_and_not_the_run(tmp_path):
    start(tmp_path / "whole").train()
    run = saved_twice(tmp_path / "run")
    flip(run.checkpoint)
    warning = r"checkpoint.safetensors is damaged: .* goes on from the checkpoint before it, .*previous.safetensors"
    with pytest.warns(UserWarning, match=warning):
        resumed = Stack.resume(tmp_path / "run", device="cpu")
    assert (resumed.trainers[0].epoch, resumed.trainers[0].batch) == (0, 3)
    before = resumed.checkpoints.previous.read_bytes()
    resumed.save()
    assert resumed.checkpoints.previous.read_bytes() == before  # the damaged one does not take its place
    resumed.train()
    states = [load_checkpoint(tmp_path / name / "checkpoint.safetensors") for name in ("whole", "run")]
    for key in ("model", "optimizer", "epoch"):
        assert_same(states[0][key], states[1][key])


def test_without_a_last_checkpoint_the_one_before_it_serves(tmp_path):
    run = saved_twice(tmp_path)
    run.checkpoint.unlink()
    with pytest.warns(UserWarning, match=r"there is no checkpoint .* goes on from the checkpoint before it"):
        resumed = Stack.resume(tmp_path, device="cpu")
    assert (resumed.trainers[0].epoch, resumed.trainers[0].batch) == (0, 3)


def test_a_run_without_a_whole_checkpoint_is_refused(tmp_path):
    run = saved_twice(tmp_path)
    flip(run.checkpoint)
    flip(run.checkpoints.previous)
    with pytest.raises(ValueError, match=rf"checkpoint.previous.safetensors is damaged.*delete the folder {tmp_path},"):
        Stack.resume(tmp_path, device="cpu")
    run.checkpoints.previous.unlink()
    with pytest.raises(ValueError, match=r"is damaged.*no checkpoint before it: delete it to begin again"):
        Stack.resume(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("num_data", lambda group: group.update(num_data=10)),
        ("damping", lambda group: group.update(damping=0.5)),
        ("betas", lambda group: group.update(betas=(0.9, 0.99))),
        ("rho", lambda group: group.update(rho=0.0)),
        ("seed", lambda group: group.update(seed=1)),
        ("(num_data|num_dada)", lambda group: group.update(num_dada=group.pop("num_data"))),
    ],
)
def test_a_checkpoint_with_other_options_than_the_settings_is_refused(tmp_path, name, change):
    run = start(tmp_path)
    state = run.trainers[0].state()
    change(state["optimizer"]["param_groups"][0])
    save_checkpoint(run.checkpoint, state)
    with pytest.raises(ValueError, match=rf"{run.checkpoint} does not hold a run.* {name}"):
        Stack.resume(tmp_path, device="cpu")


def test_rates_that_the_schedule_sets_are_no_other_options(tmp_path):
    run = start(tmp_path, "swag")
    for _ in run.trainers[0].steps():
        if run.trainers[0].epoch == run.runs[0].config.epochs + 1:
            break
    group = run.trainers[0].optimizer.param_groups[0]
    assert (group["lr"], group["momentum"]) == (run.runs[0].config.swag_lr, run.runs[0].config.swag_momentum)
    run.save()
    assert Stack.resume(tmp_path, device="cpu").trainers[0].epoch == run.runs[0].config.epochs + 1


def test_how_a_device_computes_a_step_is_no_other_option(tmp_path):
    """A compiled step on a GPU makes torch's optimizers use their fused kernels."""
    run = start(tmp_path, "sam-adam")
    run.trainers[0].optimizer.param_groups[0].update(fused=True, foreach=False)
    run.save()
    assert Stack.resume(tmp_path, device="cpu").trainers[0].epoch == 0


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"epoch": -1}, "epoch=-1 must be a whole number from 0 to 3"),
        ({"epoch": 4, "log": [{}] * 4}, "epoch=4 must be a whole number from 0 to 3"),
        ({"epoch": True, "log": [{}]}, "epoch=True must be"),
        ({"epoch": 1.0, "log": [{}]}, "epoch=1.0 must be"),
        ({"batch": -2}, "batch=-2 must be a whole number from 0 to 5"),
        ({"batch": 6}, "batch=6 must be a whole number from 0 to 5"),
        ({"epoch": 3, "batch": 1, "log": [{}] * 3}, "batch=1 must be a whole number from 0 to 0"),
        ({"epoch": 2}, "the log has 0 epochs, and 2 are done"),
    ],
)
def test_a_checkpoint_of_an_impossible_epoch_is_refused(tmp_path, place, message):
    run = start(tmp_path)
    save_checkpoint(run.checkpoint, {**run.trainers[0].state(), **place})
    with pytest.raises(ValueError, match=rf"{run.checkpoint} does not hold a run.* {message}"):
        Stack.resume(tmp_path, device="cpu")


# ---------------------------------------------------------------- several processes


def test_a_kill_while_the_settings_are_written_leaves_the_folder_free(tmp_path, bsam_command):
    """At each of the first calls that put a file on the disk; then the same command runs, and so does --resume."""
    changes = [f for c in [*SHORT["sgd"], "epochs=1"] for f in ("--set", c)]
    arguments = ["train", "digits/sgd", "--out", tmp_path, *changes, "--device", "cpu"]
    folder = tmp_path / "seed0"
    process = bsam_command(*arguments, before="import os; os.fsync = lambda descriptor: os._exit(9)")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 9, errors
    assert not (folder / "config.toml").exists()
    assert len(list(folder.glob(".config.toml.*"))) == 1
    process = bsam_command(*arguments)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert not list(folder.glob(".*"))


def test_empty_settings_of_an_earlier_version_leave_the_folder_free(tmp_path):
    (tmp_path / "config.toml").touch()
    for read in (Stack.resume, evaluate):
        with pytest.raises(ValueError, match=r"config.toml does not hold a run: it is empty. Start the run again"):
            read(tmp_path, device="cpu")
    start(tmp_path)
    assert Stack.resume(tmp_path, device="cpu").trainers[0].epoch == 0


def test_a_run_that_another_process_went_on_with_is_not_trained_from_an_old_place(tmp_path):
    saved_twice(tmp_path)
    first, second = (Stack.resume(tmp_path, device="cpu") for _ in range(2))
    first.train()
    record = (tmp_path / "record.json").read_bytes()
    with pytest.raises(RunBusyError, match="another process has gone on with the run"):
        second.train()
    assert (tmp_path / "record.json").read_bytes() == record
    assert Stack.resume(tmp_path, device="cpu").finished


def test_one_process_at_a_time_trains_a_run(tmp_path):
    run = start(tmp_path)
    with locked(tmp_path / ".training.lock"), pytest.raises(RunBusyError, match="another process is training"):
        run.train()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.toml", lambda text: ""),
        ("config.toml", lambda text: text.replace("lr = ", "lrr = ")),
        ("config.toml", lambda text: text + "["),
    ],
)
def test_torn_settings_are_named(tmp_path, file, change):
    start(tmp_path)
    path = tmp_path / file
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=f"{path} does not hold a run"):
        Stack.resume(tmp_path, device="cpu")


@pytest.mark.parametrize("key", ["model", "optimizer", "epoch", "log"])
def test_checkpoints_with_parts_missing_are_named(tmp_path, key):
    run = start(tmp_path)
    state = run.trainers[0].state()
    del state[key]
    save_checkpoint(run.checkpoint, state)
    with pytest.raises(ValueError, match="safetensors does not hold a run"):
        Stack.resume(tmp_path, device="cpu")


def test_a_run_remembers_where_its_data_is(tmp_path, monkeypatch):
    start(tmp_path / "run", data=tmp_path)
    assert f'data = "{tmp_path}"' in (tmp_path / "run" / "config.toml").read_text()
    run = Stack.resume(tmp_path / "run", device="cpu")
    run.train()
    asked = []

    def loading(name, folder, **options):
        asked.append(folder)
        return load(name, folder, **options)

    monkeypatch.setattr("bsam.experiments.evaluate.load", loading)
    evaluate(tmp_path / "run", samples=[0], device="cpu")
    evaluate(tmp_path / "run", samples=[1], device="cpu", data=tmp_path / "run")
    assert asked == [tmp_path, tmp_path / "run"]
