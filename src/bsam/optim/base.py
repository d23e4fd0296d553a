"""What all optimizers here share: split the batch, probe each part, average, update.

A *probe* works on one sub-batch and asks for gradients at weights of its choice, through a function
`grad_at(weights) -> gradients`. Its statistics are *averaged* over sub-batches and ranks, and the method's
*update* turns the averages into new weights. Sub-batches are probed in a loop, or all together
(`bsam.optim.together`). This file is the only one that writes perturbed weights into a model, and it always takes
them out again:

- a step completes, or weights, gradients and state, and the buffers of `module=`, are what they were, bit for bit;
- an interrupt (Ctrl-C) comes out of the user's loss function, out of communication, or after the step;
- a loss or gradient that is not finite never reaches weights or state;
- weights are written in place: addresses, leaf status and `requires_grad` do not change.

After a step `p.grad` holds the gradient that was applied: averaged over splits and ranks, and clipped. Before the next
one it must be that, or zero, or None. Parameters of other optimizers keep the `.grad` that they have.
"""

from __future__ import annotations

import difflib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from bsam import batch_norm as bn
from bsam.distributed import all_reduce_sum, broadcast, rank_of
from bsam.gradients import LossFunction, PerExample
from bsam.interrupts import deferred
from bsam.optim import options
from bsam.optim.batch import split_batch
from bsam.optim.probing import GradAt, Gradients, Slot, Tally
from bsam.optim.together import Parts, Together
from bsam.posterior import PointMass, Posterior
from bsam.posterior.base import holds_sample

__all__ = ["ProbingOptimizer"]

_ADDED_BY_OTHERS = frozenset(
    ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "lr_scale", "name", "param_names")
)
"""Keys of a parameter group that schedulers and trainers write, and that no optimizer reads."""

_left: dict[int, tuple[weakref.ref[Tensor], int]] = {}
"""The gradients that steps left in `.grad`, by id, with their versions, which count the changes in place.

Not a weak dictionary: its callbacks run wherever a gradient dies, and Python drops an interrupt that arrives in one.
"""


