"""Convolutions with one set of weights per group of examples, as torch operators. vmap over weights needs them.

torch turns these convolutions into one with `groups=`, whose groups lie side by side in the channels. cuDNN runs it
group by group, or converts its layout. Here there are three operators instead. Their rules for vmap put the examples of
one group after those of the other. On CUDA each operator is one kernel (`bsam.kernels.convolution_triton`), on the CPU
it calls torch's own functions. Images (groups x examples, channels, height, width) are channels last in memory, as
inputs and as outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from bsam.compiler.registry import register

__all__ = ["Convolution", "joined"]


class Convolution:
    """The arguments of `torch.conv2d`, after autocast. A call computes the convolution with our operators."""

    def __init__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> None:
        self.x, self.w, self.bias, self.groups = input, weight, bias, groups
        self.stride, self.padding, self.dilation = (
            tuple(pair) if isinstance(pair, Sequence) else (pair, pair) for pair in (stride, padding, dilation)
        )
        if torch.is_autocast_enabled(input.device.type):
            short = torch.get_autocast_dtype(input.device.type)
            self.x, self.w = input.to(short), weight.to(short)
            self.bias = None if bias is None else bias.to(short)

    @property
    def fits(self) -> bool:
        """Whether our operators support the arguments. They do not where torch must raise an error."""
        if self.x.dim() != 4 or self.w.dim() != 4 or len(self.padding) != 2:  # a padding by name has more letters
            return False
        padded = [size + 2 * around for size, around in zip(self.x.shape[2:], self.padding, strict=True)]  # type: ignore[operator]
        return (
            self.groups == 1
            and self.x.shape[1] == self.w.shape[1]
            and all(size >= kernel for size, kernel in zip(padded, self.w.shape[2:], strict=True))
            and len(self.x) * math.prod(padded) * max(self.w.shape[:2]) < 2**31  # the kernels use 32-bit indices
            and self.dilation == (1, 1)
            and all(len(set(pair)) == 1 for pair in (self.w.shape[2:], self.stride, self.padding))
            and max(self.w.shape[:2]) >= 4  # tiles have 16 channels
            and self.x.dtype == self.w.dtype
            and self.x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        )

    def __call__(self) -> Tensor:
        """The convolution."""
        tf32 = bool(torch.backends.cudnn.allow_tf32)  # torch's own setting for convolutions
        y: Tensor = _Convolve.apply(self.x, self.w, self.stride[0], self.padding[0], tf32)[0]  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias[:, None, None]


class _Convolve(torch.autograd.Function):
    """Computes a convolution, and its weights in the layout tap by tap: (size, size, outputs, inputs)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: int, padding: int, tf32: bool) -> tuple[Tensor, Tensor]:
        by_tap = w.permute(2, 3, 0, 1).contiguous()
        return torch.ops.bsam.convolution(x, by_tap[None], stride, padding, tf32), by_tap

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, w, *ctx.options = inputs
        ctx.save_for_backward(x, w, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, w, by_tap = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives, which the operators do not have
            stride, padding, _ = ctx.options
            pairs = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1
            dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, w, None, *pairs, [*ctx.needs_input_grad[:2], False])
            return dx, dw, None, None, None
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.bsam.convolution_input_gradient(dy, by_tap[None], *x.shape[2:], *ctx.options)
        if ctx.needs_input_grad[1]:
            dw = torch.ops.bsam.convolution_weight_gradient(dy, x, len(by_tap), 1, *ctx.options)[0]
        return dx, dw, None, None, None


def joined(t: Tensor, dim: int | None, count: int) -> Tensor:
    """Flatten the vmap dimension into dimension 0."""
    return (t.expand(count, *t.shape) if dim is None else t.movedim(dim, 0)).flatten(0, 1)


def _is_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last)


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _precision(tf32: bool) -> str:
    return "tf32" if tf32 else "ieee"


def _empty_images(like: Tensor, channels: int, height: int, width: int) -> Tensor:
    shape = (like.shape[0], channels, height, width)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _of_groups(images: Tensor, groups: int) -> Tensor:
    """Convert images to the layout of torch's `groups=`: (examples, groups x channels, height, width)."""
    return images.view(groups, -1, *images.shape[1:]).transpose(0, 1).flatten(1, 2)


