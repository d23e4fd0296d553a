"""Our numbers beside the paper's: every mark, the Welch test, and what is read from where."""

import dataclasses
import itertools
import math
import random
import statistics

import pytest
from scipy.stats import t, ttest_ind, ttest_ind_from_stats

from bsam.experiments import comparison
from bsam.experiments.comparison import HIGHER_IS_BETTER, TABLES, compare
from bsam.experiments.metric_columns import number, signed
from bsam.experiments.paper.beyond import all_tables
from bsam.experiments.paper.presets import preset
from bsam.experiments.paper.results import METRICS, margins
from bsam.experiments.recorded_runs import same_run
from bsam.experiments.reproduce.plan import wanted_by_table
from tests.experiments.reproduce.records import write_record

SGD = "table6/mnist/sgd"
PRINTED = {"accuracy": (98.63, 0.06), "nll": (0.044, 0.0012), "ece": (0.0028, 0.0007), "auroc": (0.979, 0.002)}


def row_of(records, table="table6", name=SGD):
    return next(row for block in compare(table, records).blocks for row in block.rows if row.preset == name)


def cell_of(records, metric):
    return row_of(records).cells[METRICS.index(metric)]


def write_seeds(records, values, metric="accuracy", name=SGD, **options):
    for seed, value in enumerate(values):
        write_record(records, name, seed, **{metric: value}, **options)


def test_in_an_empty_folder_nothing_is_run(tmp_path):
    for table in TABLES:
        for block in compare(table, tmp_path / "none").blocks:
            for row in block.rows:
                assert (row.seeds, row.scale, row.epochs, row.seconds) == (0, None, None, None)
                for cell in row.cells:
                    assert cell.mark == ("not run" if cell.published else None)
                    assert cell.published or row.ours
                    assert cell.mean is cell.sd is cell.difference is None
                    assert not cell.best


def test_a_cell_has_the_means_the_difference_and_a_verdict(tmp_path):
    values = (0.986, 0.9865, 0.9867, 0.9863, 0.9862)
    write_seeds(tmp_path, values)
    cell = cell_of(tmp_path, "accuracy")
    assert cell.mean == pytest.approx(98.634)
    assert cell.sd == pytest.approx(statistics.stdev(100 * v for v in values))
    assert cell.difference == pytest.approx(98.634 - 98.63)
    assert cell.mark == "equal"
    row = row_of(tmp_path)
    assert (row.seeds, row.scale, row.epochs, row.seconds, row.samples) == (5, "full", 75, 12.0, 32)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("side", [-1, 0, 1])
@pytest.mark.parametrize("seeds", [3, 4, 5, 10])
def test_far_apart_is_better_or_worse_by_the_metrics_direction_and_close_is_equal(metric, side, seeds, tmp_path):
    mean, sd = PRINTED[metric]
    unit = 100 if metric == "accuracy" else 1
    values = [(mean + 15 * side * sd + sd / 8 * (-1) ** k) / unit for k in range(seeds)]
    write_seeds(tmp_path, values, metric)
    verdicts = {0: "equal", 1: "better" if HIGHER_IS_BETTER[metric] else "worse"}
    verdicts[-1] = "worse" if HIGHER_IS_BETTER[metric] else "better"
    assert cell_of(tmp_path, metric).mark == verdicts[side]


def test_a_large_spread_is_open(tmp_path):
    write_seeds(tmp_path, [0.98, 0.99, 0.97, 0.995, 0.985])
    assert cell_of(tmp_path, "accuracy").mark == "open"


