"""The code of README and docs runs, and the pages do not lie about what is there."""

import importlib.util
import json
import re
import socket
import statistics
from pathlib import Path

import pytest
import torch

from bsam.experiments import demo
from bsam.experiments.comparison import TABLES
from bsam.experiments.config import from_mapping
from tests.conftest import SLOW
from tools.tables import pages, rewrite

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DEFINITION = re.compile(r"^ *def (test_\w+)\(", re.MULTILINE)
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE_OR_DIFF = re.compile(r"^```(?:python|diff)\n(.*?)^```", re.MULTILINE | re.DOTALL)
REMOVED = re.compile(r"^-.*$", re.MULTILINE)


def library(page):
    """The trainer's library that the code of a page needs: its name is that of the page."""
    return page.stem if page.parent.name == "integrations" and page.stem != "index" else None


def marks(page):
    """Code that needs a library runs with the tests of integrations; timm's where torchvision fits torch."""
    name = library(page)
    if name is None:
        asks = re.search(r"\b(to_onnx|fully_shard)\(", page.read_text())
        return [pytest.mark.skipif(bool(asks) and torch.__version__ < "2.11", reason="needs torch 2.11 or newer")]
    missing = pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")
    found = [pytest.mark.integrations, missing]
    return [*found, pytest.mark.gpu] if name == "timm" else found


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=marks(page)) for page in PAGES],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_the_code_on_the_page_runs(page, tmp_path, monkeypatch):
    """All blocks of a page, in order, as one program; on the page of a library, also what its diff leads to."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": "__page__"}
    for block in (CODE_OR_DIFF if library(page) else FENCE).finditer(text):
        line = text[: block.start()].count("\n") + 1
        code = block.group(1)
        if block.group().startswith("```diff"):
            code = re.sub("^[+ ]", "", REMOVED.sub("", code), flags=re.MULTILINE)
        code = "\n" * line + code  # so that a traceback shows the page's line
        exec(compile(code, str(page), "exec"), namespace)


def test_the_pages_have_code():
    assert sum(len(FENCE.findall(page.read_text())) for page in PAGES) >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_tests_that_the_pages_and_the_list_of_slow_ones_name_are_there():
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert named
    written = {
        name for path in ROOT.joinpath("tests").rglob("test_*.py") for name in DEFINITION.findall(path.read_text())
    }
    assert named | SLOW <= written, (named | SLOW) - written


def test_the_tables_of_the_pages_are_those_of_the_records():
    shown = []
    for page in pages(ROOT):
        text = page.read_text()
        assert rewrite(text, ROOT / "results") == text, f"{page} is stale: make tables"
        shown += re.findall(r"^<!-- table: (\S+) -->$", text, re.MULTILINE)
    assert {"demo", *TABLES} <= set(shown)


def test_the_page_of_promises_names_tests_and_records_that_exist():
    page = (ROOT / "docs" / "promises.md").read_text()
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(tests) > 20
    for path, name in tests:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"
    for path in re.findall(r"`(results/\S+)`", page):
        assert (ROOT / path).is_file(), path
    for row in re.findall(r"^\| (?!promise|---).*", page, re.MULTILINE):
        assert "`tests/" in row.split(" | ")[-1], row


def test_every_yes_of_where_it_works_names_a_test_that_exists():
    page = (ROOT / "docs" / "integrations" / "index.md").read_text()
    header, _, *rows = re.findall(r"^\|.*\|$", page.split("\n## ")[0], re.MULTILINE)
    columns = [cell.strip() for cell in header.split("|")[2:-1]]
    sections = dict(re.findall(r"^### Tests: (.*?)\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL))
    assert len(rows) == len(sections) >= 6
    for row in rows:
        first, *cells = (cell.strip() for cell in row.split("|")[1:-1])
        name = first[1 : first.index("]")]
        assert cells == [f"[yes](#tests-{name.lower().replace(' ', '-')})"] * len(columns), name
        shown = re.findall(r"^\| (.+) \| `(tests/[\w/]+\.py)::(\w+)` \|$", sections[name], re.MULTILINE)
        assert {column for found, _, _ in shown for column in found.split(", ")} == set(columns), name
        for _, path, test in shown:
            assert f"\ndef {test}(" in (ROOT / path).read_text(), f"{path}::{test}"


def test_the_demo_is_set_as_it_was_tuned_and_recorded():
    tuned = json.loads((ROOT / "results" / "demo_tuning.json").read_text())["methods"]
    recorded = json.loads((ROOT / "results" / "demo.json").read_text())["methods"]
    settings = demo.load_demo()
    for method, config in settings.digits.items():
        for option, values in settings.grid[method].items():
            assert min(values) < getattr(config, option) < max(values), f"{method}: {option} is at an edge of the grid"
        best = {k: v for k, v in tuned[method]["best"].items() if k != "nll"}
        assert {k: getattr(config, k) for k in best} == best
        assert from_mapping(recorded[method]["config"]) == config


def test_the_conventions_are_quoted_as_recorded():
    answers = json.loads((ROOT / "results" / "conventions.json").read_text())["answers"]
    page = (ROOT / "docs" / "algorithm.md").read_text()
    for name, answer in answers.items():
        nll = [run["nll"] for run in answer["runs"]]
        spread = f" ({statistics.stdev(nll):.3f})" if len(nll) > 1 else ""
        assert f"{statistics.fmean(nll):.3f}{spread}" in page, name
