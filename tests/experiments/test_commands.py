"""The commands about single runs, and their help."""

import io
import json
import signal
import tomllib
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import bsam
from bsam.experiments import demo, figures
from bsam.experiments.commands import _demo_table, app
from bsam.experiments.config import explanations, from_mapping
from bsam.experiments.evaluate import evaluate
from bsam.experiments.figures import moving, numbers
from bsam.experiments.paper.presets import preset
from bsam.experiments.record import read_json
from bsam.experiments.runs import RunInterruptedError, is_finished
from bsam.experiments.stacks import Stack
from tests.experiments.test_runs import start


def test_a_toml_file_is_trained_like_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    Path("my.toml").write_text(runner.invoke(app, ["configs", "digits/sgd"]).output)
    result = runner.invoke(app, ["train", "my.toml", "--epochs", "1", "--device", "cpu"])
    assert result.exception is None, result.output
    record = json.loads(Path("runs/my/seed0/record.json").read_text())
    assert record["preset"] == "my.toml"
    assert record["config"]["lr"] == preset("digits/sgd").lr
    assert Stack.resume(Path("runs/my/seed0"), device="cpu").finished
    assert "no file other.toml" in str(runner.invoke(app, ["train", "other.toml"]).exception)


def test_resume_takes_no_settings_and_devices_must_exist(tmp_path):
    for arguments, message in [
        (["train", "--resume", str(tmp_path), "--epochs", "3"], "leave out --out, --epochs"),
        (["train", "--resume", str(tmp_path), "--first-seed", "3"], "--first-seed and --stack-seeds"),
        (["train", "--resume", str(tmp_path), "--stack-seeds"], "--first-seed and --stack-seeds"),
        (["train", "digits/sgd", "--device", "cuda:7", "--out", str(tmp_path)], "no such device"),
        (["train"], "give either a preset"),
        (["evaluate", str(tmp_path), "--device", "meta"], "--device meta: write cpu, cuda or cuda:0"),
        (["evaluate", str(tmp_path), "--samples", "a"], "must be whole numbers"),
        (["evaluate", str(tmp_path), "--samples", "0,-1"], "must be whole numbers"),
    ]:
        if "cuda:7" in arguments and torch.cuda.is_available():
            continue
        result = CliRunner().invoke(app, arguments)
        assert message in str(result.exception)


def test_several_runs_are_evaluated_as_an_ensemble(tmp_path):
    for method in ("sgd", "bsam"):
        start(tmp_path / method, method).train()
    folders = [str(tmp_path / method) for method in ("sgd", "bsam")]
    options = ["--samples", "2", "--device", "cpu", "--out", str(tmp_path / "both")]
    result = CliRunner().invoke(app, ["evaluate", *folders, *options])
    assert result.exit_code == 0, result.output
    assert "1 × SGD and 1 × bSAM" in " ".join(result.output.split())
    assert read_json(tmp_path / "both" / "record.json")["members"] == 2
    alone = CliRunner().invoke(app, ["evaluate", folders[0], "--out", str(tmp_path)])
    assert "name two runs or more" in str(alone.exception)


