"""What bsam's adapters to trainers cost on the CPU, beyond what the trainers cost with Adam.

    python benchmarks/trainers.py --out results/trainers.json

The network and the batch are those of `benchmarks/cpu.py`: the MNIST MLP, 128 examples. Every trainer, and plain loops,
take steps with Adam and with bSAM. They take turns, one step each, in an order that changes from round to round: a slow
moment of the machine is shared. To switch between trainers in the middle of their loops, each runs as a greenlet that
hands over when it asks for its next batch. In each round

    extra = (bSAM in the trainer - bSAM in the loop) - (Adam in the trainer - Adam in the loop)

in shares of bSAM's step in the loop; the record has the median over rounds, its 95% interval, and the quartiles. A
trainer does work for each batch that is the same for all optimizers (fetching it, callbacks, counting), and this
difference leaves it out. What it does in each pass through the model, it does twice with bSAM and once with Adam, so
this counts as extra. All clipping, logging and saving is off.

The loop beside a trainer is the one that a user would write in its place. All adapters call `probe` and `step()`, and
so does this loop; transformers computes the norm of the gradient in every step, so its loop does too. What the two
halves cost beyond one call, `step(loss_fn, x, y)`, is a row of its own, and `over_one_call` has the sums.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.nn.functional as F
import transformers
from accelerate.state import AcceleratorState, GradientState
from greenlet import getcurrent, greenlet
from paper_settings import BSAM as PAPER
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import bsam
from bsam.experiments.models import make_model
from bsam.experiments.record import environment, write_json
from bsam.integrations import accelerate as for_accelerate
from bsam.integrations import transformers as for_transformers

BAR = 0.03
ROUNDS, FIRST = 1000, 20
"""In a round every loop takes one step. The first rounds warm up and are not counted."""

Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[[nn.Module], Optimizer]
Batch = tuple[Tensor, Tensor]
Train = Callable[[], None]
"""Trains until it is stopped."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("trainers.json"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS), help="Which to compare with a loop.")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    batch = torch.randn(128, 1, 28, 28), torch.randint(10, (128,))
    chosen = {"loop", *arguments.loops, *(BESIDE[name] for name in arguments.loops if name in BESIDE)}
    loops = {name: prepare for name, prepare in LOOPS.items() if name in chosen}
    made: list[Optimizer] = []

    def maker(kind: str) -> MakeOptimizer:
        return lambda model: made.append(OPTIMIZERS[kind](model)) or made[-1]

    trains = {(name, kind): prepare(batch, kind, maker(kind)) for name, prepare in loops.items() for kind in OPTIMIZERS}
    times = take_turns(trains, arguments.rounds)
    for each, optimizer in zip(trains, made, strict=True):
        num_steps = {int(state["step"]) for state in optimizer.state.values()}
        rounds = FIRST + arguments.rounds
        if num_steps not in ({rounds}, {rounds - 1}):  # some trainers ask for a batch more than they use
            raise RuntimeError(f"{each} took {num_steps} steps in {rounds} rounds.")
    record = {
        "what": "ms per step, MNIST MLP (545,509 parameters), batch 128: medians over rounds of one step each; "
        "extra: what bSAM costs more in the trainer than in the loop, beyond the same for Adam, in steps of bSAM",
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "bar": BAR,
        "ms": {name: {kind: statistics.median(times[name, kind]) for kind in OPTIMIZERS} for name in loops},
        "extra": {name: extra(times, name, beside) for name, beside in BESIDE.items() if name in loops},
        "over_one_call": {name: extra(times, name, "loop") for name in BESIDE if name in loops},
        "environment": environment(),
        "peers": {name: version(name) for name in ("accelerate", "lightning", "transformers")},
    }
    for name, found in record["ms"].items():
        cost = record["extra"].get(name)
        low, high = cost["interval"] if cost else (0.0, 0.0)
        shown = f"{cost['median']:+7.1%} [{low:+.1%}, {high:+.1%}] beside {cost['beside']}" if cost else ""
        print(f"{name:26} Adam {found['Adam']:6.2f} ms   bSAM {found['BSAM']:6.2f} ms {shown}")
    write_json(arguments.out, record)


