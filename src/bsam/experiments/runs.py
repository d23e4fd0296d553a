"""A run in a folder: it survives Ctrl-C, a kill, a full disk, and goes on exactly where it was.

config.toml               the settings, with preset and seed
log.jsonl                 one line an epoch
checkpoint.safetensors    everything to go on with
posterior.safetensors     what was learned, once the run is done
record.json               settings, code, packages, device, seconds, and metrics once evaluated
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import signal
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from bsam.experiments.checkpoint import load_checkpoint, save_checkpoint
from bsam.experiments.config import Config, from_mapping, to_toml, toml_value
from bsam.experiments.data import Dataset, load
from bsam.experiments.record import environment, to_json, write_json
from bsam.experiments.sharing import neighbours
from bsam.experiments.trainer import Trainer, train_together
from bsam.files import remove_leftovers, write_text

__all__ = ["Run", "RunInterruptedError", "choose_device", "remembered_data", "train_runs"]


class RunInterruptedError(Exception):
    """A signal asked the run to stop; it was saved."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; saved. Go on with: {_resume_command(folder)}")
        self.number = number


def _resume_command(folder: Path) -> str:
    return f"bsam train --resume {shlex.quote(str(folder))}"


def choose_device(name: str | None = None) -> torch.device:
    """The device to train on: the one named, or the accelerator if there is one, or the CPU."""
    if name is not None:
        device = torch.device(name)
        if device.type != "cpu" and not torch.get_device_module(device).is_available():
            raise ValueError(f"--device {name}: there is no such device here, or this torch was built without it.")
        return device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


