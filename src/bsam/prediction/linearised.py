r"""Predictions of a model that is linearised in its weights, averaged over a Gaussian.

Immer, Korzepa and Bauer (2021), "Improving predictions of Bayesian neural nets via local linearization", AISTATS,
section 3. With the outputs $f(x)$ and their Jacobian $J$ at the mean, Gaussian weights with covariance $\Sigma$ give
Gaussian outputs,

```math
f \sim \mathcal N(f(x), J \Sigma J^\top)
```

and $p(y \mid x)$ is the average of $p(y \mid f)$:

- `"gaussian"`: $\mathcal N(f(x), J \Sigma J^\top + \tau^2 I)$ with the noise $\tau$, `noise_std`, in closed form;
- `"bernoulli"`: an integral over one number, by the trapezoidal rule;
- `"categorical"`: the mean of $\mathrm{softmax}(f)$ over samples of $f$, from the same standard normal numbers for
  every example.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from bsam.batches import as_tensor, batches_of, some_examples
from bsam.gradients import PerExample, chunk_size, output_sums
from bsam.likelihood import check_likelihood, check_outputs
from bsam.modules import Forward, OutputModel, differentiable, floating_type, named_parameters
from bsam.posterior import DiagonalGaussian
from bsam.prediction.averages import ClassAverage, one_output, targets_like
from bsam.prediction.predict import at_mean, check_integer, collect, noise_of, result_of
from bsam.prediction.results import GaussianPredictions, Predictions
from bsam.shards import refuse_sharded

__all__ = ["LinearisedOutputs", "check_linearisable", "predict_linearised"]

_SAMPLES_AT_A_TIME = 100
_RANGE = 12.0  # half the range of the integral over a logit, in standard deviations
_NUM_NODES = 769  # the number of nodes of this integral


@overload
def predict_linearised(
    model: nn.Module,
    posterior: DiagonalGaussian,
    data: Any,
    *,
    likelihood: Literal["categorical", "bernoulli"] = ...,
    num_samples: int = ...,
    seed: int = ...,
    batch_size: int = ...,
    forward: Forward | None = ...,
    vectorise: bool | None = ...,
) -> Predictions: ...


@overload
def predict_linearised(
    model: nn.Module,
    posterior: DiagonalGaussian,
    data: Any,
    *,
    likelihood: Literal["gaussian"],
    noise_std: float | None = ...,
    num_samples: int = ...,
    seed: int = ...,
    batch_size: int = ...,
    forward: Forward | None = ...,
    vectorise: bool | None = ...,
) -> GaussianPredictions: ...


def predict_linearised(
    model: nn.Module,
    posterior: DiagonalGaussian,
    data: Any,
    *,
    likelihood: Literal["categorical", "bernoulli", "gaussian"] = "categorical",
    noise_std: float | None = None,
    num_samples: int = 1000,
    seed: int = 0,
    batch_size: int = 512,
    forward: Forward | None = None,
    vectorise: bool | None = None,
) -> Predictions | GaussianPredictions:
    """Predict with the model linearised in its weights around the mean of a posterior.

    For a Laplace approximation this is usually better than samples of the weights. It works for any `DiagonalGaussian`,
    and takes K gradients per example for K outputs. The model is unchanged afterwards.

    Args:
        model: The model. It need not hold the weights of the posterior. Predictions are made on its device.
        posterior: The distribution of its weights.
        data: As for `bsam.predict`.
        likelihood: As for `bsam.predict`, with one label per example.
        noise_std: As for `bsam.predict`.
        num_samples: Number of samples of the outputs, for `"categorical"`.
        seed: Seed of these samples.
        batch_size: Largest batch when `data` is tensors, which are cut evenly.
        forward: `forward(model, inputs)` runs the model, if `model(inputs)` is not the right call.
        vectorise: True: vmap over the examples, or an error. False: a loop, with the same numbers. None: the faster of
            the two; if vmap fails, a loop, with one warning that says why.

    Returns:
        `Predictions`, or `GaussianPredictions` for `likelihood="gaussian"`.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> posterior = DiagonalGaussian.from_model(model, {model.weight: torch.full_like(model.weight, 0.1)})
        >>> predict_linearised(model, posterior, torch.randn(5, 4))
        Predictions(5 examples, 3 classes, no labels, num_samples=1000, seed=0, computed_by='linearised')
    """
    check_linearisable(posterior)
    noise_std = noise_of(model, posterior, likelihood, noise_std)
    check_likelihood(likelihood, noise_std)
    check_integer("num_samples", num_samples, 1)
    check_integer("batch_size", batch_size, 1)
    check_integer("seed", seed, -(2**63))
    batches = batches_of(data, batch_size)
    net = OutputModel(model, forward)
    with at_mean(model, posterior) as device:
        outputs = LinearisedOutputs(net, model, posterior.to(device), vectorise)

        def columns_of(inputs: Any, labels: Any) -> dict[str, Tensor | None]:
            f, covariance = outputs(inputs, likelihood)
            if noise_std is not None:
                columns = _regression(f, covariance, labels, noise_std)
            elif likelihood == "bernoulli":
                columns = _integrated(f[:, 0], covariance[:, 0, 0], labels)
            else:
                columns = _sampled(f, covariance, labels, num_samples, seed)
            return {name: None if column is None else column.cpu() for name, column in columns.items()}

        rows = collect(batches, device, columns_of, dtype=floating_type(model))
    drawn = num_samples if likelihood == "categorical" else 0
    return result_of(rows, noise_std, num_samples=drawn, seed=seed, computed_by="linearised")


def check_linearisable(posterior: object) -> None:
    """Raise unless a model can be linearised with this posterior."""
    if not isinstance(posterior, DiagonalGaussian):
        raise TypeError(f"posterior is a {type(posterior).__name__}: only a DiagonalGaussian can be linearised.")


class LinearisedOutputs:
    """Computes mean and covariance J Sigma J^T of the outputs of a batch, at the posterior's mean (`at_mean`)."""

    def __init__(self, net: OutputModel, model: nn.Module, posterior: DiagonalGaussian, vectorise: bool | None) -> None:
        refuse_sharded("linearising", model, "load the posterior into a model that is not sharded")
        parameters = named_parameters(model)
        self._net = net
        self._weights = [parameters[name] for name in posterior.sampled_names]
        self._std = [posterior.std[name] for name in posterior.sampled_names]
        self._per_example = PerExample(net, vectorise)

    def __call__(self, inputs: Any, likelihood: str) -> tuple[Tensor, Tensor]:
        """Return the outputs (n, C) and their covariances (n, C, C)."""
        outputs: Tensor = self._net(inputs)
        check_outputs(likelihood, tuple(outputs.shape))
        f = outputs.reshape(len(outputs), -1).to(torch.promote_types(outputs.dtype, torch.float32))
        n, C = f.shape
        covariance = f.new_zeros(n, C, C)
        if self._weights:
            step = max(1, chunk_size(self._weights) // C)
            for start in range(0, n, step):
                stop = start + step
                covariance[start:stop] = self._covariance(some_examples(inputs, start, stop), f[start:stop])
        return f, covariance

    def _covariance(self, inputs: Any, f: Tensor) -> Tensor:
        n, C = f.shape
        identity = torch.eye(C, device=f.device, dtype=f.dtype).expand(n, C, C)
        loss_fn, examples = output_sums(self._net, inputs, identity)
        with differentiable(self._weights):
            chunks = self._per_example.gradients(self._weights, loss_fn, examples, [False] * len(self._weights))
            stacks = zip(*(gradients for gradients, _ in chunks), strict=True)  # by parameter
        covariance = torch.zeros_like(identity)
        for std, parts in zip(self._std, stacks, strict=True):
            scaled = (torch.cat(parts).to(std.dtype) * std).reshape(n, C, -1).to(f.dtype)  # J sqrt(Sigma)
            covariance = covariance + scaled @ scaled.mT
        return covariance


def _regression(f: Tensor, covariance: Tensor, targets: Any, noise_std: float) -> dict[str, Tensor | None]:
    mean, variance = one_output(f[None])[0], one_output(covariance.diagonal(dim1=1, dim2=2)[None])[0]
    columns = {"mean": mean, "epistemic_variance": variance, "targets": None, "log_density": None, "cdf": None}
    if targets is not None:
        y = targets_like(as_tensor(targets).detach(), mean)
        noise = noise_std**2 * torch.eye(f.shape[1], device=f.device, dtype=f.dtype)
        predictive = torch.distributions.MultivariateNormal(f, covariance + noise)
        log_density: Tensor = predictive.log_prob(y.reshape(f.shape))  # type: ignore[no-untyped-call]
        cdf = torch.special.ndtr((y - mean) / (variance + noise_std**2).sqrt())
        columns |= {"targets": y, "log_density": log_density, "cdf": cdf}
    return columns


def _integrated(f: Tensor, variance: Tensor, labels: Any) -> dict[str, Tensor | None]:
    average = ClassAverage("bernoulli", labels)
    average.add(*_nodes(f, variance.sqrt()))
    return average.columns()


def _nodes(f: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (nodes, n) and weights (nodes, n) of a trapezoidal rule for N(f, std^2), for any std >= 0.

    The sigmoid changes within a few logits around 0. If std is large, a rule in standard deviations would see a jump
    there. So the rule is in u, where x is the logit in standard deviations,

        x = asinh(sinh(u) / std),      dx/du = cosh(u) / sqrt(std^2 + sinh(u)^2).

    Neighbouring nodes are du / std apart near 0 and du apart far from 0. The integrand is smooth in u, and its
    singularities are at least pi/2 from the real line, so that only rounding errors remain, up to std = 1e12. If
    std <= 1, or if all of the Gaussian is far from 0, u is x - f / std.
    """
    bends = (std > 1) & (f.abs() < 30 * std)
    scale = torch.where(bends, std, 1.0)
    center = torch.where(bends, f / scale, 0.0)  # x of the mean
    low, high = (torch.asinh(scale * torch.sinh(center + end)) for end in (-_RANGE, _RANGE))
    share = torch.linspace(0, 1, _NUM_NODES, device=f.device, dtype=f.dtype)[:, None]
    u = low + share * (high - low)
    x = torch.asinh(torch.sinh(u) / scale)
    logits = torch.where(bends, 0.0, f) + std * x
    weights = torch.exp(-0.5 * (x - center).square()) * torch.cosh(u) / torch.hypot(scale, torch.sinh(u))
    return logits, weights / weights.sum(dim=0)


def _sampled(f: Tensor, covariance: Tensor, labels: Any, num_samples: int, seed: int) -> dict[str, Tensor | None]:
    values, vectors = torch.linalg.eigh(covariance)  # a semi-definite matrix may have no Cholesky factor
    root = (vectors * values.clamp(min=0).sqrt()[:, None, :]) @ vectors.mT
    generator = torch.Generator().manual_seed(seed)
    average = ClassAverage("categorical", labels)
    for start in range(0, num_samples, _SAMPLES_AT_A_TIME):
        count = min(_SAMPLES_AT_A_TIME, num_samples - start)
        z = torch.randn(count, f.shape[1], generator=generator, dtype=torch.float64).to(f)
        average.add(f + torch.einsum("ncd,sd->snc", root, z))
    return average.columns()
