"""Likelihoods: the probability p(y | f) of a label y given the outputs f of a model, and the curvature of -log p.

| likelihood | outputs of n examples | p(y given f) | Hessian of -log p(y given f) in f |
|---|---|---|---|
| `"categorical"` | logits (n, K) | softmax(f)_y | diag(p) - p p^T |
| `"bernoulli"` | logits (n,) or (n, 1) of class 1 of two | sigmoid(f) for y = 1 | p (1 - p) |
| `"gaussian"` | means (n,) or (n, D) of real targets | N(y; f, noise_std^2 I) | I / noise_std^2 |

`bsam.predict` also takes outputs with several labels per example, which are independent given f: `"categorical"`
logits of tokens (n, T, K), of pixels (n, K, H, W) or with the classes in any other dimension, and `"bernoulli"` logits
(n, ...) of several yes/no questions (multi-label). Curvatures are for one label per example.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["check_likelihood", "check_outputs", "class_dimension", "hessian_root", "negative_log_likelihood"]

_LIKELIHOODS = ("categorical", "bernoulli", "gaussian")


def check_likelihood(likelihood: str, noise_std: float | None) -> None:
    """Raise unless the likelihood exists, and has a noise_std if it needs one."""
    if likelihood == "gaussian":
        if noise_std is None or not (math.isfinite(noise_std) and noise_std > 0):
            raise ValueError(
                f'noise_std={noise_std} must be a finite number > 0 for likelihood="gaussian": the standard deviation '
                "of the targets around the true output, like noise_std=0.1."
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
