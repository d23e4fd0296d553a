"""The page of `bsam report`: complete, honest about what is missing, readable everywhere, without network."""

import base64
import contextlib
import dataclasses
import hashlib
import html
import json
import os
import re
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import bsam
from bsam.experiments import demo
from bsam.experiments.commands import app
from bsam.experiments.comparison import TABLES, compare
from bsam.experiments.config import override
from bsam.experiments.evaluate import evaluate
from bsam.experiments.figures import FIGURES
from bsam.experiments.paper.presets import preset
from bsam.experiments.record import environment, read_json, write_json
from bsam.experiments.report import paper_page
from bsam.experiments.report.gallery import gallery
from bsam.experiments.report.paper_page import write_paper_page
from bsam.experiments.reproduce.show import scale_note
from bsam.experiments.runs import Run
from bsam.experiments.stacks import Stack
from tests.experiments.browser_checks import SCHEMES, WIDTHS, check_page, opened

ROOT = Path(__file__).parents[3]
HEADS = {"accuracy": "accuracy ↑", "nll": "NLL ↓", "ece": "ECE ↓", "auroc": "AUROC ↑"}
STUDIES = {
    "sweep_rho": ("The radius", [0.001, 0.01, 0.1]),
    "ablate_samples": ("Samples", [0, 1, 8]),
    "ablate_noise": ("Noise", ["MNIST", "CIFAR-10", "CIFAR-100"]),
}
SYMBOLS = {
    "=": "equal",
    "▲": "better",
    "▼": "worse",
    "?": "open",
    "◐": "reduced",
    "–": "not run",
}
METHODS = ("sgd", "sam-sgd", "adam", "bsam")
OF_THE_THEORY = {name for name in FIGURES if not name.startswith("method-")}
"""The figures that the report shows; the others are the cards of the methods."""


def record_a_run(folder, name, seed):
    """Two epochs on digits, recorded as the tiny scale's run of another preset."""
    config = override(preset("digits/bsam"), ["epochs=2", "beta2=0.9"])
    Stack.start([Run(folder / "run", config, seed, name)], device="cpu").train()
    evaluate(folder / "run", samples=[32], device="cpu")
    return json.loads((folder / "run" / "record.json").read_text()) | {"scale": "tiny"}


def invent(name, seed, quality, changes=()):
    """The record of a run that never was: `quality` decides its numbers."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = (quality * torch.randn(300, 10, generator=generator, dtype=torch.float64)).log_softmax(1)
    labels = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(1)
    evaluation = bsam.metrics.summary((log_probs, labels), num_bootstrap=10).as_dict()
    evaluation["reliability"] = bsam.metrics.reliability(log_probs, labels).as_rows()
    return {
        "preset": name,
        "seed": seed,
        "config": dataclasses.asdict(override(preset(name), changes)),
        "seconds": 3700.0,
        "final_loss": 0.1,
        "environment": environment(),
        "scale": "reduced" if changes else "full",
        "evaluations": {"test": {"32": evaluation}, "environment": environment()},
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Records of full, reduced and tiny runs, of a sweep, the demo and the figures' numbers."""
    folder = tmp_path_factory.mktemp("results")
    records = [invent(f"table1/cifar10/{m}", seed, 3 + i) for i, m in enumerate(METHODS) for seed in range(5)]
    records += [invent("here/cifar10/ivon", seed, 2) for seed in range(5)]
    records += [invent("table6/mnist/bsam", seed, 6, ["epochs=10"]) for seed in range(2)]
    records += [invent("table6/mnist/sgd", seed, 6) for seed in range(2)]
    for seed in range(3):  # as printed but for the ECE, which nothing can be said about
        record = invent("table6/mnist/adam", seed, 6)
        record["evaluations"]["test"]["32"] |= {"accuracy": 0.9841, "nll": 0.05, "ece": 0.0036 * seed, "auroc": 0.979}
        records.append(record)
    records += [record_a_run(tmp_path_factory.mktemp("run"), "table6/fashionmnist/bsam", 0)]
    for record in records:
        path = folder / "runs" / record["preset"] / f"seed{record['seed']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, record)
    for file, (title, x) in STUDIES.items():
        points = [[0.1, 0.01], [0.2, None], [0.3, 0.02]]
        metrics = {"bSAM": dict.fromkeys(HEADS, points), "SAM-SGD": dict.fromkeys(HEADS, points[::-1])}
        metrics["bSAM"]["auroc"] = [points[0], [None, None], points[2]]  # undefined, without a mistake
        series = [{"label": label, "x": x, "seeds": [2, 1, 2], "metrics": found} for label, found in metrics.items()]
        study = {"what": "", "title": title, "x": "setting", "scale": "tiny", "series": series}
        write_json(folder / f"{file}.json", study | {"environment": environment(), "command": "bsam sweep rho"})
    seeds = [{"seed": 100, "accuracy": 0.9, "nll": nll, "ece": 0.02, "auroc": 0.9} for nll in (0.4, 0.3)]
    tries = [{"settings": {"lr": seed["nll"]}, "nll": seed["nll"], "seeds": [seed]} for seed in seeds]
    tries.append({"settings": {"lr": 9.0}, "nll": None, "seeds": [{"seed": 100, "diverged": "not finite"}]})
    tuning = {"rule": "the lowest NLL", "validation": 5000, "epochs": 60, "tries": tries, "seconds": 50.0}
    write_json(folder / "tuning_cifar10.json", tuning | {"chosen": tries[1], "command": "bsam tune cifar10"})
    for name in ("demo.json", "figures.json"):
        (folder / name).write_text((ROOT / "results" / name).read_text())
    return folder


