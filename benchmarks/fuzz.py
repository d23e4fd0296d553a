"""Thousands of random programs of steps, failures and checkpoints.

    python -m benchmarks.fuzz --out results/fuzz.json --programs 2400

What a program does, and what counts as broken, is in `tests/fuzz.py`; `tests/test_fuzz.py` runs a few.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

from bsam.experiments.record import environment, write_json
from tests.fuzz import fuzz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("fuzz.json"))
    parser.add_argument("--programs", type=int, default=2400)
    parser.add_argument("--length", type=int, default=30, help="How many things a program does.")
    parser.add_argument("--first-seed", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begin, where = time.perf_counter(), environment()
    counts: Counter[str] = Counter()
    broken = []
    last = arguments.first_seed + arguments.programs
    for first in range(arguments.first_seed, last, 100):
        done, found = fuzz(range(first, min(first + 100, last)), arguments.length)
        counts.update(done)
        broken += found
        print(f"{counts['programs']} programs, {counts['steps']} good steps, {len(broken)} broken", flush=True)
        record = {
            "what": "random programs; each failure leaves everything as it was, and equals a twin without failures",
            "config": {key: value for key, value in vars(arguments).items() if key != "out"},
            "seconds": time.perf_counter() - begin,
            "counts": dict(counts.most_common()),
            "broken": broken,
            "environment": where,
        }
        write_json(arguments.out, record)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
