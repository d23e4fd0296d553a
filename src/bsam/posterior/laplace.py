r"""Laplace's approximation: a Gaussian around trained weights, with the curvature of the loss as precision.

MacKay (1992), "A Practical Bayesian Framework for Backpropagation Networks", Neural Computation 4; the diagonal form
with a generalised Gauss-Newton matrix of Immer, Korzepa and Bauer (2021), "Improving predictions of Bayesian neural
nets via local linearization", AISTATS, section 2.1. Example $i$ has the outputs $f_i$, their Jacobian $J_i$ in the
weights, and the Hessian $\Lambda_i$ of $-\log p(y_i \mid f_i)$ in the outputs. With the prior precision $\delta_0$ and
the trained weights $\theta_*$, the posterior is

```math
\mathcal N(\theta_*, \mathrm{diag}(h + \delta_0)^{-1})
```

| `curvature` | $h$ is the diagonal of | |
|---|---|---|
| `"ggn"` | $\sum_i J_i^\top \Lambda_i J_i$ | never negative |
| `"hessian"` | $\nabla_\theta^2 \sum_i -\log p(y_i \mid f_i)$ | the exact Hessian |

Both are sums over all examples. They agree for a model whose outputs are linear in its weights.

The Hessian of $K$ outputs is a sum of $K$ squares, $\Lambda_i = \sum_c r_c r_c^\top$, so that $h$ is the sum over
examples and $c$ of the squared gradient of $\langle r_c, f_i \rangle$: $K$ gradients per example. The exact diagonal
takes one gradient of the whole sum per weight.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bsam.batches import as_tensor, batches_of, has_examples, inputs_and_labels, moved, num_examples
from bsam.gradients import PerExample, output_sums
from bsam.interrupts import deferred, reading
from bsam.likelihood import LearnedNoise, check_likelihood, check_outputs, hessian_root, negative_log_likelihood
from bsam.modules import (
    Forward,
    OutputModel,
    differentiable,
    evaluating,
    floating_type,
    named_parameters,
    padding_rows,
    unwrapped,
)
from bsam.posterior.diagonal import DiagonalGaussian
from bsam.shards import refuse_sharded

__all__ = ["laplace"]

_MOST_FOR_HESSIAN = 100_000
"""Largest number of weights for which the exact diagonal is computed: each weight takes a gradient."""

_HESSIAN_CHUNK = 64


def laplace(
    model: nn.Module,
    likelihood: Literal["categorical", "bernoulli", "gaussian"],
    data: Any,
    *,
    prior_precision: float,
    noise_std: float | None = None,
    curvature: Literal["ggn", "hessian"] = "ggn",
    batch_size: int = 512,
    forward: Forward | None = None,
    vectorise: bool | None = None,
) -> DiagonalGaussian:
    """Make Laplace's approximation at the present weights of a model.

    The model runs in evaluation mode. Afterwards weights, buffers, gradients and each layer's mode are unchanged.
    Frozen parameters, and the padding of embeddings (`padding_idx`), are points. `bsam.predict` averages over samples
    of the result, `bsam.predict_linearised` linearises the model in its weights.

    Args:
        model: The model, trained with the mean loss of the likelihood and weight decay `prior_precision / num_data`.
        likelihood: The likelihood of its outputs, as for `bsam.predict`, with one label per example.
        data: All training data, as for `bsam.predict`: the precision is a sum over the examples.
        prior_precision: Precision of the Gaussian prior on the weights.
        noise_std: Standard deviation of the targets around the true output, for `"gaussian"`. None: that of a
            `bsam.LearnedNoise`, which is a point in the posterior.
        curvature: `"ggn"` or `"hessian"`, see above. `"hessian"` needs labels and a small model.
        batch_size: Largest batch when `data` is tensors, which are cut evenly.
        forward: `forward(model, inputs)` runs the model, if `model(inputs)` is not the right call.
        vectorise: For `"ggn"`. True: vmap over the examples, or an error. False: a loop, with the same numbers. None:
            the faster of the two; if vmap fails, a loop, with one warning that says why.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> posterior = laplace(model, "categorical", torch.randn(50, 3), prior_precision=1.0)
        >>> posterior.num_parameters
        8
    """
    refuse_sharded("laplace", model, "call it before fully_shard, or use the posterior of bsam.BSAM or bsam.IVON")
    inside = unwrapped(model)
    noise = inside.log_noise_std if isinstance(inside, LearnedNoise) else None
    if likelihood == "gaussian" and noise_std is None and isinstance(inside, LearnedNoise):
        noise_std = inside.noise_std
    check_likelihood(likelihood, noise_std)
    if curvature not in ("ggn", "hessian"):
        raise ValueError(f"curvature={curvature!r} must be 'ggn' or 'hessian'.")
    if not (math.isfinite(prior_precision) and prior_precision >= 0):
        raise ValueError(f"prior_precision={prior_precision} must be a finite number >= 0.")
    parameters = {name: p for name, p in named_parameters(model).items() if p.requires_grad and p is not noise}
    if not parameters:
        raise ValueError("the model has no parameter that requires a gradient: there is nothing to approximate.")
    weights = list(parameters.values())
    net = OutputModel(model, forward)
    if curvature == "hessian":
        diagonal_of = _hessian(weights, net, likelihood, noise_std)
    else:
        diagonal_of = _ggn(weights, net, likelihood, noise_std, vectorise)

    diagonal = [torch.zeros_like(p, dtype=torch.float64) for p in weights]
    num_batches, device, dtype = 0, weights[0].device, floating_type(model)
    with (
        deferred(),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),  # a DataLoader draws its workers' seed from the global generator
        evaluating(model),
        differentiable(weights),
    ):
        for batch in reading(batches_of(data, batch_size)):
            inputs, labels = inputs_and_labels(batch)
            if has_examples(inputs) and not num_examples(inputs):
                raise ValueError("a batch of data is empty: there is no curvature of 0 examples.")
            for total, part in zip(diagonal, diagonal_of(moved(inputs, device, dtype), labels), strict=True):
                total.add_(part)
            num_batches += 1
    if not num_batches:
        raise ValueError("data has no batches: there is nothing to fit. Was it a generator that was read before?")
    precision = {name: h + prior_precision for name, h in zip(parameters, diagonal, strict=True)}
    _check_precision(precision, prior_precision)
    std: dict[Tensor, Tensor] = {parameters[name]: p.rsqrt() for name, p in precision.items()}
    padding = padding_rows(model)
    for (parameter, each), h in zip(std.items(), diagonal, strict=True):
        row = padding.get(id(parameter))
        if row is not None and not h[row].any():  # else the model uses the row in another way, too
            each[row] = 0
    return DiagonalGaussian.from_model(model, std, prior_precision=float(prior_precision))


DiagonalOf = Callable[[Any, Any], Sequence[Tensor]]
"""Computes the diagonal of one batch, from its inputs and labels."""


def _ggn(
    weights: Sequence[Tensor], net: nn.Module, likelihood: str, noise_std: float | None, vectorise: bool | None
) -> DiagonalOf:
    per_example = PerExample(net, vectorise)

    def diagonal(inputs: Any, _: Any) -> list[Tensor]:
        outputs: Tensor = net(inputs)
        check_outputs(likelihood, tuple(outputs.shape))
        rows = hessian_root(likelihood, outputs.reshape(len(outputs), -1), noise_std)
        loss_fn, examples = output_sums(net, inputs, rows)
        moments = per_example.moments(weights, loss_fn, examples, [False] * len(weights))
        return [square.double() * rows.shape[:2].numel() for square in moments.mean_square]

    return diagonal


def _hessian(weights: Sequence[Tensor], net: nn.Module, likelihood: str, noise_std: float | None) -> DiagonalOf:
    size = sum(p.numel() for p in weights)
    if size > _MOST_FOR_HESSIAN:
        raise ValueError(
            f"curvature='hessian' takes a gradient for each of the {size:,} weights, and accepts at most "
            f"{_MOST_FOR_HESSIAN:,}: write curvature='ggn'."
        )

    @torch.enable_grad()
    def diagonal(inputs: Any, labels: Any) -> list[Tensor]:
        if labels is None:
            raise ValueError("curvature='hessian' depends on the labels, and a batch has none: give (inputs, labels).")
        outputs: Tensor = net(inputs)
        check_outputs(likelihood, tuple(outputs.shape))
        loss = negative_log_likelihood(likelihood, outputs.reshape(len(outputs), -1), as_tensor(labels), noise_std)
        gradients = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        return [_second_derivatives(p, gradient) for p, gradient in zip(weights, gradients, strict=True)]

    return diagonal


def _second_derivatives(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """Return the derivative of each element of the gradient in its own weight."""
    result = torch.zeros_like(parameter, dtype=torch.float64)
    if gradient is None or not gradient.requires_grad:
        return result
    identity = torch.eye(parameter.numel(), device=parameter.device, dtype=parameter.dtype)
    diagonal = []
    for rows in torch.split(identity, _HESSIAN_CHUNK):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")  # the user cannot change this
            found: Sequence[Tensor | None] = torch.autograd.grad(
                gradient,
                parameter,
                rows.reshape(-1, *parameter.shape),
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
        if found[0] is None:  # the gradient depends only on other weights
            return result
        diagonal.append((found[0].reshape(rows.shape) * rows).sum(dim=1))
    return result.copy_(torch.cat(diagonal).reshape(parameter.shape))


def _check_precision(precision: dict[str, Tensor], prior_precision: float) -> None:
    lowest = {name: float(p.min()) for name, p in precision.items() if p.numel()}
    worst = min(lowest, key=lambda name: (lowest[name] > 0, lowest[name]))
    if not (math.isfinite(lowest[worst]) and lowest[worst] > 0):
        raise ValueError(
            f"the precision of {worst} is {lowest[worst]:.3g} somewhere, and must be > 0. The loss has no positive "
            f"curvature there, so the weights are not at a minimum. Raise prior_precision above "
            f"{prior_precision - lowest[worst]:.3g}, train on, or write curvature='ggn', which is never negative."
        )
