"""The tests that need a GPU, run in processes side by side, and a record of each of them.

    python benchmarks/gpu_tests.py --out results/gpu_tests.json

The tests are dealt out in turn, so that those of one kind, which take about as long, are spread over the processes. A
process ends at its first failure, and another goes on with its tests: an error on the device spoils all that comes
after it. The record is written after every test.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from bsam.experiments.record import environment, write_json

ROOT = Path(__file__).parent.parent
OPTIONS = ["-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning"]
OUTCOMES = ("passed", "failed", "skipped", "error")
WORKER = "--worker"

Event = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["tests"], help="Files or folders to look for tests in.")
    parser.add_argument("--out", type=Path, default=Path("gpu_tests.json"))
    parser.add_argument("--jobs", type=int, default=6, help="How many processes.")
    parser.add_argument("--marker", default="gpu", help="Which tests, as pytest's -m.")
    parser.add_argument("--keyword", default="", help="Which of them, as pytest's -k.")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs {arguments.jobs} must be at least 1.")
    begin = time.perf_counter()
    chosen = ["-m", arguments.marker, "-k", arguments.keyword, *arguments.paths]
    collected = list(events(["--collect-only", *chosen]))
    ids = [event["id"] for event in collected if event["what"] == "collected"]
    if not ids:
        parser.error(f"no test in {' '.join(arguments.paths)} is marked {arguments.marker!r}: nothing to run.")
    not_imported = {event["id"]: event["message"] for event in collected if event["what"] == "not imported"}
    where = environment(torch.device("cuda") if torch.cuda.is_available() else None)
    results: dict[str, Event] = {}
    lock = threading.Lock()

    def note(result: Event) -> None:
        with lock:
            results[result["id"]] = result
            outcomes = Counter(each["outcome"] for each in results.values())
            print(f"{result['outcome']:7} {result['seconds']:6.1f} s  {result['id']}", flush=True)
            record = {
                "marker": arguments.marker,
                "jobs": arguments.jobs,
                "seconds": time.perf_counter() - begin,
                "counts": {name: outcomes[name] for name in OUTCOMES},
                "not_imported": not_imported,
                "not_run": [name for name in ids if name not in results],
                "tests": [results[name] for name in ids if name in results],
                "environment": where,
            }
            write_json(arguments.out, record)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda k: run_tests(ids[k :: arguments.jobs], note), range(arguments.jobs)))
    outcomes = Counter(each["outcome"] for each in results.values())
    print(", ".join(f"{outcomes[name]} {name}" for name in OUTCOMES), f"in {time.perf_counter() - begin:.0f} s")
    for name, message in not_imported.items():
        print(f"not imported: {name}: {message}")
    sys.exit(1 if outcomes["failed"] or outcomes["error"] else 0)


def run_tests(ids: list[str], note: Callable[[Event], None]) -> None:
    """Run tests one after the other, in a new process after each that fails."""
    left = list(ids)
    while left:
        running = None
        for event in events(["-x", *left]):
            if event["what"] == "started":
                running = event["id"]
            if event["what"] == "ended":
                running = None
                left.remove(event["id"])
                note({key: value for key, value in event.items() if key != "what"})
            if event["what"] == "exit" and (running or event["ran"] == 0):  # else it stopped at a failure
                lost = running or left[0]
                left.remove(lost)
                message = f"the process ended with code {event['code']} before the test did"
                note({"id": lost, "outcome": "error", "seconds": event["seconds"], "message": message})


def events(arguments: list[str]) -> Iterator[Event]:
    """What the reporter in a process of pytest says, as it says it, and at last how the process ended."""
    begin, ran = time.perf_counter(), 0
    read, write = os.pipe()
    command = [sys.executable, __file__, WORKER, str(write), *OPTIONS, *arguments]
    environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    process = subprocess.Popen(command, pass_fds=[write], stdout=subprocess.DEVNULL, cwd=ROOT, env=environ)
    os.close(write)
    with os.fdopen(read) as lines:
        for line in lines:
            if line.endswith("\n"):  # else the process died while it wrote
                event = json.loads(line)
                ran += event["what"] == "ended"
                yield event
    yield {"what": "exit", "code": process.wait(), "ran": ran, "seconds": time.perf_counter() - begin}


class Reporter:
    """A plugin of pytest that writes what happens as lines of JSON."""

    def __init__(self, descriptor: int) -> None:
        self._to = os.fdopen(descriptor, "w", buffering=1)
        self._phases: list[pytest.TestReport] = []

    def _say(self, what: str, name: str, **more: Any) -> None:
        self._to.write(json.dumps({"what": what, "id": name, **more}) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._say("not imported", report.nodeid, message=last_lines(report, 1))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            for item in session.items:
                self._say("collected", item.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._phases = []
        self._say("started", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._phases.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test is three phases: setting up, the call, tearing down. The worst of them is its outcome."""
        other = [phase for phase in self._phases if not phase.passed]
        told = next((phase for phase in other if phase.failed), other[0] if other else None)
        outcome = "passed" if told is None else told.outcome
        if told is not None and told.failed and told.when != "call":
            outcome = "error"
        message = {} if told is None else {"message": last_lines(told)}
        self._say("ended", nodeid, outcome=outcome, seconds=sum(phase.duration for phase in self._phases), **message)


def last_lines(report: Any, count: int = 20) -> str:
    """The end of what pytest says about a failure, or why a test is skipped."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return "\n".join(report.longreprtext.splitlines()[-count:])


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        sys.exit(pytest.main(sys.argv[3:], plugins=[Reporter(int(sys.argv[2]))]))
    main()
