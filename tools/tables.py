"""Tables in README and docs, written from the records in `results/` by `python -m tools.tables`.

The text between two marks is generated:

<!-- table: demo -->
...
<!-- end -->
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bsam.experiments.comparison import TABLES, compare
from bsam.experiments.record import read_json
from bsam.files import write_text
from tools import doubt, out_of_the_box, scale, shards, speeds, trainers, uci, variances
from tools.markdown import (
    block_markdown,
    comparison_markdown,
    counts_markdown,
    demo_markdown,
    margins_markdown,
    study_markdown,
    tuning_markdown,
)

__all__ = ["main", "pages", "render", "rewrite"]

_STUDIES = ("sweep_rho", "ablate_noise", "ablate_samples", "ablate_splits", "ablate_curvature")
_TUNINGS = ("tuning_cifar10", "tuning_cifar10_60")
_OF_A_RECORD: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "demo": (demo_markdown, "bsam demo"),
    "demo/doubt": (doubt.demo_markdown, "bsam demo"),
    "trainers": (trainers.markdown, "benchmarks/trainers.py"),
    "fsdp": (shards.markdown, "benchmarks/fsdp.py"),
    "scale/measured": (scale.measured_markdown, "benchmarks/scale.py"),
    "scale/computed": (scale.computed_markdown, "benchmarks/scale.py"),
    "scale/memory": (scale.memory_markdown, "benchmarks/scale.py"),
    **{name: (study_markdown, f"bsam {name.replace('_', ' ')}") for name in _STUDIES},
    **{name: (tuning_markdown, f"bsam {name.replace('tuning_', 'tune ')}") for name in _TUNINGS},
    **{
        f"tuning_{name}": (tuning_markdown, f"bsam tune benchmarks/{name}.toml")
        for name in ("sqrt_num_data", "prior_cifar10", "prior_cifar100", "sample_cifar10", "sample_cifar100")
    },
    **{
        f"out_of_the_box{part}{what}": (markdown, "benchmarks/out_of_the_box.py")
        for part in (
            *("", "_new", "_choosing", "_few", "_few_choosing"),
            *("_hard", "_hard_choosing", "_explained", "_overconfident", "_many", "_many_splits"),
        )
        for what, markdown in (("", out_of_the_box.means_markdown), ("/problems", out_of_the_box.problems_markdown))
    },
    "corruptions": (doubt.corruptions_markdown, "benchmarks/corruptions.py"),
    "adamw_rates": (out_of_the_box.rates_markdown, "benchmarks/adamw_rates.py"),
    "sgd_rates": (out_of_the_box.rates_markdown, "benchmarks/sgd_rates.py"),
    "pruning": (variances.pruning_markdown, "benchmarks/variances.py pruning"),
    "sensitivity": (variances.sensitivity_markdown, "benchmarks/variances.py sensitivity"),
    **{name: (markdown, "bsam reproduce uci") for name, markdown in uci.TABLES.items()},
}
"""Tables of one record: how each is written, and which command makes the record. The record's name ends at a slash."""
_OF_ALL_TABLES = {"counts": counts_markdown, "margins": margins_markdown}
_OF_ALL_RESULTS = {
    "speeds": speeds.markdown,
    "doubt": doubt.doubt_markdown,
    "doubt/scores": doubt.scores_markdown,
    "out_of_the_box/choice": out_of_the_box.choice_markdown,
}
"""Tables of several records."""
_BEGIN = re.compile(r"^<!-- table: (\S+) -->$", re.MULTILINE)
_END = "<!-- end -->"


def pages(root: Path) -> list[Path]:
    """Return the pages of a checkout."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def render(name: str, results: Path) -> str:
    """Write a table in Markdown.

    Args:
        name: table1 to table6, one block of a table like table1/cifar10, its rows of the paper like
            table1/cifar10/paper, counts or margins of all tables, speeds, doubt, or the name of a record with a table
            of its own.
        results: The folder of the records.
    """
    if name in TABLES:
        return comparison_markdown(compare(name, results / "runs"))
    table, _, rest = name.partition("/")
    block, _, rows = rest.partition("/")
    if table in TABLES:
        found = {each.name: each for each in compare(table, results / "runs").blocks}
        if block not in found:
            raise ValueError(f"{table} has no block {block!r}: there are {', '.join(found)}.")
        if rows not in ("", "paper"):
            raise ValueError(f"{name}: write {table}/{block}, or {table}/{block}/paper for the paper's rows alone.")
        return block_markdown(found[block], of_the_paper=bool(rows))
    if name in _OF_ALL_TABLES:
        return _OF_ALL_TABLES[name]([compare(each, results / "runs") for each in TABLES])
    if name in _OF_ALL_RESULTS:
        return _OF_ALL_RESULTS[name](results)
    if name in _OF_A_RECORD:
        markdown, command = _OF_A_RECORD[name]
        path = results / f"{table}.json"
        return markdown(read_json(path)) if path.exists() else f"Not recorded yet: `{command}`."
    known = ", ".join([*_OF_ALL_RESULTS, *TABLES, *_OF_ALL_TABLES, *_OF_A_RECORD])
    raise ValueError(f"there is no table {name!r} to fill in: between its marks a page may have {known}.")


def rewrite(text: str, results: Path) -> str:
    """Return a page with its tables written again from the records."""
    parts, position = [], 0
    for begin in _BEGIN.finditer(text):
        end = text.find(f"\n{_END}", begin.end())
        following = _BEGIN.search(text, begin.end())
        if end < 0 or (following and following.start() < end):
            raise ValueError(f"the table {begin.group(1)} has no end: write {_END} on a line of its own below it.")
        parts += [text[position : begin.end()], f"\n{render(begin.group(1), results)}"]
        position = end
    return "".join([*parts, text[position:]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables again, or with --check list the stale ones; the exit status is then 1."""
    parser = argparse.ArgumentParser(prog="python -m tools.tables", description=main.__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout with README.md, docs and results")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is stale")
    options = parser.parse_args(arguments)
    stale = []
    for page in pages(options.root):
        text = page.read_text()
        new = rewrite(text, options.root / "results")
        if new != text:
            stale.append(page)
            if not options.check:
                write_text(page, new)
    for page in stale:
        print(f"{'stale' if options.check else 'written'}: {page}")
    if not stale:
        print("All tables are as recorded.")
    return int(bool(stale) and options.check)


if __name__ == "__main__":
    sys.exit(main())
