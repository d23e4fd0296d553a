"""What BatchNorm's statistics of each sample are worth: `digits_batchnorm` of `small_problems.py`, bSAM's defaults.

    python -m benchmarks.recalibration --out results/recalibration.json

The same posteriors predict with the statistics of the mean, and with statistics that are estimated again for each
sample, on all training images or on the first hundred.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import bsam
from benchmarks.out_of_the_box import NUM_SAMPLES, PROBLEMS, Run, load, make_optimizer, train
from bsam.experiments.record import environment, write_json

PROBLEM, SEEDS = "digits_batchnorm", 3


def rate(seed: int, folder: Path) -> dict[str, dict[str, float]]:
    """Train with a seed; NLL, ECE and accuracy of the test images by where the statistics are from."""
    run = Run(PROBLEM, "BSAM", "defaults", {}, seed, "test")
    data = load(PROBLEM, folder)
    torch.manual_seed(seed)
    model = PROBLEMS[PROBLEM].network(data)
    optimizer = make_optimizer("BSAM", model, {}, num_data=data.num_data, seed=seed)
    train(run, model, optimizer, data)
    posterior = optimizer.posterior(model)
    images = data.train[0]
    found = {}
    for name, recalibrate in (("mean", False), ("each sample", [images]), ("each sample, 100 images", [images[:100]])):
        options: Any = {"num_samples": NUM_SAMPLES, "recalibrate": recalibrate, "progress": False}
        summary = bsam.metrics.summary(bsam.predict(model, posterior, [data.test], **options), num_bootstrap=0)
        found[name] = {"nll": summary.nll, "ece": summary.ece, "accuracy": summary.accuracy}
    return found


def main() -> None:
    """Rate all seeds and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seeds = [rate(seed, Path("data")) for seed in range(SEEDS)]
    means = {
        name: {metric: fmean(found[name][metric] for found in seeds) for metric in metrics}
        for name, metrics in seeds[0].items()
    }
    for name, metrics in means.items():
        print(name, {metric: round(value, 4) for metric, value in metrics.items()})
    write_json(arguments.out, {"problem": PROBLEM, "means": means, "seeds": seeds, "environment": environment()})


if __name__ == "__main__":
    main()