class ProbingOptimizer(Optimizer):
    """Base of the optimizers that look at several points before they move.

    A subclass gives `_probe` and `_update`, and checks its options in `_check_group`.
    """

    # GradScaler.step() hands its scale to optimizers that have this flag: the only place where it can be met
    # by name. See `grad_scale`.
    _step_supports_amp_scaling = True

    _made = False  # until the constructor is done: torch checks all groups first, then we check the module

    whole_options: tuple[str, ...] = ("splits", "nonfinite", "max_grad_norm", "batch_norm")
    """Options of the whole optimizer. They are in every group, so that `state_dict` holds them, and must agree."""

    absent_options: ClassVar[dict[str, Any]] = {}
    """What an option is in a state that was saved before the option existed, where that is not its default."""

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
        """Set what is neither option nor state: a copy or a restored optimizer starts with this."""
        self._away: str | None = None  # why the weights are not at their mean just now
        self._warned: set[int | str] = set()  # what a warning was given for
        self._skipped: Tensor | None = None
        self._synchronised = False
        self._together = Together()
        self._per_example: PerExample | None = None  # of a method that looks at examples one by one

    # ------------------------------------------------------------------ the method, given by a subclass

    def _theta(self, slot: Slot, split: int) -> Tensor:
        """The weights of a slot in the first pass; `split` counts over all ranks."""
        return slot.mean

    def _probe(self, slots: list[Slot], theta: Iterable[Tensor], grad_at: Gradients, tally: Tally) -> None:
        """Look at one sub-batch, first at the weights `theta`; count in `tally` what it says.

        The statistic `"gradient"` is the one that will be applied. Slots may be those of many parameters packed
        together, and all of this may run under `torch.vmap`: formulas only, nothing that depends on values.
        """
        raise NotImplementedError

    def _update(self, slots: list[Slot], statistics: dict[str, list[Tensor]], accept: Tensor | None) -> None:
        """Move weights and state; where the 0-dim boolean `accept` is given and false, leave them.

        The lists of the statistics are the method's own: it may empty them as it goes, to free their memory.
        """
        raise NotImplementedError

    def _keep(self, slots: list[Slot], accept: Tensor | None = None) -> None:
        """Make the state of stepped slots the optimizer's own, where it is not yet and the step was accepted."""

    def _fresh_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter that has not been stepped yet."""
        return {}

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise if an option of this group is out of range."""
        options.count("splits", group["splits"], "It is the number of sub-batches each minibatch is cut into.")
        options.one_of("nonfinite", group["nonfinite"], ("raise", "skip"))
        options.one_of("batch_norm", group["batch_norm"], bn.POLICIES)
        if group["max_grad_norm"] is not None:
            options.positive("max_grad_norm", group["max_grad_norm"], "Write None for no clipping.")

    def _check_batch(self, batch: tuple[Any, ...]) -> None:
        """Raise if no step can be taken with this batch; nothing has changed yet."""

    # ------------------------------------------------------------------ the step

    def step(self, closure: LossFunction | None = None, *batch: Any) -> Tensor:  # type: ignore[override]
        """Take one step.

        With a batch, `closure(*part)` returns the mean loss of the part it is given: it is called for each of
        the `splits` parts. Without one (and splits = 1) `closure()` returns the loss of the whole minibatch. It may
        call `backward()` itself, as torch's convention has it, on the loss that it returns; `.grad` is cleared before
        each call. Gradients that were accumulated before the step are refused, and parameters that are not this
        optimizer's keep the `.grad` that they have.

        Args:
            closure: A function that returns the loss.
            batch: Tensors, or nested lists and dicts of them, cut along dimension 0; other things go to
                every part.

        Returns:
            The mean loss of the first passes, detached.
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
            text = f"a batch of {len(parts)} examples cannot be cut into {splits} parts: one part an example."
            warnings.warn(text, stacklevel=4)
        if self.process_group is not None and not self._synchronised:
            self._synchronise()
            slots = self._slots()

        known = self.module.parameters() if self.module is not None else (slot.parameter for slot in slots)
        grads = [(parameter, parameter.grad) for parameter in known]
        buffers = bn.BufferSnapshot(bn.all_buffers(self.module) if self.module is not None else ())
        self._away = "inside a step"
        try:
            losses, statistics = self._average(slots, closure, parts)
            finite = all_finite([*losses, *(t for tensors in statistics.values() for t in tensors)])
            accept = None if self._option("nonfinite") == "raise" else finite
            if accept is None and not finite:
                raise FloatingPointError(self._describe_nonfinite(slots, losses, statistics))
            clip_gradient(statistics["gradient"], self._option("max_grad_norm"))
            write_means(slots)
            if accept is not None:
                buffers.restore(unless=accept)
            for slot, gradient in zip(slots, statistics["gradient"], strict=True):
                slot.parameter.grad = gradient.to(slot.parameter.dtype) if slot.seen else None
            seen = [i for i, slot in enumerate(slots) if slot.seen]
            stepped = [slots[i] for i in seen]
            statistics = {name: [tensors[i] for i in seen] for name, tensors in statistics.items()}
            self._update(stepped, statistics, accept)
            self._keep(stepped, accept)
        except BaseException:
            write_means(slots)
            for parameter, grad in grads:
                parameter.grad = grad
            buffers.restore()
            raise
        finally:
            torch.clear_autocast_cache()
            self._away = None

        if accept is not None:
            refused = (~accept).long()
            self._skipped = refused if self._skipped is None else self._skipped.add_(refused)
        _note_as_left(slot.parameter.grad for slot in stepped)
        self._warn_of_unseen(slots)
        return losses[0]

    def _check_gradients(self, slots: list[Slot]) -> None:
        """Raise if there are gradients that no step left there: they would be dropped."""
        strange = []
        for slot in slots:
            grad = slot.parameter.grad
            if grad is not None and not _was_left(grad):
                strange.append((slot, grad))
        if not strange:
            return
        device = strange[0][1].device
        found = torch.stack([grad.any().to(device) for _, grad in strange]).tolist()
        names = [self._name(slot) for (slot, _), nonzero in zip(strange, found, strict=True) if nonzero]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RuntimeError(
                f"{names[0]}{more} has a gradient in .grad that no step left there: was backward() called before "
                "step()? A step finds its own gradients, and would drop this one. To accumulate over micro-batches, "
                "hand them over together, optimizer.step(loss_fn, torch.cat(xs), torch.cat(ys)); to drop it, call "
                "optimizer.zero_grad() first."
            )

    def _average(
        self, slots: list[Slot], closure: LossFunction, parts: Parts
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Probe every part; return the mean losses of each pass and the mean statistics, over parts and ranks."""
        total = sum(size for _, size in parts)
        first = 0 if self.process_group is None else rank_of(self.process_group) * self._option("splits")
        together = self._together.probe(self, slots, closure, parts, first)
        if together is not None:
            means, statistics = together
        else:
            means, statistics = self._probe_in_turn(slots, closure, parts, first)
            self._together.looped()
        if self.process_group is not None:
            self._average_over_ranks(slots, statistics, means, total)
        return means, statistics

    def _probe_in_turn(
        self, slots: list[Slot], closure: LossFunction, parts: Parts, first: int
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """The mean losses of each pass and the mean statistics, over the parts."""
        total = sum(size for _, size in parts)
        tally, losses = Tally(), Tally()
        for k, (part, size) in enumerate(parts):
            tally.weight = losses.weight = size / total
            frozen = functools.partial(self._frozen_statistics, k)
            grad_at = GradAt(slots, closure, part, frozen, self._per_example)
            self._probe(slots, (self._theta(slot, first + k) for slot in slots), grad_at, tally)
            losses.add("loss", grad_at.losses)
        return losses.means["loss"], tally.means

    def _frozen_statistics(self, split: int, pass_index: int) -> list[tuple[nn.Module, str]]:
        """The running statistics that a pass must leave as they are."""
        if self.module is None or bn.moves_statistics(self._option("batch_norm"), split, pass_index):
            return []
        return bn.running_statistics(self.module)

    def _average_over_ranks(
        self, slots: list[Slot], means: dict[str, list[Tensor]], losses: list[Tensor], size: int
    ) -> None:
        """Turn this rank's means into means over all examples of all ranks: the one all-reduce of a step."""
        group = self.process_group
        assert group is not None
        device = slots[0].parameter.device if slots else losses[0].device
        sums = [t.mul_(size) for tensors in means.values() for t in tensors]
        total_losses = [loss.to(device) * size for loss in losses]
        count = torch.tensor([float(size)], device=device)
        seen = torch.tensor([float(slot.seen) for slot in slots], device=device)
        statistics: list[Tensor] = []
        if self.module is not None and self._option("batch_norm") != "none":
            # First split: the one of rank 0. Otherwise: the mean over ranks. Counters are equal on all ranks.
            buffers = [owner._buffers[name] for owner, name in bn.running_statistics(self.module)]
            statistics = [b for b in buffers if b is not None and b.is_floating_point()]
            of_first = self._option("batch_norm") == "first_split"
            share = float(rank_of(group) == 0) if of_first else 1 / dist.get_world_size(group)
            for buffer in statistics:
                buffer.mul_(share)
        all_reduce_sum([*sums, *total_losses, count, seen, *statistics], group)
        for loss, total in zip(losses, total_losses, strict=True):
            loss.copy_(total / count.item())
        for slot, is_seen in zip(slots, seen.tolist(), strict=True):
            slot.seen = is_seen > 0
        for t in sums:
            t.div_(count.item())

    def _slots(self) -> list[Slot]:
        """A slot for each parameter that requires a gradient, its weights copied."""
        return make_slots(self, self._fresh_state)

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
        """The distribution over the weights that was learned: here a point, the weights themselves.

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
                "posterior() needs the model: optimizer.posterior(model), or make the optimizer with module=."
            )
        return model

    # ------------------------------------------------------------------ torch.optim's contract

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options left out take the optimizer's defaults."""
        super().add_param_group(self._checked_group(param_group))

    def _checked_group(self, param_group: dict[str, Any]) -> dict[str, Any]:
        """A copy of `param_group` with all options, once they and the parameters are known to be good."""
        self._refuse_if_away("add parameters")
        if not isinstance(param_group, dict):
            raise TypeError(
                f"a parameter group must be a dict with the key 'params', not {type(param_group).__name__}."
            )
        params = param_group["params"]
        params = params if isinstance(params, Tensor | set) else list(params)  # a generator can be read once only
        group = {**self.defaults, **param_group, "params": params}
        self._check_keys(group)
        self._check_group(group)
        self._check_agreement([*self.param_groups, group])
        for parameter in [params] if isinstance(params, Tensor) else params:
            _check_parameter(parameter[1] if isinstance(parameter, tuple) else parameter)
        if self._made and not isinstance(params, set):  # torch refuses a set
            self._check_belongs([params] if isinstance(params, Tensor) else params)
        return group

    def _check_keys(self, group: dict[str, Any]) -> None:
        """Raise if a group has an option that nobody reads."""
        known = sorted(set(self.defaults) - {"differentiable"})
        for key in group:
            if key not in self.defaults and key != "params" and key not in _ADDED_BY_OTHERS:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"Did you mean {near[0]!r}? " if near else ""
                raise ValueError(
                    f"{key!r} is not an option of a parameter group of {type(self).__name__}, and would be ignored. "
                    f"{hint}It knows {', '.join(known)}."
                )

    def state_dict(self) -> dict[str, Any]:
        """The state as a dictionary of copies: further steps do not change it."""
        return _copied(super().state_dict())  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Refuses a state that does not fit before anything changes."""
        accepted: dict[str, Any] = {}

        def check(_: Optimizer, final: dict[str, Any]) -> None:  # runs after the hooks of the user
            self._check_state_dict(final)
            accepted.update(final)

        with deferred():
            before = {"state": self.state, "param_groups": self.param_groups}
            handle = self.register_load_state_dict_pre_hook(check)
            try:
                super().load_state_dict(_copied(state_dict))
            except BaseException:
                self.__setstate__(before)
                raise
            finally:
                handle.remove()
            keys = [key for group in accepted["param_groups"] for key in group["params"]]
            parameters = [p for group in self.param_groups for p in group["params"]]
            for key, parameter in zip(keys, parameters, strict=True):
                if key in accepted["state"]:
                    self._restore_types(parameter, accepted["state"][key])

    def _restore_types(self, parameter: Tensor, saved: dict[str, Any]) -> None:
        """Give the loaded state of a parameter the types it had when it was saved, where torch changed them."""

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["param_groups"]
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError(
                f"the loaded state has parameter groups of {[len(g['params']) for g in saved]} parameters, this "
                f"optimizer has {[len(g['params']) for g in self.param_groups]}."
            )
        merged = [{**self.defaults, **self.absent_options, **group} for group in saved]
        for group in merged:
            self._check_group(group)
        self._check_agreement(merged)
        keys = [key for group in saved for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for i, (key, parameter) in enumerate(zip(keys, parameters, strict=True)):
            present = self.state.get(parameter, {})
            for name, value in state_dict["state"].get(key, {}).items():
                if not isinstance(value, Tensor):
                    continue
                like = present.get(name)  # what is there already has the right shape
                fits = value.shape == like.shape if isinstance(like, Tensor) else _may_be_of(value, parameter)
                if not fits:
                    raise ValueError(
                        f"the loaded state's {name!r} of parameter {i} has shape {tuple(value.shape)}, the parameter "
                        f"has {tuple(parameter.shape)}: it belongs to another model."
                    )

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "an optimizer with a process_group cannot be copied or pickled: a group belongs to its process. "
                "Save optimizer.state_dict() instead."
            )
        own = {"module": self.module, "process_group": None, "vectorise": self.vectorise}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._made = True
        if "_away" not in self.__dict__:
            self._reset()
        for group in self.param_groups:  # a state saved by an older version
            for name, value in {**self.defaults, **self.absent_options}.items():
                if name != "differentiable":  # torch adds it to the defaults, and expects no group to have it
                    group.setdefault(name, value)

    @property
    def skipped_steps(self) -> int:
        """How many steps were left out because of non-finite numbers since this object was made (reads the device)."""
        return 0 if self._skipped is None else int(self._skipped)

    @property
    def grad_scale(self) -> Tensor:
        """Not there: the scale of a `torch.amp.GradScaler` cannot be set."""
        raise AttributeError("grad_scale")

    @grad_scale.setter
    def grad_scale(self, value: Any) -> None:
        raise RuntimeError(
            f"{type(self).__name__} does not work with GradScaler: it perturbs the weights by gradients, or squares "
            "them, and these would be scaled too. Use torch.autocast with dtype=torch.bfloat16 and no scaler: "
            "optimizer.step(loss_fn, x, y)."
        )

    # ------------------------------------------------------------------ small things

    def _option(self, name: str) -> Any:
        """The value of an option of the whole optimizer."""
        return self.param_groups[0][name]

    def _refuse_if_away(self, what: str) -> None:
        away = self._away
        if self._made and holds_sample(p for group in self.param_groups for p in group["params"]):
            away = "inside posterior.sampled()"
        if away is not None:
            raise RuntimeError(f"cannot {what} {away}: the model does not hold its own weights there.")

    def _warn_of_unseen(self, slots: list[Slot], stacklevel: int = 5) -> None:
        """Name, once each, the parameters that no gradient reached."""
        unseen = [slot for slot in slots if not slot.seen and slot.index not in self._warned]
        if unseen:
            self._warned.update(slot.index for slot in unseen)
            names = ", ".join(self._name(slot) for slot in unseen)
            warnings.warn(
                f"no gradient reached {names}: not part of the loss? Left as they are.", stacklevel=stacklevel
            )

    def _name(self, slot: Slot) -> str:
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        if not names and self.module is not None:
            by_id = {id(p): name for name, p in self.module.named_parameters()}
            return by_id[id(slot.parameter)]
        return names[slot.index] if names else f"parameter {slot.index} of shape {tuple(slot.parameter.shape)}"

    def _check_agreement(self, groups: list[dict[str, Any]]) -> None:
        for name in self.whole_options:
            values = [group[name] for group in groups if name in group]
            if any(value != values[0] for value in values):
                raise ValueError(f"{name} is an option of the whole optimizer, but the groups say {values}.")

    def _check_module(self) -> None:
        if self.module is None:
            return
        if self.process_group is not None and isinstance(self.module, nn.parallel.DistributedDataParallel):
            raise ValueError(
                "give process_group= or a DistributedDataParallel module, not both: with process_group= the optimizer "
                "averages over the ranks itself, so hand it the bare module."
            )
        self._check_belongs(p for group in self.param_groups for p in group["params"])

    def _check_belongs(self, params: Iterable[Any]) -> None:
        known = {id(p) for p in self.module.parameters()} if self.module is not None else set()
        tensors = [p[1] if isinstance(p, tuple) else p for p in params]
        leaves = [p for p in tensors if isinstance(p, Tensor) and p.is_leaf]  # torch refuses anything else
        if self.module is not None and any(id(p) not in known for p in leaves):
            raise ValueError("some parameters given to the optimizer do not belong to module=: is it another model?")

    def _describe_nonfinite(self, slots: list[Slot], losses: list[Tensor], statistics: dict[str, list[Tensor]]) -> str:
        bad = [f"the loss of pass {i + 1} is {loss.item()}" for i, loss in enumerate(losses) if not loss.isfinite()]
        names = [
            self._name(slot)
            for i, slot in enumerate(slots)
            if not all(bool(tensors[i].isfinite().all()) for tensors in statistics.values())
        ]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            bad.append(f"the gradient of {', '.join(names[:3])}{more} is not finite")
        return (
            f"{'; '.join(bad)}. Weights and state are unchanged. Lower lr or rho, look at the batch, or leave such "
            "steps out with nonfinite='skip'."
        )


def make_slots(optimizer: Optimizer, fresh_state: Callable[[Tensor, dict[str, Any]], dict[str, Any]]) -> list[Slot]:
    """A slot for each parameter of an optimizer that requires a gradient, its weights copied."""
    slots = []
    index = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                state = optimizer.state.get(parameter) or fresh_state(parameter, group)
                slots.append(Slot(index, parameter, group, parameter.detach().clone(), state))
            index += 1
    return slots


def _note_as_left(grads: Iterable[Tensor | None]) -> None:
    for key in [key for key, (reference, _) in list(_left.items()) if reference() is None]:
        _left.pop(key, None)
    for grad in grads:
        if grad is not None:
            _left[id(grad)] = weakref.ref(grad), grad._version


def _was_left(grad: Tensor) -> bool:
    reference, version = _left.get(id(grad), (None, 0))
    return reference is not None and reference() is grad and version == grad._version


def write_means(slots: list[Slot]) -> None:
    """Put the weights back that were there before the step."""
    for slot in slots:
        slot.parameter.copy_(slot.mean)


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The norm of all tensors together, on the first one's device."""
    if not tensors:
        return torch.zeros(())
    norms = [torch.linalg.vector_norm(t) for t in tensors]  # torch.nn.utils.get_total_norm cannot be vmapped
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    return total


def clip_gradient(gradient: list[Tensor], limit: float | None) -> None:
    """Scale the averaged gradient down to a norm of `limit`, as `torch.nn.utils.clip_grad_norm_` does."""
    if limit is not None and gradient:
        scale = (limit / (total_norm(gradient) + 1e-6)).clamp(max=1.0)
        for tensor in gradient:
            tensor.mul_(scale.to(tensor.device))


def write(target: Tensor, value: Tensor, accept: Tensor | None) -> None:
    """Write `value` into `target` in place, unless `accept` is given and false."""
    target.copy_(value if accept is None else torch.where(accept.to(target.device), value.to(target.dtype), target))


def _check_parameter(parameter: Any) -> None:
    if not isinstance(parameter, Tensor):
        return  # torch says it better
    if parameter.layout != torch.strided:
        raise ValueError(f"a parameter has layout {parameter.layout}: dense parameters only.")
    if parameter.is_complex():
        raise ValueError("a parameter is complex: real ones only (torch.view_as_real gives a real view).")


def _may_be_of(value: Tensor, parameter: Tensor) -> bool:
    """Whether state of this shape can belong to a parameter: of its shape, or with dimensions left out or of size 1.

    Counters have no dimension, and Adafactor keeps means over rows and over columns.
    """
    left = iter(parameter.shape)
    return all(size == 1 or size in left for size in value.shape)


def all_finite(tensors: list[Tensor]) -> Tensor:
    """A 0-dim boolean: whether there is no infinity and no NaN."""
    device = tensors[-1].device
    # A sum is finite if its terms are, unless they are near the largest number there is. It is one pass over memory,
    # where isfinite() is four, which no CPU vectorises.
    sums = [t.sum(dtype=torch.promote_types(t.dtype, torch.float32)).to(device, torch.float64) for t in tensors]
    return torch.stack(sums).isfinite().all()


def _copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_copied(value) for value in tree]
    return tree
