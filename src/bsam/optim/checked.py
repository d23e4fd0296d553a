"""torch.optim's contract with checks: groups, options and states that do not fit are refused before any change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from bsam.interrupts import deferred
from bsam.optim import options
from bsam.optim.probing import Slot, share_norms
from bsam.shards import cut, is_sharded, like, local, local_values

__all__ = ["CheckedOptimizer", "slots_of"]

_ADDED_BY_OTHERS = frozenset(
    ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "lr_scale", "name", "param_names")
)
"""Keys of a parameter group that schedulers and trainers write, and that no optimizer reads."""


class CheckedOptimizer(Optimizer):
    """An optimizer that checks groups, options and loaded states before anything changes.

    A subclass declares its options and its state, and checks their values in `_check_group` and `_check_state`.
    """

    _made = False  # whether the constructor is done: torch checks all groups first, then we check the module

    whole_options: ClassVar[tuple[str, ...]] = ()
    """Options of the whole optimizer. Every group holds them, so that `state_dict` does, and all groups must agree."""

    absent_options: ClassVar[dict[str, Any]] = {}
    """Values of options in a state that was saved before they existed, where these are not the defaults."""

    group_aliases: ClassVar[tuple[str, ...]] = ()
    """Names that a new group may have in place of options, which are not written into it."""

    base_optimizer: Optimizer | None = None
    """A torch optimizer that updates the weights, for a method without an update of its own."""

    def _fresh_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step: tensors of its shape, or scalars.

        A scalar named `"step"` counts the steps.
        """
        return {}

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise if an option of this group is out of range."""

    def _check_state(self, key: Any, state: dict[str, Any]) -> None:
        """Raise unless the loaded values of a parameter's state are valid; finiteness is checked elsewhere."""

    def _refuse_if_away(self, what: str) -> None:
        """Raise if the model does not hold its own weights now."""

    def _reset(self) -> None:
        """Initialise the attributes that are neither option nor state, also in a copy or an unpickled optimizer."""
        self._checked_rates: list[Any] | None = None  # the options of the groups when they were last checked
        self._checked_options: list[list[Any]] | None = None

    def _option(self, name: str) -> Any:
        """Return the value of an option of the whole optimizer."""
        return self.param_groups[0][name]

    # ------------------------------------------------------------------ groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options left out take the optimizer's defaults."""
        super().add_param_group(self._checked_group(param_group))

    def _checked_group(self, param_group: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of `param_group` with all options, after options and parameters are checked."""
        self._refuse_if_away("add parameters")
        if not isinstance(param_group, dict):
            raise TypeError(
                f"a parameter group must be a dict with the key 'params', not {type(param_group).__name__}."
            )
        params = param_group["params"]
        params = params if isinstance(params, Tensor | set) else list(params)  # a generator can be read only once
        group = {**self.defaults, **param_group, "params": params}
        self._check_keys(group)
        self._check_group(group)
        self._check_agreement([*self.param_groups, group])
        each = [p[1] if isinstance(p, tuple) else p for p in ([params] if isinstance(params, Tensor) else params)]
        for parameter in each:
            _check_parameter(parameter)
        if len({id(parameter) for parameter in each}) < len(each):
            raise ValueError(
                "a parameter is twice in one group: write model.parameters(), which has tied weights once."
            )
        if self._made and not isinstance(params, set):  # torch refuses a set
            self._check_belongs([params] if isinstance(params, Tensor) else params)
        return group

    def _check_belongs(self, params: Iterable[Any]) -> None:
        """Raise if a parameter is not one of the model's, where the model is known."""

    def _check_keys(self, group: dict[str, Any]) -> None:
        """Raise if a group has an option that the optimizer does not read."""
        known = sorted(set(self.defaults) - {"differentiable"})
        for key in group:
            if key not in self.defaults and key != "params" and key not in _ADDED_BY_OTHERS:
                known = sorted({*known, *self.group_aliases})
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"Did you mean {near[0]!r}? " if near else ""
                raise ValueError(
                    f"{key!r} is not an option of a parameter group of {type(self).__name__}, and would be ignored. "
                    f"{hint}The optimizer knows {', '.join(known)}."
                )

    def _check_agreement(self, groups: list[dict[str, Any]]) -> None:
        for name in self.whole_options:
            values = [group[name] for group in groups if name in group]
            if any(value != values[0] for value in values):
                raise ValueError(f"{name} is an option of the whole optimizer, but the groups say {values}.")

    def _check_changes(self) -> None:
        """Check the options of the groups if one was written into a group since the last call."""
        rates = [_value(group.get("lr")) for group in self.param_groups]
        if rates != self._checked_rates:
            for rate in rates:  # by itself, because schedulers write it at every step
                if rate is not None:  # a base optimizer may have none
                    options.non_negative("lr", rate)
            self._checked_rates = rates
        now = [[_value(group.get(name)) for name in self.defaults if name != "lr"] for group in self.param_groups]
        if now != self._checked_options:
            for group in self.param_groups:
                self._check_group(group)
            self._check_agreement(self.param_groups)
            self._checked_options = now

    # ------------------------------------------------------------------ states

    def _is_asked_for_state(self) -> bool:
        """Whether a step without a closure asks for a fresh state, as `torch.distributed.checkpoint` does.

        It gives all parameters gradients of zeros, sets the learning rates to 0, and takes a step.
        """
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        return (
            not self.state
            and all(float(group.get("lr", 0)) == 0 for group in self.param_groups)
            and all(p.grad is not None and not local(p.grad).any() for p in parameters)
        )

    def _make_state(self) -> None:
        """Store the state before the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self.state[parameter] = self._fresh_state(parameter, group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dictionary of copies: further steps do not change it."""
        return _copied(super().state_dict())  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`. A state that does not fit is refused before anything changes."""
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
            for key, parameter in self._matched(accepted):
                if key in accepted["state"] and self.base_optimizer is not None and is_sharded(parameter):
                    loaded = self.state[parameter]
                    whole = {k: v for k, v in loaded.items() if isinstance(v, Tensor) and v.shape == parameter.shape}
                    loaded |= {k: like(parameter, cut(v, parameter)) for k, v in whole.items()}
                elif key in accepted["state"] and self.base_optimizer is None:
                    # torch casts state to the parameter's type; a bfloat16 average with beta2 = 0.999 never moves.
                    saved, fresh = accepted["state"][key], self._fresh_state(parameter, self.param_groups[0])
                    self.state[parameter] = {
                        k: like(v, cut(torch.as_tensor(saved[k]), v).to(local(v), copy=True)) for k, v in fresh.items()
                    }

    def _matched(self, state_dict: dict[str, Any]) -> list[tuple[Any, Tensor]]:
        """Return the keys of a state, each with its parameter."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        return list(zip(keys, parameters, strict=True))

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
        matched = self._matched(state_dict)
        for i, (key, parameter) in enumerate(matched):
            present = self.state.get(parameter, {})
            for name, value in state_dict["state"].get(key, {}).items():
                if not isinstance(value, Tensor):
                    continue
                now = present.get(name)  # present state has the right shape
                fits = value.shape == now.shape if isinstance(now, Tensor) else _may_be_of(value, parameter)
                if not fits:
                    raise ValueError(
                        f"the loaded state's {name!r} of parameter {i} has shape {tuple(value.shape)}, the parameter "
                        f"has {tuple(parameter.shape)}: it belongs to another model."
                    )
                cut(value, parameter)  # raises if the value is sharded otherwise than the parameter
        for key, parameter in matched:
            if key in state_dict["state"] and self.base_optimizer is None:
                self._check_fresh(key, state_dict["state"][key], parameter)
        for key, state in state_dict["state"].items():
            if self.base_optimizer is None:
                self._check_state(key, local_values(state))
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and not bool(local(value).isfinite().all()):
                    raise ValueError(f"the loaded {name!r} of parameter {key} is not finite everywhere.")

    def _check_fresh(self, key: Any, state: dict[str, Any], parameter: Tensor) -> None:
        """Raise unless the loaded state of a parameter has the names and shapes of a fresh state."""
        for name, fresh in self._fresh_state(parameter, self.param_groups[0]).items():
            if name not in state:
                raise ValueError(f"the loaded state of parameter {key} has no {name!r}: is it of another optimizer?")
            value = state[name]
            if name == "step" and isinstance(value, int | float):
                value = torch.tensor(value)  # older versions of torch saved a number
            if not isinstance(value, Tensor) or value.shape != fresh.shape:
                seen = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"the loaded {name!r} of parameter {key} is {seen}: it must be {tuple(fresh.shape)}.")
            if name == "step" and value < 0:
                raise ValueError(f"the loaded step of parameter {key} is {value.item()}: it must be >= 0.")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._made = True
        if "_away" not in self.__dict__:
            self._reset()
        for group in self.param_groups:  # a state saved by an older version
            for name, value in {**self.defaults, **self.absent_options}.items():
                if name != "differentiable":  # torch adds it to the defaults, and expects no group to have it
                    group.setdefault(name, value)


def slots_of(optimizer: Optimizer, fresh_state: Any, *, copied: bool = True) -> list[Slot]:
    """Return one slot per parameter of an optimizer that requires a gradient.

    Args:
        optimizer: The optimizer.
        fresh_state: `fresh_state(parameter, group)` makes a state where there is none; None: slots have no state.
        copied: Whether the mean of a slot is a copy of the weights, or the weights themselves.
    """
    slots = []
    index = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                state = {}
                if fresh_state is not None:
                    state = optimizer.state.get(parameter) or fresh_state(parameter, group)
                own = local_values(state) if is_sharded(parameter) else state
                mean = local(parameter).detach()
                slots.append(Slot(index, parameter, group, mean.clone() if copied else mean, own, copied=copied))
            index += 1
    if any(is_sharded(slot.parameter) for slot in slots):
        share_norms(slots)
    return slots


def _value(option: Any) -> Any:
    """Return what an option is now, if it can be written to in place. A number on a device is not read."""
    if isinstance(option, Tensor):
        return option.item() if option.device.type == "cpu" and option.numel() == 1 else option
    return tuple(option) if isinstance(option, list) else option


def _check_parameter(parameter: Any) -> None:
    if not isinstance(parameter, Tensor):
        return  # torch raises a better error
    if parameter.layout != torch.strided:
        raise ValueError(f"a parameter has layout {parameter.layout}: only dense parameters are supported.")
    if parameter.is_complex():
        raise ValueError("a parameter is complex: it must be real (torch.view_as_real gives a real view).")


def _may_be_of(value: Tensor, parameter: Tensor) -> bool:
    """Whether state of this shape can belong to a parameter: dimensions may be missing or have size 1.

    Counters have no dimensions, and Adafactor keeps means over rows and over columns.
    """
    left = iter(parameter.shape)
    return all(size == 1 or size in left for size in value.shape)


def _copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_copied(value) for value in tree]
    return tree
