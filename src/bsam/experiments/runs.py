"""A run in a folder: it survives Ctrl-C, a kill, a full disk, and goes on exactly where it was.

config.toml                        the settings, with preset and seed
log.jsonl                          one line an epoch
checkpoint.safetensors             everything to go on with
checkpoint.previous.safetensors    the checkpoint before that one, in case it is damaged
posterior.safetensors              what was learned, once the run is done
record.json                        settings, code, packages, device, seconds, and metrics once evaluated
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

from bsam.experiments.checkpoint import Checkpoints
from bsam.experiments.config import Config, from_mapping, to_toml, toml_value
from bsam.experiments.data import Dataset, epoch_length, load
from bsam.experiments.record import environment, to_json, write_json
from bsam.experiments.sharing import neighbours
from bsam.experiments.trainer import Trainer, train_together
from bsam.files import locked, remove_leftovers, write_text

__all__ = [
    "Run",
    "RunBusyError",
    "RunInterruptedError",
    "choose_device",
    "holds_run",
    "remembered_data",
    "train_runs",
]


class RunBusyError(RuntimeError):
    """Another process is training the run, here or on another machine."""


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


def holds_run(folder: Path) -> bool:
    """Whether a run was started in `folder`. Empty settings do not count: a kill of an earlier bsam left them."""
    path = folder / "config.toml"
    return path.is_file() and path.stat().st_size > 0


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
        self.checkpoints = Checkpoints(folder / "checkpoint.safetensors")

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
        taken = f"{folder} holds a run already: go on with `bsam train --resume {folder}`, or choose another --out."
        if holds_run(folder):
            raise FileExistsError(taken)
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
        if path.is_file() and not holds_run(folder):
            path.unlink()
        try:
            write_text(path, f"{head}\n[config]\n{to_toml(config)}", new=True)
        except FileExistsError as error:  # another process was faster
            raise FileExistsError(taken) from error
        return run

    @classmethod
    def resume(
        cls, folder: Path, *, device: str | None = None, data: Path | None = None, dataset: Dataset | None = None
    ) -> Run:
        """The run in `folder`, at its last checkpoint, or at its beginning if there is none."""
        path = folder / "config.toml"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no run: there is no {path}.")
        if not holds_run(folder):
            raise ValueError(f"{path} does not hold a run: it is empty. Start the run again, with the same --out.")
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
        if found := run.checkpoints.load():
            run.load_state(*found)
        return run

    def load_state(self, state: dict[str, Any], path: Path) -> None:
        """Go where the checkpoint that was read from `path` was taken."""
        with _naming(path):
            same = from_mapping(state["config"]) == self.config and state["seed"] == self.seed
        if not same:
            where = self.folder / "config.toml"
            raise ValueError(f"{path} belongs to other settings than {where}: one of them was changed.")
        with _naming(path):
            _check_progress(state, self.trainer)
            options = _options(self.trainer)
            self.trainer.load_state(state)
            _check_options(_options(self.trainer), options)

    @property
    def checkpoint(self) -> Path:
        """The file to go on from."""
        return self.checkpoints.path

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
            RunBusyError: Another process is training the run, or has gone on with it since it was read.
            OSError: A file could not be written, say because the disk is full; the last checkpoint is kept.
        """
        train_runs(
            [self],
            self.checkpoints,
            self.save,
            every_minutes=every_minutes,
            every_epochs=every_epochs,
            on_step=on_step,
        )

    def save(self) -> None:
        """Write a checkpoint; the last one becomes the one before it."""
        self.checkpoints.save(self.trainer.state())

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
    checkpoints: Checkpoints,
    save: Callable[[], None],
    *,
    every_minutes: float,
    every_epochs: int | None,
    on_step: Callable[[Trainer], None],
) -> None:
    """Train runs that differ in their seeds only to the end, as `Run.train` does.

    Args:
        runs: The runs.
        checkpoints: Of all of them. The folder they are in is what to resume.
        save: Writes one.
        every_minutes: See `Run.train`.
        every_epochs: See `Run.train`.
        on_step: See `Run.train`.
    """
    trainer, folder = runs[0].trainer, checkpoints.path.parent
    with _held(runs, folder), neighbours(runs[0].device) as on_device, _signals_kept() as arrived:
        if checkpoints.changed:
            raise RunBusyError(f"another process has gone on with the run in {folder} since it was read.")
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


def _check_progress(state: dict[str, Any], trainer: Trainer) -> None:
    """Raise if no run of these settings can be where `state` says that it was taken."""
    config = trainer.config
    length = epoch_length(trainer.dataset, config.batch_size, augment=config.augment, drop_last=config.drop_last)
    epoch, batch = state["epoch"], state["batch"]
    last = length if epoch != config.total_epochs else 0
    for name, value, most in (("epoch", epoch, config.total_epochs), ("batch", batch, last)):
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(f"{name}={value!r} must be a whole number from 0 to {most}")
    if len(state["log"]) != epoch:
        raise ValueError(f"the log has {len(state['log'])} epochs, and {epoch} are done")


def _options(trainer: Trainer) -> list[dict[str, Any]]:
    """What the optimizer computes: its options but those that the schedule sets, and those that say how to compute it.

    Tensors are state: IVON has its state there.
    """
    aside = {"params", "lr", "foreach", "fused", "capturable"} | ({"momentum"} if trainer.config.swag_epochs else set())
    return [
        {name: value for name, value in group.items() if name not in aside and not isinstance(value, torch.Tensor)}
        for group in trainer.optimizer.param_groups
    ]


def _check_options(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Raise if options that were loaded are not those that the settings give."""
    if len(found) != len(expected):
        raise ValueError(f"the optimizer has {len(found)} groups of parameters, and must have {len(expected)}")
    for group, right in zip(found, expected, strict=True):
        for name in sorted(group.keys() | right.keys()):
            if name not in group or name not in right or group[name] != right[name]:
                seen, wanted = (f"{name}={of[name]!r}" if name in of else f"no {name}" for of in (group, right))
                raise ValueError(f"the optimizer has {seen}, and the run's settings give {wanted}")


@contextlib.contextmanager
def _held(runs: list[Run], folder: Path) -> Iterator[None]:
    """Keep other processes from the runs; an error of the disk says how to go on with `folder`."""
    with contextlib.ExitStack() as locks:
        try:
            for run in runs:
                try:
                    locks.enter_context(locked(run.folder / ".training.lock", wait=False))
                except BlockingIOError:
                    raise RunBusyError(f"another process is training the run in {run.folder}.") from None
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