def judged_apart(records, table="table6"):
    """The verdicts, computed with scipy's own test, by row and metric."""
    found = {}
    for ours in (False, True):
        tested = {
            (block.name, row.label, cell.metric): (cell, margins()[table][block.name][cell.metric])
            for block in compare(table, records).blocks
            for row in block.rows
            if row.ours == ours
            for cell in row.cells
            if len(cell.values) >= 3 and cell.published
        }
        p_values = []
        for cell, _ in tested.values():
            shrunk = math.copysign(max(abs(cell.difference) - cell.published.rounding, 0), cell.difference)
            count = len(cell.values)
            p_values.append(
                ttest_ind_from_stats(shrunk, cell.sd, count, 0, cell.published.sd, 5, equal_var=False).pvalue
            )
        by_size = sorted(range(len(p_values)), key=p_values.__getitem__)
        significant = set()
        for rank, i in enumerate(by_size):  # Holm as he wrote it: stop at the first that is not significant
            if p_values[i] >= 0.05 / (len(p_values) - rank):
                break
            significant.add(i)
        for i, (place, (cell, margin)) in enumerate(tested.items()):
            values = [cell.mean, cell.sd, len(cell.values), cell.published.mean, cell.published.sd, 5]
            u, v = cell.sd**2 / len(cell.values), cell.published.sd**2 / 5
            df = (u + v) ** 2 / (u**2 / (len(cell.values) - 1) + v**2 / 4)
            half_width = t.ppf(0.95, df) * math.sqrt(u + v) + cell.published.rounding
            if i in significant:
                found[place] = "better" if (values[0] > values[3]) == HIGHER_IS_BETTER[cell.metric] else "worse"
            else:
                found[place] = "equal" if abs(cell.difference) + half_width <= margin else "open"
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_verdicts_of_a_table_are_those_of_scipys_welch_test_and_holms_steps(seed, tmp_path):
    draw = random.Random(seed)
    for block in all_tables()["table6"].blocks:
        for row in block.rows:
            shift = draw.choice([0, 0, 1, 3, 6])
            for run in range(draw.choice([3, 5, 10])):
                values = {
                    metric: draw.gauss(cell.mean + shift * cell.sd, draw.choice([0.3, 1]) * cell.sd)
                    for metric, cell in zip(METRICS, row.cells, strict=True)
                }
                write_record(tmp_path, row.preset, run, **values | {"accuracy": values["accuracy"] / 100})
    expected = judged_apart(tmp_path)
    shown = {
        (block.name, row.label, cell.metric): cell.mark
        for block in compare("table6", tmp_path).blocks
        for row in block.rows
        for cell in row.cells
    }
    assert shown == expected
    assert len(shown) == 4 * sum(len(block.rows) for block in all_tables()["table6"].blocks)
    assert {"equal", "better", "worse", "open"} <= set(shown.values())


def test_holms_family_is_the_papers_rows_of_the_table(tmp_path):
    """A p-value between 1% and 5% is enough alone, and beside rows of ours, but not among five of the paper's."""

    def write(name, mean):
        for seed, k in enumerate((-1, -0.5, 0, 0.5, 1)):
            write_record(tmp_path, name, seed, accuracy=(mean + 0.04 * k) / 100, nll=None, ece=None, auroc=None)

    write(SGD, 98.63 + 0.085)
    cell = cell_of(tmp_path, "accuracy")
    p = ttest_ind_from_stats(cell.difference - 0.005, cell.sd, 5, 0, 0.06, 5, equal_var=False).pvalue
    assert 0.01 < p < 0.05
    assert cell.mark == "better"
    printed = {"sam-sgd": 98.82, "swag": 98.65, "adam": 98.41, "vogn": 98.54}
    for name, mean in printed.items():
        write(f"here/mnist/{name}-standardised", mean)
    assert cell_of(tmp_path, "accuracy").mark == "better"
    for name, mean in printed.items():
        write(f"table6/mnist/{name}", mean)
    assert cell_of(tmp_path, "accuracy").mark == "open"


def test_a_difference_within_the_rounding_of_the_print_is_never_worse(tmp_path):
    """The NLL is printed as 0.34 (0.005): from 0.335 to 0.345 it is the same number."""
    name = "table1/cifar10/bsam"
    write_seeds(tmp_path, [0.3449, 0.3449, 0.3449, 0.34491, 0.34489], "nll", name=name)
    cell = row_of(tmp_path, "table1", name).cells[1]
    assert cell.difference == pytest.approx(0.0049)
    assert cell.mark == "equal"


def test_rows_of_ours_are_judged_and_not_counted(tmp_path):
    for name in (SGD, "here/mnist/sgd-standardised"):
        write_seeds(tmp_path, [0.5, 0.51, 0.52], name=name)
    write_seeds(tmp_path, [0.5], name="table6/mnist/bsam")
    rows = {row.label: row for row in compare("table6", tmp_path).blocks[0].rows}
    assert rows["SGD, standardised"].cells[0].mark == "worse"
    counts = compare("table6", tmp_path).counts
    assert counts["worse"] + counts["better"] + counts["equal"] + counts["open"] == 4
    assert (counts["reduced"], counts["not run"], sum(counts.values())) == (4, 48, 56)
    assert sum(sum(compare(table, tmp_path).counts.values()) for table in TABLES) == 288


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_or_two_seeds_are_reduced_even_if_far_from_the_print(seeds, tmp_path):
    write_seeds(tmp_path, [0.5, 0.5][:seeds])
    cell = cell_of(tmp_path, "accuracy")
    assert (cell.sd, cell.mark) == (None if seeds == 1 else 0.0, "reduced")
    assert cell.difference == pytest.approx(50 - 98.63)


