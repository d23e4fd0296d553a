"""Options that several commands share: each is defined once, with its help."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from bsam.experiments.choices import ALL_SUITES, SUITE_NAMES, DtypeName, Scale

__all__ = ["Data", "Device", "Extent", "SaveMinutes", "Suites", "Work", "split_names", "taking"]

Device = Annotated[str | None, typer.Option(help="Device, like cuda:0.", show_default="the accelerator, or cpu")]
Data = Annotated[
    Path | None, typer.Option(help="Folder of the data sets, as torchvision lays them out.", envvar="BSAM_DATA")
]
Suites = Annotated[
    str | None,
    typer.Option(
        "--suite",
        metavar="NAME,...",
        help=f"Also evaluate suites: {', '.join(SUITE_NAMES)}, or {ALL_SUITES} for all that fit.",
    ),
]
SaveMinutes = Annotated[float, typer.Option(min=0, help="Minutes between two checkpoints of a run.")]


@dataclass(frozen=True)
class Work:
    """Options of `reproduce`, `sweep`, `ablate` and `tune`: how the runs are trained."""

    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Worker processes.", show_default="1, or as many as the cores serve if tiny"),
    ] = None
    on: Annotated[
        str | None,
        typer.Option(
            metavar="WHERE", help="ray: this machine, by Ray. ray://HOST:PORT: a cluster.", show_default="workers here"
        ),
    ] = None
    cores: Annotated[int | None, typer.Option(min=1, help="On Ray: cores per run.", show_default="1")] = None
    gpus: Annotated[
        float | None,
        typer.Option(min=0, help="On Ray: GPUs per run, like 1 or 0.25.", show_default="1 if there are any"),
    ] = None
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="On Ray: where runs are kept if the nodes share no folder: an fsspec address, like s3://bucket/runs.",
            show_default="the folders of runs and records",
        ),
    ] = None
    retries: Annotated[int, typer.Option(min=0, help="How often a run goes on after its worker or node was lost.")] = 2
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and its estimated time, and stop.")] = False
    runs: Annotated[Path | None, typer.Option(help="Folder of the runs.", show_default="runs, or runs/SCALE")] = None
    data: Data = None
    device: Device = None
    save_minutes: SaveMinutes = 5.0
    stack_seeds: Annotated[
        bool | None,
        typer.Option(
            "--stack-seeds/--one-by-one",
            help="Train runs together if they differ in seeds and rates only.",
            show_default="on CUDA",
        ),
    ] = None
    stack_size: Annotated[
        int, typer.Option(min=1, help="Most runs that are trained together. All seeds of a run always are.")
    ] = 8
    precision: Annotated[
        DtypeName | None,
        typer.Option(
            help="Dtype of the gradients. bfloat16 is faster on GPUs; the records say it.", show_default="the presets'"
        ),
    ] = None


@dataclass(frozen=True)
class Extent(Work):
    """Options of `reproduce`, `sweep` and `ablate`: also how much is run."""

    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds per run.", show_default="5, or 2 if reduced or tiny")
    ] = None
    first_seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0
    scale: Annotated[
        Scale,
        typer.Option(
            help="full: as the paper. reduced: a sixth of the epochs. tiny: on digits, in minutes, to see it work."
        ),
    ] = "full"
    records: Annotated[
        Path | None, typer.Option(help="Folder of the records.", show_default="results/runs, or report/tiny")
    ] = None


def split_names(text: str | None) -> list[str]:
    """Return the names of an option with commas between them; none if it is left out."""
    return [] if text is None else [name.strip() for name in text.split(",")]


def taking(kind: type[Work]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `kind`. The command receives them as one object, `options`."""
    types = get_type_hints(kind, include_extras=True)
    own = set(kind.__annotations__)
    shared = {
        field.name: inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
        )
        for field in sorted(fields(kind), key=lambda field: field.name not in own)
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        first = [
            parameter.replace(annotation=hints[name])
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "options"
        ]

        @functools.wraps(command)
        def whole(**values: Any) -> None:
            options = kind(**{name: values.pop(name) for name in shared})
            command(**values, options=options)

        parameters = [*first, *shared.values()]
        whole.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        whole.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return whole

    return decorate
