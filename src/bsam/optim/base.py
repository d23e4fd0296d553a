"""The step that all optimizers here share: split the batch, probe each part, average, update.

A *probe* works on one sub-batch and asks for gradients at weights of its choice, through a function
`grad_at(weights) -> gradients`. Its results are *averaged* over sub-batches and ranks, and the method's *update* turns
the averages into new weights. Sub-batches are probed in a loop, or all together (`bsam.optim.together`). Only this file
writes perturbed weights into a model, and it always removes them again:

- a step completes, or it leaves weights, gradients, state and the buffers of `module=` bit-identical;
- an interrupt (Ctrl-C) is raised in the user's loss function, in communication, or after the step;
- a loss or gradient that is not finite never reaches weights or state;
- weights are written in place: addresses, leaf status and `requires_grad` do not change.

After a step `p.grad` holds the gradient that was applied: averaged over splits and ranks, and clipped. Before the next
step `p.grad` must be this gradient, zero, or None. Parameters of other optimizers keep their `.grad`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bsam import batch_norm as bn
from bsam.batches import split_batch
from bsam.distributed import average_over_ranks, broadcast, rank_of
from bsam.executor import Executor
from bsam.gradients import PerExample
from bsam.interrupts import deferred
from bsam.modules import (
    BufferSnapshot,
    GradientSnapshot,
    LossFunction,
    all_buffers,
    restored_on_failure,
    running_statistics,
)
from bsam.optim import options
from bsam.optim.arithmetic import all_finite, clip_gradient, write
from bsam.optim.base_step import BaseStep
from bsam.optim.checked import CheckedOptimizer, slots_of
from bsam.optim.diagnosis import CHECKED_AT, FEWEST_WEIGHTS, SIZE_RULES, Diagnosis, Finding, growth, ratio
from bsam.optim.leftover import not_left, note_as_left
from bsam.optim.probing import GradAt, Gradients, MeanSnapshot, Slot, Tally, emptied
from bsam.optim.together import Parts, obstacle_to_stacking, probe_together
from bsam.posterior import PointMass, Posterior
from bsam.posterior.base import holds_sample
from bsam.torch_private import own_buffers

__all__ = ["ProbingOptimizer"]

Probed = tuple[list[Tensor], dict[str, list[Tensor]]]
"""The mean loss of each pass, and the averages by name, one tensor per slot."""


class ProbingOptimizer(CheckedOptimizer):
    """Base class of optimizers that evaluate gradients at several points before they update the weights.

    A method is a subclass. It declares which of its options are `rates`, and defines the initial state of a parameter
    (`_fresh_state`), the gradients that it needs (`_probe`), the update (`_update`), and the checks of its options
    (`_check_group`). Loop, vmap, ranks and `bsam.TrainStep` use only these: no code depends on which method it is.
    """

    # GradScaler.step() hands its scale to optimizers with this flag. Only here can we refuse it: see `grad_scale`.
    _step_supports_amp_scaling = True

    whole_options: ClassVar[tuple[str, ...]] = ("splits", "nonfinite", "max_grad_norm", "batch_norm")

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        module: nn.Module | None,
        process_group: dist.ProcessGroup | None,
        vectorise: bool | None,
    ) -> None:
        options.one_of("vectorise", vectorise, (True, False, None))
        self.module = module
        self.process_group = process_group
        self.vectorise = vectorise
        self._reset()
        self._check_group(defaults)
        super().__init__(params, defaults)
        self._check_module()
        self._made = True

    def _reset(self) -> None:
        self._away: str | None = None  # why the weights are not at their mean now
        self._warned: set[int | str] = set()  # parameters and reasons for which a warning was given
        self._skipped: Tensor | None = None
        self._synchronised = False
        self._executor = Executor(self.vectorise, "the splits are computed in a loop", self.module)
        self._known_closure: Any = None  # the code of the last loss function whose use of the weights was checked
        self._per_example = PerExample(self.module, self.vectorise) if self.per_example and self.module else None
        self._num_steps = 0  # since this object was made
        self._start: dict[Tensor, Tensor] = {}  # the norm of each parameter before the first of them

    # ------------------------------------------------------------------ the method, given by a subclass

    rates: ClassVar[tuple[str, ...]] = ()
    """Options of a group (numbers or tuples of numbers) that may change from step to step, and may differ between runs
    that are trained together. A compiled step reads them from the device. All other options are compiled in."""

    per_example: ClassVar[bool] = False
    """Whether the probe uses only `grad_at.moments`, the moments of the gradients of single examples."""

    def _theta(self, slot: Slot, split: int) -> Tensor:
        """Return the weights of a slot in the first pass: its mean, or a sample. `split` counts over all ranks."""
        return slot.mean

    def _noise_precision(self, slot: Slot) -> Tensor | None:
        """Return s if `_theta` adds noise of variance 1 / (N s) to the mean, None if it adds no noise."""
        return None

    @property
    def effective_num_data(self) -> float:
        """The number of examples N in the variance of the noise."""
        return 1.0

    def _probe(self, slots: list[Slot], theta: Iterable[Tensor], grad_at: Gradients, tally: Tally) -> None:
        """Evaluate gradients of one sub-batch, first at the weights `theta`, and add the results to `tally`.

        The result named `"gradient"` will be applied. A slot may hold many parameters packed together, and the probe
        may run under `torch.vmap`: write formulas only, without control flow that depends on values.
        """
        raise NotImplementedError

    def _update(self, slot: Slot, **averages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the new weights and state of a slot, given the averages of the probes' results. Formulas only."""
        raise NotImplementedError

    def _sizes(self, slot: Slot) -> dict[str, Tensor]:
        """Return what is added to the weights of a slot, as far as the state tells, under names of `SIZE_RULES`."""
        return {}

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise if an option of this group is out of range."""
        options.count("splits", group["splits"], "It is the number of sub-batches each minibatch is cut into.")
        options.one_of("nonfinite", group["nonfinite"], ("raise", "skip"))
        options.one_of("batch_norm", group["batch_norm"], bn.POLICIES)
        if group["max_grad_norm"] is not None:
            options.positive("max_grad_norm", group["max_grad_norm"], "Write None for no clipping.")

    def _check_batch(self, batch: tuple[Any, ...]) -> None:
        """Raise if no step is possible with this batch; nothing has changed yet."""

    # ------------------------------------------------------------------ the step

    def step(self, closure: LossFunction | None = None, *batch: Any) -> Tensor:  # type: ignore[override]
        """Take one step.

        With a batch, `closure(*part)` returns the mean loss of one part of the batch; it is called for each of the
        `splits` parts. Without a batch (and splits = 1) `closure()` returns the loss of the whole minibatch. It may
        call `backward()` on this loss itself, as torch's convention allows; `.grad` is cleared before each call.
        Gradients that were accumulated before the step are refused. Parameters that are not this optimizer's keep
        their `.grad`.

        Args:
            closure: A function that returns the loss.
            batch: Tensors, or nested lists and dicts of tensors, cut along dimension 0. Other objects go to every part.

        Returns:
            The mean loss of the first pass, detached.
        """
        with deferred(), torch.no_grad():
            return self._step(closure, batch)

    def _step(self, closure: LossFunction | None, batch: tuple[Any, ...]) -> Tensor:
        if closure is None:
            raise TypeError(
                f"{type(self).__name__}.step() needs a closure, because it evaluates the loss at other weights than "
                "the present ones: optimizer.step(loss_fn, x, y), where loss_fn(x, y) returns the mean loss."
            )
        self._refuse_if_away("take a step")
        self._check_batch(batch)
        splits = self._option("splits")
        parts = split_batch(batch, splits)
        slots = self._slots()
        self._check_gradients(slots)
        if len(parts) < splits and "few examples" not in self._warned:
            self._warned.add("few examples")
            text = f"a batch of {len(parts)} examples cannot be cut into {splits} parts: each example is one part."
            warnings.warn(text, stacklevel=4)
        if self.process_group is not None and not self._synchronised:
            self._synchronise()
            slots = self._slots()

        self._note_start()
        known = self.module.parameters() if self.module is not None else (slot.parameter for slot in slots)
        buffers = BufferSnapshot(all_buffers(self.module) if self.module is not None else ())
        self._away = "inside a step"
        try:
            with restored_on_failure(MeanSnapshot(slots), GradientSnapshot(known), buffers):
                losses, averages = self._average(slots, closure, parts)
                finite = all_finite([*losses, *(t for tensors in averages.values() for t in tensors)])
                accept = None if self._option("nonfinite") == "raise" else finite
                if accept is None and not finite:
                    raise FloatingPointError(self._describe_nonfinite(slots, losses, averages))
                clip_gradient(averages["gradient"], self._option("max_grad_norm"))
                MeanSnapshot(slots).restore()
                if accept is not None:
                    buffers.restore(unless=accept)
                for slot, gradient in zip(slots, averages["gradient"], strict=True):
                    slot.parameter.grad = gradient.to(slot.parameter.dtype) if slot.seen else None
                seen = [i for i, slot in enumerate(slots) if slot.seen]
                stepped = [slots[i] for i in seen]
                averages = {name: [tensors[i] for i in seen] for name, tensors in averages.items()}
                self._move(stepped, averages, accept)
        finally:
            torch.clear_autocast_cache()
            self._away = None

        if accept is not None:
            refused = (~accept).long()
            self._skipped = refused if self._skipped is None else self._skipped.add_(refused)
        note_as_left(slot.parameter.grad for slot in stepped)
        self._warn_of_unseen(slots)
        self._count_step()
        return losses[0]

    def _check_gradients(self, slots: list[Slot]) -> None:
        """Raise if `.grad` holds gradients that no step left there: this step would drop them."""
        names = [self._name(slots[i]) for i in not_left([slot.parameter for slot in slots])]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RuntimeError(
                f"{names[0]}{more} has a gradient in .grad that no step left there: was backward() called before "
                "step()? A step computes its own gradients, and would drop this one. To accumulate over micro-batches, "
                "pass them together, optimizer.step(loss_fn, torch.cat(xs), torch.cat(ys)); to drop this gradient, "
                "call optimizer.zero_grad() first."
            )

    def _average(self, slots: list[Slot], closure: LossFunction, parts: Parts) -> Probed:
        """Probe every part, and average losses and results over parts and ranks."""
        first = 0 if self.process_group is None else rank_of(self.process_group) * self._option("splits")
        losses, averages = self._probe_parts(slots, closure, parts, first)
        if self.process_group is not None:
            share, buffers = self._share_of_running_statistics(), []
            if share is not None and self.module is not None:
                found = [own_buffers(owner)[name] for owner, name in running_statistics(self.module)]
                buffers = [b.mul_(share) for b in found if b is not None and b.is_floating_point()]
            size = sum(size for _, size in parts)
            means = [t for tensors in averages.values() for t in tensors]
            seen = [slot.seen for slot in slots]
            reached = average_over_ranks(self.process_group, size, means, losses, seen, buffers)
            for slot, is_seen in zip(slots, reached, strict=True):
                slot.seen = is_seen
        return losses, averages

    def _share_of_running_statistics(self) -> float | None:
        """Return the weight of this rank's running statistics in the sum over ranks; None if they do not move.

        The policy "first_split" takes those of rank 0, all others the mean. Counters are equal on all ranks.
        """
        policy, group = self._option("batch_norm"), self.process_group
        if policy == "none" or group is None:
            return None
        return float(rank_of(group) == 0) if policy == "first_split" else 1 / dist.get_world_size(group)

    def _probe_parts(self, slots: list[Slot], closure: LossFunction, parts: Parts, first: int) -> Probed:
        """Average losses and results over the parts, probed together or in turn."""

        def in_turn() -> Probed:
            return self._probe_in_turn(slots, closure, parts, first)

        ragged = len({size for _, size in parts}) > 1  # a ragged last batch is normal: no warning
        if len(parts) == 1 or ragged or not slots or self.per_example:
            return in_turn()
        if self.module is None:
            if self.vectorise:
                raise ValueError("vectorise=True needs the model: make the optimizer with module=model.")
            return in_turn()
        module = self.module
        code = getattr(closure, "__code__", closure)

        def together() -> Probed:
            check, self._known_closure = code is not self._known_closure, None
            found = probe_together(self, module, slots, closure, parts, first, check=check)
            self._known_closure = code
            return found

        self._executor.vectorise = self.vectorise
        return self._executor.run(
            together,
            in_turn,
            pays=Executor.launch_bound(slots[0].parameter.device),
            obstacle=obstacle_to_stacking(module, self._option("batch_norm"), parts),
        )

    def _probe_in_turn(self, slots: list[Slot], closure: LossFunction, parts: Parts, first: int) -> Probed:
        """Average losses and results over the parts, probed one after the other."""
        total = sum(size for _, size in parts)
        tally, losses = Tally(), Tally()
        for k, (part, size) in enumerate(parts):
            tally.weight = losses.weight = size / total
            frozen = functools.partial(self._frozen_running_statistics, k)
            grad_at = GradAt(slots, closure, part, frozen, self._per_example)
            self._probe(slots, (self._theta(slot, first + k) for slot in slots), grad_at, tally)
            losses.add("loss", grad_at.losses)
        return losses.means["loss"], tally.means

    def _frozen_running_statistics(self, split: int, pass_index: int) -> list[tuple[nn.Module, str]]:
        """Return owner and name of the running statistics that a pass must not move."""
        if self.module is None or bn.moves_statistics(self._option("batch_norm"), split, pass_index):
            return []
        return running_statistics(self.module)

    def _move(self, slots: list[Slot], averages: dict[str, list[Tensor]], accept: Tensor | None) -> None:
        """Update weights and state, unless the 0-dim boolean `accept` is given and false."""
        base = self._base_step()
        if base is None:
            self._apply(slots, averages, accept)
            starts = any(slot.parameter not in self.state for slot in slots)
            if accept is None or not starts or bool(accept):  # read from the device in a first step only
                self._own(slots)
        elif accept is None or bool(accept):  # torch's optimizers cannot select on the device
            base.or_nothing([(slot.parameter, slot.parameter.grad) for slot in slots])

    def _apply(self, slots: list[Slot], averages: dict[str, list[Tensor]], accept: Tensor | None) -> None:
        """Write the results of `_update`, and count the step.

        If a formula raises, nothing changes: the caller restores the weights from the slots' copies, and the state is
        written after the last formula. The lists in `averages` are emptied on the way, to free their memory.
        """
        computed = []
        for slot, *means in zip(slots, *(emptied(tensors) for tensors in averages.values()), strict=True):
            weights, state = self._update(slot, **dict(zip(averages, means, strict=True)))
            write(slot.parameter, weights, accept)
            computed.append((slot, state))
        for slot, state in computed:
            counted = {"step": slot.state["step"] + 1} if "step" in slot.state else {}
            for name, value in (state | counted).items():
                write(slot.state[name], value, accept)

    def _own(self, slots: list[Slot]) -> None:
        """Store the state of the slots in the optimizer's `state`."""
        for slot in slots:
            if slot.state:
                self.state[slot.parameter] = slot.state

    def _state_of(self, slot: Slot) -> dict[str, Tensor]:
        """Return the state of a slot in the optimizer's `state`, or a fresh one."""
        own: dict[str, Tensor] | None = self.state.get(slot.parameter)
        return own or self._fresh_state(slot.parameter, slot.group)

    def _base_step(self) -> BaseStep | None:
        """Return the step of the base optimizer, or None without a base optimizer."""
        return None if self.base_optimizer is None else BaseStep(self.base_optimizer, hooks=False)

    def _slots(self) -> list[Slot]:
        """Return one slot per parameter that requires a gradient, with a copy of the weights."""
        for group in self.param_groups:
            lr = group.get("lr")
            if isinstance(lr, Tensor) and lr.shape == (1,):  # torch accepts this shape, formulas take numbers
                group["lr"] = lr.reshape(())
        return slots_of(self, self._fresh_state if self.base_optimizer is None else None)

    def _fixed(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a group that are compiled into a step: no rates, and none of the base optimizer's."""
        base = {} if self.base_optimizer is None else self.base_optimizer.defaults
        return {key: group[key] for key in self.defaults if key in group and key not in (*self.rates, *base)}

    def _synchronise(self) -> None:
        """Start every rank from the weights and buffers of rank 0."""
        assert self.process_group is not None
        tensors = [p for group in self.param_groups for p in group["params"]]
        if self.module is not None:
            tensors += list(self.module.buffers())
        broadcast(tensors, self.process_group)
        self._synchronised = True

    # ------------------------------------------------------------------ after training

    def posterior(self, model: nn.Module | None = None) -> Posterior:
        """Return the learned distribution over the weights: here a point, the weights themselves.

        Args:
            model: The model, for the names of its parameters and for its buffers. Not needed if the optimizer was
                made with `module=`.
        """
        return PointMass.from_model(self._model_or_own(model))

    def _model_or_own(self, model: nn.Module | None) -> nn.Module:
        self._refuse_if_away("take the posterior")
        model = self.module if model is None else model
        if model is None:
            raise TypeError(
                "posterior() needs the model: write optimizer.posterior(model), or make the optimizer with module=."
            )
        return model

    # ------------------------------------------------------------------ what the state says of the settings

    def diagnose(self) -> Diagnosis:
        """Say what the weights tell about the settings: `print(optimizer.diagnose())`."""
        self._refuse_if_away("diagnose the optimizer")
        with torch.no_grad():
            return Diagnosis(tuple(self._ratios(self._measured_slots())))

    def _ratios(self, slots: list[Slot]) -> list[Finding]:
        """Return what weights and state of measured slots say: the findings that training warns of."""
        sizes = [(slot.index, name, size.norm()) for slot in slots for name, size in self._sizes(slot).items()]
        norms = [slot.mean.norm(dtype=slot.dtype) for slot in slots]
        starts = [self._start.get(slot.parameter, norm) for slot, norm in zip(slots, norms, strict=True)]
        numbers = iter(_read([*norms, *starts, *(size for _, _, size in sizes)]))
        weights = {slot.index: next(numbers) for slot in slots}
        grown = ratio({str(index): (now, next(numbers)) for index, now in weights.items()})
        names = {slot.index: self._name(slot) for slot in slots}
        pairs: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in SIZE_RULES}
        for index, name, _ in sizes:
            pairs[name][names[index]] = (next(numbers), weights[index])
        findings = [growth(grown.total)] if grown is not None and self._start else []
        for name, (rule, option) in SIZE_RULES.items():
            found = ratio(pairs[name])
            if found is not None:
                findings.append(rule(found, [float(group[option]) for group in self.param_groups]))
        return findings

    def _measured_slots(self) -> list[Slot]:
        """Return the slots whose weights carry the model, see `bsam.optim.diagnosis`."""
        slots = self._slots()
        if self._start:
            slots = [slot for slot in slots if slot.parameter in self._start]
            norms = _read([self._start[slot.parameter] for slot in slots])
            slots = [slot for slot, norm in zip(slots, norms, strict=True) if norm > 0]
        return [slot for slot in slots if slot.parameter.dim() > 1] or slots

    def _note_start(self) -> None:
        """Note how large the weights are, before the first step of this object."""
        if not self._num_steps:
            trained = (p for group in self.param_groups for p in group["params"] if p.requires_grad)
            self._start = {p: p.norm(dtype=torch.promote_types(p.dtype, torch.float32)) for p in trained}

    def _count_step(self, stacklevel: int = 5) -> None:
        """Count a step. After some of them, look at the ratios, and warn once if one is bad."""
        self._num_steps += 1
        if self._num_steps in CHECKED_AT and "ratios" not in self._warned:
            slots = self._measured_slots()
            many = sum(slot.parameter.numel() for slot in slots) >= FEWEST_WEIGHTS
            bad = [finding.sentence for finding in self._ratios(slots) if finding.is_bad] if many else []
            if bad:
                self._warned.add("ratios")
                text = f"after {self._num_steps} steps: {' '.join(bad)} optimizer.diagnose() says more."
                warnings.warn(text, stacklevel=stacklevel)

    # ------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "an optimizer with a process_group cannot be copied or pickled: a group belongs to its process. "
                "Save optimizer.state_dict() instead."
            )
        own = {"module": self.module, "process_group": None, "vectorise": self.vectorise}
        return {**super().__getstate__(), **own}

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped for non-finite numbers since this object was made (waits for the device)."""
        return 0 if self._skipped is None else int(self._skipped)

    @property
    def grad_scale(self) -> Tensor:
        """Not available: the scale of a `torch.amp.GradScaler` cannot be set."""
        raise AttributeError("grad_scale")

    @grad_scale.setter
    def grad_scale(self, value: Any) -> None:
        raise RuntimeError(
            f"{type(self).__name__} does not work with GradScaler: it perturbs the weights by gradients, or squares "
            "gradients, and would do so with scaled ones. Use torch.autocast with dtype=torch.bfloat16 and no scaler: "
            "optimizer.step(loss_fn, x, y)."
        )

    # ------------------------------------------------------------------ checks and messages

    def _refuse_if_away(self, what: str) -> None:
        away = self._away
        if self._made and holds_sample(p for group in self.param_groups for p in group["params"]):
            away = "inside posterior.sampled()"
        if away is not None:
            raise RuntimeError(f"cannot {what} {away}: the model does not hold its own weights there.")

    def _warn_of_unseen(self, slots: list[Slot], stacklevel: int = 5) -> None:
        """Warn about parameters that no gradient reached, once per parameter."""
        unseen = [slot for slot in slots if not slot.seen and slot.index not in self._warned]
        if unseen:
            self._warned.update(slot.index for slot in unseen)
            names = ", ".join(self._name(slot) for slot in unseen)
            warnings.warn(
                f"no gradient reached {names}: not part of the loss? They stay unchanged.", stacklevel=stacklevel
            )

    def _name(self, slot: Slot) -> str:
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        if not names and self.module is not None:
            by_id = {id(p): name for name, p in self.module.named_parameters()}
            return by_id[id(slot.parameter)]
        return names[slot.index] if names else f"parameter {slot.index} of shape {tuple(slot.parameter.shape)}"

    def _check_module(self) -> None:
        if self.module is None:
            return
        if self.process_group is not None and isinstance(self.module, nn.parallel.DistributedDataParallel):
            raise ValueError(
                "give process_group= or a DistributedDataParallel module, not both: with process_group= the optimizer "
                "averages over the ranks itself, so give it the bare module."
            )
        self._check_belongs(p for group in self.param_groups for p in group["params"])

    def _check_belongs(self, params: Iterable[Any]) -> None:
        known = {id(p) for p in self.module.parameters()} if self.module is not None else set()
        tensors = [p[1] if isinstance(p, tuple) else p for p in params]
        leaves = [p for p in tensors if isinstance(p, Tensor) and p.is_leaf]  # torch refuses anything else
        if self.module is not None and any(id(p) not in known for p in leaves):
            raise ValueError("some parameters given to the optimizer do not belong to module=: is it another model?")

    def _describe_nonfinite(self, slots: list[Slot], losses: list[Tensor], averages: dict[str, list[Tensor]]) -> str:
        bad = [f"the loss of pass {i + 1} is {loss.item()}" for i, loss in enumerate(losses) if not loss.isfinite()]
        names = [
            self._name(slot)
            for i, slot in enumerate(slots)
            if not all(bool(tensors[i].isfinite().all()) for tensors in averages.values())
        ]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            bad.append(f"the gradient of {', '.join(names[:3])}{more} is not finite")
        return (
            f"{'; '.join(bad)}. Weights and state are unchanged. Lower lr or rho, look at the batch, or skip steps "
            "like this one with nonfinite='skip'."
        )


def _read(numbers: Sequence[Tensor]) -> list[float]:
    """Read numbers from the device, all at once."""
    found: list[float] = (
        torch.stack([each.float().to(numbers[0].device) for each in numbers]).tolist() if numbers else []
    )
    return found
