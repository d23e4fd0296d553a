"""Likelihoods: the probability p(y | f) of a label y given the outputs f of a model, and the curvature of -log p.

| likelihood | outputs of n examples | p(y given f) | Hessian of -log p(y given f) in f |
|---|---|---|---|
| `"categorical"` | logits (n, K) | softmax(f)_y | diag(p) - p p^T |
| `"bernoulli"` | logits (n,) or (n, 1) of class 1 of two | sigmoid(f) for y = 1 | p (1 - p) |
| `"gaussian"` | means (n,) or (n, D) of real targets | N(y; f, noise_std^2 I) | I / noise_std^2 |

`bsam.predict` also takes outputs with several labels per example, which are independent given f: `"categorical"`
logits of tokens (n, T, K), of pixels (n, K, H, W) or with the classes in any other dimension, and `"bernoulli"` logits
(n, ...) of several yes/no questions (multi-label). Curvatures are for one label per example.

The `noise_std` of `"gaussian"` is a number that is known, or one that is learned with the weights: `LearnedNoise`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "LearnedNoise",
    "check_likelihood",
    "check_outputs",
    "class_dimension",
    "hessian_root",
    "negative_log_likelihood",
]

_LIKELIHOODS = ("categorical", "bernoulli", "gaussian")


def check_likelihood(likelihood: str, noise_std: float | None) -> None:
    """Raise unless the likelihood exists, and has a noise_std if it needs one."""
    if likelihood == "gaussian":
        if noise_std is None or not (math.isfinite(noise_std) and noise_std > 0):
            raise ValueError(
                f'noise_std={noise_std} must be a finite number > 0 for likelihood="gaussian": the standard deviation '
                "of the targets around the true output, like noise_std=0.1. To learn it, use bsam.LearnedNoise."
            )
        return
    if noise_std is not None:
        raise ValueError(f'noise_std={noise_std} is only for likelihood="gaussian", not {likelihood!r}: leave it out.')
    if likelihood not in _LIKELIHOODS:
        raise ValueError(f"likelihood={likelihood!r} must be one of {', '.join(map(repr, _LIKELIHOODS))}.")


def class_dimension(shape: tuple[int, ...], class_dim: int | None = None) -> int:
    """Return the dimension of logits (n, ...) that has the classes.

    By default it is the last of (n, K) and of tokens (n, T, K), and dimension 1 of pixels (n, K, H, W), as torch has
    them.
    """
    _check_several(shape)
    if class_dim is None:
        dim = 1 if len(shape) != 3 else 2
    elif isinstance(class_dim, int) and class_dim not in (0, -len(shape)) and -len(shape) < class_dim < len(shape):
        dim = class_dim % len(shape)
    else:
        raise ValueError(
            f"class_dim={class_dim!r} must be the dimension of the classes in outputs of shape {shape}: an integer "
            f"from 1 to {len(shape) - 1}, because dimension 0 has the examples."
        )
    if shape[dim] < 2:
        raise ValueError(
            f"the model gives outputs of shape {shape}, with {shape[dim]} classes in dimension {dim}, but "
            'likelihood="categorical" needs K >= 2 logits. Write class_dim=... to say which dimension has the classes, '
            'or likelihood="bernoulli" for two classes with one logit.'
        )
    return dim


def _check_several(shape: tuple[int, ...]) -> None:
    if len(shape) == 1 or shape[1:] == (1,):
        raise ValueError(
            f'the model gives one number per example, shape {shape}, but likelihood="categorical" needs K >= 2 '
            'logits. Write likelihood="bernoulli" for two classes, or "gaussian" for regression.'
        )


def check_outputs(likelihood: str, shape: tuple[int, ...]) -> None:
    """Raise unless outputs of this shape fit the likelihood, with one label per example."""
    if likelihood == "categorical":
        _check_several(shape)
        if len(shape) != 2:
            raise ValueError(
                f'the model gives outputs of shape {shape}, but likelihood="categorical" needs (n, K) logits. '
                "Reshape them with forward=lambda model, inputs: ..."
            )
    elif likelihood == "bernoulli":
        if len(shape) != 1 and shape[1:] != (1,):
            raise ValueError(
                f'the model gives outputs of shape {shape}, but likelihood="bernoulli" needs one logit per example, '
                '(n,) or (n, 1). Write likelihood="categorical" if each example has one of K classes. If each output '
                "answers a yes/no question of its own (multi-label), take one question at a time: "
                "forward=lambda model, inputs: model(inputs)[:, 0], and the labels of that question."
            )
    elif len(shape) not in (1, 2):
        raise ValueError(
            f'the model gives outputs of shape {shape}, but likelihood="gaussian" needs (n,) or (n, D). Write '
            "forward=lambda model, inputs: model(inputs).flatten(1), and targets of the same shape."
        )


def hessian_root(likelihood: str, f: Tensor, noise_std: float | None) -> Tensor:
    """Vectors r_1 .. r_C, (n, C, C), for outputs (n, C): the Hessian in f is the sum of r_c r_c^T."""
    identity = torch.eye(f.shape[1], device=f.device, dtype=f.dtype).expand(len(f), -1, -1)
    if likelihood == "categorical":
        p = f.softmax(dim=1)
        return p.sqrt()[:, :, None] * (identity - p[:, None, :])
    if likelihood == "bernoulli":
        return (f.sigmoid() * (-f).sigmoid()).sqrt()[:, :, None]
    assert noise_std is not None
    return identity / noise_std


def negative_log_likelihood(likelihood: str, f: Tensor, labels: Any, noise_std: float | None) -> Tensor:
    """The sum over the examples of -log p(y | f), up to a constant."""
    y = torch.as_tensor(labels).to(f.device)
    if y.numel() != (f.numel() if likelihood == "gaussian" else len(f)):
        raise ValueError(f"labels of shape {tuple(y.shape)} came with outputs of shape {tuple(f.shape)}.")
    if likelihood == "categorical":
        return F.cross_entropy(f, y.reshape(-1).long(), reduction="sum")
    y = y.to(f.dtype).reshape(f.shape)
    if likelihood == "bernoulli":
        return F.binary_cross_entropy_with_logits(f, y, reduction="sum")
    assert noise_std is not None
    return 0.5 * ((y - f) / noise_std).square().sum()


class LearnedNoise(nn.Module):
    """A network for regression that also learns the standard deviation of the targets around its outputs.

    It is called like the network. `loss` is the Gaussian negative log-likelihood, whose minimum over the noise is the
    root mean square of the residuals. `bsam.predict`, `bsam.laplace` and the others take the learned noise if
    `noise_std` is not given.

    The noise is one parameter, `log_noise_std`, the logarithm of the standard deviation. It is no weight of a network:
    it has no prior, and the posterior holds it as a point. Give it an optimizer of its own, as in the example. (In a
    parameter group of bSAM it learns slowly, because bSAM divides its large gradients by a large precision.)

    Args:
        network: The network, with outputs (n,) or (n, D).
        noise_std: The standard deviation before training. 1 is right for targets that are standardised.

    Examples:
        >>> from bsam import BSAM
        >>> model = LearnedNoise(nn.Linear(3, 1))
        >>> optimizer = BSAM(model.network.parameters(), num_data=50, module=model)
        >>> noise = torch.optim.Adam([model.log_noise_std], lr=0.01)
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> loss = optimizer.step(lambda x, y: model.loss(model(x), y), x, y)
        >>> with torch.no_grad(), optimizer.sampled():
        ...     outputs = model(x)
        >>> noise.zero_grad()
        >>> model.loss(outputs, y).backward()
        >>> noise.step()
    """

    def __init__(self, network: nn.Module, noise_std: float = 1.0) -> None:
        super().__init__()
        if isinstance(noise_std, bool) or not isinstance(noise_std, int | float) or not 0 < noise_std < math.inf:
            raise ValueError(f"noise_std={noise_std!r} must be a finite number > 0: the noise before training.")
        like = next((p for p in network.parameters() if p.is_floating_point()), torch.zeros(()))
        self.network = network
        self.log_noise_std = nn.Parameter(torch.full((), math.log(noise_std), dtype=like.dtype, device=like.device))

    @property
    def noise_std(self) -> float:
        """The present standard deviation of the targets around the outputs."""
        return math.exp(float(self.log_noise_std.detach()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the network."""
        return self.network(*args, **kwargs)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean negative log-likelihood over the examples, for outputs and targets (n,) or (n, D)."""
        if outputs.shape != targets.shape:
            raise ValueError(
                f"targets of shape {tuple(targets.shape)} came with outputs of shape {tuple(outputs.shape)}: write "
                "targets.view_as(outputs) if they have the same numbers."
            )
        z = (targets - outputs) * torch.exp(-self.log_noise_std)
        log_p = -0.5 * z.square() - self.log_noise_std - 0.5 * math.log(2 * math.pi)
        return -log_p.reshape(len(outputs), -1).sum(dim=1).mean()
