"""Several seeds of one configuration, trained together as one process and one compiled step.

seed0, seed1, ...      a folder for each seed, as of a run trained alone
stack.toml             which seeds
stack.safetensors      everything to go on with, until all are done; stack.previous.safetensors is the one before it
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from bsam.experiments.checkpoint import Checkpoints
from bsam.experiments.config import Config
from bsam.experiments.data import load
from bsam.experiments.runs import Run, choose_device, holds_run, train_runs
from bsam.experiments.trainer import Trainer
from bsam.files import write_text

__all__ = ["Stack"]


class Stack:
    """Runs that differ in their seeds only, and the folder they share."""

    def __init__(self, folder: Path, runs: list[Run]) -> None:
        self.folder, self.runs = folder, runs
        self.checkpoints = Checkpoints(folder / "stack.safetensors")

    @classmethod
    def start(
        cls,
        folder: Path,
        config: Config,
        seeds: Sequence[int],
        *,
        preset: str,
        device: str | None = None,
        data: Path | None = None,
    ) -> Stack:
        """New runs; refuses folders that hold some."""
        _check_seeds(seeds)
        path = folder / "stack.toml"
        for seed in seeds:
            where = folder / f"seed{seed}"
            if holds_run(where):
                raise FileExistsError(f"{where} holds a run already: go on with it, or choose another --out.")
        if path.exists() and not all((folder / f"seed{seed}" / "record.json").exists() for seed in _read_seeds(path)):
            raise FileExistsError(
                f"{folder} holds runs that are not finished: bsam train --resume {folder}, or choose another --out."
            )
        dataset = load(config.dataset, data, device=choose_device(device), validation=config.validation)
        runs = [
            Run.start(
                folder / f"seed{seed}",
                config,
                seed,
                preset=preset,
                device=device,
                data=data,
                compiled=True,
                dataset=dataset,
            )
            for seed in seeds
        ]
        write_text(path, f"seeds = {list(seeds)}\n")
        return cls(folder, runs)

    @classmethod
    def resume(cls, folder: Path, *, device: str | None = None, data: Path | None = None) -> Stack:
        """The runs in `folder`, at their last checkpoint, or at their beginning if there is none."""
        path = folder / "stack.toml"
        seeds = _read_seeds(path)
        folders = [folder / f"seed{seed}" for seed in seeds]
        first = Run.resume(folders[0], device=device, data=data)
        rest = [Run.resume(each, device=device, data=data, dataset=first.trainer.dataset) for each in folders[1:]]
        stack = cls(folder, [first, *rest])
        for seed, run in zip(seeds, stack.runs, strict=True):
            if run.seed != seed or run.config != first.config:
                raise ValueError(
                    f"{run.folder / 'config.toml'} has other settings than {first.folder / 'config.toml'}, or another "
                    f"seed than {path} says: one of them was changed."
                )
        if found := stack.checkpoints.load():
            state, source = found
            states = state.get("runs")
            if state.get("seeds") != seeds or not isinstance(states, list) or len(states) != len(seeds):
                raise ValueError(f"{source} belongs to other runs than {path}: one of them was changed.")
            for run, each in zip(stack.runs, states, strict=True):
                run.load_state(each, source)
        return stack

    @property
    def checkpoint(self) -> Path:
        """The file to go on from."""
        return self.checkpoints.path

    @property
    def finished(self) -> bool:
        """Whether all have written their records."""
        return all(run.finished and (run.folder / "record.json").exists() for run in self.runs)

    def save(self) -> None:
        """Write one checkpoint of all runs: they stay together whenever the process is killed."""
        runs = [run.trainer.state() for run in self.runs]
        self.checkpoints.save({"seeds": [run.seed for run in self.runs], "runs": runs})

    def train(
        self,
        *,
        every_minutes: float = 5.0,
        every_epochs: int | None = None,
        on_step: Callable[[Trainer], None] = lambda trainer: None,
    ) -> None:
        """Train to the end, see `Run.train`; each run is then one like those trained alone."""
        train_runs(
            self.runs,
            self.checkpoints,
            self.save,
            every_minutes=every_minutes,
            every_epochs=every_epochs,
            on_step=on_step,
        )
        for run in self.runs:
            run.save()
        self.checkpoints.remove()


def _read_seeds(path: Path) -> list[int]:
    try:
        seeds: list[int] = tomllib.loads(path.read_text(encoding="utf-8"))["seeds"]
        _check_seeds(seeds)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not list the seeds of runs: {error}") from error
    return seeds


def _check_seeds(seeds: Sequence[int]) -> None:
    if not seeds or any(type(seed) is not int for seed in seeds) or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={list(seeds)} must be one or more different integers.")
