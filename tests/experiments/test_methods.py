"""The registry: an entry is all that a method needs, and its name is nowhere else."""

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import bsam
from bsam.experiments import methods
from bsam.experiments.commands import app
from bsam.experiments.config import FIELDS, override
from bsam.experiments.methods import METHODS, make_optimizer
from bsam.experiments.paper.presets import preset
from bsam.experiments.record import read_json
from tests import reference
from tests.experiments.test_runs import on_digits
from tests.networks import mlp
from tests.problems import logistic

EXPERIMENTS = Path(methods.__file__).parent
WITH_NAMES = {
    "regression/methods.py",  # the registry of the methods of regression
    "reproduce/studies.py",  # about some of the paper's rows
}


@pytest.mark.filterwarnings("ignore:after .* steps:UserWarning")
def test_an_entry_is_all_that_a_method_needs(tmp_path, monkeypatch):
    def make(config, model, num_data, seed, **options):
        return bsam.BSAM(model.parameters(), lr=config.lr, num_data=num_data, module=model, seed=seed, **options)

    entry = dataclasses.replace(METHODS["bsam"], title="New SAM", make=make, options=("rho", "damping"))
    monkeypatch.setitem(METHODS, "new-sam", entry)
    runner = CliRunner()
    text = runner.invoke(app, ["configs", "digits/bsam"]).output.replace('method = "bsam"', 'method = "new-sam"')
    (tmp_path / "new.toml").write_text(text)
    options = ["--epochs", "2", "--device", "cpu", "--out", str(tmp_path / "runs")]
    done = runner.invoke(app, ["train", str(tmp_path / "new.toml"), *options])
    assert done.exception is None, done.output
    assert "New SAM on digits" in done.output
    rated = runner.invoke(app, ["evaluate", str(tmp_path / "runs" / "seed0"), "--samples", "2", "--device", "cpu"])
    assert rated.exception is None, rated.output
    record = read_json(tmp_path / "runs" / "seed0" / "record.json")
    assert record["config"]["method"] == "new-sam"
    assert record["evaluations"]["test"]["2"]["nll"] < 2.5
    assert "new-sam" in runner.invoke(app, ["configs", "--settings"], env={"COLUMNS": "500"}).output


def test_no_other_file_names_a_method():
    """Theory and its figures have words of their own, like the three solutions of a logistic regression."""
    found = set()
    names = {name for name in METHODS if name != "bsam"}  # that is the command and the package, too
    for path in EXPERIMENTS.rglob("*.py"):
        where = path.relative_to(EXPERIMENTS).as_posix()
        if where != "methods.py" and not where.startswith("figures/"):
            tree = ast.parse(path.read_text())
            found |= {where for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in names}
    assert found == WITH_NAMES


@pytest.mark.parametrize("method", METHODS)
def test_the_options_of_an_entry_reach_its_optimizer(method):
    entry = METHODS[method]
    assert set(entry.options) <= set(FIELDS)
    changes = {"rho": 0.123, "damping": 0.321, "prior_precision": 2.5, "splits": 3, "max_grad_norm": 0.7}
    config = override(on_digits(method), [f"{name}={value}" for name, value in changes.items()])
    optimizer = make_optimizer(config, mlp(), 50, seed=0)
    (group,) = optimizer.param_groups
    for name in set(entry.options) & set(changes) & set(group):
        assert group[name] == changes[name]
    if not {"prior_precision"} & set(entry.options):
        assert group["weight_decay"] == pytest.approx(2.5 / 50)


def test_points_are_the_methods_without_a_spread():
    points = [name for name, method in METHODS.items() if method.is_point]
    assert points == ["sgd", "sam-sgd", "adam", "sam-adam", "asam-sgd"]


@pytest.mark.parametrize("method", ["adam", "sam-adam"])
def test_adam_without_bias_correction_is_as_printed(method):
    problem = logistic()
    config = override(
        preset(f"digits/{method}"), ["bias_correction=false", "lr=0.01", "prior_precision=1.2", "splits=1"]
    )
    rho = config.rho if method == "sam-adam" else 0.0
    optimizer = make_optimizer(config, problem.model, len(problem.x), seed=0)
    minibatches = problem.minibatches(30, 10)
    decay = config.prior_precision / len(problem.x)
    options = {"alpha": 0.01, "beta1": config.beta1, "beta2": config.beta2, "rho": rho, "delta": decay}
    expected = reference.sam_adam(problem.gradient, problem.weights(), minibatches, bias_correction=False, **options)

    for (omega, _), minibatch in zip(expected, minibatches, strict=True):

        def loss(index=minibatch):
            optimizer.zero_grad()
            found = problem.loss_fn(problem.x[index], problem.y[index])
            found.backward()
            return found

        optimizer.step(loss)
        np.testing.assert_allclose(problem.weights(), omega, rtol=1e-9, atol=1e-12)