def test_beside_a_print_without_a_standard_deviation_a_cell_is_open(tmp_path, monkeypatch):
    table = all_tables()["table6"]
    first, *others = table.blocks[0].rows
    bare = dataclasses.replace(first, cells=(dataclasses.replace(first.cells[0], sd=None), *first.cells[1:]))
    block = dataclasses.replace(table.blocks[0], rows=(bare, *others))
    changed = dataclasses.replace(table, blocks=(block, *table.blocks[1:]))
    monkeypatch.setattr(comparison, "all_tables", lambda: {**all_tables(), "table6": changed})
    write_seeds(tmp_path, [0.5, 0.5, 0.51])
    cell = cell_of(tmp_path, "accuracy")
    assert (cell.mark, cell.difference) == ("open", pytest.approx(100 * 1.51 / 3 - 98.63))


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_are_never_best(seeds, tmp_path):
    """Two far apart differ from nothing significantly: 0.6 and 0.9 from 0.95 with p = 0.4."""
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


def test_tiny_runs_have_no_difference_from_the_paper(tmp_path):
    write_seeds(tmp_path, [0.9863, 0.99] * 3, scale="tiny", config=preset("digits/sgd"))
    cell = cell_of(tmp_path, "accuracy")
    assert (cell.difference, cell.mark) == (None, "reduced")


def test_a_metric_that_one_seed_alone_has_is_not_tested(tmp_path):
    """The AUROC of a run without a right prediction, or without a wrong one, is not defined."""
    write_seeds(tmp_path, (0.9, 0.91, 0.92), "auroc", name="table6/mnist/bsam")
    write_seeds(tmp_path, (0.95, None, None), "auroc")
    cell = cell_of(tmp_path, "auroc")
    assert (cell.mean, cell.sd, cell.mark, cell.best) == (0.95, None, "reduced", False)


@pytest.mark.parametrize("undefined", [math.nan, None])
def test_a_metric_that_is_not_defined_is_open(undefined, tmp_path):
    write_seeds(tmp_path, [undefined] * 5, "auroc")
    cell = row_of(tmp_path).cells[3]
    assert (cell.mark, cell.difference, cell.best) == ("open", None, False)


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
def test_best_is_what_scipys_welch_test_finds_not_worse_than_the_best(seed, tmp_path):
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


def test_seeds_without_spread_differ_if_their_means_do(tmp_path):
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
    with pytest.raises(ValueError, match=r"there is no table 'table7': choose one of table1, table2.* all or uci"):
        compare("table7", tmp_path)


def test_the_improvement_of_table_3_has_the_direction_of_its_metric_and_welchs_interval(tmp_path):
    names = ("table3/cifar10/bsam-no-noise", "table1/cifar10/bsam")
    values = {"accuracy": ((0.87, 0.88, 0.875), (0.89, 0.888, 0.892)), "nll": ((0.37, 0.38, 0.36), (0.33, 0.34, 0.335))}
    for seed in range(3):
        for which, name in enumerate(names):
            write_record(tmp_path, name, seed, **{metric: pair[which][seed] for metric, pair in values.items()})
    blocks = {block.name: block for block in compare("table3", tmp_path).blocks}
    accuracy, nll, ece, _ = blocks["cifar10"].improvement
    for found, (before, after), unit in ((accuracy, values["accuracy"], 100), (nll, values["nll"], -1)):
        result = ttest_ind(after, before, equal_var=False)
        ends = [unit * end for end in result.confidence_interval(0.9)]
        assert found.ours.value == pytest.approx(unit * (statistics.fmean(after) - statistics.fmean(before)))
        assert found.ours.interval() == pytest.approx(tuple(sorted(ends)))
        assert found.ours.value > 0
    assert (accuracy.printed, nll.printed) == ("+0.98", "+0.04")
    assert ece.ours.value == 0.0  # the same in both rows
    assert all(each.ours is None for each in blocks["mnist"].improvement)  # not run
    assert not any(block.improvement for table in set(TABLES) - {"table3"} for block in compare(table, tmp_path).blocks)


def test_a_difference_that_rounds_to_zero_has_no_sign():
    assert signed("auroc", -0.0004) == signed("auroc", 0.0004) == "0.000"
    assert signed("auroc", -0.0006) == "-0.001"
    assert signed("ece", 0.0004) == "+0.0004"


def test_a_deviation_has_a_digit_that_is_not_0():
    assert number("nll", 0.0412, 0.0127) == "0.041 (0.013)"
    assert number("nll", 0.0412, 0.00031) == "0.041 (0.0003)"
    assert number("nll", 0.0412, 0.0) == "0.041 (0.000)"  # all seeds agree
    assert (number("nll", 0.0412, None), number("nll", None, None)) == ("0.041", "-")
