"""Sharded models on four processes: what each rank does, for tests/test_shards.py.

The processes are started once and run every scenario, one after the other, on meshes of their first 1, 2 and 4 ranks.
A scenario returns tensors and texts, which the tests read.
"""

import os
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bsam

WORLDS = (1, 2, 4)
STEPS = 4
VOCABULARY, WIDTH, LENGTH, BATCH = 11, 6, 4, 16
TIMEOUT = timedelta(seconds=60)
SCENARIOS = {}


class Block(nn.Module):
    """Attention and an MLP of 5 units: the fourth of four ranks holds none of their rows."""

    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.attention(self.before(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Has tied weights (11 rows), a frozen part, and parameters of 5 and 2 rows."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.gains = nn.Parameter(torch.ones(2, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places
        for block, gain in zip(self.blocks, self.gains.unbind(), strict=True):
            x = block(x) * gain
        return self.head(x)


def transformer(dtype=torch.float64):
    torch.manual_seed(7)
    return Transformer().to(dtype)


def shard(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def data(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def share(tensors, rank, world, splits):
    """Return a rank's share of a batch: of each of its splits."""
    return [torch.cat([part.chunk(world)[rank] for part in t.chunk(splits)]) for t in tensors]


def loss_of(model):
    return lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())


GAUSSIAN = {"num_data": 50, "seed": 3}
METHODS = {
    "BSAM": (bsam.BSAM, {"lr": 0.3, "max_grad_norm": 0.1, "damping": 0.5, "max_noise": 0.2, **GAUSSIAN}),
    "IVON": (bsam.IVON, {"lr": 0.1, "initial_hessian": 1.0, "betas": (0.9, 0.99), **GAUSSIAN}),
    "SAM-SGD": (bsam.SAM, {"base_optimizer": torch.optim.SGD, "rho": 0.1, "lr": 0.1, "momentum": 0.9}),
    "SAM-AdamW": (bsam.SAM, {"base_optimizer": torch.optim.AdamW, "rho": 0.1, "lr": 0.01, "max_grad_norm": 0.2}),
    "ASAM": (bsam.ASAM, {"base_optimizer": torch.optim.SGD, "rho": 0.5, "lr": 0.1}),
}


def make(kind, model, **options):
    method, own = METHODS[kind]
    return method(model.parameters(), module=model, **{"splits": 2, **own, **options})


def train(model, optimizer, rank=0, world=1, steps=range(STEPS)):
    """Take steps: every second one by two micro-batches and a step."""
    losses = []
    for step in steps:
        splits, loss_fn = optimizer.param_groups[0]["splits"], loss_of(model)
        batch = data(step)
        if step % 2:
            halves = [[t[: BATCH // 2] for t in batch], [t[BATCH // 2 :] for t in batch]]
            found = [optimizer.probe(loss_fn, *share(half, rank, world, splits)) for half in halves]
            optimizer.step()
            losses.append((found[0] + found[1]) / 2)
        else:
            losses.append(optimizer.step(loss_fn, *share(batch, rank, world, splits)))
    return torch.stack(losses)


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def weights_of(model):
    from bsam.modules import named_parameters

    return {name: whole(p) for name, p in named_parameters(model).items()}


def state_of(optimizer):
    return {
        f"{i}/{name}": whole(value)
        for i, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def result(model, optimizer):
    """Return whole weights, state, gradients and samples, on every rank."""
    found = {"weights": weights_of(model), "state": state_of(optimizer)}
    found["gradients"] = {str(i): whole(p.grad) for i, p in enumerate(model.parameters()) if p.grad is not None}
    if hasattr(optimizer, "sampled"):
        with optimizer.sampled(2), optimizer.sampled(5):
            found["sample"] = weights_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few steps
        posterior = optimizer.posterior()
    with posterior.sampled(model, torch.Generator().manual_seed(1)):
        found["posterior sample"] = weights_of(model)
    with torch.no_grad():
        found["outputs"] = model(data(99)[0])  # at the mean again
    found["diagnosis"] = torch.tensor([finding.value for finding in optimizer.diagnose()])
    return found


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


class Ranks:
    """What a scenario gets: the rank, the meshes by number of ranks, and a folder."""

    def __init__(self, rank, folder):
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        self.rank, self.folder = rank, folder
        self.meshes = {world: DeviceMesh("cpu", list(range(world))) for world in WORLDS}
        self.replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))

    def worlds(self):
        """Yield the meshes that this rank is in."""
        yield from ((world, mesh) for world, mesh in self.meshes.items() if self.rank < world)


def run(rank, folder, names):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = dist.FileStore(f"{folder}/store", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=TIMEOUT)
    ranks = Ranks(rank, folder)
    for name in names:
        try:
            found = SCENARIOS[name](ranks)
        except Exception:
            torch.save({"error": traceback.format_exc()}, f"{folder}/{name}.{rank}.pt")
            break  # the other ranks wait in vain, and raise too
        torch.save(found, f"{folder}/{name}.{rank}.pt")
    else:
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # without the interpreter's clean-up, in which gloo's threads may abort


def said(function):
    """Return what an error says, or a text that there is none."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# ------------------------------------------------------------------ scenarios


@scenario
def training(ranks):
    found = {}
    for world, mesh in ranks.worlds():
        for kind in METHODS:
            model = shard(transformer(), mesh)
            optimizer = make(kind, model)
            losses = train(model, optimizer, ranks.rank, world)
            found[f"{kind} {world}"] = {"losses": losses, **result(model, optimizer)}
    return found
