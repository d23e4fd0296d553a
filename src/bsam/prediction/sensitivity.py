r"""How much each training example matters to the fit.

Nickl, Xu, Tailor, Möllenhoff and Khan (2023), "The Memory-Perturbation Equation: Understanding Model's Sensitivity to
Data", NeurIPS. The posterior $\mathcal N(\mu, \Sigma)$ was fitted to all examples. Example $i$ has the outputs $f_i$ at
the mean, their Jacobian $J_i$ in the weights, and

| symbol | definition | |
|---|---|---|
| $r_i$ | $\nabla_f [-\log p(y_i \mid f_i)]$ | the residual: $p_i$ minus the one-hot label, or $(f_i - y_i) / \tau^2$ |
| $V_i$ | $J_i \Sigma J_i^\top$ | the posterior predictive variance of the outputs |
| $\Lambda_i$ | $\nabla_f^2 [-\log p(y_i \mid f_i)]$ | the Hessian of the loss in the outputs |

where $\tau$ is `noise_std`. If the model had been trained without this example, its outputs would differ, to first
order in the perturbation of the data, by

```math
f_i^{\text{without } i} - f_i = V_i r_i
```

This is variance times residual. The prediction (the probabilities, or the output of a regression) then changes by its
derivative in $f$ times $V_i r_i$, and the loss $-\log p(y_i)$ of the example rises by $r_i^\top V_i r_i$.

An example that the model finds easy has a small residual, and one that many others support has a small variance:
neither matters. For linear regression, leaving example $i$ out changes its output by exactly $V_i r_i / (1 - h_i)$,
where the leverage is $h_i = \mathrm{trace}(\Lambda_i V_i)$, if $\Sigma$ is the exact posterior covariance. So the
estimate is good where the leverage is far below 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bsam.batches import as_tensor, batches_of
from bsam.likelihood import check_likelihood, hessian_root, negative_log_likelihood
from bsam.modules import Forward, OutputModel, floating_type
from bsam.posterior import DiagonalGaussian
from bsam.prediction.averages import one_output
from bsam.prediction.linearised import LinearisedOutputs, check_linearisable
from bsam.prediction.predict import at_mean, check_integer, collect, noise_of

__all__ = ["Sensitivities", "sensitivity"]


@dataclass(frozen=True, eq=False, repr=False)
class Sensitivities:
    """What training without each of n examples would change for this example, to first order; on the CPU.

    The C outputs are K logits, or D means. A model with one output per example, (n,) or (n, 1), gives (n,).
    """

    residual: Tensor
    r"""The derivative of $-\log p(y \mid f)$ in the outputs $f$, (n, C): for classes, probabilities minus the label."""
    output_change: Tensor
    """How much the outputs would change, (n, C): posterior predictive variance times residual."""
    prediction_change: Tensor
    """How much the prediction would change: the probabilities (n, K), that of class 1 (n,), or the mean output."""
    loss_change: Tensor
    r"""How much the loss $-\log p(y)$ of the example would rise, in nats, (n,): never negative."""
    leverage: Tensor
    """How strongly the fit of the example depends on the example itself, (n,): the estimates need it far below 1."""

    def ranking(self) -> Tensor:
        """Return the numbers of the examples, (n,), the one with the largest `loss_change` first."""
        return self.loss_change.argsort(descending=True, stable=True)

    def __len__(self) -> int:
        return len(self.loss_change)

    def __repr__(self) -> str:
        return (
            f"Sensitivities({len(self)} examples, loss_change {float(self.loss_change.min()):.3g} to "
            f"{float(self.loss_change.max()):.3g}, leverage up to {float(self.leverage.max()):.3g})"
        )


def sensitivity(
    model: nn.Module,
    posterior: DiagonalGaussian,
    data: Any,
    *,
    likelihood: Literal["categorical", "bernoulli", "gaussian"] = "categorical",
    noise_std: float | None = None,
    batch_size: int = 512,
    forward: Forward | None = None,
    vectorise: bool | None = None,
) -> Sensitivities:
    """Estimate for each training example what training without it would change.

    No training is repeated: the posterior's variances say how far each prediction can move. Examples with a large
    `loss_change` are those whose prediction rests on the example itself. It takes K gradients
    per example for K outputs. The model is unchanged afterwards.

    Args:
        model: The model. It need not hold the weights of the posterior. It runs on its device, in evaluation mode.
        posterior: The distribution of its weights after training on `data`, such as `optimizer.posterior(model)`.
        data: Training examples with labels, as for `bsam.predict`; all of them, or those of interest.
        likelihood: As for `bsam.predict`, with one label per example.
        noise_std: As for `bsam.predict`.
        batch_size: Largest batch when `data` is tensors, which are cut evenly.
        forward: `forward(model, inputs)` runs the model, if `model(inputs)` is not the right call.
        vectorise: True: vmap over the examples, or an error. False: a loop, with the same numbers. None: the faster of
            the two; if vmap fails, a loop, with one warning that says why.

    Examples:
        >>> model = nn.Linear(4, 3)
        >>> x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
        >>> std = {p: torch.full_like(p, 0.1) for p in model.parameters()}
        >>> posterior = DiagonalGaussian.from_model(model, std)
        >>> len(sensitivity(model, posterior, (x, y)).ranking())
        5
    """
    check_linearisable(posterior)
    if not posterior.sampled_names:
        raise ValueError("no weight of the posterior is sampled: without variances, every sensitivity would be 0.")
    noise_std = noise_of(model, posterior, likelihood, noise_std)
    check_likelihood(likelihood, noise_std)
    check_integer("batch_size", batch_size, 1)
    batches = batches_of(data, batch_size)
    with at_mean(model, posterior) as device:
        outputs = LinearisedOutputs(OutputModel(model, forward), model, posterior.to(device), vectorise)

        def columns_of(inputs: Any, labels: Any) -> dict[str, Tensor | None]:
            f, V = outputs(inputs, likelihood)
            if not bool(f.isfinite().all() & V.isfinite().all()):
                raise ValueError(
                    "the outputs and their variances must be finite; look for inf or NaN in the inputs, and whether "
                    "training diverged."
                )
            changes = _changes(likelihood, f, V, _checked_labels(likelihood, labels, f), noise_std)
            return {name: one_output(column[None])[0].cpu() for name, column in changes.items()}

        rows = collect(batches, device, columns_of, dtype=floating_type(model))
    return Sensitivities(**{name: column for name, column in rows.items() if column is not None})


def _changes(likelihood: str, f: Tensor, V: Tensor, labels: Tensor, noise_std: float | None) -> dict[str, Tensor]:
    """Return the columns of `Sensitivities` for outputs f (n, C) with covariances V (n, C, C)."""
    with torch.enable_grad():
        f = f.detach().requires_grad_()
        (r,) = torch.autograd.grad(negative_log_likelihood(likelihood, f, labels, noise_std), f)
    root = hessian_root(likelihood, f.detach(), noise_std)  # Lambda = sum_c root_c root_c^T
    change = (V @ r[:, :, None])[:, :, 0]  # V r
    curved = torch.einsum("nca,ncb,nb->na", root, root, change)  # Lambda V r: also the change of the probabilities
    return {
        "residual": r,
        "output_change": change,
        "prediction_change": change if likelihood == "gaussian" else curved,
        "loss_change": (r * change).sum(dim=1).clamp(min=0),  # rounding may take it below 0
        "leverage": torch.einsum("nca,nab,ncb->n", root, V, root),
    }


def _checked_labels(likelihood: str, labels: Any, f: Tensor) -> Tensor:
    """Return the labels of a batch; raise unless each is possible."""
    if labels is None:
        raise ValueError("the data have no labels, and a residual needs them: give (inputs, labels).")
    y = as_tensor(labels).detach()
    if likelihood == "gaussian":
        wrong, rule = ~y.isfinite(), "finite numbers"
    else:
        classes = f.shape[1] if likelihood == "categorical" else 2
        wrong, rule = (y != y.round()) | (y < 0) | (y >= classes), f"class numbers from 0 to {classes - 1}"
    if bool(wrong.any()):
        raise ValueError(
            f"the labels must be {rule}, not {y[wrong][0].item()}: give the training examples with their labels, and "
            "leave out those without one."
        )
    return y
