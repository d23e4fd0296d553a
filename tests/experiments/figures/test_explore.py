"""The page to explore the theory with: its numbers are those of `bsam.theory`, by keyboard, mouse and finger."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bsam.experiments.figures.explore import LOSSES, MEANS, RADII, SIGMAS, compute_grids, sharp_and_flat, write_explore
from bsam.theory.fenchel import biconjugate, expected_negative_loss, max_loss, max_loss_in_ball
from tests.experiments.browser_checks import SCHEMES, WIDTHS, check_page, opened

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_explore(tmp_path_factory.mktemp("explore") / "explore.html")


def test_the_derivatives_of_the_loss_are_right():
    loss, theta, h = sharp_and_flat(), np.linspace(-5, 5, 101), 1e-5
    np.testing.assert_allclose(loss.gradient(theta), (loss(theta + h) - loss(theta - h)) / (2 * h), atol=1e-7)
    slopes = (loss.gradient(theta + h) - loss.gradient(theta - h)) / (2 * h)
    np.testing.assert_allclose(loss.hessian(theta), slopes, atol=1e-6)
    assert loss(np.array(2.0)) < loss(np.array(-2.0)) < 3


@pytest.mark.parametrize("name", LOSSES)
def test_the_page_holds_the_theorys_numbers(path, name):
    text = path.read_text()
    tables = json.loads(re.search(r'id="tables">(.*?)</script>', text).group(1))
    (shown,) = (each for each in tables["losses"] if each["name"] == name)
    grids = compute_grids(name)
    for key, values in vars(grids).items():
        found = np.array(shown[key], dtype=float)  # null is nan
        np.testing.assert_allclose(found, np.where(np.isfinite(values), values, np.nan), atol=6e-4)
    finite = np.isfinite(grids.relaxed)
    assert (grids.biconjugate >= grids.expected - 2e-3).all()  # f** <= f
    assert (grids.relaxed >= grids.loss - 1e-9)[finite].all()
    np.testing.assert_allclose(grids.ball[0], grids.loss)
    if name == "Quadratic":
        assert (finite == (SIGMAS[:, None] ** 2 * 0.5 < 1)).all()
        np.testing.assert_allclose(grids.biconjugate, grids.expected, atol=2e-3)
    assert len(text) < 400_000


def read(window, name):
    return float(window.locator(f"#{name}").evaluate("e => e.value").replace("−", "-"))


def expected_numbers(name, sigma, rho, mean):
    loss = LOSSES[name][1]()
    return {
        "loss": float(loss(np.array(mean))),
        "expected": -float(expected_negative_loss(loss, mean, sigma**2).value),
        "ball": float(max_loss_in_ball(loss, mean, rho).value),
        "relaxed": float(max_loss(loss, mean, 1 / sigma**2).value),
        "biconjugate": -float(biconjugate(loss, np.array([mean]), np.array([sigma**2]), tolerance=1e-4).value[0]),
    }


def sigma_of(window):
    share = window.locator("#sigma").evaluate("e => e.valueAsNumber / e.max")
    return float(np.exp(np.log(SIGMAS[0]) + share * np.log(SIGMAS[-1] / SIGMAS[0])))


def test_the_keyboard_moves_the_numbers(browser, path):
    with opened(browser, path) as window:
        window.locator("#loss").focus()
        window.keyboard.press("ArrowDown")
        assert "deep, sharp minimum" in window.locator("#about").text_content()
        before = [read(window, f"{key}-at") for key in ("ball", "relaxed", "biconjugate")]
        for slider, key, presses in (("sigma", "ArrowLeft", 37), ("rho", "ArrowRight", 23), ("mean", "ArrowRight", 41)):
            window.keyboard.press("Tab")
            while window.evaluate("document.activeElement.id") != slider:
                window.keyboard.press("Tab")
            for _ in range(presses):
                window.keyboard.press(key)
        sigma, rho, mean = sigma_of(window), *(read(window, name) for name in ("rho", "mean"))
        assert sigma == pytest.approx(read(window, "sigma-value"), abs=0.006)
        assert (rho, mean) == (pytest.approx(0.8 + 0.23), pytest.approx(-1.6 + 0.41))
        for key, value in expected_numbers("Sharp and flat", sigma, rho, mean).items():
            assert read(window, f"{key}-at") == pytest.approx(value, abs=0.01), key
        after = [read(window, f"{key}-at") for key in ("ball", "relaxed", "biconjugate")]
        assert all(abs(new - old) > 0.02 for new, old in zip(after, before, strict=True))


def test_minimisers_are_those_of_the_objectives(browser, path):
    with opened(browser, path) as window:
        rho, delta, sigma = read(window, "rho"), read(window, "delta"), sigma_of(window)
        loss, fine = LOSSES["Three minima"][1](), np.linspace(MEANS[0], MEANS[-1], 2241)
        objectives = {
            "expected": -expected_negative_loss(loss, fine, sigma**2).value,
            "ball": max_loss_in_ball(loss, fine, rho).value,
            "relaxed": max_loss(loss, fine, np.full_like(fine, 1 / sigma**2)).value,
        }
        for name, values in objectives.items():
            best = fine[(values + delta / 2 * fine**2).argmin()]
            assert read(window, f"{name}-minimiser") == pytest.approx(best, abs=0.03), name
        window.locator("#loss").select_option("Quadratic")
        window.locator("#sigma").press("End")
        assert window.locator("#relaxed-at").evaluate("e => e.value") == "infinite"
        assert window.locator("#relaxed-minimiser").evaluate("e => e.value") == "none"


def test_a_finger_on_the_plot_moves_the_mean(browser, path):
    with opened(browser, path, width=400, has_touch=True) as window:
        plot = window.locator("#objectives")
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        x = box["x"] + 46 + 0.75 * (box["width"] - 54)
        window.touchscreen.tap(x, box["y"] + box["height"] / 2)
        mean = MEANS[0] + 0.75 * (MEANS[-1] - MEANS[0])
        assert read(window, "mean") == pytest.approx(mean, abs=0.06)
        there = LOSSES["Three minima"][1]()(np.array(read(window, "mean")))
        assert read(window, "loss-at") == pytest.approx(float(there), abs=0.01)
        assert len(window.locator("#objectives circle").all()) >= 3


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_looks_right(browser, path, width, scheme):
    check_page(browser, path, width, scheme)


def test_the_page_of_the_docs_is_this_one(path):
    """`bsam figure explore --out docs/explore_theory.html` wrote it; other machines may differ in the last digit."""

    def parts(text):
        before, tables, after = re.split(r'(?<=id="tables">)(.*?)(?=</script>)', text, maxsplit=1)
        return before, json.loads(tables), after

    before, tables, after = parts((ROOT / "docs" / "explore_theory.html").read_text())
    now = parts(path.read_text())
    assert (before, after) == (now[0], now[2])
    for old, new in zip(tables["losses"], now[1]["losses"], strict=True):
        for key in ("expected", "biconjugate", "relaxed", "ball"):
            np.testing.assert_allclose(np.array(old[key], float), np.array(new[key], float), atol=2.1e-3)
    assert len(tables["radii"]) == len(RADII)
