"""Our numbers beside the paper's: every mark, the Welch test, and what is read from where."""

import dataclasses
import itertools
import math
import random
import statistics

import pytest
from scipy.stats import ttest_ind

from bsam.experiments.comparison import HIGHER_IS_BETTER, TABLES, compare
from bsam.experiments.paper.presets import preset
from bsam.experiments.paper.results import METRICS
from bsam.experiments.recorded import read_record, recorded, same_run
from bsam.experiments.reproduce.plan import wanted_by_table
from tests.experiments.reproduce.records import write_record

SGD = "table6/mnist/sgd"  # printed: 98.63 (0.06), 0.044 (0.0012), 0.0028 (0.0007), 0.979 (0.002)


def row_of(records, table="table6", name=SGD):
    return next(row for block in compare(table, records).blocks for row in block.rows if row.preset == name)


def cell_of(records, metric):
    return row_of(records).cells[METRICS.index(metric)]


def write_seeds(records, values, metric="accuracy", name=SGD, **options):
    for seed, value in enumerate(values):
        write_record(records, name, seed, **{metric: value}, **options)


def test_an_empty_folder_is_all_missing(tmp_path):
    for table in TABLES:
        for block in compare(table, tmp_path / "none").blocks:
            for row in block.rows:
                assert (row.seeds, row.scale, row.epochs, row.seconds) == (0, None, None, None)
                for cell in row.cells:
                    assert cell.mark == ("missing" if cell.published else "ours")
                    assert cell.published or row.ours
                    assert cell.mean is cell.sd is cell.difference is None
                    assert not cell.best


def test_matches_within_two_standard_deviations(tmp_path):
    values = (0.985, 0.986, 0.987, 0.986, 0.985)
    write_seeds(tmp_path, values)
    cell = cell_of(tmp_path, "accuracy")
    assert cell.mean == pytest.approx(98.58)
    assert cell.sd == pytest.approx(statistics.stdev(100 * v for v in values))
    assert cell.difference == pytest.approx(98.58 - 98.63)
    assert cell.mark == "matches"
    row = row_of(tmp_path)
    assert (row.seeds, row.scale, row.epochs, row.seconds, row.samples) == (5, "full", 75, 12.0, 32)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("side", [-1, 1])
def test_the_border_is_at_two_standard_deviations(metric, side, tmp_path):
    printed = {"accuracy": (98.63, 0.06), "nll": (0.044, 0.0012), "ece": (0.0028, 0.0007), "auroc": (0.979, 0.002)}
    mean, sd = printed[metric]
    unit = 100 if metric == "accuracy" else 1
    spread = [sd * k for k in (-1, -0.5, 0, 0.5, 1)]
    limit = 2 * math.hypot(sd, statistics.stdev(spread))
    for factor, expected in (
        (0.99, "matches"),
        (1.01, "better" if (side > 0) == HIGHER_IS_BETTER[metric] else "worse"),
    ):
        write_seeds(tmp_path, [(mean + side * factor * limit + s) / unit for s in spread], metric)
        assert cell_of(tmp_path, metric).mark == expected


def test_fewer_seeds_than_the_paper_are_reduced_even_if_equal(tmp_path):
    write_seeds(tmp_path, [0.9863, 0.9863, 0.9864, 0.9862])
    cell = cell_of(tmp_path, "accuracy")
    assert cell.mark == "reduced"
    assert cell.difference == pytest.approx(0.0, abs=1e-9)


def test_one_seed_has_no_sd_and_is_reduced(tmp_path):
    write_seeds(tmp_path, [0.5])
    cell = cell_of(tmp_path, "accuracy")
    assert (cell.sd, cell.mark) == (None, "reduced")


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_are_never_best(seeds, tmp_path):
    """Two far apart are told from nothing: 0.6 and 0.9 from 0.95 with p = 0.4."""
    write_seeds(tmp_path, [0.95, 0.951, 0.952])
    write_seeds(tmp_path, [0.6, 0.9][:seeds], name="table6/mnist/bsam")
    write_seeds(tmp_path, [0.97, 0.98][:seeds], name="table6/mnist/swag")
    best = {row.label for row in compare("table6", tmp_path).blocks[0].rows if row.cells[0].best}
    assert best == {"SGD"}


@pytest.mark.parametrize("scale", ["reduced", None, "full"])
def test_fewer_epochs_are_reduced_whatever_the_record_calls_them(scale, tmp_path):
    short = dataclasses.replace(preset(SGD), epochs=12)
    write_seeds(tmp_path, [0.9863] * 5, scale=scale, config=short)
    row = row_of(tmp_path)
    assert (row.scale, row.epochs) == ("reduced", 12)
    assert {cell.mark for cell in row.cells} == {"reduced"}


def test_a_record_without_a_scale_is_full_if_it_has_the_presets_settings(tmp_path):
    write_seeds(tmp_path, [0.9863] * 5, scale=None, config=dataclasses.replace(preset(SGD), precision="bfloat16"))
    assert row_of(tmp_path).scale == "full"


def test_tiny_runs_have_no_difference_from_the_paper(tmp_path):
    write_seeds(tmp_path, [0.9863, 0.99] * 3, scale="tiny", config=preset("digits/sgd"))
    cell = cell_of(tmp_path, "accuracy")
    assert (cell.difference, cell.mark) == (None, "reduced")


def test_a_metric_that_is_not_defined_is_missing(tmp_path):
    write_seeds(tmp_path, [math.nan] * 5, "auroc")
    cells = row_of(tmp_path).cells
    assert cells[3].mark == "missing"
    assert not cells[3].best
    assert cells[1].mark != "missing"


