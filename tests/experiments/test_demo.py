"""The demo: its runs, its numbers and its command, at a reduced size."""

import dataclasses
import io
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from bsam.experiments import demo
from bsam.experiments.commands import _demo_table, app
from bsam.experiments.config import FIELDS, explanations, from_mapping
from bsam.experiments.data import load
from bsam.experiments.methods import METHODS
from bsam.experiments.paper.presets import preset
from tools.markdown import demo_markdown

PAPER_METHODS = [method for method in METHODS if method not in ("ivon", "asam-sgd")]
ROOT = Path(__file__).parent.parent.parent

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
    record, predictions = demo.run_digits(small, calls.append)
    assert calls == [method for method in PAPER_METHODS for _ in range(2)]
    assert set(predictions) == set(PAPER_METHODS)
    for method, result in record["methods"].items():
        assert len(result["runs"]) == 2
        assert result["runs"][0] != result["runs"][1]
        if predictions[method].computed_by == "mean":  # after three epochs a posterior is still wide
            assert result["runs"][0]["accuracy"] > 0.3
        assert result["config"]["method"] == method
    assert record["environment"]["packages"]["torch"] == torch.__version__
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


def test_help_teaches():
    runner = CliRunner()
    assert "bsam demo" in runner.invoke(app, ["--help"]).output
    assert "bsam demo --seeds 2" in runner.invoke(app, ["demo", "--help"]).output
    assert "bsam train digits/bsam" in runner.invoke(app, ["train", "--help"]).output
    assert "--samples 0,8,64" in runner.invoke(app, ["evaluate", "--help"]).output
    assert runner.invoke(app, ["demo", "--seeds", "0"]).exit_code == 2


def test_configs_lists_and_shows_presets():
    runner = CliRunner()
    listed = runner.invoke(app, ["configs"]).output
    assert "table2/tinyimagenet" in listed
    shown = runner.invoke(app, ["configs", "table1/cifar10/bsam"]).output
    assert shown.startswith("# The paper's table 1, CIFAR-10, row bSAM")
    assert "prior_precision = 25.0   # N delta: precision of the prior" in shown
    assert from_mapping(tomllib.loads(shown)) == preset("table1/cifar10/bsam")
    settings = runner.invoke(app, ["configs", "--settings"], env={"COLUMNS": "200"}).output
    for name, explanation in explanations().items():
        assert name in settings
        assert explanation in settings


def test_tables_fit_into_80_columns():
    record = json.loads((ROOT / "results" / "demo.json").read_text())
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(_demo_table(record))
    shown = console.export_text()
    for _, row in demo.cells(record):
        for cell in row:
            assert cell in shown


def test_without_the_extra_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from bsam.experiments.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "The command bsam needs typer, which is not installed. In the folder of bsam's source, write: "
        "pip install '.[experiments]'"
    )
