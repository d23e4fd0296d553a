"""What bsam's adapters to trainers cost on the CPU, beyond what the trainers cost with Adam.

    python benchmarks/trainers.py --out results/trainers.json

The network and the batch are those of `benchmarks/cpu.py`: the MNIST MLP, 128 examples. Every trainer, and a plain
loop, takes steps with Adam and with bSAM. They take turns, so that a slow moment of the machine is shared. In each
round

    extra = (bSAM in the trainer - bSAM in the loop) - (Adam in the trainer - Adam in the loop)

in shares of bSAM's step in the loop; the record has the median over rounds and its quartiles. A trainer does work for
each batch that is the same for all optimizers (fetching it, callbacks, counting), and this difference leaves it out.
What it does in each pass through the model, it does twice with bSAM and once with Adam, so this counts as extra. All
clipping, logging and saving is off.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.nn.functional as F
import transformers
from accelerate.state import AcceleratorState, GradientState
from paper_settings import BSAM as PAPER
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bsam
from bsam.experiments.models import make_model
from bsam.experiments.record import environment, write_json
from bsam.integrations import accelerate as for_accelerate
from bsam.integrations import transformers as for_transformers

BAR = 0.03
ROUNDS, STEPS, FIRST = 60, 10, 3
"""A round has `FIRST + STEPS` steps. The first ones, with the set-up of the trainer in them, are not timed."""

Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[[nn.Module], Optimizer]
Batch = tuple[Tensor, Tensor]
Turn = Callable[[], list[float]]
"""Takes `FIRST + STEPS` steps, and returns the time at the end of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("trainers.json"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--loops", nargs="+", choices=LOOPS, default=list(LOOPS), help="Which to compare with the loop."
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    batch = torch.randn(128, 1, 28, 28), torch.randint(10, (128,))
    loops = {name: prepare for name, prepare in LOOPS.items() if name in ("loop", *arguments.loops)}
    made: list[Optimizer] = []

    def maker(kind: str) -> MakeOptimizer:
        return lambda model: made.append(OPTIMIZERS[kind](model)) or made[-1]

    turns = {(name, kind): prepare(batch, kind, maker(kind)) for name, prepare in loops.items() for kind in OPTIMIZERS}
    times: dict[tuple[str, str], list[float]] = {each: [] for each in turns}
    for _ in range(arguments.rounds + 1):
        for each, turn in turns.items():
            ends = turn()
            times[each].append((ends[-1] - ends[FIRST - 1]) / STEPS * 1000)
    for each, optimizer in zip(turns, made, strict=True):
        num_steps = {int(state["step"]) for state in optimizer.state.values()}
        if num_steps != {(FIRST + STEPS) * (arguments.rounds + 1)}:
            raise RuntimeError(f"{each} took {num_steps} steps in {arguments.rounds + 1} rounds of {FIRST + STEPS}.")
    times = {each: found[1:] for each, found in times.items()}  # without the first round, which warms up
    record = {
        "what": "ms per step, MNIST MLP (545,509 parameters), batch 128: medians over rounds that take turns; "
        "extra: what bSAM costs more in the trainer than in the loop, beyond the same for Adam, in steps of bSAM",
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "steps_a_round": STEPS,
        "bar": BAR,
        "ms": {name: {kind: statistics.median(times[name, kind]) for kind in OPTIMIZERS} for name in loops},
        "extra": {name: extra(times, name) for name in loops if name != "loop"},
        "environment": environment(),
        "peers": {name: version(name) for name in ("accelerate", "lightning", "transformers")},
    }
    for name, found in record["ms"].items():
        cost = record["extra"].get(name)
        low, high = cost["quartiles"] if cost else (0.0, 0.0)
        shown = f"{cost['median']:+7.1%} [{low:+.1%}, {high:+.1%}]" if cost else ""
        print(f"{name:24} Adam {found['Adam']:6.2f} ms   bSAM {found['BSAM']:6.2f} ms {shown}")
    write_json(arguments.out, record)


def extra(times: dict[tuple[str, str], list[float]], name: str) -> dict[str, Any]:
    """Return what bSAM costs more in a trainer than in the loop, beyond the same for Adam."""
    columns = [times[name, "BSAM"], times["loop", "BSAM"], times[name, "Adam"], times["loop", "Adam"]]
    found = [((own - loop) - (adam - adam_loop)) / loop for own, loop, adam, adam_loop in zip(*columns, strict=True)]
    low, middle, high = statistics.quantiles(found, n=4)
    return {"median": middle, "quartiles": [low, high], "within_the_bar": middle <= BAR}


def make_adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def make_bsam(model: nn.Module) -> Optimizer:
    return bsam.BSAM(model.parameters(), **PAPER, num_data=60_000, module=model)


OPTIMIZERS: dict[str, MakeOptimizer] = {"Adam": make_adam, "BSAM": make_bsam}


def make_mlp() -> nn.Module:
    return make_model("mlp", num_classes=10, image_shape=(1, 28, 28), seed=0)


def loader(batch: Batch) -> DataLoader[Any]:
    return DataLoader([batch] * (FIRST + STEPS), batch_size=None)


def loop(batch: Batch, kind: str, make: MakeOptimizer, *, halves: bool = False) -> Turn:
    model = make_mlp()
    optimizer: Any = make(model)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def turn() -> list[float]:
        ends = []
        for x, y in loader(batch):
            if kind == "Adam":
                optimizer.zero_grad()
                loss_fn(x, y).backward()
                optimizer.step()
            elif halves:
                optimizer.probe(loss_fn, x, y)
                optimizer.step()
            else:
                optimizer.step(loss_fn, x, y)
            ends.append(time.perf_counter())
        return ends

    return turn


def in_halves(batch: Batch, kind: str, make: MakeOptimizer) -> Turn:
    return loop(batch, kind, make, halves=True)


def with_accelerate(batch: Batch, kind: str, make: MakeOptimizer) -> Turn:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True)
    bare = make_mlp()
    model, optimizer = accelerator.prepare(bare, make(bare))

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def turn() -> list[float]:
        ends = []
        for x, y in loader(batch):
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                if kind == "Adam":
                    accelerator.backward(loss_fn(x, y))
                else:
                    for_accelerate.probe(accelerator, model, optimizer, loss_fn, x, y)
                optimizer.step()
            ends.append(time.perf_counter())
        return ends

    return turn


