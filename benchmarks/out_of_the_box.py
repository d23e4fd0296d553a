"""How good optimizers are before anybody tunes them, on the problems of `small_problems.py` and its neighbours.

    python -m benchmarks.out_of_the_box --data DATA --set choosing
    python -m benchmarks.out_of_the_box --data DATA --set judged --seeds 10 --out results/out_of_the_box.json
    python -m benchmarks.out_of_the_box --data DATA --set few-judged --kinds defaults converted

One run trains a network with a cosine schedule without warm-up and predicts. SGD, AdamW and SAM predict with their
weights; IVON, VOGN and bSAM average over 32 samples of their posterior (the record has the mean's numbers as well).
The kinds of settings:

- `defaults`: what a new user writes (`DEFAULTS`).
- `converted-sgd`, `converted-adamw`: the line of SGD or of AdamW in `DEFAULTS`, converted by `converted`.
- `random`: the reference. Eight random settings per optimizer, the same for all problems, have one run each; the best
  one by the NLL of the validation examples is trained again with every seed.
- `tuned-sgd`, `tuned-adamw`: bSAM with the best random settings of SGD or of AdamW for this problem, converted.
- `variant:NAME`: bSAM with keywords from the command line, on the problems for choosing only.

A run fails if it raises, if a number is not finite, or if its accuracy is at chance (`Data.failure_threshold`). In the
tables a failed run has the accuracy and the NLL of chance and no ECE; the record has its own numbers. The regret of an
optimizer with a kind of settings is how far the mean over the seeds is from the best of all rows of the problem's
table. Of a regression, accuracy is R^2, and there is no ECE.

Every finished run is a line of the cache. `--resume` takes the runs from there that had the same problem, settings and
seed; it does not know whether the formulas of an optimizer have changed: `--again BSAM` runs those of bSAM again.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import multiprocessing
import random
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import torch
from torch import nn

import bsam
from benchmarks import few_data, hard_starts, many_data, new_data, small_problems
from benchmarks.candidates import CANDIDATES
from benchmarks.small_problems import Data, average_loss, predict
from bsam.experiments.record import environment, to_json, write_json

SETS = {
    "choosing": small_problems.CHOOSING,
    "judged": small_problems.JUDGED,
    "few-choosing": few_data.CHOOSING,
    "few-judged": few_data.JUDGED,
    "many": many_data.PROBLEMS,
    "new-judged": new_data.JUDGED,
    "hard-choosing": hard_starts.CHOOSING,
    "hard-judged": hard_starts.JUDGED,
    "explained": {
        "mnist_100": new_data.JUDGED["mnist_100"],
        **{name: small_problems.JUDGED[name] for name in ("text_words", "wine_quality")},
    },
}
"""`explained`: judged problems on which bSAM failed or was far behind, to find out why. Nothing is chosen on them."""
PROBLEMS = {name: problem for problems in SETS.values() for name, problem in problems.items()}
SOURCE: dict[str, ModuleType] = {
    **dict.fromkeys(small_problems.PROBLEMS, small_problems),
    **dict.fromkeys(few_data.CHOOSING | few_data.JUDGED, few_data),
    **dict.fromkeys(many_data.PROBLEMS, many_data),
    **dict.fromkeys(new_data.JUDGED, new_data),
    **dict.fromkeys(hard_starts.CHOOSING | hard_starts.JUDGED, hard_starts),
}
"""The file of each problem."""
NUM_SAMPLES, NUM_RANDOM = 32, 8
SGD_LINE = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
ADAMW_LINE = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01}
DEFAULTS: dict[str, dict[str, Any]] = {
    "SGD": SGD_LINE,  # torch's own rate, 1e-3 without momentum, is nobody's
    "AdamW": {},
    "SAM": {**SGD_LINE, "rho": 0.05},
    "IVON": {},
    "VOGN": {},
    "BSAM": {},
}
OPTIMIZERS = tuple(DEFAULTS)
IMPOSSIBLE = {("long_run", "VOGN"), ("digits_batchnorm", "VOGN"), ("mnist_batchnorm", "VOGN")}
"""BatchNorm mixes the examples of a batch, and VOGN needs the gradient of each: these are left out."""
KINDS = ("defaults", "converted", "random")
SOURCES = ("sgd", "adamw")


# Settings


def make_optimizer(name: str, model: nn.Module, settings: dict[str, Any], *, num_data: int, seed: int) -> Any:
    """The optimizer of a model. `weight_decay_as_prior` w of one that has a prior is prior_precision = w N.

    What was tried and rejected for bSAM: `max_curvature_data` c makes the curvature sqrt(min(N, c) s) |g|,
    `damping_by_data` c a damping of at least c / N up to 1, and `candidate` is a name of `candidates.py`.
    """
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    parameters: Any = model.parameters()
    if name in ("SGD", "AdamW"):
        return getattr(torch.optim, name)(parameters, **settings)
    if name == "SAM":
        return bsam.SAM(parameters, torch.optim.SGD, module=model, **settings)
    if "converted_from" in settings:
        convert = getattr(getattr(bsam, name), settings.pop("converted_from"))
        return convert(parameters, num_data=num_data, module=model, seed=seed, **settings)
    if "max_curvature_data" in settings:
        limit = settings.pop("max_curvature_data")
        limited = type("BSAM", (bsam.BSAM,), {"_curvature_num_data": property(lambda self: min(num_data, limit))})
        return limited(parameters, num_data=num_data, module=model, seed=seed, **settings)
    if "damping_by_data" in settings:
        settings["damping"] = min(max(0.1, settings.pop("damping_by_data") / num_data), 1.0)
    if "candidate" in settings:
        changed = CANDIDATES[settings.pop("candidate")]
        return changed(parameters, num_data=num_data, module=model, seed=seed, **settings)
    if "weight_decay_as_prior" in settings:
        settings["prior_precision"] = settings.pop("weight_decay_as_prior") * num_data
    return getattr(bsam, name)(parameters, num_data=num_data, module=model, seed=seed, **settings)


def converted(name: str, *, sgd: dict[str, float] | None = None, adamw: dict[str, Any] | None = None) -> dict[str, Any]:
    """Settings of IVON, VOGN or bSAM that begin as a line of SGD or of AdamW does.

    bSAM has `from_sgd` and `from_adamw`, which `make_optimizer` calls. For IVON and VOGN the precision s starts where
    it stays if there is no curvature, and AdamW counts as SGD with 100 times the rate, and a weight decay that shrinks
    the weights as fast.
    """
    if (sgd is None) == (adamw is None):
        raise ValueError("converted needs either sgd= or adamw=, the settings to convert.")
    if name == "BSAM":
        return {"converted_from": "from_sgd", **sgd} if sgd is not None else {"converted_from": "from_adamw", **adamw}
    if adamw is not None:
        beta1 = adamw["betas"][0]
        sgd = {
            "lr": 100 * adamw["lr"],
            "momentum": beta1,
            "weight_decay": adamw["weight_decay"] * (1 - beta1) / 100,
        }
    assert sgd is not None
    rate, decay = sgd["lr"] / (1 - sgd["momentum"]), sgd["weight_decay"]
    shared = {"weight_decay_as_prior": decay, "betas": (sgd["momentum"], 0.999)}
    if name == "IVON":
        s = 0.5
        return {**shared, "lr": rate * s, "initial_hessian": s - decay}
    if name == "VOGN":  # its momentum has no factor 1 - beta1, and its curvature comes on top
        s = 0.1
        return {**shared, "lr": sgd["lr"] * s, "damping": s - decay}
    raise ValueError(f"settings of {name!r} are not converted: write IVON, VOGN or BSAM.")


def random_settings(name: str) -> list[dict[str, Any]]:
    """Eight settings of an optimizer, the same in every process: rates are uniform in their logarithm."""
    draw = random.Random(f"out of the box: {name}")

    def power(low: float, high: float) -> float:
        return float(f"{10 ** draw.uniform(low, high):.3g}")

    def one() -> dict[str, Any]:
        if name == "SGD":
            return {"lr": power(-2.5, 0), "momentum": 0.9, "weight_decay": power(-5, -2)}
        if name == "AdamW":
            return {"lr": power(-4, -1.5), "weight_decay": power(-3, 0)}
        if name == "SAM":
            return {"lr": power(-2.5, 0), "momentum": 0.9, "weight_decay": power(-5, -2), "rho": power(-2, -0.3)}
        s = power(-2, 0)  # the precision that the rate is in proportion to
        decay = {"weight_decay_as_prior": power(-5, -2)}
        if name == "IVON":
            return {**decay, "lr": power(-1.5, 1) * s, "initial_hessian": s, "betas": (0.9, 0.999)}
        if name == "VOGN":
            return {**decay, "lr": power(-2.5, 0) * s, "damping": s}
        if name == "BSAM":
            betas = (0.9, draw.choice((0.99, 0.999)))
            return {
                **decay,
                "lr": power(-1.5, 1) * s,
                "damping": s,
                "init_precision": s,
                "rho": power(-3, -1),
                "betas": betas,
                "sqrt_num_data": draw.choice((True, False)),
            }
        raise ValueError(f"there are no random settings of {name!r}.")

    return [one() for _ in range(NUM_RANDOM)]


# One run


@dataclass(frozen=True)
class Run:
    """One training and its predictions for one part of the data."""

    problem: str
    optimizer: str
    kind: str
    settings: dict[str, Any]
    seed: int
    part: str
    """`"test"`, or `"validation"` where a setting is chosen."""
    max_steps: int | None = None

    @functools.cached_property
    def key(self) -> str:
        """What its numbers depend on, as a hash."""
        model = nn.Linear(1, 1)
        groups = [  # some defaults depend on the number of examples
            {**make_optimizer(self.optimizer, model, self.settings, num_data=N, seed=0).param_groups[0]}
            for N in (100, 1000)
        ]
        for group in groups:
            group.pop("params")  # the rest is what the package adds to the settings
        known = [
            self.problem,
            source_hash(SOURCE[self.problem]),
            self.optimizer,
            groups,
            self.settings,
            self.seed,
            self.part,
            self.max_steps,
        ]
        return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:16]


@functools.cache
def source_hash(module: ModuleType) -> str:
    """The hash of a file of problems."""
    return hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()


@functools.cache
def load(problem: str, folder: Path) -> Data:
    """The data of a problem, once per process."""
    return PROBLEMS[problem].load(folder)


def perform(run: Run, folder: Path) -> dict[str, Any]:
    """Train, predict, and say what came out. A run that raises has an `error`."""
    data = load(run.problem, folder)
    torch.manual_seed(run.seed)
    model = PROBLEMS[run.problem].network(data)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    found: dict[str, Any] = {
        "problem": run.problem,
        "optimizer": run.optimizer,
        "kind": run.kind,
        "seed": run.seed,
        "part": run.part,
        "key": run.key,
        "commit": environment()["commit"],
        "error": None,
        "mean": None,
        "averaged": None,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            optimizer = make_optimizer(run.optimizer, model, run.settings, num_data=data.num_data, seed=run.seed)
            group = optimizer.param_groups[0]
            found["settings"] = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            train(run, model, optimizer, data)
            found["training_cpu_seconds"] = time.process_time() - begin_cpu
            part = getattr(data, run.part)
            gaussian = hasattr(optimizer, "posterior")
            posterior = optimizer.posterior(model) if gaussian else bsam.PointMass.from_model(model)
            found["mean"] = predict(model, posterior, data, part, num_samples=0)
            found["averaged"] = (
                predict(model, posterior, data, part, num_samples=NUM_SAMPLES) if gaussian else found["mean"]
            )
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"[:300]
    found["failure"] = failure(found, data)
    found["seconds"] = time.perf_counter() - begin
    found["cpu_seconds"] = time.process_time() - begin_cpu
    found["warnings"] = sorted({str(warning.message)[:300] for warning in caught})
    return found


def train(run: Run, model: nn.Module, optimizer: Any, data: Data) -> None:
    """All epochs, each in a new order, with a cosine schedule over the steps."""
    problem = PROBLEMS[run.problem]
    steps = problem.num_steps(data)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for k, (x, y) in enumerate(batches(data, problem.batch_size, problem.epochs, run.seed)):
        if k == run.max_steps:
            break
        if run.optimizer in ("SGD", "AdamW"):
            optimizer.zero_grad()
            loss = average_loss(model, data, x, y)
            loss.backward()
            optimizer.step()
        else:
            loss = optimizer.step(functools.partial(average_loss, model, data), x, y)
        if not math.isfinite(loss.item()):
            raise ArithmeticError(f"the loss is {loss.item()} at step {k + 1} of {steps}")
        schedule.step()


def batches(data: Data, size: int, epochs: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The training examples in a new order in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    x, y = data.train
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(size):
            yield x[index], y[index]


def failure(found: dict[str, Any], data: Data) -> str | None:
    """Why a run counts as failed, or None."""
    if found["error"]:
        return "raised"
    if not all(math.isfinite(value) for value in found["averaged"].values()):
        return "not finite"
    return "at chance" if found["averaged"]["accuracy"] <= data.failure_threshold else None


# All runs


def start_worker() -> None:
    """One thread per process."""
    torch.set_num_threads(1)


class Cache:
    """Finished runs, as lines of a file."""

    def __init__(self, path: Path, *, resume: bool, again: Iterable[str]) -> None:
        self.path = path
        self.runs: dict[str, dict[str, Any]] = {}
        if resume and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    found = json.loads(line)
                except ValueError:
                    continue  # the line at which a run was stopped
                self.runs[found["key"]] = found
            self.runs = {key: found for key, found in self.runs.items() if found["optimizer"] not in again}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(to_json(found) + "\n" for found in self.runs.values()), encoding="utf-8")

    def add(self, found: dict[str, Any]) -> None:
        """Keep a run, here and in the file."""
        self.runs[found["key"]] = json.loads(to_json(found))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(to_json(found) + "\n")


def perform_all(runs: list[Run], cache: Cache, folder: Path, workers: int) -> list[dict[str, Any]]:
    """The results of all runs, in order: from the cache, or from a pool of processes."""
    missing = [run for run in runs if run.key not in cache.runs]
    missing = list({run.key: run for run in missing}.values())
    print(f"{len(runs)} runs, {len(missing)} of them new", flush=True)
    if missing:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker) as pool:
            futures = [pool.submit(perform, run, folder) for run in missing]
            for done, future in enumerate(as_completed(futures), start=1):
                found = future.result()
                cache.add(found)
                print(f"[{done}/{len(missing)}] {line_of(found)}", flush=True)
    # One run may stand for several kinds: it has the name of the kind that asks.
    return [{**cache.runs[run.key], "kind": run.kind} for run in runs]


def line_of(found: dict[str, Any]) -> str:
    """One run in one line."""
    numbers = found["averaged"] or {}
    values = " ".join(f"{name} {number(value)}" for name, value in numbers.items())
    name = f"{found['problem']} {found['optimizer']} {found['kind']} seed {found['seed']}"
    return f"{name}: {values} {found['failure'] or ''} {found['error'] or ''} ({found['cpu_seconds']:.1f} s of CPU)"


def possible(problem: str, optimizers: list[str]) -> list[str]:
    """Those optimizers that can train the problem's network."""
    return [name for name in optimizers if (problem, name) not in IMPOSSIBLE]


