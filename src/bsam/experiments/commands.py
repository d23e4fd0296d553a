"""The app behind the command `bsam`, and the commands about single runs, the demo, the figures and the report.

The commands that train many runs are in `bsam.experiments.reproduce.batch_commands`. A command imports what it needs
when it runs, so that its help does not wait for torch.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bsam import __version__
from bsam.experiments.metric_columns import DECIMALS, TITLES
from bsam.experiments.options import Data, Device, SaveMinutes, Suites, split_names

if TYPE_CHECKING:
    from bsam.experiments.stacks import Stack
    from bsam.experiments.trainer import Trainer

__all__ = ["app", "progress"]

_TIMES = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
"""The last columns of every progress bar."""
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bsam {__version__}")
        raise typer.Exit


@app.callback()
def about(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version, and stop.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """bSAM: SAM and variational Bayes in one optimizer.

    Start with:            [bold]bsam demo[/bold]

    Train and evaluate:    [bold]bsam train table6/mnist/bsam --out runs/mnist[/bold]
                           [bold]bsam evaluate runs/mnist/seed0[/bold]

    Reproduce the paper:   [bold]bsam reproduce table6 --dry-run[/bold]
    """


@app.command()
def configs(
    name: Annotated[str | None, typer.Argument(help="A preset, or a TOML file, to see its settings.")] = None,
    settings: Annotated[bool, typer.Option("--settings", help="List all settings, with their defaults.")] = False,
) -> None:
    """List the presets, show one preset, or list all settings.

    A preset holds the settings of one row of the paper's tables:
    [bold]table1/cifar10/bsam[/bold] is bSAM on CIFAR-10 in table 1.
    digits/... needs no download. Settings can be saved, changed and trained:

    [bold]bsam configs table1/cifar10/bsam > my.toml[/bold]

    [bold]bsam train my.toml[/bold]
    """
    from bsam.experiments.config import from_file, to_toml
    from bsam.experiments.paper.presets import preset, preset_title

    if settings:
        _list_settings()
    elif name is not None:
        title, config = (name, from_file(Path(name))) if _is_file(name) else (preset_title(name), preset(name))
        typer.echo(
            f"# {title}\n{to_toml(config, explained=True)}# The others have their defaults: bsam configs --settings"
        )
    else:
        _list_presets()


def _list_settings() -> None:
    from bsam.experiments.config import FIELDS, explanations, hints, toml_value, what_fits

    table = Table("setting", "default", "what it is", box=box.SIMPLE)
    for setting, field in FIELDS.items():
        default = "" if field.default is dataclasses.MISSING else toml_value(field.default)
        choices = f" ({what_fits(hints()[setting])})" if get_origin(hints()[setting]) is Literal else ""
        table.add_row(setting, escape(default), escape(explanations()[setting] + choices))
    Console().print(table)
    typer.echo("Change one with: bsam train PRESET --set KEY=VALUE")


def _list_presets() -> None:
    from bsam.experiments.paper.presets import preset, preset_names

    console = Console()
    console.print(
        "A preset holds the settings of a run; most of them are rows of the paper's tables.\n"
        "See one with:             bsam configs BLOCK/METHOD\n"
        "See all settings with:    bsam configs --settings",
        highlight=False,
    )
    blocks: dict[str, list[str]] = {}
    for full in preset_names():
        block, _, method = full.rpartition("/")
        blocks.setdefault(block, []).append(method)
    table = Table(box=box.SIMPLE)
    table.add_column("block", no_wrap=True)
    table.add_column("data, network, epochs")
    table.add_column("methods")
    for block, methods in blocks.items():
        config = preset(f"{block}/{methods[0]}")
        table.add_row(block, f"{config.dataset}, {config.model}, {config.total_epochs}", ", ".join(methods))
    console.print(table)
    console.print("Train one with:           bsam train BLOCK/METHOD", highlight=False)


@app.command()
def train(
    name: Annotated[
        str | None, typer.Argument(metavar="PRESET", help="The preset to train, see `bsam configs`, or a TOML file.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs.", show_default="runs/PRESET")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to train, one after the other.")] = 1,
    stack_seeds: Annotated[bool, typer.Option("--stack-seeds", help="Train the seeds together, in one step.")] = False,
    first_seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of epochs instead of the preset's.")] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, see `bsam configs --settings`."),
    ] = None,
    data: Data = None,
    device: Device = None,
    save_minutes: SaveMinutes = 5.0,
    save_epochs: Annotated[
        int | None, typer.Option(min=1, help="Also save every time this many epochs are done.")
    ] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compiled/--loop", help="Compile the step.", show_default="compiled on CUDA")
    ] = None,
) -> None:
    """Train a preset, or the settings in a TOML file. Ctrl-C saves the run and prints how to go on.

    Examples:

    [bold]bsam train digits/bsam --out runs/digits[/bold]

    [bold]bsam train table6/mnist/bsam --data data --epochs 5 --set lr=0.05[/bold]

    [bold]bsam train my.toml --seeds 3[/bold]

    [bold]bsam train --resume runs/digits/seed0[/bold]
    """
    from bsam.experiments.config import from_file, override
    from bsam.experiments.paper.presets import preset
    from bsam.experiments.runs import Run, RunInterruptedError, resume_command
    from bsam.experiments.stacks import Stack, find_stack

    if (name is None) == (resume is None):
        raise ValueError("give either a preset, like `bsam train digits/bsam`, or --resume FOLDER.")
    if resume is not None:
        if out is not None or epochs is not None or change or seeds != 1 or first_seed or stack_seeds:
            raise ValueError(
                "--resume goes on with the run as it is: leave out --out, --epochs, --set, --seeds, --first-seed and "
                "--stack-seeds."
            )
        if (where := find_stack(resume)) != resume:
            raise ValueError(f"{resume} is trained together with others: {resume_command(where)}")
        stack = Stack.resume(resume, device=device, data=data, compiled=compiled)
        if not stack.finished:
            _train(stack, save_minutes, save_epochs)
        elif len(stack.runs) > 1:
            Console().print(f"All runs in {resume} are finished.", highlight=False)
        else:
            Console().print(f"{resume} is finished. Look at it with: bsam evaluate {resume}", highlight=False)
        return
    assert name is not None
    changes = [*(change or []), *([f"epochs={epochs}"] if epochs else [])]
    config = override(from_file(Path(name)) if _is_file(name) else preset(name), changes)
    folder = out or Path("runs") / (Path(name).stem if _is_file(name) else name)
    runs = [Run(folder / f"seed{seed}", config, seed, name) for seed in range(first_seed, first_seed + seeds)]
    for run in runs:
        run.refuse_to_replace()
    left = runs
    while left:
        together, left = (left, []) if stack_seeds else (left[:1], left[1:])
        stack = Stack.start(together, device=device, data=data, compiled=compiled)
        try:
            _train(stack, save_minutes, save_epochs)
        except RunInterruptedError as error:
            if left:
                error.args = (f"{error}; then write this command with --first-seed {left[0].seed} --seeds {len(left)}",)
            raise


def _is_file(name: str) -> bool:
    """Whether the name is the path of a TOML file, and not a preset."""
    return name.endswith(".toml")


def _train(stack: Stack, save_minutes: float, save_epochs: int | None) -> None:
    from bsam.experiments.methods import METHODS
    from bsam.experiments.reproduce.workers import now_and_then

    first, config = stack.runs[0], stack.runs[0].config
    which = f"{len(stack.runs)} seeds" if len(stack.runs) > 1 else f"seed {first.seed}"
    columns = (
        TextColumn(f"{METHODS[config.method].title} on {config.dataset}, {which}"),
        BarColumn(),
        TextColumn("epoch {task.completed:.1f}/{task.total} {task.fields[loss]}"),
    )
    with Progress(*columns, *_TIMES, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=config.total_epochs, loss="")

        def say(progress: float) -> None:
            bar.console.print(f"epoch {progress:.1f}/{config.total_epochs}", highlight=False)

        rarely = now_and_then(say, seconds=60)

        def show(trainer: Trainer) -> None:
            last = trainer.log[-1] if trainer.log else None
            text = f"loss {last['loss']:.4f}" if last else ""
            bar.update(task, completed=trainer.progress, loss=text)
            if not bar.console.is_terminal:  # where a bar does not move
                rarely(trainer.progress)

        show(stack.trainers[0])
        stack.train(every_minutes=save_minutes, every_epochs=save_epochs, on_step=show)
    Console().print(f"done: {stack.folder}. Look at it with: bsam evaluate {first.folder}", highlight=False)


@app.command()
def evaluate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folder of a finished run, or of several.")],
    samples: Annotated[
        str | None, typer.Option(help="Numbers of posterior samples, like 0,8,64.", show_default="32")
    ] = None,
    part: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    suite: Suites = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Temperature: multiplies the posterior's variance.", show_default="1, or the run's"),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Make all predictions again, also those that exist.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the ensemble of several runs.", show_default="ensemble, beside the runs"),
    ] = None,
    data: Data = None,
    device: Device = None,
) -> None:
    """Predict the test set with a run's posterior, and compute the metrics.

    Writes predictions and one reliability diagram per number of samples
    into the folder, and the metrics into its record. Several runs are
    also evaluated together, as an ensemble in a folder of its own. A suite
    says what doubt is worth on other inputs, for example unknown ones. Examples:

    [bold]bsam evaluate runs/digits/seed0 --samples 0,8,64[/bold]

    [bold]bsam evaluate runs/digits/seed0 runs/digits/seed1 --samples 32[/bold]

    [bold]bsam evaluate runs/digits/seed0 --temperature 0.5[/bold]

    [bold]bsam evaluate runs/cifar10/seed0 --suite unknown,corruptions[/bold]
    """
    from bsam.experiments.ensemble import evaluate_ensemble
    from bsam.experiments.evaluate import evaluate as evaluate_run
    from bsam.experiments.suites import check_run, evaluate_ensemble_suites, evaluate_suites

    try:
        counts = None if samples is None else [int(text) for text in samples.split(",")]
    except ValueError:
        counts = [-1]
    if counts is not None and min(counts) < 0:
        raise ValueError(f"--samples {samples} must be whole numbers with commas between, like 0,8,64.")
    options: dict[str, Any] = {
        "samples": counts,
        "part": part,
        "temperature": temperature,
        "device": device,
        "data": data,
        "again": again,
    }
    suites = split_names(suite)
    if suites and part != "test":
        raise ValueError(f"--suite goes with the test part: leave out --part {part}.")
    if suites:
        check_run(runs[0], suites, data)  # an error before anything is predicted
    if len(runs) == 1 and out is not None:
        raise ValueError("--out is the folder of an ensemble: name two runs or more.")
    if len(runs) > 1:
        folder, words, results = evaluate_ensemble(runs, out, **options)
        title = f"{escape(str(folder))}, {words}, {part}: 95% intervals (the ECE has none)"
    else:
        results = evaluate_run(runs[0], **options)
        title = f"{escape(str(runs[0]))}, {part}: 95% intervals (the ECE has none)"
    table = Table("samples", *TITLES.values(), title=title, box=box.SIMPLE, pad_edge=False)
    for count, summary in results.items():
        cells = []
        for metric, decimals in DECIMALS.items():
            scale = 100 if metric == "accuracy" else 1
            cells.append(f"{scale * getattr(summary, metric):.{decimals}f}")
            if metric in summary.intervals:
                low, high = (scale * end for end in summary.intervals[metric])
                cells[-1] += f"\n\\[{low:.{decimals}f}, {high:.{decimals}f}]"
        table.add_row("mean" if count == "0" else count, *cells)
    Console().print(table)
    if suites:
        del options["part"]
        found = (
            evaluate_suites(runs[0], suites, **options)
            if len(runs) == 1
            else evaluate_ensemble_suites(runs, folder, suites, **options)
        )
        _print_suites(found)


def _print_suites(found: dict[str, dict[str, dict[str, Any]]]) -> None:
    from bsam.experiments.suites import SUITES

    for name, evaluations in found.items():
        for count, numbers in evaluations.items():
            which = "the mean" if count == "0" else f"{count} samples"
            heads, rows = SUITES[name].table(numbers)
            table = Table(*heads, title=f"{SUITES[name].title}, {which}", box=box.SIMPLE, pad_edge=False)
            for row in rows:
                table.add_row(*row)
            Console().print(table)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page and its numbers.")] = Path("report"),
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds per method.", show_default="3")] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Choose the settings again on the validation part; takes up to an hour.")
    ] = False,
) -> None:
    """Train all methods on handwritten digits, and write a page that compares them.

    Takes about two minutes on two cores; the data comes with scikit-learn. Example:

    [bold]bsam demo --seeds 2 --out /tmp/report[/bold]
    """
    import torch

    from bsam.experiments import demo as experiment
    from bsam.experiments.data import load
    from bsam.experiments.methods import METHODS
    from bsam.experiments.record import write_json
    from bsam.experiments.report.demo_page import write_demo_page

    torch.set_num_threads(1)  # the networks are tiny: threads would wait for each other
    settings = experiment.load_demo()
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    if tune:
        with progress("tuning", experiment.num_tries(settings)) as advance:
            record = experiment.tune(settings, lambda method: advance(METHODS[method].title))
        write_json(out / "tuning.json", record)
        for method, result in record["methods"].items():
            console.print(method, result["best"])
        console.print(f"\nAll tries: {out / 'tuning.json'}")
        return

    settings = dataclasses.replace(settings, seeds=seeds or settings.seeds)
    with progress("training", len(settings.digits) * settings.seeds + len(settings.moons)) as advance:
        record, predictions, strange = experiment.run_digits(settings, lambda method: advance(METHODS[method].title))
        maps = experiment.moons(settings, lambda method: advance(METHODS[method].title))

    console.print(_demo_table(record))
    write_json(out / "results.json", record)
    page = write_demo_page(out, record, predictions, strange, maps, load(settings.digits["bsam"].dataset))
    console.print(f"Look at it: {_link(page)}", highlight=False)


def _demo_table(record: dict[str, Any]) -> Table:
    from bsam.experiments.demo import cells

    title = f"Digits, test part: mean (sd) over {record['seeds']} seeds"
    table = Table(title=title, box=box.SIMPLE, pad_edge=False)
    table.add_column("method")
    for column in TITLES.values():
        table.add_column(column, justify="right")
    for name, row in cells(record):
        table.add_row(name, *row)
    return table


@app.command()
def figure(
    name: Annotated[str, typer.Argument(help="A figure, `all` of them, their `numbers`, or `list`.")] = "list",
    out: Annotated[
        Path | None, typer.Option(help="File to write, or folder for all.", show_default="NAME.svg, or figures")
    ] = None,
) -> None:
    """Draw a figure of the theory, or list them.

    The paper's figures on toy problems; all of them take about four minutes. Examples:

    [bold]bsam figure smoothing --out smoothing.svg[/bold]

    [bold]bsam figure all --out figures[/bold]
    """
    from bsam.experiments import figures  # needs the extra `theory`
    from bsam.experiments.figures.moving import MOVING
    from bsam.experiments.figures.numbers import compute_numbers
    from bsam.experiments.record import write_json

    console = Console()
    known = (*figures.FIGURES, *MOVING, "numbers", "all", "list")
    if name not in known:
        raise ValueError(f"there is no figure {name!r}. There are: {', '.join(known)}.")
    if name == "list":
        table = Table("figure", "what it shows")
        for key in (*figures.FIGURES, *MOVING):
            table.add_row(key, MOVING[key].what if key in MOVING else figures.FIGURES[key].what)
        console.print(table)
        console.print("Draw one with: bsam figure NAME --out FILE", highlight=False)
        return
    if name == "all":
        folder = out or Path("figures")
        files = [f"{key}.svg" for key in figures.FIGURES] + [f"{key}{found.ending}" for key, found in MOVING.items()]
        paths = {**{Path(file).stem: folder / file for file in files}, "numbers": folder / "figures.json"}
    else:
        ending = MOVING[name].ending if name in MOVING else ".svg"
        paths = {name: out or Path("figures.json" if name == "numbers" else f"{name}{ending}")}
    with Console(stderr=True).status("") as status:
        for count, (key, path) in enumerate(paths.items(), start=1):
            status.update(f"{count} of {len(paths)}: {escape(str(path))}")
            if key == "numbers":
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, compute_numbers())  # results that were drawn are not computed again
            elif key in MOVING:
                MOVING[key].write(path)
            else:
                figures.draw(key, path)
            status.stop()  # else the name is written behind the line of the status, which stays
            console.print(f"{path}", highlight=False)
            status.start()


@app.command()
def suggest(
    num_data: Annotated[int, typer.Option(min=1, help="Number of training examples.")],
    sgd: Annotated[str | None, typer.Option(metavar="KEY=VALUE,...", help="lr, momentum, weight_decay of SGD.")] = None,
    adamw: Annotated[
        str | None, typer.Option(metavar="KEY=VALUE,...", help="lr, beta1, beta2, weight_decay of AdamW.")
    ] = None,
) -> None:
    """Convert settings of SGD or AdamW that work into a line of bSAM.

    Settings that are left out have torch's defaults. Examples:

    [bold]bsam suggest --sgd lr=0.1,momentum=0.9,weight_decay=5e-4 --num-data 50000[/bold]

    [bold]bsam suggest --adamw lr=1e-3,weight_decay=0.01 --num-data 50000[/bold]
    """
    from bsam.optim import suggest as convert

    if (sgd is None) == (adamw is None):
        raise ValueError("give either --sgd lr=0.1,momentum=0.9 or --adamw lr=1e-3,weight_decay=0.01.")
    line = None if adamw is None else _numbers("--adamw", adamw, "lr=1e-3,weight_decay=0.01")
    if line is not None and {"beta1", "beta2"} & set(line):
        line["betas"] = line.pop("beta1", 0.9), line.pop("beta2", 0.999)
    suggestion = convert(
        sgd=None if sgd is None else _numbers("--sgd", sgd, "lr=0.1,momentum=0.9"),
        adamw=line,
        num_data=num_data,
    )
    typer.echo(str(suggestion))


def _numbers(option: str, text: str, example: str) -> dict[str, Any]:
    """Return the numbers of KEY=VALUE,KEY=VALUE."""
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        return {name.strip(): float(value) for name, _, value in pairs}
    except ValueError:
        raise ValueError(f"{option} {text} must be names and numbers, like {example}.") from None


@app.command()
def report(
    records: Annotated[Path, typer.Option(help="Folder of the runs' records.")] = Path("results/runs"),
    figures: Annotated[
        Path | None,
        typer.Option(help="Folder that `bsam figure all` wrote.", show_default="docs/images/theory, if it is there"),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report/paper.html"),
) -> None:
    """Write one page of all results: tables, diagrams, curves and figures.

    Nothing is run. The page shows the records of runs, and the records beside
    them of sweeps, ablations, the demo and the theory's numbers. Example:

    [bold]bsam report --records results/runs --out report/paper.html[/bold]
    """
    from bsam.experiments.report.paper_page import write_paper_page  # needs the extra `theory`

    if figures is not None and not figures.is_dir():
        raise FileNotFoundError(
            f"--figures {figures}: there is no such folder. Make it: bsam figure all --out {figures}"
        )
    figures = figures or Path("docs/images/theory")
    try:
        with Console(stderr=True).status("") as status:
            page = write_paper_page(out, records, figures, lambda what: status.update(escape(what)))
    except KeyboardInterrupt:
        Console(stderr=True).print(f"stopped; {escape(str(out))} was not written.", highlight=False)
        raise typer.Exit(130) from None
    Console().print(f"Look at it: {_link(page)} ({page.stat().st_size / 1e6:.1f} MB)", highlight=False)


def _link(page: Path) -> str:
    return f"[link={page.resolve().as_uri()}]{escape(str(page))}[/link]"


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on stderr; yield the function to call with the name of each piece of work when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, *_TIMES, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(what, total=total)

        def advance(name: str) -> None:
            bar.update(task, advance=1, description=f"{what} {name:13}")
            if not bar.console.is_terminal:  # where a bar does not move
                bar.console.print(f"{what} {name}: {bar.tasks[0].completed} of {total}", highlight=False)

        yield advance


from bsam.experiments.reproduce import batch_commands as _batch  # noqa: E402, F401 (registers its commands on `app`)
