"""Sharded models, `torch.distributed.fsdp.fully_shard`: the part of a tensor on this rank, and sums over all ranks.

A parameter of a sharded model is a `DTensor`: each rank holds a block of its rows, and some ranks may hold none. The
formulas of this package are elementwise, so that each rank computes with its own parts. All that is not elementwise,
such as norms and checks, is summed over the ranks by functions of this file. For ordinary tensors these functions do
nothing, and nothing here imports torch's distributed tensors before a model has them.

Before a forward pass fully_shard gathers the parameters of a layer. Gathered weights may outlive the pass: those of the
root do, after a forward pass without a backward pass. Whoever writes weights calls `reshard` first, so that the next
pass gathers the weights that were written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bsam.distributed import all_reduce_sum
from bsam.interrupts import interruptible
from bsam.torch_private import reduces_gradients, reset_after_failure

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

__all__ = [
    "Part",
    "check_gradients_are_reduced",
    "check_model",
    "cut",
    "is_sharded",
    "is_sharded_model",
    "like",
    "local",
    "local_values",
    "name_of_world",
    "on_first_rank",
    "part_of",
    "position",
    "refuse_sharded",
    "reset",
    "reshard",
    "row_here",
    "sum_everywhere",
    "sum_parts",
    "true_anywhere",
    "true_on_all",
    "whole_norms",
    "whole_values",
    "write",
]

_OLDEST = "2.11"
"""The oldest torch on which sharded models were tested."""


class Part(NamedTuple):
    """The elements of a tensor that this rank holds: `length` of dimension `dim`, from `start`."""

    dim: int
    start: int
    length: int


# ------------------------------------------------------------------ tensors


def is_sharded(tensor: Any) -> TypeGuard[DTensor]:
    """Whether a tensor is spread over the ranks of a mesh."""
    loaded = sys.modules.get("torch.distributed.tensor")  # else there is no such tensor
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, in the same memory; the tensor itself if it is not sharded."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local().detach()


def local_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return a dictionary with the parts of its tensors; the dictionary itself if none is sharded."""
    if not any(is_sharded(value) for value in values.values()):
        return values
    return {name: local(value) if isinstance(value, Tensor) else value for name, value in values.items()}


