"""What a step costs in communication and memory: measured on gloo, and computed for large clusters.

    python benchmarks/scale.py --out results/scale.json

Measured: the bytes that a rank writes to its sockets per step, with 1 to 4 ranks on this machine (the system counts
them by process), and the peak of a process's memory in copies of the weights. Computed: bytes and seconds per step for
8 to 4096 ranks, by a model of devices and links (`Machine`) with collectives that are as good as they can be.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import resource
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bsam
from bsam.experiments.record import environment, write_json

WIDTH, BATCH, STEPS = 512, 8, 5
RANKS, LARGE_RANKS = (1, 2, 3, 4), (8, 64, 512, 4096)


# ------------------------------------------------------------------ what is sent


def ring(operation: str, ranks: int, size: float) -> float:
    """The bytes that a rank must send: no algorithm can do with fewer, and a ring does with these."""
    return {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}[operation] * size * (ranks - 1) / ranks


@dataclass(frozen=True)
class Way:
    """A way to train on many ranks: the collectives of a step, each of one number per parameter."""

    title: str
    float32: dict[str, int]
    """How many collectives have numbers of 4 bytes, by operation."""
    passes: int
    """Gradients per step."""
    weights: dict[str, int] = dataclasses.field(default_factory=dict)
    """How many collectives have weights: of 4 bytes here, and of 2 on a cluster, with passes in bfloat16."""

    def sent(self, ranks: int, parameters: float, *, weight_bytes: int = 4) -> float:
        """The bytes that a rank sends per step."""
        large = sum(count * ring(name, ranks, 4 * parameters) for name, count in self.float32.items())
        return large + sum(count * ring(name, ranks, weight_bytes * parameters) for name, count in self.weights.items())


WAYS = {
    "ddp-adamw": Way("AdamW, DDP", {"all_reduce": 1}, 1),
    "ddp-bsam": Way("bSAM, DDP", {"all_reduce": 2}, 2),
    "splits-sam": Way("SAM, ranks as splits", {"all_reduce": 1}, 2),
    "splits-bsam": Way("bSAM, ranks as splits", {"all_reduce": 2}, 2),
    "sharded-adamw": Way("AdamW, sharded", {"reduce_scatter": 1}, 1, {"all_gather": 2}),
    "sharded-bsam": Way("bSAM, sharded", {"reduce_scatter": 2}, 2, {"all_gather": 4}),
}
"""bSAM has two averages, the gradient and the curvature: as splits both are sent once, after the two gradients."""


# ------------------------------------------------------------------ measured


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
    return nn.Sequential(*layers)


def make_step(way: str) -> Callable[[], Any]:
    """A function that takes a step of a new model."""
    kind, _, method = way.partition("-")
    model = make_model()
    group = dist.group.WORLD if kind == "splits" else None
    called: nn.Module = model
    if kind == "ddp":
        called = DistributedDataParallel(model)
    elif kind == "sharded":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    x, y = torch.randn(BATCH, WIDTH), torch.randint(WIDTH, (BATCH,))

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(called(x), y)

    if method == "adamw":
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step() -> None:
            adamw.zero_grad()
            loss_fn(x, y).backward()
            adamw.step()

        return step
    if method == "sam":
        optimizer: Any = bsam.SAM(
            model.parameters(), torch.optim.SGD, rho=0.05, lr=1e-3, module=called, process_group=group
        )
    else:
        optimizer = bsam.BSAM(model.parameters(), lr=1e-3, num_data=1000, module=called, process_group=group)
    return lambda: optimizer.step(loss_fn, x, y)


def written() -> int:
    """The bytes that this process has written, to files and sockets."""
    return int(next(line for line in Path("/proc/self/io").read_text().splitlines() if "wchar" in line).split()[1])


def run_rank(rank: int, ranks: int, port: int, answers: Any) -> None:
    """Put the bytes per step of all ways, in their order."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for way in WAYS:
        step = make_step(way)
        for _ in range(2):  # the first step also broadcasts the weights
            step()
        dist.barrier()
        before = written()
        for _ in range(STEPS):
            step()
        sent = written() - before
        dist.barrier()
        if rank == 0:
            answers.put(sent / STEPS)
    dist.destroy_process_group()


def measure_sent(ranks: int) -> dict[str, float]:
    """The bytes that rank 0 writes per step, by way."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(run_rank, (ranks, port, answers), nprocs=ranks)
    return {way: answers.get() for way in WAYS}


def run_memory(method: str, answers: Any) -> None:
    """Put the peak of memory, in copies of the weights; a step's batch is one example."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = nn.ModuleList(nn.Linear(1000, 1000, bias=False) for _ in range(100))
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    x, y = torch.randn(1, 1000), torch.zeros(1, dtype=torch.long)

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(sum(layer(x) for layer in model), y)

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = pages * resource.getpagesize()
    if method == "adamw":
        adamw = torch.optim.AdamW(model.parameters(), foreach=False)
    elif method == "sam":
        optimizer: Any = bsam.SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    else:
        optimizer = bsam.BSAM(model.parameters(), num_data=1000)
    for _ in range(3):
        if method == "adamw":
            adamw.zero_grad()
            loss_fn(x, y).backward()
            adamw.step()
        else:
            optimizer.step(loss_fn, x, y)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answers.put(1 + (peak - before) / size)


