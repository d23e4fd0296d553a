"""Which settings of bSAM go with a learning rate and a weight decay of SGD: the rule of `BSAM.from_sgd`.

    python -m benchmarks.sgd_rates --data DATA --out results/sgd_rates.json

SGD with momentum 0.9 is tried with several rates and weight decays on the eighteen problems for choosing of
`small_problems.py` and `few_data.py`, with one seed. For each problem the pair with the lowest NLL is the one that a
user would bring. The rules

    lr of bSAM = (lr of SGD / (1 - momentum))^exponent        for the exponents 0, 1/4 and 1/2

with SGD's weight decay or with bSAM's default one, and otherwise bSAM's defaults, then give settings to bSAM. The row
"algebra" has the steps of SGD instead: the exponent is 1, and the precision stays at 1 where gradients are small. These
problems chose the rule; it is judged by the rows "from SGD's" of `out_of_the_box.py`, on other problems.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.adamw_rates import numbers, write_means
from benchmarks.out_of_the_box import SETS, SGD_LINE, Cache, Run, load, perform_all

RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
WEIGHT_DECAYS = (0.0, 5e-4, 5e-3)
EXPONENTS = (0.0, 0.25, 0.5)
MOMENTUM = SGD_LINE["momentum"]


def rules(line: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Settings of bSAM for a line of SGD, by the names of the rules."""
    rate = line["lr"] / (1 - line["momentum"])
    powers = {exponent: float(f"{rate**exponent:.3g}") for exponent in EXPONENTS}
    kept = {f"bSAM, exponent {e:g}": {"lr": lr, "weight_decay": line["weight_decay"]} for e, lr in powers.items()}
    default = {f"bSAM, exponent {e:g}, weight decay 0.0005": {"lr": lr} for e, lr in powers.items()}
    algebra = {
        "lr": rate,
        "weight_decay": line["weight_decay"],
        "damping": 1.0 - line["weight_decay"],
        "sqrt_num_data": False,
    }
    return {**kept, **default, "bSAM, algebra": algebra}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("sgd_rates.json"))
    parser.add_argument("--data", type=Path, default=Path("data"), help="Folder with FashionMNIST and uci.")
    parser.add_argument("--cache", type=Path, default=Path("runs/sgd_rates.jsonl"), help="Finished runs stay here.")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    problems = [*SETS["choosing"], *SETS["few-choosing"]]
    cache = Cache(arguments.cache, resume=True, again=())

    def results(optimizer: str, settings: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
        """Of each problem and each of its settings: accuracy and NLL; a failed run counts as chance."""
        runs = [
            Run(problem, optimizer, f"rate {k}", each, 0, "test")
            for problem, own in settings.items()
            for k, each in enumerate(own)
        ]
        found = iter(perform_all(runs, cache, arguments.data, arguments.workers))
        return {
            problem: [
                {**each, **numbers(each["lr"], next(found), load(problem, arguments.data).chance)} for each in own
            ]
            for problem, own in settings.items()
        }

    lines = [{"lr": lr, "momentum": MOMENTUM, "weight_decay": decay} for lr in RATES for decay in WEIGHT_DECAYS]
    sgd = results("SGD", dict.fromkeys(problems, lines))
    best = {problem: min(own, key=lambda found: found["nll"]) for problem, own in sgd.items()}
    made = {problem: rules(found) for problem, found in best.items()}
    ours = results("BSAM", {problem: list(own.values()) for problem, own in made.items()})
    rows = {
        problem: {
            "SGD, its best rate and weight decay": best[problem],
            "SGD, 0.1 and 0.0005": sgd[problem][lines.index(SGD_LINE)],
            **dict(zip(made[problem], ours[problem], strict=True)),
        }
        for problem in problems
    }
    what = "bSAM with settings by a rule from SGD's best ones; benchmarks/sgd_rates.py explains it"
    write_means(arguments.out, what, rows, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