@pytest.fixture(scope="module")
def path(results):
    out = results / "report" / "paper.html"
    figures = ROOT / "docs" / "images" / "theory"
    arguments = ["report", "--records", results / "runs", "--figures", figures, "--out", out]
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0
    assert "paper.html" in done.stdout.replace("\n", "")
    return out


@pytest.fixture(scope="module")
def page(path):
    return path.read_text()


def tables_of(page):
    """By label: the rows of a table, each the texts of its cells."""
    found = {}
    for label, table in re.findall(r'<table[^>]* aria-label="([^"]*)">(.*?)</table>', page, re.DOTALL):
        rows = re.findall(r"<tbody[^>]*>\s*<tr>(.*?)</tr>", table, re.DOTALL)
        cells = [re.findall(r"<(?:th|td)[^>]*>(.*?)</(?:th|td)>", row, re.DOTALL) for row in rows]
        found[html.unescape(label)] = [[re.sub(r"<[^>]*>", "", cell) for cell in row] for row in cells]
    return found


def test_every_table_is_there_with_its_numbers(page, results):
    tables = tables_of(page)
    assert len(tables["Overview"]) == len(TABLES) == 6
    for name, title in TABLES.items():
        for block in compare(name, results / "runs").blocks:
            shown = tables[f"Table {name[-1]}: {title}, {block.title}"]
            for row, (label, *cells) in zip(block.rows, shown, strict=True):
                assert html.unescape(label) == row.label
                for cell, text in zip(row.cells, cells, strict=True):
                    assert f"paper {cell.published.printed if cell.published else '—'}" in text
                    digits = {"accuracy": 2, "nll": 3, "ece": 4, "auroc": 3}[cell.metric]
                    deviation = "" if cell.sd is None else f"({cell.sd:.{digits}f}) "
                    ours = "– not run" if cell.mean is None else f"{cell.mean:.{digits}f} {deviation}paper "
                    assert text.startswith(ours)


def test_the_overview_counts_the_marks_of_the_papers_rows(page, results):
    totals = [0] * len(SYMBOLS)
    for (_, *counts), name in zip(tables_of(page)["Overview"], TABLES, strict=True):
        rows = [row for block in compare(name, results / "runs").blocks for row in block.rows]
        marks = [cell.mark for row in rows if not row.ours for cell in row.cells]
        assert [int(c) for c in counts] == [marks.count(mark) for mark in SYMBOLS.values()]
        totals = [total + int(count) for total, count in zip(totals, counts, strict=True)]
    foot = re.search(r"<tfoot>(.*?)</tfoot>", page, re.DOTALL).group(1)
    assert [int(count) for count in re.findall(r"<td>(\d+)</td>", foot)] == totals
    assert sum(totals) == 288
    assert "How many of the 288 numbers that the paper prints have which mark." in page


def test_marks_are_said_in_words_and_explained(page):
    legend = re.search(r'<dl class="legend">(.*?)</dl>', page, re.DOTALL).group(1)
    cells = [cell for rows in tables_of(page).values() for row in rows for cell in row[1:]]
    for symbol, mark in SYMBOLS.items():
        assert f"<dt>{symbol} {mark}</dt>" in legend
        assert any(f"{symbol} {mark}" in cell for cell in cells), mark
    assert "The best of the block, or not significantly worse (Welch, 5%)." in legend
    assert re.search(r"<strong>\d", page)


