"""Ensembles: predictions averaged over runs, and over the samples of each run.

They are the predictions of `bsam.Mixture`, of the runs' posteriors with equal weights, with as many samples of each
part as each run has. They are averaged from those of the runs, which are made once and may be linearised.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import bsam
from bsam.experiments.config import Config, from_mapping
from bsam.experiments.evaluate import draw_diagram, evaluate, evaluation_of, sha256_of
from bsam.experiments.methods import METHODS
from bsam.experiments.record import environment, read_json, write_json
from bsam.files import locked
from bsam.prediction.results import entropy

__all__ = ["average", "evaluate_ensemble", "write_ensemble"]


def average(members: Sequence[bsam.Predictions]) -> bsam.Predictions:
    """Average the probabilities of several runs with equal weights; all must predict the same examples in one order."""
    first = members[0]
    for other in members[1:]:
        a, b = first.labels, other.labels
        same = a is b if a is None or b is None else torch.equal(a, b)
        if other.log_probs.shape != first.log_probs.shape or not same:
            raise ValueError("the members of an ensemble predict other examples: give them the same data.")
    energies = [member.energy for member in members if member.energy is not None]
    log_probs = torch.stack([member.log_probs for member in members]).logsumexp(0) - math.log(len(members))
    # I(label; weights) = H[mean of p] - mean of H[p], the second mean over all samples of all members.
    of_samples = torch.stack([entropy(member.log_probs) - member.mutual_information for member in members]).mean(0)
    return dataclasses.replace(
        first,
        log_probs=log_probs,
        mutual_information=(entropy(log_probs) - of_samples).clamp_min(0),
        num_samples=sum(member.num_samples for member in members),
        computed_by="ensemble",
        sample_log_probs=None,
        sample_weights=None,
        energy=torch.stack(energies).mean(0) if len(energies) == len(members) else None,
    )


def evaluate_ensemble(
    runs: Sequence[Path],
    out: Path | None = None,
    *,
    samples: Sequence[int] | None = None,
    part: str = "test",
    temperature: float | None = None,
    device: str | None = None,
    data: Path | None = None,
    again: bool = False,
) -> tuple[Path, str, dict[str, bsam.metrics.Summary]]:
    """Evaluate the ensemble of some finished runs, and each run alone; write predictions, diagrams and a record.

    Runs of different methods may be members, and runs of one method with the same seed but other settings. They must
    have the same data set and network, and no two the same posterior.

    Args:
        runs: The folders of the runs, two or more.
        out: Folder of the ensemble; by default `ensemble` in the folder that all runs share.
        samples: Numbers of samples of each run; 0 is its mean. The default is in the run's settings.
        part: As for `evaluate`.
        temperature: As for `evaluate`, for all runs.
        device: As for `evaluate`.
        data: As for `evaluate`.
        again: As for `evaluate`.

    Returns:
        The folder, what the ensemble is made of in words, and its metrics as `evaluate` returns them.
    """
    found = [read_json(folder / "record.json") if (folder / "record.json").is_file() else None for folder in runs]
    members = []
    for folder, record in zip(runs, found, strict=True):
        if record is None:
            raise FileNotFoundError(f"{folder} holds no finished run, which a member of an ensemble must be.")
        config = from_mapping(record["config"])
        sha256 = sha256_of(folder / "posterior.safetensors")
        members.append((folder, config, record["seed"], sha256))
    _check_members(members)
    out = _common_folder(runs) / "ensemble" if out is None else out
    described = [
        {"folder": os.path.relpath(folder, out), "method": config.method, "seed": seed, "posterior_sha256": sha256}
        for folder, config, seed, sha256 in members
    ]
    _check_free(out / "record.json", described)

    results: dict[str, bsam.metrics.Summary] = {}
    alone = [
        evaluate(folder, samples=samples, part=part, temperature=temperature, device=device, data=data, again=again)
        for folder in runs
    ]
    if any(list(each) != list(alone[0]) for each in alone):
        raise ValueError("the runs have different num_samples in their settings: write --samples 32.")
    out.mkdir(parents=True, exist_ok=True)
    for name in alone[0]:
        file = f"predictions-{part}-{name}.safetensors"
        predictions = average([bsam.Predictions.load(folder / file) for folder in runs])
        results[name] = bsam.metrics.summary(predictions)
        with locked(out / ".record.json.lock"):  # keeps results that other processes have written in the meantime
            predictions.save(out / file)
            draw_diagram(predictions, out / f"reliability-{part}-{name}.png")
            path = out / "record.json"
            record = read_json(path) if path.is_file() else {"members": len(runs), "runs": described, "evaluations": {}}
            evaluation = {**evaluation_of(predictions, results[name]), "environment": environment()}
            record["evaluations"].setdefault(part, {})[name] = evaluation
            write_json(path, record)
    return out, _in_words([config.method for _, config, _, _ in members]), results


def _check_members(members: Sequence[tuple[Path, Config, int, str]]) -> None:
    first, *others = members
    seen = {first[3]: first[0]}
    for folder, config, _, sha256 in others:
        if sha256 in seen:
            raise ValueError(f"{seen[sha256]} and {folder} hold the same posterior: name each member once.")
        seen[sha256] = folder
        for name in ("dataset", "validation", "model"):
            ours, theirs = getattr(config, name), getattr(first[1], name)
            if ours != theirs:
                raise ValueError(
                    f"{first[0]} has {name} = {theirs!r}, {folder} has {ours!r}: the members of an ensemble need the "
                    "same data and the same network."
                )


def _common_folder(runs: Sequence[Path]) -> Path:
    return Path(os.path.commonpath([folder.resolve().parent for folder in runs]))


def _check_free(path: Path, described: list[dict[str, Any]]) -> None:
    """Raise if there is a record of another ensemble, or of a run, at `path`."""
    if not path.is_file():
        return
    there = {run["posterior_sha256"] for run in read_json(path).get("runs", [])}
    if there != {run["posterior_sha256"] for run in described}:
        raise ValueError(f"{path.parent} holds the results of other runs: write --out FOLDER for these.")


def _in_words(methods: Sequence[str]) -> str:
    """Return how many runs of which methods there are."""
    counts = {method: list(methods).count(method) for method in methods}
    return " and ".join(f"{count} × {METHODS[method].title}" for method, count in counts.items())


def write_ensemble(path: Path, runs: Path, part: str, *, preset: str, scale: str, config: Config) -> list[Path]:
    """Evaluate the ensemble of the runs seed0, seed1, ... in the folder `runs`, and write its record to `path`.

    The ensemble has every evaluation that all runs have. A record of an ensemble with more members is not replaced.

    Returns:
        The folders of the members; none if no record was written.
    """
    folders = [folder for folder in runs.glob("seed*") if folder.is_dir()]  # the records of `bsam tune` are beside them
    names = {
        folder: {file.stem.removeprefix(f"predictions-{part}-"): file for file in folder.glob(f"predictions-{part}-*")}
        for folder in sorted(folders, key=lambda folder: int(folder.name[4:]))
    }
    names = {folder: found for folder, found in names.items() if found}
    known = read_json(path)["members"] if path.exists() else 0
    if len(names) < max(2, known):
        return []
    first, *others = names.values()
    shared = [name for name in first if all(name in found for found in others)]
    evaluations = {
        name: evaluation_of(average([bsam.Predictions.load(found[name]) for found in names.values()]))
        for name in shared
    }
    record = {
        "preset": preset,
        "scale": scale,
        "members": len(names),
        "config": dataclasses.asdict(config),
        "environment": environment(),
        "evaluations": {part: evaluations},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    return list(names)
