"""The commands that reproduce the paper: `bsam reproduce`, `sweep`, `ablate` and `tables`."""

from __future__ import annotations

import functools
import os
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bsam.experiments.commands import Data, Device, app
from bsam.experiments.comparison import SEEDS, TABLES, compare, find_table
from bsam.experiments.record import write_json
from bsam.experiments.recorded import Scale
from bsam.experiments.reproduce.execute import execute_together
from bsam.experiments.reproduce.plan import Plan, Task, find_places, make_plan, wanted_by_table
from bsam.experiments.reproduce.show import BEST_NOTE, block_table, scale_note, study_tables
from bsam.experiments.reproduce.studies import ABLATIONS, Study, collect, refuse_to_replace, sweep_rho
from bsam.experiments.reproduce.study_figure import draw_study
from bsam.experiments.reproduce.timing import estimate
from bsam.experiments.reproduce.workers import run_all
from bsam.experiments.runs import choose_device
from bsam.experiments.tables import pages, rewrite

__all__ = ["ablate", "reproduce", "sweep", "tables"]

ScaleOption = Annotated[
    Scale,
    typer.Option(
        help="full: as the paper. reduced: a sixth of the epochs. tiny: on digits, in minutes, to see it work."
    ),
]
Seeds = Annotated[int | None, typer.Option(min=1, help="Seeds of each run.", show_default="5, or 2 if reduced or tiny")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Worker processes.", show_default="1, or the cores if tiny")]
Runs = Annotated[Path | None, typer.Option(help="Folder of the runs.", show_default="runs, or runs/SCALE")]
Records = Annotated[
    Path | None, typer.Option(help="Folder of the records.", show_default="results/runs, or report/tiny")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and how long it takes, and stop.")]
StackSeeds = Annotated[
    bool | None,
    typer.Option("--stack-seeds/--one-by-one", help="Train the seeds of a run together.", show_default="on CUDA"),
]
SaveMinutes = Annotated[float, typer.Option(min=0, help="Minutes between two checkpoints of a run.")]


@app.command()
def reproduce(
    tables: Annotated[list[str], typer.Argument(metavar="TABLE...", help="table1 to table6, or all.")],
    block: Annotated[str | None, typer.Option(help="One block of the table, like cifar10.")] = None,
    methods: Annotated[str | None, typer.Option(help="Some methods, with commas between, like sgd,bsam.")] = None,
    seeds: Seeds = None,
    scale: ScaleOption = "full",
    jobs: Jobs = None,
    dry_run: DryRun = False,
    records: Records = None,
    runs: Runs = None,
    data: Data = None,
    device: Device = None,
    save_minutes: SaveMinutes = 5.0,
    stack_seeds: StackSeeds = None,
) -> None:
    """Run a table of the paper and put our numbers beside the printed ones.

    What is recorded is not run again. After Ctrl-C or a crash the same
    command goes on where it was. Everything in minutes, on digits:

    [bold]bsam reproduce all --scale tiny[/bold]

    What a block would run, and for how long; then two of its methods:

    [bold]bsam reproduce table1 --block cifar10 --dry-run[/bold]

    [bold]bsam reproduce table1 --block cifar10 --methods sgd,bsam --data data[/bold]
    """
    names = list(TABLES) if tables == ["all"] else [find_table(table) for table in tables]
    if len(names) != 1 and (block is not None or methods is not None):
        raise ValueError("--block and --methods choose within one table: name one, like table1.")
    chosen = None if methods is None else [method.strip() for method in methods.split(",")]
    places = find_places(scale, runs, records)
    wanted = [want for name in names for want in wanted_by_table(name, block, chosen)]
    plan = make_plan(wanted, seeds=seeds or SEEDS[scale], scale=scale, places=places)
    failed = _carry_out(plan, scale, places.records, jobs, dry_run, data, device, save_minutes, stack_seeds)
    if dry_run:
        return
    console = Console()
    for name in names:
        comparison = compare(name, places.records)
        for found in comparison.blocks:
            if block in (None, found.name):
                console.print(block_table(comparison, found), end="\n\n")
    console.print(f"{BEST_NOTE}\nRecords: {places.records}", highlight=False)
    if failed:
        raise typer.Exit(1)


@app.command()
def sweep(
    what: Annotated[str, typer.Argument(help="What is varied: rho.")],
    seeds: Seeds = None,
    scale: ScaleOption = "full",
    jobs: Jobs = None,
    dry_run: DryRun = False,
    records: Records = None,
    runs: Runs = None,
    data: Data = None,
    device: Device = None,
    save_minutes: SaveMinutes = 5.0,
    stack_seeds: StackSeeds = None,
) -> None:
    """Vary rho of SAM-SGD, SAM-Adam and bSAM: the paper's figure of sensitivity.

    Writes sweep_rho.json and sweep_rho.png. bSAM is drawn at 100 rho, as in the paper. Example:

    [bold]bsam sweep rho --scale tiny[/bold]
    """
    if what != "rho":
        raise ValueError(f"there is no sweep of {what!r}: write rho.")
    _study(sweep_rho(scale), scale, seeds, jobs, dry_run, records, runs, data, device, save_minutes, stack_seeds)


@app.command()
def ablate(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(ABLATIONS)}.")],
    seeds: Seeds = None,
    scale: ScaleOption = "full",
    jobs: Jobs = None,
    dry_run: DryRun = False,
    records: Records = None,
    runs: Runs = None,
    data: Data = None,
    device: Device = None,
    save_minutes: SaveMinutes = 5.0,
    stack_seeds: StackSeeds = None,
) -> None:
    """Take bSAM apart: without noise, with more samples, more splits, the other curvature.

    Writes ablate_WHAT.json and ablate_WHAT.png; runs that a table of the paper has are shared with it. Example:

    [bold]bsam ablate splits --scale tiny[/bold]
    """
    if what not in ABLATIONS:
        raise ValueError(f"there is no ablation of {what!r}: choose one of {', '.join(ABLATIONS)}.")
    _study(ABLATIONS[what](), scale, seeds, jobs, dry_run, records, runs, data, device, save_minutes, stack_seeds)


@app.command()
def tables(
    root: Annotated[Path, typer.Option(help="The checkout with README.md, docs and results.")] = Path(),
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if a table is stale.")] = False,
) -> None:
    """Write the tables in README and docs anew from results/.

    What stands between <!-- table: NAME --> and <!-- end --> is replaced. Example:

    [bold]bsam tables --check[/bold]
    """
    stale = []
    for page in pages(root):
        text = page.read_text()
        new = rewrite(text, root / "results")
        if new != text:
            stale.append(page)
            if not check:
                page.write_text(new)
    for page in stale:
        print(f"{'stale' if check else 'written'}: {page}")
    if not stale:
        print("All tables are as recorded.")
    elif check:
        raise typer.Exit(1)


def _study(
    study: Study,
    scale: Scale,
    seeds: int | None,
    jobs: int | None,
    dry_run: bool,
    records: Path | None,
    runs: Path | None,
    data: Path | None,
    device: str | None,
    save_minutes: float,
    stack_seeds: bool | None,
) -> None:
    places = find_places(scale, runs, records)
    path = places.studies / f"{study.file}.json"
    refuse_to_replace(path, scale)
    plan = make_plan(study.wanted, seeds=seeds or SEEDS[scale], scale=scale, places=places)
    failed = _carry_out(plan, scale, places.records, jobs, dry_run, data, device, save_minutes, stack_seeds)
    if dry_run:
        return
    options = "" if scale == "full" else f" --scale {scale}"
    options += "" if seeds is None else f" --seeds {seeds}"
    record = collect(study, scale, places.records, study.command + options)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    console = Console()
    for table in study_tables(record):
        console.print(table)
    console.print(f"{path}, {draw_study(record, path.with_suffix('.png'))}", highlight=False)
    if failed:
        raise typer.Exit(1)


# ------------------------------------------------------------------ carrying out a plan


def _carry_out(
    plan: Plan,
    scale: Scale,
    records: Path,
    jobs: int | None,
    dry_run: bool,
    data: Path | None,
    device: str | None,
    save_minutes: float,
    stack_seeds: bool | None,
) -> bool:
    """Show the plan and run what is left of it; return whether something failed."""
    console = Console(stderr=True)
    cores = os.cpu_count() or 1
    jobs = jobs or (cores if scale == "tiny" else 1)
    threads = 1 if scale == "tiny" else max(1, cores // jobs)  # the tiny networks gain nothing from more
    torch.set_num_threads(threads)
    _show_plan(console, plan, scale, records, jobs, choose_device(device))
    if dry_run or not plan.tasks:
        return False
    if stack_seeds is None:
        stack_seeds = choose_device(device).type == "cuda"
    by_run: dict[object, list[Task]] = {}
    for task in plan.tasks:
        by_run.setdefault(task.name if stack_seeds else (task.name, task.seed), []).append(task)
    groups = list(by_run.values())
    work = functools.partial(execute_together, device=device, data=data, save_minutes=save_minutes)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    shares: dict[int, float] = {}
    bars: dict[int, TaskID] = {}
    with Progress(*columns, console=console) as progress:
        overall = progress.add_task("", total=len(groups))

        def show(index: int, share: float) -> None:
            shares[index] = share
            if index not in bars:
                bars[index] = progress.add_task(_title(groups[index]), total=1)
            progress.update(bars[index], completed=share)
            refresh()

        def end(index: int, error: str | None) -> None:
            shares[index] = 1.0
            finished.append(index)
            if index in bars:
                progress.remove_task(bars.pop(index))
            if error is not None:
                progress.console.print(f"{_title(groups[index])}: {escape(error)}", highlight=False, style="red")
            refresh()

        def refresh() -> None:
            done = f"{sum(len(groups[index]) for index in finished)} of {len(plan.tasks)} runs"
            progress.update(overall, completed=sum(shares.values()), description=done)

        finished: list[int] = []
        refresh()
        try:
            errors = run_all(groups, work, jobs=jobs, threads=threads, on_progress=show, on_end=end)
        except KeyboardInterrupt:
            progress.stop()
            console.print("stopped; the runs are saved. The same command goes on with them.")
            raise typer.Exit(130) from None
    return bool(errors)


def _title(tasks: list[Task]) -> str:
    seeds = " ".join(str(task.seed) for task in tasks)
    return f"{tasks[0].name} seed{'s' if len(tasks) > 1 else ''} {seeds}"


def _show_plan(console: Console, plan: Plan, scale: Scale, records: Path, jobs: int, device: torch.device) -> None:
    if note := scale_note(scale):
        console.print(note, highlight=False)
    if not plan.tasks:
        console.print(f"All {len(plan.recorded)} runs are recorded in {records}.", highlight=False)
        return
    with console.status("timing a few steps"):
        estimates = estimate(plan.tasks, records, device)
    left = Counter(task.name for task in plan.tasks)
    there = Counter(task.name for task in plan.recorded)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("run", no_wrap=True)
    for column in ("epochs", "seeds left", "recorded", "one takes"):
        table.add_column(column, justify="right")
    table.add_column("by")
    epochs = {task.name: task.config.total_epochs for task in plan.tasks}
    for name, count in left.items():
        found = estimates[name]
        table.add_row(name, str(epochs[name]), str(count), str(there[name]), _clock(found.seconds), found.source)
    console.print(table)
    total = sum(count * estimates[name].seconds for name, count in left.items())
    console.print(
        f"{len(plan.tasks)} runs to do, {len(plan.recorded)} recorded; about {_clock(total)} of training on {device}"
        f"{f', {_clock(total / jobs)} with {jobs} jobs if they do not slow each other' if jobs > 1 else ''}."
        " Evaluation comes on top. By: `records` of the same run on such a device, or `timed` steps on random images.",
        highlight=False,
    )


def _clock(seconds: float) -> str:
    for unit, size in (("s", 1), ("min", 60), ("h", 3600)):
        if seconds < 100 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 86400:.1f} days"
