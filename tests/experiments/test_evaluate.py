"""Evaluation of a finished run: predictions are made once, and all results are recorded."""

import dataclasses
import json

import pytest
import torch

import bsam
from bsam.experiments.evaluate import evaluate
from bsam.experiments.methods import predict
from bsam.experiments.record import read_json
from bsam.experiments.stacks import Stack
from tests.experiments.test_runs import start


def test_a_cold_posterior_is_an_evaluation_of_its_own(tmp_path):
    run = start(tmp_path)
    run.train()
    (mean,) = evaluate(tmp_path, samples=[0], device="cpu").values()
    (warm,) = evaluate(tmp_path, samples=[4], device="cpu").values()
    assert evaluate(tmp_path, samples=[4], temperature=1.0, device="cpu")["4"].nll == warm.nll
    (coldest,) = evaluate(tmp_path, samples=[4], temperature=0, device="cpu").values()
    assert coldest.nll == pytest.approx(mean.nll, rel=1e-5)
    assert warm.nll != pytest.approx(mean.nll, rel=1e-3)
    evaluations = json.loads((tmp_path / "record.json").read_text())["evaluations"]["test"]
    assert {name: each["nll"] for name, each in evaluations.items()} == {
        "0": mean.nll,
        "4": warm.nll,
        "4@0.0": coldest.nll,
    }
    model, posterior, images = (
        run.trainers[0].model,
        run.trainers[0].posterior(),
        run.trainers[0].dataset.test[0][:5].float(),
    )
    cold = dataclasses.replace(run.runs[0].config, temperature=0.25)
    predictions = predict(cold, model, posterior, images, num_samples=3)
    of_tempered = predict(run.runs[0].config, model, posterior.temper(0.25), images, num_samples=3)
    torch.testing.assert_close(predictions.log_probs, of_tempered.log_probs)
    with pytest.raises(ValueError, match="temperature=-1"):
        evaluate(tmp_path, temperature=-1, device="cpu")


def test_predictions_are_made_once(tmp_path, monkeypatch):
    calls = []

    def counting(*arguments, num_samples, **options):
        calls.append(num_samples)
        return predict(*arguments, num_samples=num_samples, **options)

    def again(**options):
        calls.clear()
        results = evaluate(tmp_path, samples=[0, 4], device="cpu", **options)
        return results["4"].nll, list(calls)

    start(tmp_path).train()
    monkeypatch.setattr("bsam.experiments.evaluate.predict", counting)
    nll, made = again()
    assert made == [0, 4]
    with monkeypatch.context() as without_data:
        without_data.setattr("bsam.experiments.evaluate.load", None)
        assert again() == (nll, [])
    assert again(again=True) == (nll, [0, 4])
    assert again(seed=0) == (nll, [])  # the seed of the run
    other, made = again(seed=1)
    assert made == [0, 4]
    assert other != nll
    assert again() == (nll, [0, 4])

    file = tmp_path / "predictions-test-4.safetensors"
    file.write_bytes((tmp_path / "predictions-test-0.safetensors").read_bytes())  # not what the record knows
    assert again() == (nll, [4])
    file.unlink()
    assert again() == (nll, [4])
    bsam.load_posterior(tmp_path / "posterior.safetensors").temper(0.5).save(tmp_path / "posterior.safetensors")
    other, made = again()
    assert made == [0, 4]
    assert other != nll


def test_evaluation_needs_a_finished_run(tmp_path):
    start(tmp_path)
    with pytest.raises(FileNotFoundError, match="no finished run"):
        evaluate(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"elsewhere holds no run: there is no .*config.toml"):
        evaluate(tmp_path / "elsewhere")


def test_a_posterior_that_was_lost_is_made_again_from_the_checkpoint(tmp_path):
    start(tmp_path).train()
    nll = evaluate(tmp_path, samples=[2], device="cpu")["2"].nll
    record, path = read_json(tmp_path / "record.json"), tmp_path / "posterior.safetensors"
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"no finished run. Go on with: bsam train --resume {tmp_path}"):
        evaluate(tmp_path)
    stack = Stack.resume(tmp_path, device="cpu")
    assert not stack.finished
    stack.train()
    assert path.read_bytes() == content
    assert read_json(tmp_path / "record.json") == record
    assert evaluate(tmp_path, samples=[2], device="cpu")["2"].nll == nll


def test_a_run_that_is_trained_again_has_a_record_of_its_own(tmp_path):
    start(tmp_path).train()
    evaluate(tmp_path, samples=[0], device="cpu")
    for path in (*tmp_path.glob("checkpoint*"), tmp_path / "posterior.safetensors"):
        path.unlink()
    Stack.resume(tmp_path, device="cpu", compiled=True).train()
    record = read_json(tmp_path / "record.json")
    assert record["engine"]["compiled"]
    assert record["evaluations"] == {}


def test_evaluations_at_once_are_all_recorded(tmp_path, bsam_command):
    start(tmp_path).train()
    alone = evaluate(tmp_path, samples=[0], device="cpu")["0"].nll
    processes = [bsam_command("evaluate", tmp_path, "--samples", f"{k},{k + 10}", "--device", "cpu") for k in (1, 2, 3)]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    evaluations = read_json(tmp_path / "record.json")["evaluations"]["test"]
    assert set(evaluations) == {"0", "1", "2", "3", "11", "12", "13"}
    assert evaluations["0"]["nll"] == alone
    assert not list(tmp_path.glob(".*"))


def test_a_result_that_comes_in_while_predictions_are_made_stays(tmp_path, monkeypatch):
    """What two evaluations at once come to, in one order that is known to happen."""
    start(tmp_path).train()

    def predicting(*arguments, num_samples, **options):
        if num_samples == 4:
            evaluate(tmp_path, samples=[2], device="cpu")
        return predict(*arguments, num_samples=num_samples, **options)

    monkeypatch.setattr("bsam.experiments.evaluate.predict", predicting)
    evaluate(tmp_path, samples=[4], device="cpu")
    assert set(read_json(tmp_path / "record.json")["evaluations"]["test"]) == {"2", "4"}


def test_laplace_counts_its_samples(tmp_path):
    start(tmp_path, "laplace").train()
    results = evaluate(tmp_path, samples=[2, 64], device="cpu")
    assert results["2"].nll != results["64"].nll
