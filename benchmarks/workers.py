"""Measurements as processes of their own: some are built side by side, then each measures while the others wait.

A script hands its measurements to `main`, which gives it the command line. Compiling takes a minute on a core or two,
and nothing may run beside what is timed: so `--builds` of them are built at a time, measure one after the other, and
make room for the next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bsam.experiments.record import environment, to_json, write_json

Measure = Callable[[], dict[str, Any]]
"""Measures something that is built and compiled."""
Build = Callable[[], Measure]

READY = "ready"
PROFILE = "BSAM_BENCHMARK_PROFILE"


def main(measurements: dict[str, Build], *, description: str | None, out: str) -> None:
    """The command line of a script: run its measurements, and write one record, anew after each of them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--only", nargs="*", default=[], help="Names, or beginnings of them.")
    parser.add_argument("--builds", type=int, default=5, help="How many are built at a time.")
    parser.add_argument("--resume", action="store_true", help="Keep what --out has, add the rest.")
    parser.add_argument("--profile", action="store_true", help="Also record the kernels of each training step.")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.profile:
        os.environ[PROFILE] = "1"  # for the workers
    if arguments.worker:
        work(measurements[arguments.worker])
        return
    if arguments.builds < 1:
        parser.error(f"--builds {arguments.builds} must be at least 1.")
    chosen = [n for n in measurements if not arguments.only or any(n.startswith(o) for o in arguments.only)]
    if not chosen:
        parser.error(
            f"--only {' '.join(arguments.only)}: no measurement begins so; there are {', '.join(measurements)}."
        )
    found = environment(torch.device("cuda"))
    kept = measured_before(arguments.out, found) if arguments.resume else {}
    record: dict[str, Any] = {"environment": found, "measurements": kept}
    left = [name for name in chosen if name not in kept]
    for start in range(0, len(left), arguments.builds):
        run_wave(left[start : start + arguments.builds], record, arguments.out)


def profiles() -> bool:
    """Whether the kernels are asked for."""
    return PROFILE in os.environ


def measured_before(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    """The measurements of a record that did not fail; it must come from this code on this device."""
    if not path.exists():
        return {}
    record = json.loads(path.read_text())
    if record["environment"] != found:
        sys.exit(f"{path} was measured in {record['environment']}, this is {found}: leave --resume out.")
    return {name: result for name, result in record["measurements"].items() if "error" not in result}


def run_wave(names: list[str], record: dict[str, Any], out: Path) -> None:
    """Build all of them, then measure one after the other."""
    command = [sys.executable, sys.argv[0], "--worker"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    workers = {name: subprocess.Popen([*command, name], env=environ, **pipes) for name in names}
    for worker in workers.values():
        while (line := worker.stdout.readline()) and line != f"{READY}\n":
            pass  # what a compiler printed; an empty line is the end of a worker that died
    for name, worker in workers.items():
        answer, _ = worker.communicate("go\n")
        lines = answer.splitlines()
        died = {"error": f"the process ended with code {worker.returncode} and no answer"}
        result = json.loads(lines[-1]) if lines and worker.returncode == 0 else died
        record["measurements"][name] = result
        print(f"{name}: { {k: v for k, v in result.items() if k != 'kernels'} }", flush=True)
        write_json(out, record)


def work(build: Build) -> None:
    """Build one measurement, say so, wait for a line, measure, and print the result."""
    torch.backends.cuda.matmul.allow_tf32 = True
    begin = time.perf_counter()
    measure = attempt(build)
    built = time.perf_counter() - begin
    print(READY, flush=True)
    if not sys.stdin.readline():
        return  # who started this process is gone
    result = measure if isinstance(measure, dict) else attempt(measure)
    print(to_json({**result, "build_s": built}), flush=True)


def attempt(call: Callable[[], Any]) -> Any:
    """What `call` returns, or the error it raises as a result."""
    try:
        return call()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[-2000:]}"}
