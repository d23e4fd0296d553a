"""ResNet-20 with filter response normalisation. It has no batch statistics, so it can be vmapped over weights."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bsam.experiments.models.layers import HE, AppendZero, image_size, initialise
from bsam.kernels.filter_response import normalise, normalise_backward

__all__ = ["FilterResponseNorm", "resnet20_frn"]


class _Normalise(torch.autograd.Function):
    """z and r of `bsam.kernels.filter_response`, with the derivative of z in closed form."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, tau: Tensor, skip: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        return normalise(x, (bias, gamma, beta, tau), skip, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:5], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dz: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, gamma, beta, tau, r = ctx.saved_tensors
        dx, vectors = normalise_backward(dz, x, (bias, gamma, beta, tau), r)
        return dx, *vectors, dz if ctx.needs_input_grad[5] else None, None


class FilterResponseNorm(nn.Module):
    """Filter response normalisation with its thresholded linear unit, for inputs (batch, channels, height, width).

    Singh and Krishnan (2020), "Filter Response Normalization Layer", CVPR, section 3.1. With the mean taken over the
    pixels of one channel of one example,

        nu2 = mean(x^2)
        y = gamma * x / sqrt(nu2 + eps) + beta
        z = max(y, tau)

    Everything is computed in float32, or in float64 for inputs in float64, and returned in the input's type: a square
    overflows in float16, and the mean would have two digits in bfloat16.

    Args:
        channels: Each has its own gamma (1 at the start), beta and tau (0).
        eps: Keeps the root away from 0. It is not learned: the paper learns it only if a channel has a single pixel.
    """

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))
        self.tau = nn.Parameter(torch.zeros(channels))

    def forward(self, inputs: Tensor, bias: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
        """Normalise and threshold inputs + bias, and add skip, in one pass over memory."""
        bias = torch.zeros_like(self.gamma) if bias is None else bias
        vectors = bias, self.gamma, self.beta, self.tau
        outputs: Tensor = _Normalise.apply(inputs, *vectors, skip, self.eps)[0]  # type: ignore[no-untyped-call]
        return outputs

    def extra_repr(self) -> str:
        """Return the text that `print(model)` shows."""
        return f"{len(self.gamma)}, eps={self.eps}"


class ConvFRN(nn.Module):
    """A convolution with bias, its normalisation and its activation."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2)
        self.norm = FilterResponseNorm(outputs)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """Return the activations plus skip."""
        conv = self.conv
        out: Tensor = self.norm(F.conv2d(x, conv.weight, None, conv.stride, conv.padding), conv.bias, skip)
        return out


class Block(nn.Module):
    """Two convolutions, and a shortcut around them that is a 1x1 convolution where the shape changes.

    With twice the channels, the image has half the height and width.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = outputs // inputs
        self.residual = nn.Sequential(ConvFRN(inputs, outputs, 3, stride), ConvFRN(outputs, outputs, 3))
        self.shortcut = nn.Identity() if inputs == outputs else ConvFRN(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both paths; no activation follows."""
        first, second = self.residual
        out: Tensor = second(first(x), skip=self.shortcut(x))
        return out


def resnet20_frn(
    num_classes: int, image_shape: tuple[int, ...], generator: torch.Generator | None = None
) -> nn.Sequential:
    """ResNet-20 with filter response normalisation in place of BatchNorm and ReLU.

    He, Zhang, Ren and Sun (2016), "Deep Residual Learning for Image Recognition", CVPR, section 4.2: three stages of
    three blocks with 16, 32 and 64 channels. Möllenhoff and Khan (2023), appendix G.1, say that they take its
    normalisation from Izmailov et al. (2021), "What Are Bayesian Neural Network Posteriors Really Like?", ICML. The
    rest is as in the authors' code: convolutions have biases; each one, the second of a block and the shortcut's
    included, is followed by `FilterResponseNorm` with a threshold of its own, and nothing follows the addition; the
    average is over 8 x 8 pixels, so that a 64 x 64 image has 4 x 64 features. The initial weights are `HE`, biases 0.
    An image needs at least 29 x 29 pixels. The arguments are explained in `make_model`.
    """
    channels, height, width = image_size("resnet20_frn", image_shape, smallest=29)
    blocks: list[nn.Module] = []
    for inputs, outputs in ((16, 16), (16, 32), (32, 64)):
        blocks += [Block(inputs, outputs), Block(outputs, outputs), Block(outputs, outputs)]
    num_features = 64 * (-(-height // 4) // 8) * (-(-width // 4) // 8)  # two strides of 2 round up, the pool down
    model = nn.Sequential(
        OrderedDict(
            stem=ConvFRN(channels, 16, 3),
            blocks=nn.Sequential(*blocks),
            pool=nn.AvgPool2d(8),
            flatten=nn.Flatten(),
            head=nn.Linear(num_features, num_classes - 1),
            append_zero=AppendZero(),
        )
    )
    initialise(model, HE, generator)
    return model
