"""What every page must be in a browser: no wider than the window, all glyphs there, with contrast, without network."""

import contextlib

WIDTHS = (320, 400, 600, 800, 1400)
SCHEMES = ("light", "dark")

CONTRASTS = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const back = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if ((numbers(colour)[3] ?? 1) > 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const ink = element instanceof SVGElement ? style.fill : style.color;
    const [x, y] = [light(numbers(ink)), light(numbers(back(element)))];
    const ratio = (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
    found[`${ink} on ${back(element)}`] = ratio;
  }
  return found;
}"""

MISSING_GLYPHS = """() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 48;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const drawn = (text, font) => {
    context.clearRect(0, 0, 48, 48);
    context.font = font;
    context.fillText(text, 4, 36);
    return context.getImageData(0, 0, 48, 48).data.join();
  };
  const missing = new Set();
  const seen = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (element.closest("script, style")) continue;
    const font = `32px ${getComputedStyle(element).fontFamily}`;
    for (const character of walker.currentNode.data) {
      if (character.charCodeAt(0) < 128 || !character.trim() || seen.has(character + font)) continue;
      seen.set(character + font, true);
      // U+0378 has no character and so no glyph: what looks like it is the box of a missing glyph.
      if (drawn(character, font) === drawn("\\u0378", font)) missing.add(character);
    }
  }
  return [...missing];
}"""


@contextlib.contextmanager
def opened(browser, path, *, width=1400, scheme="light", details=False, **options):
    """Opens the page in a window of its own; asserts at the end that nothing went wrong and nothing was fetched."""
    wrong = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
    window = context.new_page()
    window.on("console", lambda message: wrong.append(message.text))
    window.on("pageerror", lambda error: wrong.append(str(error)))
    window.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else wrong.append(r.url))
    window.goto(path.as_uri())
    if details:
        window.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    yield window
    context.close()
    assert wrong == []


def check_page(browser, path, width, scheme):
    """All checks of a page in one window."""
    with opened(browser, path, width=width, scheme=scheme) as window:
        assert window.evaluate("document.documentElement.scrollWidth") <= width
        window.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
        assert window.evaluate("document.documentElement.scrollWidth") <= width
        assert window.evaluate(MISSING_GLYPHS) == []
        contrasts = window.evaluate(CONTRASTS)
        assert contrasts
        assert {pair: ratio for pair, ratio in contrasts.items() if ratio < 4.5} == {}
        background = window.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") == (scheme == "light")
