"""The demo: its runs, its numbers and its command, at a reduced size."""

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

import bsam
from bsam.experiments import demo
from bsam.experiments.commands import app
from bsam.experiments.config import FIELDS
from bsam.experiments.data import load
from bsam.experiments.methods import METHODS
from tools.markdown import demo_markdown

PAPER_METHODS = [method for method in METHODS if method not in ("ivon", "asam-sgd")]

pytestmark = pytest.mark.filterwarnings("ignore:after .* steps:UserWarning")  # the runs are short


def cut(config):
    swag = {"epochs": 2, "swag_epochs": 2} if config.method == "swag" else {"epochs": 3}
    return dataclasses.replace(config, num_samples=4, **swag)


@pytest.fixture
def small():
    """The demo's own settings, cut to three epochs."""
    whole = demo.load_demo()
    return dataclasses.replace(
        whole,
        digits={method: cut(config) for method, config in whole.digits.items()},
        moons={method: cut(config) for method, config in whole.moons.items()},
        grid={"sgd": {"lr": [0.01, 0.1]}, "bsam": {"lr": [0.3, 1.0]}},
        seeds=2,
        tuning_seeds=1,
    )


def test_digits_are_cut_without_overlap():
    dataset = load("digits", validation=demo.load_demo().digits["bsam"].validation)
    parts = dataset.train, dataset.validation, dataset.test
    assert [len(x) for x, _ in parts] == [600, 397, 800]
    rows = torch.cat([torch.cat([x.flatten(1), y[:, None]], 1) for x, y in parts])
    assert len(rows.unique(dim=0)) == len(rows) == 1797


def test_settings_name_every_method_and_lie_on_the_grid():
    whole = demo.load_demo()
    assert list(whole.digits) == list(whole.grid) == PAPER_METHODS
    for method, grid in whole.grid.items():
        for option, values in grid.items():
            assert option in FIELDS
            assert getattr(whole.digits[method], option) in values
    assert len({(c.dataset, c.model, c.batch_size, c.validation, c.total_epochs) for c in whole.digits.values()}) == 1


def test_a_run_learns_and_records_what_it_did(small):
    calls = []
    record, predictions, strange = demo.run_digits(small, calls.append)
    assert calls == [method for method in PAPER_METHODS for _ in range(2)]
    assert set(predictions) == set(strange) == set(PAPER_METHODS)
    found = record["methods"]["sgd"]["runs"][0]["unknown"]
    wanted = bsam.metrics.rate_unknown(predictions["sgd"], strange["sgd"]["mirrored"], num_bootstrap=0)
    assert found["mirrored"] == wanted.auroc
    assert set(record["pairs"]) == {"sgd", "adam"}  # at the price of one run of bSAM
    assert len(record["pairs"]["sgd"]) == 1
    for method, result in record["methods"].items():
        assert len(result["runs"]) == 2
        assert result["runs"][0] != result["runs"][1]
        if predictions[method].computed_by == "mean":  # after three epochs a posterior is still wide
            assert result["runs"][0]["accuracy"] > 0.3
        assert result["config"]["method"] == method
    assert record["environment"]["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert predictions["bsam"].computed_by == "loop"
    assert predictions["sgd"].computed_by == "mean"
    rows = demo.cells(record)
    assert [name for name, _ in rows] == [METHODS[method].title for method in PAPER_METHODS]
    first = [100 * run["accuracy"] for run in record["methods"]["sgd"]["runs"]]
    assert rows[0][1][0].startswith(f"{sum(first) / 2:.2f} (")
    assert demo_markdown(record).count("\n") == 1 + len(PAPER_METHODS)


def test_runs_are_repeatable(small):
    one = dataclasses.replace(small, digits={"bsam": small.digits["bsam"]})
    first, second = (demo.run_digits(one)[0]["methods"]["bsam"]["runs"] for _ in range(2))
    assert first == second


def test_tuning_never_looks_at_the_test_part(small, monkeypatch):
    blind = dataclasses.replace(load("digits", validation=397), test=None)
    monkeypatch.setattr(demo, "load", lambda name, validation: blind)
    record = demo.tune(small)
    for result in record["methods"].values():
        assert len(result["tries"]) == 2
        assert result["best"]["nll"] == min(t["nll"] for t in result["tries"])


def test_the_command_writes_a_page_and_its_numbers(small, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "load_demo", lambda: small)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "new" / "report"), "--seeds", "1"])
    assert result.exit_code == 0, result.output
    assert "bSAM" in result.output
    page = (tmp_path / "new" / "report" / "index.html").read_text()
    record = json.loads((tmp_path / "new" / "report" / "results.json").read_text())
    for _, row in demo.cells(record):
        for cell in row:
            assert f"<td>{cell.split()[0]} " in page
