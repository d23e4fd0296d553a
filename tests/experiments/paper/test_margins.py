"""The margins: one for each metric of each block, and all by the rule that margins.toml states."""

import math
import statistics

import pytest
from scipy.stats import t

from bsam.experiments.paper.margins import margins
from bsam.experiments.paper.results import METRICS, PAPER_SEEDS, paper_tables

STEPS = {"accuracy": 0.05, "nll": 0.0005, "ece": 0.0005, "auroc": 0.0005}
BLOCKS = [(table.name, block) for table in paper_tables().values() for block in table.blocks]


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
