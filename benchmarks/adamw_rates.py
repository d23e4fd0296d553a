"""Which learning rate of bSAM goes with a learning rate of AdamW: the rule of `BSAM.from_adamw`.

    python -m benchmarks.adamw_rates --data DATA --out results/adamw_rates.json

Both optimizers are tried with several rates and otherwise their defaults, on the eighteen problems for choosing of
`small_problems.py` and `few_data.py`, with one seed. For each problem the rate of AdamW with the lowest NLL is the one
that a user would bring. The rules

    lr of bSAM = (lr of AdamW / 0.001)^exponent        for the exponents 0, 1/2 and 1

then choose a rate for bSAM, and the record compares what comes out. These problems chose the rule; it is judged by the
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
EXPONENTS = (0.0, 0.5, 1.0)


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
    ours = sorted({converted_rate(rate, exponent) for rate in ADAMW for exponent in EXPONENTS})
    runs = [
        Run(problem, optimizer, f"{rate:g}", {"lr": rate}, 0, "test")
        for problem in problems
        for optimizer, rates in (("AdamW", ADAMW), ("BSAM", ours))
        for rate in rates
    ]
    found = perform_all(runs, Cache(arguments.cache, resume=True, again=()), arguments.data, arguments.workers)
    rows = {problem: row(problem, found, load(problem, arguments.data).chance) for problem in problems}
    means = {
        name: {metric: fmean(each[name][metric] for each in rows.values()) for metric in ("accuracy", "nll")}
        for name in next(iter(rows.values()))
    }
    for name, mean in means.items():
        print(f"{name:24} accuracy {mean['accuracy']:.3f}  NLL {mean['nll']:.3f}")
    record = {
        "what": "bSAM with a learning rate by a rule from AdamW's best one; benchmarks/adamw_rates.py explains it",
        "means": means,
        "problems": rows,
        "runs": found,
        "seconds": time.perf_counter() - begin,
        "environment": environment(),
    }
    write_json(arguments.out, record)


def row(problem: str, runs: list[dict[str, Any]], chance: tuple[float, float]) -> dict[str, Any]:
    """AdamW at its best rate, and bSAM at the rate of each rule; a failed run counts as chance."""

    def result(optimizer: str, rate: float) -> dict[str, float]:
        (run,) = (
            run for run in runs if (run["problem"], run["optimizer"], run["kind"]) == (problem, optimizer, f"{rate:g}")
        )
        if run["failure"]:
            return {"lr": rate, "accuracy": chance[0], "nll": chance[1]}
        return {"lr": rate, "accuracy": run["averaged"]["accuracy"], "nll": run["averaged"]["nll"]}

    best = min((result("AdamW", rate) for rate in ADAMW), key=lambda found: found["nll"])
    rules = {f"bSAM, exponent {e:g}": result("BSAM", converted_rate(best["lr"], e)) for e in EXPONENTS}
    return {"AdamW, best rate": best, "AdamW, default rate": result("AdamW", 1e-3), **rules}


if __name__ == "__main__":
    main()
