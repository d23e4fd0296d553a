"""Verdicts: Welch's test and interval against scipy's, Holm's correction, limits, symmetry, size and power."""

import math
import random
import re
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_ind

from bsam.experiments.comparison import HIGHER_IS_BETTER
from bsam.experiments.paper.results import METRICS, margins, paper_tables
from bsam.experiments.verdicts import Case, Difference, Summary, holm, judge, welch

DOCS = Path(__file__).parents[2] / "docs"


def case(ours, printed, *, rounding=0.005, margin=0.5, higher_is_better=True):
    return Case(welch(ours, printed), rounding, margin, higher_is_better)


# ---------------------------------------------------------------- Welch and Holm


@pytest.mark.parametrize("seed", range(10))
def test_p_value_and_interval_are_scipys(seed):
    draw = random.Random(seed)
    a = [draw.gauss(1, draw.choice([0.1, 1, 10])) for _ in range(draw.choice([3, 5, 10]))]
    b = [draw.gauss(0, 1) for _ in range(5)]
    expected = ttest_ind(a, b, equal_var=False)
    found = welch(Summary.of(a), Summary.of(b))
    assert found.p_value() == pytest.approx(expected.pvalue)
    assert found.interval() == pytest.approx(tuple(expected.confidence_interval(0.90)))


@pytest.mark.parametrize("side", [-1, 1])
def test_the_rounding_shrinks_the_difference_and_widens_the_interval(side):
    moved, shrunk = Difference(side * 0.3, 0.1, 8.0), Difference(side * 0.25, 0.1, 8.0)
    assert moved.p_value(0.05) == pytest.approx(shrunk.p_value())
    assert moved.p_value(0.3) == moved.p_value(1.0) == 1.0
    low, high = moved.interval()
    assert moved.interval(0.05) == pytest.approx((low - 0.05, high + 0.05))


def test_without_any_spread_the_means_decide():
    printed = Summary(1.0, 0.0, 5)
    assert welch(Summary(1.0, 0.0, 5), printed).p_value() == 1.0
    assert welch(Summary(1.1, 0.0, 5), printed).p_value() == 0.0
    assert judge([case(Summary(1.1, 0.0, 5), printed), case(Summary(1.0, 0.0, 5), printed)]) == ["better", "equal"]


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


# ---------------------------------------------------------------- verdicts


def test_the_same_numbers_with_a_small_spread_are_equal():
    assert judge([case(Summary(90.0, 0.1, 5), Summary(90.0, 0.1, 5))]) == ["equal"]


def test_a_huge_spread_is_open():
    assert judge([case(Summary(90.0, 5.0, 5), Summary(90.0, 5.0, 5))]) == ["open"]


@pytest.mark.parametrize(("ours", "verdict"), [(92.0, "better"), (88.0, "worse")])
def test_far_apart_is_better_or_worse(ours, verdict):
    cases = [case(Summary(ours, 0.2, 5), Summary(90.0, 0.2, 5), higher_is_better=higher) for higher in (True, False)]
    assert judge(cases) == [verdict, {"better": "worse", "worse": "better"}[verdict]]


def test_a_difference_that_is_significant_alone_is_not_in_a_table():
    single = case(Summary(90.4, 0.2, 5), Summary(90.0, 0.2, 5), margin=0.1)
    assert 0.01 < single.difference.p_value(single.rounding) < 0.05
    assert judge([single]) == ["better"]
    null = case(Summary(90.0, 0.2, 5), Summary(90.0, 0.2, 5), margin=0.1)
    assert judge([single, *[null] * 4])[0] == "open"


@pytest.mark.parametrize(("margin", "verdict"), [(0.56, "equal"), (0.54, "open")])
def test_the_whole_interval_has_to_be_inside_the_margin(margin, verdict):
    """t(8, 95%) 0.25 sqrt(2 / 5) = 0.294; with the difference of 0.2 and the rounding of 0.05 that is 0.544."""
    assert judge([case(Summary(90.2, 0.25, 5), Summary(90.0, 0.25, 5), rounding=0.05, margin=margin)]) == [verdict]


summaries = st.builds(Summary, st.floats(-100, 100), st.floats(0, 10), st.integers(3, 20))
cases = st.tuples(summaries, summaries, st.floats(0, 1), st.floats(0, 5), st.booleans())


@given(st.lists(cases, max_size=8))
def test_verdicts_are_antisymmetric(drawn):
    """With ours and the printed number exchanged, better is worse, and equal and open stay."""
    there = judge([Case(welch(a, b), *options) for a, b, *options in drawn])
    back = judge([Case(welch(b, a), *options) for a, b, *options in drawn])
    opposite = {"better": "worse", "worse": "better", "equal": "equal", "open": "open"}
    assert back == [opposite[verdict] for verdict in there]


@given(summaries, st.floats(-0.999, 0.999), st.floats(0, 10), st.booleans())
def test_a_difference_within_the_rounding_is_never_better_or_worse(ours, part, sd, higher_is_better):
    printed = Summary(ours.mean + 0.005 * part, sd, 5)
    assert judge([Case(welch(ours, printed), 0.005, 0.1, higher_is_better)])[0] in ("equal", "open")


# ---------------------------------------------------------------- size and power


def draw_table(draw, table):
    """A table, run again by equal methods: five seeds of each number on both sides, one side rounded as the paper's."""
    family = []
    for block in paper_tables()[table].blocks:
        for row in block.rows:
            for metric, cell in zip(METRICS, row.cells, strict=True):
                mean, sd = (len(number.strip("()").partition(".")[2]) for number in cell.printed.split())
                ours, theirs = (Summary.of([draw.gauss(cell.mean, cell.sd) for _ in range(5)]) for _ in range(2))
                printed = Summary(round(theirs.mean, mean), round(theirs.sd, sd), 5)
                margin = margins()[table][block.name][metric]
                family.append(Case(welch(ours, printed), cell.rounding, margin, HIGHER_IS_BETTER[metric]))
    return family


@pytest.mark.parametrize("table", paper_tables())
def test_of_equal_methods_at_most_one_table_in_twenty_has_a_better_or_worse(table):
    draw, tables = random.Random(0), 300
    found = [judge(draw_table(draw, table)) for _ in range(tables)]
    wrong = sum("better" in verdicts or "worse" in verdicts for verdicts in found)
    assert wrong <= 0.05 * tables
    equal = statistics.fmean(verdict == "equal" for verdicts in found for verdict in verdicts)
    assert 0.6 < equal < 0.75  # as docs/tables.md says


def test_the_power_is_what_the_docs_say():
    text = (DOCS / "tables.md").read_text()
    rows = re.findall(r"^\| (\d) sd \| (\d+)% \| (\d+)% \| (\d+)% \|$", text, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4, 5]
    draw = random.Random(0)
    for row in rows:
        shift, *percent = map(int, row)
        p_values = [
            welch(
                Summary.of([draw.gauss(shift, 1) for _ in range(5)]), Summary.of([draw.gauss(0, 1) for _ in range(5)])
            )
            for _ in range(2000)
        ]
        for numbers, expected in zip((1, 20, 56), percent, strict=True):
            share = statistics.fmean(difference.p_value() < 0.05 / numbers for difference in p_values)
            assert math.isclose(100 * share, expected, abs_tol=4), (shift, numbers)