def test_the_table_of_an_evaluation_has_intervals_but_for_the_ece(tmp_path):
    start(tmp_path, "sgd").train()
    result = CliRunner().invoke(app, ["evaluate", str(tmp_path), "--samples", "0", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    (summary,) = evaluate(tmp_path, samples=[0], device="cpu").values()
    assert result.output.count("[") == 3  # accuracy, NLL and AUROC
    low, high = summary.intervals["nll"]
    assert f"[{low:.3f}, {high:.3f}]" in result.output
    assert f"{summary.ece:.4f}" in result.output
    record = json.loads((tmp_path / "record.json").read_text())["evaluations"]["test"]["0"]
    assert "ece" in record
    assert "ece" not in record["intervals"]


ROOT = Path(__file__).parent.parent.parent


def test_help_teaches():
    runner = CliRunner()
    assert "bsam demo" in runner.invoke(app, ["--help"]).output
    assert "bsam demo --seeds 2" in runner.invoke(app, ["demo", "--help"]).output
    assert "bsam train digits/bsam" in runner.invoke(app, ["train", "--help"]).output
    assert "--samples 0,8,64" in runner.invoke(app, ["evaluate", "--help"]).output
    assert runner.invoke(app, ["demo", "--seeds", "0"]).exit_code == 2
    assert runner.invoke(app, ["train", "digits/sgd", "--first-seed", "-1"]).exit_code == 2


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


def test_suggest_prints_what_the_package_suggests():
    runner = CliRunner()
    lines = ["--sgd", "lr=0.1,momentum=0.9,weight_decay=5e-4"], ["--adamw", "lr=3e-4,beta2=0.95"]
    expected = (
        bsam.suggest(sgd={"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}, num_data=50_000),
        bsam.suggest(adamw={"lr": 3e-4, "betas": (0.9, 0.95)}, num_data=50_000),
    )
    for line, suggestion in zip(lines, expected, strict=True):
        result = runner.invoke(app, ["suggest", *line, "--num-data", "50000"])
        assert result.output == f"{suggestion}\n"
    for line, message in [
        (["--sgd", "0.1"], "--sgd 0.1 must be names and numbers"),
        ([], "give either --sgd lr=0.1,momentum=0.9 or --adamw lr=1e-3,weight_decay=0.01"),
    ]:
        assert message in str(runner.invoke(app, ["suggest", *line, "--num-data", "10"]).exception)


def test_an_interrupted_command_says_which_seeds_are_left(monkeypatch, tmp_path):
    train = Stack.train

    def stop(self, **options):
        if self.runs[0].seed == 4:
            raise RunInterruptedError(self.folder, signal.SIGINT)
        train(self, **options)

    monkeypatch.setattr(Stack, "train", stop)
    settings = ["--set", "batch_size=200", "--epochs", "1", "--device", "cpu", "--out", str(tmp_path)]
    command = ["train", "digits/sgd", *settings, "--first-seed", "3"]
    error = CliRunner().invoke(app, [*command, "--seeds", "4"]).exception
    resume = f"bsam train --resume {tmp_path}/seed4"
    assert (
        str(error)
        == f"stopped by SIGINT; saved. Go on with: {resume}; then write this command with --first-seed 5 --seeds 2"
    )
    assert error.exit_status == 130
    monkeypatch.undo()
    assert CliRunner().invoke(app, resume.split()[1:]).exception is None
    done = CliRunner().invoke(app, [*command[:-1], "5", "--seeds", "2"])
    assert done.exception is None, done.output
    assert all(is_finished(tmp_path / f"seed{seed}") for seed in (3, 4, 5, 6))


def test_figures_for_the_report_must_exist(tmp_path):
    error = CliRunner().invoke(app, ["report", "--figures", str(tmp_path / "none")]).exception
    assert (
        str(error)
        == f"--figures {tmp_path}/none: there is no such folder. Make it: bsam figure all --out {tmp_path}/none"
    )


def test_an_interrupted_report_says_so(monkeypatch, tmp_path):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("bsam.experiments.report.paper_page.write_paper_page", interrupt)
    result = CliRunner().invoke(app, ["report", "--out", str(tmp_path / "r.html")])
    assert result.exit_code == 130
    assert "was not written." in result.output


def test_tables_fit_into_80_columns():
    record = json.loads((ROOT / "results" / "demo.json").read_text())
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(_demo_table(record))
    shown = console.export_text()
    for _, row in demo.cells(record):
        for cell in row:
            assert cell in shown


class TestCommand:
    def test_list(self):
        result = CliRunner().invoke(app, ["figure", "list"])
        assert result.exit_code == 0
        assert all(name in result.output for name in (*figures.FIGURES, *moving.MOVING))
        assert CliRunner().invoke(app, ["figure"]).output == result.output

    @pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
    def test_one(self, tmp_path, suffix):
        path = tmp_path / f"spaces.{suffix}"
        result = CliRunner().invoke(app, ["figure", "dual-spaces", "--out", str(path)])
        assert result.exit_code == 0, result.output
        assert path.stat().st_size > 5000

    def test_without_out(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert CliRunner().invoke(app, ["figure", "dual-spaces"]).exit_code == 0
        assert (tmp_path / "dual-spaces.svg").exists()

    def test_all_and_numbers(self, tmp_path, monkeypatch):
        chosen = {name: figures.FIGURES[name] for name in ("worst-case", "dual-spaces")}
        monkeypatch.setattr(figures, "FIGURES", chosen)
        written = moving.Moving("", ".html", lambda path: path.write_text("a page"))
        monkeypatch.setattr(moving, "MOVING", {"explore": written})
        monkeypatch.setattr(numbers, "compute_numbers", lambda: {"a": 1})
        assert CliRunner().invoke(app, ["figure", "all", "--out", str(tmp_path / "new")]).exit_code == 0
        written = {path.name for path in (tmp_path / "new").iterdir()}
        assert written == {"worst-case.svg", "dual-spaces.svg", "explore.html", "figures.json"}
        path = tmp_path / "numbers.json"
        assert CliRunner().invoke(app, ["figure", "numbers", "--out", str(path)]).exit_code == 0
        assert read_json(path) == {"a": 1}

    def test_an_unknown_name(self):
        result = CliRunner().invoke(app, ["figure", "mona-lisa"])
        assert isinstance(result.exception, ValueError)
        assert "'mona-lisa'" in str(result.exception)
        assert all(name in str(result.exception) for name in (*figures.FIGURES, *moving.MOVING, "numbers", "all"))

    def test_an_unknown_ending(self, tmp_path):
        result = CliRunner().invoke(app, ["figure", "dual-spaces", "--out", str(tmp_path / "x.docx")])
        assert isinstance(result.exception, ValueError)
        assert ".svg" in str(result.exception)