def measure_memory(method: str) -> float:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # of the new process: what it frees, it gives back
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=run_memory, args=(method, answers))
    process.start()
    found = float(answers.get())
    process.join()
    return found


# ------------------------------------------------------------------ computed


@dataclass(frozen=True)
class Machine:
    """Devices in nodes: an H200 with its links, by its maker's numbers, and a share of them that programs reach."""

    name: str = "nodes of 8 H200, NVLink in a node, one link of 400 Gbit/s per device between nodes"
    flops: float = 989e12
    """Operations per second, in bfloat16."""
    used: float = 0.4
    """Share of them that a program reaches."""
    node: int = 8
    inside: float = 450e9
    """Bytes per second that a device sends in its node."""
    between: float = 50e9
    """Bytes per second that a device sends to other nodes."""
    latency: float = 10e-6
    """Seconds per message."""

    def seconds(self, operation: str, ranks: int, size: float) -> float:
        """Time of a collective in two levels: in the nodes, and between them with the part of each device."""
        local = min(ranks, self.node)
        nodes = ranks // local
        time = ring(operation, local, size) / self.inside
        time += ring(operation, nodes, size / local) / self.between
        return time + self.latency * math.ceil(math.log2(ranks)) * (2 if operation == "all_reduce" else 1)


@dataclass(frozen=True)
class Job:
    """A model, and the work of a rank in one gradient."""

    title: str
    parameters: float
    operations: float
    """Of one gradient: forward and backward pass of a rank's examples."""
    ways: tuple[str, ...]


JOBS = (
    Job("ResNet-50, 32 images", 25.6e6, 32 * 3 * 2 * 4.1e9, ("ddp-adamw", "ddp-bsam", "splits-bsam")),
    Job("7 billion, 8,192 tokens", 7e9, 6 * 7e9 * 8192, ("sharded-adamw", "sharded-bsam")),
    Job("70 billion, 8,192 tokens", 70e9, 6 * 70e9 * 8192, ("sharded-adamw", "sharded-bsam")),
)


def compute(machine: Machine) -> list[dict[str, Any]]:
    rows = []
    for job in JOBS:
        for name in job.ways:
            way = WAYS[name]
            for ranks in LARGE_RANKS:
                sends = [*((each, count, 4) for each, count in way.float32.items())]
                sends += [(each, count, 2) for each, count in way.weights.items()]
                rows.append(
                    {
                        "job": job.title,
                        "way": way.title,
                        "ranks": ranks,
                        "bytes": way.sent(ranks, job.parameters, weight_bytes=2),
                        "communication_seconds": sum(
                            count * machine.seconds(each, ranks, size * job.parameters) for each, count, size in sends
                        ),
                        "computation_seconds": way.passes * job.operations / (machine.flops * machine.used),
                    }
                )
    return rows


# ------------------------------------------------------------------ all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("scale.json"))
    arguments = parser.parse_args()
    parameters = sum(parameter.numel() for parameter in make_model().parameters())
    measured = []
    for ranks in RANKS:
        for name, sent in measure_sent(ranks).items():
            row = {"way": WAYS[name].title, "ranks": ranks, "bytes": sent}
            measured.append({**row, "least": WAYS[name].sent(ranks, parameters)})
            print("{way:22} {ranks} ranks {bytes:12,.0f} bytes, at least {least:12,.0f}".format(**measured[-1]))
    memory = {name: measure_memory(name) for name in ("adamw", "sam", "bsam")}
    print("peak in copies of the weights:", ", ".join(f"{name} {copies:.2f}" for name, copies in memory.items()))
    machine = Machine()
    computed = compute(machine)
    for row in computed:
        print(
            "{job:26} {way:22} {ranks:5} ranks {bytes:18,.0f} bytes {communication_seconds:8.3f} s communication "
            "{computation_seconds:8.3f} s computation".format(**row)
        )
    record = {
        "what": "bytes that a rank sends per step: measured on gloo in float32, and computed; peak of memory",
        "parameters": parameters,
        "measured": measured,
        "copies": memory,
        "machine": dataclasses.asdict(machine),
        "computed": computed,
        "environment": environment(),
    }
    write_json(arguments.out, record)


if __name__ == "__main__":
    main()
