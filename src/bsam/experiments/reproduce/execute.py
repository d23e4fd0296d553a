"""Tasks from wherever they are to their end: train or go on, evaluate what is missing, write the record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bsam.experiments.ensemble import write_ensemble
from bsam.experiments.evaluate import evaluate, evaluation_name
from bsam.experiments.record import read_json, write_json
from bsam.experiments.reproduce.plan import Task
from bsam.experiments.runs import Run, RunBusyError, holds_run
from bsam.experiments.stacks import Stack
from bsam.experiments.trainer import Trainer
from bsam.files import locked

__all__ = ["execute", "execute_together"]


def execute_together(
    tasks: Sequence[Task],
    report: Callable[[float], None],
    *,
    device: str | None = None,
    data: Path | None = None,
    save_minutes: float = 5.0,
) -> None:
    """Bring tasks to their end that differ in their seeds only; trained together, unless some have begun alone.

    Raises:
        RunBusyError: Another process, here or on another machine, is at one of them.
    """
    with ExitStack() as locks:
        for task in tasks:
            task.folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                locks.enter_context(locked(task.folder.with_name(f".{task.folder.name}.lock"), wait=False))
            except BlockingIOError:
                raise RunBusyError(f"another process is at the run in {task.folder}.") from None
        _execute_together(tasks, report, device=device, data=data, save_minutes=save_minutes)


def _execute_together(
    tasks: Sequence[Task],
    report: Callable[[float], None],
    *,
    device: str | None,
    data: Path | None,
    save_minutes: float,
) -> None:
    folder = tasks[0].folder.parent
    begun = [task for task in tasks if holds_run(task.folder)]
    if len(tasks) > 1 and (not begun or (folder / "stack.toml").exists()):
        if begun:
            stack = Stack.resume(folder, device=device, data=data)
            if stack.runs[0].config != tasks[0].config:
                raise ValueError(f"{folder} holds runs with other settings: move it away, or choose another --runs.")
        else:
            seeds = [task.seed for task in tasks]
            preset = tasks[0].preset
            stack = Stack.start(folder, tasks[0].config, seeds, preset=preset, device=device, data=data)
        if not stack.finished:
            epochs = tasks[0].config.total_epochs
            stack.train(every_minutes=save_minutes, on_step=lambda trainer: report(trainer.progress / epochs))
    for task in tasks:
        execute(task, report, device=device, data=data, save_minutes=save_minutes)
    if len(tasks) > 1:
        first = tasks[0]
        record = first.record.with_name("ensemble.json")
        write_ensemble(record, folder, first.part, preset=first.preset, scale=first.scale, config=first.config)


def execute(
    task: Task,
    report: Callable[[float], None],
    *,
    device: str | None = None,
    data: Path | None = None,
    save_minutes: float = 5.0,
) -> None:
    """Bring a task to its end.

    Args:
        task: What to do. A run that is in its folder goes on from its checkpoint.
        report: Called with the share of training that is done.
        device: Where to train and evaluate.
        data: Folder of the data sets.
        save_minutes: Time between two checkpoints.
    """
    run_record = task.folder / "record.json"
    if holds_run(task.folder):
        run = Run.resume(task.folder, device=device, data=data)
        if run.config != task.config or run.seed != task.seed:
            raise ValueError(f"{task.folder} holds a run with other settings: move it away, or choose another --runs.")
    else:
        run = Run.start(task.folder, task.config, task.seed, preset=task.preset, device=device, data=data)
    if not (run.finished and run_record.exists()):

        def show(trainer: Trainer) -> None:
            report(trainer.progress / task.config.total_epochs)

        run.train(every_minutes=save_minutes, on_step=show)
    done = read_json(run_record)["evaluations"].get(task.part, {})
    for temperature in (None, *task.temperatures):
        counts = [count for count, at in task.evaluations if at == temperature]
        missing = [count for count in counts if evaluation_name(count, temperature, task.config) not in done]
        if missing:
            evaluate(task.folder, samples=missing, part=task.part, temperature=temperature, device=device, data=data)
    origin = {"scale": task.scale, "changes": list(task.changes)} if task.changes else {"scale": task.scale}
    _publish({**read_json(run_record), **origin}, task.record)


def _publish(content: dict[str, Any], record: Path) -> None:
    """Write a record. Evaluations of the same training that it had before, and the run's folder does not know, stay."""

    def training(of: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in of.items() if key not in ("evaluations", "scale", "changes")}

    before = read_json(record) if record.exists() else {}
    if training(before) == training(content):
        known, new = before["evaluations"], content["evaluations"]
        content = content | {"evaluations": {part: known.get(part, {}) | new.get(part, {}) for part in known | new}}
    record.parent.mkdir(parents=True, exist_ok=True)
    write_json(record, content)
