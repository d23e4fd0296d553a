"""Suites of ensembles: the predictions that the runs keep are averaged, and rated like those of one run."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bsam
from bsam.experiments.config import Config, from_mapping
from bsam.experiments.data import Dataset, load
from bsam.experiments.ensemble import average
from bsam.experiments.evaluate import evaluation_of, prepared
from bsam.experiments.record import environment, read_json, write_json
from bsam.experiments.runs import remembered_data
from bsam.experiments.suites.of_runs import Results, evaluate_suites
from bsam.experiments.suites.registry import SUITES
from bsam.files import locked

__all__ = ["evaluate_ensemble_suites", "rate_average", "record_ensemble_suites"]


def rate_average(runs: Sequence[Path], suite: str, name: str, known: Dataset, data: Path | None) -> dict[str, Any]:
    """Rate a suite with the averaged predictions of several runs, all of which have evaluated it.

    Args:
        runs: The folders of the runs.
        suite: Name of the suite.
        name: Name of the evaluation, such as the number of samples.
        known: The data set.
        data: Folder of the data sets.
    """
    test = average([bsam.Predictions.load(run / f"predictions-test-{name}.safetensors") for run in runs])
    folders = [run / "suites" / f"{suite}-{name}" for run in runs]
    sets = {
        file.stem: average([bsam.Predictions.load(folder / file.name) for folder in folders])
        for file in sorted(folders[0].iterdir())
    }
    return SUITES[suite].rate(test, sets, SUITES[suite].about(known, data))


def evaluate_ensemble_suites(
    runs: Sequence[Path],
    out: Path,
    suites: Iterable[str],
    *,
    samples: Sequence[int] | None = None,
    temperature: float | None = None,
    device: str | None = None,
    data: Path | None = None,
    again: bool = False,
) -> Results:
    """Evaluate suites of each run, and of their ensemble into the record in `out`, which `evaluate_ensemble` wrote."""
    suites, prepare = list(suites), functools.cache(prepared)
    alone = [
        evaluate_suites(
            run,
            suites,
            samples=samples,
            temperature=temperature,
            device=device,
            data=data,
            again=again,
            prepare=prepare,
        )
        for run in runs
    ]
    first, where = from_mapping(read_json(runs[0] / "record.json")["config"]), data or remembered_data(runs[0])
    known = load(first.dataset, where)
    results = {
        suite: {name: rate_average(runs, suite, name, known, where) for name in names}
        for suite, names in alone[0].items()
    }
    with locked(out / ".record.json.lock"):
        content = read_json(out / "record.json")
        for suite, names in results.items():
            kept = content.setdefault("suites", {}).setdefault(suite, {})
            kept.update({name: {**numbers, "environment": environment()} for name, numbers in names.items()})
        write_json(out / "record.json", content)
    return results


def record_ensemble_suites(
    path: Path, runs: Sequence[Path], names: Mapping[str, Sequence[str]], config: Config, data: Path | None
) -> None:
    """Add suites to the record of an ensemble, and write `pairs.json` beside it: ensembles of two runs.

    Two runs of SGD cost as many gradients as one run of bSAM or SAM. With n runs there are n pairs, of each run and the
    next one. They share runs, so that their standard deviation is not one of independent ensembles.

    Args:
        path: The record, which `bsam.experiments.ensemble.write_ensemble` wrote.
        runs: The folders of the members.
        names: By suite that all members have evaluated: the names of its evaluations.
        config: Settings of the runs.
        data: Folder of the data sets.
    """
    known = load(config.dataset, data)

    def rated(members: Sequence[Path]) -> Results:
        return {
            suite: {name: rate_average(members, suite, name, known, data) for name in each}
            for suite, each in names.items()
        }

    record = read_json(path)
    write_json(path, {**record, "suites": rated(runs)})
    pairs = []
    for k, run in enumerate(runs if len(runs) > 2 else runs[:1]):
        members = [run, runs[(k + 1) % len(runs)]]
        found = {
            name: average([bsam.Predictions.load(each / f"predictions-test-{name}.safetensors") for each in members])
            for name in dict.fromkeys(name for each in names.values() for name in each)
        }
        evaluations = {
            name: evaluation_of(each, bsam.metrics.summary(each, num_bootstrap=0)) for name, each in found.items()
        }
        pairs.append(
            {"runs": [each.name for each in members], "evaluations": {"test": evaluations}, "suites": rated(members)}
        )
    shared = {key: value for key, value in record.items() if key not in ("evaluations", "suites", "members")}
    write_json(path.with_name("pairs.json"), {**shared, "members": 2, "pairs": pairs})
