"""Many small networks as one module, so that one step of one optimizer trains all of them.

Run r has the network  f(x) = v_r . relu(W_r x + b_r) + c_r  and a learned noise sigma_r. The parameters of several runs
are one tensor, whose dimension 0 is the run. The loss is the sum over the runs of each run's mean loss:

    loss  =  sum_r  mean_i -log N(y_ir; f_r(x_ir), sigma_r^2)

No weight belongs to two runs, so its gradient is that of its own run. The updates of Adam, VOGN, IVON and bSAM are
elementwise. So a step of the sum is a step of every run, as long as no option mixes the elements of a tensor: gradients
are not clipped by their norm, and bSAM has `max_noise=None`.

Runs with the same settings are one tensor, and one parameter group: settings differ between groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import bsam

__all__ = ["RunStack", "make_member"]


class RunStack(nn.Module):
    """Networks with one hidden layer and one output, for several runs.

    Args:
        sizes: The number of runs of each group.
        num_features: The number of inputs.
        hidden: The number of hidden units.
        seeds: The seed of each run's initial weights, group after group.
    """

    def __init__(self, sizes: Sequence[int], num_features: int, hidden: int, seeds: Sequence[int]) -> None:
        super().__init__()
        if sum(sizes) != len(seeds):
            raise ValueError(f"there are {sum(sizes)} runs and {len(seeds)} seeds: give one seed per run.")
        self.num_features, self.hidden, self.sizes = num_features, hidden, list(sizes)
        self.groups = nn.ModuleList()
        drawn = iter(seeds)
        for size in sizes:
            members = [make_member(num_features, hidden, next(drawn)) for _ in range(size)]
            stacked = zip(*(member.parameters() for member in members), strict=True)
            names = [name for name, _ in members[0].named_parameters()]
            group = nn.ParameterDict(
                {
                    name.replace(".", "_"): nn.Parameter(torch.stack([p.detach() for p in own]))
                    for name, own in zip(names, stacked, strict=True)
                }
            )
            self.groups.append(group)

    def _all(self, name: str) -> Tensor:
        """Return a parameter of all runs, (runs, ...)."""
        return torch.cat([group[name] for group in self.groups])  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (n, runs) for inputs (n, runs, features)."""
        each = x.transpose(0, 1)  # (runs, n, features)
        inner = torch.baddbmm(self._all("network_0_bias")[:, None], each, self._all("network_0_weight").mT).relu()
        outputs = torch.baddbmm(self._all("network_2_bias")[:, None], inner, self._all("network_2_weight").mT)
        found: Tensor = outputs[:, :, 0].T
        return found

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum over the runs of the mean negative log-likelihood of targets (n, runs)."""
        return self.nll(self(x), y)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the same for outputs (n, runs)."""
        log_noise = self._all("log_noise_std")
        z = (y - outputs) * torch.exp(-log_noise)
        losses: Tensor = (0.5 * z.square() + log_noise + 0.5 * math.log(2 * math.pi)).mean(dim=0)
        return losses.sum()

    def parameter_groups(self, settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups of an optimizer: the weights of each group of runs, with its settings, without noises."""
        return [
            {"params": [p for name, p in own.items() if name != "log_noise_std"], **options}  # type: ignore[operator]
            for own, options in zip(self.groups, settings, strict=True)
        ]

    def noises(self) -> list[nn.Parameter]:
        """Return the logarithms of the noises, one tensor per group."""
        return [own["log_noise_std"] for own in self.groups]  # type: ignore[index]

    def members(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Cut the mean or the std of a posterior of the stack into those of the runs, by the names of `make_member`."""
        runs = []
        for number, size in enumerate(self.sizes):
            for run in range(size):
                own = {}
                for name, _ in make_member(self.num_features, self.hidden, 0).named_parameters():
                    own[name] = tensors[f"groups.{number}.{name.replace('.', '_')}"][run]
                runs.append(own)
        return runs


def make_member(num_features: int, hidden: int, seed: int) -> bsam.LearnedNoise:
    """Make the network of one run, with weights from N(0, 1 / inputs) and biases 0; the noise starts at 1."""
    network = nn.Sequential(nn.Linear(num_features, hidden), nn.ReLU(), nn.Linear(hidden, 1))
    generator = torch.Generator().manual_seed(seed)
    for layer in (network[0], network[2]):
        assert isinstance(layer, nn.Linear)
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
        nn.init.zeros_(layer.bias)
    return bsam.LearnedNoise(network)
