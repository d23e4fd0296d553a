"""What the two readings of a convention change, measured on the digits: run by `python benchmarks/conventions.py`.

- bSAM's curvature with several splits: the mean of |g_k| (the authors' code) or |mean of g_k| (as printed).
- VOGN's beta2: the share of the curvature that a step keeps, or the weight of the new statistics (the code of Osawa
  et al.).

Writes results/conventions.json.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev

import torch

import bsam
from bsam.experiments.data import load
from bsam.experiments.demo import load_demo, train_and_predict
from bsam.experiments.record import environment, write_json

QUESTIONS = {
    "bsam": ("curvature", ("mean_abs", "abs_mean"), 5),
    "vogn": ("statistics", ("average", "latest"), 1),
}


def main() -> None:
    torch.set_num_threads(1)
    record = {"data": "digits: 600 to train on, 800 to test", "answers": {}, "environment": environment()}
    for method, (option, values, seeds) in QUESTIONS.items():
        for value in values:
            config = replace(load_demo().digits[method], **{option: value})
            dataset = load(config.dataset, validation=config.validation)
            runs = []
            for seed in range(seeds):
                predictions = train_and_predict(config, dataset, seed, "test")
                summary = bsam.metrics.summary(predictions, num_bootstrap=0)
                runs.append({name: getattr(summary, name) for name in ("accuracy", "nll", "ece", "auroc")})
            record["answers"][f"{method} {option}={value}"] = {"config": asdict(config), "runs": runs}
            nll = [run["nll"] for run in runs]
            print(method, value, f"NLL {fmean(nll):.3f}", f"({stdev(nll):.3f})" if seeds > 1 else "", f"{seeds} seeds")
    write_json(Path(__file__).parent.parent / "results" / "conventions.json", record)


if __name__ == "__main__":
    main()
