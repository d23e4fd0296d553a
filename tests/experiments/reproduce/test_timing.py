"""Estimates: where they come from, and what they count."""

import json
from dataclasses import replace

import pytest
import torch

from bsam.experiments.data import load
from bsam.experiments.paper.presets import preset
from bsam.experiments.record import read_json
from bsam.experiments.reproduce import timing
from bsam.experiments.reproduce.plan import Places, make_plan, wanted_by_table
from bsam.experiments.reproduce.scales import scaled
from bsam.experiments.reproduce.timing import (
    Estimate,
    estimate,
    estimate_elsewhere,
    num_steps,
    read_records,
    time_gradient,
    work,
)
from bsam.experiments.trainer import Trainer
from tests.experiments.reproduce.records import write_record

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "steps"), [("table6/mnist/sgd", 75 * 469), ("table1/cifar10/bsam", 180 * 390)])
def test_steps_are_counted_with_and_without_the_ragged_batch(name, steps):
    assert num_steps(preset(name)) == steps


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_count_is_what_a_run_does(drop_last):
    short = {"epochs": 1, "swag_epochs": 1, "swag_interval": 2, "batch_size": 64, "drop_last": drop_last}
    config = replace(scaled("table6/mnist/swag", "tiny"), **short)
    trainer = Trainer(config, load("digits", validation=config.validation), seed=0)
    done = sum(1 for _ in trainer.steps()) - config.total_epochs  # an epoch's end is no step
    assert num_steps(config) == done


def test_work_is_that_of_the_gradients():
    """784-500-300-9: two operations per weight and example; SAM computes two gradients where SGD computes one."""
    sgd, sam = (preset(f"table6/mnist/{method}") for method in ("sgd", "sam-sgd"))
    examples = num_steps(sgd) * sgd.batch_size
    assert work(sgd) == examples * 2 * (784 * 500 + 500 * 300 + 300 * 9)
    assert work(sam) / num_steps(sam) == 2 * work(sgd) / num_steps(sgd)
    assert work(replace(sgd, epochs=2 * sgd.epochs)) == 2 * work(sgd)


def plan_of(tmp_path, *methods):
    places = Places(tmp_path, tmp_path, tmp_path)
    return make_plan(wanted_by_table("table6", "mnist", methods), seeds=9, scale="full", places=places).tasks


def test_records_of_the_same_device_go_before_a_timed_gradient(tmp_path, monkeypatch):
    monkeypatch.setenv("BSAM_DATA", "/nowhere")  # no data is needed
    tasks = plan_of(tmp_path, "sgd")
    write_record(tmp_path, "table6/mnist/sgd", 0, device="NVIDIA H200")
    found = estimate(tasks, read_records(tmp_path), CPU)["table6/mnist/sgd"]
    config = preset("table6/mnist/sgd")
    seconds = num_steps(config) * config.batch_size * time_gradient("mlp", (1, 28, 28))
    assert found == Estimate(seconds, "timed")
    for seed in (1, 2):
        write_record(tmp_path, "table6/mnist/sgd", seed, device="CPU, x86_64, 64 cores")  # seconds: 10 + seed
    found = estimate(tasks, read_records(tmp_path), CPU)["table6/mnist/sgd"]
    assert found == Estimate(11.5, "records")


@pytest.mark.parametrize(("device", "seconds"), [("NVIDIA H200", 4.0), ("CPU, x86_64, 64 cores", 12.0)])
def test_processes_that_share_a_gpu_take_turns(tmp_path, monkeypatch, device, seconds):
    path = write_record(tmp_path, "table6/mnist/sgd", 2, device=device)
    path.write_text(json.dumps({**read_json(path), "engine": {"processes_on_device": 3}}))
    monkeypatch.setattr(timing, "environment", lambda found: {"device": device})
    tasks = plan_of(tmp_path, "sgd")
    assert estimate(tasks, read_records(tmp_path), CPU)["table6/mnist/sgd"] == Estimate(seconds, "records")


def test_on_a_gpu_a_run_takes_as_long_as_a_similar_one_by_its_work(tmp_path, monkeypatch):
    """Its steps are compiled, so nothing is timed."""
    tasks, cuda = plan_of(tmp_path, "sgd", "bsam"), torch.device("cuda")
    monkeypatch.setattr(timing, "environment", lambda device: {"device": "NVIDIA H200"})
    assert estimate(tasks, [], cuda)["table6/mnist/sgd"] == Estimate(None, "no record")
    assert estimate_elsewhere(tasks, []) is None
    write_record(tmp_path, "table6/mnist/sgd", 2, device="NVIDIA A100")  # 12 s
    write_record(tmp_path, "table6/fashionmnist/sgd", 0, device="NVIDIA A100")  # another network
    found = estimate(tasks, read_records(tmp_path), cuda)
    twice = 12 * work(preset("table6/mnist/bsam")) / work(preset("table6/mnist/sgd"))
    assert found["table6/mnist/sgd"] == Estimate(pytest.approx(12), "NVIDIA A100")
    assert found["table6/mnist/bsam"] == Estimate(pytest.approx(twice), "NVIDIA A100")
    assert estimate_elsewhere(tasks, read_records(tmp_path)) == ("NVIDIA A100", pytest.approx(9 * (12 + twice)))
    write_record(tmp_path, "table6/mnist/bsam", 5, device="NVIDIA H200")  # 15 s; it is of this device, and the method's
    found = estimate(tasks, read_records(tmp_path), cuda)
    assert found["table6/mnist/bsam"] == Estimate(15, "records")
    assert found["table6/mnist/sgd"] == Estimate(pytest.approx(15 * 12 / twice), "similar")
