"""The commands that train many runs: `bsam reproduce`, `sweep`, `ablate` and `tune`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bsam.experiments.commands import app, progress
from bsam.experiments.options import Extent, Suites, Work, split_names, taking

if TYPE_CHECKING:
    from bsam.experiments.reproduce.plan import Places, Wanted
    from bsam.experiments.reproduce.studies import Study

__all__ = ["ablate", "reproduce", "sweep", "tune"]


@app.command()
@taking(Extent)
def reproduce(
    tables: Annotated[list[str], typer.Argument(metavar="TABLE...", help="table1 to table6, or all; or uci.")],
    block: Annotated[str | None, typer.Option(help="One block of the table, like cifar10; of uci one set.")] = None,
    methods: Annotated[str | None, typer.Option(help="Some methods, with commas between, like sgd,bsam.")] = None,
    suite: Suites = None,
    *,
    options: Extent,
) -> None:
    """Run a table of the paper and put our numbers beside the printed ones.

    Recorded runs are not run again. After Ctrl-C or a crash the same
    command goes on where it was. All tables in minutes, on digits:

    [bold]bsam reproduce all --scale tiny[/bold]

    Show the runs of a block and their time; then run two methods:

    [bold]bsam reproduce table1 --block cifar10 --dry-run[/bold]

    [bold]bsam reproduce table1 --block cifar10 --methods sgd,bsam --data data[/bold]

    Regression on UCI's sets, which is not in the paper, on the CPU. --seeds is the number of splits:

    [bold]bsam reproduce uci --data data[/bold]

    Train more seeds, and see what their doubt is worth on unknown and corrupted images:

    [bold]bsam reproduce table1 --block cifar10 --seeds 5 --first-seed 5 --suite shift[/bold]
    """
    from bsam.experiments.comparison import TABLES, compare, find_table
    from bsam.experiments.reproduce.plan import wanted_by_table
    from bsam.experiments.reproduce.show import BEST_NOTE, block_table, counts_sentence

    if "uci" in tables:
        _reproduce_uci(tables, block, methods, suite, options)
        return
    names = list(TABLES) if tables == ["all"] else [find_table(table) for table in tables]
    if len(names) != 1 and (block is not None or methods is not None):
        raise ValueError("--block and --methods choose within one table: name one, like table1.")
    chosen = None if methods is None else split_names(methods)
    wanted = [want for name in names for want in wanted_by_table(name, block, chosen)]
    places, failed = _carry_out(wanted, options, split_names(suite))
    if options.dry_run:
        return
    console = Console()
    for name in names:
        comparison = compare(name, places.records)
        for found in comparison.blocks:
            if block in (None, found.name):
                console.print(block_table(comparison, found), end="\n\n")
        console.print(f"{name}. {counts_sentence(comparison.counts)}", end="\n\n", highlight=False)
    console.print(f"{BEST_NOTE}\nRecords: {places.records}", highlight=False)
    if failed:
        raise typer.Exit(1)


def _reproduce_uci(
    tables: list[str], block: str | None, methods: str | None, suite: str | None, options: Extent
) -> None:
    """Run the regression study; its record has all sets and methods, so a part of it goes to another file."""
    from bsam.experiments.data.download import data_folder
    from bsam.experiments.regression.study import Extent as UciExtent
    from bsam.experiments.regression.study import carry_out_uci, missing_uci

    if tables != ["uci"]:
        raise ValueError("uci is a study of its own: write bsam reproduce uci, without other tables.")
    if suite is not None or options.on is not None or options.device not in (None, "cpu") or options.first_seed:
        raise ValueError("uci is regression on this machine's CPU: leave out --suite, --on, --device and --first-seed.")
    if options.scale == "reduced":
        raise ValueError("uci has no reduced scale: write --scale tiny, or --seeds for the number of splits.")
    tiny = options.scale == "tiny"
    whole = UciExtent()
    extent = UciExtent(
        num_splits=options.seeds or (2 if tiny else None),
        steps=50 if tiny else None,
        sets=whole.sets if block is None else (block,),
        methods=whole.methods if methods is None else tuple(method.strip() for method in methods.split(",")),
    )
    full = extent == whole
    folder = options.runs or Path("runs")
    runs = folder / "uci"
    missing = missing_uci(extent, data_folder(options.data), runs)
    if options.dry_run:
        typer.echo(f"{len(missing)} of {len(extent.sets) * len(extent.methods)} sets and methods are to be run.")
        return
    out = (options.records or Path("results")) / "uci.json" if full else (options.records or runs) / "part.json"
    with progress("regression", len(missing)) as advance:
        carry_out_uci(
            extent, data_folder(options.data), runs, out, jobs=options.jobs or 1, say=typer.echo, advance=advance
        )
    typer.echo(f"Record: {out}")


@app.command()
@taking(Extent)
def sweep(what: Annotated[str, typer.Argument(help="The setting that is varied: rho.")], *, options: Extent) -> None:
    """Vary rho of SAM-SGD, SAM-Adam and bSAM: the paper's figure of sensitivity.

    Writes sweep_rho.json and sweep_rho.png. bSAM is drawn at 100 rho, as in the paper. Example:

    [bold]bsam sweep rho --scale tiny[/bold]
    """
    from bsam.experiments.reproduce.studies import sweep_rho

    if what != "rho":
        raise ValueError(f"there is no sweep of {what!r}: write rho.")
    _study(sweep_rho(options.scale), options)


@app.command()
@taking(Extent)
def ablate(
    what: Annotated[str, typer.Argument(help="noise, samples, splits or curvature.")], *, options: Extent
) -> None:
    """Take bSAM apart: without noise, with more samples, more splits, the other curvature.

    Writes ablate_WHAT.json and ablate_WHAT.png. Runs of the paper's tables are shared with them. Example:

    [bold]bsam ablate splits --scale tiny[/bold]
    """
    from bsam.experiments.reproduce.studies import ABLATIONS

    if what not in ABLATIONS:
        raise ValueError(f"there is no ablation of {what!r}: choose one of {', '.join(ABLATIONS)}.")
    _study(ABLATIONS[what](), options)


@app.command()
@taking(Work)
def tune(
    what: Annotated[str, typer.Argument(help="cifar10, or a TOML file with a grid.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The record.", show_default="results/tuning_WHAT.json, or tuning_WHAT_search.json"),
    ] = None,
    search: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Let Optuna propose N settings between those of the grid.")
    ] = None,
    *,
    options: Work,
) -> None:
    """Choose settings on a held-out part of the training data; the test data are not used.

    Trains every setting of a grid, or with --search those that Optuna proposes,
    and writes one record with all tries and the one with the lowest NLL. After
    Ctrl-C or a crash the same command goes on. Examples:

    [bold]bsam tune cifar10 --data data --jobs 4[/bold]

    [bold]bsam tune my-grid.toml --search 40[/bold]
    """
    from bsam.experiments.config import toml_value
    from bsam.experiments.record import write_json
    from bsam.experiments.reproduce.carry_out import carry_out
    from bsam.experiments.reproduce.search import Search, carry_out_search, collect_search
    from bsam.experiments.reproduce.show import tuning_table
    from bsam.experiments.reproduce.tuning import collect_tries, execute_tries, plan_tries, read_tuning

    dtype, runs = options.precision, options.runs or Path("runs")
    tuning = replace(read_tuning(what), dtype=dtype)
    command = f"bsam tune {what}{f' --precision {dtype}' if dtype else ''}"
    if search is None:
        failed = carry_out(plan_tries(tuning, runs), "full", runs, options, work=execute_tries)
        collect = functools.partial(collect_tries, tuning, runs)
    else:
        tuning = replace(tuning, name=f"{tuning.name}_search")  # the tries of a grid are never pruned
        searched, command = Search(tuning, search, runs.absolute()), f"{command} --search {search}"
        failed = carry_out_search(searched, options)
        collect = functools.partial(collect_search, searched)
    if options.dry_run:
        return
    if failed:
        raise typer.Exit(1)  # a choice needs all tries
    record, path = collect(command), out or Path("results") / f"tuning_{tuning.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    console = Console()
    console.print(tuning_table(record))
    if (chosen := record["chosen"]) is None:
        raise FloatingPointError(f"all tries diverged, and nothing could be chosen: {path} has their errors.")
    settings = ", ".join(f"{name} = {toml_value(value)}" for name, value in chosen["settings"].items())
    console.print(f"Chosen: settings = {{ {settings} }}\nAll tries: {path}", highlight=False, markup=False)


def _carry_out(wanted: list[Wanted], options: Extent, suites: Sequence[str] = ()) -> tuple[Places, bool]:
    """Run what a table or a study needs; return the folders, and whether a run failed."""
    from bsam.experiments.comparison import SEEDS
    from bsam.experiments.reproduce.carry_out import carry_out
    from bsam.experiments.reproduce.plan import find_places, make_plan

    scale = options.scale
    places = find_places(scale, options.runs, options.records)
    plan = make_plan(
        wanted,
        seeds=options.seeds or SEEDS[scale],
        first_seed=options.first_seed,
        scale=scale,
        places=places,
        dtype=options.precision,
        suites=suites,
    )
    if not options.dry_run:
        from bsam.experiments.data import load
        from bsam.experiments.suites import check_suites

        for dataset, found in {task.config.dataset: task.suites for task in plan.tasks if task.suites}.items():
            check_suites(found, load(dataset, options.data), options.data)
    return places, carry_out(plan, scale, places.records, options)


def _study(study: Study, options: Extent) -> None:
    from bsam.experiments.record import write_json
    from bsam.experiments.reproduce.plan import find_places
    from bsam.experiments.reproduce.show import study_tables
    from bsam.experiments.reproduce.studies import collect, refuse_to_replace
    from bsam.experiments.reproduce.study_figure import draw_study

    scale = options.scale
    path = find_places(scale, options.runs, options.records).studies / f"{study.file}.json"
    refuse_to_replace(path, scale)
    places, failed = _carry_out(study.wanted, options)
    if options.dry_run:
        return
    written = "" if scale == "full" else f" --scale {scale}"
    written += "" if options.seeds is None else f" --seeds {options.seeds}"
    written += "" if options.first_seed == 0 else f" --first-seed {options.first_seed}"
    record = collect(study, scale, places.records, study.command + written)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    console = Console()
    for table in study_tables(record):
        console.print(table)
    console.print(f"{path}, {draw_study(record, path.with_suffix('.png'))}", highlight=False)
    if failed:
        raise typer.Exit(1)
