"""The settings of a run: one frozen dataclass, read from TOML, changed by `key=value`. An unknown key stops the run."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from bsam.experiments.choices import DtypeName
from bsam.experiments.methods import METHODS
from bsam.posterior.base import check_temperature

__all__ = [
    "RATES",
    "Config",
    "explanations",
    "from_file",
    "from_mapping",
    "hints",
    "override",
    "to_toml",
    "toml_value",
    "what_fits",
]

RATE = object()
"""Marks the settings that may differ between runs that are trained together, see `bsam.TrainStep`."""


@dataclass(frozen=True)
class Config:
    """Everything that decides a run, except its seed. The text beside a type is what `bsam configs` prints."""

    dataset: Annotated[str, "data set to train on"]
    model: Annotated[str, "network"]
    method: Annotated[str, "how to train; laplace is SAM-SGD, then Laplace's approximation at its solution"]
    epochs: Annotated[int, "passes over the training data"]
    batch_size: Annotated[int, "examples in a minibatch"]
    lr: Annotated[float, "alpha: learning rate, before the schedule", RATE]
    beta1: Annotated[float, "beta_1: momentum, how much of the old gradient is kept", RATE]
    prior_precision: Annotated[float, "N delta: precision of the prior; without one, N times the weight decay", RATE]
    beta2: Annotated[float, "beta_2: how much of the old second moment, or precision, is kept", RATE] = 0.999
    rho: Annotated[float, "rho: how far SAM and bSAM perturb the weights", RATE] = 0.0
    damping: Annotated[float, "gamma: added to the curvature by bSAM and VOGN", RATE] = 0.1
    splits: Annotated[int, "m: number of parts of a minibatch, each with its own perturbation (m-sharpness)"] = 1
    perturb_from: Annotated[
        Literal["sample", "mean"], "where bSAM's adversarial step starts: at the sample, or at the mean"
    ] = "mean"
    curvature: Annotated[
        Literal["mean_abs", "abs_mean"],
        "the |g| of bSAM: the mean of |g| over the parts, or |mean of g over the parts|",
    ] = "mean_abs"
    sqrt_num_data: Annotated[bool, "whether bSAM's curvature has the derivation's factor sqrt(N)"] = False
    max_noise: Annotated[
        float | None, "limit of bSAM's noise, as a share of the weights of a matrix; null is no limit"
    ] = None
    statistics: Annotated[Literal["average", "latest"], "how VOGN reads beta_2, see `bsam.VOGN`"] = "average"
    sample_noise: Annotated[bool, "whether bSAM perturbs a sample of the weights, or (false) their mean"] = True
    bias_correction: Annotated[bool, "whether Adam, alone or below SAM, corrects the bias of its averages"] = True
    initial_hessian: Annotated[float, "h_0: where IVON's estimate of the Hessian starts"] = 1.0
    augmentation_factor: Annotated[float, "multiplies N of bSAM, VOGN and IVON, for data that is augmented"] = 1.0
    max_grad_norm: Annotated[
        float | None, "largest gradient norm, larger gradients are scaled down; null is no limit"
    ] = None

    schedule: Annotated[
        Literal["cosine", "steps", "constant"],
        "learning rate by epoch: cosine to 0, a tenth at each milestone, or constant",
    ] = "cosine"
    milestones: Annotated[tuple[int, ...], 'epochs at which the schedule "steps" divides the learning rate by 10'] = ()
    warmup_epochs: Annotated[int, "first epochs, with a growing learning rate: 1/5, 2/5, ... 1 for five"] = 0

    augment: Annotated[bool, "random crops with padding 4, and horizontal flips"] = False
    drop_last: Annotated[bool, "leave out the last minibatch of an epoch if it is smaller than the others"] = False
    validation: Annotated[int, "number of training examples that are held out, to choose settings with them"] = 0

    swag_epochs: Annotated[int, "number of epochs in which SWAG collects snapshots, after `epochs` of SGD"] = 0
    swag_lr: Annotated[float, "learning rate while SWAG collects", RATE] = 0.01
    swag_momentum: Annotated[float, "momentum while SWAG collects", RATE] = 0.9
    swag_interval: Annotated[int, "number of steps between two snapshots of SWAG"] = 100
    swag_rank: Annotated[int, "K: number of snapshots, the last ones, in SWAG's covariance"] = 20

    num_samples: Annotated[int, "number of posterior samples for predictions; 0 is the posterior's mean"] = 32
    temperature: Annotated[float, "multiplies the posterior's variance in predictions; below 1 is a cold posterior"] = (
        1.0
    )
    precision: Annotated[DtypeName, "type of matrix products and convolutions (autocast)"] = "float32"
    channels_last: Annotated[bool, "memory layout of images, faster on some devices"] = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "splits", "swag_interval", "swag_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.initial_hessian <= 0:
            raise ValueError(f"initial_hessian={self.initial_hessian} must be positive, like 0.5.")
        for name in ("warmup_epochs", "validation", "swag_epochs", "num_samples"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative.")
        check_temperature(self.temperature)
        if self.schedule == "steps" and not self.milestones:
            raise ValueError("schedule='steps' needs milestones, like milestones=[100, 120].")
        if (METHODS[self.method].collector is not None) != (self.swag_epochs > 0):
            raise ValueError(f"swag_epochs={self.swag_epochs} does not go with method={self.method!r}.")

    def learning_rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 0; it depends on nothing else, so a run can go on."""
        if epoch >= self.epochs:  # SWAG collects
            return self.swag_lr
        if epoch < self.warmup_epochs:
            return self.lr * (epoch + 1) / self.warmup_epochs
        if self.schedule == "cosine":
            progress = (epoch - self.warmup_epochs) / (self.epochs - self.warmup_epochs)
            return self.lr * 0.5 * (1 + math.cos(math.pi * progress))
        return self.lr * 0.1 ** sum(epoch >= milestone for milestone in self.milestones)

    def without_rates(self) -> Config:
        """Return the settings with all rates 0; they are equal for runs that can be trained together."""
        zeros: dict[str, Any] = dict.fromkeys(RATES, 0.0)
        return dataclasses.replace(self, **zeros)

    @property
    def total_epochs(self) -> int:
        """Epochs of training and of SWAG's collection."""
        return self.epochs + self.swag_epochs