def test_what_is_shown_is_in_words(page):
    """No negative zero, no names of options, and the row of bSAM stands out."""
    shown = " ".join(cell for rows in tables_of(page).values() for row in rows for cell in row)
    assert not re.search(r"-0\.0+(?![\d])", shown)
    assert "abs_mean" not in shown
    assert "latest" not in shown
    assert "curvature of the mean gradient" in shown
    shaded = re.findall(r'<tbody class="shaded">\s*<tr><th[^>]*>([^<]*)</th>', page)
    assert set(shaded) == {"bSAM"}
    assert "Not run yet" not in page


def test_a_number_below_zero_has_a_minus_and_no_hyphen(page):
    body = html.unescape(re.sub(r"<(script|style|svg|pre)\b.*?</\1>", "", page, flags=re.DOTALL))
    words = re.sub(r"<[^>]*>", " ", body).split()
    assert [word for word in words if re.match(r"[([]?-\.?\d", word)] == []
    assert "−3.7" in words  # a number of the theory
    assert "e-13" in " ".join(words)  # the sign of an exponent is a part of the number


def test_smaller_runs_are_labelled(page):
    assert "<strong>Reduced: 10 of 75 epochs and 2 of 5 seeds.</strong>" in html.unescape(page)
    assert "<strong>Reduced: 2 of 5 seeds.</strong>" in page
    assert "<strong>3 of 5 seeds.</strong>" in page
    assert "<strong>Tiny: not the paper's data.</strong>" in html.unescape(page)
    assert scale_note("tiny") in html.unescape(page)
    assert "◐ tiny" in page
    (fashion,) = (rows for label, rows in tables_of(page).items() if "FashionMNIST" in label and "Table 6" in label)
    (row,) = (row for row in fashion if row[0] == "bSAM")
    for cell in row[1:]:  # one seed has no standard deviation
        assert re.match(r"\d+\.\d+ paper ", cell)


def test_diagrams_curves_and_figures_are_there(page):
    text = html.unescape(page)
    for label in ("SGD", "SAM-SGD", "Adam", "bSAM"):
        assert f"Reliability diagram of {label} in table1, ResNet-20-FRN on CIFAR-10" in text
    assert "Reliability diagram of VOGN" not in text  # was not run
    for title, _ in STUDIES.values():
        for head in HEADS.values():
            assert f'aria-label="{title}: {head}"' in text
    assert tables_of(page)["Noise"][1] == ["bSAM, setting = CIFAR-10", "0.20", "0.200", "0.2000", "-"]
    pictures = list(gallery(ROOT / "docs" / "images" / "theory"))
    assert {picture.name for picture in pictures} == OF_THE_THEORY
    assert len(pictures) == text.count('src="data:image/')
    for picture in pictures:
        assert picture.caption.endswith(".")  # a sentence
        assert f'alt="{picture.caption}"' in text
    assert "0.849045" in text  # results/figures.json: theorem_2, sigma_squared


def test_the_demo_is_shown_as_recorded(page):
    record = json.loads((ROOT / "results" / "demo.json").read_text())
    assert tables_of(page)["The digits demo"] == [[name, *row] for name, row in demo.cells(record)]


def test_rows_of_ours_say_their_settings(page):
    ours = "IVON (added here) is not in the paper. Its settings: published by its authors"
    assert page.count(ours) == 1
    block = page[page.index("ResNet-20-FRN on CIFAR-10</h3>") :]
    assert block.index("</table>") < block.index(ours) < block.index("<h3>")


def test_the_tries_of_a_tuning_are_shown_the_best_first(page):
    assert "3 settings, each with 60 epochs, 1 seed, rated on 5,000 training examples that were held out" in page
    rows = tables_of(page)["Settings chosen here"]
    assert [row[0] for row in rows] == ["lr = 0.3", "lr = 0.4", "lr = 9.0"]
    assert rows[0][1:3] == ["90.00", "0.300"]
    assert rows[2][1:] == ["diverged"] * 4


def commands_of(page):
    blocks = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
    return {line for block in blocks for line in html.unescape(re.sub(r"<[^>]*>", "", block)).splitlines()}


def test_every_command_is_one_of_the_app(page):
    command = typer.main.get_command(app)
    commands = commands_of(page)
    assert len(commands) > 70
    for line in commands:
        program, *arguments = shlex.split(line)
        assert program == "bsam"
        with command.make_context(program, arguments, resilient_parsing=True) as context:
            name, found, rest = command.resolve_command(context, arguments)
            found.make_context(name, rest, parent=context)  # raises on what it does not know


