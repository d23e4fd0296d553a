"""The pictures that the report begins with: one dot per number, in the colour of its mark."""

import re

import pytest

from bsam.experiments.comparison import Block, Cell, Comparison, Published, Row
from bsam.experiments.report.overview import draw_panels
from bsam.experiments.verdicts import Summary, welch


def row(values, mark, *, ours=False):
    published = Published(90.0, 0.2, "90.00 (0.20)")
    difference = None if mark == "not run" else sum(values) / len(values) - published.mean
    cells = (Cell("accuracy", values, published, difference, mark),)
    return Row("bSAM", "table1/cifar10/bsam", 32, len(values), 180, "full", cells, ours=ours)


def comparison(*rows):
    return Comparison("table1", "A table", (Block("cifar10", "A block", rows),))


def test_a_dot_has_the_colour_of_its_mark_and_rows_of_ours_have_none():
    rows = [row((90.0, 90.2, 90.1), "equal"), row((93.0, 93.2), "better"), row((), "not run")]
    accuracy, *_ = draw_panels([comparison(*rows, row((85.0, 85.5), "worse", ours=True))])
    for svg in (accuracy.numbers, accuracy.gains):
        assert "var(--equal)" in svg
        assert "var(--better)" in svg
        assert "var(--worse)" not in svg
        assert "#1234" not in svg
    assert accuracy.title == "accuracy ↑"


def test_nothing_is_drawn_without_numbers():
    assert draw_panels([comparison(row((), "not run"))]) == []


@pytest.mark.parametrize(("value", "side"), [(91.0, "above"), (89.0, "below")])
def test_gains_are_in_margins_with_welchs_interval(value, side, monkeypatch):
    from bsam.experiments.report import overview

    drawn = []
    monkeypatch.setattr(overview, "_draw_dot", lambda axes, cell, *place: drawn.append(place))
    values = (value - 0.1, value, value + 0.1)
    draw_panels([comparison(row(values, "open"))])
    margin = overview.margins()["table1"]["cifar10"]["accuracy"]
    low, high = welch(Summary.of(values), Summary(90.0, 0.2, 5)).interval()
    (x, y, x_error, y_error), (_, gain, _, error) = drawn
    assert (x, y) == (90.0, pytest.approx(value))
    assert x_error > 0
    assert y_error > 0
    assert gain == pytest.approx((1 if side == "above" else -1) / margin)
    assert error == pytest.approx((high - low) / 2 / margin)


def test_ids_differ_between_the_pictures():
    panels = draw_panels([comparison(row((90.0, 90.2, 90.1), "equal"))])[:1]
    ids = re.findall(r'\bid="([^"]*)"', "".join(svg for panel in panels for svg in (panel.numbers, panel.gains)))
    assert len(ids) == len(set(ids))