def planned(arguments: argparse.Namespace, problems: list[str]) -> list[Run]:
    """The runs on test data that need no choice of settings."""
    runs = []

    def add(problem: str, optimizer: str, kind: str, settings: dict[str, Any]) -> None:
        runs.extend(
            Run(problem, optimizer, kind, settings, seed, "test", arguments.max_steps)
            for seed in range(arguments.seeds)
        )

    for problem in problems:
        for optimizer in possible(problem, arguments.optimizers):
            if "defaults" in arguments.kinds:
                add(problem, optimizer, "defaults", DEFAULTS[optimizer])
            if "converted" in arguments.kinds and optimizer in ("IVON", "VOGN", "BSAM"):
                for source, line in zip(SOURCES, (SGD_LINE, ADAMW_LINE), strict=True):
                    add(problem, optimizer, f"converted-{source}", converted(optimizer, **{source: line}))
        for name, settings in arguments.variant:
            add(problem, "BSAM", f"variant:{name}", settings)
    return runs


def validated(arguments: argparse.Namespace, problems: list[str]) -> list[Run]:
    """The runs of random settings on validation data."""
    return [
        Run(problem, optimizer, f"random-{k}", settings, 0, "validation", arguments.max_steps)
        for problem in problems
        for optimizer in possible(problem, arguments.optimizers)
        for k, settings in enumerate(random_settings(optimizer))
        if "random" in arguments.kinds
    ]


