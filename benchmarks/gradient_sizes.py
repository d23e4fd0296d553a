"""How large gradients are while AdamW trains, on the problems of `small_problems.py` for choosing.

    python -m benchmarks.gradient_sizes --data DATA --out results/gradient_sizes.json

`BSAM.from_adamw` needs the size of a minibatch's gradient in a typical weight, and guesses 0.3 / sqrt(D) for D
parameters. The record has, for each problem after half of the steps, with v the average of squared gradients that AdamW
keeps: D, the norm sqrt(sum v), and `typical`, the median of sqrt(v) times sqrt(D), for which 0.3 is the guess.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch

from benchmarks.out_of_the_box import ADAMW_LINE, Run, load, train
from benchmarks.small_problems import CHOOSING, missing_data
from bsam.experiments.record import environment, write_json


def measured(problem: str, folder: Path) -> dict[str, Any]:
    """The sizes of one problem, with seed 0."""
    data = load(problem, folder)
    torch.manual_seed(0)
    model = CHOOSING[problem].network(data)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, **ADAMW_LINE)
    steps = CHOOSING[problem].num_steps(data) // 2
    train(Run(problem, "AdamW", "defaults", {}, 0, "test", steps), model, optimizer, data)
    v = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in weights]).double()
    v = v / (1 - ADAMW_LINE["betas"][1] ** steps)
    D = v.numel()
    norm, typical = v.sum().sqrt().item(), v.sqrt().median().item() * math.sqrt(D)
    return {"parameters": D, "steps": steps, "norm": norm, "typical": typical}


def main() -> None:
    """Measure all problems whose data is there, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="Folder with FashionMNIST and uci.")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    problems = {}
    for name in CHOOSING:
        if why := missing_data(name, arguments.data):
            print(f"{name} is skipped: {why}")
            continue
        problems[name] = measured(name, arguments.data)
        print(name, problems[name], flush=True)
    write_json(
        arguments.out,
        {
            "what": "sizes of gradients in training with AdamW; benchmarks/gradient_sizes.py explains them",
            "adamw": ADAMW_LINE,
            "problems": problems,
            "environment": environment(),
        },
    )


if __name__ == "__main__":
    main()
