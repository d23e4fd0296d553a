"""The settings of a run: one frozen dataclass, read from TOML, changed by `key=value`. An unknown key stops the run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Config", "from_mapping", "override", "to_toml"]

Method = Literal["sgd", "sam-sgd", "laplace", "swag", "vogn", "adam", "sam-adam", "bsam"]
"""`laplace` is SAM-SGD with a Laplace approximation at its solution."""


@dataclass(frozen=True)
class Config:
    """Everything that decides a run but its seed. Names are the paper's in words, see the page on the algorithm."""

    dataset: str
    model: str
    method: Method
    epochs: int
    batch_size: int
    lr: float
    beta1: float
    prior_precision: float
    """Precision of the prior, N delta; for methods without one, weight decay is prior_precision / N."""
    beta2: float = 0.999
    rho: float = 0.0
    damping: float = 0.1
    splits: int = 1
    curvature: Literal["mean_abs", "abs_mean"] = "mean_abs"
    statistics: Literal["average", "latest"] = "average"
    """How VOGN reads beta2, see `bsam.VOGN`."""
    sample_noise: bool = True
    augmentation_factor: float = 1.0
    max_grad_norm: float | None = None

    schedule: Literal["cosine", "steps", "constant"] = "cosine"
    """Of the learning rate, by epoch: cosine to 0, or a tenth at each milestone."""
    milestones: tuple[int, ...] = ()
    warmup_epochs: int = 0
    """Epochs in which the rate grows linearly: 1/5, 2/5, ... 1 for five."""

    augment: bool = False
    """Random crops with padding 4, and horizontal flips."""
    drop_last: bool = False
    """Leave out the ragged last batch of an epoch."""
    validation: int = 0
    """Training examples held out, to choose settings by."""

    swag_epochs: int = 0
    """Epochs of collection after `epochs` of SGD, at a constant rate and momentum."""
    swag_lr: float = 0.01
    swag_momentum: float = 0.9
    swag_interval: int = 100
    """Steps between two snapshots."""
    swag_rank: int = 20

    num_samples: int = 32
    """Samples of the posterior that predictions are averaged over."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of matrix products and convolutions (autocast)."""
    channels_last: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "splits", "swag_interval", "swag_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("warmup_epochs", "validation", "swag_epochs", "num_samples"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative.")
        if self.schedule == "steps" and not self.milestones:
            raise ValueError("schedule='steps' needs milestones, like milestones=[100, 120].")
        if (self.method == "swag") != (self.swag_epochs > 0):
            raise ValueError(f"swag_epochs={self.swag_epochs} does not go with method={self.method!r}.")

    def learning_rate(self, epoch: int) -> float:
        """The rate of an epoch, counted from 0: a function of the epoch alone, so that a run can go on anywhere."""
        if epoch >= self.epochs:  # SWAG collects
            return self.swag_lr
        if epoch < self.warmup_epochs:
            return self.lr * (epoch + 1) / self.warmup_epochs
        if self.schedule == "cosine":
            progress = (epoch - self.warmup_epochs) / (self.epochs - self.warmup_epochs)
            return self.lr * 0.5 * (1 + math.cos(math.pi * progress))
        return self.lr * 0.1 ** sum(epoch >= milestone for milestone in self.milestones)

    @property
    def total_epochs(self) -> int:
        """Epochs of training and of SWAG's collection."""
        return self.epochs + self.swag_epochs


FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def from_mapping(values: Mapping[str, Any]) -> Config:
    """Make a configuration of what a TOML file holds."""
    unknown = [name for name in values if name not in FIELDS]
    if unknown:
        raise ValueError(f"unknown setting {unknown[0]!r}. There are: {', '.join(FIELDS)}.")
    required = [name for name, field in FIELDS.items() if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"the setting {missing[0]!r} is missing. A run needs {', '.join(required)}.")
    hints = typing.get_type_hints(Config)
    return Config(**{name: _typed(name, value, hints[name]) for name, value in values.items()})


def override(config: Config, changes: Iterable[str]) -> Config:
    """Apply changes written as `key=value`: numbers, true, false, null, lists like [1, 2], or text."""
    values = dataclasses.asdict(config)
    for change in changes:
        name, sign, text = change.partition("=")
        if not sign:
            raise ValueError(f"{change!r} is not of the form key=value, like lr=0.1.")
        values[name.strip()] = _parsed(text.strip())
    return from_mapping(values)


def to_toml(config: Config) -> str:
    """The settings as TOML, those that have their default left out."""
    lines = []
    for name, field in FIELDS.items():
        value = getattr(config, name)
        if value != field.default:
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _parsed(text: str) -> Any:
    for parse in (json.loads, float):
        with contextlib.suppress(ValueError):
            return parse(text)
    return text.strip("'\"")


def _typed(name: str, value: Any, hint: Any) -> Any:
    """`value` as the type the field asks for, or an error that says what that is."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in arguments:
            return value
        raise ValueError(f"{name}={value!r} must be one of {', '.join(arguments)}.")
    if origin is types.UnionType:
        return None if value is None else _typed(name, value, arguments[0])
    if origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_typed(name, item, arguments[0]) for item in value)
        raise ValueError(f"{name}={value!r} must be a list, like [100, 120].")
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ValueError(f"{name}={value} must be a finite number.")
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ValueError(f"{name}={value!r} must be of type {hint.__name__}.")
    return value
