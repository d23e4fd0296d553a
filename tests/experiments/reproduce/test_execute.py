"""A task to its end: trained, evaluated, recorded; and what a kill in the middle leaves of it."""

import dataclasses
import functools
import multiprocessing
import os
import signal

import pytest

from bsam.experiments.record import read_json, write_json
from bsam.experiments.recorded_runs import read_record
from bsam.experiments.reproduce.execute import execute
from bsam.experiments.reproduce.plan import Task
from bsam.experiments.reproduce.scales import scaled
from bsam.experiments.reproduce.workers import run_all
from bsam.experiments.runs import Run
from bsam.experiments.stacks import Stack

pytestmark = pytest.mark.filterwarnings("ignore:after .* steps:UserWarning")  # the runs are short


def make_task(folder, name="table6/mnist/bsam", *, samples=(4,), **changes):
    config = dataclasses.replace(scaled(name, "tiny"), **{"epochs": 3, "splits": 2, **changes})
    run, record = folder / "runs" / "seed0", folder / "records" / "seed0.json"
    return Task(name, name, 0, "tiny", config, ("rho=0.5",), samples, run, record)


def nothing(share):
    pass


def test_a_task_leaves_a_record(tmp_path):
    task, shares = make_task(tmp_path, samples=(0, 4)), []
    execute([task], shares.append, device="cpu")
    record = read_record(task.record)
    assert (record.preset, record.seed, record.scale, record.config) == ("table6/mnist/bsam", 0, "tiny", task.config)
    assert set(record.test) == {"0", "4"}
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    run_record = read_json(task.folder / "record.json")
    assert {**run_record, "scale": "tiny", "changes": ["rho=0.5"]} == read_json(task.record)


def test_what_is_trained_is_only_evaluated(tmp_path):
    execute([make_task(tmp_path)], nothing, device="cpu")
    checkpoint = (tmp_path / "runs" / "seed0" / "checkpoint.safetensors").stat().st_mtime_ns
    first = read_record(tmp_path / "records" / "seed0.json").test["4"]
    shares = []
    execute([make_task(tmp_path, samples=(4, 8))], shares.append, device="cpu")
    assert shares == []
    assert (tmp_path / "runs" / "seed0" / "checkpoint.safetensors").stat().st_mtime_ns == checkpoint
    record = read_record(tmp_path / "records" / "seed0.json")
    assert set(record.test) == {"4", "8"}
    assert record.test["4"] == first


def test_a_finished_run_needs_no_checkpoint(tmp_path):
    execute([make_task(tmp_path)], nothing, device="cpu")
    for path in (tmp_path / "runs" / "seed0").glob("checkpoint*"):
        path.unlink()  # as of a run whose large files were left on the machine that trained it
    before = read_record(tmp_path / "records" / "seed0.json")
    shares = []
    execute([make_task(tmp_path, samples=(4, 8))], shares.append, device="cpu")
    after = read_record(tmp_path / "records" / "seed0.json")
    assert shares == []
    assert after.test.keys() == {"4", "8"}
    assert after.test["4"] == before.test["4"]


def test_a_network_is_made_once_for_all_evaluations(tmp_path, monkeypatch):
    from bsam.experiments import evaluate as module

    made, make = [], module.make_model
    monkeypatch.setattr(module, "make_model", lambda *args, **options: made.append(args) or make(*args, **options))
    execute([make_task(tmp_path, samples=(0, 4))], nothing, device="cpu")
    assert len(made) == 1


def test_evaluations_that_only_the_record_knows_stay(tmp_path):
    task, record = make_task(tmp_path), tmp_path / "records" / "seed0.json"
    execute([task], nothing, device="cpu")
    first = read_record(record).test["4"]
    of_run = task.folder / "record.json"
    write_json(of_run, read_json(of_run) | {"evaluations": {}})  # as of a copy that was made before
    execute([make_task(tmp_path, samples=(8,))], nothing, device="cpu")
    assert read_record(record).test.keys() == {"4", "8"}
    assert read_record(record).test["4"] == first
    write_json(record, read_json(record) | {"seconds": -1})  # of another training
    execute([make_task(tmp_path, samples=(8,))], nothing, device="cpu")
    assert read_record(record).test.keys() == {"8"}


def test_a_run_by_hand_goes_on(tmp_path):
    task = make_task(tmp_path)
    run = Stack.start([Run(task.folder, task.config, 0, task.preset)], device="cpu")
    steps = run.trainers[0].steps()
    for _ in range(15):
        next(steps)
    run.save()
    shares = []
    execute([task], shares.append, device="cpu")
    assert shares[0] > 15 / 39


def test_a_folder_with_another_run_is_refused(tmp_path):
    execute([make_task(tmp_path)], nothing, device="cpu")
    with pytest.raises(
        ValueError, match=r"seed0 holds a run with other settings: move it away, or choose another --runs"
    ):
        execute([make_task(tmp_path, lr=0.123)], nothing, device="cpu")


def test_a_killed_worker_costs_nothing_but_time(tmp_path):
    """SIGKILL in the middle of a run: another worker goes on from the checkpoint, to the same numbers."""
    whole, killed = (make_task(tmp_path / name, epochs=12, splits=4) for name in ("whole", "killed"))
    execute([whole], nothing, device="cpu")
    work = functools.partial(execute, device="cpu", save_minutes=0.001)
    shares, dead = [], []

    def kill(index, share):
        shares.append(share)
        if share > 0.5 and not dead:
            (worker,) = multiprocessing.active_children()
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
            dead.append(len(shares))

    assert run_all([[killed]], work, jobs=1, threads=1, on_progress=kill) == {}
    assert dead, "the run was over before it could be killed"
    assert min(shares[dead[0] :]) > 0.25  # it went on, and did not begin again
    first, second = (read_record(task.record).test["4"] for task in (whole, killed))
    hashes = {"posterior_sha256", "sha256"}  # of files whose header safetensors writes in any order
    assert all(first[name] == second[name] for name in first.keys() - hashes)
