"""The command `bsam report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from bsam.experiments.commands import app

__all__ = ["report"]


@app.command()
def report(
    records: Annotated[Path, typer.Option(help="Folder of the runs' records.")] = Path("results/runs"),
    figures: Annotated[Path, typer.Option(help="Folder that `bsam figure all` wrote.")] = Path("docs/images/theory"),
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report/paper.html"),
) -> None:
    """Write one page of all results: tables, diagrams, curves and figures.

    Nothing is run: it is made of the records of runs, and of those beside them
    of sweeps, ablations, the demo and the theory's numbers. Example:

    [bold]bsam report --records results/runs --out report/paper.html[/bold]
    """
    from bsam.experiments.report.paper_page import write_paper_page  # needs the extra `theory`

    page = write_paper_page(out, records, figures)
    link = f"[link={page.resolve().as_uri()}]{escape(str(page))}[/link]"
    Console().print(f"Look at it: {link} ({page.stat().st_size / 1e6:.1f} MB)", highlight=False)
