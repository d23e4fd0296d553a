"""A stack: runs that are trained together in one process, and that survive Ctrl-C, a kill and a full disk.

Each run has a folder of its own (see `bsam.experiments.runs`). A single run is a stack of one, in the run's folder. The
folder of a larger stack is the parent folder of its first run:

stack.toml             seeds and folders of the runs
stack.safetensors      one checkpoint of all runs, until all are done; the one before it is stack.previous.safetensors
"""

from __future__ import annotations

import contextlib
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bsam.experiments.checkpoint import Checkpoints
from bsam.experiments.config import RATES, toml_value
from bsam.experiments.data import load
from bsam.experiments.runs import (
    Run,
    RunBusyError,
    RunInterruptedError,
    choose_device,
    holds_run,
    is_finished,
    read_origin,
    remembered_data,
    resume_command,
    signals_kept,
)
from bsam.experiments.sharing import neighbours
from bsam.experiments.trainer import Trainer, train_together
from bsam.files import locked, remove_leftovers, write_text

__all__ = ["Stack", "find_stack"]


class Stack:
    """Runs that differ in seeds and rates only, and the folder of their stack.

    Args:
        folder: The folder of the only run, or of `stack.toml`.
        runs: The runs.
        device: Where to train; None chooses the accelerator, or the CPU.
        data: Folder of the data sets, see `bsam.experiments.data.load`.
        compiled: Whether to train with `bsam.TrainStep`. By default several runs are compiled. A single run is compiled
            on CUDA only, as compiling takes a minute, and only if `splits` cuts the batches evenly.
    """

    def __init__(
        self, folder: Path, runs: Sequence[Run], *, device: str | None, data: Path | None, compiled: bool | None = None
    ) -> None:
        self.folder, self.runs, self.data = folder, list(runs), data
        self.device = choose_device(device)
        config = self.runs[0].config
        even = config.batch_size % config.splits == 0
        if compiled and not even:
            raise ValueError(
                f"batch_size={config.batch_size} is no multiple of splits={config.splits}, as a compiled step needs "
                "it: train with --loop, and seeds one after the other."
            )
        self.compiled = self.device.type == "cuda" and even if compiled is None else compiled
        dataset = load(config.dataset, data, device=self.device, validation=config.validation)
        self.trainers = [Trainer(run.config, dataset, seed=run.seed) for run in self.runs]
        self.alone = folder == self.runs[0].folder
        self.checkpoints = self.runs[0].checkpoints if self.alone else Checkpoints(folder / "stack.safetensors")

    @classmethod
    def start(
        cls, runs: Sequence[Run], *, device: str | None = None, data: Path | None = None, compiled: bool | None = None
    ) -> Stack:
        """Start new runs; a folder that holds a run is an error."""
        _check([run.seed for run in runs], [run.folder for run in runs])
        several = len(runs) > 1
        folder = runs[0].folder.parent if several else runs[0].folder
        compiled = True if several and compiled is None else compiled
        path = folder / "stack.toml"
        for run in runs:
            run.refuse_to_replace()
            if run.config.without_rates() != runs[0].config.without_rates():
                raise ValueError(
                    f"the runs in {run.folder} and {runs[0].folder} differ in more than their seeds and rates "
                    f"({', '.join(RATES)}): train them one after the other."
                )
        if several and path.exists() and not all((f / "record.json").exists() for f in _read(path)):
            raise FileExistsError(
                f"{folder} holds runs that are not finished: {resume_command(folder)}, or choose another --out."
            )
        stack = cls(folder, runs, device=device, data=data, compiled=compiled)
        for run in runs:
            run.write_settings(
                device=device,
                data=None if data is None else str(data.resolve()),
                compiled=compiled,
                stack=os.path.relpath(folder, run.folder) if several else None,
            )
        if several:
            _write(path, runs)
        return stack

    @classmethod
    def resume(
        cls, folder: Path, *, device: str | None = None, data: Path | None = None, compiled: bool | None = None
    ) -> Stack:
        """Load the runs in `folder` from their last checkpoint, or start them if there is none."""
        path = folder / "stack.toml"
        seeds: Mapping[Path, int | None] = _read(path) if path.exists() else {folder: None}
        runs = [Run.read(each) for each in seeds]
        for run, seed in zip(runs, seeds.values(), strict=True):
            same = run.config.without_rates() == runs[0].config.without_rates()
            if seed not in (None, run.seed) or not same:
                raise ValueError(
                    f"{run.folder / 'config.toml'} has other settings than {runs[0].folder / 'config.toml'}, or "
                    f"another seed than {path} says: one of them was changed."
                )
        origin = read_origin(runs[0].folder)
        device, data = device or origin.get("device"), data or remembered_data(runs[0].folder)
        compiled = origin.get("compiled") if compiled is None else compiled
        stack = cls(folder, runs, device=device, data=data, compiled=compiled)
        stack._load()
        return stack

    def _load(self) -> None:
        """Load the last checkpoint of the stack or, if the runs are finished, of each run."""
        found = self.checkpoints.load()
        states = self._states(*found) if found else [run.checkpoints.load() for run in self.runs]
        for run, trainer, each in zip(self.runs, self.trainers, states, strict=True):
            if each:
                run.load_state(trainer, *each)
        if len({(trainer.epoch, trainer.batch) for trainer in self.trainers}) > 1:
            raise ValueError(f"the runs of {self.folder} have checkpoints of different epochs: go on with each alone.")

    def _states(self, state: dict[str, Any], source: Path) -> Sequence[tuple[dict[str, Any], Path] | None]:
        """Return the state of each run in a checkpoint, which may also have runs that have left the stack."""
        if self.alone:
            return [(state, source)]
        seeds, states, names = state.get("seeds"), state.get("runs"), [_name(run, self.folder) for run in self.runs]
        if isinstance(seeds, list) and isinstance(states, list) and len(seeds) == len(states):
            saved = dict(zip(state.get("folders") or [f"seed{seed}" for seed in seeds], states, strict=True))
            if [name for name in saved if name in names] == names:
                return [(saved[name], source) for name in names]
        raise ValueError(f"{source} belongs to other runs than {self.folder / 'stack.toml'}: one of them was changed.")

    @property
    def checkpoint(self) -> Path:
        """The file of the last checkpoint."""
        return self.checkpoints.path

    @property
    def finished(self) -> bool:
        """Whether all runs have done their last epoch and written their posteriors and records."""
        done = all(trainer.epoch >= trainer.config.total_epochs for trainer in self.trainers)
        return done and all(is_finished(run.folder) for run in self.runs)

    def save(self) -> None:
        """Write one checkpoint of all runs, so that they are at the same step after a kill."""
        states = [trainer.state() for trainer in self.trainers]
        seeds, folders = [run.seed for run in self.runs], [_name(run, self.folder) for run in self.runs]
        self.checkpoints.save(states[0] if self.alone else {"seeds": seeds, "folders": folders, "runs": states})

    def train(
        self,
        *,
        every_minutes: float = 5.0,
        every_epochs: int | None = None,
        on_step: Callable[[Trainer], None] = lambda trainer: None,
    ) -> None:
        """Train to the end and save on the way; then write posteriors and records, as for runs that are trained alone.

        Args:
            every_minutes: Time between two checkpoints.
            every_epochs: Also save every time this many epochs are done.
            on_step: Called after each step, and after each epoch.

        Raises:
            RunInterruptedError: SIGINT or SIGTERM arrived; the runs are saved.
            RunBusyError: Another process is training one of the runs, or has gone on with them since they were read.
            FloatingPointError: A run diverged; see `part`.
            OSError: A file could not be written, say because the disk is full; the last checkpoint is kept.
        """
        first = self.trainers[0]
        was_done = first.epoch >= first.config.total_epochs  # and only a posterior was missing
        with self._held(), neighbours(self.device) as on_device, signals_kept() as arrived:
            if self.checkpoints.changed:
                raise RunBusyError(f"another process has gone on with the run in {self.folder} since it was read.")
            self.write_logs()  # drops lines of epochs after the checkpoint, which will be trained again
            saved = time.monotonic()
            for _ in train_together(self.trainers, compiled=self.compiled):
                on_step(first)
                epoch_done = first.batch == 0
                if epoch_done:
                    on_device.count()
                    self.write_logs()
                due = time.monotonic() - saved > 60 * every_minutes
                due |= epoch_done and every_epochs is not None and first.epoch % every_epochs == 0
                if due or arrived:
                    self.save()
                    saved = time.monotonic()
                if arrived:
                    raise RunInterruptedError(self.folder, arrived[0])
            self.save()
            if arrived:
                raise RunInterruptedError(self.folder, arrived[0])
            engine = {
                "compiled": self.compiled,
                "seeds_together": len(self.runs),
                "processes_on_device": on_device.most,  # the most that trained there at a time
            }
            for run, trainer in zip(self.runs, self.trainers, strict=True):
                run.write_results(trainer, keep=was_done, **engine)
            self._leave(range(len(self.runs)))

    def write_logs(self) -> None:
        """Write the log of each run."""
        for run, trainer in zip(self.runs, self.trainers, strict=True):
            run.write_log(trainer)

    def part(self) -> list[Path]:
        """Separate the runs that diverged: each goes on alone from the last checkpoint, the others go on together.

        If it is not known which runs diverged, all of them go on alone. Returns the folders to resume.
        """
        last = Stack.resume(self.folder, device=str(self.device), data=self.data)
        leaving = [i for i, trainer in enumerate(self.trainers) if trainer.diverged] or range(len(self.runs))
        with last._held():
            last._leave(leaving)
        return [self.runs[i].folder for i in leaving] + [self.folder] * (len(leaving) < len(self.runs))

    def _leave(self, leaving: Sequence[int]) -> None:
        """Write the checkpoints of some runs into their own folders, and remove these runs from the stack."""
        if self.alone:
            return
        for i in leaving:
            self.runs[i].checkpoints.save(self.trainers[i].state())
        if rest := [run for i, run in enumerate(self.runs) if i not in leaving]:
            _write(self.folder / "stack.toml", rest)
        else:
            self.checkpoints.remove()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Lock the runs against other processes; an error of the disk says how to go on."""
        with contextlib.ExitStack() as locks:
            try:
                for run in self.runs:
                    try:
                        locks.enter_context(locked(run.folder / ".training.lock", wait=False))
                    except BlockingIOError:
                        raise RunBusyError(f"another process is training the run in {run.folder}.") from None
                for each in {self.folder, *(run.folder for run in self.runs)}:
                    remove_leftovers(each)
                yield
            except OSError as error:
                sentence = f"{error.strerror or error}. Then go on with: {resume_command(self.folder)}"
                raise OSError(error.errno, sentence) from error


def find_stack(folder: Path) -> Path:
    """Return the folder to resume for the run in `folder`: that of its stack until the stack is done, else its own."""
    if not holds_run(folder) or (folder / "checkpoint.safetensors").exists():
        return folder
    stack = Path(os.path.normpath(folder / read_origin(folder).get("stack", "..")))
    path = stack / "stack.toml"
    return stack if path.exists() and folder.resolve() in [each.resolve() for each in _read(path)] else folder


def _name(run: Run, folder: Path) -> str:
    """Name a run of a stack: the path from the stack's folder to the run's."""
    return os.path.relpath(run.folder, folder)


def _write(path: Path, runs: Sequence[Run]) -> None:
    folders = toml_value([_name(run, path.parent) for run in runs])
    write_text(path, f"seeds = {[run.seed for run in runs]}\nfolders = {folders}\n")


def _read(path: Path) -> dict[Path, int]:
    """The folders and seeds of a stack's runs. Those of earlier versions were beside it, and named by their seeds."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        seeds = content["seeds"]
        names = content.get("folders", [f"seed{seed}" for seed in seeds])
        _check(seeds, names)
        return {Path(os.path.normpath(path.parent / name)): seed for name, seed in zip(names, seeds, strict=True)}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not list the seeds of runs: {error}") from error


def _check(seeds: Sequence[int], folders: Sequence[Path | str]) -> None:
    if not seeds or any(type(seed) is not int for seed in seeds) or len(set(folders)) < len(seeds):
        raise ValueError(f"seeds={list(seeds)} must be one or more different integers, in each folder.")
