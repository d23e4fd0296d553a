"""What a loss function reads apart from its arguments: a compiled step holds these values as they were.

The places come from the function's bytecode, like `settings.loss.weight` or `terms["kl"]`, and are found once. Each
step looks up what is there now, without running code of the user: properties and `__getattr__` are passed over.
"""

from __future__ import annotations

import dis
import enum
import functools
import numbers
import os
import site
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bsam.torch_private import own_buffers, own_layers, own_parameters

__all__ = ["change", "differing", "values_read"]

_PLAIN = (numbers.Number, str, bytes, NoneType)
_LEAVES = (*_PLAIN, Tensor, nn.Module, FunctionType, functools.partial, enum.Enum)
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    site.getusersitepackages(),
    os.path.dirname(torch.__file__),  # wherever it lies
)


class Place(NamedTuple):
    """Where a function reads: a global, a variable around it or an argument, and the steps from there."""

    kind: str
    name: str
    steps: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return self.name + "".join(f".{key}" if how == "attribute" else f"[{key!r}]" for how, key in self.steps)


def values_read(functions: Iterable[Callable[..., Any]]) -> dict[str, Any]:
    """Return the numbers, texts, tensors, layers and functions that loss functions find, by the number and the place.

    Functions and methods that they call are followed, but not those of libraries, nor a layer's `forward`. Of items
    only those with a constant key or index are known.
    """
    seen: set[tuple[int, int]] = set()
    return {f"{i}.{name}": value for i, f in enumerate(functions) for name, value in _of(f, "", seen)}


def differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names of values that differ. Tensors, layers and functions are compared as objects."""

    def same(old: Any, new: Any) -> bool:
        return old is new or (isinstance(old, _PLAIN) and type(old) is type(new) and bool(old == new))

    return [name for name in before if name in now and not same(before[name], now[name])]


def change(name: str, before: Any, now: Any) -> str:
    """Say how a value differs; a tensor is not read from the device."""
    name = name.partition(".")[2]
    if isinstance(before, _PLAIN) and isinstance(now, _PLAIN):
        return f"{name}, which was {before!r} when the TrainStep was made, and is {now!r} now"
    return f"{name}, which is another {type(now).__name__} than when the TrainStep was made"


def _of(function: Any, prefix: str, seen: set[tuple[int, int]]) -> Iterator[tuple[str, Any]]:
    """Yield what a function reads, and the functions that it finds, once each."""
    if isinstance(function, functools.partial):
        given: dict[Any, Any] = {**dict(enumerate(function.args)), **function.keywords}
        yield from ((f"{prefix}partial[{key!r}]", value) for key, value in given.items() if isinstance(value, _LEAVES))
        function = function.func
    owner = None
    if not isinstance(function, FunctionType | MethodType | nn.Module) and callable(function):
        owner, function = function, type(function).__call__
    elif isinstance(function, MethodType):
        owner, function = function.__self__, function.__func__
    if not isinstance(function, FunctionType):
        return
    while _is_of_library(function) and isinstance(vars(function).get("__wrapped__"), FunctionType):
        function = vars(function)["__wrapped__"]  # of a decorator like torch.enable_grad()
    if (id(function), id(owner)) in seen or _is_of_library(function):
        return
    seen.add((id(function), id(owner)))
    for place in _places(function.__code__):
        try:
            value = _root(function, owner, place)
            for how, key in place.steps:
                value = _attribute(value, key) if how == "attribute" else _item(value, key)
            is_leaf, is_followed = isinstance(value, _LEAVES), not isinstance(value, (*_PLAIN, Tensor, nn.Module, type))
        except Exception:  # there is none, or it is a proxy that raises whenever it is looked at
            continue
        if is_leaf:
            yield f"{prefix}{place}", value
        if is_followed:
            yield from _of(value, f"{prefix}{place}: ", seen)


@functools.lru_cache(maxsize=256)
def _places(code: CodeType, *, nested: bool = False) -> tuple[Place, ...]:
    """Return all places that the code loads from, those of lambdas and comprehensions inside it too."""
    found: dict[Place, None] = {}
    place: Place | None = None
    constant: tuple[Any, ...] = ()  # the last one loaded, which may be a key
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name == "EXTENDED_ARG":  # a part of the next one
            continue
        value = value[-1] if isinstance(value, tuple) and name.startswith("LOAD_FAST") else value  # loads two at once
        if name.startswith(("LOAD_CONST", "LOAD_SMALL_INT")) and place is not None:
            constant = (value,)
            continue
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            place = Place("global", value, ())
        elif name in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            place = Place("cell", value, ())
        elif name.startswith("LOAD_FAST") and not nested:
            place = Place("argument", value, ())
        elif name in ("LOAD_ATTR", "LOAD_METHOD") and place is not None and not constant:
            place = place._replace(steps=(*place.steps, ("attribute", value)))
        elif (name == "BINARY_SUBSCR" or instruction.argrepr == "[]") and place is not None and constant:
            place = place._replace(steps=(*place.steps, ("item", constant[0])))
        else:
            place = None
        constant = ()
        if place is not None:
            found[place] = None
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return (*found, *(place for each in inner for place in _places(each, nested=True)))


def _root(function: FunctionType, owner: Any, place: Place) -> Any:
    """Return the variable that a place begins with, or raise a LookupError."""
    code = function.__code__
    if place.kind == "global":
        return function.__globals__[place.name]
    if place.kind == "cell":
        if place.name in code.co_cellvars:  # an argument that a function inside reads too
            return _argument(function, owner, place.name)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        try:
            return cells[place.name].cell_contents
        except ValueError:  # it is empty
            raise LookupError from None
    return _argument(function, owner, place.name)


def _argument(function: FunctionType, owner: Any, name: str) -> Any:
    """Return the object of a method, or the default of an argument, or raise a LookupError."""
    code = function.__code__
    arguments = code.co_varnames[: code.co_argcount]
    if owner is not None and name == arguments[0]:
        return owner
    defaults = function.__defaults__ or ()
    given = dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    return {**given, **(function.__kwdefaults__ or {})}[name]


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute without running code of the user, or raise a LookupError."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:  # an object with slots
        held = {}
    tables: list[Any] = [held]
    if isinstance(value, nn.Module):
        tables += [own_parameters(value), own_buffers(value), own_layers(value)]
    for table in tables:
        if name in table:
            return table[name]
    if isinstance(value, ModuleType):
        raise LookupError
    fields: tuple[str, ...] = getattr(type(value), "_fields", ()) if isinstance(value, tuple) else ()
    if name in fields:  # of a NamedTuple
        return tuple.__getitem__(value, fields.index(name))
    for kind in (value if isinstance(value, type) else type(value)).__mro__:
        if name in vars(kind):
            found = vars(kind)[name]
            if isinstance(found, MemberDescriptorType) and not isinstance(value, type):
                try:
                    return found.__get__(value)
                except AttributeError:  # an empty slot
                    raise LookupError from None
            if isinstance(found, staticmethod | classmethod):
                return found.__get__(value, type(value))
            if isinstance(found, FunctionType) and not isinstance(value, type | nn.Module):
                return MethodType(found, value)
            if isinstance(found, _PLAIN):
                return found
            raise LookupError
    raise LookupError


def _item(value: Any, key: Any) -> Any:
    """Return an item without running code of the user, or raise."""
    kinds: tuple[Any, ...] = (dict, list, tuple)
    for kind in kinds:
        if isinstance(value, kind):
            return kind.__getitem__(value, key)
    raise LookupError


def _is_of_library(function: FunctionType) -> bool:
    return function.__code__.co_filename.startswith(_LIBRARIES)
