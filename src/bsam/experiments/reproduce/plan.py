"""Plans: the runs that a table or a study needs, those that are recorded, and those that are left to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bsam.experiments.choices import DtypeName, Scale
from bsam.experiments.comparison import find_table
from bsam.experiments.config import Config, override
from bsam.experiments.methods import METHODS
from bsam.experiments.paper.beyond import all_tables, beyond, own_dtype
from bsam.experiments.recorded_runs import Recorded, recorded, same_run
from bsam.experiments.reproduce.scales import scaled
from bsam.experiments.suites import SUITES, choose

__all__ = ["Places", "Plan", "Task", "Wanted", "find_places", "find_recorded", "make_plan", "settle", "wanted_by_table"]

ALSO = (0, 1, 8, 32, 128)
TEMPERATURES = (0.5, 0.7)
"""A run with a posterior is also evaluated with these numbers, so that later questions need no training."""

_GOOD_ENOUGH: dict[Scale, tuple[Scale, ...]] = {"full": ("full",), "reduced": ("full", "reduced"), "tiny": ("tiny",)}
"""By scale: a run that is recorded at one of these scales is not run again."""


@dataclass(frozen=True)
class Wanted:
    """A run that a table or a study needs, with all seeds, and the numbers of samples of its evaluations."""

    preset: str
    samples: tuple[int, ...]
    changes: tuple[str, ...] = ()
    """Settings that differ from the preset's, as `key=value`."""
    name: str = ""
    """Name of its records, if `changes` is not empty."""


@dataclass(frozen=True)
class Task:
    """One run to train and to evaluate, as far as this is not done."""

    name: str
    preset: str
    seed: int
    scale: Scale
    config: Config
    changes: tuple[str, ...]
    """Settings that differ from the preset's at this scale, as `key=value`."""
    samples: tuple[int, ...]
    folder: Path
    record: Path
    """File of the record."""
    part: str = "test"
    """Part of the data for the evaluation."""
    temperatures: tuple[float, ...] = ()
    """Temperatures of further evaluations, beside the one of its settings."""
    suites: tuple[str, ...] = ()
    """Suites to evaluate, with `samples` or fewer."""
    also: tuple[int, ...] = ()
    """Further numbers of samples for new evaluations; a record without them is complete, too."""

    @property
    def evaluations(self) -> list[tuple[int, float | None]]:
        """Pairs of a number of samples and a temperature; None is the temperature of the settings, and of the mean."""
        counts = sorted({*self.samples, *self.also})
        tempered = [(count, t) for t in self.temperatures for count in self.also or self.samples if count]
        return [*((count, None) for count in counts), *tempered]

    @property
    def share_left(self) -> float:
        """Share of the training that is left, by the number of epochs in its log."""
        log = self.folder / "log.jsonl"
        done = len(log.read_text().splitlines()) if log.exists() else 0
        return max(0.0, 1 - done / self.config.total_epochs)


@dataclass(frozen=True)
class Plan:
    """The tasks that are left, and those that are recorded."""

    tasks: tuple[Task, ...]
    recorded: tuple[Task, ...]


@dataclass(frozen=True)
class Places:
    """The folders of results."""

    runs: Path
    """Folder of the runs, with checkpoints and posteriors."""
    records: Path
    """Folder of the records: one small JSON file per run."""
    studies: Path
    """Folder of the sweeps and ablations: one JSON file and one figure each."""


def find_places(scale: Scale, runs: Path | None = None, records: Path | None = None) -> Places:
    """Return the folders that the options name, or the default ones of a scale."""
    runs = runs or Path("runs")
    if scale != "full":
        runs = runs / scale
    if records is not None:
        return Places(runs, records, records)
    if scale == "tiny":
        return Places(runs, Path("report/tiny"), Path("report/tiny"))
    return Places(runs, Path("results/runs"), Path("results"))


