"""A method outside the package, written as CONTRIBUTING says. It must pass every test that the package's methods pass.

Korpelevich (1976): the weights move with the gradient at the point where a gradient step would lead.
"""

import torch

from bsam.optim import options
from bsam.optim.base import ProbingOptimizer


class Extragradient(ProbingOptimizer):
    rates = ("lr", "reach", "momentum")

    def __init__(self, params, lr=0.1, *, reach=0.05, momentum=0.9, splits=1, module=None, vectorise=None,
                 process_group=None, nonfinite="raise", max_grad_norm=None, batch_norm="first_split"):  # fmt: skip
        defaults = {"lr": lr, "reach": reach, "momentum": momentum, "splits": splits, "nonfinite": nonfinite,
                    "max_grad_norm": max_grad_norm, "batch_norm": batch_norm}  # fmt: skip
        super().__init__(params, defaults, module=module, process_group=process_group, vectorise=vectorise)

    def _check_group(self, group):
        super()._check_group(group)
        for name in self.rates:
            options.non_negative(name, group[name])

    def _fresh_state(self, parameter, group):
        return {"velocity": torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))}

    def _probe(self, slots, theta, grad_at, tally):
        g = grad_at(theta)
        ahead = [slot.mean.to(slot.dtype) - slot.group["reach"] * g_i for slot, g_i in zip(slots, g, strict=True)]
        tally.add("gradient", grad_at(ahead))

    def _update(self, slot, **statistics):
        velocity = slot.group["momentum"] * slot.state["velocity"] + statistics["gradient"]
        return slot.mean.to(slot.dtype) - slot.group["lr"] * velocity, {"velocity": velocity}
