"""The step that all optimizers here share: split the batch, probe each part, average, update.

A *probe* works on one sub-batch and asks for gradients at weights of its choice, through a function
`grad_at(weights) -> gradients`. Its results are *averaged* over sub-batches and ranks, and the method's *update* turns
the averages into new weights. Sub-batches are probed in a loop, or all together (`bsam.optim.together`). Only this file
writes perturbed weights into a model, and it always removes them again:

- a step or probe completes, or it leaves weights, gradients, state and the buffers of `module=` bit-identical;
- an interrupt (Ctrl-C) is raised in the user's loss function, in communication, or after the step;
- a loss or gradient that is not finite never reaches weights or state;
- weights are written in place: addresses, leaf status and `requires_grad` do not change.

A step has two halves: `probe(loss_fn, *batch)` evaluates a micro-batch, any number of times, and `step()` moves the
weights; `step(closure, *batch)` is both. `bsam.optim.pending` holds the averages in between.

After a step `p.grad` holds the gradient that was applied: averaged over probes, splits and ranks, and clipped. Before
the next probe `p.grad` must be this gradient, zero, or None. Parameters of other optimizers keep their `.grad`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from bsam import batch_norm as bn
from bsam import shards
from bsam.batches import split_batch
from bsam.executor import callers_level
from bsam.interrupts import deferred
from bsam.modules import BufferSnapshot, GradientSnapshot, LossFunction, all_buffers, restored_on_failure
from bsam.optim import options
from bsam.optim.arithmetic import all_finite, clip_gradient, write
from bsam.optim.diagnosing import DiagnosingOptimizer
from bsam.optim.leftover import not_left, note_as_left, refuse_accumulated
from bsam.optim.micro_batches import Kept, MicroBatch
from bsam.optim.pending import Pending, Probed
from bsam.optim.probing import MeanSnapshot, Prober, Slot, emptied
from bsam.optim.scaling import Scaling
from bsam.optim.sharding import Hooks, agreed_weight, refuse_batch
from bsam.optim.together import Parts
from bsam.posterior import PointMass, Posterior
from bsam.posterior.base import holds_sample
from bsam.torch_private import graph_break

__all__ = ["ProbingOptimizer"]

_IN_A_STEP = "inside a step"


class ProbingOptimizer(DiagnosingOptimizer):
    """Base class of optimizers that evaluate gradients at several points before they update the weights.

    A method is a subclass. It declares which of its options are `rates`, and defines the initial state of a parameter
    (`_fresh_state`), the gradients that it needs (`_probe`), the update (`_update`), and the checks of its options
    (`_check_group`). Loop, vmap, ranks and `bsam.TrainStep` use only these: no code depends on which method it is.
    """

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
        super()._reset()
        self._away: str | None = None  # why the weights are not at their mean now
        self._pending: Pending | None = None  # the probes since the last step
        self._skipped: Tensor | None = None

    # ------------------------------------------------------------------ the method, given by a subclass

    rates: ClassVar[tuple[str, ...]] = ()
    """Options of a group (numbers or tuples of numbers) that may change from step to step, and may differ between runs
    that are trained together. A compiled step reads them from the device. All other options are compiled in."""

    def _noise_precision(self, slot: Slot) -> Tensor | None:
        """Return s if `_theta` adds noise of variance 1 / (N s) to the mean, None if it adds no noise."""
        return None

    @property
    def effective_num_data(self) -> float:
        """The number of examples $N$ in the variance of the noise."""
        return 1.0

    def _update(self, slot: Slot, **averages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the new weights and state of a slot, given the averages of the probes' results. Formulas only."""
        raise NotImplementedError

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise if an option of this group is out of range."""
        options.count("splits", group["splits"], "It is the number of sub-batches each minibatch is cut into.")
        options.one_of("nonfinite", group["nonfinite"], ("raise", "skip"))
        options.one_of("batch_norm", group["batch_norm"], bn.POLICIES)
        if group["max_grad_norm"] is not None:
            options.positive("max_grad_norm", group["max_grad_norm"], "Write None for no clipping.")

    def _check_batch(self, batch: tuple[Any, ...]) -> None:
        """Raise if no step is possible with this batch; nothing has changed yet."""

    # ------------------------------------------------------------------ the step, in two halves

    @graph_break
    def probe(
        self,
        loss_fn: LossFunction,
        *batch: Any,
        weight: float | Tensor | None = None,
        last: bool = True,
        scaler: GradScaler | None = None,
    ) -> Tensor:
        """Evaluate the gradients of a micro-batch, and keep their averages for the next `step()`.

        Any number of micro-batches may be probed before a step. Each is cut into `splits` parts, and every part has its
        own noise and perturbation: micro-batches are further splits. Until the step, `p.grad` holds the mean of the
        gradients that the step will apply. It may be clipped or changed: the step applies what is then in `p.grad`.

        A probe that raises leaves what earlier probes left. `discard()` and `zero_grad()` drop all pending probes.

        Args:
            loss_fn: Returns the mean loss of a part; the closure of `step`.
            batch: The micro-batch; as in `step`.
            weight: The weight of the micro-batch in all averages: the number of terms in its mean loss. By default the
                number of its examples; a micro-batch without tensors counts as one. For language models give the number
                of tokens, which `num_data` then counts too. With `splits=1` and a weight, the tensors of the
                micro-batch may differ in length.
            last: False joins the micro-batch with the following ones into one sub-batch, with one noise and one
                perturbation, as if they were a single batch (with `splits=1`). Its first pass runs now. The batch is
                kept, and all further passes run in the next probe with `last=True`.
            scaler: Scales the loss of every pass, for float16. `p.grad` is scaled until `scaler.unscale_(optimizer)` or
                `scaler.step(optimizer)`, which takes the step.

        Returns:
            The mean loss of the first pass over this micro-batch, on this rank, detached.
        """
        with deferred(), torch.no_grad():
            self._refuse_if_away("probe a batch")
            slots, parts, number = self._prepare(loss_fn, batch, weight)
            with self._whole_or_nothing(slots) as buffers:
                pending = self._opened(slots, buffers, scaler)
                look = self._look if last else self._keep
                pending, loss = look(slots, pending, loss_fn, parts, number)
                if last:
                    pending = pending.owned()
                    if pending.scaling is not None:
                        buffers.restore(unless=pending.scale_gradients())
                    self._leave_gradients(slots, pending.probed[1]["gradient"])
            self._pending = pending
            if last:
                note_as_left(slot.parameter.grad for slot in slots)
            return loss

    @graph_break
    def step(self, closure: LossFunction | None = None, *batch: Any) -> Tensor:  # type: ignore[override]
        """Take one step: with a closure, probe the batch and move; without, move by the pending probes.

        With a batch, `closure(*part)` returns the mean loss of one part of the batch; it is called for each of the
        `splits` parts. Without a batch (and splits = 1) `closure()` returns the loss of the whole minibatch. It may
        call `backward()` on this loss itself, as torch's convention allows; `.grad` is cleared before each call.
        Gradients that were accumulated before the step are refused. Parameters that are not this optimizer's keep
        their `.grad`.

        Args:
            closure: A function that returns the loss. Without it, `probe` must have been called before.
            batch: Tensors, or nested lists and dicts of tensors, cut along dimension 0. Other objects go to every part.

        Returns:
            The mean loss of the first pass, over all probes and ranks, detached.
        """
        with deferred(), torch.no_grad():
            return self._step(closure, batch)

    @graph_break
    def discard(self) -> None:
        """Drop the pending probes and their gradients in `.grad`. BatchNorm's running statistics stay."""
        if self._away == _IN_A_STEP:
            raise RuntimeError("cannot discard probes inside a step: call discard() outside of the loss function.")
        with deferred():
            if self._pending is not None:
                for parameter in self._pending.parameters:
                    parameter.grad = None
            self._pending = None

    @graph_break
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `.grad` of all parameters, and drop the pending probes."""
        if self._away != _IN_A_STEP:  # a closure may call zero_grad() before its backward()
            self._settled()
            self.discard()
        super().zero_grad(set_to_none)

    def _step(self, closure: LossFunction | None, batch: tuple[Any, ...]) -> Tensor:
        self._refuse_if_away("take a step")
        pending = self._settled()
        if closure is not None:
            slots, parts, number = self._prepare(closure, batch)
        elif pending is not None:
            slots = self._slots(copied=self.base_optimizer is not None)  # torch's optimizers write in place
            changed = self._check_pending(pending, slots)
        elif self._is_asked_for_state():
            self._make_state()
            return torch.zeros(())
        else:
            raise TypeError(
                f"{type(self).__name__}.step() needs a closure, or a probe before it, because it evaluates the loss at "
                "other weights than the present ones: optimizer.step(loss_fn, x, y), or optimizer.probe(loss_fn, x, y) "
                "and then optimizer.step(), where loss_fn(x, y) returns the mean loss. In the loop of a trainer, use "
                "its adapter in bsam.integrations."
            )
        with self._whole_or_nothing(slots) as buffers:
            if closure is not None:
                pending = self._opened(slots, buffers, None)
                pending, _ = self._look(slots, pending, closure, parts, number)
                losses, averages = pending.probed
                unchecked: Iterable[str] = ()
            else:
                assert pending is not None
                losses, averages = self._copied_before_writes(pending.as_in_grad(unscaled=True).probed)
                # A probe checks its own numbers. Means of several probes, and what was written into `.grad`, are new.
                unchecked = averages if pending.num_probes > 1 else ["gradient"] if changed else ()
            buffers, weight = pending.buffers, pending.weight
            del pending  # the update frees the averages one by one
            if self.process_group is not None:
                self._average_over_ranks(slots, weight, losses, averages)
            elif self._sharded:
                self._average_running_statistics(slots)
            accept = self._accepted(slots, losses, averages, unchecked)
            clip_gradient(averages["gradient"], self._option("max_grad_norm"), [slot.parameter for slot in slots])
            if accept is not None:
                buffers.restore(unless=accept)
            self._leave_gradients(slots, averages["gradient"])
            seen = [i for i, slot in enumerate(slots) if slot.seen]
            stepped = [slots[i] for i in seen]
            averages = {name: [tensors[i] for i in seen] for name, tensors in averages.items()}
            self._move(stepped, averages, accept)

        self._pending = None
        if accept is not None:
            self._count_skipped((~accept).long())
        note_as_left(slot.parameter.grad for slot in stepped)
        self._warn_of_unseen(slots)
        self._count_step(weight * self._num_ranks())
        return losses[0]

    def _prepare(
        self, closure: LossFunction, batch: tuple[Any, ...], weight: float | Tensor | None = None
    ) -> tuple[list[Slot], Parts, float]:
        """Return slots, parts and weight of a batch, after all checks that need no pass.

        The weight counts in the averages: it is the given one, or the number of examples.
        """
        try:
            slots, parts = self._checked(closure, batch, counted=weight is None or self.per_example)
            if weight is not None:
                options.positive("weight", weight, "It is the number of terms in the mean loss of the micro-batch.")
        except Exception:
            if self._sharded:  # the other ranks wait for this one's weight
                refuse_batch(self._trained())
            raise
        examples = sum(size for _, size in parts)
        number = float(examples if weight is None else weight)
        if self._sharded:
            number = agreed_weight(self._trained(), number, examples, self.param_groups)
        self._note_start()
        return slots, parts, number

    def _checked(self, closure: LossFunction, batch: tuple[Any, ...], *, counted: bool) -> tuple[list[Slot], Parts]:
        """Return slots and parts of a batch, after all checks that need no pass, on this rank."""
        if not callable(closure):
            raise TypeError(
                f"the loss function is of type {type(closure).__name__}, which cannot be called: give the function and "
                "not its value, optimizer.step(loss_fn, x, y), where loss_fn(x, y) runs the model and returns the mean "
                "loss. It is called several times, at different weights."
            )
        refuse_accumulated(closure)
        self._check_batch(batch)
        splits = self._option("splits")
        parts = split_batch(batch, splits, counted=counted)
        slots = self._slots()
        pending = self._settled()
        if pending is None:
            self._check_gradients(slots)
        else:
            pending.check_parameters([slot.parameter for slot in slots])
        if isinstance(self.module, nn.parallel.DistributedDataParallel) and not self.module.require_backward_grad_sync:
            raise RuntimeError(
                "a probe inside no_sync() would not average its gradients over the ranks: leave no_sync() out. Every "
                "micro-batch has gradients of its own, so DistributedDataParallel must average each of them."
            )
        shards.check_gradients_are_reduced(self.module)
        if len(parts) < splits and "few examples" not in self._warned:
            self._warned.add("few examples")
            text = f"a batch of {len(parts)} examples cannot be cut into {splits} parts: each example is one part."
            warnings.warn(text, stacklevel=callers_level())
        if self.process_group is not None and not self._synchronised:
            self._synchronise()
            slots = self._slots()
        return slots, parts

    @contextlib.contextmanager
    def _whole_or_nothing(self, slots: list[Slot]) -> Iterator[BufferSnapshot]:
        """If the block raises, restore weights, gradients and buffers; give it a snapshot of the buffers."""
        known = self.module.parameters() if self.module is not None else (slot.parameter for slot in slots)
        buffers = BufferSnapshot(all_buffers(self.module) if self.module is not None else ())
        self._away = _IN_A_STEP
        try:
            mean = MeanSnapshot(slots, self.module)
            with restored_on_failure(Hooks(self.module), mean, GradientSnapshot(known), buffers):
                yield buffers
        finally:
            torch.clear_autocast_cache()
            self._away = None

    def _opened(self, slots: list[Slot], buffers: BufferSnapshot, scaler: GradScaler | None) -> Pending:
        """Return the pending probes so far, for a further one with this scaler."""
        group = self.process_group
        if scaler is not None and scaler.is_enabled() and self._sharded:
            raise ValueError(
                "scaler= does not go with a sharded model: use bfloat16 without a scaler, "
                "fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))."
            )
        if scaler is not None and group is not None and dist.get_world_size(group) > 1:
            raise ValueError(
                "scaler= does not go with process_group=: a rank cannot see the overflow of another one before step(). "
                "Use bfloat16 without a scaler, or a DistributedDataParallel model without process_group=."
            )
        if self._pending is not None:
            self._pending.check_scaler(scaler, self)
            return self._pending
        parameters = [slot.parameter for slot in slots]
        return Pending(parameters, buffers, Scaling.of(scaler, parameters))

    def _look(
        self, slots: list[Slot], pending: Pending, closure: LossFunction, parts: Parts, weight: float
    ) -> tuple[Pending, Tensor]:
        """Probe a micro-batch; return the pending probes with it, and its loss. Weights are at their mean again."""
        scaling, kept, number = pending.scaling, pending.kept, pending.num_probes
        pending = pending.as_in_grad()
        for slot in slots:
            slot.seen = pending.weight > 0 and slot.parameter.grad is not None
            slot.parameter.grad = None
        prober: Prober = self
        if scaling is not None:
            prober, closure = scaling.prober(self), scaling.loss_function(closure, pending.parameters)
        if kept is None:
            losses, averages = self._probe_parts(prober, slots, closure, parts, number)
            loss = losses[0]
        else:
            last = MicroBatch(closure, parts[0][0], weight)
            losses, averages, loss = self._probe_joined(prober, slots, kept, last, number)
            weight += kept.weight
        MeanSnapshot(slots, self.module).restore()
        if scaling is not None:  # the scaler looks for numbers that are not finite
            *losses, loss = scaling.unscaled([*losses, loss])
        elif self.process_group is None and self._option("nonfinite") == "raise":
            self._raise_unless_finite(slots, losses, averages)
        return pending.joined((losses, averages), weight, [slot.seen for slot in slots]), loss

    def _keep(
        self, slots: list[Slot], pending: Pending, closure: LossFunction, parts: Parts, weight: float
    ) -> tuple[Pending, Tensor]:
        """Run the first pass of a micro-batch; return the pending probes, which keep it, and its loss."""
        splits = self._option("splits")
        if splits > 1:
            raise ValueError(
                f"last=False joins micro-batches into one sub-batch, and this optimizer has splits={splits}: make it "
                "with splits=1, or leave last=False out. Micro-batches are then further splits."
            )
        scaling, grads = pending.scaling, GradientSnapshot(pending.parameters)
        if scaling is not None:
            closure = scaling.loss_function(closure, pending.parameters)
        for parameter in pending.parameters:
            parameter.grad = None
        micro_batch = MicroBatch(closure, parts[0][0], weight)
        kept = self._first_pass(slots, micro_batch, pending.kept or Kept(), pending.num_probes)
        MeanSnapshot(slots, self.module).restore()
        grads.restore()
        (loss,) = kept.micro_batches[-1].losses
        if scaling is not None:
            (loss,) = scaling.unscaled([loss])
        elif self.process_group is None and self._option("nonfinite") == "raise":
            self._raise_unless_finite(slots, [loss], {str(i): each for i, each in enumerate(kept.sums)})
        return dataclasses.replace(pending, kept=kept), loss

    def _settled(self) -> Pending | None:
        """Return the pending probes; forget them if a scaler has skipped them, or their gradients were cleared."""
        pending = self._pending
        if self._away == _IN_A_STEP:
            return pending
        if pending is not None and pending.scaling is not None and pending.scaling.is_over(self):
            self._count_skipped(torch.ones((), dtype=torch.int64, device=pending.scaling.scale.device))
            self.discard()
        elif pending is not None and pending.is_cleared():
            self._pending = None
        return self._pending

    def _check_pending(self, pending: Pending, slots: list[Slot]) -> bool:
        """Raise unless the step can apply the pending probes; mark slots with gradients; return if any was changed."""
        pending.check_complete([slot.parameter for slot in slots], self)
        for slot in slots:
            slot.seen = slot.parameter.grad is not None
        changed = pending.changed_gradients()
        if changed and self.process_group is not None and dist.get_world_size(self.process_group) > 1:
            raise RuntimeError(
                f"the gradient of {self._name(slots[changed[0]])} was changed between probe() and step(). With "
                "process_group= it is the gradient of this rank alone, which is averaged in step(). To clip the "
                "averaged gradient, write max_grad_norm= when you make the optimizer."
            )
        return bool(changed)

    def _accepted(
        self, slots: list[Slot], losses: list[Tensor], averages: dict[str, list[Tensor]], unchecked: Iterable[str]
    ) -> Tensor | None:
        """Return whether all numbers are finite, on the device; None if that is known: otherwise an error is raised.

        `unchecked` names the averages that no probe of this rank has checked.
        """
        if self._option("nonfinite") == "skip":
            return self._all_finite(slots, losses, averages)
        names = list(averages if self.process_group is not None else unchecked)
        if names:
            self._raise_unless_finite(slots, losses, {name: averages[name] for name in names})
        return None

    def _raise_unless_finite(self, slots: list[Slot], losses: list[Tensor], averages: dict[str, list[Tensor]]) -> None:
        if not self._all_finite(slots, losses, averages):
            raise FloatingPointError(self._describe_nonfinite(slots, losses, averages))

    def _all_finite(self, slots: list[Slot], losses: list[Tensor], averages: dict[str, list[Tensor]]) -> Tensor:
        """Return a 0-dim boolean: whether all numbers are finite, on all ranks of a sharded model."""
        finite = all_finite([*losses, *(t for tensors in averages.values() for t in tensors)])
        return shards.true_on_all(finite, [slot.parameter for slot in slots])

    def _leave_gradients(self, slots: list[Slot], gradients: list[Tensor]) -> None:
        """Leave the averaged gradients in `.grad`."""
        for slot, gradient in zip(slots, gradients, strict=True):
            grad = gradient.to(slot.parameter.dtype) if slot.seen else None
            slot.parameter.grad = None if grad is None else shards.like(slot.parameter, grad)

    def _count_skipped(self, skipped: Tensor) -> None:
        self._skipped = skipped if self._skipped is None else self._skipped.add_(skipped)

    def _check_gradients(self, slots: list[Slot]) -> None:
        """Raise if `.grad` holds gradients that no step left there: this step would drop them."""
        names = [self._name(slots[i]) for i in not_left([slot.parameter for slot in slots])]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RuntimeError(
                f"{names[0]}{more} has a gradient in .grad that no step left there: was backward() called before "
                "step()? A step computes its own gradients, and would drop this one. To accumulate over micro-batches, "
                "pass them together, optimizer.step(loss_fn, torch.cat(xs), torch.cat(ys)), or one after the other, "
                "optimizer.probe(loss_fn, x, y), and then optimizer.step(); in a trainer, with its adapter in "
                "bsam.integrations. To drop this gradient, call optimizer.zero_grad() first."
            )

    def _copied_before_writes(self, probed: Probed) -> Probed:
        """Copy what the step will write into, so that a step that raises leaves the pending probes as they were."""
        losses, averages = probed
        if self.process_group is not None:
            averages = {name: [t.clone() for t in tensors] for name, tensors in averages.items()}
            return [loss.clone() for loss in losses], averages
        if self._option("max_grad_norm") is not None:
            averages = {**averages, "gradient": [g.clone() for g in averages["gradient"]]}
        return losses, averages

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

        If a formula raises, nothing changes: weights without a copy, and the state, are written after the last formula,
        and the caller restores the other weights. The lists in `averages` are emptied on the way, to free their memory.
        """
        computed, late = [], []
        for slot, *means in zip(slots, *(emptied(tensors) for tensors in averages.values()), strict=True):
            weights, state = self._update(slot, **dict(zip(averages, means, strict=True)))
            if slot.copied:
                write(slot.weights, weights, accept)
            else:
                late.append((slot, weights))
            computed.append((slot, state))
        for slot, weights in late:
            write(slot.weights, weights, accept)
        for slot, state in computed:
            counted = {"step": slot.state["step"] + 1} if "step" in slot.state else {}
            for name, value in (state | counted).items():
                write(slot.state[name], value, accept)

    def _fixed(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a group that are compiled into a step: no rates, and none of the base optimizer's."""
        base = {} if self.base_optimizer is None else self.base_optimizer.defaults
        return {key: group[key] for key in self.defaults if key in group and key not in (*self.rates, *base)}

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
        shards.reshard(model)
        if model is None:
            raise TypeError(
                "posterior() needs the model: write optimizer.posterior(model), or make the optimizer with module=."
            )
        return model

    # ------------------------------------------------------------------ states and copies

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dictionary of copies: further steps do not change it."""
        self._refuse_if_pending("save the state")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, and drop pending probes; a state that does not fit changes nothing."""
        with deferred():
            super().load_state_dict(state_dict)
            self.discard()

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "an optimizer with a process_group cannot be copied or pickled: a group belongs to its process. "
                "Save optimizer.state_dict() instead."
            )
        self._refuse_if_away("copy the optimizer")
        self._refuse_if_pending("copy the optimizer")
        own = {"module": self.module, "process_group": None, "vectorise": self.vectorise}
        return {**super().__getstate__(), **own}

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped for non-finite numbers since this object was made (waits for the device)."""
        self._settled()
        return 0 if self._skipped is None else int(self._skipped)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `scaler.step` must hand over its scale, which is refused: it does not know of these probes."""
        return self._pending is None or self._pending.scaling is None

    @property
    def grad_scale(self) -> Tensor:
        """Not available: the scale of a `torch.amp.GradScaler` cannot be set."""
        raise AttributeError("grad_scale")

    @grad_scale.setter
    def grad_scale(self, value: Any) -> None:
        raise RuntimeError(
            f"scaler.step(optimizer) needs a probe with the scaler before it: {type(self).__name__} evaluates several "
            "gradients, and each must be scaled and unscaled. Write optimizer.probe(loss_fn, x, y, scaler=scaler), "
            "where loss_fn returns the loss without a scale, then scaler.step(optimizer) and scaler.update(). Or use "
            "torch.autocast with dtype=torch.bfloat16 and no scaler: optimizer.step(loss_fn, x, y)."
        )

    # ------------------------------------------------------------------ checks and messages

    def _refuse_if_pending(self, what: str) -> None:
        pending = self._settled()
        if pending is not None:
            raise RuntimeError(
                f"cannot {what} while probes are pending: take the step first, optimizer.step(), or drop them, "
                "optimizer.discard(). In a trainer that accumulates gradients, save and validate after whole steps: "
                "make both intervals multiples of the number of micro-batches."
            )

    def _refuse_if_away(self, what: str) -> None:
        away = self._away
        if self._made and holds_sample(p for group in self.param_groups for p in group["params"]):
            away = "inside posterior.sampled()"
        if away is not None:
            raise RuntimeError(f"cannot {what} {away}: the model does not hold its own weights there.")

    def _warn_of_unseen(self, slots: list[Slot]) -> None:
        """Warn about parameters that no gradient reached, once per parameter."""
        if not self._trained() and "frozen" not in self._warned:
            self._warned.add("frozen")
            text = "all parameters are frozen (requires_grad=False), so nothing is trained."
            warnings.warn(text, stacklevel=callers_level())
        unseen = [slot for slot in slots if not slot.seen and slot.index not in self._warned]
        if unseen:
            self._warned.update(slot.index for slot in unseen)
            names = ", ".join(self._name(slot) for slot in unseen)
            text = f"no gradient reached {names}: not part of the loss? They stay unchanged."
            if len(unseen) == len(self._trained()):
                text += (
                    " So nothing is trained: loss_fn must run the model itself, with the arguments that it gets, and "
                    "return the loss as a tensor, without .item() or .detach()."
                )
            warnings.warn(text, stacklevel=callers_level())

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
        bad = bad or ["a loss or gradient of another rank is not finite"]
        drop = "" if self._pending is None else " Probes are still pending: optimizer.discard() drops them."
        return (
            f"{'; '.join(bad)}. Weights and state are unchanged.{drop} Look at the batch, lower lr or rho, or skip "
            "steps like this one with nonfinite='skip'."
        )