def wanted_by_table(table: str, block: str | None = None, methods: Iterable[str] | None = None) -> list[Wanted]:
    """Return the runs of a table, or of one block or some methods. Rows of ours are run only if they are named.

    Args:
        table: table1 to table6.
        block: Name of a block, like cifar10.
        methods: Last parts of the names of presets, like bsam or bsam-no-noise.
    """
    blocks = {found.name: found.rows for found in all_tables()[find_table(table)].blocks}
    if block is not None and block not in blocks:
        raise ValueError(f"--block {block}: {table} has no such block, but {', '.join(blocks)}.")
    rows = [row for name, rows in blocks.items() if block in (None, name) for row in rows]
    known = dict.fromkeys(row.preset.rpartition("/")[2] for row in rows)
    unknown = [method for method in methods or () if method not in known]
    if unknown:
        raise ValueError(f"--methods {unknown[0]}: there is no such method here, but {', '.join(known)}.")
    chosen = None if methods is None else set(methods)
    return [
        Wanted(row.preset, (row.samples,))
        for row in rows
        if (row.preset not in beyond() if chosen is None else row.preset.rpartition("/")[2] in chosen)
    ]


def settle(wanted: Wanted, scale: Scale) -> tuple[str, Config]:
    """Return name and settings of a run; if its changes change nothing, it is the run of the preset."""
    plain = scaled(wanted.preset, scale)
    config = override(plain, wanted.changes)
    return same_run(wanted.preset)[0] if config == plain else wanted.name, config


def find_recorded(wanted: Wanted, scale: Scale, records: Path) -> dict[int, Recorded]:
    """Return the records that can serve for a run, by seed."""
    name, _ = settle(wanted, scale)
    for good in _GOOD_ENOUGH[scale]:
        if found := recorded(records, name, good):
            return found
    return {}


def make_plan(
    wanted: Iterable[Wanted],
    *,
    seeds: int,
    first_seed: int = 0,
    scale: Scale,
    places: Places,
    dtype: DtypeName | None = None,
    suites: Iterable[str] = (),
) -> Plan:
    """Make a task for every run and seed; it is left to do unless it is recorded with all samples and suites.

    Args:
        wanted: The runs.
        seeds: Number of seeds per run.
        first_seed: The first of them.
        scale: Scale of the runs.
        places: Folders of the results.
        dtype: Dtype of the gradients, if not the presets'. A run that is recorded in another dtype is not run again.
        suites: Names of suites, or `shift` for all that fit a run's data.
    """
    suites = tuple(suites)
    samples: dict[str, set[int]] = {}
    runs: dict[str, Wanted] = {}
    for want in wanted:
        name, _ = settle(want, scale)
        runs.setdefault(name, want)
        samples.setdefault(name, set()).update(want.samples)
    left: list[Task] = []
    there: list[Task] = []
    for name, want in runs.items():
        _, config = settle(want, scale)
        if dtype is not None:
            config = replace(config, precision=own_dtype(want.preset) or dtype)
        found = find_recorded(want, scale, places.records)
        counts = tuple(sorted(samples[name]))
        temperatures = tuple(t for t in TEMPERATURES if t != config.temperature)
        later: dict[str, Any] = {"also": ALSO, "temperatures": temperatures}
        fitting = choose(suites, config.dataset)
        for seed in range(first_seed, first_seed + seeds):
            task = Task(
                name=name,
                preset=same_run(want.preset)[0],
                seed=seed,
                scale=scale,
                config=config,
                changes=want.changes if name == want.name else (),
                samples=counts,
                suites=fitting,
                folder=places.runs / name / f"seed{seed}",
                record=places.records / name / f"seed{seed}.json",
                **(later if scale == "full" and not METHODS[config.method].is_point else {}),
            )
            done = (
                seed in found
                and all(str(count) in found[seed].test for count in counts)
                and all(
                    str(count) in found[seed].suites.get(suite, {})
                    for suite in fitting
                    for count in SUITES[suite].counts(counts)
                )
            )
            (there if done else left).append(task)
    return Plan(tuple(left), tuple(there))
