"""The ensemble of a run's seeds: averaged predictions, a record of its own, and a row below those of the runs."""

import json
import math
from dataclasses import replace

import pytest
import torch

import bsam
from bsam.experiments.comparison import compare
from bsam.experiments.data import plain_batches
from bsam.experiments.ensemble import average, evaluate_ensemble
from bsam.experiments.paper.presets import preset
from bsam.experiments.record import read_json
from bsam.experiments.reproduce.execute import execute
from bsam.experiments.reproduce.plan import Task
from bsam.experiments.runs import Run
from bsam.experiments.stacks import Stack
from tests.experiments.reproduce.records import write_record
from tests.experiments.test_runs import short
from tools.markdown import comparison_markdown


def predictions(probs, information=0.0, samples=4):
    probs = torch.tensor(probs)
    labels = torch.zeros(len(probs), dtype=torch.int64)
    return bsam.Predictions(probs.log(), torch.full((len(probs),), information), labels, num_samples=samples, seed=0)


def test_probabilities_are_averaged_and_disagreement_is_information():
    both = average([predictions([[1.0, 0.0], [0.5, 0.5]]), predictions([[0.0, 1.0], [0.5, 0.5]])])
    torch.testing.assert_close(both.probs, torch.full((2, 2), 0.5))
    torch.testing.assert_close(both.mutual_information, torch.tensor([math.log(2), 0.0]))
    assert (both.num_samples, both.computed_by) == (8, "ensemble")


def test_information_within_the_members_counts_too():
    """Two equal members know as much about their own samples as the ensemble does."""
    one = predictions([[0.7, 0.3]], information=0.1)
    torch.testing.assert_close(average([one, one]).mutual_information, one.mutual_information)


@pytest.mark.parametrize("change", [{"labels": torch.tensor([1])}, {"labels": None}])
def test_members_must_predict_the_same_examples(change):
    one = predictions([[0.7, 0.3]])
    with pytest.raises(ValueError, match="predict other examples"):
        average([one, replace(one, **change)])


def tasks(folder, seeds):
    config = replace(preset("digits/sgd"), epochs=1, batch_size=200)
    return [
        Task(
            name="table1/cifar10/sgd",
            preset="table1/cifar10/sgd",
            seed=seed,
            scale="full",
            config=config,
            changes=(),
            samples=(32,),
            folder=folder / "runs" / "sgd" / f"seed{seed}",
            record=folder / "records" / "table1/cifar10/sgd" / f"seed{seed}.json",
        )
        for seed in seeds
    ]


def test_runs_that_end_together_leave_the_record_of_their_ensemble(tmp_path):
    execute(tasks(tmp_path, [0, 1]), lambda share: None, device="cpu")
    path = tmp_path / "records/table1/cifar10/sgd/ensemble.json"
    record = read_json(path)
    assert record["members"] == 2
    files = [tmp_path / f"runs/sgd/seed{seed}/predictions-test-32.safetensors" for seed in (0, 1)]
    expected = bsam.metrics.summary(average([bsam.Predictions.load(file) for file in files]))
    assert record["evaluations"]["test"]["32"]["nll"] == expected.nll
    execute(tasks(tmp_path, [2]), lambda share: None, device="cpu")
    assert read_json(path)["members"] == 2  # one run alone says nothing about the others
    execute(tasks(tmp_path, [3, 4]), lambda share: None, device="cpu")
    assert read_json(path)["members"] == 5
    for seed in (0, 1, 2):
        (tmp_path / f"runs/sgd/seed{seed}/predictions-test-32.safetensors").unlink()
    execute(tasks(tmp_path, [3, 4]), lambda share: None, device="cpu")
    assert read_json(path)["members"] == 5  # the larger one stays
    path.unlink()
    execute(tasks(tmp_path, [0, 1, 2, 3, 4]), lambda share: None, device="cpu")
    assert read_json(path)["members"] == 5  # lost predictions are made again


