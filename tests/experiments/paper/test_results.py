"""The paper's numbers are complete and as printed; the margins follow the rule that margins.toml states."""

import math
import statistics

import pytest
from scipy.stats import t

from bsam.experiments.paper.presets import preset
from bsam.experiments.paper.results import METRICS, PAPER_SEEDS, margins, paper_tables

STEPS = {"accuracy": 0.05, "nll": 0.0005, "ece": 0.0005, "auroc": 0.0005}
BLOCKS = [(table.name, block) for table in paper_tables().values() for block in table.blocks]
ROWS = {"table1": 14, "table2": 21, "table3": 8, "table4": 5, "table5": 10, "table6": 14}


def rows(table):
    return [row for block in paper_tables()[table].blocks for row in block.rows]


def test_every_row_of_the_six_tables_is_there():
    assert {table: len(rows(table)) for table in paper_tables()} == ROWS
    cells = [cell for table in ROWS for row in rows(table) for cell in row.cells]
    assert len(cells) == 72 * len(METRICS) == 288
    assert all(cell.sd is not None and cell.sd > 0 for cell in cells)


@pytest.mark.parametrize(
    ("preset_name", "table", "metric", "printed", "mean", "sd"),
    [
        ("table1/cifar10/bsam", "table1", "nll", "0.34 (0.005)", 0.34, 0.005),
        ("table1/cifar10/adam", "table1", "accuracy", "80.85 (0.98)", 80.85, 0.98),
        ("table1/cifar100/bsam", "table1", "accuracy", "62.64 (0.33)", 62.64, 0.33),
        ("table1/cifar100/bsam", "table3", "accuracy", "62.64 (0.34)", 62.64, 0.34),
        ("table2/tinyimagenet/sam-sgd", "table2", "ece", "0.0155 (0.002)", 0.0155, 0.002),
        ("table2/cifar100-resnet18/bsam", "table2", "auroc", "0.892 (0.003)", 0.892, 0.003),
        ("table3/cifar100/bsam-no-noise", "table3", "ece", "0.0226 (0.003)", 0.0226, 0.003),
        ("table5/cifar100/sam-sgd-4", "table5", "accuracy", "56.53 (1.09)", 56.53, 1.09),
        ("table6/fashionmnist/bsam", "table6", "accuracy", "92.10 (0.26)", 92.10, 0.26),
        ("table6/fashionmnist/bsam", "table3", "accuracy", "92.08 (0.15)", 92.08, 0.15),
        ("table6/mnist/swag", "table6", "nll", "0.044 (0.0002)", 0.044, 0.0002),
    ],
)
def test_numbers_are_as_printed(preset_name, table, metric, printed, mean, sd):
    (row,) = [row for row in rows(table) if row.preset == preset_name]
    cell = row.cells[METRICS.index(metric)]
    assert (cell.printed, cell.mean, cell.sd) == (printed, mean, sd)


def test_the_samples_of_table_4_are_those_of_one_run():
    assert [row.samples for row in rows("table4")] == [0, 8, 64, 512, 2048]
    assert {row.preset for row in rows("table4")} == {"table1/cifar10/bsam"}
    assert {row.samples for table in ROWS if table != "table4" for row in rows(table)} == {32}
    assert rows("table4")[0].cells[3].printed == "0.9025 (0.005)"


def test_the_improvements_of_table_3_follow_from_its_rows():
    for table, block in BLOCKS:
        assert len(block.improvement) == (len(METRICS) if table == "table3" else 0)
        for printed, before, after in zip(block.improvement, *(row.cells for row in block.rows[:2]), strict=False):
            difference = abs(after.mean - before.mean)
            assert abs(float(printed)) == pytest.approx(difference, abs=before.rounding + after.rounding + 1e-9)
    worse = [printed for _, block in BLOCKS for printed in block.improvement if float(printed) < 0]
    assert worse == ["-0.0085"]  # the ECE on CIFAR-100


def test_every_row_has_a_preset_of_its_method_and_data():
    methods = {"SGD": "sgd", "SAM-SGD": "sam-sgd", "SWAG": "swag", "VOGN": "vogn", "Adam": "adam"}
    methods |= {"SAM-Adam": "sam-adam", "bSAM": "bsam", "bSAM w/o noise": "bsam"}
    for table in ("table1", "table2", "table3", "table6"):
        for block in paper_tables()[table].blocks:
            for row in block.rows:
                config = preset(row.preset)
                assert config.method == methods[row.label]
                assert config.sample_noise == ("w/o" not in row.label)
                assert config.dataset == block.name.split("-")[0]
                assert config.augment == (table == "table2")
    for row in rows("table5"):
        assert preset(row.preset).splits == int(row.label.removeprefix("m = "))


def test_every_block_has_a_margin_for_each_metric_and_there_are_no_others():
    expected = {table.name: {block.name: set(METRICS) for block in table.blocks} for table in paper_tables().values()}
    assert {table: {name: set(found) for name, found in blocks.items()} for table, blocks in margins().items()} == (
        expected
    )


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("table", "block"), BLOCKS, ids=[f"{table}-{block.name}" for table, block in BLOCKS])
def test_a_margin_is_one_and_a_half_half_widths_rounded_up(table, block, metric):
    cells = [row.cells[METRICS.index(metric)] for row in block.rows]
    sd = statistics.median(cell.sd for cell in cells)
    half_width = t.ppf(0.95, 2 * (PAPER_SEEDS - 1)) * sd * math.sqrt(2 / PAPER_SEEDS)
    least = 1.5 * (half_width + max(cell.rounding for cell in cells))
    margin = margins()[table][block.name][metric]
    assert least <= margin < least + STEPS[metric]
    assert margin / STEPS[metric] == pytest.approx(round(margin / STEPS[metric]))


@pytest.mark.parametrize(
    ("table", "row", "metric", "rounding"),
    [
        (1, 0, "accuracy", 0.005),
        (1, 0, "nll", 0.005),
        (6, 0, "nll", 0.0005),
        (1, 0, "ece", 5e-5),
        (4, 0, "auroc", 5e-5),
    ],
)
def test_the_rounding_is_half_a_unit_of_the_last_printed_digit(table, row, metric, rounding):
    published = paper_tables()[f"table{table}"].blocks[0].rows[row].cells[METRICS.index(metric)]
    assert published.rounding == pytest.approx(rounding)
