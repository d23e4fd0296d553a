"""Presets: the settings of each run of the paper, as TOML files in `presets/`.

`table1/cifar10/bsam` is the row "bSAM" of the block CIFAR-10 in the paper's first table of results. Tables 3 (without
noise) and 5 (m-sharpness) have presets of their own; table 4 evaluates runs of table 1. `here/cifar10/ivon` is a row
of ours in the paper's tables. `digits/...` needs no download.

The files are generated, by `python -m tools.presets` in the repository.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from pathlib import Path

from bsam.experiments.config import Config, from_file

__all__ = ["FOLDER", "preset", "preset_names", "preset_title"]

FOLDER = Path(__file__).parent / "presets"


@cache  # the files are part of the package: they do not change while it runs
def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    names = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.toml")]
    # bsam-2 comes before bsam-16
    return tuple(sorted(names, key=lambda name: re.sub(r"\d+", lambda number: number[0].zfill(3), name).split("/")))


@cache
def preset(name: str) -> Config:
    """Return the settings of a preset."""
    return from_file(_path(name))


def preset_title(name: str) -> str:
    """Return the first line of a preset's file, which says which run of the paper it is."""
    return _path(name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _path(name: str) -> Path:
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=4) or [known for known in names if name in known][:6]
        blocks = sorted({known.rpartition("/")[0] for known in names})
        hint = f"Near it: {', '.join(near)}" if near else f"There are {', '.join(blocks)}, each with its methods"
        raise ValueError(f"there is no preset {name!r}. {hint}. `bsam configs` lists all.")
    return FOLDER / f"{name}.toml"