def best_random(arguments: argparse.Namespace, tries: list[dict[str, Any]]) -> list[Run]:
    """For each problem and optimizer the runs of its best random settings on test data."""

    def rating(found: dict[str, Any]) -> tuple[bool, float]:
        nll = (found["averaged"] or {}).get("nll")
        return found["failure"] is not None, math.inf if nll is None else nll

    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for found in tries:
        groups.setdefault((found["problem"], found["optimizer"]), []).append(found)
    runs = []
    for (problem, optimizer), own in groups.items():
        k = int(min(own, key=rating)["kind"].removeprefix("random-"))
        settings = random_settings(optimizer)[k]
        rows = [(optimizer, "random", settings)]
        source = optimizer.lower()
        if "converted" in arguments.kinds and "BSAM" in arguments.optimizers and source in SOURCES:
            rows.append(("BSAM", f"tuned-{source}", converted("BSAM", **{source: settings})))
        runs += [
            Run(problem, *row, seed, "test", arguments.max_steps) for row in rows for seed in range(arguments.seeds)
        ]
    return runs


# What came out


Row = tuple[str, str]
"""An optimizer and a kind of settings."""


def summarise(
    runs: list[dict[str, Any]], chances: dict[str, tuple[float, float]]
) -> dict[str, dict[Row, dict[str, Any]]]:
    """For each problem and row: means over the seeds, regrets and failures."""
    groups: dict[str, dict[Row, list[dict[str, Any]]]] = {}
    for found in runs:
        groups.setdefault(found["problem"], {}).setdefault((found["optimizer"], found["kind"]), []).append(found)
    table: dict[str, dict[Row, dict[str, Any]]] = {}
    for problem, rows in groups.items():
        chance = dict(zip(("accuracy", "nll"), chances[problem], strict=True))

        def mean(own: list[dict[str, Any]], name: str, chance: dict[str, float] = chance) -> float | None:
            values = [(chance if found["failure"] else found["averaged"]).get(name) for found in own]
            known = [value for value in values if value is not None]
            return fmean(known) if known else None

        table[problem] = {
            row: {
                **{name: mean(own, name) for name in ("accuracy", "nll", "ece")},
                "seeds": len(own),
                "failures": sum(found["failure"] is not None for found in own),
                "cpu_seconds": fmean(found["cpu_seconds"] for found in own),
            }
            for row, own in rows.items()
        }
        best_accuracy = max(cell["accuracy"] for cell in table[problem].values())
        best_nll = min(cell["nll"] for cell in table[problem].values())
        for cell in table[problem].values():
            cell["accuracy_regret"] = best_accuracy - cell["accuracy"]
            cell["nll_regret"] = cell["nll"] - best_nll
    return table


