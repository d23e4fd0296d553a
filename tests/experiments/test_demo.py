"""The demo: its data, its runs, its numbers and its command, at a reduced size."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import bsam
from bsam.experiments import data, demo
from bsam.experiments.commands import app
from bsam.experiments.training import METHODS, make_optimizer, mlp


@pytest.fixture
def settings():
    """The demo's own settings, cut to two epochs; short runs make posterior() warn."""
    small = copy.deepcopy(demo.load_settings())
    small["digits"].update(epochs=2, seeds=2, tuning_seeds=1, num_samples=4)
    small["digits"]["grid"] = {"sgd": {"lr": [0.01, 0.1]}, "bsam": {"lr": [0.3, 1.0]}}
    small["moons"].update(epochs=2, num_samples=4)
    return small


def test_digits_are_cut_without_overlap():
    split = data.digits()
    assert [len(part[0]) for part in (split.train, split.validation, split.test)] == [600, 397, 800]
    rows = torch.cat([torch.cat([x, y[:, None]], 1) for x, y in (split.train, split.validation, split.test)])
    assert len(rows.unique(dim=0)) == len(rows) == 1797
    assert rows[:, :64].min() == 0
    assert rows[:, :64].max() == 1


def test_settings_name_every_method_and_lie_on_the_grid():
    digits = demo.load_settings()["digits"]
    assert set(digits["methods"]) == set(digits["grid"]) == set(METHODS)
    for method, grid in digits["grid"].items():
        for option, values in grid.items():
            assert digits["methods"][method][option] in values


@pytest.mark.parametrize("method", METHODS)
def test_methods_are_what_they_say(method):
    options = demo.load_settings()["digits"]["methods"][method]
    optimizer = make_optimizer(method, mlp(4, 3), 600, **options)
    group = optimizer.param_groups[0]
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "bsam": bsam.BSAM}
    assert type(optimizer) is kinds.get(method, bsam.SAM)
    assert group["lr"] == options["lr"]
    if method == "bsam":
        assert group["num_data"] == 600
        assert group["prior_precision"] == options["prior_precision"]
    else:
        assert group["weight_decay"] == options["prior_precision"] / 600


def test_unknown_methods_and_missing_options_are_refused():
    with pytest.raises(ValueError, match="must be one of sgd, adam"):
        make_optimizer("sdg", mlp(4, 3), 10, lr=0.1, prior_precision=1.0, rho=0.1)
    with pytest.raises(ValueError, match="bsam needs rho"):
        make_optimizer("bsam", mlp(4, 3), 10, lr=0.1, prior_precision=1.0)


@pytest.mark.filterwarnings("ignore:after .* steps:UserWarning")
def test_a_run_learns_and_records_what_it_did(settings):
    calls = []
    record, predictions = demo.run_digits(settings["digits"], calls.append)
    assert calls == [method for method in METHODS for _ in range(2)]
    assert set(predictions) == set(METHODS)
    for method, result in record["methods"].items():
        assert len(result["seeds"]) == 2
        assert result["seeds"][0] != result["seeds"][1]
        if method != "bsam":
            assert result["seeds"][0]["accuracy"] > 0.3
    assert record["environment"]["packages"]["torch"] == torch.__version__
    assert json.loads(json.dumps(record)) == record
    assert predictions["sgd"].num_samples == 4
    assert predictions["bsam"].computed_by == "loop"
    rows = demo.cells(record)
    assert [name for name, _ in rows] == list(METHODS.values())
    first = [100 * run["accuracy"] for run in record["methods"]["sgd"]["seeds"]]
    assert rows[0][1][0].startswith(f"{sum(first) / 2:.2f} (")


@pytest.mark.filterwarnings("ignore:after .* steps:UserWarning")
def test_runs_are_repeatable(settings):
    settings["digits"]["methods"] = {"bsam": settings["digits"]["methods"]["bsam"]}
    first, _ = demo.run_digits(settings["digits"])
    second, _ = demo.run_digits(settings["digits"])
    assert first["methods"]["bsam"]["seeds"] == second["methods"]["bsam"]["seeds"]


@pytest.mark.filterwarnings("ignore:after .* steps:UserWarning")
def test_tuning_never_looks_at_the_test_part(settings, monkeypatch):
    split = data.digits()
    blind = data.Split(split.train, split.validation, None)
    monkeypatch.setattr(data, "digits", lambda: blind)
    record = demo.tune(settings["digits"])
    for result in record["methods"].values():
        assert len(result["tries"]) == 2
        assert result["best"]["nll"] == min(t["nll"] for t in result["tries"])
    assert record["methods"]["bsam"]["best"]["splits"] == 5


@pytest.mark.filterwarnings("ignore:after .* steps:UserWarning")
def test_the_command_writes_a_page_and_its_numbers(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "load_settings", lambda: settings)
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
    assert runner.invoke(app, ["demo", "--seeds", "0"]).exit_code == 2


def test_without_the_extra_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from bsam.experiments.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "The command bsam needs typer, which is not installed: pip install 'bsam[experiments]'"
    )
