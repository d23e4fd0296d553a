"""The code of README and docs runs, and the pages do not lie about what is there."""

import re
import socket
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_code_on_the_page_runs(page, tmp_path, monkeypatch):
    """All blocks of a page, in order, as one program."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": "__page__"}
    for block in FENCE.finditer(text):
        line = text[: block.start()].count("\n") + 1
        code = "\n" * line + block.group(1)  # so that a traceback shows the page's line
        exec(compile(code, str(page), "exec"), namespace)


def test_the_pages_have_code():
    assert sum(len(FENCE.findall(page.read_text())) for page in PAGES) >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
