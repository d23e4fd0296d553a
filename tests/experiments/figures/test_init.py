"""The figures show what their captions say, and the page on the theory quotes what was recorded."""

import dataclasses
from pathlib import Path

import pytest

from bsam.experiments import figures, style
from bsam.experiments.record import read_json

ROOT = Path(__file__).parents[3]
RECORD = read_json(ROOT / "results" / "figures.json")


RESULTS = {
    "sam-vs-bayes": "neighbourhood",
    "worst-case": "neighbourhood",
    "smoothing": "smoothing",
    "theorem-2": "theorem_2",
    "biconjugate": "surfaces",
    "logistic": "logistic_result",
    "logistic-posterior": "logistic_result",
    "data-sets": "sets",
    "moons": "moons_result",
    "relaxed-bayes": "relaxed_result",
}


@pytest.mark.parametrize("name", figures.FIGURES)
def test_draws_a_file(name, request, tmp_path):
    found = figures.picture(name)
    result = request.getfixturevalue(RESULTS[name]) if name in RESULTS else found.compute()
    assert dataclasses.is_dataclass(result)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(result, dataclasses.fields(result)[0].name, None)
    figure = style.new_figure(*found.size)
    found.draw(result, figure)
    for axes in figure.axes:
        assert axes.get_xlabel() or axes.get_ylabel() or axes.get_title()
    assert style.save(figure, tmp_path / f"{name}.png").stat().st_size > 5000
    assert b"<svg" in style.save(figure, tmp_path / "folder" / f"{name}.svg").read_bytes()


@pytest.mark.parametrize("name", figures.FIGURES)
def test_the_page_shows_it(name):
    image = ROOT / "docs" / "images" / "theory" / f"{name}.png"
    assert 5000 < image.stat().st_size < 150_000
    assert f"](images/theory/{name}.png)" in (ROOT / "docs" / "theory.md").read_text()
