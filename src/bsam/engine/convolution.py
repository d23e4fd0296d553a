"""Convolutions with one set of weights a group, as torch operators: what vmap over the weights of a network asks for.

cuDNN runs such convolutions group by group, or converts their layout. Here they are three operators, equal to
`aten.convolution` with `groups=` and its backward, that run as one kernel each on CUDA
(`bsam.engine.convolution_triton`). `decompositions` puts them in their place while a step is traced. Images are
channels last in memory, before and after.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

__all__ = ["better_on", "decompositions"]

aten = torch.ops.aten
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def better_on(device: torch.device) -> bool:
    """Whether there are kernels for a device that are faster than torch's own."""
    return device.type == "cuda" and _HAS_TRITON


def decompositions(*, least_groups: int = 2) -> dict[Any, Callable[..., Any]]:
    """What to trace instead of aten's convolutions.

    Args:
        least_groups: Convolutions with fewer groups stay as they are.
    """

    def fits(x: Tensor, w: Tensor, arguments: Sequence[Any]) -> bool:
        stride, padding, dilation, transposed, _, groups = arguments
        return (
            groups >= least_groups
            and w.dim() == 4
            and not transposed
            and all(len(set(pair)) == 1 for pair in (w.shape[2:], stride, padding))
            and set(dilation) == {1}
            and max(w.shape[0] // groups, w.shape[1]) >= 4  # not depthwise: tiles have 16 channels
            and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        )

    def convolution(x: Tensor, w: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
        if not fits(x, w, arguments):
            return NotImplemented  # type: ignore[no-any-return]
        (stride, *_), (padding, *_), groups = arguments[0], arguments[1], arguments[5]
        y: Tensor = torch.ops.bsam.convolution(_last(x), _by_tap(w, groups), stride, padding, _tf32())
        return y if bias is None else y + bias[:, None, None]

    def convolution_backward(
        dy: Tensor, x: Tensor, w: Tensor, bias_sizes: Any, *arguments: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        *arguments, mask = arguments  # type: ignore[assignment]
        if not fits(x, w, arguments):
            return NotImplemented  # type: ignore[no-any-return]
        (stride, *_), (padding, *_), groups = arguments[0], arguments[1], arguments[5]
        dy = _last(dy)
        dx = dw = db = None
        if mask[0]:
            dx = torch.ops.bsam.convolution_input_gradient(
                dy, _by_tap(w, groups), x.shape[2], x.shape[3], stride, padding, _tf32()
            )
        if mask[1]:
            dw = torch.ops.bsam.convolution_weight_gradient(dy, _last(x), w.shape[2], stride, padding, groups, _tf32())
        if mask[2]:
            db = dy.sum((0, 2, 3))
        return dx, dw, db

    return {aten.convolution.default: convolution, aten.convolution_backward.default: convolution_backward}


def _by_tap(w: Tensor, groups: int) -> Tensor:
    """Weights (groups x outputs, inputs, size, size) as (groups, size, size, inputs, outputs)."""
    return w.view(groups, -1, *w.shape[1:]).permute(0, 3, 4, 2, 1).contiguous()


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _tf32() -> bool:
    """Whether float32 products may be rounded: torch's own setting for convolutions."""
    return bool(torch.backends.cudnn.allow_tf32)


def _precision(tf32: bool) -> str:
    return "tf32" if tf32 else "ieee"


def _empty_images(like: Tensor, channels: int, height: int, width: int) -> Tensor:
    shape = (like.shape[0], channels, height, width)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


# ------------------------------------------------------------------ forward


def _empty_output(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    height, width = ((size + 2 * padding - w.shape[1]) // stride + 1 for size in x.shape[2:])
    return _empty_images(x, w.shape[0] * w.shape[4], height, width)


@torch.library.custom_op("bsam::convolution", mutates_args=(), device_types="cpu")
def _convolution(x: Tensor, w: Tensor, stride: int, padding: int, tf32: bool) -> Tensor:
    w_aten = w.permute(0, 4, 3, 1, 2).flatten(0, 1)
    return _last(F.conv2d(x, w_aten, stride=stride, padding=padding, groups=len(w)))


@_convolution.register_fake
def _(x: Tensor, w: Tensor, stride: int, padding: int, tf32: bool) -> Tensor:
    return _empty_output(x, w, stride, padding)


@_convolution.register_kernel("cuda")
def _(x: Tensor, w: Tensor, stride: int, padding: int, tf32: bool) -> Tensor:
    from bsam.engine.convolution_triton import gather_convolution

    y = _empty_output(x, w, stride, padding)
    gather_convolution(x, w, y, stride=stride, padding=padding, transposed=False, precision=_precision(tf32))
    return y


# ------------------------------------------------------------------ gradient with respect to the input


@torch.library.custom_op("bsam::convolution_input_gradient", mutates_args=(), device_types="cpu")
def _input_gradient(dy: Tensor, w: Tensor, height: int, width: int, stride: int, padding: int, tf32: bool) -> Tensor:
    groups, w_aten = len(w), w.permute(0, 4, 3, 1, 2).flatten(0, 1)
    shape = (dy.shape[0], groups * w.shape[3], height, width)
    dx: Tensor = conv2d_input(shape, w_aten, dy, stride=stride, padding=padding, groups=groups)  # type: ignore[no-untyped-call]
    return _last(dx)


@_input_gradient.register_fake
def _(dy: Tensor, w: Tensor, height: int, width: int, stride: int, padding: int, tf32: bool) -> Tensor:
    return _empty_images(dy, len(w) * w.shape[3], height, width)


@_input_gradient.register_kernel("cuda")
def _(dy: Tensor, w: Tensor, height: int, width: int, stride: int, padding: int, tf32: bool) -> Tensor:
    from bsam.engine.convolution_triton import gather_convolution

    dx = _empty_images(dy, len(w) * w.shape[3], height, width)
    gather_convolution(dy, w, dx, stride=stride, padding=padding, transposed=True, precision=_precision(tf32))
    return dx


# ------------------------------------------------------------------ gradient with respect to the weights


def _empty_weights(dy: Tensor, x: Tensor, size: int, groups: int) -> Tensor:
    return dy.new_empty((dy.shape[1], x.shape[1] // groups, size, size))


@torch.library.custom_op("bsam::convolution_weight_gradient", mutates_args=(), device_types="cpu")
def _weight_gradient(dy: Tensor, x: Tensor, size: int, stride: int, padding: int, groups: int, tf32: bool) -> Tensor:
    shape = (dy.shape[1], x.shape[1] // groups, size, size)
    dw: Tensor = conv2d_weight(x, shape, dy, stride=stride, padding=padding, groups=groups)  # type: ignore[no-untyped-call]
    return dw.contiguous()


@_weight_gradient.register_fake
def _(dy: Tensor, x: Tensor, size: int, stride: int, padding: int, groups: int, tf32: bool) -> Tensor:
    return _empty_weights(dy, x, size, groups)


@_weight_gradient.register_kernel("cuda")
def _(dy: Tensor, x: Tensor, size: int, stride: int, padding: int, groups: int, tf32: bool) -> Tensor:
    from bsam.engine.convolution_triton import sum_weight_gradient, weight_gradient

    num_in, num_out = x.shape[1] // groups, dy.shape[1] // groups
    chunks = num_chunks(dy, num_in, num_out, size, groups)
    parts = torch.empty((chunks, groups, size, size, num_out, num_in), dtype=torch.float32, device=x.device)
    weight_gradient(x, dy, parts, stride=stride, padding=padding, precision=_precision(tf32))
    dw = _empty_weights(dy, x, size, groups)
    sum_weight_gradient(parts, dw)
    return dw


def power_of_2(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


def weight_tiles(num_in: int, num_out: int, size: int) -> tuple[int, int, int, int]:
    """Of the weight gradient: taps, input and output channels of one tile, and how many tiles there are.

    A tile of few channels takes a row of taps or all of them at once: what is read of dy serves them all.
    """
    block_in, block_out = min(128, power_of_2(num_in)), min(128, max(16, power_of_2(num_out)))
    choices = (size * size, size) if block_in >= 16 else (size,)
    taps = next((n for n in choices if power_of_2(n) * block_in * block_out <= 4096), 1)
    block_in = max(block_in, 16 // power_of_2(taps))  # products have 16 columns at least
    return taps, block_in, block_out, size * size // taps * -(-num_in // block_in) * -(-num_out // block_out)


def num_chunks(dy: Tensor, num_in: int, num_out: int, size: int, groups: int) -> int:
    """Into how many parts its pixels are cut: two programs a multiprocessor of a large GPU, of 128 pixels at least.

    With many groups there are few parts, whose sums cost little: then four.
    """
    pixels = dy.shape[0] * dy.shape[2] * dy.shape[3]
    *_, tiles = weight_tiles(num_in, num_out, size)
    programs = 528 if groups >= 16 else 264
    return max(1, min(-(-programs // (groups * tiles)), -(-pixels // 128)))
