"""The settings of a run: one frozen dataclass, read from TOML, changed by `key=value`. An unknown key stops the run."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from bsam.posterior.base import check_temperature

__all__ = [
    "Config",
    "Precision",
    "explanations",
    "from_file",
    "from_mapping",
    "override",
    "to_toml",
    "toml_value",
    "what_fits",
]

Precision = Literal["float32", "bfloat16"]
Method = Literal["sgd", "sam-sgd", "laplace", "swag", "vogn", "adam", "sam-adam", "bsam", "ivon"]


@dataclass(frozen=True)
class Config:
    """Everything that decides a run but its seed. The line below a setting is what `bsam configs` says about it."""

    dataset: str
    """data set to train on"""
    model: str
    """network"""
    method: Method
    """how to train; laplace is SAM-SGD, then Laplace's approximation at its solution"""
    epochs: int
    """passes over the training data"""
    batch_size: int
    """examples in a minibatch"""
    lr: float
    """alpha: learning rate, before the schedule"""
    beta1: float
    """beta_1: momentum, how much of the old gradient is kept"""
    prior_precision: float
    """N delta: precision of the prior; without one, N times the weight decay"""
    beta2: float = 0.999
    """beta_2: how much of the old second moment, or precision, is kept"""
    rho: float = 0.0
    """rho: how far SAM and bSAM perturb the weights"""
    damping: float = 0.1
    """gamma: added to the curvature by bSAM and VOGN"""
    splits: int = 1
    """m: parts of a minibatch that are perturbed on their own (m-sharpness)"""
    perturb_from: Literal["sample", "mean"] = "mean"
    """where bSAM's adversarial step starts: at the sample, or at the mean"""
    curvature: Literal["mean_abs", "abs_mean"] = "mean_abs"
    """how bSAM reads |g|: mean over the parts of |g|, or |mean over the parts|"""
    statistics: Literal["average", "latest"] = "average"
    """how VOGN reads beta_2, see `bsam.VOGN`"""
    sample_noise: bool = True
    """whether bSAM perturbs a sample of the weights, or (false) their mean"""
    bias_correction: bool = True
    """whether Adam, alone or below SAM, corrects the bias of its averages"""
    initial_hessian: float = 1.0
    """h_0: where IVON's estimate of the Hessian starts"""
    augmentation_factor: float = 1.0
    """multiplies N of bSAM, VOGN and IVON, for data that is augmented"""
    max_grad_norm: float | None = None
    """longest gradient, longer ones are shortened; null is no limit"""

    schedule: Literal["cosine", "steps", "constant"] = "cosine"
    """learning rate by epoch: cosine to 0, a tenth at each milestone, or constant"""
    milestones: tuple[int, ...] = ()
    """epochs at which the schedule "steps" divides the learning rate by 10"""
    warmup_epochs: int = 0
    """first epochs, in which the learning rate grows: 1/5, 2/5, ... 1 for five"""

    augment: bool = False
    """random crops with padding 4, and horizontal flips"""
    drop_last: bool = False
    """leave out the ragged last minibatch of an epoch"""
    validation: int = 0
    """training examples held out, to choose settings by"""

    swag_epochs: int = 0
    """epochs in which SWAG collects, after `epochs` of SGD"""
    swag_lr: float = 0.01
    """learning rate while SWAG collects"""
    swag_momentum: float = 0.9
    """momentum while SWAG collects"""
    swag_interval: int = 100
    """steps from one snapshot of SWAG's to the next"""
    swag_rank: int = 20
    """K: how many of the last snapshots SWAG's covariance is made of"""

    num_samples: int = 32
    """samples of the posterior that predictions are averaged over; 0 is the mean"""
    temperature: float = 1.0
    """multiplies the posterior's variance in predictions; below 1 is a cold posterior"""
    precision: Precision = "float32"
    """type of matrix products and convolutions (autocast)"""
    channels_last: bool = False
    """memory layout of images, faster on some devices"""

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


@cache
def explanations() -> dict[str, str]:
    """What each setting is, in a phrase: the line below it in `Config`."""
    (definition,) = ast.parse(inspect.getsource(Config)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for setting, line in zip(definition.body, definition.body[1:], strict=False):
        match setting, line:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = text
    return found


# ------------------------------------------------------------------ reading


def from_mapping(values: Mapping[str, Any]) -> Config:
    """Make a configuration of what a TOML file holds."""
    for name in values:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            guess = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"unknown setting {name!r}: {guess}There are: {', '.join(FIELDS)}.")
    required = [name for name, field in FIELDS.items() if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"the setting {missing[0]!r} is missing. A run needs {', '.join(required)}.")
    hints = typing.get_type_hints(Config)
    return Config(**{name: _typed(name, value, hints[name]) for name, value in values.items()})


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
    """What may be written for a setting of this type."""
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
    """`value` as the type the field asks for, or an error that says what that is."""
    with contextlib.suppress(TypeError, OverflowError):
        return _converted(value, hint)
    raise ValueError(f"{name}={value!r} must be {what_fits(hint)} ({name} is: {explanations()[name]}).")


def _converted(value: Any, hint: Any) -> Any:
    """`value` as `hint`, or a TypeError."""
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
    """The settings as TOML, those that have their default left out; on demand with what each is as a comment."""
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
    """Text, a number, a boolean or a list as TOML, which writes these as JSON does."""
    return json.dumps(value, ensure_ascii=False)
