"""The demo's page: complete, readable on a telephone, without network."""

import dataclasses
import re

import pytest
import torch

import bsam
from bsam.experiments.data import load
from bsam.experiments.demo import CERTAIN, Map
from bsam.experiments.methods import METHODS
from bsam.experiments.report.demo_page import write_demo_page
from bsam.experiments.suites.unknown_inputs import unknown_images
from tests.experiments.browser_checks import SCHEMES, WIDTHS, check_page
from tests.experiments.test_runs import on_digits


def predictions_of(data, name):
    """Even predictions for an unknown set."""
    count = len(unknown_images(data, name, None))
    log_probs = torch.randn(count, 10, generator=torch.Generator().manual_seed(1)).log_softmax(1)
    return bsam.Predictions(log_probs, torch.zeros(count), None, 4, 0, "loop")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A page made of invented numbers; the demo's tests look at real ones."""
    generator = torch.Generator().manual_seed(0)
    log_probs = (3 * torch.randn(200, 10, generator=generator)).log_softmax(1)
    labels = torch.distributions.Categorical(logits=log_probs).sample()
    predictions = bsam.Predictions(log_probs, torch.zeros(200), labels, 4, 0, "loop")
    unknown = {"mirrored": 0.7, "photographs": 0.9}
    metrics = {"nll": 0.3, "ece": 0.02, "auroc": 0.9, "accuracy_90": 0.97, "unknown": unknown}
    seeds = [{"accuracy": 0.9 + k / 100, **metrics} for k in range(2)]
    configs = {m: dataclasses.asdict(on_digits(m)) for m in METHODS}
    record = {
        "seeds": 2,
        "methods": {m: {"config": configs[m], "runs": seeds, "seconds": 1.5} for m in METHODS},
        "pairs": {"sgd": seeds},
        "environment": {"bsam": "0", "commit": "abc", "device": "CPU", "packages": {"torch": "2"}},
    }
    xs, ys = torch.linspace(-3, 3, 20), torch.linspace(-2, 2, 15)
    points = torch.randn(30, 2, generator=generator)
    moons = Map(xs, ys, torch.rand(15, 20, generator=generator), points, (points[:, 0] > 0).float())
    folder = tmp_path_factory.mktemp("report")
    data = load("digits")
    data = dataclasses.replace(data, test=(data.test[0][:200], data.test[1][:200]))
    strange = {method: {name: predictions_of(data, name) for name in unknown} for method in METHODS}
    maps = dict.fromkeys(["sam-sgd", "bsam"], moons)
    return write_demo_page(folder, record, dict.fromkeys(METHODS, predictions), strange, maps, data)


@pytest.fixture(scope="module")
def page(path):
    return path.read_text()


def test_everything_is_there(page):
    figures = re.findall(r"<figure>(.*?)</figure>", page, re.DOTALL)
    mistakes = [figure for figure in figures if "This is a" in figure]
    assert len(mistakes) == 6
    strange = [figure for figure in figures if "This is no digit" in figure]
    assert len(strange) == 3
    assert len(figures) == 2 * len(METHODS) + 1 + 2 + len(mistakes) + len(strange)
    for figure in figures:
        assert "<figcaption>" in figure
        assert re.search('role="img" aria-label="|alt="An image (of the|that is no) digit', figure)
    for name in (method.title for method in METHODS.values()):
        assert f"<td>{name}</td>" in page
    for axis in ("confidence", "accuracy", "first feature", "second feature", "probability of class 1"):
        assert f">{axis}</text>" in page
    assert page.count("the accuracy in a bin") == 1  # one caption for all diagrams
    assert "bSAM is an optimizer for neural networks." in page
    assert '<tr class="shaded"><td>bSAM</td>' in page
    assert "<td>bSAM</td><td>9.5</td><td>3.0</td><td>70.0</td><td>90.0</td>" in page  # doubt, in percent
    assert "make demo" in page
    assert "What to try next" in page
    assert "91.00" not in page
    assert "90.50 <small>(0.71)</small>" in page


def test_certain_means_the_same_as_in_the_figures_of_the_docs(page):
    assert CERTAIN == 0.99
    shares = re.findall(r"is more than ([\d.]+%) certain on \d+% of the area far from the points", page)
    assert shares == ["99%", "99%"]


def test_methods_have_their_names_to_the_last_line(page):
    last = re.findall(r'<p class="soft">(.*?)</p>', page, re.DOTALL)[-1]
    assert "SAM-SGD 1.5 s, " in last
    assert "sam-sgd" not in last


def test_it_needs_no_network(page):
    references = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(r.startswith(("#", "data:")) for r in references), references
    assert not re.search(r"@import|url\((?!#)", page)
    assert "<script" not in page


def test_it_has_a_dark_mode_that_figures_follow(page):
    assert "prefers-color-scheme: dark" in page
    assert "currentColor" in page
    assert "#123456" not in page


def test_ids_are_unique(page):
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_looks_right(browser, path, width, scheme):
    check_page(browser, path, width, scheme)
