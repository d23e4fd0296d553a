"""Ensembles: predictions averaged over runs with different seeds, and over the samples of each run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import torch

import bsam
from bsam.experiments.config import Config
from bsam.experiments.evaluate import evaluation_of
from bsam.experiments.record import environment, read_json, write_json
from bsam.prediction.results import entropy

__all__ = ["average", "write_ensemble"]


def average(members: Sequence[bsam.Predictions]) -> bsam.Predictions:
    """Average the probabilities of several runs with equal weights; all must predict the same examples in one order."""
    first = members[0]
    for other in members[1:]:
        a, b = first.labels, other.labels
        same = a is b if a is None or b is None else torch.equal(a, b)
        if other.log_probs.shape != first.log_probs.shape or not same:
            raise ValueError("the members of an ensemble predict other examples: give them the same data.")
    log_probs = torch.stack([member.log_probs for member in members]).logsumexp(0) - math.log(len(members))
    # I(label; weights) = H[mean of p] - mean of H[p], the second mean over all samples of all members.
    of_samples = torch.stack([entropy(member.log_probs) - member.mutual_information for member in members]).mean(0)
    return dataclasses.replace(
        first,
        log_probs=log_probs,
        mutual_information=(entropy(log_probs) - of_samples).clamp_min(0),
        num_samples=sum(member.num_samples for member in members),
        computed_by="ensemble",
    )


def write_ensemble(path: Path, runs: Path, part: str, *, preset: str, scale: str, config: Config) -> None:
    """Evaluate the ensemble of the runs seed0, seed1, ... in the folder `runs`, and write its record to `path`.

    The ensemble has every evaluation that all runs have. A record of an ensemble with more members is not replaced.
    """
    folders = [folder for folder in runs.glob("seed*") if folder.is_dir()]  # the records of `bsam tune` are beside them
    names = [
        {file.stem.removeprefix(f"predictions-{part}-"): file for file in folder.glob(f"predictions-{part}-*")}
        for folder in sorted(folders, key=lambda folder: int(folder.name[4:]))
    ]
    names = [found for found in names if found]
    known = read_json(path)["members"] if path.exists() else 0
    if len(names) < max(2, known):
        return
    shared = [name for name in names[0] if all(name in found for found in names)]
    evaluations = {
        name: evaluation_of(average([bsam.Predictions.load(found[name]) for found in names])) for name in shared
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
