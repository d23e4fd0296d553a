"""Random programs of steps, failures and checkpoints: the driver of tests/test_fuzz.py (short) and benchmarks/fuzz.py.

A program does random things with an optimizer: good steps, steps that fail in every way, freezing, loading, copying.
Each failure must leave everything as it was. A twin is given the good things only, in one process and without a
checkpoint. After each of them both must be equal, bit for bit, and finite: failures and checkpoints leave no trace.
"""

from __future__ import annotations

import copy
import io
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.optim.contract import cross_entropy
from tests.optimizers import METHODS, make
from tests.sigint import same


class Stopped(BaseException):
    """Raised by a loss function; no `except Exception` catches it."""


class Broken(Exception):
    """A promise was not kept."""


def check(kept: bool, promise: str) -> None:
    if not kept:
        raise Broken(promise)


class Side:
    """A model and its optimizer, made by a program's options."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        torch.manual_seed(3)
        norm = nn.BatchNorm1d(5) if options["batch_norm"] else nn.LayerNorm(5)
        self.model = nn.Sequential(nn.Linear(4, 5), norm, nn.Tanh(), nn.Linear(5, 3)).to(options["dtype"])
        self.model.register_parameter("foreign", nn.Parameter(torch.ones(3, dtype=options["dtype"])))
        own = [[*self.model[0].parameters(), *self.model[1].parameters()], [*self.model[3].parameters()]]
        groups = (
            [{"params": own[0]}, {"params": own[1], **options["group"]}] if options["groups"] else [*own[0], *own[1]]
        )
        known = {"module": self.model} if options["known"] else {}
        self.optimizer = make(name, groups, **known, **options["whole"])
        self.model.foreign.grad = torch.ones_like(self.model.foreign)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.model)(x, y) + 0.1 * self.model.foreign.square().sum()

    def step(self, batch: tuple[torch.Tensor, ...], loss_fn: Callable[..., Any] | None = None) -> None:
        self.optimizer.step(loss_fn or self.loss, *batch)

    def state(self) -> dict[str, Any]:
        return {
            "model": {key: value.clone() for key, value in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "flags": [p.requires_grad for p in self.model.parameters()],
        }

    def everything(self) -> dict[str, Any]:
        grads = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return {**self.state(), "grads": grads, "random": torch.get_rng_state()}


class Program:
    """One random program."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.name = name = rng.choice(list(METHODS))
        method = METHODS[name]
        known = method.per_example or rng.random() < 0.7
        whole: dict[str, Any] = {
            "splits": rng.choice([1, 1, 2, 3]),
            "nonfinite": rng.choice(["raise", "skip"]),
            "max_grad_norm": rng.choice([None, 0.1]),
            "vectorise": rng.choice([None, False]),
        }
        if known and not method.per_example:
            whole["batch_norm"] = rng.choice(["first_split", "first_pass", "all", "none"])
        if method.gaussian:
            whole["seed"] = rng.randrange(100)
        self.options = {
            "whole": whole,
            "known": known,
            "batch_norm": known and not method.per_example and rng.random() < 0.7,  # what is not known is not restored
            "dtype": rng.choice([torch.float32, torch.float64, torch.bfloat16]),
            "groups": rng.random() < 0.5,
            "group": rng.choice([{"lr": 0.03}, {"perturb": False} if "rho" in method.optimizer.rates else {}]),
        }
        self.side, self.twin = (Side(name, self.options) for _ in range(2))

    def run(self, length: int) -> None:
        """Do `length` random things; raise `Broken` at the first that is not as promised."""
        things = [self.good] * 4 + [self.fails, self.not_finite, self.accumulated, self.scaled, self.misspelt]
        things += [self.freeze, self.rate, self.resumed, self.copied, self.bad_state, self.zeroed]
        things += [self.halves, self.halves, self.discarded]
        if METHODS[self.name].gaussian:
            things.append(self.sampled)
        for _ in range(length):
            thing = self.rng.choice(things)
            self.counts[thing.__name__] += 1
            thing()
            check(same(self.side.state(), self.twin.state()), f"equal to the twin after {thing.__name__}")
            check(bool(torch.equal(self.side.model.foreign.grad, torch.ones(3))), "foreign gradients stay")

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.rng.randrange(6, 13)
        generator = torch.Generator().manual_seed(self.rng.randrange(1000))
        x = torch.randn(size, 4, generator=generator).to(self.options["dtype"])
        return x, torch.randint(3, (size,), generator=generator)

    def refuses(self, error: type[BaseException], act: Callable[[], Any], promise: str) -> None:
        before = self.side.everything()
        try:
            act()
        except error:
            check(same(self.side.everything(), before), promise)
        else:
            check(False, f"{promise}: no {error.__name__}")

    # ------------------------------------------------------------------ good things, for both

    def good(self) -> None:
        batch, calls_backward = self.batch(), self.rng.random() < 0.3
        for side in (self.side, self.twin):

            def backward(x: torch.Tensor, y: torch.Tensor, side: Side = side) -> torch.Tensor:
                loss = side.loss(x, y)
                loss.backward()
                return loss

            if calls_backward and self.options["whole"]["vectorise"] is False:
                side.step(batch, backward)
            else:
                side.step(batch)
        check(all(p.isfinite().all() for p in self.side.model.parameters()), "weights are finite")
        self.counts["steps"] += 1

    def halves(self) -> None:
        """Probes and a step; between the probes of one side there are some that fail, and a step that is refused."""
        batches = [self.batch() for _ in range(self.rng.randrange(1, 4))]
        joins = self.options["whole"]["splits"] == 1 and self.rng.random() < 0.3
        for side in (self.side, self.twin):
            for k, batch in enumerate(batches):
                last = not joins or k + 1 == len(batches)
                side.optimizer.probe(side.loss, *batch, last=last)
                if side is self.side and self.trained():
                    self.fails_between(batch)
            side.optimizer.step()
        check(all(p.isfinite().all() for p in self.side.model.parameters()), "weights are finite")
        self.counts["steps"] += 1

    def freeze(self) -> None:
        index = self.rng.randrange(6)
        for side in (self.side, self.twin):
            parameter = [p for name, p in side.model.named_parameters() if name != "foreign"][index]
            parameter.requires_grad_(not parameter.requires_grad)

    def rate(self) -> None:
        value = self.rng.choice([0.01, 0.1])
        for side in (self.side, self.twin):
            for group in side.optimizer.param_groups:
                group["lr"] = value

    def zeroed(self) -> None:
        self.side.optimizer.zero_grad(set_to_none=self.rng.random() < 0.5)

    # ------------------------------------------------------------------ things that leave no trace

    def trained(self) -> bool:
        return any(p.requires_grad for g in self.side.optimizer.param_groups for p in g["params"])

    def fails_between(self, batch: tuple[torch.Tensor, ...]) -> None:
        """A probe that fails, and a state that is refused, while probes are pending."""
        grads = [p.grad for p in self.side.model.parameters()]
        values = [None if g is None else g.clone() for g in grads]
        model = {key: value.clone() for key, value in self.side.model.state_dict().items()}

        def failing(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.side.loss(x, y)
            raise Stopped

        for error, act in ((Stopped, lambda: self.side.optimizer.probe(failing, *batch)),
                           (RuntimeError, self.side.optimizer.state_dict)):  # fmt: skip
            try:
                act()
            except error:
                pass
            else:
                check(False, f"no {error.__name__} between probes")
        now = [p.grad for p in self.side.model.parameters()]
        check(all(a is b for a, b in zip(grads, now, strict=True)), "the pending gradients are there")
        check(same(values, now), "the pending gradients have not changed")
        check(same(model, self.side.model.state_dict()), "a failing probe leaves the model")

    def discarded(self) -> None:
        if self.options["batch_norm"]:
            return  # running statistics stay moved
        self.side.optimizer.probe(self.side.loss, *self.batch())
        self.rng.choice([self.side.optimizer.discard, self.side.optimizer.zero_grad])()

    def fails(self) -> None:
        error, call, count = self.rng.choice([ValueError, RuntimeError, KeyboardInterrupt, Stopped]), 0, 0
        call = self.rng.randrange(1, 7)

        def failing(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            if count >= call:
                raise error("stop")
            return self.side.loss(x, y)

        batch, before = self.batch(), self.side.everything()
        if not self.trained():
            return
        try:
            self.side.step(batch, failing)
        except error:
            check(same(self.side.everything(), before), f"{error.__name__} in call {call} leaves nothing")
        else:  # it was called fewer times: the step is whole, and the twin takes it too
            self.twin.step(batch)
            self.counts["steps"] += 1

    def not_finite(self) -> None:
        batch, value = self.batch(), self.rng.choice([float("nan"), float("inf")])
        loss_fn = lambda x, y: self.side.loss(x, y) * value  # noqa: E731
        if self.options["whole"]["nonfinite"] == "raise":
            self.refuses(FloatingPointError, lambda: self.side.step(batch, loss_fn), "not finite: nothing changes")
        else:
            skipped = self.side.optimizer.skipped_steps
            self.side.step(batch, loss_fn)
            check(self.side.optimizer.skipped_steps == skipped + 1, "a skipped step is counted")

    def accumulated(self) -> None:
        batch = self.batch()
        modes = [(module, module.training) for module in self.side.model.modules()]
        self.side.model.eval()
        self.side.loss(*batch).backward()
        for module, training in modes:
            module.training = training
        self.side.model.foreign.grad.fill_(1.0)
        if self.trained():
            self.refuses(RuntimeError, lambda: self.side.step(batch), "accumulated gradients are refused")
        self.side.optimizer.zero_grad()

    def scaled(self) -> None:
        def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = self.side.loss(x, y)
            (loss * 8).backward()
            return loss

        if self.options["whole"]["vectorise"] is False:
            self.refuses(ValueError, lambda: self.side.step(self.batch(), loss_fn), "a scaled loss is refused")

    def misspelt(self) -> None:
        new = nn.Parameter(torch.ones(2))
        group = {"params": [new], self.rng.choice(["pertub", "learning_rate", "weightdecay"]): 0.1}
        self.refuses(ValueError, lambda: self.side.optimizer.add_param_group(group), "unknown options are refused")

    def resumed(self) -> None:
        buffer = io.BytesIO()
        torch.save({"model": self.side.model.state_dict(), "optimizer": self.side.optimizer.state_dict()}, buffer)
        buffer.seek(0)
        saved, flags = torch.load(buffer, weights_only=True), self.side.state()["flags"]
        self.side = Side(self.name, self.options)
        self.side.model.load_state_dict(saved["model"])
        self.side.optimizer.load_state_dict(saved["optimizer"])
        for parameter, flag in zip(self.side.model.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)

    def copied(self) -> None:
        self.side.model, self.side.optimizer = copy.deepcopy((self.side.model, self.side.optimizer))
        self.side.model.foreign.grad = torch.ones_like(self.side.model.foreign)

    def bad_state(self) -> None:
        state = self.side.optimizer.state_dict()
        tensors = [
            (each, key)
            for each in state["state"].values()
            for key, value in each.items()
            if isinstance(value, torch.Tensor) and value.dim()
        ]
        if tensors:
            each, key = self.rng.choice(tensors)
            if self.rng.random() < 0.5:
                each[key].view(-1)[0] = float("nan")
            else:
                each[key] = torch.ones(7, 2)
            self.refuses(ValueError, lambda: self.side.optimizer.load_state_dict(state), "bad states are refused")

    def sampled(self) -> None:
        before = self.side.everything()
        try:
            with self.side.optimizer.sampled(draw=1):
                if self.rng.random() < 0.5:
                    with self.side.optimizer.sampled(draw=2):
                        raise Stopped
                raise Stopped
        except Stopped:
            check(same(self.side.everything(), before), "the mean comes back")


def fuzz(seeds: range, length: int = 30) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Run a program for each seed; how often each thing was done, and what was broken."""
    counts: Counter[str] = Counter()
    broken = []
    for seed in seeds:
        program = Program(seed)
        try:
            program.run(length)
        except Exception as error:
            broken.append({"seed": seed, "optimizer": program.name, "problem": f"{type(error).__name__}: {error}"})
        counts.update(program.counts)
        counts["programs"] += 1
    return counts, broken
