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
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from bsam.files import Settings, naming, read_file, write_file
from bsam.interrupts import Restored, deferred, interruptible
from bsam.modules import clean_names, named_buffers, named_parameters, preserved
from bsam.posterior.base_model import FrozenWeights, Rename, new_names
from bsam.shards import cut, is_sharded, local, on_first_rank, true_anywhere, write

__all__ = ["Posterior", "read_posterior"]


class Posterior(Protocol):
    """A distribution over the weights of a model.

    All parameters of the model are in `mean`, also frozen ones; parameters that are not sampled have `std` 0. Do not
    change the tensors of a posterior: make a new posterior instead.

    A posterior `without_frozen` parameters is one of the other parameters alone. It belongs to a base model, which
    keeps its own frozen weights: they are neither copied nor written.
    """

    kind: ClassVar[str]
    """The name of the distribution in files."""
    mean: dict[str, Tensor]
    """Means by parameter name; tied weights appear once."""
    std: dict[str, Tensor]
    """Marginal standard deviations, 0 where nothing is sampled."""
    buffers: dict[str, Tensor]
    """Buffers that belong to the weights, like BatchNorm's running statistics. A model's other buffers stay."""
    frozen: frozenset[str] = frozenset()
    """The parameters in `mean` that training did not change: `requires_grad` was False, and nothing is sampled."""
    base: Mapping[str, FrozenWeights] = MappingProxyType({})
    """The parameters of the model that are not in `mean`, of a posterior `without_frozen` parameters."""

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
        """Return the KL divergence from the prior over the elements with std > 0; that of others is infinite."""

    @abstractmethod
    def temper(self, temperature: float) -> Self:
        """Return the posterior with `temperature` times the variance."""

    def _drawn_part(self, generator: torch.Generator) -> Posterior:
        """Draw the part that the next sample comes from."""
        return self

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
        found = true_anywhere([(local(std) > 0).any() for std in self.std.values()], list(self.std.values()))
        return sorted(name for name, is_sampled in zip(self.std, found, strict=True) if is_sampled)

    @property
    def parts(self) -> tuple[Posterior, ...]:
        """The distributions that this one is a mixture of: itself alone, unless it is a `Mixture`."""
        return (self,)

    @property
    def weights(self) -> tuple[float, ...]:
        """The probabilities of the parts; they sum to 1."""
        return (1.0,)

    def num_draws(self, num_samples: int) -> tuple[int, ...]:
        """Return how many of `num_samples` samples `bsam.predict` draws from each part."""
        return (num_samples,)

    @property
    def num_parameters(self) -> int:
        """The number of weights in `mean`, sampled or not."""
        return sum(tensor.numel() for tensor in self.mean.values())

    def signal_to_noise(self) -> dict[str, Tensor]:
        r"""Return the signal-to-noise ratio of every weight, by name; infinite where nothing is sampled.

        It is $\lvert \mu \rvert / \sigma$, with mean $\mu$ and standard deviation $\sigma$. A weight with a small ratio
        may as well be 0: samples of it have both signs. `DiagonalGaussian.pruned` sets such weights to 0.
        """
        return {
            name: torch.where(std > 0, self.mean[name].to(std.dtype).abs() / std, torch.inf)
            for name, std in self.std.items()
        }

    def without_frozen(self) -> Self:
        """Return the posterior of the parameters that were trained; itself if none is known to be frozen.

        A parameter is known to be frozen if the posterior was made from a model in which it needed no gradient, as the
        optimizers, `laplace` and `from_model` do. All buffers stay, because training may have changed them.
        """
        if not self.frozen:
            return self
        if len(self.frozen) == len(self.mean):
            raise ValueError(
                "all parameters of the posterior are frozen, so that nothing would be left: make the posterior while "
                "the trained parameters have requires_grad=True."
            )
        groups, settings = self._contents()
        kept = {
            group: {name: t for name, t in named.items() if group == "buffer" or name not in self.frozen}
            for group, named in groups.items()
        }
        left = {name: FrozenWeights.of(self.mean[name]) for name in sorted(self.frozen)}
        precision = settings.get("prior_precision")
        if precision is not None:
            settings["prior_precision"] = {name: p for name, p in precision.items() if name not in self.frozen}
        settings |= {"frozen": [], "base": {**self.base, **left}}
        return self._from_contents(kept, settings)

    def renamed(self, rename: Rename) -> Self:
        """Return the posterior with other names, for a model that is wrapped otherwise than in training.

        The prefixes of `torch.compile` and DistributedDataParallel are left out of all names and need no renaming. With
        the same seed the samples are the same if the new names sort as the old ones, as with a common prefix.

        Args:
            rename: A function of the old name, or a mapping from old prefixes to new ones, of which the first that fits
                is taken: `{"model.": ""}` takes a prefix away, `{"": "model."}` adds one.
        """
        groups, settings = self._contents()
        names = new_names(rename, {*self.mean, *self.base, *self.buffers})
        renamed = {group: {names[name]: t for name, t in named.items()} for group, named in groups.items()}
        if settings.get("prior_precision"):
            settings["prior_precision"] = {names[name]: p for name, p in settings["prior_precision"].items()}
        settings["frozen"] = [names[name] for name in self.frozen]
        settings["base"] = {names[name]: weights for name, weights in self.base.items()}
        return self._from_contents(renamed, settings)

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
        exception: changes inside the block are lost. (A posterior `without_frozen` parameters neither writes nor
        restores those.) Blocks can be nested: the outer sample returns when the inner
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
        check_tensors_fit("the posterior", {**self.mean, **self.base}, self.buffers, model)
        parameters = named_parameters(model)
        for name, mean in self.mean.items():
            cut(mean, parameters[name])  # raises if it is sharded otherwise than the parameter

    def check_base(self, model: nn.Module) -> None:
        """Raise a ValueError unless the frozen weights of `model` are those that the posterior was trained with.

        Their sums are compared, so that weights in another precision are accepted.
        """
        self.check_fits(model)
        parameters = named_parameters(model)
        other = [name for name, weights in self.base.items() if not weights.are_those_of(parameters[name])]
        if other:
            raise ValueError(
                "the frozen weights of the model are not those that the posterior was trained with: "
                f"{first_few(other)} differ. Load the weights of the base model first."
            )

    def save(self, path: str | os.PathLike[str], *, frozen: bool = True) -> None:
        """Write everything into one safetensors file; a file at `path` is replaced completely or not at all.

        Of a sharded model, all ranks call this, and the first rank writes. It gathers one tensor at a time.

        Args:
            path: The file.
            frozen: False leaves out the parameters that training did not change, as `without_frozen` does: the
                posterior of an adapter is about twice as large as the adapter. The file is then loaded for a base model
                that has these parameters, `bsam.load_posterior(path, model=base)`.
        """
        if not frozen:
            self.without_frozen().save(path)
            return
        groups, settings = self._contents()
        tensors = {f"{group}/{name}": tensor for group, named in groups.items() for name, tensor in named.items()}
        write = functools.partial(write_file, path, tensors, format=_FORMAT, kind=self.kind, settings=settings)
        if any(is_sharded(tensor) for tensor in tensors.values()):
            on_first_rank(tensors, lambda whole: write(whole=whole))
        else:
            write()

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, model: nn.Module | None = None, rename: Rename | None = None
    ) -> Self:
        """Read a file that `save` wrote, onto the CPU. `bsam.load_posterior` has the same arguments for every kind."""
        return read_posterior(path, (cls,), model, rename)

    def _note_layout(
        self, mean: Mapping[str, Tensor], frozen: Iterable[str] | None, base: Mapping[str, Any] | None
    ) -> None:
        """Set `base` and `frozen`, after `mean` and `std`, from the arguments of a constructor."""
        self.base = {name: FrozenWeights.from_file(name, weights) for name, weights in (base or {}).items()}
        names = clean_names([*mean, *self.base])
        both = [name for name in self.base if name in self.mean]
        if both:
            raise ValueError(f"base has {first_few(both)}, which is in the mean.")
        if frozen is None:
            found = [n for n, t in mean.items() if isinstance(t, nn.Parameter) and not t.requires_grad]
            self.frozen = frozenset(names[name] for name in found) - set(self.sampled_names)
            return
        self.frozen = frozenset(names.get(name, name) for name in frozen)
        wrong = sorted(self.frozen - (set(self.mean) - set(self.sampled_names)))
        if wrong:
            raise ValueError(f"frozen has {first_few(wrong)}, which is not in the mean, or is sampled.")

    def _layout_settings(self) -> Settings:
        """Return what a file says of frozen parameters; nothing if there are none."""
        settings: Settings = {"frozen": sorted(self.frozen)} if self.frozen else {}
        return settings | ({"base": dict(self.base)} if self.base else {})


