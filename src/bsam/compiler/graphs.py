"""Simplifies traced graphs before they are compiled, without changing any number."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from bsam.compiler.registry import WEIGHT_GRADIENTS

__all__ = ["keep_layouts", "last_sums", "merge_views", "share_copies"]

aten = torch.ops.aten
_LAYOUTS = (torch.contiguous_format, torch.channels_last)
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default)


def merge_views(graph: GraphModule) -> None:
    """Merge consecutive reshapes, merge consecutive permutations, and remove those without effect.

    vmap moves dimensions around every operation, so most nodes of its graphs are of this kind. Every view becomes a
    reshape, which copies only if the strides that the compiler chooses need it.
    """
    for node in graph.graph.nodes:
        if node.target in _RESHAPES:
            source, shape = node.args[0], list(node.meta["val"].shape)
            while source.target is aten.reshape.default:
                source = source.args[0]
            node.target, node.args, node.kwargs = aten.reshape.default, (source, shape), {}
            same = list(source.meta["val"].shape) == shape
        elif node.target is aten.permute.default:
            source, order = node.args[0], _positive(node.args[1])
            while source.target is aten.permute.default:
                inner = _positive(source.args[1])
                source, order = source.args[0], [inner[dim] for dim in order]
            node.args = (source, order)
            same = order == sorted(order)
        else:
            continue
        if same:
            node.replace_all_uses_with(source)
    graph.graph.eliminate_dead_code()


def _positive(order: list[int]) -> list[int]:
    return [dim % len(order) for dim in order]


def keep_layouts(graph: GraphModule) -> None:
    """Make the compiler write images once, in the layout that our operators read: channels last.

    Results of vmap have one more dimension. The compiler would write them channel by channel, and copy them for every
    operator that reads them as images. It writes the input of `as_strided` with the strides of the trace.
    """
    for node in list(graph.graph.nodes):
        if node.target is not aten.reshape.default or not _read_by_ours(node) or not _is_computed(node.args[0]):
            continue
        (source, shape), value = node.args, node.args[0].meta["val"]
        try:
            strides = torch.empty_strided(value.shape, value.stride(), device="meta").view(shape).stride()
        except RuntimeError:  # the traced reshape is a copy
            continue
        with graph.graph.inserting_before(node):
            written = graph.graph.call_function(aten.as_strided.default, (source, shape, list(strides), 0))
        written.meta = dict(node.meta)
        node.replace_all_uses_with(written)
        graph.graph.erase_node(node)


def _read_by_ours(node: Node) -> bool:
    return any(getattr(user.target, "namespace", "") == "bsam" for user in node.users)


def _is_computed(node: Node) -> bool:
    """Whether an elementwise operation computes the node, so that it has its own memory."""
    return node.target is aten._to_copy.default or torch.Tag.pointwise in getattr(node.target, "tags", ())


def share_copies(graph: GraphModule) -> None:
    """Make a copy that changes a layout only once, if several operators read it and one of them is ours.

    The compiler would copy for every operator that reads it. It writes the input of `as_strided` only once.
    """
    for node in list(graph.graph.nodes):
        changes_layout = node.target is aten.clone.default and node.kwargs.get("memory_format") in _LAYOUTS
        if changes_layout and len(node.users) > 1 and _read_by_ours(node):
            value = node.meta["val"]
            with graph.graph.inserting_after(node):
                arguments = (node, list(value.shape), list(value.stride()), 0)
                written = graph.graph.call_function(aten.as_strided.default, arguments)
            written.meta = dict(node.meta)
            node.replace_all_uses_with(written, delete_user_cb=lambda user, written=written: user is not written)


def last_sums(graph: GraphModule) -> set[Node]:
    """Return the nodes that depend only on weight gradients, and outputs that concatenate them."""
    found: set[Node] = set()
    for node in graph.graph.nodes:
        late = [each in found or _is_weight_gradient(each) for each in node.all_input_nodes]
        together = any if node.target is aten.cat.default else all
        if node.op == "call_function" and late and together(late):
            found.add(node)
    for node in reversed(graph.graph.nodes):
        if any(user not in found and user.op != "output" for user in node.users):
            found.discard(node)
    return found


def _is_weight_gradient(node: Node) -> bool:
    if node.target is operator.getitem:
        of, index = node.args
        return (getattr(of, "target", None), index) in WEIGHT_GRADIENTS
    return (node.target, None) in WEIGHT_GRADIENTS
