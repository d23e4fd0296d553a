"""What a step of a sharded model costs: a transformer of 1 billion parameters under `fully_shard`, on one GPU.

    python benchmarks/fsdp.py --out results/fsdp.json
    torchrun --nproc-per-node=8 benchmarks/fsdp.py --out fsdp.json

Weights are random, and passes run in bfloat16 (`MixedPrecisionPolicy`). Weights, gradients and state are float32. The
record has the time per step, and memory in copies of the shard: what one rank holds between steps, and its peak.
The row "gradient" is one forward and backward pass without an optimizer: it shows what activations and gathered weights
take. Without a GPU a small model on the CPU shows that everything runs; it measures no memory.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import bsam
from bsam.experiments.record import environment, write_json

FIRST = 2
"""Steps before those that are timed: they make the state, and compile the noise."""
Step = Callable[[Tensor, Tensor], Any]


class Size(NamedTuple):
    vocabulary: int
    width: int
    layers: int
    heads: int
    batch: int
    length: int


LARGE = Size(vocabulary=50304, width=2048, layers=18, heads=16, batch=8, length=1024)
SMALL = Size(vocabulary=256, width=64, layers=2, heads=4, batch=4, length=32)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before, self.between = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention, self.project = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.before(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("fsdp.json"))
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    device = start()
    size = LARGE if device.type == "cuda" else SMALL
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    rows = {}
    for name, make in METHODS.items():
        begin = time.perf_counter()
        rows[name] = measure(make, size, mesh, device, arguments.steps)
        if dist.get_rank() == 0:
            shown = " ".join(f"{key} {value:.4g}" for key, value in rows[name].items() if value is not None)
            print(f"{name:12} {shown}   ({time.perf_counter() - begin:.0f} s in all)", flush=True)
    if dist.get_rank() == 0:
        record = {
            "what": "a transformer under fully_shard, bfloat16 passes, float32 weights and state: seconds per step "
            "(median), and memory of a rank in copies of its float32 shard, between steps and at the peak of a step",
            "ranks": dist.get_world_size(),
            "parameters": num_parameters(size),
            "size": size._asdict(),
            "steps": arguments.steps,
            "methods": rows,
            "environment": environment(device),
        }
        write_json(arguments.out, record)
    dist.destroy_process_group()


def start() -> torch.device:
    """Join the ranks that torchrun has started, or be the only one."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if has_gpu else torch.device("cpu")
    backend = "nccl" if has_gpu else "gloo"
    if has_gpu:
        torch.cuda.set_device(device)
    options: dict[str, Any] = {"device_id": device} if has_gpu else {}
    if "RANK" in os.environ:
        dist.init_process_group(backend, **options)
    else:
        store = dist.FileStore(f"{tempfile.mkdtemp()}/store", 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, **options)
    return device


def num_parameters(size: Size) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(size).parameters())


def measure(
    make: Callable[[nn.Module], Step], size: Size, mesh: Any, device: torch.device, steps: int
) -> dict[str, float | None]:
    """Return seconds per step and memory of one method."""
    torch.manual_seed(0)
    with device:
        model = Transformer(size)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    shard = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    step = make(model)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    times, held, peak = [], None, None
    for i in range(FIRST + steps):
        shape = (size.batch, size.length + 1)
        tokens = torch.randint(size.vocabulary, shape, device=device, generator=generator)
        x, y = tokens[:, :-1], tokens[:, 1:]
        synchronise(device)
        if i == FIRST and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
        begin = time.perf_counter()
        step(x, y)
        synchronise(device)
        times.append(time.perf_counter() - begin)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    found = {
        "seconds": statistics.median(times[FIRST:]),
        "held": None if held is None else held / shard,
        "peak": None if peak is None else peak / shard,
    }
    del model, step, block  # a block of a sharded model refers to the whole model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


def gradient(model: nn.Module) -> Step:
    loss_fn = loss_of(model)

    def step(x: Tensor, y: Tensor) -> None:
        model.zero_grad()
        loss_fn(x, y).backward()

    return step


def adamw(model: nn.Module) -> Step:
    optimizer, loss_fn = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), loss_of(model)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss_fn(x, y).backward()
        optimizer.step()

    return step


def ours(make: Callable[[nn.Module], bsam.SAM | bsam.BSAM | bsam.IVON]) -> Callable[[nn.Module], Step]:
    def prepare(model: nn.Module) -> Step:
        optimizer, loss_fn = make(model), loss_of(model)
        return lambda x, y: optimizer.step(loss_fn, x, y)

    return prepare


METHODS: dict[str, Callable[[nn.Module], Step]] = {
    "gradient": gradient,
    "AdamW": adamw,
    "IVON": ours(lambda model: bsam.IVON(model.parameters(), lr=1e-4, num_data=10**6, module=model)),
    "SAM-AdamW": ours(
        lambda model: bsam.SAM(model.parameters(), torch.optim.AdamW, rho=0.05, lr=1e-5, fused=True, module=model)
    ),
    "BSAM": ours(lambda model: bsam.BSAM(model.parameters(), lr=1e-3, num_data=10**6, module=model)),
}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
