"""Estimates: where they come from, and what they count."""

from dataclasses import replace

import pytest
import torch

from bsam.experiments.data import load
from bsam.experiments.paper.presets import preset
from bsam.experiments.reproduce import timing
from bsam.experiments.reproduce.plan import Places, make_plan, wanted_by_table
from bsam.experiments.reproduce.scales import scaled
from bsam.experiments.reproduce.timing import Estimate, estimate, num_steps, time_step
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


def test_a_step_is_timed_without_any_data(monkeypatch):
    monkeypatch.setenv("BSAM_DATA", "/nowhere")
    assert time_step(preset("table6/mnist/bsam"), CPU) > 0


def test_records_of_the_same_device_go_before_timed_steps(tmp_path):
    places = Places(tmp_path, tmp_path, tmp_path)
    tasks = make_plan(wanted_by_table("table6", "mnist", ["sgd"]), seeds=9, scale="full", places=places).tasks
    write_record(tmp_path, "table6/mnist/sgd", 0, device="NVIDIA H200")
    found = estimate(tasks, tmp_path, CPU)["table6/mnist/sgd"]
    assert found.source == "timed"
    assert found.seconds > 0
    for seed in (1, 2):
        write_record(tmp_path, "table6/mnist/sgd", seed, device="CPU, x86_64, 64 cores")  # seconds: 10 + seed
    found = estimate(tasks, tmp_path, CPU)["table6/mnist/sgd"]
    assert (found.source, found.seconds) == ("records", 11.5)


def test_what_is_compiled_is_not_timed_by_steps_that_are_not(tmp_path, monkeypatch):
    places = Places(tmp_path, tmp_path, tmp_path)
    tasks = make_plan(wanted_by_table("table6", "mnist", ["sgd"]), seeds=1, scale="full", places=places).tasks
    monkeypatch.setattr(timing, "environment", lambda device: {"device": "NVIDIA H200"})
    assert estimate(tasks, tmp_path, torch.device("cuda")) == {"table6/mnist/sgd": Estimate(None, "no record")}
