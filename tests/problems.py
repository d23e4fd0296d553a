"""Small problems in float64: a torch model and loss, and the same gradient as a NumPy function of a flat vector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn


@dataclass
class Problem:
    model: nn.Module
    x: Tensor
    y: Tensor
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    gradient: Callable[[np.ndarray, np.ndarray], tuple[float, np.ndarray]]

    def weights(self) -> np.ndarray:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).cpu().numpy().copy()

    def minibatches(self, steps: int, size: int, seed: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [rng.choice(len(self.x), size, replace=False) for _ in range(steps)]


def quadratic() -> Problem:
    """l(w) = mean over examples of 1/2 (w - a_i)^T H (w - a_i) with a diagonal H."""
    generator = torch.Generator().manual_seed(1)
    H = torch.tensor([0.3, 1.0, 4.0, 0.05], dtype=torch.float64)
    targets = torch.randn(30, 4, generator=generator, dtype=torch.float64)

    class Point(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
            self.b = nn.Parameter(torch.tensor([0.5, 3.0], dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.a, self.b]) - x

    model = Point()

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (model(x) ** 2 * H).sum(1).mean()

    def gradient(w: np.ndarray, examples: np.ndarray) -> tuple[float, np.ndarray]:
        residual = w - targets.numpy()[examples]
        return 0.5 * float((residual**2 * H.numpy()).sum(1).mean()), (residual * H.numpy()).mean(0)

    return Problem(model, targets, torch.zeros(30), loss_fn, gradient)


def logistic() -> Problem:
    """Logistic regression; the weight is one parameter, the intercept another."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = (x @ torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64) + 0.3 > 0).double()
    model = nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.1, 0.2, -0.3]]))
        model.bias.fill_(0.05)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)

    def gradient(w: np.ndarray, examples: np.ndarray) -> tuple[float, np.ndarray]:
        xs, ys = x.numpy()[examples], y.numpy()[examples]
        f = xs @ w[:3] + w[3]
        residual = 1 / (1 + np.exp(-f)) - ys
        loss = float(np.mean(np.logaddexp(0, f) - ys * f))
        return loss, np.append(xs.T @ residual, residual.sum()) / len(ys)

    return Problem(model, x, y, loss_fn, gradient)


def conv_net() -> Problem:
    """A small convolutional network; its gradient comes from torch, the algorithm around it does not."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(24, 1, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (24,), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)).double()
    copy = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)).double()

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    def gradient(w: np.ndarray, examples: np.ndarray) -> tuple[float, np.ndarray]:
        nn.utils.vector_to_parameters(torch.from_numpy(w.copy()), copy.parameters())
        index = torch.from_numpy(examples)
        loss = nn.functional.cross_entropy(copy(x[index]), y[index])
        grads = torch.autograd.grad(loss, list(copy.parameters()))
        return loss.item(), torch.cat([g.reshape(-1) for g in grads]).numpy()

    return Problem(model, x, y, loss_fn, gradient)


PROBLEMS = {"quadratic": quadratic, "logistic": logistic, "conv_net": conv_net}


def holding(params: object) -> nn.Module:
    """A module with the parameters that an optimizer is given: tensors, (name, tensor) pairs or groups of them."""
    module = nn.Module()
    for group in params if isinstance(params, list) else []:
        for item in group["params"] if isinstance(group, dict) else [group]:
            # Not by register_parameter, which refuses tensors that are no nn.Parameter.
            module._parameters[str(len(module._parameters))] = item[1] if isinstance(item, tuple) else item
    return module