def test_an_ensemble_is_a_row_that_is_not_judged(tmp_path):
    name = "table1/cifar10/sgd"
    for seed in range(5):
        write_record(tmp_path, name, seed)
    values = {"accuracy": 0.91, "nll": 0.25, "ece": 0.01, "auroc": 0.93}
    content = json.loads((tmp_path / name / "seed0.json").read_text())
    content |= {"members": 5, "evaluations": {"test": {"32": values}}}
    (tmp_path / name / "ensemble.json").write_text(json.dumps(content))
    comparison = compare("table1", tmp_path)
    row = comparison.blocks[0].rows[-1]
    assert (row.label, row.members, row.ours) == ("5 × SGD", 5, True)
    assert [cell.mean for cell in row.cells] == [91.0, 0.25, 0.01, 0.93]
    assert not any(cell.best or cell.mark for cell in row.cells)
    assert sum(comparison.counts.values()) == 56
    shown = comparison_markdown(comparison)
    assert "| 5 × SGD<br>one ensemble, 180 epochs | 91.00<br>— |" in shown
    assert "Rows with “×” are ensembles" in shown


# ---------------------------------------------------------------- runs that are named


def trained(folder, method="sgd", seed=0, *changes):
    Stack.start([Run(folder, short(method, *changes), seed, f"digits/{method}")], device="cpu").train()
    return folder


def test_an_ensemble_of_points_predicts_as_their_mixture(tmp_path):
    runs = [trained(tmp_path / f"seed{seed}", seed=seed) for seed in (0, 1)]
    out, words, results = evaluate_ensemble(runs, samples=[0, 4], device="cpu")
    assert (out, words) == (tmp_path / "ensemble", "2 × SGD")
    record = read_json(out / "record.json")
    assert record["members"] == 2
    assert [run["folder"] for run in record["runs"]] == ["../seed0", "../seed1"]
    assert record["evaluations"]["test"]["4"]["nll"] == results["4"].nll
    assert (out / "reliability-test-4.png").is_file()
    assert all(set(read_json(run / "record.json")["evaluations"]["test"]) == {"0", "4"} for run in runs)
    mixture = bsam.Mixture([bsam.load_posterior(run / "posterior.safetensors") for run in runs])
    trainer = Stack.resume(runs[0], device="cpu").trainers[0]
    batch = next(iter(plain_batches(trainer.dataset, "test", batch_size=50)))
    wanted = bsam.predict(trainer.model, mixture, [batch])
    found = bsam.Predictions.load(out / "predictions-test-4.safetensors")
    torch.testing.assert_close(found.log_probs[:50], wanted.log_probs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.energy[:50], wanted.energy, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.mutual_information[:50], wanted.mutual_information, rtol=1e-3, atol=1e-4)
    evaluate_ensemble(runs[::-1], samples=[2], device="cpu")  # the same ensemble
    assert set(read_json(out / "record.json")["evaluations"]["test"]) == {"0", "4", "2"}


def test_which_runs_may_be_an_ensemble(tmp_path):
    first, other = trained(tmp_path / "a" / "seed0"), trained(tmp_path / "b" / "seed0", "bsam")
    out, words, _ = evaluate_ensemble([first, other], samples=[1], device="cpu")
    assert (out, words) == (tmp_path / "ensemble", "1 × SGD and 1 × bSAM")
    with pytest.raises(ValueError, match="hold the same posterior: name each member once"):
        evaluate_ensemble([first, other, first], device="cpu")
    wider = trained(tmp_path / "c", "sgd", 0, "model=mlp_elu")
    with pytest.raises(ValueError, match=r"has model = .*, .*c has .*the same data and the same network"):
        evaluate_ensemble([first, wider], device="cpu")
    with pytest.raises(FileNotFoundError, match="nothing holds no finished run"):
        evaluate_ensemble([first, tmp_path / "nothing"], device="cpu")
    third = trained(tmp_path / "d", "sgd", 1)
    with pytest.raises(ValueError, match="holds the results of other runs: write --out FOLDER"):
        evaluate_ensemble([first, third], tmp_path / "ensemble", device="cpu")
    with pytest.raises(ValueError, match="holds the results of other runs"):
        evaluate_ensemble([first, third], other, device="cpu")