def whole_values(values: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return a dictionary of parts as one of sharded tensors, spread as a parameter is; numbers stay as they are."""
    if not is_sharded(parameter):
        return values
    return {name: like(parameter, value) if value.dim() else value for name, value in values.items()}


def part_of(tensor: Tensor) -> Part | None:
    """Return which elements of a tensor this rank holds; None if the tensor is not sharded."""
    if not is_sharded(tensor):
        return None
    axis = _axis(tensor)
    dim = tensor.placements[axis].dim  # type: ignore[attr-defined]
    size, ranks = tensor.shape[dim], tensor.device_mesh.size(axis)
    rows = -(-size // ranks)  # of the first ranks, as torch.chunk cuts
    start = min(tensor.device_mesh.get_local_rank(axis) * rows, size)
    return Part(dim, start, min(rows, size - start))


def row_here(tensor: Tensor, row: int | None) -> int | None:
    """Return the number of a row among those on this rank, or None if there is no such row or another rank has it."""
    part = part_of(tensor)
    if row is None or part is None or part.dim != 0:
        return row
    return row - part.start if part.start <= row < part.start + part.length else None


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return the sharded tensor with this part, spread as a parameter is; the part itself for other parameters."""
    if not is_sharded(parameter):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    with torch.no_grad():
        if part.device.type == mesh.device_type:
            return DTensor.from_local(
                part.detach(), mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        # With CPU offload the parts are on the CPU, and `from_local` would move them to the device of the mesh.
        whole = torch.empty_like(parameter.detach(), dtype=part.dtype)
        local(whole).copy_(part)
        return whole


def cut(value: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a value for a parameter; the value may be whole, or spread as the parameter is."""
    part = part_of(parameter)
    if is_sharded(value):
        if not is_sharded(parameter) or (value.placements, value.device_mesh) != (
            parameter.placements,
            parameter.device_mesh,
        ):
            raise ValueError(
                f"a tensor of shape {tuple(value.shape)} is sharded otherwise than its parameter. Load it by "
                "torch.distributed.checkpoint, which spreads it as the parameter is."
            )
        return local(value)
    return value if part is None or value.dim() == 0 else value.narrow(*part)


def write(target: Tensor, value: Tensor) -> None:
    """Write a value, whole or sharded, into a tensor in place."""
    local(target).copy_(cut(value, target))


# ------------------------------------------------------------------ sums over ranks


def sum_parts(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Sum one number per parameter over the ranks that hold its parts; one message per mesh."""
    found = list(values)
    places: dict[tuple[dist.ProcessGroup, str], list[int]] = {}
    for i, parameter in enumerate(parameters):
        if is_sharded(parameter):
            mesh = parameter.device_mesh
            places.setdefault((mesh.get_group(_axis(parameter)), mesh.device_type), []).append(i)
    for (group, device), own in places.items():
        total = torch.stack([found[i].detach().to(device, torch.float64) for i in own])
        if dist.get_world_size(group) > 1:
            all_reduce_sum([total], group)
        for i, number in zip(own, total.unbind(), strict=True):
            found[i] = number.to(found[i])
    return found


def whole_norms(norms: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Turn the norms of parts into the norms of whole tensors."""
    if not any(map(is_sharded, parameters)):
        return list(norms)
    squares = sum_parts([norm.double().square() for norm in norms], parameters)
    return [square.sqrt().to(norm.dtype) for square, norm in zip(squares, norms, strict=True)]


def sum_everywhere(tensors: list[Tensor], parameters: Sequence[Tensor]) -> None:
    """Sum tensors over all ranks of a sharded model, in place."""
    mesh = next((p.device_mesh for p in parameters if is_sharded(p)), None)
    if mesh is not None and tensors:
        moved = [tensor.to(mesh.device_type) for tensor in tensors]
        for group in mesh.get_all_groups():
            all_reduce_sum(moved, group)
        for tensor, total in zip(tensors, moved, strict=True):
            tensor.copy_(total)


def true_on_all(flag: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return whether a 0-dim boolean is true on all ranks of a sharded model."""
    if not any(map(is_sharded, parameters)):
        return flag
    count = (~flag).double()
    sum_everywhere([count], parameters)
    return count == 0


def true_anywhere(flags: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor whether its 0-dim boolean is true on any rank that holds a part of the tensor."""
    return [bool(count) for count in sum_parts([flag.float() for flag in flags], tensors)]


def position(parameters: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the number of this rank in the mesh, and that of all ranks; None if no parameter is sharded."""
    mesh = next((p.device_mesh for p in parameters if is_sharded(p)), None)
    if mesh is None:
        return None
    return mesh.mesh.flatten().tolist().index(dist.get_rank()), mesh.size()


def name_of_world(tensors: Iterable[Tensor]) -> str:
    """Return a remark for a text: over how many ranks the tensors are sharded; nothing if they are not."""
    found = position(list(tensors))
    return "" if found is None else f", sharded over {found[1]} ranks"


def on_first_rank(tensors: Mapping[str, Tensor], work: Callable[[Callable[[str], Tensor]], None]) -> None:
    """Let the first rank work on whole tensors, which are gathered one at a time. All ranks must call this.

    Args:
        tensors: Tensors by name; some of them are sharded.
        work: Asks for each tensor once, by `work(whole)` and `whole(name)`, in the order of sorted names. It runs on
            the first rank only. If it raises, all ranks raise.
    """
    found = position(list(tensors.values()))
    assert found is not None
    names = iter(sorted(tensors))

    def whole(name: str) -> Tensor:
        if name != next(names):
            raise AssertionError(f"{name} was asked for out of order")
        return _gathered(tensors[name])

    error: BaseException | None = None
    if found[0] == 0:
        try:
            work(whole)
        except Exception as raised:  # the other ranks still wait
            error = raised
    for name in names:
        _gathered(tensors[name])
    failed = torch.tensor(float(error is not None))
    sum_everywhere([failed], list(tensors.values()))
    if error is not None:
        raise error
    if failed:
        raise RuntimeError("the first rank of the mesh has raised an error, which it shows.")


def _gathered(tensor: Tensor) -> Tensor:
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad(), interruptible():
        gathered: Tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
        return gathered


# ------------------------------------------------------------------ models


def is_sharded_model(module: nn.Module | None) -> bool:
    """Whether `fully_shard` was applied to a model or to a part of it."""
    return any(True for _ in _shards_of(module))


def reshard(module: nn.Module | None) -> None:
    """Drop gathered weights, so that the next pass gathers the present ones, and `parameters()` are sharded again."""
    for shard in _shards_of(module):
        shard.reshard()


def reset(module: nn.Module | None) -> None:
    """Bring a sharded model into the state before a pass, after an exception in a pass."""
    for shard in _shards_of(module):
        reset_after_failure(shard)
    reshard(module)


def refuse_sharded(what: str, model: nn.Module, instead: str) -> None:
    """Raise if a model is sharded."""
    if is_sharded_model(model):
        raise ValueError(f"{what} needs the whole model in one process, and this model is sharded: {instead}.")


def check_model(module: nn.Module | None, parameters: Sequence[Tensor]) -> bool:
    """Raise unless an optimizer can train these parameters of a model; return whether they are sharded.

    Args:
        module: The model, if it is known.
        parameters: The parameters of the optimizer that require a gradient.
    """
    found, managed = [is_sharded(p) for p in parameters], is_sharded_model(module)
    if not parameters or not (any(found) or managed):
        return False
    if not any(found):
        raise RuntimeError(
            "the model was sharded after the optimizer was made, so that the optimizer has parameters that the model "
            "does not use: call fully_shard(model) first, and then make the optimizer. If a forward pass has gathered "
            "the weights in between, call model.reshard(). A saved state is loaded by optimizer.load_state_dict."
        )
    if module is None:
        raise ValueError(
            "the parameters are sharded, and the optimizer has to drop gathered weights before it writes weights: make "
            "it with module=model."
        )
    if not managed:
        raise ValueError(
            "the parameters are DTensors, but no part of module= is under torch.distributed.fsdp.fully_shard: tensor "
            "parallelism is not supported. Shard the model by fully_shard instead, or give the optimizer ordinary "
            "parameters."
        )
    if torch.__version__ < _OLDEST:
        raise RuntimeError(
            f"sharded models need torch {_OLDEST} or newer, and this is torch {torch.__version__}, whose fully_shard "
            "does not recover from a pass that failed: install a newer torch, or use process_group= with whole models."
        )
    names = {id(p): name for name, p in module.named_parameters()}
    for parameter in parameters:
        name = names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
        if not is_sharded(parameter):
            raise ValueError(
                f"{name} is not sharded, but other parameters are: its gradient would not be averaged over the "
                "ranks. Call fully_shard(model) on the whole model after its layers, without ignored_params, or freeze "
                "it."
            )
        kinds = [type(placement).__name__ for placement in parameter.placements]
        if kinds not in (["Shard"], ["Replicate", "Shard"]):
            raise ValueError(
                f"{name} has the placements {parameter.placements}: tensor parallelism is not supported. Shard the "
                "model by fully_shard alone, over a mesh of one dimension, or of two, the first one for replicas."
            )
        first = parameters[0]
        if is_sharded(first) and set(_ranks(parameter)) != set(_ranks(first)):
            raise ValueError(
                f"{name} is on the ranks {sorted(_ranks(parameter))}, and others are on {sorted(_ranks(first))}: "
                "all parameters of an optimizer must be on the same ranks. Make one optimizer for each mesh."
            )
    own = {id(p) for p in parameters}
    other = [name for name, p in module.named_parameters() if is_sharded(p) and p.requires_grad and id(p) not in own]
    if other:
        raise ValueError(
            f"{other[0]} of the sharded model requires a gradient, but is not a parameter of this optimizer: each pass "
            "of a step would add to its .grad. Give it to the optimizer, or freeze it by requires_grad_(False)."
        )
    return True


def check_gradients_are_reduced(module: nn.Module | None) -> None:
    """Raise if the gradients of a sharded model would not be averaged over the ranks."""
    if not all(reduces_gradients(shard) for shard in _shards_of(module)):
        raise RuntimeError(
            "set_requires_gradient_sync(False) was called on the model, so that gradients would not be averaged over "
            "the ranks: leave it out. Every micro-batch has gradients of its own, and each of them is averaged."
        )


def _shards_of(module: nn.Module | None) -> Iterator[FSDPModule]:
    """Yield the parts of a model to which `fully_shard` was applied."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    # `fully_shard` makes a class of its own for what it shards: without any, no model need be walked through.
    if loaded is not None and module is not None and loaded.FSDPModule.__subclasses__():
        yield from (each for each in module.modules() if isinstance(each, loaded.FSDPModule))


def _axis(tensor: DTensor) -> int:
    """Return the dimension of the mesh over which a tensor is sharded: the last one."""
    return tensor.device_mesh.ndim - 1


def _ranks(tensor: DTensor) -> list[int]:
    found: list[int] = tensor.device_mesh.mesh.flatten().tolist()
    return found
