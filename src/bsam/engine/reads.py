"""What a loss function reads apart from its arguments: a compiled step holds these values as they were."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

__all__ = ["changed", "values_read"]

_DEPTH = 4
_MOST_ITEMS = 100
"""Longer lists and dictionaries, such as histories, are not looked at."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def values_read(functions: Iterable[Callable[..., Any]]) -> dict[str, Any]:
    """Return the numbers, texts, tensors and layers that functions find in closures, globals and attributes, by name.

    Of an object only the attributes are returned whose names occur in the function. Functions of other modules, and
    what a layer reads in its `forward`, are not looked at.
    """
    return {f"{number}.{name}": value for number, f in enumerate(functions) for name, value in _of(f, "", _DEPTH)}


def changed(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """Return name, old and new value of the first difference, or None. Tensors and layers are compared as objects."""
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        same = old is new or (isinstance(old, _PLAIN) and type(old) is type(new) and old == new)
        if not same:
            return name.partition(".")[2], old, new
    return None


def _of(function: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        yield from _leaves(f"{prefix}args", [*function.args, function.keywords], (), function, depth)
        function = function.func
    owner = getattr(function, "__self__", None) if isinstance(function, MethodType) else None
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        yield from _leaves(prefix or "loss_fn", function, (), None, depth)
        return
    code = function.__code__
    if owner is not None:
        yield from _leaves(f"{prefix}self", owner, code.co_names, function, depth)
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    found = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    found |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    for name, value in found.items():
        yield from _leaves(prefix + name, value, code.co_names, function, depth)


def _leaves(name: str, value: Any, attributes: Iterable[str], reader: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (*_PLAIN, Tensor, nn.Module)):
        yield name, value
    if depth == 0 or isinstance(value, (*_PLAIN, Tensor, type)):
        return
    if isinstance(value, dict | list | tuple):
        if len(value) <= _MOST_ITEMS:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                yield from _leaves(f"{name}[{key!r}]", item, attributes, reader, depth - 1)
    elif isinstance(value, FunctionType | MethodType | functools.partial):
        if getattr(value, "__module__", None) == getattr(reader, "__module__", None) and value is not reader:
            yield from _of(value, f"{name}: ", depth - 1)
    else:
        held = getattr(value, "__dict__", {})
        own = held if reader is None and not isinstance(value, ModuleType) else {}
        for attribute in (*own, *attributes):
            if attribute in held:
                yield from _leaves(f"{name}.{attribute}", held[attribute], (), reader or value, depth - 1)


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
