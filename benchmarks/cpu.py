"""What a step costs on the CPU, as ratios to Adam measured in one run: the MNIST MLP with batches of 128.

    python benchmarks/cpu.py --out results/cpu.json

The optimizers take turns, so that a slow moment of the machine is shared: a ratio is the median over rounds of the
ratio within a round, and its quartiles say how sure it is.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from paper_settings import BSAM as PAPER

import bsam
from bsam.experiments.models import make_model
from bsam.experiments.record import environment, write_json
from bsam.noise import standard_normal

ROUNDS, STEPS = 100, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("cpu.json"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    x, y = torch.randn(128, 1, 28, 28), torch.randint(10, (128,))
    steps = {name: make(x, y) for name, make in CONTESTANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(5):
            step()
    for _ in range(ROUNDS):
        for name, step in steps.items():
            begin = time.perf_counter()
            for _ in range(STEPS):
                step()
            times[name].append((time.perf_counter() - begin) / STEPS * 1000)
    medians = {name: statistics.median(found) for name, found in times.items()}
    ratios = {
        name: statistics.quantiles([own / adam for own, adam in zip(found, times["Adam"], strict=True)], n=4)
        for name, found in times.items()
    }
    record = {
        "what": "milliseconds a step, MNIST MLP (545,509 parameters), batch 128: medians over rounds that take turns",
        "threads": arguments.threads,
        "rounds": ROUNDS,
        "steps_a_round": STEPS,
        "ms": medians,
        "ratio_to_adam": {name: {"median": q[1], "quartiles": [q[0], q[2]]} for name, q in ratios.items()},
        "environment": environment(),
        "peers": {name: version(name) for name in ("ivon-opt", "pytorch_optimizer")},
    }
    for name, (low, middle, high) in ratios.items():
        print(f"{name:28} {medians[name]:7.2f} ms {middle:6.2f} x Adam [{low:.2f}, {high:.2f}]")
    write_json(arguments.out, record)


def make_mlp() -> torch.nn.Module:
    return make_model("mlp", num_classes=10, image_shape=(1, 28, 28), seed=0)


def plain(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[..., Callable[[], Any]]:
    """A step with one gradient."""

    def prepare(x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
        model = make_mlp()
        optimizer = make(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        return step

    return prepare


def ours(make: Callable[[Any], Any]) -> Callable[..., Callable[[], Any]]:
    def prepare(x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
        model = make_mlp()
        optimizer = make(model)
        return lambda: optimizer.step(lambda x, y: F.cross_entropy(model(x), y), x, y)

    return prepare


def compiled(make: Callable[[Any], Any]) -> Callable[..., Callable[[], Any]]:
    def prepare(x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
        model = make_mlp()
        step = bsam.TrainStep(make(model), lambda x, y: F.cross_entropy(model(x), y), (x, y), module=model)
        return lambda: step(x, y)

    return prepare


def gradient(x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    """A part of every step: one gradient, of which bSAM takes two."""
    model = make_mlp()

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()

    return step


def noise(x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    """A part of bSAM's step: its normal numbers."""
    model = make_mlp()
    shapes = [p.shape for p in model.parameters()]
    steps = itertools.count()

    def step() -> None:
        k = next(steps)
        for i, shape in enumerate(shapes):
            standard_normal(0, k, 0, i, shape, device=torch.device("cpu"), dtype=torch.float32)

    return step


def ivon(x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    from ivon import IVON

    model = make_mlp()
    optimizer = IVON(model.parameters(), lr=0.1, ess=60_000)

    def step() -> None:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def peer_sam(x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pytorch_optimizer import SAM

    model = make_mlp()
    optimizer = SAM(model.parameters(), base_optimizer=torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.first_step(zero_grad=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.second_step(zero_grad=True)

    return step


CONTESTANTS: dict[str, Callable[..., Callable[[], Any]]] = {
    "Adam": plain(lambda p: torch.optim.Adam(p, lr=1e-3)),
    "SGD": plain(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "BSAM": ours(lambda m: bsam.BSAM(m.parameters(), **PAPER, num_data=60_000, module=m)),
    "BSAM, compiled (TrainStep)": compiled(lambda m: bsam.BSAM(m.parameters(), **PAPER, num_data=60_000, module=m)),
    "Adam, compiled (TrainStep)": compiled(lambda m: torch.optim.Adam(m.parameters(), lr=1e-3)),
    "one gradient": gradient,
    "the noise of one step": noise,
    "SAM (SGD)": ours(lambda m: bsam.SAM(m.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9, module=m)),
    "IVON (ivon-opt)": ivon,
    "SAM (pytorch_optimizer)": peer_sam,
    "BSAM, 8 splits": ours(lambda m: bsam.BSAM(m.parameters(), **PAPER, num_data=60_000, splits=8, module=m)),
    "BSAM, 8 splits, vmap": ours(
        lambda m: bsam.BSAM(m.parameters(), **PAPER, num_data=60_000, splits=8, module=m, vectorise=True)
    ),
}


if __name__ == "__main__":
    main()
