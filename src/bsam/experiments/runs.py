"""A run and the files in its folder.

config.toml                        the settings, with preset and seed, and the folder of its stack
log.jsonl                          one line per epoch
checkpoint.safetensors             everything that is needed to go on
checkpoint.previous.safetensors    the checkpoint before the last, in case the last is damaged
posterior.safetensors              the posterior, when the run is finished
record.json                        settings, code, packages, device, seconds, and the metrics of each evaluation
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shlex
import signal
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from bsam.experiments.checkpoint import Checkpoints
from bsam.experiments.config import Config, from_mapping, to_toml, toml_value
from bsam.experiments.data import epoch_length
from bsam.experiments.record import environment, read_json, to_json, write_json
from bsam.experiments.trainer import Trainer
from bsam.files import write_text

__all__ = [
    "Run",
    "RunBusyError",
    "RunInterruptedError",
    "choose_device",
    "handled",
    "holds_run",
    "is_finished",
    "naming",
    "read_origin",
    "remembered_data",
    "resume_command",
    "signals_kept",
]


class RunBusyError(RuntimeError):
    """Another process is training the run, here or on another machine."""


class RunInterruptedError(Exception):
    """A signal asked the run to stop; it was saved."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; saved. Go on with: {resume_command(folder)}")
        self.exit_status = 128 + number


def resume_command(folder: Path) -> str:
    """Return the command that goes on with the runs in `folder`."""
    return f"bsam train --resume {shlex.quote(str(folder))}"


def choose_device(name: str | None = None) -> torch.device:
    """Return the named device, or by default the accelerator if there is one, or the CPU."""
    if name is not None:
        try:
            device = torch.device(name)
            module = torch.get_device_module(device)  # a RuntimeError if it is no device to compute on
            if device.type == "cpu" and device.index is not None:
                raise RuntimeError
        except RuntimeError:
            raise ValueError(f"--device {name}: write cpu, cuda or cuda:0.") from None
        if not module.is_available() or (device.index or 0) >= module.device_count():
            raise ValueError(f"--device {name}: there is no such device here, or this torch was built without it.")
        return device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def holds_run(folder: Path) -> bool:
    """Whether a run was started in `folder`. An empty config.toml, left by a kill of an old version, does not count."""
    path = folder / "config.toml"
    return path.is_file() and path.stat().st_size > 0


def is_finished(folder: Path) -> bool:
    """Whether the run in `folder` was trained to its end: posterior and record are written then, in this order."""
    return all((folder / name).is_file() for name in ("posterior.safetensors", "record.json"))