class Run:
    """A run and its folder.

    Args:
        folder: Where its files are.
        config: Its settings.
        seed: Its seed.
        preset: The name its settings came under.
        device: Where to train; chosen by itself if None.
        data: Folder of the data sets, see `bsam.experiments.data.load`.
        compiled: Whether to train with `bsam.TrainStep`; by default on CUDA only, as compiling takes a minute, and if
            `splits` cuts the batches evenly.
        dataset: The data, where it is loaded already.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        seed: int,
        *,
        preset: str,
        device: str | None,
        data: Path | None,
        compiled: bool | None = None,
        dataset: Dataset | None = None,
    ) -> None:
        self.folder, self.config, self.seed, self.preset = folder, config, seed, preset
        self.device = choose_device(device)
        even = config.batch_size % config.splits == 0
        if compiled and not even:
            raise ValueError(
                f"batch_size={config.batch_size} is no multiple of splits={config.splits}, as a compiled step needs "
                "it: train with --loop, and seeds one after the other."
            )
        self.compiled = self.device.type == "cuda" and even if compiled is None else compiled
        if dataset is None:
            dataset = load(config.dataset, data, device=self.device, validation=config.validation)
        self.trainer = Trainer(config, dataset, seed=seed)

    @classmethod
    def start(
        cls,
        folder: Path,
        config: Config,
        seed: int,
        *,
        preset: str,
        device: str | None = None,
        data: Path | None = None,
        compiled: bool | None = None,
        dataset: Dataset | None = None,
    ) -> Run:
        """A new run; refuses a folder that holds one."""
        if (folder / "config.toml").exists():
            raise FileExistsError(
                f"{folder} holds a run already: go on with `bsam train --resume {folder}`, or choose another --out."
            )
        run = cls(folder, config, seed, preset=preset, device=device, data=data, compiled=compiled, dataset=dataset)
        folder.mkdir(parents=True, exist_ok=True)
        origin = {
            "preset": preset,
            "seed": seed,
            "device": device,
            "data": None if data is None else str(data.resolve()),
            "compiled": compiled,
        }
        head = "".join(f"{name} = {toml_value(value)}\n" for name, value in origin.items() if value is not None)
        path = folder / "config.toml"
        open(path, "x").close()  # fails if another process was faster
        try:
            write_text(path, f"{head}\n[config]\n{to_toml(config)}")
        except BaseException:
            path.unlink()
            raise
        return run

    @classmethod
    def resume(
        cls, folder: Path, *, device: str | None = None, data: Path | None = None, dataset: Dataset | None = None
    ) -> Run:
        """The run in `folder`, at its last checkpoint, or at its beginning if there is none."""
        path = folder / "config.toml"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no run: there is no {path}.")
        with _naming(path):
            content = tomllib.loads(path.read_text(encoding="utf-8"))
            config, seed, preset = from_mapping(content["config"]), content["seed"], content["preset"]
        device = device or content.get("device")
        data = data or remembered_data(folder)
        run = cls(
            folder,
            config,
            seed,
            preset=preset,
            device=device,
            data=data,
            compiled=content.get("compiled"),
            dataset=dataset,
        )
        if run.checkpoint.exists():
            run.load_state(load_checkpoint(run.checkpoint), run.checkpoint)
        return run

    def load_state(self, state: dict[str, Any], path: Path) -> None:
        """Go where the checkpoint that was read from `path` was taken."""
        with _naming(path):
            same = from_mapping(state["config"]) == self.config and state["seed"] == self.seed
        if not same:
            where = self.folder / "config.toml"
            raise ValueError(f"{path} belongs to other settings than {where}: one of them was changed.")
        with _naming(path):
            self.trainer.load_state(state)

    @property
    def checkpoint(self) -> Path:
        """The file to go on from."""
        return self.folder / "checkpoint.safetensors"

    @property
    def finished(self) -> bool:
        """Whether the last epoch is done."""
        return self.trainer.epoch >= self.config.total_epochs

    def train(
        self,
        *,
        every_minutes: float = 5.0,
        every_epochs: int | None = None,
        on_step: Callable[[Trainer], None] = lambda trainer: None,
    ) -> None:
        """Train to the end, saving on the way; then write posterior and record.

        Args:
            every_minutes: Time between two checkpoints.
            every_epochs: Also save after each so many epochs.
            on_step: Called after each step, and after each epoch.

        Raises:
            RunInterruptedError: SIGINT or SIGTERM arrived; the run is saved.
            OSError: A file could not be written, say because the disk is full; the last checkpoint is kept.
        """
        train_runs(
            [self], self.folder, self.save, every_minutes=every_minutes, every_epochs=every_epochs, on_step=on_step
        )

    def save(self) -> None:
        """Write a checkpoint."""
        save_checkpoint(self.checkpoint, self.trainer.state())

    def _write_log(self) -> None:
        lines = [to_json(entry) + "\n" for entry in self.trainer.log]
        write_text(self.folder / "log.jsonl", "".join(lines))

    def _write_record(self, together: int, processes: int) -> None:
        record = {
            "preset": self.preset,
            "seed": self.seed,
            "config": dataclasses.asdict(self.config),
            "seconds": round(self.trainer.seconds, 2),
            "final_loss": self.trainer.log[-1]["loss"],
            "engine": {
                "compiled": self.compiled,
                "seeds_together": together,
                "processes_on_device": processes,  # the most that trained there at a time
            },
            "data_sha256": self.trainer.dataset.sha256,
            "environment": environment(self.device),
            "evaluations": {},
        }
        write_json(self.folder / "record.json", record)


def train_runs(
    runs: list[Run],
    folder: Path,
    save: Callable[[], None],
    *,
    every_minutes: float,
    every_epochs: int | None,
    on_step: Callable[[Trainer], None],
) -> None:
    """Train runs that differ in their seeds only to the end, as `Run.train` does.

    Args:
        runs: The runs.
        folder: What to resume.
        save: Writes the checkpoint of all of them.
        every_minutes: See `Run.train`.
        every_epochs: See `Run.train`.
        on_step: See `Run.train`.
    """
    trainer = runs[0].trainer
    with _held(runs, folder), neighbours(runs[0].device) as on_device, _signals_kept() as arrived:
        for run in runs:
            run._write_log()  # drops lines of epochs after the checkpoint, which will be trained again
        saved = time.monotonic()
        for _ in train_together([run.trainer for run in runs], compiled=runs[0].compiled):
            on_step(trainer)
            epoch_done = trainer.batch == 0
            if epoch_done:
                on_device.count()
                for run in runs:
                    run._write_log()
            due = time.monotonic() - saved > 60 * every_minutes
            due |= epoch_done and every_epochs is not None and trainer.epoch % every_epochs == 0
            if due or arrived:
                save()
                saved = time.monotonic()
            if arrived:
                raise RunInterruptedError(folder, arrived[0])
        save()
        if arrived:
            raise RunInterruptedError(folder, arrived[0])
        for run in runs:
            run.trainer.posterior().save(run.folder / "posterior.safetensors")
            run._write_record(together=len(runs), processes=on_device.most)


@contextlib.contextmanager
def _held(runs: list[Run], folder: Path) -> Iterator[None]:
    """Keep other processes from the runs; an error of the disk says how to go on with `folder`."""
    with contextlib.ExitStack() as locks:
        for run in runs:
            locks.enter_context(_locked(run.folder / "config.toml"))
        try:
            for each in {folder, *(run.folder for run in runs)}:
                remove_leftovers(each)
            yield
        except OSError as error:
            sentence = f"{error.strerror or error}. Then go on with: {_resume_command(folder)}"
            raise OSError(error.errno, sentence) from error


def remembered_data(folder: Path) -> Path | None:
    """The folder of the data sets that the run in `folder` was started with, if it was given one."""
    path = folder / "config.toml"
    with _naming(path):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    return Path(content["data"]) if "data" in content else None


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn what bad contents raise into one sentence that names the file."""
    try:
        yield
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} does not hold a run of this version: {type(error).__name__}: {reason}") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time train the run."""
    try:
        import fcntl
    except ModuleNotFoundError:  # no such locks on this system
        yield
        return
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another process is training the run in {path.parent}.") from None
        yield


@contextlib.contextmanager
def _signals_kept() -> Iterator[list[int]]:
    """Keep SIGINT and SIGTERM in a list instead of stopping in the middle of a step; a second one stops at once."""
    arrived: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        if arrived:
            raise KeyboardInterrupt
        arrived.append(number)

    try:
        previous = {number: signal.signal(number, keep) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: signals go elsewhere
        yield arrived
        return
    try:
        yield arrived
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
