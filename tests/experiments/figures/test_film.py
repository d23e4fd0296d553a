"""The film: what its frames show, and the files that it is written to."""

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from PIL import Image

from bsam.experiments.figures import film
from bsam.experiments.figures.film import compute_film, write_film

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def short():
    return compute_film(num_frames=3, epochs=4)


def test_both_methods_are_seen_after_the_same_steps(short):
    assert short.steps == tuple(sorted(short.steps))
    assert set(short.maps) == {"sam-sgd", "bsam"}
    for maps in short.maps.values():
        assert len(maps) == len(short.steps)
        assert not maps[0].probability.equal(maps[-1].probability)  # it learns
        assert 0 <= maps[-1].probability.min() < maps[-1].probability.max() <= 1


@pytest.mark.parametrize("ending", [".webp", ".png"])
def test_it_is_a_file_that_moves_and_stops(short, tmp_path, monkeypatch, ending):
    monkeypatch.setattr(film, "compute_film", lambda: short)
    with Image.open(write_film(tmp_path / "new" / f"film{ending}")) as image:
        assert image.n_frames == len(short.steps)
        assert image.info["loop"] == 1


def test_certain_means_the_same_as_in_the_other_figures(short, monkeypatch):
    """The share in the title is that of predictions above the one threshold."""
    titles = []
    monkeypatch.setattr(Axes, "set_title", lambda axes, label, **options: titles.append(label))
    film._frame(short, 0)
    assert len(titles) == 2
    assert all("more than 99% certain on " in title for title in titles)


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must end in one of: \.webp, \.png"):
        write_film(tmp_path / "film.mp4")


def test_the_film_of_the_docs_is_small():
    path = ROOT / "docs" / "images" / "theory" / "film.webp"
    assert path.stat().st_size < 2e6
    with Image.open(path) as image:
        assert image.n_frames == 50
