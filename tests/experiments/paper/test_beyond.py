"""Rows of ours: beside the paper's, never among its numbers, with settings that are said."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bsam.experiments.comparison import compare
from bsam.experiments.config import from_mapping
from bsam.experiments.paper import beyond as module
from bsam.experiments.paper.beyond import all_tables, beyond, contents, settings_line
from bsam.experiments.paper.presets import preset, preset_title
from bsam.experiments.paper.results import paper_tables
from bsam.experiments.recorded_runs import read_record, same_run
from bsam.experiments.reproduce.plan import Wanted, find_places, make_plan, wanted_by_table
from tests.experiments.reproduce.records import write_record
from tools.markdown import comparison_markdown

IVON = "here/cifar10/ivon"
RESULTS = Path(__file__).parents[3] / "results"


def row_of(records, name=IVON):
    return next(row for block in compare("table1", records).blocks for row in block.rows if row.preset == name)


def test_they_come_last_in_their_block_and_the_papers_rows_are_as_before():
    for name, table in all_tables().items():
        for block, paper in zip(table.blocks, paper_tables()[name].blocks, strict=True):
            assert block.rows[: len(paper.rows)] == paper.rows
            for row in block.rows[len(paper.rows) :]:
                assert row.preset in beyond()
                like = beyond()[row.preset].like
                assert row.cells == next((other.cells for other in paper.rows if other.label == like), (None,) * 4)


@pytest.mark.parametrize("name", beyond())
def test_they_are_run_as_the_others_of_their_block(name):
    config, row = preset(name), beyond()[name]
    paper = preset(f"{row.table}/{row.block}/bsam")
    about = contents()[name]["settings"]
    for field in {"model", "batch_size", "augment", "drop_last", "validation", "num_samples"} - set(about):
        assert getattr(config, field) == getattr(paper, field), field
    assert config.epochs + config.swag_epochs == paper.epochs
    assert config.dataset.removesuffix("-standardised") == paper.dataset
    assert name.startswith("here/")
    assert preset_title(name).startswith("Not in the paper: ")


@pytest.mark.parametrize("row", [f"mnist/{m}" for m in ("sgd", "sam-sgd", "swag", "vogn", "adam", "sam-adam", "bsam")])
def test_standardised_rows_differ_from_the_papers_in_their_pixels_only(row):
    paper = preset(f"table6/{row}")
    assert preset(f"here/{row}-standardised") == replace(paper, dataset=f"{paper.dataset}-standardised")


@pytest.mark.parametrize("block", ["table6/mnist", "table6/fashionmnist", "table1/cifar10", "table1/cifar100"])
def test_rows_with_the_second_gradient_at_the_mean_differ_in_nothing_else(block):
    paper = preset(f"{block}/bsam")
    assert paper.perturb_from == "sample"
    name = block.partition("/")[2]
    assert preset(f"here/{name}/bsam-mean") == replace(paper, perturb_from="mean")
    if name.endswith("mnist"):
        standardised = replace(paper, perturb_from="mean", dataset=f"{name}-standardised")
        assert preset(f"here/{name}/bsam-standardised{'-mean' if name == 'mnist' else ''}") == standardised


def test_a_row_about_a_dtype_is_run_in_it_and_keeps_records_of_its_own(tmp_path):
    name = "here/cifar10/bsam-float32"
    assert preset(name) == preset("table1/cifar10/bsam")
    assert same_run(name) == (name,)
    assert name not in same_run("table1/cifar10/bsam")
    places = find_places("full", tmp_path / "runs", tmp_path / "records")
    wanted = [Wanted(name, (32,)), Wanted("table1/cifar10/bsam", (32,))]
    ours, papers = make_plan(wanted, seeds=1, scale="full", places=places, dtype="bfloat16").tasks
    assert (ours.name, ours.config.precision) == (name, "float32")
    assert (papers.name, papers.config.precision) == ("table1/cifar10/bsam", "bfloat16")
    record = write_record(tmp_path, name, 0, config=replace(preset(name), precision="bfloat16"))
    assert read_record(record).scale == "reduced"  # not what the row is about


def test_ivon_has_the_published_settings():
    """Read by eye in the authors' bdl_indomain/train_ivon.sh; N delta is weight decay times ess."""
    config = preset(IVON)
    assert (config.lr, config.beta1, config.beta2, config.initial_hessian) == (0.2, 0.9, 0.99999, 0.5)
    assert config.prior_precision == pytest.approx(2e-4 * 5e4)