@dataclass(frozen=True)
class Run:
    """A run and its folder."""

    folder: Path
    config: Config
    seed: int
    preset: str
    """Name of the preset, or of the TOML file, that the settings are from."""

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read the run that was started in `folder`."""
        origin = read_origin(folder)
        with naming(folder / "config.toml"):
            return cls(folder, from_mapping(origin["config"]), origin["seed"], origin["preset"])

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints in the run's own folder."""
        return Checkpoints(self.folder / "checkpoint.safetensors")

    def refuse_to_replace(self) -> None:
        """Raise if the folder holds a run."""
        if is_finished(self.folder) and self.folder.name == f"seed{self.seed}":
            free = next(seed for seed in itertools.count() if not holds_run(self.folder.with_name(f"seed{seed}")))
            raise FileExistsError(
                f"{self.folder} holds a finished run: train other seeds with --first-seed {free}, or choose another "
                "--out."
            )
        if holds_run(self.folder):
            raise FileExistsError(
                f"{self.folder} holds a run already: go on with `{resume_command(self.folder)}`, or choose another "
                "--out."
            )

    def write_settings(self, **origin: Any) -> None:
        """Write config.toml, which takes the folder. `origin` says how the run was started, without None values."""
        self.folder.mkdir(parents=True, exist_ok=True)
        origin = {"preset": self.preset, "seed": self.seed, **origin}
        head = "".join(f"{name} = {toml_value(value)}\n" for name, value in origin.items() if value is not None)
        path = self.folder / "config.toml"
        if path.is_file() and not holds_run(self.folder):
            path.unlink()
        try:
            write_text(path, f"{head}\n[config]\n{to_toml(self.config)}", new=True)
        except FileExistsError:  # another process was faster
            self.refuse_to_replace()
            raise

    def load_state(self, trainer: Trainer, state: dict[str, Any], path: Path) -> None:
        """Load a checkpoint of this run, which was read from `path`, into the trainer."""
        with naming(path):
            then = {"seed": state["seed"], **dataclasses.asdict(from_mapping(state["config"]))}
        now = {"seed": self.seed, **dataclasses.asdict(self.config)}
        if changed := [f"{name} is {now[name]}, and was {then[name]}" for name in now if now[name] != then[name]]:
            where = self.folder / "config.toml"
            raise ValueError(
                f"{path} belongs to other settings than {where}: {'; '.join(changed)}. Change it back, or start "
                "another run."
            )
        with naming(path):
            _check_progress(state, trainer)
            options = _options(trainer)
            trainer.load_state(state)
            _check_options(_options(trainer), options)

    def write_log(self, trainer: Trainer) -> None:
        """Write one line per finished epoch."""
        lines = [to_json(entry) + "\n" for entry in trainer.log]
        write_text(self.folder / "log.jsonl", "".join(lines))

    def write_results(self, trainer: Trainer, *, keep: bool = False, **engine: Any) -> None:
        """Write posterior and record; `engine` says how the run was trained. `keep` a record of this very training."""
        trainer.posterior().save(self.folder / "posterior.safetensors")
        path, loss = self.folder / "record.json", trainer.log[-1]["loss"]
        if keep and path.is_file() and read_json(path)["final_loss"] == loss:
            return
        record = {
            "preset": self.preset,
            "seed": self.seed,
            "config": dataclasses.asdict(self.config),
            "seconds": round(trainer.seconds, 2),
            "final_loss": loss,
            "engine": engine,
            "data_sha256": trainer.dataset.sha256,
            "environment": environment(trainer.dataset.device),
            "evaluations": {},
        }
        write_json(path, record)


def read_origin(folder: Path) -> dict[str, Any]:
    """Read config.toml: how the run was started, and its settings."""
    path = folder / "config.toml"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run: there is no {path}.")
    if not holds_run(folder):
        raise ValueError(f"{path} does not hold a run: it is empty. Start the run again, with the same --out.")
    with naming(path):
        return tomllib.loads(path.read_text(encoding="utf-8"))


def remembered_data(folder: Path) -> Path | None:
    """Return the data folder that the run in `folder` was started with, or None if it was given none."""
    origin = read_origin(folder)
    return Path(origin["data"]) if "data" in origin else None


def _check_progress(state: dict[str, Any], trainer: Trainer) -> None:
    """Raise if epoch, batch and log of `state` are not possible with these settings."""
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
    """Return the options that decide what the optimizer computes, without those that the schedule sets."""
    aside = {"params", "lr", "foreach", "fused", "capturable"} | ({"momentum"} if trainer.config.swag_epochs else set())
    return [
        {name: value for name, value in group.items() if name not in aside} for group in trainer.optimizer.param_groups
    ]


def _check_options(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Raise if the loaded options differ from those of the settings."""
    if len(found) != len(expected):
        raise ValueError(f"the optimizer has {len(found)} groups of parameters, and must have {len(expected)}")
    for group, right in zip(found, expected, strict=True):
        for name in sorted(group.keys() | right.keys()):
            if name not in group or name not in right or group[name] != right[name]:
                seen, wanted = (f"{name}={of[name]!r}" if name in of else f"no {name}" for of in (group, right))
                raise ValueError(f"the optimizer has {seen}, and the run's settings give {wanted}")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an error about bad contents into one sentence that names the file."""
    try:
        yield
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} does not hold a run of this version: {type(error).__name__}: {reason}") from error


@contextlib.contextmanager
def signals_kept() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list, so that a step is finished first; a second signal stops at once."""
    arrived: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        if arrived:
            raise KeyboardInterrupt
        arrived.append(number)

    with handled((signal.SIGINT, signal.SIGTERM), keep):
        yield arrived


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Give these signals to `handler` while the block runs."""
    previous: dict[int, Any] = {}
    try:
        with contextlib.suppress(ValueError):  # not in the main thread: signals go elsewhere
            for number in numbers:
                previous[number] = signal.signal(number, handler)
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
