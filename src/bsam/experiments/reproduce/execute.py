"""Completing tasks: train or go on with the runs, make missing evaluations, write the records."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bsam.experiments.ensemble import write_ensemble
from bsam.experiments.evaluate import evaluate, evaluation_name, prepared
from bsam.experiments.record import read_json, write_json
from bsam.experiments.reproduce.plan import Task
from bsam.experiments.runs import Run, RunBusyError, holds_run, is_finished
from bsam.experiments.stacks import Stack, find_stack
from bsam.experiments.suites import SUITES, evaluate_suites, record_ensemble_suites
from bsam.experiments.trainer import Trainer
from bsam.files import locked

__all__ = ["execute", "publish"]


def _raise(task: Task, error: FloatingPointError) -> None:
    raise error


def execute(
    tasks: Sequence[Task],
    report: Callable[[float], None],
    *,
    device: str | None = None,
    data: Path | None = None,
    save_minutes: float = 5.0,
    on_divergence: Callable[[Task, FloatingPointError], None] = _raise,
    watch: Callable[[Stack], None] = lambda stack: None,
) -> None:
    """Complete tasks that differ in seeds and rates only.

    Args:
        tasks: The tasks. New runs are trained together. A run that exists in its folder goes on from its checkpoint,
            together with the runs of its stack.
        report: Called with the share of training that is done.
        device: Where to train and evaluate.
        data: Folder of the data sets.
        save_minutes: Time between two checkpoints.
        on_divergence: Called with a task that diverged, when all others are done. By default it raises the error.
        watch: Called after each step, and after each epoch, with the stack. An exception ends the training.

    Raises:
        RunBusyError: Another process, here or on another machine, is training one of the runs.
    """
    with ExitStack() as locks:
        for task in tasks:
            task.folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                locks.enter_context(locked(task.folder.with_name(f".{task.folder.name}.lock"), wait=False))
            except BlockingIOError:
                raise RunBusyError(f"another process is training the run in {task.folder}.") from None
        errors = _train(tasks, report, device, data, save_minutes, watch)
        done: list[Task] = []
        prepare = functools.cache(prepared)  # for all tasks, so that a pass is compiled once
        for task in tasks:
            if task.folder.resolve() not in errors:
                try:
                    _evaluate(task, device=device, data=data, prepare=prepare)
                    done.append(task)
                except FloatingPointError as error:
                    errors[task.folder.resolve()] = error
        for name, count in Counter(task.name for task in done).items():
            if count > 1:
                first = next(task for task in done if task.name == name)
                _write_ensemble(first, data)
        for task in tasks:
            if task.folder.resolve() in errors:
                on_divergence(task, errors[task.folder.resolve()])


def _train(
    tasks: Sequence[Task],
    report: Callable[[float], None],
    device: str | None,
    data: Path | None,
    save_minutes: float,
    watch: Callable[[Stack], None],
) -> dict[Path, FloatingPointError]:
    """Train all runs that are not finished; return the errors of those that diverged, by folder."""
    begun = [task for task in tasks if holds_run(task.folder)]
    for task in begun:
        run = Run.read(task.folder)
        if run.config != task.config or run.seed != task.seed:
            raise ValueError(f"{task.folder} holds a run with other settings: move it away, or choose another --runs.")
    new = [Run(task.folder, task.config, task.seed, task.preset) for task in tasks if task not in begun]
    resume = functools.partial(Stack.resume, device=device, data=data)
    unfinished = [find_stack(task.folder) for task in begun if not is_finished(task.folder)]
    queue = deque(functools.partial(resume, folder) for folder in dict.fromkeys(unfinished))
    if new:
        queue.append(functools.partial(Stack.start, new, device=device, data=data))
    errors: dict[Path, FloatingPointError] = {}
    while queue:
        stack = queue.popleft()()

        def on_step(trainer: Trainer, stack: Stack = stack) -> None:
            report(trainer.progress / trainer.config.total_epochs)
            watch(stack)

        try:
            stack.train(every_minutes=save_minutes, on_step=on_step)
            continue
        except FloatingPointError as error:
            found = error.with_traceback(None)  # the traceback would keep the step and its memory on the device
        if len(stack.runs) > 1:
            queue.extend(functools.partial(resume, folder) for folder in stack.part())
        else:
            errors[stack.runs[0].folder.resolve()] = found
    return errors


def _evaluate(task: Task, **options: Any) -> None:
    """Make missing evaluations and suites, and copy the record to the folder of records.

    Predictions that are lost, say with the machine that made them, are made again: the ensemble needs them.
    """
    run_record = task.folder / "record.json"
    recorded = read_json(run_record)["evaluations"].get(task.part, {})
    done = {name for name in recorded if (task.folder / f"predictions-{task.part}-{name}.safetensors").is_file()}
    for temperature in (None, *task.temperatures):
        counts = [count for count, at in task.evaluations if at == temperature]
        missing = [count for count in counts if evaluation_name(count, temperature, task.config) not in done]
        if missing:
            evaluate(task.folder, samples=missing, part=task.part, temperature=temperature, **options)
    for suite in task.suites:
        evaluate_suites(task.folder, [suite], samples=SUITES[suite].counts(task.samples), **options)
    origin = {"scale": task.scale, "changes": list(task.changes)} if task.changes else {"scale": task.scale}
    publish({**read_json(run_record), **origin}, task.record)


def _write_ensemble(task: Task, data: Path | None) -> None:
    """Write the record of the ensemble of all runs beside a task's, with those suites that all of them have."""
    path = task.record.with_name("ensemble.json")
    members = write_ensemble(
        path, task.folder.parent, task.part, preset=task.preset, scale=task.scale, config=task.config
    )
    names = {suite: [str(count) for count in SUITES[suite].counts(task.samples)] for suite in task.suites}
    kept = [f"{suite}-{name}" for suite, each in names.items() for name in each]
    if kept and members and all((run / "suites" / each).is_dir() for run in members for each in kept):
        record_ensemble_suites(path, members, names, task.config, data)


def publish(content: dict[str, Any], record: Path) -> None:
    """Write a record. Evaluations of the same training that only the old record has are kept."""

    def training(of: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in of.items() if key not in ("evaluations", "suites", "scale", "changes")}

    before = read_json(record) if record.exists() else {}
    if training(before) == training(content):
        known, new = before["evaluations"], content["evaluations"]
        content = content | {"evaluations": {part: known.get(part, {}) | new.get(part, {}) for part in known | new}}
        if suites := before.get("suites", {}) | content.get("suites", {}):
            content = content | {"suites": suites}
    record.parent.mkdir(parents=True, exist_ok=True)
    write_json(record, content)
