"""What the command `bsam` can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bsam.experiments import demo as experiment
from bsam.experiments.record import write_json
from bsam.experiments.report.demo_page import write_demo_page
from bsam.experiments.training import METHODS

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.callback()
def about() -> None:
    """bSAM: SAM and variational Bayes in one optimizer.

    Start with: [bold]bsam demo[/bold]
    """


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page and its numbers.")] = Path("report"),
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds for each method.", show_default="5")] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Choose the settings anew on the validation part; 20 minutes.")
    ] = False,
) -> None:
    """Train five methods on handwritten digits, and write a page that compares them.

    Takes about two minutes on two cores; the data comes with scikit-learn. Example:

    [bold]bsam demo --seeds 2 --out /tmp/report[/bold]
    """
    settings = experiment.load_settings()
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    if tune:
        with _progress("tuning", experiment.num_tries(settings["digits"])) as advance:
            record = experiment.tune(settings["digits"], advance)
        write_json(out / "tuning.json", record)
        for method, result in record["methods"].items():
            console.print(method, result["best"])
        console.print(f"\nAll tries: {out / 'tuning.json'}")
        return

    digits = {**settings["digits"], "seeds": seeds or settings["digits"]["seeds"]}
    digits.pop("grid")
    total = len(digits["methods"]) * digits["seeds"] + len(settings["moons"]["methods"])
    with _progress("training", total) as advance:
        record, predictions = experiment.run_digits(digits, advance)
        maps = experiment.moons(settings["moons"], advance)

    table = Table(title=f"Digits, test part: mean (sd) over {digits['seeds']} seeds")
    for column in ("method", "accuracy ↑", "NLL ↓", "ECE ↓", "AUROC ↑"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, row in experiment.cells(record):
        table.add_row(name, *row, style="bold" if name == "bSAM" else None)
    console.print(table)
    write_json(out / "results.json", record)
    page = write_demo_page(out, record, predictions, maps)
    console.print(f"Look at it: [link={page.resolve().as_uri()}]{page}[/link]", highlight=False)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr; yields the function to call with a method's name after each piece of work."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)

        def advance(method: str) -> None:
            bar.update(task, advance=1, description=f"{what} {METHODS[method]:8}")

        yield advance
