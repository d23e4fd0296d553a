"""Convolutions with one set of weights per group, as implicit matrix products on tensor cores.

Images are stored pixel by pixel, (groups, examples, height, width, channels), so a tile of pixels of one group is a
contiguous matrix. A program takes one group, a tile of pixels and a tile of output channels. It adds up small matrix
products, each over some taps of the kernel and a block of input channels. With x, y and w of one group:

    forward   y[p, o]     =  sum over taps t, channels c of   x[p s + t - pad, c]       w[o, c, t]
    dgrad     dx[p, c]    =  sum over taps t, channels o of   dy[(p + pad - t) / s, o]   w[o, c, t]
    wgrad     dw[o, c, t] =  sum over pixels p of             dy[p, o]  x[p s + t - pad, c]

One kernel computes the first two (`TRANSPOSED`). The kernel of the third cuts the pixels into chunks, and another
kernel adds up their partial sums. There are no atomic additions, so results do not change from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bsam.kernels.convolution import power_of_2, weight_tiles

__all__ = ["gather_convolution", "sum_weight_gradient", "weight_gradient"]


@triton.jit  # type: ignore[untyped-decorator]
def _gather_kernel(  # type: ignore[no-untyped-def]
    x, w, y, images,
    in_height: tl.constexpr, in_width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, TRANSPOSED: tl.constexpr, TAPS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    # In a transposed convolution with a stride, the row and the column of a pixel decide which taps reach it. Pixels
    # with the same remainder modulo the stride share their taps, and are computed together.
    CLASSES: tl.constexpr = STRIDE * STRIDE if TRANSPOSED else 1
    STEP: tl.constexpr = STRIDE if TRANSPOSED else 1
    group = tl.program_id(1).to(tl.int64)
    x += group * images * in_height * in_width * IN
    y += group * images * out_height * out_width * OUT
    w += group * (SIZE * SIZE * IN * OUT)
    kind = tl.program_id(0) % CLASSES
    kind_row, kind_column = kind // STEP, kind % STEP
    height, width = (out_height - kind_row + STEP - 1) // STEP, (out_width - kind_column + STEP - 1) // STEP
    p = tl.program_id(0) // CLASSES * BLOCK_P + tl.arange(0, BLOCK_P)
    here = p < images * height * width
    if out_height < STEP or out_width < STEP:
        height, width = tl.maximum(height, 1), tl.maximum(width, 1)  # divisors must not be 0, but a class may be empty
    column = p % width * STEP + kind_column
    row = p // width % height * STEP + kind_row
    image = p // (width * height)
    first_row, first_column = (kind_row + PAD) % STEP, (kind_column + PAD) % STEP
    taps_down = (SIZE - first_row + STEP - 1) // STEP
    taps_across = (SIZE - first_column + STEP - 1) // STEP

    # The pixel of x is (row0 + down, column0 + across); down and across grow or fall from tap to tap.
    if TRANSPOSED:
        row0, column0 = (row + PAD - first_row) // STRIDE, (column + PAD - first_column) // STRIDE
    else:
        row0, column0 = row * STRIDE - PAD, column * STRIDE - PAD
    SIGN: tl.constexpr = -1 if TRANSPOSED else 1
    if STRIDE == 1 and in_height == out_height and in_width == out_width:
        origin = p - SIGN * PAD * (in_width + 1)  # the same value, without rows and columns
    else:
        origin = (image * in_height + row0) * in_width + column0
    from_x = x + (origin * IN)[:, None]
    row0 = tl.where(here, row0, -SIZE)  # pixels beyond the last count as outside

    # One turn of the loop adds TAPS taps of a block of channels: K = TAPS x BLOCK_IN terms of the sum.
    o = tl.program_id(2) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    k = tl.arange(0, TAPS * BLOCK_IN)
    BLOCKS: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN
    total = tl.zeros((BLOCK_P, BLOCK_OUT), dtype=tl.float32)
    for turn in range((taps_down * taps_across + TAPS - 1) // TAPS * BLOCKS):
        c = turn % BLOCKS * BLOCK_IN + k % BLOCK_IN
        tap = turn // BLOCKS * TAPS  # one number, or one number per term
        if TAPS > 1:
            tap = tap + (k // BLOCK_IN)[None, :]
        down, across = tap // taps_across, tap % taps_across
        i, j = row0[:, None] + SIGN * down, column0[:, None] + SIGN * across
        inside = (i.to(tl.uint32) < in_height) & (j.to(tl.uint32) < in_width)  # as unsigned, a negative number is large
        used = (tap < taps_down * taps_across) & (c < IN)[None, :]
        at = SIGN * (down * in_width + across) * IN + c[None, :]
        xs = tl.load(from_x + at, mask=inside & used, other=0.0)
        tap = turn // BLOCKS * TAPS
        if TAPS > 1:
            tap = tap + (k // BLOCK_IN)[:, None]
        of = (first_row + tap // taps_across * STEP) * SIZE + first_column + tap % taps_across * STEP
        used = (tap < taps_down * taps_across) & (c < IN)[:, None] & (o < OUT)[None, :]
        # w is always [of, outputs, inputs]; the channels of x are the inputs, or with TRANSPOSED the outputs.
        at = c[:, None] * OUT + o[None, :] if TRANSPOSED else c[:, None] + o[None, :] * IN
        ws = tl.load(w + of * (IN * OUT) + at, mask=used, other=0.0)
        total = tl.dot(xs, ws, total, input_precision=PRECISION)
    to = (p if CLASSES == 1 else (image * out_height + row) * out_width + column) * OUT
    tl.store(y + to[:, None] + o[None, :], total.to(y.dtype.element_ty), mask=here[:, None] & (o[None, :] < OUT))


@triton.jit  # type: ignore[untyped-decorator]
def _weight_kernel(  # type: ignore[no-untyped-def]
    x, dy, dw, groups, pixels, chunk,
    in_height: tl.constexpr, in_width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr,
    SIZE: tl.constexpr, TAPS: tl.constexpr, WIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    # A program takes TAPS taps, padded to WIDE, and a block of input and of output channels.
    TILES: tl.constexpr = SIZE * SIZE // TAPS
    BLOCKS: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN
    part, group, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    x += group * (pixels // (out_width * out_height)) * in_height * in_width * IN
    dy += group * pixels * OUT
    n = tl.arange(0, WIDE * BLOCK_IN)
    block = tile // TILES
    c = block % BLOCKS * BLOCK_IN + n % BLOCK_IN
    o = block // BLOCKS * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    used = (n // BLOCK_IN < TAPS) & (c < IN)
    tap = tile % TILES * TAPS + n // BLOCK_IN
    of_tap = tap[None, :] if TAPS > 1 else tile % TILES
    down, across = of_tap // SIZE, of_tap % SIZE
    at = (down * in_width + across) * IN + c[None, :]
    total = tl.zeros((BLOCK_OUT, WIDE * BLOCK_IN), dtype=tl.float32)
    end = tl.minimum(part * chunk + chunk, pixels)
    for first in range(part * chunk, end, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        here = p < end
        row0, column0 = p // out_width % out_height * STRIDE - PAD, p % out_width * STRIDE - PAD
        if STRIDE == 1 and in_height == out_height and in_width == out_width:
            origin = p - PAD * (in_width + 1)  # the same value, without rows and columns
        else:
            origin = (p // (out_width * out_height) * in_height + row0) * in_width + column0
        row0 = tl.where(here, row0, -SIZE)  # pixels beyond the last count as outside
        i, j = row0[:, None] + down, column0[:, None] + across
        inside = (i.to(tl.uint32) < in_height) & (j.to(tl.uint32) < in_width) & used[None, :]
        xs = tl.load(x + (origin * IN)[:, None] + at, mask=inside, other=0.0)
        of = dy + (p * OUT)[:, None] + o[None, :]
        ds = tl.load(of, mask=here[:, None] & (o[None, :] < OUT), other=0.0)
        total = tl.dot(tl.trans(ds), xs, total, input_precision=PRECISION)
    of = ((part * groups + group) * SIZE * SIZE + tap) * OUT
    to, here = dw + (of[None, :] + o[:, None]) * IN + c[None, :], (o[:, None] < OUT) & used[None, :]
    tl.store(to, total.to(dw.dtype.element_ty), mask=here)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    parts, dw, chunks, pairs, numel, TAPS: tl.constexpr, WIDE: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr
):
    # A pair is an output and an input channel of one group. Reads are tap by tap, writes are pair by pair.
    pair, tap = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)
    group = tl.program_id(1).to(tl.int64)
    at = parts + (group * TAPS + tap)[:, None] * pairs + pair[None, :]
    used = (tap < TAPS)[:, None] & (pair < pairs)[None, :]
    total = tl.zeros((WIDE, BLOCK), dtype=tl.float32)
    for chunk in range(0, chunks, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            total += tl.load(at + i * numel, mask=used & (chunk + i < chunks), other=0.0)
        at += AT_ONCE * numel
    to = (group * pairs + pair)[:, None] * TAPS + tap[None, :]
    written = (pair < pairs)[:, None] & (tap < TAPS)[None, :]
    tl.store(dw + to, tl.trans(total).to(dw.dtype.element_ty), mask=written)


def gather_blocks(
    num_in: int, num_out: int, size: int, all_taps: int, itemsize: int
) -> tuple[int, int, int, int, int, int]:
    """Taps, pixels, input and output channels of one tile, warps and pipeline stages.

    The tiles of all stages fit into the shared memory of GPUs that have 99 KB, where a pipeline of three stages has two
    buffers, and of Hopper, where it has three buffers.

    Args:
        num_in: Channels of the images that are read.
        num_out: Channels of the images that are written.
        size: Size of the convolution's kernel.
        all_taps: Largest number of taps that reach a pixel.
        itemsize: Bytes per element.
    """
    block_out = min(128, max(16, power_of_2(num_out)))
    block_in = min(128 // itemsize if block_out == 128 else 64, power_of_2(num_in))
    # Several taps at once if there are few channels; otherwise the matrix products would be too short.
    taps = max(1, min(16 // block_in, power_of_2(size * size)))
    block_in = max(block_in, 16 // taps)
    turns = triton.cdiv(all_taps, taps) * triton.cdiv(num_in, block_in)
    block_p = 128 if block_out == 128 else (512 if block_out <= 32 else 256) // itemsize
    return taps, block_p, block_in, block_out, 4, 1 if turns <= 4 else 3


def gather_convolution(
    x: Tensor, w: Tensor, y: Tensor, *, stride: int, padding: int, transposed: bool, precision: str
) -> None:
    """Write the convolution of x with w into y, or, with `transposed`, the gradient with respect to its input.

    Args:
        x: Images (groups x examples, channels, height, width), channels last; with `transposed` the gradient.
        w: Weights (groups, size, size, outputs, inputs), contiguous.
        y: The output, channels last in memory.
        stride: Stride of the convolution.
        padding: Padding of the convolution.
        transposed: Whether to compute the gradient with respect to the input.
        precision: Precision of float32 products: "tf32" or "ieee".
    """
    groups, size, _, *channels = w.shape
    num_in, num_out = channels if transposed else reversed(channels)
    images, height, width = y.shape[0] // groups, *y.shape[2:]
    classes = stride if transposed else 1
    pixels = images * triton.cdiv(height, classes) * triton.cdiv(width, classes)
    taps, block_p, block_in, block_out, warps, stages = gather_blocks(
        num_in, num_out, size, triton.cdiv(size, classes) ** 2, x.element_size()
    )
    others = classes * classes * groups * triton.cdiv(num_out, block_out)
    while block_p > 64 and triton.cdiv(pixels, block_p) * others < 128:
        block_p //= 2  # smaller tiles for few pixels: a large GPU has about 128 multiprocessors
    grid = (triton.cdiv(pixels, block_p) * classes * classes, groups, triton.cdiv(num_out, block_out))
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _gather_kernel[grid](
            x, w, y, images, *x.shape[2:], height, width,
            num_in, num_out, size, stride, padding, transposed, taps, precision, block_p, block_in, block_out,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip


def weight_blocks(block_out: int, itemsize: int) -> tuple[int, int, int]:
    """Pixels of one tile, warps and pipeline stages."""
    return 128 // itemsize, 4 if block_out >= 64 else 2, 3


def weight_gradient(x: Tensor, dy: Tensor, dw: Tensor, *, stride: int, padding: int, precision: str) -> None:
    """Write the gradient with respect to the weights into dw, as sums over chunks of the pixels.

    Args:
        x: Inputs of the convolution, channels last in memory.
        dy: Gradient with respect to its outputs, channels last in memory.
        dw: The output, (chunks, groups, size, size, outputs, inputs).
        stride: Stride of the convolution.
        padding: Padding of the convolution.
        precision: Precision of float32 products: "tf32" or "ieee".
    """
    chunks, groups, size, _, num_out, num_in = dw.shape
    pixels = dy.shape[0] // groups * dy.shape[2] * dy.shape[3]
    taps, block_in, block_out, tiles = weight_tiles(num_in, num_out, size)
    block_p, warps, stages = weight_blocks(block_out, x.element_size())
    chunk = triton.cdiv(triton.cdiv(pixels, chunks), block_p) * block_p
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _weight_kernel[(chunks, groups, tiles)](
            x, dy, dw, groups, pixels, chunk, *x.shape[2:], *dy.shape[2:],
            num_in, num_out, size, taps, power_of_2(taps), stride, padding, precision,
            block_p, block_in, block_out,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip


def sum_blocks(pairs: int) -> tuple[int, int]:
    """Pairs of channels of one tile, and warps."""
    return (16, 4) if pairs < 4096 else (64, 4) if pairs < 32768 else (128, 4)


def sum_weight_gradient(parts: Tensor, dw: Tensor) -> None:
    """Write the sum of the chunks into dw, in torch's order.

    Args:
        parts: The result of `weight_gradient`.
        dw: The output, (groups, outputs, inputs, size, size), contiguous.
    """
    chunks, groups, size, _, num_out, num_in = parts.shape
    pairs, taps = num_out * num_in, size * size
    block, warps = sum_blocks(pairs)
    with torch.cuda.device_of(parts):  # type: ignore[no-untyped-call]
        _sum_kernel[(triton.cdiv(pairs, block), groups)](
            parts, dw, chunks, pairs, parts[0].numel(), taps, power_of_2(taps), min(16, power_of_2(chunks)), block,
            num_warps=warps,
        )  # fmt: skip