def test_under_every_number_is_its_command(page):
    for label, table in re.findall(r'<table class="sortable" aria-label="([^"]*)">(.*?)</table>', page, re.DOTALL):
        if label not in {
            "Settings chosen here",
            *(title for title, _ in STUDIES.values()),
        }:  # one command for all of its rows, below the table
            assert table.count("<pre>") == table.count("<tbody"), label


def test_it_needs_no_network_and_is_light(page):
    references = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(r.startswith(("#", "data:")) for r in references), references
    assert not re.search(r"@import|url\((?!#)", page)
    assert len(page.encode()) < 5e6


def test_ids_are_unique_and_links_lead_to_them(page):
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'<a href="#([^"]*)"', page)) <= set(ids)


def test_without_any_record_everything_is_missing(tmp_path):
    (tmp_path / "runs").mkdir()
    page = write_paper_page(tmp_path / "paper.html", tmp_path / "runs", tmp_path).read_text()
    for label, rows in tables_of(page).items():
        if label != "Overview":
            assert all(cell.startswith("– not run") for row in rows for cell in row[1:]), label
    assert page.count("The folder of figures has no such file.") == len(OF_THE_THEORY)
    assert "5 studies have no curve yet." in page
    assert {
        "bsam demo",
        "bsam sweep rho",
        "bsam ablate noise",
        "bsam ablate curvature",
        "bsam tune cifar10",
    } <= commands_of(page)
    assert "No run is recorded yet." in page


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="runs is no folder of records: name one with --records"):
        write_paper_page(tmp_path / "paper.html", tmp_path / "runs", tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "demo.json").write_text("{")
    with pytest.raises(ValueError, match=r"demo\.json is not a record"):
        write_paper_page(tmp_path / "paper.html", tmp_path / "runs", tmp_path)
    assert not (tmp_path / "paper.html").exists()


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2) alt="'


class Tags(HTMLParser):
    """What a browser would make of a page: the scripts, the attributes, the labels."""

    def __init__(self, page):
        super().__init__()
        self.scripts, self.attributes, self.labels, self._script = [], set(), set(), False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self._script = tag == "script"
        self.attributes |= {name for name, _ in attributes}
        self.labels |= {value for name, value in attributes if name == "aria-label"}

    def handle_data(self, data):
        if self._script:
            self.scripts.append(data)
            self._script = False


def hostile(value, keep):
    """A record with every text in it replaced, but for the names of entries and what is under a name of `keep`."""
    if isinstance(value, dict):
        return {name: item if name in keep else hostile(item, keep) for name, item in value.items()}
    if isinstance(value, list):
        return [hostile(item, keep) for item in value]
    return HOSTILE if isinstance(value, str) else value


def test_what_records_say_is_shown_and_not_run(results, tmp_path):
    shutil.copytree(results, tmp_path / "results")
    records = [*(tmp_path / "results").glob("*.json"), *(tmp_path / "results").rglob("seed*.json")]
    for record in records:
        write_json(record, hostile(read_json(record), {"config", "preset", "scale", "changes"}))
    page = write_paper_page(tmp_path / "paper.html", tmp_path / "results" / "runs", tmp_path).read_text()
    tags = Tags(page)
    assert tags.scripts == [(Path(paper_page.__file__).parent / "sort.js").read_text()]
    assert not {name for name in tags.attributes if name.startswith("on")}
    assert f"{HOSTILE}: accuracy ↑" in tags.labels
    assert html.escape(HOSTILE) in page


def test_a_browser_may_run_the_script_of_the_page_and_no_other(page):
    (script,) = Tags(page).scripts
    sha256 = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert f"script-src 'sha256-{sha256}';" in html.unescape(policy)


def test_a_page_is_replaced_in_one_go_and_a_link_is_not_followed(results, tmp_path, monkeypatch):
    out = tmp_path / "paper.html"
    (tmp_path / "elsewhere").write_text("of somebody else")
    out.symlink_to(tmp_path / "elsewhere")
    write_paper_page(out, results / "runs", tmp_path)
    assert (tmp_path / "elsewhere").read_text() == "of somebody else"
    whole = out.read_text()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"paper.html could not be written: the disk is full"):
        write_paper_page(out, results / "runs", tmp_path)
    assert out.read_text() == whole


# ------------------------------------------------------------------ in a browser


@pytest.fixture
def open_page(browser, path):
    """Opens the page in a window of its own; asserts at the end that nothing went wrong and nothing was fetched."""
    with contextlib.ExitStack() as windows:
        yield lambda width=1200, **options: windows.enter_context(opened(browser, path, width=width, **options))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_looks_right(browser, path, width, scheme):
    check_page(browser, path, width, scheme)


