"""ResNet-20 with filter response normalisation: no statistics over the batch, so it can be vmapped over weights."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from bsam.experiments.models.layers import HE, AppendZero, image_size, initialise

__all__ = ["FilterResponseNorm", "resnet20_frn"]


class _Normalise(torch.autograd.Function):
    """z and r = 1 / sqrt(nu2 + eps) of `FilterResponseNorm`, with the derivative in closed form.

    With v = x r and dy = dz where y > tau (half of it where they are equal), and sums over the pixels of a channel,

        dx     =  gamma r (dy - v sum(dy v) / pixels)  -  dr r^3 x / pixels
        dgamma =  sum(dy v),   dbeta = sum(dy),   dtau = sum(dz - dy)      (and over the examples)

    Three sums serve everything: that is what automatic differentiation does not see.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, gamma: Tensor, beta: Tensor, tau: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = _widened(x)
        r = torch.rsqrt(wide.square().mean(dim=(-2, -1), keepdim=True) + eps)
        y = _spread(gamma) * (wide * r) + _spread(beta)
        return torch.maximum(y, _spread(tau)).to(x.dtype), r

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:4], output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, dr: Tensor | None) -> tuple[Tensor | None, ...]:
        x, gamma, beta, tau, r = ctx.saved_tensors
        wide, pixels = _widened(x), x.shape[-2] * x.shape[-1]
        dx = dgamma = dbeta = dtau = None
        if dz is not None:
            dz, v = _widened(dz), wide * r
            above = _spread(gamma) * v + _spread(beta) - _spread(tau)
            dy = dz * torch.where(above > 0, 1.0, torch.where(above == 0, 0.5, 0.0))
            sum_dz, sum_dy, sum_dyv = (t.sum(dim=(-2, -1), keepdim=True) for t in (dz, dy, dy * v))
            dx = _spread(gamma) * r * (dy - v * (sum_dyv / pixels))
            dgamma, dbeta, dtau = (t.sum(dim=(-4, -2, -1)) for t in (sum_dyv, sum_dy, sum_dz - sum_dy))
        if dr is not None:
            through_r = -dr * r**3 * wide / pixels
            dx = through_r if dx is None else dx + through_r
        return None if dx is None else dx.to(x.dtype), dgamma, dbeta, dtau, None


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _spread(parameter: Tensor) -> Tensor:
    return parameter[:, None, None]


class FilterResponseNorm(nn.Module):
    """Filter response normalisation with its thresholded linear unit, for inputs (batch, channels, height, width).

    Singh and Krishnan (2020), "Filter Response Normalization Layer", CVPR, section 3.1. With the mean taken over the
    pixels of one channel of one example,

        nu2 = mean(x^2)
        y = gamma * x / sqrt(nu2 + eps) + beta
        z = max(y, tau)

    All is computed in float32, or float64 for such inputs, and returned in the input's type: a square overflows in
    float16, and bfloat16 would leave two digits of the mean.

    Args:
        channels: Each has its own gamma (1 at the start), beta and tau (0).
        eps: Keeps the root away from 0. It is not learned: the paper does so only where a channel has a single pixel.
    """

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))
        self.tau = nn.Parameter(torch.zeros(channels))

    def forward(self, inputs: Tensor) -> Tensor:
        """The normalised and thresholded inputs."""
        outputs: Tensor = _Normalise.apply(inputs, self.gamma, self.beta, self.tau, self.eps)[0]  # type: ignore[no-untyped-call]
        return outputs

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{len(self.gamma)}, eps={self.eps}"


def conv_frn(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution with bias, and its normalisation and activation."""
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2)
    return nn.Sequential(OrderedDict(conv=conv, norm=FilterResponseNorm(outputs)))


class Block(nn.Module):
    """Two convolutions, and a shortcut around them that is a 1x1 convolution where the shape changes.

    With twice the channels, the image has half the height and width.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = outputs // inputs
        self.residual = nn.Sequential(conv_frn(inputs, outputs, 3, stride), conv_frn(outputs, outputs, 3))
        self.shortcut = nn.Identity() if inputs == outputs else conv_frn(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways; no activation follows it."""
        out: Tensor = self.residual(x) + self.shortcut(x)
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

    Args:
        num_classes: How many logits it returns.
        image_shape: (channels, height, width), at least 29 x 29 pixels.
        generator: Of the initial weights; None is torch's global one.
    """
    channels, height, width = image_size("resnet20_frn", image_shape, smallest=29)
    blocks: list[nn.Module] = []
    for inputs, outputs in ((16, 16), (16, 32), (32, 64)):
        blocks += [Block(inputs, outputs), Block(outputs, outputs), Block(outputs, outputs)]
    num_features = 64 * (-(-height // 4) // 8) * (-(-width // 4) // 8)  # two strides of 2 round up, the pool down
    model = nn.Sequential(
        OrderedDict(
            stem=conv_frn(channels, 16, 3),
            blocks=nn.Sequential(*blocks),
            pool=nn.AvgPool2d(8),
            flatten=nn.Flatten(),
            head=nn.Linear(num_features, num_classes - 1),
            append_zero=AppendZero(),
        )
    )
    initialise(model, HE, generator)
    return model
