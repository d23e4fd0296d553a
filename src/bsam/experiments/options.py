"""Options that several commands share: each is defined once, with its help."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from bsam.experiments.choices import DtypeName, Scale

__all__ = ["Data", "Device", "Extent", "SaveMinutes", "Work", "taking"]

Device = Annotated[str | None, typer.Option(help="Device, like cuda:0.", show_default="the accelerator, or cpu")]
Data = Annotated[
    Path | None, typer.Option(help="Folder of the data sets, as torchvision lays them out.", envvar="BSAM_DATA")
]
SaveMinutes = Annotated[float, typer.Option(min=0, help="Minutes between two checkpoints of a run.")]


@dataclass(frozen=True)
class Work:
    """Options of `reproduce`, `sweep`, `ablate` and `tune`: how the runs are trained."""

    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Worker processes.", show_default="1, or as many as the cores serve if tiny"),
    ] = None
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
    scale: Annotated[
        Scale,
        typer.Option(
            help="full: as the paper. reduced: a sixth of the epochs. tiny: on digits, in minutes, to see it work."
        ),
    ] = "full"
    records: Annotated[
        Path | None, typer.Option(help="Folder of the records.", show_default="results/runs, or report/tiny")
    ] = None


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