def with_fabric(batch: Batch, kind: str, make: MakeOptimizer) -> Turn:
    import lightning

    from bsam.integrations import fabric as for_fabric

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    bare = make_mlp()
    model, optimizer = fabric.setup(bare, make(bare))

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def turn() -> list[float]:
        ends = []
        for x, y in loader(batch):
            optimizer.zero_grad()
            if kind == "Adam":
                fabric.backward(loss_fn(x, y))
            else:
                for_fabric.probe(fabric, model, optimizer, loss_fn, x, y)
            optimizer.step()
            ends.append(time.perf_counter())
        return ends

    return turn


def with_lightning(batch: Batch, kind: str, make: MakeOptimizer) -> Turn:
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

    class Clock(lightning.Callback):
        def on_train_batch_end(self, *given: Any) -> None:
            ends.append(time.perf_counter())

    module, ends = Module(), list[float]()
    quiet = dict.fromkeys(("enable_progress_bar", "enable_checkpointing", "enable_model_summary", "logger"), False)

    def turn() -> list[float]:
        ends.clear()
        trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[Clock()], **quiet)
        trainer.fit(module, loader(batch))
        return list(ends)

    return turn


def with_transformers(batch: Batch, kind: str, make: MakeOptimizer) -> Turn:
    class Classifier(nn.Module):
        """The network as transformers wants it: it returns its loss."""

        def __init__(self) -> None:
            super().__init__()
            self.network = make_mlp()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.network(x), labels)}

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *given: Any, **options: Any) -> None:
            ends.append(time.perf_counter())

    base: Any = transformers.Trainer if kind == "Adam" else for_transformers.Trainer

    class Trainer(base):  # type: ignore[misc]
        def get_train_dataloader(self) -> DataLoader[Any]:
            return DataLoader([{"x": batch[0], "labels": batch[1]}] * (FIRST + STEPS), batch_size=None)

    model, ends = Classifier(), list[float]()
    optimizer = make(model)
    folder = tempfile.mkdtemp()
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no", "use_cpu": True}

    def turn() -> list[float]:
        ends.clear()
        options = transformers.TrainingArguments(
            folder, max_steps=FIRST + STEPS, max_grad_norm=0.0, lr_scheduler_type="constant", **quiet
        )
        with contextlib.redirect_stdout(io.StringIO()):
            Trainer(model, options, optimizers=(optimizer, None), callbacks=[Clock()]).train()
        return list(ends)

    return turn


LOOPS: dict[str, Callable[[Batch, str, MakeOptimizer], Turn]] = {
    "loop": loop,
    "loop, in two halves": in_halves,
    "Accelerate": with_accelerate,
    "Fabric": with_fabric,
    "Lightning": with_lightning,
    "Transformers": with_transformers,
}


if __name__ == "__main__":
    main()