def overall(table: dict[str, dict[Row, dict[str, Any]]]) -> dict[Row, dict[str, Any]]:
    """Of each row the means over the problems that it has, and the sum of its failures."""
    rows = dict.fromkeys(row for cells in table.values() for row in cells)
    result = {}
    for row in rows:
        cells = [own[row] for own in table.values() if row in own]
        ece = [cell["ece"] for cell in cells if cell["ece"] is not None]
        result[row] = {
            "problems": len(cells),
            **{
                name: fmean(cell[name] for cell in cells)
                for name in ("accuracy_regret", "nll_regret", "accuracy", "nll", "cpu_seconds")
            },
            "ece": fmean(ece) if ece else None,
            "failures": sum(cell["failures"] for cell in cells),
            "runs": sum(cell["seeds"] for cell in cells),
        }
    return result


def number(value: float | None) -> str:
    """Four digits after the point, or a dash."""
    return "-" if value is None else f"{value:.4f}"


COLUMNS = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "accuracy_regret": "acc. regret",
    "nll_regret": "NLL regret",
}


def print_table(title: str, rows: dict[Row, dict[str, Any]], runs: str) -> None:
    """One table: a row per optimizer and kind."""
    head = " ".join(f"{text:>11}" for text in (*COLUMNS.values(), "failures", "CPU s"))
    print(f"\n{title:34}{head}")
    for (optimizer, kind), cell in rows.items():
        cells = [number(cell[name]) for name in COLUMNS]
        cells += [f"{cell['failures']}/{cell[runs]}", f"{cell['cpu_seconds']:.1f}"]
        print(f"{f'{optimizer} {kind}':34}" + " ".join(f"{text:>11}" for text in cells))


