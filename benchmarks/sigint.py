"""Thousands of real SIGINTs at random times, in steps of all optimizers and in all that writes into a model.

    python -m benchmarks.sigint --out results/sigint.json --hits 210

What is promised, and what counts as broken, is in `tests/sigint.py`; `tests/test_interrupts.py` sends a few hundred.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch

from bsam.experiments.record import environment, write_json
from tests.sigint import ACTS, attack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("sigint.json"))
    parser.add_argument("--hits", type=int, default=210, help="How many signals must hit each act.")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begin, acts = time.perf_counter(), {}
    where = environment()
    for name, make_subject in ACTS.items():
        acts |= attack({name: make_subject}, arguments.hits, arguments.seed)
        print(f"{name:32} {acts[name]['hits']:6} hits  {sum(acts[name]['broken'].values()):3} broken", flush=True)
        record = {
            "what": "SIGINTs that a timer of the kernel sent at random times; an act is whole or left out, else broken",
            "config": {"hits": arguments.hits, "seed": arguments.seed},
            "seconds": time.perf_counter() - begin,
            "hits": sum(act["hits"] for act in acts.values()),
            "broken": sum(sum(act["broken"].values()) for act in acts.values()),
            "acts": acts,
            "environment": where,
        }
        write_json(arguments.out, record)
    print(f"{record['hits']} hits, {record['broken']} broken in {record['seconds']:.0f} s")
    sys.exit(1 if record["broken"] else 0)


if __name__ == "__main__":
    main()
