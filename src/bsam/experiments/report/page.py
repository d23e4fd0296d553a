"""Writing a page from a template: one HTML file that needs no network."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from bsam.files import write_text

__all__ = ["write_page"]

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("bsam.experiments.report", "."),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)


def write_page(path: Path, template: str, *, script: str | None = None, **values: Any) -> Path:
    """Fill in a template of this folder and write the page; its folder is made if it does not exist.

    An existing page is replaced in one step, or stays as it is. A link is replaced, and its target is not touched. All
    values are escaped, and a browser runs only the script in the file `script` of this folder.
    """
    text = (Path(__file__).parent / script).read_text(encoding="utf-8") if script else ""
    sha256 = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    values |= {"script": Markup(text), "allowed_script": f"'sha256-{sha256}'" if script else "'none'"}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, _TEMPLATES.get_template(template).render(values))
    return path