def test_the_fullest_scale_is_taken(tmp_path):
    write_record(tmp_path, SGD, 0, accuracy=0.7)
    for seed in (1, 2):
        write_record(tmp_path, SGD, seed, scale="reduced", config=dataclasses.replace(preset(SGD), epochs=12))
    assert cell_of(tmp_path, "accuracy").values == (70.0,)
    assert list(recorded(tmp_path, SGD, "reduced")) == [1, 2]


def test_a_run_that_two_tables_share_is_read_once(tmp_path):
    assert same_run("table5/cifar100/bsam-8") == ("table1/cifar100/bsam", "table5/cifar100/bsam-8")
    write_record(tmp_path, "table1/cifar100/bsam", 0, accuracy=0.61)
    write_record(tmp_path, "table5/cifar100/bsam-8", 1, accuracy=0.62)
    write_record(tmp_path, "table5/cifar100/bsam-8", 0, accuracy=0.1)  # the first name's goes before
    for table, name in (("table1", "table1/cifar100/bsam"), ("table5", "table5/cifar100/bsam-8")):
        row = row_of(tmp_path, table, name)
        assert row.cells[0].values == (61.0, 62.0)
    assert row_of(tmp_path, "table1", "table1/cifar100/bsam").cells[0].published.mean == 62.64
    assert row_of(tmp_path, "table5", "table5/cifar100/bsam-8").cells[0].published.mean == 62.81


def test_a_row_counts_what_was_evaluated_with_its_number_of_samples(tmp_path):
    write_record(tmp_path, "table1/cifar10/bsam", 0, samples=(0, 8, 32))
    rows = compare("table4", tmp_path).blocks[0].rows
    assert [row.seeds for row in rows] == [1, 1, 0, 0, 0]


# ---------------------------------------------------------------- the best of a block


@pytest.mark.parametrize("seed", range(20))
def test_best_is_what_scipys_welch_test_does_not_tell_from_the_best(seed, tmp_path):
    draw = random.Random(seed)
    names = ["sgd", "sam-sgd", "swag", "vogn", "adam", "sam-adam", "bsam"]
    values = {}
    for name in names:
        mean, sd = draw.gauss(0.9, 0.01), draw.choice([0.001, 0.01])
        values[name] = [draw.gauss(mean, sd) for _ in range(draw.choice([3, 4, 5]))]
        write_seeds(tmp_path, values[name], name=f"table6/mnist/{name}")
    first = max(names, key=lambda name: statistics.fmean(values[name]))
    rows = compare("table6", tmp_path).blocks[0].rows
    for row in (row for row in rows if not row.ours):
        name = row.preset.rpartition("/")[2]
        p = ttest_ind(values[name], values[first], equal_var=False).pvalue
        assert row.cells[0].best == (name == first or p >= 0.05), name


def test_lower_is_better_for_nll(tmp_path):
    write_seeds(tmp_path, [0.30, 0.301, 0.302], "nll", name="table6/mnist/sgd")
    write_seeds(tmp_path, [0.20, 0.201, 0.202], "nll", name="table6/mnist/bsam")
    best = {row.preset for row in compare("table6", tmp_path).blocks[0].rows if row.cells[1].best}
    assert best == {"table6/mnist/bsam"}


def test_equal_seeds_without_spread_are_told_apart_by_their_mean(tmp_path):
    for name, value in (("sgd", 0.9), ("swag", 0.9), ("bsam", 0.8)):
        write_seeds(tmp_path, [value] * 3, name=f"table6/mnist/{name}")
    best = {row.label for row in compare("table6", tmp_path).blocks[0].rows if row.cells[0].best}
    assert best == {"SGD", "SWAG"}


def test_rows_of_another_scale_are_not_compared(tmp_path):
    write_seeds(tmp_path, [0.80, 0.81, 0.82], name="table6/mnist/sgd")
    short = dataclasses.replace(preset("table6/mnist/bsam"), epochs=12)
    write_seeds(tmp_path, [0.90, 0.91, 0.92], name="table6/mnist/bsam", scale="reduced", config=short)
    best = {row.label for row in compare("table6", tmp_path).blocks[0].rows if row.cells[0].best}
    assert best == {"SGD"}


# ---------------------------------------------------------------- commands and bad input


def test_a_rows_command_names_that_row(tmp_path):
    write_record(tmp_path, SGD, 0, scale="tiny", config=preset("digits/sgd"))
    assert row_of(tmp_path).command == "bsam reproduce table6 --block mnist --methods sgd --scale tiny --seeds 1"
    for table in TABLES:
        for block, row in itertools.chain.from_iterable(
            [(block, row) for row in block.rows] for block in compare(table, tmp_path / "none").blocks
        ):
            words = row.command.split()
            assert words[:5] == ["bsam", "reproduce", table, "--block", block.name]
            wanted = wanted_by_table(table, block.name, [words[6]])
            assert {want.preset for want in wanted} == {row.preset}


def test_an_unknown_table_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no table 'table7': choose one of table1, table2"):
        compare("table7", tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"config": {}}'])
def test_a_record_that_is_none_is_named(text, tmp_path):
    path = write_record(tmp_path, SGD, 0)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"seed0.json is not a run's record: .* Remove it"):
        compare("table6", tmp_path)


def test_an_unknown_scale_is_refused(tmp_path):
    path = write_record(tmp_path, SGD, 0, scale="huge")
    with pytest.raises(ValueError, match="'huge' is not one of full, reduced, tiny"):
        read_record(path)


def test_other_files_are_left_alone(tmp_path):
    write_record(tmp_path, SGD, 0)
    (tmp_path / SGD / "seed-notes.json").write_text("hello")
    assert list(recorded(tmp_path, SGD)) == [0]
