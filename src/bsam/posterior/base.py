"""The base class of all posteriors: writes samples into a model and restores it, and saves one kind of file.

`Posterior` is the protocol of a distribution over the weights of a model, with the methods that do not depend on the
distribution. A new kind is a subclass. Tensors are in dictionaries under the names of `named_parameters()` and
`named_buffers()`, without the prefixes that wrappers add (`bsam.modules.clean_names`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from bsam.files import Settings, naming, read_file, write_file
from bsam.interrupts import Restored, deferred, interruptible
from bsam.modules import clean_names, named_buffers, named_parameters, preserved

__all__ = ["Posterior", "read_posterior"]


class Posterior(Protocol):
    """A distribution over the weights of a model.

    All parameters of the model are in `mean`, also frozen ones; parameters that are not sampled have `std` 0. Do not
    change the tensors of a posterior: make a new posterior instead.
    """

    kind: ClassVar[str]
    """The name of the distribution in files."""
    mean: dict[str, Tensor]
    """Means by parameter name; tied weights appear once."""
    std: dict[str, Tensor]
    """Marginal standard deviations, 0 where nothing is sampled."""
    buffers: dict[str, Tensor]
    """Buffers that belong to the weights, like BatchNorm's running statistics. A model's other buffers stay."""

    @abstractmethod
    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw all weights. `generator` is the only source of randomness.

        It may be on another device than the weights: numbers are drawn there and moved.
        """

    @abstractmethod
    def log_prob(self, sample: Mapping[str, Tensor]) -> Tensor:
        """Return the log-density of `sample` over elements with std > 0; -inf if another element is not at its mean."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """Return the differential entropy over the elements with std > 0; -inf if there are none."""

    @abstractmethod
    def kl(self) -> Tensor:
        """Return KL(posterior || prior) over the elements with std > 0; the KL of other elements is infinite."""

    @abstractmethod
    def temper(self, temperature: float) -> Self:
        """Return the posterior with `temperature` times the variance."""

    @abstractmethod
    def _contents(self) -> tuple[dict[str, dict[str, Tensor]], Settings]:
        """Return the contents of a file: groups of named tensors, and settings."""

    @classmethod
    @abstractmethod
    def _from_contents(cls, groups: dict[str, dict[str, Tensor]], settings: Settings) -> Self:
        """Make a posterior from the contents of a file. Files are not trusted: check as the constructor does."""

    @functools.cached_property
    def sampled_names(self) -> list[str]:
        """The parameters with any sampled element, sorted: `sample` draws them in this order.

        (A file does not keep the order of the dictionaries.)
        """
        return sorted(name for name, std in self.std.items() if bool((std > 0).any()))

    @property
    def num_parameters(self) -> int:
        """The number of weights of the model, sampled or not."""
        return sum(tensor.numel() for tensor in self.mean.values())

    def to(self, device: torch.device | str) -> Self:
        """Return the posterior with all tensors on `device`; itself if they are there already."""
        groups, settings = self._contents()
        moved = {group: {name: t.to(device) for name, t in named.items()} for group, named in groups.items()}
        if all(moved[group][name] is t for group, named in groups.items() for name, t in named.items()):
            return self
        return self._from_contents(moved, settings)

    def sampled(self, model: nn.Module, generator: torch.Generator) -> contextlib.AbstractContextManager[None]:
        """Write one sample, and the posterior's buffers, into `model` until the block ends.

        Weights and buffers are written in place. All weights and buffers of the model are restored, also after an
        exception: changes inside the block are lost. Blocks can be nested: the outer sample returns when the inner
        block ends. The optimizers of this package refuse a step inside.
        """
        return _Sampled(self, model, generator)

    def write_mean(self, model: nn.Module) -> None:
        """Write the mean, and the posterior's buffers, into `model` permanently."""
        self.check_fits(model)
        with deferred():
            _write(model, self.mean, self.buffers)

    def check_fits(self, model: nn.Module) -> None:
        """Raise a ValueError unless `model` has exactly the parameters, and at least the buffers, of the posterior."""
        parameters, buffers = named_parameters(model), named_buffers(model)
        wrong = {
            "the posterior lacks": [name for name in parameters if name not in self.mean],
            "the model lacks": [name for name in self.mean if name not in parameters]
            + [f"buffer {name}" for name in self.buffers if name not in buffers],
            "shapes differ:": [
                f"{name} {tuple(tensors[name].shape)} in the posterior, {tuple(target.shape)} in the model"
                for tensors, targets in ((self.mean, parameters), (self.buffers, buffers))
                for name, target in targets.items()
                if name in tensors and tensors[name].shape != target.shape
            ],
        }
        if any(wrong.values()):
            said = "; ".join(f"{what} {first_few(names)}" for what, names in wrong.items() if names)
            raise ValueError(
                f"the posterior does not fit the model: {said}. Nothing was changed: use the model it was made for."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything into one safetensors file; a file at `path` is replaced completely or not at all."""
        groups, settings = self._contents()
        tensors = {f"{group}/{name}": tensor for group, named in groups.items() for name, tensor in named.items()}
        write_file(path, tensors, format=_FORMAT, kind=self.kind, settings=settings)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote, onto the CPU. `bsam.load_posterior` reads every kind."""
        return read_posterior(path, (cls,))


# ------------------------------------------------------------------ tensors by name


def copied(what: str, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return detached copies under clean names."""
    tensors = tensors or {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{what}[{name!r}] is of type {type(tensor).__name__}: it must be a tensor.")
    return {short: tensors[name].detach().clone() for name, short in clean_names(tensors).items()}


def copied_mean(mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return detached copies of a mean, which must be finite."""
    result = copied("mean", mean)
    bad = [name for name, tensor in result.items() if not tensor.isfinite().all()]
    if bad:
        raise ValueError(f"the mean of {first_few(bad)} is not finite everywhere: did training diverge?")
    return result


def check_same_layout(what: str, tensors: Mapping[str, Tensor], mean: Mapping[str, Tensor]) -> None:
    """Raise unless `tensors` has the names and shapes of the mean."""
    wrong = {
        "missing:": [name for name in mean if name not in tensors],
        "unexpected:": [name for name in tensors if name not in mean],
        "of another shape:": [
            f"{name} {tuple(tensors[name].shape)} instead of {tuple(mean[name].shape)}"
            for name in mean
            if name in tensors and tensors[name].shape != mean[name].shape
        ],
    }
    if any(wrong.values()):
        said = "; ".join(f"{how} {first_few(names)}" for how, names in wrong.items() if names)
        raise ValueError(f"{what} must have the names and shapes of the mean; {said}.")


def check_generator(generator: torch.Generator) -> None:
    """Accept nothing but a generator: a seed, or None, would hide where the randomness comes from."""
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator={generator!r} must be a torch.Generator: write torch.Generator().manual_seed(0) and use the "
            "same generator for each draw."
        )


def check_temperature(temperature: float) -> None:
    """Accept finite numbers >= 0."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature={temperature} must be a finite number >= 0: it multiplies the variance.")


def first_few(names: list[str]) -> str:
    """Join the first three of a list of names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ------------------------------------------------------------------ weights of a model


_blocks: list[Mapping[int, Tensor]] = []
"""The model's parameters by id, for each open block of `Posterior.sampled`."""


class _Sampled(Restored):
    """`Posterior.sampled`."""

    def __init__(self, posterior: Posterior, model: nn.Module, generator: torch.Generator) -> None:
        self._posterior, self._model, self._generator = posterior, model, generator
        self._stack = contextlib.ExitStack()

    def _change(self) -> None:
        self._posterior.check_fits(self._model)
        with interruptible():
            sample = self._posterior.sample(self._generator)
        self._stack.enter_context(preserved(self._model))
        block = {id(parameter): parameter for parameter in self._model.parameters()}
        _blocks.append(block)  # tells optimizers that the model does not hold its own weights
        self._stack.callback(lambda: _blocks.__setitem__(slice(None), [b for b in _blocks if b is not block]))
        _write(self._model, sample, self._posterior.buffers)

    def _restore(self) -> None:
        self._stack.close()


def holds_sample(parameters: Iterable[Tensor]) -> bool:
    """Whether any of these parameters is in a model inside a block of `Posterior.sampled`."""
    return bool(_blocks) and any(id(parameter) in block for parameter in parameters for block in _blocks)


@torch.no_grad()
def _write(model: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    # In place, because optimizers, views and captured graphs keep the addresses.
    for tensors, targets in ((parameters, named_parameters(model)), (buffers, named_buffers(model))):
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)
    torch.clear_autocast_cache()  # a surrounding autocast region would keep using the old weights


# ------------------------------------------------------------------ files

_FORMAT = "bsam.posterior"

AnyPosterior = TypeVar("AnyPosterior", bound=Posterior)


def read_posterior(path: str | os.PathLike[str], classes: Iterable[type[AnyPosterior]]) -> AnyPosterior:
    """Read a posterior of one of `classes`."""
    by_kind = {cls.kind: cls for cls in classes}
    kind, tensors, settings = read_file(path, format=_FORMAT, kinds=by_kind)
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = tensor
    with naming(path):
        return by_kind[kind]._from_contents(groups, settings)
