"""What the optimizers share that learn a diagonal Gaussian over the weights: noise, samples, posterior and state."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bsam.interrupts import Restored
from bsam.noise import standard_normal
from bsam.optim import options
from bsam.optim.base import ProbingOptimizer, write, write_means
from bsam.optim.probing import Slot
from bsam.posterior import DiagonalGaussian

__all__ = ["GaussianOptimizer"]


class GaussianOptimizer(ProbingOptimizer):
    """Base of the optimizers whose weights are the mean of a Gaussian.

    A subclass gives `_probe` and `_update`, the width (`_posterior_std`, `_noise_precision`) and how long its start
    lasts (`_kept`). A group may say `sample=False`: it gets no noise, and its posterior is a point.
    """

    whole_options = (*ProbingOptimizer.whole_options, "num_data", "augmentation_factor", "seed")

    def _reset(self) -> None:
        super()._reset()
        self._draws = 0  # samples taken by sampled()
        self._means: dict[Tensor, Tensor] | None = None  # the weights, while sampled() holds a sample in the model

    # ------------------------------------------------------------------ the method, given by a subclass

    def _posterior_std(self, slot: Slot) -> Tensor:
        """The posterior's standard deviation."""
        raise NotImplementedError

    def _noise_precision(self, slot: Slot) -> Tensor:
        """1 / (N sigma^2) for the noise of a step's first pass; infinite where it has none."""
        raise NotImplementedError

    def _kept(self, group: dict[str, Any]) -> Any:
        """Which share of the precision a step keeps: a number, or a 0-dim tensor if the group's options are."""
        raise NotImplementedError

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        for name in ("lr", "prior_precision", "damping"):
            options.non_negative(name, group[name])
        options.betas(group["betas"])
        options.positive("num_data", group["num_data"], "It is the number of training examples, len(train_set).")
        options.positive("augmentation_factor", group["augmentation_factor"])
        options.one_of("sample", group["sample"], (True, False))
        options.integer("seed", group["seed"])

    def _fresh_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return {
            "step": torch.zeros((), dtype=torch.int64, device=parameter.device),
            "momentum": torch.zeros_like(parameter, dtype=dtype),
        }

    @property
    def effective_num_data(self) -> float:
        """N = num_data * augmentation_factor."""
        return float(self._option("num_data") * self._option("augmentation_factor"))

    def _rates(self, group: dict[str, Any]) -> dict[str, Any]:
        """The options of a group by the letters of the algorithms."""
        return {
            "alpha": group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"],
            "beta1": group["betas"][0],
            "beta2": self._kept(group),
            "delta": group["prior_precision"] / self.effective_num_data,
            "gamma": group["damping"],
        }

    def _theta(self, slot: Slot, split: int) -> Tensor:
        return self._sample(slot, split)

    def _sample(self, slot: Slot, split: int) -> Tensor:
        """Weights from N(mean, sigma^2); the mean for a group that is not sampled."""
        if not slot.group["sample"]:
            return slot.mean
        e = standard_normal(
            self._option("seed"),
            slot.state["step"],
            split,
            slot.index,
            slot.parameter.shape,
            device=slot.parameter.device,
            dtype=slot.dtype,
        )
        return torch.addcmul(slot.mean.to(slot.dtype), e, self._posterior_std(slot))

    def _move(self, moves: Iterable[tuple[Slot, Tensor, dict[str, Tensor]]], accept: Tensor | None) -> None:
        """Write new weights and state, and count the step, unless `accept` is given and false.

        A formula that raises leaves everything as it was: the caller puts the weights back, of which the slots have a
        copy, and the state is written after the last formula.
        """
        computed = []
        for slot, mean, state in moves:
            write(slot.parameter, mean, accept)
            computed.append((slot, state))
        for slot, state in computed:
            for name, value in {**state, "step": slot.state["step"] + 1}.items():
                write(slot.state[name], value, accept)

    def _keep(self, slots: list[Slot], accept: Tensor | None = None) -> None:
        starts = any(slot.parameter not in self.state for slot in slots)
        if accept is not None and starts and not bool(accept):  # read from the device in a first step only
            return
        for slot in slots:
            self.state[slot.parameter] = slot.state

    # ------------------------------------------------------------------ the posterior

    def posterior(self, model: nn.Module | None = None) -> DiagonalGaussian:
        """The Gaussian over the weights, with the prior that was used.

        Frozen parameters and groups with `sample=False` are points. Warns while a tenth or more of the precision is
        still its starting value, that is, where steps keep a share beta2 of it, while beta2^t > 0.1.

        Args:
            model: The model, for the names of its parameters and for its buffers. Not needed if the optimizer was
                made with `module=`.
        """
        model = self._model_or_own(model)
        slots = [slot for slot in self._slots() if slot.group["sample"]]
        taken = [(int(slot.state["step"]), float(self._kept(slot.group))) for slot in slots]
        taken = [each for each in taken if each[0]] or taken[:1]  # parameters that no gradient reached do not count
        steps, kept = max(taken, key=lambda each: each[1] ** each[0], default=(0, 0.0))
        left = kept**steps
        if left > 0.1:
            warnings.warn(
                f"after {steps} steps {left:.0%} of the precision is still its starting value: train longer, or with a "
                "smaller beta2 (0.99 forgets it in 230 steps).",
                stacklevel=2,
            )
        return DiagonalGaussian.from_model(
            model,
            {s.parameter: self._posterior_std(s) for s in slots},
            prior_precision={s.parameter: float(s.group["prior_precision"]) for s in slots},
        )

    def sampled(self, draw: int | None = None) -> contextlib.AbstractContextManager[None]:
        """Put one sample of the posterior into the model; the mean comes back when the block ends.

        Blocks may be nested: an inner one replaces the sample by another. Frozen parameters stay as they are.

        Args:
            draw: Number of the sample: the same number at the same step is the same sample. By default the next one.
        """
        return _Sampled(self, draw)

    # ------------------------------------------------------------------ torch.optim's contract

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        super()._check_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            if key in state_dict["state"]:
                self._check_shapes(key, state_dict["state"][key], parameter)
                self._check_state(key, state_dict["state"][key])

    def _check_shapes(self, key: Any, state: dict[str, Any], parameter: Tensor) -> None:
        """Raise unless the loaded state of a parameter has what a fresh one has, in its shapes."""
        for name, like in self._fresh_state(parameter, self.param_groups[0]).items():
            if name not in state:
                raise ValueError(f"the loaded state of parameter {key} has no {name!r}: is it another optimizer's?")
            value = state[name]
            if name == "step" and isinstance(value, int | float):
                value = torch.tensor(value)  # as older versions of torch saved it
            if not isinstance(value, Tensor) or value.shape != like.shape:
                seen = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"the loaded {name!r} of parameter {key} is {seen}: it must be {tuple(like.shape)}.")
            if name == "step" and value < 0:
                raise ValueError(f"the loaded step of parameter {key} is {value.item()}: it must be >= 0.")

    def _check_state(self, key: Any, state: dict[str, Any]) -> None:
        """Raise unless the loaded values of a parameter's state are possible."""
        if not bool(state["momentum"].isfinite().all()):
            raise ValueError(f"the loaded momentum of parameter {key} is not finite everywhere.")

    def _restore_types(self, parameter: Tensor, saved: dict[str, Any]) -> None:
        # torch casts what it loads to the parameter's type; a bfloat16 average with beta2 = 0.999 never moves.
        fresh = self._fresh_state(parameter, self.param_groups[0])
        self.state[parameter] = {k: torch.as_tensor(saved[k]).to(v, copy=True) for k, v in fresh.items()}


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
        self._slots = optimizer._slots()  # what to put back: the mean, or the outer sample
        if optimizer._means is None:
            optimizer._means = {slot.parameter: slot.mean for slot in self._slots}
            optimizer._away = "inside sampled()"
            self._outermost = True
        with torch.no_grad():
            for slot in self._slots:
                mean = optimizer._means.get(slot.parameter, slot.mean)
                slot.parameter.copy_(optimizer._sample(dataclasses.replace(slot, mean=mean), -1 - draw))
        torch.clear_autocast_cache()

    def _restore(self) -> None:
        with torch.no_grad():
            write_means(self._slots)
        torch.clear_autocast_cache()
        if self._outermost:
            self._optimizer._means, self._optimizer._away = None, None
