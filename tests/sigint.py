"""Real SIGINTs at random times: the driver of tests/test_interrupts.py (short) and benchmarks/sigint.py (long).

A timer of the kernel sends the signals, so that they arrive at any moment, and not where threads take turns. Each trial
makes a model and an optimizer, always the same, and acts on them: a step, a sample, a prediction. Afterwards everything
must be what it was before the act, or what the undisturbed act leaves. And the act must be possible again.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import bsam
from bsam.posterior.base import holds_sample
from tests.optim.contract import batch, cross_entropy, network
from tests.optimizers import METHODS, make


@dataclasses.dataclass
class Subject:
    """What is acted on."""

    model: nn.Module
    act: Callable[[], Any]
    saved: Callable[[], Any]
    """The state beside the model's."""

    def state(self) -> dict[str, Any]:
        """Everything that an interrupted act may not leave in between."""
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "grads": [None if p.grad is None else p.grad.clone() for p in self.model.parameters()],
            "flags": [p.requires_grad for p in self.model.parameters()],
            "modes": [module.training for module in self.model.modules()],
            "momenta": [getattr(module, "momentum", None) for module in self.model.modules()],
            "saved": self.saved(),
            "holds a sample": holds_sample(self.model.parameters()),
            "random": torch.get_rng_state(),
            "grad mode": torch.is_grad_enabled(),
            "backward": torch.autograd.backward,
            "handler": signal.getsignal(signal.SIGINT),
        }


def _stepped(name: str, **options: Any) -> Callable[[int], Subject]:
    def subject(steps: int) -> Subject:
        model = network(name)
        optimizer = make(name, model.parameters(), module=model, **options)
        act = lambda: optimizer.step(cross_entropy(model), *batch())  # noqa: E731
        for _ in range(steps):
            act()
        return Subject(model, act, optimizer.state_dict)

    return subject


def _probing(name: str) -> Callable[[int], Subject]:
    """A further probe, on top of one that is pending."""

    def subject(steps: int) -> Subject:
        model = network(name)
        optimizer = make(name, model.parameters(), module=model, splits=2)
        optimizer.probe(cross_entropy(model), *batch(seed=1))
        act = lambda: optimizer.probe(cross_entropy(model), *batch())  # noqa: E731
        for _ in range(steps):
            act()
        return Subject(model, act, lambda: optimizer._pending.num_probes)

    return subject


def _applying(name: str) -> Callable[[int], Subject]:
    """A step that applies pending probes."""

    def subject(steps: int) -> Subject:
        model = network(name)
        optimizer = make(name, model.parameters(), module=model)
        for seed in range(1 + steps):
            optimizer.probe(cross_entropy(model), *batch(seed=seed))

        def act() -> None:
            if optimizer._pending is not None:
                optimizer.step()

        state = lambda: {p: dict(s) for p, s in copy.deepcopy(dict(optimizer.state)).items()}  # noqa: E731
        return Subject(model, act, lambda: (optimizer._pending is None, [*state().values()]))

    return subject


def _compiled(name: str) -> Callable[[int], Subject]:
    def subject(steps: int) -> Subject:
        model = network(name)
        optimizer = make(name, model.parameters(), module=model, splits=2, nonfinite="skip")
        step = bsam.TrainStep(optimizer, cross_entropy(model), batch(), compile=False)
        act = lambda: step(*batch())  # noqa: E731
        for _ in range(steps):
            act()
        return Subject(model, act, optimizer.state_dict)

    return subject


def _trained(steps: int) -> tuple[nn.Module, bsam.BSAM]:
    model = network("BSAM")
    optimizer = make("BSAM", model.parameters(), module=model, betas=(0.9, 0.5))
    for _ in range(4 + steps):
        optimizer.step(cross_entropy(model), *batch())
    return model, optimizer


def _sampled(steps: int) -> Subject:
    model, optimizer = _trained(steps)

    def act() -> None:
        with optimizer.sampled(draw=0):
            model(batch()[0])
            with optimizer.sampled(draw=1):
                model(batch()[0])

    return Subject(model.eval(), act, optimizer.state_dict)


def _posterior_sampled(steps: int) -> Subject:
    model, optimizer = _trained(steps)
    posterior = optimizer.posterior()

    def act() -> None:
        with posterior.sampled(model, torch.Generator().manual_seed(0)):
            model(batch()[0])

    return Subject(model, act, optimizer.state_dict)


def _predicting(**options: Any) -> Callable[[int], Subject]:
    def subject(steps: int) -> Subject:
        model, optimizer = _trained(steps)
        posterior = optimizer.posterior()
        x, y = batch()
        options_now = {**options, "recalibrate": [x] if options.get("recalibrate") else False}
        act = lambda: bsam.predict(model, posterior, (x, y), num_samples=2, **options_now)  # noqa: E731
        return Subject(model, act, optimizer.state_dict)

    return subject


def _linearised(steps: int) -> Subject:
    model, optimizer = _trained(steps)
    posterior = optimizer.posterior()
    return Subject(model, lambda: bsam.predict_linearised(model, posterior, batch(4)[0]), optimizer.state_dict)


def _laplace(steps: int) -> Subject:
    model, optimizer = _trained(steps)
    return Subject(
        model, lambda: bsam.laplace(model, "categorical", batch(4)[0], prior_precision=1.0), optimizer.state_dict
    )


