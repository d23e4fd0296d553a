"""Suites of a run: everything that is asked for is recorded, once, and a mistake is an error before anything runs."""

import json

import pytest
import torch
from typer.testing import CliRunner

import bsam
from bsam.experiments.commands import app
from bsam.experiments.corruptions import KINDS, corrupt
from bsam.experiments.data import load
from bsam.experiments.evaluate import evaluate
from bsam.experiments.methods import predict
from bsam.experiments.record import read_json
from bsam.experiments.stacks import Stack
from bsam.experiments.suites import evaluate_suites


def test_all_suites_of_colour_images_are_recorded(colour_run, colour_data):
    found = evaluate_suites(colour_run, ["shift"], samples=[2], device="cpu")
    assert list(found) == ["rejection", "unknown", "corruptions", "human"]
    record = read_json(colour_run / "record.json")
    assert {suite: each["2"] for suite, each in record["suites"].items()} == {s: each["2"] for s, each in found.items()}
    assert {name: each["kind"] for name, each in found["unknown"]["2"]["sets"].items()} == {
        "cifar100": "near",
        "tinyimagenet": "near",
        "mnist": "far",
        "fashionmnist": "far",
    }
    assert found["human"]["2"]["num_examples"] == 20

    # the numbers of one corruption, computed again by hand
    trainer = Stack.resume(colour_run, device="cpu", data=colour_data).trainers[0]
    images, labels = trainer.dataset.test
    batch = trainer.dataset.normalise(corrupt(images, "fog", 5)), labels
    posterior = bsam.load_posterior(colour_run / "posterior.safetensors")
    by_hand = predict(trainer.config, trainer.model, posterior, [batch], num_samples=2, seed=0)
    assert found["corruptions"]["2"]["kinds"]["fog"]["nll"][4] == pytest.approx(
        bsam.metrics.summary(by_hand).nll, rel=1e-4
    )
    values = [value for kind in KINDS for value in found["corruptions"]["2"]["kinds"][kind]["ece"]]
    assert len(values) == 75
    assert found["corruptions"]["2"]["mean"]["ece"] == pytest.approx(sum(values) / 75, rel=1e-5)
    assert len(json.dumps(found)) < 20_000

    (few,) = evaluate_suites(colour_run, ["corruptions"], device="cpu").values()
    assert list(few) == ["8"]  # of the 32 in the run's settings

    (colour_data / "cifar10h-counts.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"cifar10h-counts.npy is missing.*leave out the suite"):
        evaluate_suites(colour_run, ["human"], samples=[1], device="cpu")
    assert "1" not in read_json(colour_run / "record.json")["evaluations"]["test"]  # nothing was predicted


def test_what_is_recorded_is_not_made_again(digit_runs, monkeypatch):
    calls = []

    def counting(*arguments, **options):
        calls.append(options["num_samples"])
        return predict(*arguments, **options)

    monkeypatch.setattr("bsam.experiments.suites.of_runs.predict", counting)
    run = digit_runs / "bsam0"
    first = evaluate_suites(run, ["rejection", "unknown"], samples=[3], device="cpu")
    assert calls == [3]  # rejection needs the test predictions only
    assert evaluate_suites(run, ["shift"], samples=[3], device="cpu") == first
    assert calls == [3]
    other = evaluate_suites(run, ["unknown"], samples=[3], device="cpu", seed=1)
    assert calls == [3, 3]
    assert other["unknown"]["3"]["sets"] != first["unknown"]["3"]["sets"]
    cold = evaluate_suites(run, ["unknown"], samples=[3], temperature=0.5, device="cpu")
    assert list(cold["unknown"]) == ["3@0.5"]
    again = evaluate_suites(run, ["unknown"], samples=[3], device="cpu", again=True)["unknown"]["3"]
    assert again["sets"] == first["unknown"]["3"]["sets"]


def test_the_numbers_are_those_of_the_metrics(digit_runs):
    run = digit_runs / "sgd0"
    found = evaluate_suites(run, ["shift"], samples=[1], device="cpu")
    test = bsam.Predictions.load(run / "predictions-test-1.safetensors")
    mirrored = bsam.Predictions.load(run / "suites" / "unknown-1" / "mirrored.safetensors")
    scores = found["unknown"]["1"]["sets"]["mirrored"]["scores"]
    assert set(scores) == {"confidence", "entropy", "energy"}  # one point does not disagree with itself
    wanted = bsam.metrics.rate_unknown(test, mirrored, "energy", num_bootstrap=0)
    assert scores["energy"]["auroc"] == pytest.approx(wanted.auroc, rel=1e-5)
    assert sum(found["unknown"]["1"]["sets"]["mirrored"]["histogram"]) == len(mirrored)
    data = load("digits")
    assert len(mirrored) == int((~torch.isin(data.test[1], torch.tensor([0, 1, 8]))).sum())
    wanted = bsam.metrics.rate_rejection(test, num_bootstrap=0)
    assert found["rejection"]["1"]["scores"]["confidence"]["area"] == pytest.approx(wanted.area, rel=1e-5)
    risk = found["rejection"]["1"]["risk"]
    assert risk[-1] == pytest.approx(1 - evaluate(run, samples=[1], device="cpu")["1"].accuracy, rel=1e-5)


def test_the_command_shows_tables_and_refuses_early(digit_runs):
    def invoke(*arguments):
        return CliRunner().invoke(app, ["evaluate", str(digit_runs / "bsam0"), "--device", "cpu", *arguments])

    shown = invoke("--suite", "shift", "--samples", "2")
    assert shown.exit_code == 0, shown.exception
    words = " ".join(shown.output.split())
    assert "unknown inputs, 2 samples" in words
    assert "largest probability" in words
    for arguments, message in (
        (["--suite", "rain"], "no suite 'rain': choose from rejection, unknown, corruptions, human, or shift"),
        (["--suite", "human"], "human does not fit digits: people answered for cifar10 only. These do: rejection,"),
        (["--suite", "corruptions"], "does not fit digits: the constants are for images of 3 x 32 x 32"),
        (["--suite", "shift", "--part", "validation"], "--suite goes with the test part"),
    ):
        assert message in str(invoke(*arguments).exception)


def test_a_run_must_be_finished(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        evaluate_suites(tmp_path, ["shift"])