FIELDS = {field.name: field for field in dataclasses.fields(Config)}


_ANNOTATED, _HINTS = typing.get_type_hints(Config, include_extras=True), typing.get_type_hints(Config)
RATES = tuple(name for name, hint in _ANNOTATED.items() if RATE in hint.__metadata__)
"""Names of the settings that are rates."""


def hints() -> dict[str, Any]:
    """Return the type of each setting; the type of `method` lists the names in the registry."""
    return {**_HINTS, "method": typing.cast(Any, Literal)[tuple(METHODS)]}


def explanations() -> dict[str, str]:
    """Return a short explanation of each setting."""
    return {name: hint.__metadata__[0] for name, hint in _ANNOTATED.items()}


# ------------------------------------------------------------------ reading


def from_mapping(values: Mapping[str, Any]) -> Config:
    """Make a configuration from the contents of a TOML file."""
    for name in values:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            guess = f": did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"unknown setting {name!r}{guess} There are: {', '.join(FIELDS)}.")
    required = [name for name, field in FIELDS.items() if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"the setting {missing[0]!r} is missing. A run needs {', '.join(required)}.")
    types_of = hints()
    return Config(**{name: _typed(name, value, types_of[name]) for name, value in values.items()})


def from_file(path: Path) -> Config:
    """Read a TOML file with the settings of a run."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}. Write one with: bsam configs digits/bsam > {path}")
    try:
        return from_mapping(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are
        raise ValueError(f"{path}: {error}") from error


def override(config: Config, changes: Iterable[str]) -> Config:
    """Apply changes written as `key=value`: numbers, true, false, null, lists like [1, 2], or text."""
    values = dataclasses.asdict(config)
    for change in changes:
        name, sign, text = change.partition("=")
        if not sign:
            raise ValueError(f"{change!r} is not of the form key=value, like lr=0.1.")
        values[name.strip()] = _parsed(text.strip())
    return from_mapping(values)


def _parsed(text: str) -> Any:
    for parse in (json.loads, float):
        with contextlib.suppress(ValueError):
            return parse(text)
    return text.strip("'\"")


# ------------------------------------------------------------------ types


def what_fits(hint: Any) -> str:
    """Describe the values that a setting of this type may have."""
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case typing.Literal:
            return f"one of {', '.join(arguments)}"
        case types.UnionType:
            return f"{what_fits(arguments[0])}, or null"
        case origin if origin is tuple:
            return "a list of whole numbers, like [100, 120]"
    examples = {int: "a whole number, like 180", float: "a finite number, like 0.1", bool: "true or false", str: "text"}
    return examples[hint]


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Convert `value` to the type of the setting, or raise an error that describes that type."""
    with contextlib.suppress(TypeError, OverflowError):
        return _converted(value, hint)
    raise ValueError(f"{name}={value!r} must be {what_fits(hint)} ({name} is: {explanations()[name]}).")


def _converted(value: Any, hint: Any) -> Any:
    """Convert `value` to `hint`, or raise a TypeError."""
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case typing.Literal if value in arguments:
            return value
        case types.UnionType:
            return None if value is None else _converted(value, arguments[0])
        case origin if origin is tuple and isinstance(value, list | tuple):
            return tuple(_converted(item, arguments[0]) for item in value)
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if hint in (int, bool, str) and type(value) is hint:
        return value
    raise TypeError


# ------------------------------------------------------------------ writing


def to_toml(config: Config, *, explained: bool = False) -> str:
    """Write the settings that differ from their defaults as TOML; `explained` adds a comment to each."""
    lines = {
        name: f"{name} = {toml_value(getattr(config, name))}"
        for name, field in FIELDS.items()
        if getattr(config, name) != field.default
    }
    if explained:
        width = max(map(len, lines.values()))
        lines = {name: f"{line:<{width}}  # {explanations()[name]}" for name, line in lines.items()}
    return "\n".join(lines.values()) + "\n"


def toml_value(value: Any) -> str:
    """Write text, a number, a boolean or a list as TOML, which has the same form as JSON."""
    return json.dumps(value, ensure_ascii=False)