def _recalibrating(steps: int) -> Subject:
    model, optimizer = _trained(steps)
    data = [batch(seed=seed) for seed in range(3)]
    return Subject(model, lambda: bsam.recalibrate_batch_norm(model, data), optimizer.state_dict)


def _swag(steps: int) -> Subject:
    model, _ = _trained(0)
    swag = bsam.SWAG(model, rank=2, interval=1)
    for _ in range(steps):
        swag.step()
    return Subject(model, swag.step, swag.state_dict)


def _loading(steps: int) -> Subject:
    model, optimizer = _trained(steps)
    state = _trained(steps + 1)[1].state_dict()
    return Subject(model, lambda: optimizer.load_state_dict(state), optimizer.state_dict)


STEPS: dict[str, Callable[[int], Subject]] = {
    **{name: _stepped(name, splits=2) for name in METHODS},
    **{f"{name}, nonfinite='skip'": _stepped(name, nonfinite="skip") for name in METHODS},
    "BSAM, vectorised": _stepped("BSAM", splits=2, vectorise=True),
    "VOGN, in a loop": _stepped("VOGN", vectorise=False),
    **{f"{name}, probe": _probing(name) for name in METHODS},
    **{f"{name}, step() after a probe": _applying(name) for name in METHODS},
    **{f"TrainStep, {name}": _compiled(name) for name in METHODS},
}
OTHERS: dict[str, Callable[[int], Subject]] = {
    "optimizer.sampled": _sampled,
    "posterior.sampled": _posterior_sampled,
    "predict in a loop": _predicting(vectorise=False),
    "predict, vectorised": _predicting(vectorise=True),
    "predict, recalibrated": _predicting(recalibrate=True),
    "predict_linearised": _linearised,
    "laplace": _laplace,
    "recalibrate_batch_norm": _recalibrating,
    "SWAG": _swag,
    "load_state_dict": _loading,
}
ACTS = {**STEPS, **OTHERS}


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal, bit for bit; a NaN is equal to a NaN."""
    if isinstance(a, torch.Tensor):
        alike = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return alike and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return a is b or a == b


class _Event(ctypes.Structure):
    """`struct sigevent` of Linux; notify = 0 sends the signal to the process."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


class Sender:
    """Has SIGINT sent to this process after a delay; while it is armed, its handler raises."""

    def __init__(self) -> None:
        self._libc, self._timer = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
        event = _Event(number=signal.SIGINT)
        if self._libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create failed")
        self._armed = False
        self._arrived = 0

    def __enter__(self) -> Sender:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, self._before)
        self._libc.timer_delete(self._timer)

    def _handle(self, number: int, frame: Any) -> None:
        self._arrived += 1
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt

    def interrupted(self, act: Callable[[], Any], delay: float) -> bool:
        """Act while a signal is on its way; return whether it ended the act. It has arrived in any case."""
        before, ended = self._arrived, False
        once = (ctypes.c_long * 4)(0, 0, 0, 1 + int(delay * 1e9))  # struct itimerspec: again never, and first then
        try:
            self._armed = True
            self._libc.timer_settime(self._timer, 0, once, None)
            act()
            self._armed = False
        except KeyboardInterrupt:
            ended = True
        while self._arrived == before:
            time.sleep(0)
        return ended


class Trials:
    """Interrupts one act, again and again."""

    def __init__(self, make_subject: Callable[[int], Subject]) -> None:
        self._make = make_subject
        self._expected = {steps: self._undisturbed(steps) for steps in (0, 1)}

    def _undisturbed(self, steps: int) -> tuple[dict[str, Any], dict[str, Any], float]:
        """The states before and after the act, and the seconds it takes."""
        seconds = []
        for _ in range(3):
            subject = self._subject(steps)
            before, begin = subject.state(), time.perf_counter()
            subject.act()
            seconds.append(time.perf_counter() - begin)
        return before, subject.state(), min(seconds)

    def _subject(self, steps: int) -> Subject:
        subject = self._make(steps)
        torch.manual_seed(0)
        return subject

    def __call__(self, sender: Sender, rng: random.Random) -> tuple[bool, str]:
        """Whether a signal hit the act, and what it broke ("" if nothing)."""
        steps = rng.randrange(2)
        before, after, seconds = self._expected[steps]
        subject = self._subject(steps)
        hit = sender.interrupted(subject.act, rng.uniform(0, seconds))
        found = subject.state()
        if not same(found, before) and not same(found, after):
            parts = [key for key in found if not same(found[key], before[key]) and not same(found[key], after[key])]
            return hit, f"half done: {', '.join(parts) or 'some of it before, some after'}"
        try:
            torch.manual_seed(0)
            subject.act()
        except Exception as error:
            return hit, f"then refused: {error}"
        if same(found, before) and not same(subject.state(), after):
            return hit, "another result when it was done again"
        return hit, ""


def attack(acts: dict[str, Callable[[int], Subject]], hits: int, seed: int) -> dict[str, dict[str, Any]]:
    """Interrupt each act until it was hit so many times; by act, how many trials, hits and broken ones there were."""
    rng = random.Random(seed)
    results = {}
    with Sender() as sender:
        for name, make_subject in acts.items():
            trial, trials, hit = Trials(make_subject), 0, 0
            broken: Counter[str] = Counter()
            while hit < hits and trials < 10 * hits:
                is_hit, problem = trial(sender, rng)
                trials, hit = trials + 1, hit + is_hit
                if problem:
                    broken[problem] += 1
            results[name] = {"trials": trials, "hits": hit, "broken": dict(broken)}
    return results
