"""Carrying out a plan: it is shown with its estimated time, and run by workers, here or on Ray, with progress bars."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bsam.experiments.choices import Scale
from bsam.experiments.config import Config
from bsam.experiments.options import Work
from bsam.experiments.reproduce.execute import execute
from bsam.experiments.reproduce.machines import check_options, find_storage, machines
from bsam.experiments.reproduce.plan import Plan, Task
from bsam.experiments.reproduce.show import scale_note
from bsam.experiments.reproduce.storage import work_in_storage
from bsam.experiments.reproduce.timing import estimate, estimate_elsewhere, read_records
from bsam.experiments.reproduce.workers import Item, share_cores
from bsam.experiments.runs import choose_device
from bsam.experiments.stacks import find_stack

__all__ = ["Piece", "carry_out", "run_pieces"]


def carry_out(plan: Plan, scale: Scale, records: Path, options: Work, *, work: Callable[..., None] = execute) -> bool:
    """Show the plan and run its tasks; return whether a run failed.

    A run that another process is training, here or on another machine, is left to that process. This is no failure.

    Args:
        plan: The tasks.
        scale: The scale of its runs.
        records: Folder of the records, to estimate the time.
        options: How to run them. For the default number of workers see `share_cores`.
        work: Completes tasks that differ in seeds and rates only.
    """
    check_options(options)
    console = Console(stderr=True)
    small, device, jobs = scale == "tiny", None, 1
    if options.on is None:
        device = choose_device(options.device)
        jobs, threads = share_cores(options.jobs, small=small, accelerated=device.type != "cpu")
        torch.set_num_threads(threads)
    _show_plan(console, plan, scale, records, jobs, device)
    if options.dry_run or not plan.tasks:
        return False
    storage, tasks = find_storage(options, scale), plan.tasks
    if options.on is not None:
        tasks = tuple(replace(each, folder=each.folder.absolute(), record=each.record.absolute()) for each in tasks)
    folders = [folder for task in tasks for folder in (task.folder.parent, task.record.parent)]
    with machines(options, small=small, folders=folders, storage=storage) as found:
        if storage is not None:
            storage.fetch(tasks)
        groups = stack_tasks(tasks, options.stack_size) if found.stacked else [[task] for task in tasks]
        bound = functools.partial(work, **found.settings)
        if storage is not None:
            bound = functools.partial(work_in_storage, work=bound, storage=storage)
        pieces = [Piece(_title(group), len(group), group) for group in groups]
        after = (lambda piece: storage.fetch(piece.item)) if storage is not None else None
        return run_pieces(console, pieces, functools.partial(found.run_all, work=bound), after)


@dataclass(frozen=True)
class Piece(Generic[Item]):
    """A piece of work for one worker at a time."""

    title: str
    num_runs: int
    item: Item


def run_pieces(
    console: Console,
    pieces: Sequence[Piece[Item]],
    run: Callable[..., dict[int, str]],
    after: Callable[[Piece[Item]], None] | None = None,
) -> bool:
    """Run all pieces with progress bars; return whether one of them failed.

    Args:
        console: Where to show them.
        pieces: The pieces.
        run: Runs their items, like `bsam.experiments.reproduce.workers.run_all` with its work.
        after: Called with each piece that has ended.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    shares: dict[int, float] = {}
    bars: dict[int, TaskID] = {}
    with Progress(*columns, console=console) as progress:
        overall = progress.add_task("", total=len(pieces))

        def show(index: int, share: float) -> None:
            shares[index] = share
            if index not in bars:
                bars[index] = progress.add_task(pieces[index].title, total=1)
            progress.update(bars[index], completed=share)
            refresh()

        def end(index: int, error: str | None) -> None:
            if after is not None:
                after(pieces[index])
            shares[index] = 1.0
            finished.append(index)
            if index in bars:
                progress.remove_task(bars.pop(index))
            if error is None and not console.is_terminal:  # where bars do not move
                console.print(f"{escape(pieces[index].title)}: done, {count()}", highlight=False)
            if error is not None:
                progress.console.print(f"{pieces[index].title}: {escape(error)}", highlight=False, style="red")
            refresh()

        def leave(index: int, reason: str) -> None:
            elsewhere.append(pieces[index].title)
            if index in bars:
                progress.remove_task(bars.pop(index))

        def count() -> str:
            done = sum(pieces[index].num_runs for index in finished)
            return f"{done} of {sum(piece.num_runs for piece in pieces)} runs"

        def refresh() -> None:
            progress.update(overall, completed=sum(shares.values()), description=count())

        finished: list[int] = []
        elsewhere: list[str] = []
        refresh()
        try:
            errors = run([piece.item for piece in pieces], on_progress=show, on_end=end, on_busy=leave)
        except KeyboardInterrupt:
            progress.stop()
            console.print("stopped; the runs are saved. The same command goes on with them.")
            raise typer.Exit(130) from None
    if elsewhere:
        console.print(
            f"Left to other processes, which are at them: {escape(', '.join(elsewhere))}. When they are done, the "
            "same command shows the results.",
            highlight=False,
        )
    if errors:
        names = ", ".join(pieces[index].title for index in sorted(errors))
        console.print(f"Not done: {escape(names)}. The same command tries them again.", highlight=False)
    return bool(errors)


