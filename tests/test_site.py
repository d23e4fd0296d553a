"""The built documentation in a browser: every page at four widths, light and dark, without a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiments.browser_checks import MISSING_GLYPHS, SCHEMES, opened

ROOT = Path(__file__).parent.parent
WIDTHS = (1400, 800, 600, 400)
OWN_SCROLL = """() => [...document.querySelectorAll(".equation .scroll")].filter((box) => {
  const math = box.querySelector("math").getBoundingClientRect();
  return math.width > box.clientWidth + 1 && box.scrollWidth <= box.clientWidth;
}).map((box) => box.textContent)"""
"""Equations that are cut off: wider than their box, which does not scroll."""
SCROLLS = """(kind) => [...document.querySelectorAll(kind)].filter((box) => box.scrollWidth > box.clientWidth)
  .map((box) => box.innerText)"""
CONTRASTS = """() => {
  const rgba = (colour) => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = ([r, g, b, a], [x, y, z]) => [r, g, b].map((v, i) => a * v + (1 - a) * [x, y, z][i]);
  const ground = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
    return layers.reduceRight((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const light = (colour) => colour.map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = {};
  const walker = document.createTreeWalker(document.querySelector("article") ?? document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.getClientRects().length) continue;
    if (element.closest("a.headerlink, .md-clipboard")) continue;  // shown when the mouse is there
    const below = ground(element);
    const [x, y] = [light(over(rgba(getComputedStyle(element).color), below)), light(below)];
    found[walker.currentNode.data.trim().slice(0, 20)] = (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
  }
  return found;
}"""
"""Contrast of each text of the article with what is below it, where both may be transparent."""

LETTERS = """() => {
  const italic = (c) => {  // what a browser makes of a single letter in <mi>
    for (const [first, last, to] of [["a", "z", 0x1d44e], ["A", "Z", 0x1d434], ["α", "ω", 0x1d6fc]]) {
      if (c === "h") return "ℎ";
      if (c >= first && c <= last) return String.fromCodePoint(to + c.codePointAt(0) - first.codePointAt(0));
    }
    return c;
  };
  const found = new Set();
  for (const token of document.querySelectorAll("math mi, math mn, math mo")) {
    const characters = [...token.textContent.trim()];
    const single = token.localName === "mi" && characters.length === 1 && !token.hasAttribute("mathvariant");
    for (const each of characters) if (each.trim()) found.add(single ? italic(each) : each);
  }
  return [...found];
}"""
"""The characters of the formulas of a page."""
NOT_IN_THE_FONT = """(characters) => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 64;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const drawn = (text, font) => {
    context.clearRect(0, 0, 64, 64);
    context.font = `40px ${font}`;
    context.fillText(text, 8, 48);
    return context.getImageData(0, 0, 64, 64).data.join();
  };
  return characters.filter((c) => drawn(c, '"STIX Two Math", monospace') !== drawn(c, '"STIX Two Math", serif')
    || drawn(c, '"STIX Two Math"') === drawn(c, "monospace"));
}"""
"""Characters for which a browser takes another font: they look like the fallback, or differ with it."""


PROSE = """() => {
  const copy = (document.querySelector("article") ?? document.body).cloneNode(true);
  for (const each of copy.querySelectorAll("code, pre, math, script, style")) each.remove();
  return copy.textContent;
}"""
"""The text of a page without its code and its formulas."""
PLAIN_BLOCKS = """() => [...document.querySelectorAll("article .highlight:not([class*=language], .doc-signature)")]
  .map((block) => block.textContent.trim()).filter((text) => !text.startsWith(">>>"))"""
"""Blocks of code without a language that are no doctest, as an indented block of a docstring is."""
LATEX = re.compile(r".*(?:\$|\\[a-zA-Z]).*")
GREEK = "alpha|beta[12]?|gamma|delta|epsilon|eps|lambda|mu|omega|rho|sigma|theta"
ASCII = re.compile(rf".*(?:\bsqrt\b|\bnorm\(|sum_|\^|<-|f\*|\b(?:{GREEK})\b).*")


@pytest.fixture(scope="module")
def site(tmp_path_factory, browser):
    """The site, built as `make docs` does; only where there is a browser to look at it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


def pages(site):
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def test_code_and_tables_fit_a_wide_window_and_equations_a_narrow_one(site, browser):
    """Scrolling sideways is for what cannot be made shorter."""
    wrong = []
    for path in pages(site):
        with opened(browser, path) as window:
            for width, kind in ((1400, "article pre > code, .md-typeset__scrollwrap"), (400, ".equation .scroll")):
                window.set_viewport_size({"width": width, "height": 900})
                wrong += [(path.name, width, each) for each in window.evaluate(SCROLLS, kind)]
    assert wrong == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_page_fits_is_legible_and_needs_no_network(site, browser, scheme):
    found = pages(site)
    assert len(found) > 30
    wrong = []
    for path in found:
        name = path.relative_to(site).as_posix()
        with opened(browser, path, scheme=scheme) as window:
            for width in WIDTHS:
                window.set_viewport_size({"width": width, "height": 900})
                needs = window.evaluate("document.documentElement.scrollWidth")
                wrong += [f"{name}: {needs} pixels wide in a window of {width}"] if needs > width else []
                wrong += [f"{name}: cut off at {width}: {each}" for each in window.evaluate(OWN_SCROLL)]
            if scheme == SCHEMES[0]:  # the same letters in both
                wrong += [f"{name}: no glyph for {each}" for each in window.evaluate(MISSING_GLYPHS)]
            for text, ratio in window.evaluate(CONTRASTS).items():
                wrong += [f"{name}: contrast {ratio:.2f} of {text!r}"] if ratio < 4.5 else []
    assert wrong == []


def test_no_page_shows_latex_and_no_docstring_a_formula_in_ascii(site, browser):
    wrong = []
    for path in pages(site):
        name = path.relative_to(site).as_posix()
        with opened(browser, path) as window:
            prose = window.evaluate(PROSE)
            wrong += [f"{name}: {each}" for each in LATEX.findall(prose)]
            if name.startswith("reference/"):
                wrong += [f"{name}: {each}" for each in ASCII.findall(prose)]
                wrong += [f"{name}, a block without a language: {each}" for each in window.evaluate(PLAIN_BLOCKS)]
    assert wrong == []


def test_formulas_are_drawn_in_their_own_font(site, browser):
    """Every letter, so that none is missing where no font for mathematics is installed."""
    with opened(browser, site / "theory.html") as window:
        assert window.evaluate("document.fonts.ready.then(() => document.fonts.check('32px \"STIX Two Math\"'))")
        letters = window.evaluate(LETTERS)
        assert {"\N{MATHEMATICAL ITALIC SMALL THETA}", "\N{MATHEMATICAL ITALIC SMALL M}", "\N{NABLA}"} <= set(letters)
        assert window.evaluate(NOT_IN_THE_FONT, letters) == []
        assert window.evaluate(NOT_IN_THE_FONT, ["\N{SNOWMAN}"]) == ["\N{SNOWMAN}"]


def test_the_search_finds_a_page_without_a_server(site, browser):
    with opened(browser, site / "index.html") as window:
        window.get_by_role("textbox", name="Search").fill("m-sharpness")
        window.wait_for_selector(".md-search-result__link", timeout=20_000)
        assert "theory.html" in " ".join(
            link.get_attribute("href") for link in window.query_selector_all(".md-search-result__link")
        )


def test_the_page_to_explore_is_whole_in_its_frame_and_has_one_heading(site, browser):
    """Opened as a file, where a page may not look into its frame."""
    with opened(browser, site / "explore.html") as window:
        inside = window.frame_locator("article iframe")
        inside.locator("html.framed").wait_for()
        window.wait_for_function("document.querySelector('article iframe').style.height.endsWith('px')")
        needs = inside.locator("html").evaluate("(root) => root.getBoundingClientRect().height")
        assert needs <= window.locator("article iframe").bounding_box()["height"] - 2 < needs + 1.5
        assert not inside.locator("h1").is_visible()
