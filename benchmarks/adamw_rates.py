"""Which learning rate of bSAM goes with a learning rate of AdamW: the rule of `BSAM.from_adamw`.

    python -m benchmarks.adamw_rates --data DATA --out results/adamw_rates.json

AdamW is tried with several rates and otherwise its defaults, on the eighteen problems for choosing of
`small_problems.py` and `few_data.py`, with one seed. For each problem the rate of AdamW with the lowest NLL is the one
that a user would bring. The rules

    lr of bSAM = (lr of AdamW / 0.001)^exponent        for the exponents 0, 1/4, 1/2 and 1

then give a rate to bSAM, and the record compares what comes out. These problems chose the rule; it is judged by the
rows "from AdamW's" of `out_of_the_box.py`, on other problems.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.out_of_the_box import SETS, Cache, Run, load, perform_all
from bsam.experiments.record import environment, write_json

ADAMW = (3e-4, 1e-3, 3e-3, 1e-2)
EXPONENTS = (0.0, 0.25, 0.5, 1.0)


def converted_rate(rate: float, exponent: float) -> float:
    return float(f"{(rate / 1e-3) ** exponent:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("adamw_rates.json"))
    parser.add_argument("--data", type=Path, default=Path("data"), help="Folder with FashionMNIST and uci.")
    parser.add_argument("--cache", type=Path, default=Path("runs/adamw_rates.jsonl"), help="Finished runs stay here.")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    problems = [*SETS["choosing"], *SETS["few-choosing"]]
    cache = Cache(arguments.cache, resume=True, again=())

    def results(optimizer: str, rates: dict[str, list[float]]) -> dict[str, list[dict[str, float]]]:
        """Of each problem and rate: accuracy and NLL; a failed run counts as chance."""
        runs = [
            Run(problem, optimizer, f"lr {rate:g}", {"lr": rate}, 0, "test")
            for problem, own in rates.items()
            for rate in own
        ]
        found = iter(perform_all(runs, cache, arguments.data, arguments.workers))
        return {
            problem: [numbers(rate, next(found), load(problem, arguments.data).chance) for rate in own]
            for problem, own in rates.items()
        }

    adamw = results("AdamW", {problem: list(ADAMW) for problem in problems})
    best = {problem: min(own, key=lambda found: found["nll"]) for problem, own in adamw.items()}
    rules = {problem: [converted_rate(found["lr"], e) for e in EXPONENTS] for problem, found in best.items()}
    ours = results("BSAM", rules)
    names = [f"bSAM, exponent {e:g}" for e in EXPONENTS]
    rows = {
        problem: {
            "AdamW, its best rate": best[problem],
            "AdamW, 0.001": adamw[problem][ADAMW.index(1e-3)],
            **dict(zip(names, ours[problem], strict=True)),
        }
        for problem in problems
    }
    what = "bSAM with a learning rate by a rule from AdamW's best one; benchmarks/adamw_rates.py explains it"
    write_means(arguments.out, what, rows, time.perf_counter() - begin)


def write_means(out: Path, what: str, rows: dict[str, dict[str, dict[str, float]]], seconds: float) -> None:
    """Print and record, for each row of the problems' tables, the means over the problems."""
    metrics = ("accuracy", "nll", "failed")
    names = next(iter(rows.values()))
    means = {name: {metric: fmean(own[name][metric] for own in rows.values()) for metric in metrics} for name in names}
    for name, mean in means.items():
        print(f"{name:42} accuracy {mean['accuracy']:.3f}  NLL {mean['nll']:.3f}  failed {mean['failed']:.3f}")
    write_json(out, {"what": what, "means": means, "problems": rows, "seconds": seconds, "environment": environment()})


def numbers(rate: float, run: dict[str, Any], chance: tuple[float, float]) -> dict[str, float]:
    """What a run came to."""
    failed = run["failure"] is not None
    accuracy, nll = chance if failed else (run["averaged"]["accuracy"], run["averaged"]["nll"])
    return {"lr": rate, "accuracy": accuracy, "nll": nll, "failed": float(failed)}


if __name__ == "__main__":
    main()