def take_turns(trains: dict[tuple[str, str], Train], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Let every loop take one step a round, and return the milliseconds of their steps."""
    runs = {each: greenlet(train) for each, train in trains.items()}
    for run in runs.values():
        run.switch()  # sets the trainer up, until it asks for its first batch
    times: dict[tuple[str, str], list[float]] = {each: [] for each in runs}
    order, shuffled = list(runs), random.Random(0)
    for number in range(FIRST + rounds):
        shuffled.shuffle(order)
        for each in order:
            begin = time.perf_counter()
            runs[each].switch()
            if number >= FIRST:
                times[each].append((time.perf_counter() - begin) * 1000)
    for run in runs.values():
        run.throw()
    return times


class Batches(IterableDataset[Any]):
    """The same batch again and again; before each one, the other loops have their turns."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            getcurrent().parent.switch()
            yield self.batch


def extra(times: dict[tuple[str, str], list[float]], name: str, beside: str) -> dict[str, Any]:
    """Return what bSAM costs more in a trainer than in the loop beside it, beyond the same for Adam."""
    columns = [times[name, "BSAM"], times[beside, "BSAM"], times[name, "Adam"], times[beside, "Adam"]]
    step = statistics.median(times[beside, "BSAM"])
    found = sorted(
        ((own - loop) - (adam - adam_loop)) / step for own, loop, adam, adam_loop in zip(*columns, strict=True)
    )
    low, middle, high = statistics.quantiles(found, n=4)
    # How many rounds lie below the true median is binomial (n, 1/2): ranks n/2 -+ 1.96 sqrt(n)/2 hold it in 95%.
    half = 1.96 * math.sqrt(len(found)) / 2
    ends = [
        found[max(0, math.floor(len(found) / 2 - half))],
        found[min(len(found) - 1, math.ceil(len(found) / 2 + half))],
    ]
    return {
        "beside": beside,
        "median": middle,
        "interval": ends,
        "quartiles": [low, high],
        "within_the_bar": ends[1] <= BAR,
    }


def make_adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def make_bsam(model: nn.Module) -> Optimizer:
    return bsam.BSAM(model.parameters(), **PAPER, num_data=60_000, module=model)


OPTIMIZERS: dict[str, MakeOptimizer] = {"Adam": make_adam, "BSAM": make_bsam}


def make_mlp() -> nn.Module:
    return make_model("mlp", num_classes=10, image_shape=(1, 28, 28), seed=0)


def loader(batch: Any) -> DataLoader[Any]:
    return DataLoader(Batches(batch), batch_size=None)


def loop(batch: Batch, kind: str, make: MakeOptimizer, *, halves: bool = False, norm: bool = False) -> Train:
    model = make_mlp()
    optimizer: Any = make(model)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def train() -> None:
        for x, y in loader(batch):
            if kind == "BSAM" and not halves:
                optimizer.step(loss_fn, x, y)
                continue
            if kind == "BSAM":
                optimizer.probe(loss_fn, x, y)
            else:
                optimizer.zero_grad()
                loss_fn(x, y).backward()
            if norm:
                nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            optimizer.step()

    return train


def in_halves(batch: Batch, kind: str, make: MakeOptimizer) -> Train:
    return loop(batch, kind, make, halves=True)


def with_norm(batch: Batch, kind: str, make: MakeOptimizer) -> Train:
    return loop(batch, kind, make, halves=True, norm=True)


def with_accelerate(batch: Batch, kind: str, make: MakeOptimizer) -> Train:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True)
    bare = make_mlp()
    model, optimizer = accelerator.prepare(bare, make(bare))

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def train() -> None:
        for x, y in loader(batch):
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                if kind == "Adam":
                    accelerator.backward(loss_fn(x, y))
                else:
                    for_accelerate.probe(accelerator, model, optimizer, loss_fn, x, y)
                optimizer.step()

    return train


def with_fabric(batch: Batch, kind: str, make: MakeOptimizer) -> Train:
    import lightning

    from bsam.integrations import fabric as for_fabric

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    bare = make_mlp()
    model, optimizer = fabric.setup(bare, make(bare))

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def train() -> None:
        for x, y in loader(batch):
            optimizer.zero_grad()
            if kind == "Adam":
                fabric.backward(loss_fn(x, y))
            else:
                for_fabric.probe(fabric, model, optimizer, loss_fn, x, y)
            optimizer.step()

    return train


def with_lightning(batch: Batch, kind: str, make: MakeOptimizer) -> Train:
    import lightning

    from bsam.integrations import lightning as for_lightning

    base: Any = lightning.LightningModule if kind == "Adam" else for_lightning.LightningModule

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = make_mlp()
            self.made = make(self.network)

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.network(x), y)

        def configure_optimizers(self) -> Optimizer:
            return self.made

    module = Module()
    quiet = dict.fromkeys(("enable_progress_bar", "enable_checkpointing", "enable_model_summary", "logger"), False)

    def train() -> None:
        lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet).fit(module, loader(batch))

    return train


def with_transformers(batch: Batch, kind: str, make: MakeOptimizer) -> Train:
    class Classifier(nn.Module):
        """The network as transformers wants it: it returns its loss."""

        def __init__(self) -> None:
            super().__init__()
            self.network = make_mlp()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.network(x), labels)}

    base: Any = transformers.Trainer if kind == "Adam" else for_transformers.Trainer

    class Trainer(base):  # type: ignore[misc]
        def get_train_dataloader(self) -> DataLoader[Any]:
            return loader({"x": batch[0], "labels": batch[1]})

    model = Classifier()
    optimizer = make(model)
    folder = tempfile.mkdtemp()
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no", "use_cpu": True}

    options = transformers.TrainingArguments(
        folder, max_steps=10**9, max_grad_norm=0.0, lr_scheduler_type="constant", **quiet
    )

    def train() -> None:
        Trainer(model, options, optimizers=(optimizer, None)).train()

    return train


HALVES, NORM = "loop, in two halves", "loop, halves and norm"
LOOPS: dict[str, Callable[[Batch, str, MakeOptimizer], Train]] = {
    "loop": loop,
    HALVES: in_halves,
    NORM: with_norm,
    "Accelerate": with_accelerate,
    "Fabric": with_fabric,
    "Lightning": with_lightning,
    "Transformers": with_transformers,
}
BESIDE = {HALVES: "loop", **dict.fromkeys(("Accelerate", "Fabric", "Lightning"), HALVES), "Transformers": NORM}
"""The loop beside which each is measured."""


if __name__ == "__main__":
    main()