def stack_tasks(tasks: Iterable[Task], size: int) -> list[list[Task]]:
    """Group the tasks that are trained together: tasks that differ in seeds and rates only.

    All seeds of a run stay together, and so do runs that were started together. More runs join a group until it has
    `size` tasks. A run with batches that `splits` does not cut evenly cannot be compiled, and is trained alone.
    """
    by_run: dict[Path, list[Task]] = {}
    for task in tasks:
        stack, uneven = find_stack(task.folder), task.config.batch_size % task.config.splits
        key = stack if stack != task.folder or uneven else task.folder.parent
        by_run.setdefault(key, []).append(task)
    groups: list[list[Task]] = []
    latest: dict[Config, list[Task]] = {}
    for run in by_run.values():
        kind = run[0].config.without_rates()
        most = 1 if kind.batch_size % kind.splits else size
        if kind not in latest or len(latest[kind]) + len(run) > most:
            latest[kind] = []
            groups.append(latest[kind])
        latest[kind] += run
    return groups


def _title(tasks: list[Task]) -> str:
    by_run: dict[str, list[int]] = {}
    for task in tasks:
        by_run.setdefault(task.name, []).append(task.seed)
    return ", ".join(
        f"{name} seed{'s' if len(seeds) > 1 else ''} {' '.join(map(str, seeds))}" for name, seeds in by_run.items()
    )


def _show_plan(
    console: Console, plan: Plan, scale: Scale, records: Path, jobs: int, device: torch.device | None
) -> None:
    """Show the runs and their estimated time on `device`. None is a device of a cluster: nothing is estimated."""
    if note := scale_note(scale):
        console.print(note, highlight=False)
    if not plan.tasks:
        console.print(f"All {len(plan.recorded)} runs are recorded in {records}.", highlight=False)
        return
    known = read_records(records)
    estimates = {} if device is None else estimate(plan.tasks, known, device)
    left = Counter(task.name for task in plan.tasks)
    there = Counter(task.name for task in plan.recorded)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")
    for column in ("epochs", "seeds left", "recorded", *(["one takes"] if estimates else [])):
        table.add_column(column, justify="right")
    if estimates:
        table.add_column("by")
    epochs = {task.name: task.config.total_epochs for task in plan.tasks}
    for name, count in left.items():
        row = [name, str(epochs[name]), str(count), str(there[name])]
        if found := estimates.get(name):
            row += ["?" if found.seconds is None else _clock(found.seconds), found.source]
        table.add_row(*row)
    console.print(table)
    what = f"{len(plan.tasks)} runs to do, {len(plan.recorded)} recorded"
    if device is None:
        console.print(f"{what}.", highlight=False)
        return
    seconds = [task.share_left * (estimates[task.name].seconds or 0.0) for task in plan.tasks]
    if all(found.seconds is not None for found in estimates.values()):
        what += f"; about {_clock(sum(seconds))} of training on {device}"
        what += f", {_clock(sum(seconds) / jobs)} with {jobs} jobs if they do not slow each other" if jobs > 1 else ""
        what += ". Evaluation comes on top"
    if device.type == "cpu" and scale != "tiny" and (elsewhere := estimate_elsewhere(plan.tasks, known)):
        gpu, total = elsewhere
        what += f". On one {gpu}, by its records: about {_clock(total)}"
    console.print(
        f"{what}. By: `records` of the same run on such a device, records of `similar` runs in proportion to the work, "
        "or one `timed` gradient of the network.",
        highlight=False,
    )


def _clock(seconds: float) -> str:
    for unit, size in (("s", 1), ("min", 60), ("h", 3600)):
        if seconds < 100 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 86400:.1f} days"