def nested(rows: dict[Row, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows with names that JSON knows."""
    return {f"{optimizer} {kind}": cell for (optimizer, kind), cell in rows.items()}


# The command


def variant(text: str) -> tuple[str, dict[str, Any]]:
    """NAME=JSON of the command line."""
    name, _, settings = text.partition("=")
    try:
        parsed = json.loads(settings)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=JSON, like 'a={{\"lr\": 1.0}}': {error}") from error
    if not isinstance(parsed, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=JSON with an object, like 'a={{\"lr\": 1.0}}'.")
    return name, parsed


def parse(command: list[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="The record, like results/out_of_the_box.json. None by default.")
    parser.add_argument("--data", type=Path, default=Path("data"), help="Folder with FashionMNIST and uci.")
    parser.add_argument("--cache", type=Path, default=Path("runs/out_of_the_box.jsonl"))
    parser.add_argument("--resume", action="store_true", help="Go on with the runs of the cache.")
    parser.add_argument("--again", nargs="*", default=[], choices=OPTIMIZERS, help="Not those of the cache.")
    parser.add_argument("--set", choices=list(SETS), default="choosing")
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), help="By default all of the set.")
    parser.add_argument("--optimizers", nargs="*", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variant", type=variant, action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-steps", type=int, help="Stop each run early, to try the command.")
    arguments = parser.parse_args(command)
    own = SETS[arguments.set]
    arguments.problems = arguments.problems or list(own)
    if others := [name for name in arguments.problems if name not in own]:
        parser.error(f"{', '.join(others)} are not of the set {arguments.set!r}: write the other --set.")
    if arguments.cache.exists() and not arguments.resume:
        parser.error(f"{arguments.cache} has runs: write --resume to go on, or another --cache.")
    if arguments.variant and arguments.set.endswith("judged"):
        parser.error("variants are not for these sets: nothing is chosen on the problems that are judged.")
    return arguments


def main(command: list[str] | None = None) -> None:
    """Run what is asked for, print the tables and write the record."""
    arguments = parse(command)
    begin = time.perf_counter()
    torch.set_num_threads(1)
    needed = {name: arguments.data / PROBLEMS[name].needs for name in arguments.problems if PROBLEMS[name].needs}
    skipped = {name: f"{path} is not there" for name, path in needed.items() if not path.exists()}
    for name, why in skipped.items():
        print(f"{name} is skipped: {why}")
    problems = [name for name in arguments.problems if name not in skipped]
    cache = Cache(arguments.cache, resume=arguments.resume, again=arguments.again)

    def perform_these(runs: list[Run]) -> list[dict[str, Any]]:
        return perform_all(runs, cache, arguments.data, arguments.workers)

    tries = perform_these(validated(arguments, problems))
    runs = perform_these([*planned(arguments, problems), *best_random(arguments, tries)])
    data = {name: load(name, arguments.data) for name in problems}
    table = summarise(runs, {name: own.chance for name, own in data.items()})
    for name, rows in table.items():
        print_table(name, rows, "seeds")
    means = overall(table)
    print_table(f"mean of {len(table)} problems ({arguments.set})", means, "runs")
    if arguments.out is None:
        return
    record = {
        "what": "default, converted and random settings on small problems; benchmarks/out_of_the_box.py explains them",
        "config": {
            "set": arguments.set,
            "seeds": arguments.seeds,
            "num_samples": NUM_SAMPLES,
            "max_steps": arguments.max_steps,
            "workers": arguments.workers,
            "random_settings": {name: random_settings(name) for name in arguments.optimizers},
            "variants": dict(arguments.variant),
        },
        "problems": {name: described(name, data[name]) for name in problems},
        "skipped": skipped,
        "summary": {name: nested(rows) for name, rows in table.items()},
        "means": nested(means),
        "runs": runs,
        "tries": tries,
        "seconds": time.perf_counter() - begin,
        "environment": environment(),
    }
    write_json(arguments.out, record)


def described(name: str, data: Data) -> dict[str, Any]:
    """What the record says of a problem."""
    problem = PROBLEMS[name]
    return {
        "set": next(own for own, problems in SETS.items() if name in problems),
        "sha256": data.sha256,
        "examples": {part: len(getattr(data, part)[0]) for part in ("train", "validation", "test")},
        "num_data": data.num_data,
        "num_classes": data.num_classes,
        "noise_std": data.noise_std,
        "labels_drawn_at_random": data.shuffled,
        "epochs": problem.epochs,
        "batch_size": problem.batch_size,
        "steps": problem.num_steps(data),
        "chance": dict(zip(("accuracy", "nll"), data.chance, strict=True)),
        "failure_threshold": data.failure_threshold,
    }


if __name__ == "__main__":
    main()
