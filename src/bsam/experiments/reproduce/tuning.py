"""Tuning: the settings of a grid are tried with a part of the training data held out, and rated on that part.

The test part is never predicted. Runs are in `runs/tune/NAME/EPOCHS-epochs/SETTINGS/seedK`; a run that diverged leaves
`diverged.json` there, and one that a search pruned `pruned.json`. One record has the results of all runs.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from bsam.experiments.choices import DtypeName
from bsam.experiments.config import FIELDS, Config, from_mapping, toml_value
from bsam.experiments.data.table import DATASETS
from bsam.experiments.demo import grid_of
from bsam.experiments.evaluate import evaluation_name
from bsam.experiments.methods import make_optimizer
from bsam.experiments.paper.presets import preset
from bsam.experiments.paper.results import METRICS
from bsam.experiments.record import read_json, write_json
from bsam.experiments.reproduce.execute import execute
from bsam.experiments.reproduce.plan import Plan, Task
from bsam.experiments.reproduce.scales import shrunk
from bsam.experiments.trainer import check_fits

__all__ = [
    "RULE",
    "TUNINGS",
    "Tuning",
    "collect_tries",
    "execute_tries",
    "note_divergence",
    "plan_tries",
    "read_tuning",
]

TUNINGS = {path.stem.removeprefix("tuning_"): path for path in Path(__file__).parent.glob("tuning_*.toml")}
"""The grids that come with the package, by name."""
RULE = "the lowest NLL on the validation part, averaged over the seeds"
FIRST_SEED = 100
"""The seeds differ from those of the tables."""


@dataclass(frozen=True)
class Tuning:
    """A grid of settings to try."""

    name: str
    base: str
    """The preset that the tries change."""
    validation: int
    """Number of training examples that are held out."""
    epochs: int
    """Number of epochs per try."""
    seeds: int
    grid: tuple[dict[str, list[Any]], ...]
    """Parts of the grid; all combinations within a part are tried."""
    dtype: DtypeName | None = None
    """Dtype of the gradients, if not the preset's."""
    temperatures: tuple[float, ...] = ()
    """Temperatures of the posterior, beside the preset's; each try keeps its best one."""

    @property
    def folder(self) -> str:
        """Folder of the tries, in that of the runs."""
        return f"tune/{self.name}/{self.epochs}-epochs{f'-{self.dtype}' if self.dtype else ''}"

    @property
    def tries(self) -> list[tuple[dict[str, Any], Config]]:
        """Per try: its settings in the grid, and all of its settings."""
        base = preset(self.base)
        shared = {"validation": self.validation, "precision": self.dtype or base.precision}
        found: dict[Config, dict[str, Any]] = {}
        for options in (options for part in self.grid for options in grid_of(part)):
            whole = from_mapping({**dataclasses.asdict(base), **shared, **options})
            found.setdefault(shrunk(whole, base.epochs / self.epochs), options)
        return [(options, config) for config, options in found.items()]


def read_tuning(name: str) -> Tuning:
    """Read the grid with this name, or in this TOML file."""
    path = Path(name) if name.endswith(".toml") else TUNINGS.get(name)
    if path is None:
        raise ValueError(f"there is no grid {name!r}: choose one of {', '.join(TUNINGS)}, or name a TOML file.")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}. One that can be changed is {TUNINGS['cifar10']}")
    try:
        content = {"temperatures": [], **tomllib.loads(path.read_text(encoding="utf-8"))}
        keys = [field.name for field in dataclasses.fields(Tuning) if field.name not in ("name", "dtype")]
        fields = {key: content.pop(key) for key in keys}
        if content:
            raise ValueError(f"unknown key {next(iter(content))!r}: there are {', '.join(fields)}.")
        lists = {key: tuple(fields[key]) for key in ("grid", "temperatures")}
        for name, values in (pair for part in lists["grid"] for pair in part.items()):
            if not isinstance(values, list):
                raise ValueError(f"{name}={toml_value(values)} must be a list, like [{toml_value(values)}].")
        tuning = Tuning(path.stem.removeprefix("tuning_"), **{**fields, **lists})
        if tuning.validation < 1 or tuning.seeds < 1 or tuning.epochs < 1:
            raise ValueError("validation, seeds and epochs must be at least 1.")
        if not tuning.tries:
            raise ValueError("the grid is empty: write a part [[grid]] with lists of values, like lr = [0.1, 0.3].")
        for _, config in tuning.tries:
            _check(config)
        for temperature in tuning.temperatures:
            dataclasses.replace(tuning.tries[0][1], temperature=temperature)  # raises if it is not a temperature
    except KeyError as error:
        raise ValueError(f"{path}: the key {error} is missing.") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return tuning