# ------------------------------------------------------------------ tensors by name


def copied(what: str, tensors: Mapping[str, Tensor] | None, others: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Return detached copies under clean names; `others` are names of tensors of the model that are not given."""
    tensors = tensors or {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{what}[{name!r}] is of type {type(tensor).__name__}: it must be a tensor.")
    names = clean_names([*tensors, *(others or ())])
    return {names[name]: tensor.detach().clone() for name, tensor in tensors.items()}


def copied_mean(mean: Mapping[str, Tensor], base: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Return detached copies of a mean, which must be finite; `base` has the names of parameters that are not in it."""
    result = copied("mean", mean, base)
    found = true_anywhere([~local(tensor).isfinite().all() for tensor in result.values()], list(result.values()))
    bad = [name for name, is_bad in zip(result, found, strict=True) if is_bad]
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


class HasShape(Protocol):
    """A tensor, or what is known of one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""


def check_tensors_fit(
    what: str, weights: Mapping[str, HasShape], own_buffers: Mapping[str, HasShape], model: nn.Module
) -> None:
    """Raise a ValueError unless `model` has exactly these parameters, and at least these buffers."""
    parameters, buffers = named_parameters(model), named_buffers(model)
    wrong = {
        f"{what} lacks": [name for name in parameters if name not in weights],
        "the model lacks": [name for name in weights if name not in parameters]
        + [f"buffer {name}" for name in own_buffers if name not in buffers],
        "shapes differ:": [
            f"{name} {tuple(tensors[name].shape)} in {what}, {tuple(target.shape)} in the model"
            for tensors, targets in ((weights, parameters), (own_buffers, buffers))
            for name, target in targets.items()
            if name in tensors and tensors[name].shape != target.shape
        ],
    }
    if any(wrong.values()):
        said = "; ".join(f"{how} {first_few(names)}" for how, names in wrong.items() if names)
        missing, unexpected, _ = wrong.values()
        hint = " (If only prefixes differ, rename them: posterior.renamed({'old.': 'new.'}).)"
        raise ValueError(
            f"{what} does not fit the model: {said}. Nothing was changed: use the model it was made for."
            f"{hint if missing and unexpected and what == 'the posterior' else ''}"
        )


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
            part = self._posterior._drawn_part(self._generator)
            sample = part.sample(self._generator)
        self._stack.enter_context(preserved(self._model, part.mean))
        block = {id(parameter): parameter for parameter in self._model.parameters()}
        _blocks.append(block)  # tells optimizers that the model does not hold its own weights
        self._stack.callback(lambda: _blocks.__setitem__(slice(None), [b for b in _blocks if b is not block]))
        _write(self._model, sample, part.buffers)

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
            write(targets[name], tensor)
    torch.clear_autocast_cache()  # a surrounding autocast region would keep using the old weights


# ------------------------------------------------------------------ files

_FORMAT = "bsam.posterior"

AnyPosterior = TypeVar("AnyPosterior", bound=Posterior)


def read_posterior(
    path: str | os.PathLike[str],
    classes: Iterable[type[AnyPosterior]],
    model: nn.Module | None = None,
    rename: Rename | None = None,
) -> AnyPosterior:
    """Read a posterior of one of `classes`, with other names, and check that it fits a model."""
    by_kind = {cls.kind: cls for cls in classes}
    kind, tensors, settings = read_file(path, format=_FORMAT, kinds=by_kind)
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = tensor
    with naming(path):
        posterior = from_contents(by_kind[kind], groups, settings)
    posterior = posterior if rename is None else posterior.renamed(rename)
    if model is not None:
        posterior.check_base(model)
    return posterior


def from_contents(cls: type[AnyPosterior], groups: dict[str, dict[str, Tensor]], settings: Settings) -> AnyPosterior:
    """Make a posterior from the contents of a file, which is not trusted."""
    if not isinstance(settings.get("base", {}), dict):
        raise TypeError("base must be a dictionary")
    return cls._from_contents(groups, settings)
