"""The figures show what their captions say, and the page on the theory quotes what was recorded."""

import dataclasses
import re
from pathlib import Path

import pytest
from matplotlib.text import Text

from bsam.experiments import figures, style
from bsam.experiments.figures import cards
from bsam.experiments.record import read_json

ROOT = Path(__file__).parents[3]
RECORD = read_json(ROOT / "results" / "figures.json")


ASCII = re.compile(r"\b(omega|theta|sigma|rho|lambda|gamma|epsilon|mu)\b|\w_[1-9]\b|\bsqrt\(|f\*\*")
"""Formulas as they are typed; what is between dollars is typeset."""

RESULTS = {
    "sam-vs-bayes": "neighbourhood",
    "worst-case": "neighbourhood",
    "smoothing": "smoothing",
    "theorem-2": "theorem_2",
    "biconjugate": "surfaces",
    "logistic": "logistic_result",
    "logistic-posterior": "logistic_result",
    "data-sets": "sets",
    "certainty": "moons_result",
    "moons": "moons_result",
    "relaxed-bayes": "relaxed_result",
}


@pytest.mark.filterwarnings("ignore:after 40 steps")  # the cards of the methods are not looked at
@pytest.mark.parametrize("name", figures.FIGURES)
def test_draws_a_file(name, request, tmp_path):
    found = figures.picture(name)
    if name.startswith("method-"):
        result = cards.compute_card(name.removeprefix("method-"), num_steps=40)
    else:
        result = request.getfixturevalue(RESULTS[name]) if name in RESULTS else found.compute()
    assert dataclasses.is_dataclass(result)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(result, dataclasses.fields(result)[0].name, None)
    figure = style.new_figure(*found.size)
    with style.in_print():
        found.draw(result, figure)  # a glyph that the font lacks is a warning, and an error here
        for axes in figure.axes:
            assert axes.get_xlabel() or axes.get_ylabel() or axes.get_title() or not axes.axison
        for text in figure.findobj(Text):
            assert not ASCII.search(re.sub(r"\$.*?\$", "", text.get_text())), text.get_text()
        vector = style.save(figure, tmp_path / "folder" / f"{name}.svg")
    assert b"<svg" in vector.read_bytes()
    assert b"<dc:date>" not in vector.read_bytes()


def test_a_second_run_writes_the_same_bytes(neighbourhood, tmp_path, monkeypatch):
    found = dataclasses.replace(figures.FIGURES["worst-case"], compute=lambda: neighbourhood)
    monkeypatch.setitem(figures.FIGURES, "worst-case", found)
    first, second = (figures.draw("worst-case", tmp_path / name).read_bytes() for name in ("1.svg", "2.svg"))
    assert first == second
    assert figures.draw("worst-case", tmp_path / "1.png").stat().st_size > 5000


@pytest.mark.parametrize("name", figures.FIGURES)
def test_the_page_shows_it(name):
    method = name.removeprefix("method-")
    image, page = f"images/theory/{name}.svg", "README.md" if name == "certainty" else "docs/theory.md"
    if method != name:
        image, page = f"images/methods/{method}.svg", f"docs/methods/{method}.md"
    assert 5000 < (ROOT / "docs" / image).stat().st_size < 250_000
    for each in (page, "docs/gallery.md"):
        assert f"{image})" in (ROOT / each).read_text()


@pytest.mark.parametrize("name", figures.FIGURES)
def test_its_words_can_be_read_on_a_phone(name):
    """The smallest letters, on a screen 400 pixels wide with the theme's margins, are at least 8 pixels high."""
    width = figures.FIGURES[name].size[0] * 72  # in points
    assert style.SMALLEST / width * (400 - 32) >= 8