@pytest.mark.parametrize("width", [320, 400, 800])
def test_the_page_of_the_recorded_runs_fits(browser, tmp_path, width):
    """They have rows that the small records of these tests have not, as the improvements of table 3."""
    page = tmp_path / "paper.html"
    write_paper_page(page, ROOT / "results" / "runs", ROOT / "docs" / "images" / "theory")
    check_page(browser, page, width, "light")


@pytest.mark.parametrize("width", [400, 600])
def test_the_numbers_of_a_row_are_level_also_in_a_narrow_window(open_page, width):
    window = open_page(width)
    uneven = window.evaluate(
        """() => [...document.querySelectorAll("table.sortable tbody tr")].filter((row) => {
          const top = (part) => part.getBoundingClientRect().top;
          const tops = (kind) => [...row.querySelectorAll(`td ${kind}`)].map(top);
          return [".paper", ".mark"].some((kind) => new Set(tops(kind)).size > 1);
        }).map((row) => row.innerText)"""
    )
    assert uneven == []
    heads = window.locator("table.sortable:not(.counts) thead th", has_text="accuracy").all()
    assert {head.evaluate("(head) => getComputedStyle(head).whiteSpace") for head in heads} == {"nowrap"}


def test_it_begins_with_pictures(open_page):
    window = open_page(400)
    assert window.locator("h1").is_visible()
    picture = window.get_by_role("img", name="Our accuracy against the paper's").bounding_box()
    table = window.locator("table").first.bounding_box()
    assert picture["y"] + picture["height"] < table["y"]
    assert window.locator("#table1 ~ table").first.is_visible()


def column_of(table, index):
    """The numbers of a column from top to bottom; None where it says missing."""
    script = f"rows => rows.map(row => row.cells[{index}].dataset.value ?? null)"
    values = table.locator("tbody > tr:first-child").evaluate_all(script)
    return [None if value is None else float(value) for value in values]


def test_a_click_on_a_head_sorts(open_page):
    window = open_page()
    table = window.locator("#table1 ~ table").first
    before = column_of(table, 0)
    assert before == list(range(1, len(before) + 1))
    accuracy = table.locator("thead th").nth(1)
    for order, reverse in (("descending", True), ("ascending", False)):  # higher is better: the best first
        accuracy.get_by_role("button").click()
        assert accuracy.get_attribute("aria-sort") == order
        values = column_of(table, 1)
        assert values[:5] == sorted(values[:5], reverse=reverse)
        assert values[5:] == [None] * (len(before) - 5)  # what is missing stays last
    nll = table.locator("thead th").nth(2)
    nll.get_by_role("button").click()
    assert nll.get_attribute("aria-sort") == "ascending"
    assert accuracy.get_attribute("aria-sort") == "none"
    first = table.locator("tbody").first  # a row keeps its command
    assert first.locator("pre").text_content().endswith(" bsam")
    assert first.locator("th").text_content() == "bSAM"
    table.locator("thead th").first.get_by_role("button").click()
    assert column_of(table, 0) == before


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_the_keyboard_sorts(open_page, key):
    window = open_page()
    table = window.get_by_role("table", name="The digits demo")
    table.locator("thead th").first.get_by_role("button").focus()
    for _ in range(3):
        window.keyboard.press("Tab")
    window.keyboard.press(key)
    values = column_of(table, 3)
    assert values == sorted(values)
    assert table.locator("thead th").nth(3).get_attribute("aria-sort") == "ascending"
    assert window.evaluate("document.activeElement.textContent") == "ECE ↓"


def test_every_table_with_numbers_of_runs_sorts(open_page, page):
    window = open_page()
    heads = window.locator("table.sortable thead th").count()
    assert heads == window.locator("table.sortable thead th[aria-sort=none] button").count()
    assert window.locator("table.sortable").count() == page.count("<table") - page.count('<table class="values"')


def test_it_can_be_read_without_scripts(open_page):
    window = open_page(java_script_enabled=False)
    table = window.locator("#table1 ~ table").first
    assert table.locator("thead").inner_text().split() == [
        "method",
        "accuracy",
        "↑",
        "NLL",
        "↓",
        "ECE",
        "↓",
        "AUROC",
        "↑",
    ]
    assert window.get_by_role("button").count() == 0
    command = table.locator("pre").first
    assert not command.is_visible()
    table.locator("summary").first.click()
    assert command.is_visible()
