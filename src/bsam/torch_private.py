"""All uses of torch's private names, each under a name of our own.

Private names may change in torch without notice; this is the only file that would break. For torch 2.8 to 2.13.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as graph_break  # torch.compile does not look into the function
from torch.amp import GradScaler
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm  # BatchNorm1d, 2d, 3d, SyncBatchNorm, lazy ones
from torch.nn.modules.batchnorm import _NormBase as NormBase  # all of these, and InstanceNorm
from torch.optim import Optimizer
from torch.utils import _pytree as pytree  # nested structures of tensors, as in torch.func

__all__ = [
    "AnyBatchNorm",
    "NormBase",
    "compile_graph",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "graph_break",
    "has_step_hooks",
    "is_transformed",
    "is_view",
    "mark_as_stepped",
    "own_buffers",
    "own_layers",
    "own_parameters",
    "pytree",
    "reduces_gradients",
    "reset_after_failure",
    "scaler_round",
    "scaler_stage",
    "scan_stack",
    "trace_graph",
    "transient_buffers",
    "version_of",
]

foreach_add_ = torch._foreach_add_  # a.add_(b) for many pairs, in one launch
foreach_copy_ = torch._foreach_copy_  # a.copy_(b)
foreach_mul_ = torch._foreach_mul_  # a.mul_(b)
foreach_norm = torch._foreach_norm  # torch.linalg.vector_norm(a)


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers registered in this module itself, also those that are None, unlike `named_buffers`."""
    return module._buffers


def own_layers(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the layers registered in this module itself, as `named_children` does, in a fifth of the time."""
    return module._modules


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters registered in this module itself, also those that are None."""
    return module._parameters


def transient_buffers(module: nn.Module) -> set[str]:
    """Return the names of this module's buffers that were registered with `persistent=False`."""
    return module._non_persistent_buffers_set


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place writes to the tensor, which autograd checks for saved tensors."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Whether the tensor shares its memory with another one, as gradients of DistributedDataParallel may do."""
    return tensor._is_view()


def is_transformed(tensor: Tensor) -> bool:
    """Whether a transform of `torch.func`, such as vmap, computes with the tensor: it is not a single number then."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def scaler_round(scaler: GradScaler) -> object:
    """Return an object that the scaler replaces in each `update()`."""
    return scaler._per_optimizer_states


def scaler_stage(scaler: GradScaler, optimizer: Optimizer) -> str:
    """Return what the scaler has done with the optimizer's gradients: "READY" (nothing), "UNSCALED" or "STEPPED"."""
    state = scaler._per_optimizer_states.get(id(optimizer))
    return "READY" if state is None else str(state["stage"].name)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether a hook was registered by `register_step_pre_hook` or `register_step_post_hook`."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def reduces_gradients(shard: Any) -> bool:
    """Whether a part of a model under `fully_shard` averages its gradients over the ranks in a backward pass."""
    state = shard._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch up to 2.11 has one group, or none
    groups = [state._fsdp_param_group] if groups is None else groups
    return all(group.reduce_grads and group.all_reduce_grads for group in groups if group is not None)


def reset_after_failure(shard: Any) -> None:
    """Let a part of a model under `fully_shard` forget a pass that was not completed, where torch can do this."""
    state = shard._get_fsdp_state()
    if state._is_root and hasattr(shard, "reset_iter_state"):
        shard.reset_iter_state()


def mark_as_stepped(optimizer: Optimizer) -> None:
    """Tell schedulers that the optimizer has stepped: they warn if they step first."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def scan_stack(function: Callable[[list[Tensor]], Tensor], stacks: list[Tensor]) -> Tensor:
    """Stack function([s[i] for s in stacks]) over all i: a loop in an exported program."""
    from torch._higher_order_ops import scan

    def step(carry: Tensor, slices: list[Tensor]) -> tuple[Tensor, Tensor]:
        return carry.clone(), function(slices)

    _, outputs = scan(step, stacks[0].new_zeros(()), stacks)
    return outputs  # type: ignore[no-any-return]


def trace_graph(function: Callable[..., Any], inputs: list[Tensor], table: dict[Any, Any]) -> GraphModule:
    """Trace a function of tensors. (`torch.export` does not trace functions that write under vmap.)

    Args:
        function: Takes tensors.
        inputs: Example inputs.
        table: Maps operators to functions that are traced in their place.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def compile_graph(graph: GraphModule, inputs: list[Tensor], options: dict[str, Any]) -> Callable[..., Sequence[Tensor]]:
    """Compile the graph with TorchInductor, as `torch.compile` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler: deprecations, hints on speed
        from torch._guards import TracingContext, tracing
        from torch._inductor import compile as compile_fx
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        # The compiler caches the result on disk only if it knows that shapes are fixed.
        fake = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
        with tracing(TracingContext(fake)):
            return compile_fx(graph, inputs, options=options)  # type: ignore[arg-type,no-any-return]
