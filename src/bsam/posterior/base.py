"""What all posteriors share: writing weights into a model and taking them out again, and one kind of file.

`Posterior` says what a distribution over the weights of a model offers, and has the bodies that do not depend on the
distribution; a new kind subclasses it. Tensors are kept in dictionaries under the names of `named_parameters()` and
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

    All parameters of the model are in `mean`, frozen ones too; those that are not sampled have `std` 0. Once it is made
    its tensors are not to be changed: make another of changed ones.
    """

    kind: ClassVar[str]
    """The name of the distribution in files."""
    mean: dict[str, Tensor]
    """By name of the parameter; tied weights appear once."""
    std: dict[str, Tensor]
    """Marginal standard deviations, 0 where nothing is sampled."""
    buffers: dict[str, Tensor]
    """Buffers that belong to the weights, like BatchNorm's statistics. A model's other buffers stay as they are."""

    @abstractmethod
    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw all weights. Only `generator` provides randomness: its state decides the sample.

        It may live on another device than the weights: numbers are drawn there and moved.
        """

    @abstractmethod
    def log_prob(self, sample: Mapping[str, Tensor]) -> Tensor:
        """The log-density of `sample` over the elements with std > 0; -inf if another element is not at its mean."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """The differential entropy over the elements with std > 0; -inf if there is none."""

    @abstractmethod
    def kl(self) -> Tensor:
        """The divergence KL(posterior || prior) over the elements with std > 0; that of the others is infinite."""

    @abstractmethod
    def temper(self, temperature: float) -> Self:
        """The posterior with `temperature` times the variance."""

    @abstractmethod
    def _contents(self) -> tuple[dict[str, dict[str, Tensor]], Settings]:
        """What `save` writes: groups of named tensors, and settings."""

    @classmethod
    @abstractmethod
    def _from_contents(cls, groups: dict[str, dict[str, Tensor]], settings: Settings) -> Self:
        """The inverse of `_contents`. Files are not trusted: it checks as the constructor does."""

    @functools.cached_property
    def sampled_names(self) -> list[str]:
        """The parameters with any element that is sampled, sorted: `sample` draws them in this order.

        The order of the dictionaries would not do, for a file does not keep it.
        """
        return sorted(name for name, std in self.std.items() if bool((std > 0).any()))

    @property
    def num_parameters(self) -> int:
        """How many weights the model has, sampled or not."""
        return sum(tensor.numel() for tensor in self.mean.values())

    def to(self, device: torch.device | str) -> Self:
        """The posterior with all tensors on `device`; itself if they are there."""
        groups, settings = self._contents()
        moved = {group: {name: t.to(device) for name, t in named.items()} for group, named in groups.items()}
        if all(moved[group][name] is t for group, named in groups.items() for name, t in named.items()):
            return self
        return self._from_contents(moved, settings)

    def sampled(self, model: nn.Module, generator: torch.Generator) -> contextlib.AbstractContextManager[None]:
        """Put one sample, and the posterior's buffers, into `model` until the block ends.

        Weights and buffers are written in place, and all of the model's come back however the block ends: what is
        written to them inside is lost. Blocks nest: the outer sample returns when the inner block ends. The
        optimizers of this package take no step inside.
        """
        return _Sampled(self, model, generator)

    def write_mean(self, model: nn.Module) -> None:
        """Put the mean, and the posterior's buffers, into `model` for good."""
        self.check_fits(model)
        with deferred():
            _write(model, self.mean, self.buffers)

    def check_fits(self, model: nn.Module) -> None:
        """Raise a ValueError unless `model` has the parameters of the posterior, and its buffers among others."""
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
                f"the posterior does not fit the model: {said}. Nothing was changed: give the model it was made for."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything into one safetensors file; a file that is there is replaced in one go or stays."""
        groups, settings = self._contents()
        tensors = {f"{group}/{name}": tensor for group, named in groups.items() for name, tensor in named.items()}
        write_file(path, tensors, format=_FORMAT, kind=self.kind, settings=settings)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote, onto the CPU. `bsam.load_posterior` reads every kind."""
        return read_posterior(path, (cls,))


# ------------------------------------------------------------------ tensors by name


def copied(what: str, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Detached copies under clean names."""
    tensors = tensors or {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{what}[{name!r}] is of type {type(tensor).__name__}: it must be a tensor.")
    return {short: tensors[name].detach().clone() for name, short in clean_names(tensors).items()}


def copied_mean(mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detached copies of a mean, which must be finite."""
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
            f"generator={generator!r} must be a torch.Generator: write torch.Generator().manual_seed(0) and hand the "
            "same one to each draw."
        )


def check_temperature(temperature: float) -> None:
    """Accept finite numbers >= 0."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature={temperature} must be a finite number >= 0: it multiplies the variance.")


def first_few(names: list[str]) -> str:
    """The first three of a list of names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ------------------------------------------------------------------ weights of a model


_blocks: list[Mapping[int, Tensor]] = []
"""For each block of `Posterior.sampled` that is open: its model's parameters by id."""


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
        _blocks.append(block)  # lets optimizers see that the model does not hold its own weights
        self._stack.callback(lambda: _blocks.__setitem__(slice(None), [b for b in _blocks if b is not block]))
        _write(self._model, sample, self._posterior.buffers)

    def _restore(self) -> None:
        self._stack.close()


def holds_sample(parameters: Iterable[Tensor]) -> bool:
    """Whether any of these is inside a block of `Posterior.sampled`."""
    return bool(_blocks) and any(id(parameter) in block for parameter in parameters for block in _blocks)


@torch.no_grad()
def _write(model: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    # In place: optimizers, views and captured graphs hold on to the addresses.
    for tensors, targets in ((parameters, named_parameters(model)), (buffers, named_buffers(model))):
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)
    torch.clear_autocast_cache()  # a surrounding autocast region would go on with the old weights


# ------------------------------------------------------------------ files

_FORMAT = "bsam.posterior"

AnyPosterior = TypeVar("AnyPosterior", bound=Posterior)


def read_posterior(path: str | os.PathLike[str], classes: Iterable[type[AnyPosterior]]) -> AnyPosterior:
    """Read a posterior that is of one of `classes`."""
    by_kind = {cls.kind: cls for cls in classes}
    kind, tensors, settings = read_file(path, format=_FORMAT, kinds=by_kind)
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = tensor
    with naming(path):
        return by_kind[kind]._from_contents(groups, settings)
