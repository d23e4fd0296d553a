"""Base class of the optimizers that learn a diagonal Gaussian over the weights: noise, samples and the posterior."""

from __future__ import annotations

import contextlib
import statistics
import warnings
from collections.abc import Mapping, Sequence, Sized
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from bsam.batches import num_examples
from bsam.interrupts import Restored
from bsam.modules import BufferSnapshot, LossFunction, all_buffers
from bsam.noise import standard_normal
from bsam.optim import diagnosis, options
from bsam.optim.base import ProbingOptimizer
from bsam.optim.diagnosis import Diagnosis, Finding
from bsam.optim.probing import MeanSnapshot, Slot
from bsam.posterior import DiagonalGaussian
from bsam.shards import like, part_of, sum_parts

__all__ = ["GaussianOptimizer", "posterior_std"]


def posterior_std(s: Tensor, N: float) -> Tensor:
    """The posterior's standard deviation sigma = 1 / sqrt(N s)."""
    return (N * s).rsqrt_()


class GaussianOptimizer(ProbingOptimizer):
    """Base class of optimizers whose weights are the mean of a Gaussian.

    A subclass defines the precision of the Gaussian (`_unit_precision`), and the share of it that a step keeps
    (`_share_kept`). A group with `sample=False` gets no noise, and its posterior is a point.
    """

    whole_options: ClassVar[tuple[str, ...]] = (
        *ProbingOptimizer.whole_options,
        "num_data",
        "augmentation_factor",
        "seed",
    )
    rates: ClassVar[tuple[str, ...]] = ("lr", "prior_precision", "betas")
    group_aliases: ClassVar[tuple[str, ...]] = ("weight_decay",)

    def _reset(self) -> None:
        super()._reset()
        self._draws = 0  # the number of samples that sampled() has drawn
        self._means: dict[Tensor, Slot] | None = None  # hold the weights, while sampled() has a sample in the model

    # ------------------------------------------------------------------ the method, given by a subclass

    def _unit_precision(self, slot: Slot) -> Tensor:
        """The posterior's precision per example, s = 1 / (N sigma^2)."""
        raise NotImplementedError

    def _posterior_precision(self, slot: Slot) -> Tensor:
        """Return the s of the posterior and of the noise, if it is not that of the steps."""
        return self._unit_precision(slot)

    def _is_sampled(self, slot: Slot) -> bool:
        """Whether the weights of a slot have noise. If not, their posterior is a point."""
        return bool(slot.group["sample"])

    def _noise_precision(self, slot: Slot) -> Tensor | None:
        return self._posterior_precision(slot) if self._is_sampled(slot) else None

    def _share_kept(self, group: dict[str, Any]) -> Any:
        """Return the share of the precision that a step keeps: a number, or a tensor if the options are tensors."""
        return group["betas"][1]

    def _given_precision(self, group: dict[str, Any]) -> Any:
        """Return the part of the precision that the settings give, delta + gamma."""
        return self._letters(group)["delta"] + group.get("damping", 0.0)

    def _learned_precision(self, slot: Slot) -> Tensor:
        """Return the part of the precision that is learned from gradients."""
        return self._unit_precision(slot).sub(self._given_precision(slot.group))

    def _sizes(self, slot: Slot) -> dict[str, Tensor]:
        s = self._unit_precision(slot)
        sizes = {"step": diagnosis.full_rate(slot.group) * slot.state["momentum"] / s}
        noise_precision = self._noise_precision(slot)
        if noise_precision is not None:
            sizes["noise"] = posterior_std(noise_precision, self.effective_num_data)
        return sizes

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        for name in self.rates:
            if name != "betas":
                options.non_negative(name, group[name])
        options.betas(group["betas"])
        options.effective_num_data(group["num_data"], group["augmentation_factor"])
        options.one_of("sample", group["sample"], (True, False))
        options.integer("seed", group["seed"])

    def _checked_group(self, param_group: dict[str, Any]) -> dict[str, Any]:
        if isinstance(param_group, dict) and "weight_decay" in param_group:
            group = {**self.defaults, **param_group}
            given = param_group.get("prior_precision"), param_group["weight_decay"]
            prior = options.prior(*given, group["num_data"], group["augmentation_factor"])
            rest = {key: value for key, value in param_group.items() if key != "weight_decay"}
            param_group = {**rest, "prior_precision": prior}
        return super()._checked_group(param_group)

    def _fresh_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return {
            "step": torch.zeros((), dtype=torch.int64, device=parameter.device),
            "momentum": torch.zeros_like(parameter, dtype=dtype),
        }

    @property
    def effective_num_data(self) -> float:
        """The number of examples $N$, which is `num_data * augmentation_factor`."""
        return float(self._option("num_data") * self._option("augmentation_factor"))

    def _letters(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a group under the letters that the algorithms share."""
        return {
            "alpha": group["lr"],
            "beta1": group["betas"][0],
            "beta2": self._share_kept(group),
            "delta": group["prior_precision"] / self.effective_num_data,
        }

    def _theta(self, slot: Slot, split: int) -> Tensor:
        s = self._noise_precision(slot)
        return slot.mean if s is None else self._sample(slot, s, split)

    def _sample(self, slot: Slot, s: Tensor, draw: int) -> Tensor:
        """Draw weights from N(mean, 1 / (N s))."""
        e = standard_normal(
            self._option("seed"),
            slot.state["step"],
            draw,
            slot.index,
            slot.parameter.shape,
            device=slot.parameter.device,
            dtype=slot.dtype,
            part=part_of(slot.parameter),
        )
        theta = torch.addcmul(slot.mean.to(slot.dtype), e, posterior_std(s, self.effective_num_data))
        if slot.padding is not None:
            theta[slot.padding] = slot.mean[slot.padding].to(slot.dtype)
        return theta

    # ------------------------------------------------------------------ the posterior

    def posterior(self, model: nn.Module | None = None) -> DiagonalGaussian:
        r"""Return the Gaussian over the weights, with the prior that was used.

        Weights without noise are points: those that are frozen, groups with `sample=False`, the padding of an embedding
        (`padding_idx`) if the optimizer was made with `module=`, and bSAM's biases and scales of norms unless
        `max_noise=None`. Warns if more than a tenth of the precision is still its starting
        value: after $t$ steps that each keep a share $\beta_2$ of it, if $\beta_2^t > 0.1$.

        Args:
            model: The model, for the names of its parameters and for its buffers. Not needed if the optimizer was
                made with `module=`.
        """
        model = self._model_or_own(model)
        if self.state and not self._trained():
            raise RuntimeError(
                "all parameters are frozen, and frozen weights are points: take the posterior before "
                "model.requires_grad_(False), or write model.requires_grad_(True) first."
            )
        slots = [slot for slot in self._slots() if self._is_sampled(slot)]
        initial, steps = self._start_left(slots)
        if initial > 0.1:
            warnings.warn(
                f"after {steps} steps {initial:.0%} of the precision is still its starting value: train longer, or use "
                "a smaller beta2 (0.99 forgets it in 230 steps).",
                stacklevel=2,
            )
        return DiagonalGaussian.from_model(
            model,
            {slot.parameter: like(slot.parameter, self._std(slot)) for slot in slots},
            prior_precision={s.parameter: float(s.group["prior_precision"]) for s in slots},
        )

    def _std(self, slot: Slot) -> Tensor:
        std = posterior_std(self._posterior_precision(slot), self.effective_num_data)
        if slot.padding is not None:
            std[slot.padding] = 0
        return std

    def _start_left(self, slots: list[Slot]) -> tuple[float, int]:
        """Return the largest share of the precision that is still its starting value, and after how many steps."""
        taken = [(int(slot.state["step"]), float(self._share_kept(slot.group))) for slot in slots]
        taken = [each for each in taken if each[0]] or taken[:1]  # parameters that no gradient reached do not count
        steps, kept = max(taken, key=lambda each: each[1] ** each[0], default=(1, 0.0))
        return kept**steps, steps

    def diagnose(
        self, train_set: Sized | None = None, loss_fn: LossFunction | None = None, batch: Sequence[Any] = ()
    ) -> Diagnosis:
        """Say what the state tells about the settings, in sentences with numbers and what to change.

        `print(optimizer.diagnose())` shows all findings, `optimizer.diagnose().problems` are those beyond their limits.
        Weights and state do not change by asking, and one number per tensor is read from the device.

        Args:
            train_set: The training set, or the `DataLoader` of it, to compare its length with `num_data`. A tuple such
                as (inputs, labels), or a dictionary, of tensors counts by their rows.
            loss_fn: Returns the loss of `batch`: compares it at samples of the weights with that at their mean. It
                moves BatchNorm's running statistics, and they are only put back if the optimizer has `module=`.
            batch: What `loss_fn` is called with.
        """
        self._refuse_if_away("diagnose the optimizer")
        with torch.no_grad():
            sampled = [slot for slot in self._slots() if self._is_sampled(slot)]
            N = self.effective_num_data
            strongest = max(float(group["prior_precision"]) for group in self.param_groups)
            findings = [*self._ratios(self._measured_slots()), diagnosis.weight_decay(strongest, N)]
            if sampled:
                share, steps = self._start_left(sampled)
                findings.append(diagnosis.start_left(share, steps))
                if steps:  # before the first step nothing is learned
                    findings.append(diagnosis.prior_share(self._prior_share(sampled)))
                findings += self._own_findings()
            if skipped := self.skipped_steps:
                findings.append(diagnosis.skipped(skipped, self._num_steps))
            if train_set is not None:
                findings.append(diagnosis.num_data_matches(float(self._option("num_data")), _num_examples(train_set)))
            if loss_fn is not None:
                findings.append(diagnosis.sampled_loss(*self._losses(loss_fn, batch)))
        return Diagnosis(tuple(findings))

    def _ratios(self, slots: list[Slot]) -> list[Finding]:
        findings = super()._ratios(slots)
        if self._most_examples > 1:  # without a batch, a step counts as one
            findings.append(diagnosis.batch_fits(float(self._option("num_data")), self._most_examples))
        return findings

    def _own_findings(self) -> list[Finding]:
        """Return findings that only this method has."""
        return []

    def _prior_share(self, slots: list[Slot]) -> float:
        """Return the share of prior and damping in the mean precision, apart from its starting value."""
        given = sum(float(self._given_precision(slot.group)) * slot.parameter.numel() for slot in slots)
        sums = [self._learned_precision(slot).sum(dtype=torch.float64) for slot in slots]
        learned = sum(float(each) for each in sum_parts(sums, [slot.parameter for slot in slots]))
        return given / (given + max(learned, 0.0)) if given else 0.0

    def _losses(self, loss_fn: LossFunction, batch: Sequence[Any]) -> tuple[float, float]:
        """Return the loss at the mean, and the mean loss at four samples. Buffers and random states do not change."""
        devices = {p.device.index for group in self.param_groups for p in group["params"] if p.is_cuda}
        buffers = BufferSnapshot(all_buffers(self.module) if self.module is not None else ())
        with torch.random.fork_rng(devices=sorted(devices)):
            try:
                at_mean = float(loss_fn(*batch))
                at_samples = []
                for draw in range(4):
                    with self.sampled(draw):
                        at_samples.append(float(loss_fn(*batch)))
            finally:
                buffers.restore()
        return at_mean, statistics.fmean(at_samples)

    def sampled(self, draw: int | None = None) -> contextlib.AbstractContextManager[None]:
        """Write one sample of the posterior into the model until the block ends; then restore the mean.

        Blocks may be nested: an inner block uses another sample. Frozen parameters do not change.

        Args:
            draw: Number of the sample: the same number at the same step is the same sample. By default the next number.
        """
        return _Sampled(self, draw)


def _num_examples(train_set: Sized) -> int:
    """Return the number of examples of a data set, of what a loader draws from on all ranks, or of tensors."""
    replicas = 1
    if isinstance(train_set, DataLoader):
        replicas = getattr(train_set.sampler, "num_replicas", 1)
        drawn: Any = train_set.dataset if isinstance(train_set.dataset, IterableDataset) else train_set.sampler
        train_set = drawn
    if isinstance(train_set, tuple | Mapping):
        return num_examples(train_set)
    if isinstance(train_set, list) and all(isinstance(each, Tensor) for each in train_set):
        raise ValueError("train_set is a list of tensors: write a tuple, (inputs, labels), or range(num_examples).")
    try:
        return replicas * len(train_set)
    except TypeError as error:
        raise ValueError(
            f"train_set is a {type(train_set).__name__} and has no length: write range(num_examples), or leave it out."
        ) from error


class _Sampled(Restored):
    """`GaussianOptimizer.sampled`."""

    def __init__(self, optimizer: GaussianOptimizer, draw: int | None) -> None:
        self._optimizer, self._draw = optimizer, draw

    def _change(self) -> None:
        optimizer, draw = self._optimizer, self._draw
        self._slots: list[Slot] = []
        self._outermost = False
        if optimizer._means is None:
            optimizer._refuse_if_away("sample the posterior")
        if draw is not None and draw < 0:
            raise ValueError(f"draw={draw} must be >= 0: it numbers the samples of the posterior.")
        if draw is None:
            draw, optimizer._draws = optimizer._draws, optimizer._draws + 1
        self._slots = optimizer._slots()  # hold the weights to restore: the mean, or the outer sample
        if optimizer._means is None:
            optimizer._means = {slot.parameter: slot for slot in self._slots}
            optimizer._away = "inside sampled()"
            self._outermost = True
        with torch.no_grad():
            for slot in self._slots:
                at_mean = optimizer._means.get(slot.parameter, slot)
                if optimizer._is_sampled(slot):
                    s = optimizer._posterior_precision(at_mean)
                    slot.weights.copy_(optimizer._sample(at_mean, s, -1 - draw))
                else:
                    slot.weights.copy_(at_mean.mean)
        torch.clear_autocast_cache()

    def _restore(self) -> None:
        with torch.no_grad():
            MeanSnapshot(self._slots, self._optimizer.module).restore()
        torch.clear_autocast_cache()
        if self._outermost:
            self._optimizer._means, self._optimizer._away = None, None