def _check(config: Config) -> None:
    """Raise if a run with these settings could not begin; no data are read."""
    if (info := DATASETS.get(config.dataset)) is None:
        raise ValueError(f"there is no data set {config.dataset!r}. There are: {', '.join(DATASETS)}.")
    num_train = info.num_train - config.validation
    if num_train < 1:
        raise ValueError(f"validation={config.validation} must be from 0 to {info.num_train - 1}.")
    check_fits(config, num_train)
    make_optimizer(config, nn.Linear(1, 1), num_train, seed=0)  # checks its rates


def plan_tries(tuning: Tuning, runs: Path) -> Plan:
    """Make one task per try and seed."""
    left: list[Task] = []
    there: list[Task] = []
    for options, config in tuning.tries:
        for seed in range(FIRST_SEED, FIRST_SEED + tuning.seeds):
            task = _task(tuning, options, config, seed, runs)
            (there if all(_outcome(task, t) for t in (None, *task.temperatures)) else left).append(task)
    return Plan(tuple(left), tuple(there))


def _task(tuning: Tuning, options: dict[str, Any], config: Config, seed: int, runs: Path) -> Task:
    words = re.sub(r"[^\w.=,+-]+", "-", ",".join(f"{name}={value}" for name, value in options.items()))
    name = f"{tuning.folder}/{words}"
    base = preset(tuning.base)
    differences = [f"{f}={toml_value(getattr(config, f))}" for f in FIELDS if getattr(config, f) != getattr(base, f)]
    return Task(
        name=name,
        preset=tuning.base,
        seed=seed,
        scale="full",
        config=config,
        changes=tuple(differences),
        samples=(config.num_samples,),
        folder=runs / name / f"seed{seed}",
        record=runs / name / f"seed{seed}.json",
        part="validation",
        temperatures=tuple(t for t in tuning.temperatures if t != config.temperature),
    )


def execute_tries(tasks: Sequence[Task], report: Callable[[float], None], **options: Any) -> None:
    """Do what `execute` does, but a try that diverged is a result and no error."""
    execute(tasks, report, on_divergence=note_divergence, **options)


def note_divergence(task: Task, error: FloatingPointError) -> None:
    """Write that a try diverged."""
    write_json(task.folder / "diverged.json", {"diverged": str(error)})


def _outcome(task: Task, temperature: float | None) -> dict[str, Any] | None:
    """Return the result of a finished task with this temperature, or None."""
    for ended in (task.folder / "diverged.json", task.folder / "pruned.json"):
        if ended.is_file():
            return {"seed": task.seed, **read_json(ended)}
    if not task.record.is_file():
        return None
    record = read_json(task.record)
    (count,) = task.samples
    found = record["evaluations"].get(task.part, {}).get(evaluation_name(count, temperature, task.config))
    if found is None or from_mapping(record["config"]) != task.config:
        return None
    return {
        "seed": task.seed,
        **{metric: found[metric] for metric in METRICS},
        "seconds": record["seconds"],
        "final_loss": record["final_loss"],
        "environment": record["environment"],
    }


def collect_tries(tuning: Tuning, runs: Path, command: str) -> dict[str, Any]:
    """Make one record of all tries; `chosen` is the best one, or None if all diverged."""
    plan = plan_tries(tuning, runs)
    if plan.tasks:
        raise ValueError(f"{len(plan.tasks)} tries are not done: go on with `{command}`.")
    tries = []
    environments: list[dict[str, Any]] = []
    for options, config in tuning.tries:
        tasks = [_task(tuning, options, config, FIRST_SEED + k, runs) for k in range(tuning.seeds)]
        rated = {}
        for temperature in (config.temperature, *tasks[0].temperatures):
            outcomes = [_outcome(task, temperature) or {} for task in tasks]
            for outcome in outcomes:
                environment = outcome.pop("environment", None)
                if environment is not None and environment not in environments:
                    environments.append(environment)
            losses = [math.inf if outcome.get("nll") is None else outcome["nll"] for outcome in outcomes]
            rated[temperature] = statistics.fmean(losses), outcomes
        suited = min(rated, key=lambda temperature: rated[temperature][0])
        loss, outcomes = rated[suited]
        tries.append(
            {
                "settings": options if suited == config.temperature else {**options, "temperature": suited},
                "nll": loss,
                **({"nll_by_temperature": {str(t): nll for t, (nll, _) in rated.items()}} if len(rated) > 1 else {}),
                "seconds": sum(outcome.get("seconds", 0.0) for outcome in outcomes),
                "seeds": outcomes,
                "config": dataclasses.asdict(dataclasses.replace(config, temperature=suited)),
            }
        )
    best = min(tries, key=lambda each: each["nll"])
    return {
        "base": tuning.base,
        "rule": RULE,
        "validation": tuning.validation,
        "epochs": tuning.epochs,
        "chosen": {"settings": best["settings"], "nll": best["nll"]} if math.isfinite(best["nll"]) else None,
        "tries": tries,
        "seconds": sum(each["seconds"] for each in tries),
        "environments": environments,
        "command": command,
    }
