"""Pages made of templates: one file each, which asks the network for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

__all__ = ["write_page"]

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("bsam.experiments.report", "."),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Fill in a template of this folder and write the page, with its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_TEMPLATES.get_template(template).render(values), encoding="utf-8")
    return path