@pytest.mark.parametrize(("row", "name"), [("bsam-tuned", "tuning_cifar10"), ("bsam-tuned-60", "tuning_cifar10_60")])
def test_a_tuned_row_has_the_settings_that_were_chosen(row, name):
    """Neither is there without the other."""
    path = RESULTS / f"{name}.json"
    settings = contents()[f"here/cifar10/{row}"].get("settings")
    assert (settings is not None) == path.exists()
    if settings is not None:
        record = json.loads(path.read_text())
        trained = from_mapping(record["tries"][0]["config"])  # a record without the option was trained from the mean
        assert settings == {**record["chosen"]["settings"], "perturb_from": trained.perturb_from}
        assert record["base"] == "table1/cifar10/bsam"
        about = beyond()[f"here/cifar10/{row}"].about
        assert f"{record['validation']:,} training images" in about
        assert path.name in about


def test_a_row_without_settings_is_not_there_yet(monkeypatch):
    rows = {"here/a": {"table": "table1", "block": "cifar10", "label": "a", "about": "b"}}
    monkeypatch.setattr(module, "contents", lambda: rows)
    assert beyond.__wrapped__() == {}


def test_they_are_run_when_they_are_named():
    assert IVON not in [want.preset for want in wanted_by_table("table1")]
    assert [want.preset for want in wanted_by_table("table1", "cifar10", ["ivon"])] == [IVON]
    with pytest.raises(ValueError, match="--methods ivon: there is no such method here"):
        wanted_by_table("table1", "cifar100", ["ivon"])


def test_the_table_shows_them_without_a_number_of_the_papers(tmp_path):
    for seed in range(5):
        write_record(tmp_path, IVON, seed, accuracy=0.9 + seed / 1e4)
    row = row_of(tmp_path)
    assert (row.ours, row.seeds, row.scale, row.epochs) == (True, 5, "full", 180)
    assert {(cell.mark, cell.difference, cell.published) for cell in row.cells} == {(None, None, None)}
    shown = comparison_markdown(compare("table1", tmp_path))
    assert "| IVON (added here)<br>5 seeds, 180 epochs | **90.02 (0.02)**<br>— |" in shown
    assert f"\n\n{settings_line(IVON)}" in shown


def test_on_the_tiny_scale_the_settings_are_others_and_not_said(tmp_path):
    write_record(tmp_path, IVON, 0, scale="tiny", config=preset("digits/ivon"))
    assert settings_line(IVON) not in comparison_markdown(compare("table1", tmp_path))


def test_the_settings_are_said():
    assert settings_line(IVON) == (
        "IVON (added here) is not in the paper. Its settings: published by its authors for this network with augmented "
        "images, batches of 50 and 200 epochs; lr = 0.2, beta1 = 0.9, prior_precision = 10.0, beta2 = 0.99999, "
        "initial_hessian = 0.5."
    )


def test_a_setting_that_differs_from_the_block_is_said_even_if_it_is_the_default(monkeypatch):
    changed = contents()
    changed[IVON]["settings"]["schedule"] = "cosine"
    monkeypatch.setattr(module, "contents", lambda: changed)
    assert ", schedule = " in settings_line(IVON)


def test_the_line_about_a_row_names_it_whole():
    """On FashionMNIST two rows end with the same words."""
    lines = [settings_line(f"here/fashionmnist/{name}") for name in ("bsam-mean", "bsam-standardised")]
    assert lines[0].startswith("Rows with “second gradient at the mean” are ours")
    assert lines[1].startswith("Rows with “standardised, second gradient at the mean” are ours")