def _to_groups(images: Tensor, groups: int) -> Tensor:
    """Convert images back from the layout of `_of_groups`."""
    return _last(images.view(len(images), groups, -1, *images.shape[2:]).transpose(0, 1).flatten(0, 1))


# ------------------------------------------------------------------ forward


def _empty_output(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    height, width = ((size + 2 * padding - w.shape[1]) // stride + 1 for size in x.shape[2:])
    return _empty_images(x, w.shape[3], height, width)


@torch.library.custom_op("bsam::convolution", mutates_args=(), device_types="cpu")
def _convolution(x: Tensor, w: Tensor, stride: int, padding: int, tf32: bool) -> Tensor:
    groups, w_aten = len(w), w.permute(0, 3, 4, 1, 2).flatten(0, 1)
    y = F.conv2d(_of_groups(x, groups), w_aten, stride=stride, padding=padding, groups=groups)
    return _to_groups(y, groups)


@_convolution.register_fake
def _(x: Tensor, w: Tensor, stride: int, padding: int, tf32: bool) -> Tensor:
    return _empty_output(x, w, stride, padding)


@_convolution.register_kernel("cuda")
def _(x: Tensor, w: Tensor, stride: int, padding: int, tf32: bool) -> Tensor:
    from bsam.kernels.convolution_triton import gather_convolution

    y = _empty_output(x, w, stride, padding)
    gather_convolution(
        _last(x), w.contiguous(), y, stride=stride, padding=padding, transposed=False, precision=_precision(tf32)
    )
    return y


# ------------------------------------------------------------------ gradient with respect to the input


@torch.library.custom_op("bsam::convolution_input_gradient", mutates_args=(), device_types="cpu")
def _input_gradient(dy: Tensor, w: Tensor, height: int, width: int, stride: int, padding: int, tf32: bool) -> Tensor:
    groups, w_aten = len(w), w.permute(0, 3, 4, 1, 2).flatten(0, 1)
    shape = (dy.shape[0] // groups, groups * w.shape[4], height, width)
    dx: Tensor = conv2d_input(  # type: ignore[no-untyped-call]
        shape, w_aten, _of_groups(dy, groups), stride=stride, padding=padding, groups=groups
    )
    return _to_groups(dx, groups)


@_input_gradient.register_fake
def _(dy: Tensor, w: Tensor, height: int, width: int, stride: int, padding: int, tf32: bool) -> Tensor:
    return _empty_images(dy, w.shape[4], height, width)


@_input_gradient.register_kernel("cuda")
def _(dy: Tensor, w: Tensor, height: int, width: int, stride: int, padding: int, tf32: bool) -> Tensor:
    from bsam.kernels.convolution_triton import gather_convolution

    dx = _empty_images(dy, w.shape[4], height, width)
    gather_convolution(
        _last(dy), w.contiguous(), dx, stride=stride, padding=padding, transposed=True, precision=_precision(tf32)
    )
    return dx


# ------------------------------------------------------------------ gradient with respect to the weights


def _empty_weights(dy: Tensor, x: Tensor, size: int, groups: int) -> Tensor:
    return dy.new_empty((groups, dy.shape[1], x.shape[1], size, size))


@torch.library.custom_op("bsam::convolution_weight_gradient", mutates_args=(), device_types="cpu")
def _weight_gradient(dy: Tensor, x: Tensor, size: int, groups: int, stride: int, padding: int, tf32: bool) -> Tensor:
    shape = (groups * dy.shape[1], x.shape[1], size, size)
    x, dy = _of_groups(x, groups), _of_groups(dy, groups)
    dw: Tensor = conv2d_weight(x, shape, dy, stride=stride, padding=padding, groups=groups)  # type: ignore[no-untyped-call]
    return dw.contiguous().view(groups, -1, *shape[1:])


@_weight_gradient.register_fake
def _(dy: Tensor, x: Tensor, size: int, groups: int, stride: int, padding: int, tf32: bool) -> Tensor:
    return _empty_weights(dy, x, size, groups)


@_weight_gradient.register_kernel("cuda")
def _(dy: Tensor, x: Tensor, size: int, groups: int, stride: int, padding: int, tf32: bool) -> Tensor:
    from bsam.kernels.convolution_triton import sum_weight_gradient, weight_gradient

    num_in, num_out = x.shape[1], dy.shape[1]
    chunks = num_chunks(dy, num_in, num_out, size, groups)
    exact = torch.float32 if chunks > 1 else dy.dtype  # a single part is rounded at once, like the sum of several
    parts = torch.empty((chunks, groups, size, size, num_out, num_in), dtype=exact, device=x.device)
    weight_gradient(_last(x), _last(dy), parts, stride=stride, padding=padding, precision=_precision(tf32))
    dw = _empty_weights(dy, x, size, groups)
    sum_weight_gradient(parts, dw)
    return dw


def power_of_2(number: int) -> int:
    """The smallest power of two that is at least the number."""
    return 1 << (number - 1).bit_length()


def weight_tiles(num_in: int, num_out: int, size: int) -> tuple[int, int, int, int]:
    """Taps, input and output channels of one tile of the weight gradient, and the number of tiles.

    A tile of few channels takes a row of taps at once, and all of them use the same values of dy.
    """
    block_in, block_out = min(64, power_of_2(num_in)), min(128, max(16, power_of_2(num_out)))
    taps = size if power_of_2(size) * block_in * block_out <= 4096 else 1
    block_in = max(block_in, 16 // power_of_2(taps))  # matrix products have at least 16 columns
    return taps, block_in, block_out, size * size // taps * -(-num_in // block_in) * -(-num_out // block_out)


def num_chunks(dy: Tensor, num_in: int, num_out: int, size: int, groups: int) -> int:
    """Number of parts of a group's pixels: enough to fill a large GPU, with about 256 pixels or more per part."""
    pixels = dy.shape[0] // groups * dy.shape[2] * dy.shape[3]
    *_, tiles = weight_tiles(num_in, num_out, size)
    return max(1, min(1024 // (groups * tiles), -(-pixels // 256)))


# ------------------------------------------------------------------ rules for vmap


def _vmap_images(operator: Any) -> Callable[..., Any]:
    """Make the vmap rule of an operator that takes images and weights."""

    def rule(info: Any, dims: tuple[Any, ...], images: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, int]:
        count = info.batch_size
        if dims[1] is not None or len(w) > 1:  # otherwise the images are more examples of the same group
            w = joined(w, dims[1], count)
        y = operator(joined(images, dims[0], count), w, *rest)
        return y.unflatten(0, (count, -1)), 0

    return rule


_convolution.register_vmap(_vmap_images(torch.ops.bsam.convolution))
_input_gradient.register_vmap(_vmap_images(torch.ops.bsam.convolution_input_gradient))


@_weight_gradient.register_vmap
def _(
    info: Any, dims: tuple[Any, ...], dy: Tensor, x: Tensor, size: int, groups: int, *rest: Any
) -> tuple[Tensor, int]:
    count = info.batch_size
    images = joined(dy, dims[0], count), joined(x, dims[1], count)
    dw = torch.ops.bsam.convolution_weight_gradient(*images, size, count * groups, *rest)
    return dw.unflatten(0, (count, -1)), 0


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Replacements for images that are not channels last: the compiler fuses the conversion into other kernels."""
    ops = torch.ops.bsam

    def of_one(operator: Any) -> Callable[..., Any]:
        def converted(x: Tensor, w: Tensor, *rest: Any) -> Any:
            return NotImplemented if _is_last(x) else operator(_last(x), w, *rest)

        return converted

    def weight_gradient(dy: Tensor, x: Tensor, *rest: Any) -> Any:
        right = _is_last(dy) and _is_last(x)
        return NotImplemented if right else ops.convolution_weight_gradient(_last(dy), _last(x), *rest)

    return {
        ops.convolution.default: of_one(ops.convolution),
        ops.convolution_input_gradient.default: of_one(ops.convolution_input_gradient),
        ops.convolution_weight_gradient.default: weight_gradient,
    }


def _convolve(*arguments: Any, **options: Any) -> Any:
    """`torch.conv2d` with our operators, or NotImplemented where they do not support it."""
    convolution = Convolution(*arguments, **options)
    return convolution() if convolution.fits else NotImplemented


register(
    layers={torch.conv2d: _convolve},
    decompositions=_decompositions(),
    weight_gradients=[(torch.ops.bsam.convolution_weight_gradient.default, None)],
)
