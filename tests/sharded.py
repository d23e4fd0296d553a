"""Sharded models on four processes: what each rank does, for tests/test_shards.py.

The processes are started once and run every scenario, one after the other, on meshes of their first 1, 2 and 4 ranks.
A scenario returns tensors and texts, which the tests read.
"""

import math
import os
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import bsam

WORLDS = (1, 2, 4)
STEPS = 3
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
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


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
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.8, when it saves a checkpoint
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


def evaluated(model):
    """Return outputs without a backward pass: the root stays gathered."""
    with torch.no_grad():
        return model(data(99)[0])


def looks(model, optimizer):
    """Return outputs at the mean, at samples, and at the mean again, one after the other."""
    outputs = [evaluated(model)]
    with optimizer.sampled(0):
        outputs.append(evaluated(model))
        with optimizer.sampled(1):
            outputs.append(evaluated(model))
        outputs.append(evaluated(model))
    outputs.append(evaluated(model))
    posterior = quiet_posterior(optimizer)
    with posterior.sampled(model, torch.Generator().manual_seed(2)):
        outputs.append(evaluated(model))
    outputs.append(evaluated(model))
    optimizer.step(loss_of(model), *data(50))
    outputs.append(evaluated(model))
    return torch.stack(outputs)


def quiet_posterior(optimizer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few steps
        return optimizer.posterior()


# ------------------------------------------------------------------ scenarios: the same numbers


@scenario
def training(ranks):
    found = {}
    for world, mesh in ranks.worlds():
        for kind in METHODS:
            model = shard(transformer(), mesh)
            optimizer = make(kind, model)
            train(model, optimizer, ranks.rank, world)
            found[f"{kind} {world}"] = result(model, optimizer)
    local = model.blocks[0].up.weight.to_local()
    sharded_state = all(
        isinstance(value, DTensor) for state in optimizer.state.values() for value in state.values() if value.dim()
    )
    return {**found, "empty": torch.tensor(local.numel() == 0), "sharded state": torch.tensor(sharded_state)}


@scenario
def meshes(ranks):
    """Replicas of shards, and a model whose parts are on different meshes."""
    found = {}
    for kind in ("BSAM", "SAM-SGD"):
        model = shard(transformer(), ranks.replicas)
        optimizer = make(kind, model)
        train(model, optimizer, ranks.rank, 4)
        found[f"{kind} replicas"] = result(model, optimizer)
        model = transformer()
        fully_shard(model.blocks[0], mesh=ranks.replicas)
        fully_shard(model, mesh=ranks.meshes[4])
        optimizer = make(kind, model)
        train(model, optimizer, ranks.rank, 4)
        found[f"{kind} mixed"] = result(model, optimizer)
    return found


@scenario
def gathered_root(ranks):
    """Everybody has the same batch: nothing but the weights matters."""
    model = shard(transformer(), ranks.meshes[4])
    model.set_reshard_after_backward(False)
    return {"outputs": looks(model, make("BSAM", model))}


@scenario
def precision(ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(transformer(torch.float32), ranks.meshes[4], mp_policy=policy)
    optimizer = make("BSAM", model)
    train(model, optimizer, ranks.rank, 4)
    return result(model, optimizer)


@scenario
def offload(ranks):
    found = {}
    for kind in ("BSAM", "SAM-AdamW"):
        model = shard(transformer(), ranks.meshes[4], offload_policy=CPUOffloadPolicy(pin_memory=False))
        optimizer = make(kind, model)
        train(model, optimizer, ranks.rank, 4)
        found[kind] = result(model, optimizer)
    return found


@scenario
def halves(ranks):
    """Clip between the halves, join micro-batches by last=False, and weigh them by numbers that differ by rank."""
    model = shard(transformer(), ranks.meshes[4])
    optimizer = make("BSAM", model, splits=1, max_grad_norm=None)
    weights = [1.0 + ranks.rank, 7.0 - ranks.rank]  # 2.5 and 5.5 over the ranks
    norm = in_halves(model, optimizer, weights, ranks.rank, 4)
    return {"norm": norm, **result(model, optimizer)}


def in_halves(model, optimizer, weights, rank=0, world=1):
    loss_fn = loss_of(model)
    for step, weight in enumerate(weights):
        optimizer.probe(loss_fn, *share(data(step), rank, world, 1), weight=weight)
    norm = whole(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    optimizer.step()
    optimizer.probe(loss_fn, *share(data(2), rank, world, 1), last=False)
    optimizer.probe(loss_fn, *share(data(3), rank, world, 1))
    optimizer.step()
    return norm


# ------------------------------------------------------------------ scenarios: files


@scenario
def checkpoints(ranks):
    """Saved on four ranks, loaded on 4, 2 and 1; then more steps."""
    found = {}
    for kind in ("BSAM", "SAM-AdamW", "IVON"):
        path = f"{ranks.folder}/checkpoint-{kind}"
        model = shard(transformer(), ranks.meshes[4])
        optimizer = make(kind, model)
        train(model, optimizer, ranks.rank, 4)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
        found[f"{kind} saved"] = {"weights": weights_of(model), "state": state_of(optimizer)}
        dist.barrier()
        for world, mesh in ranks.worlds():
            torch.manual_seed(world)
            other = shard(Transformer().double(), mesh)
            loaded = make(kind, other)
            weights, state = get_state_dict(other, loaded)
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path, process_group=mesh.get_group())
            set_state_dict(other, loaded, model_state_dict=weights, optim_state_dict=state)
            found[f"{kind} loaded {world}"] = {"weights": weights_of(other), "state": state_of(loaded)}
            train(other, loaded, ranks.rank, world, range(STEPS, STEPS + 2))
            found[f"{kind} {world}"] = {"weights": weights_of(other), "state": state_of(loaded)}
    return found


@scenario
def whole_states(ranks):
    """A state that was saved by an optimizer of a model that was not sharded."""
    found = {}
    for kind in ("BSAM", "SAM-AdamW"):
        plain = transformer()
        before = make(kind, plain)
        train(plain, before)
        model = shard(plain, ranks.meshes[4])
        found[f"{kind} made before"] = said(lambda: before.step(loss_of(model), *data(0)))  # noqa: B023
        optimizer = make(kind, model)
        optimizer.load_state_dict(before.state_dict())
        train(model, optimizer, ranks.rank, 4, range(STEPS, STEPS + 1))
        found[kind] = {"weights": weights_of(model), "state": state_of(optimizer)}
    return found


@scenario
def one_file(ranks):
    gathered = []
    full_tensor = DTensor.full_tensor

    def watched(self, **options):
        gathered.append(self.numel())
        return full_tensor(self, **options)

    model = shard(transformer(), ranks.meshes[4])
    optimizer = make("BSAM", model)
    train(model, optimizer, ranks.rank, 4)
    posterior = quiet_posterior(optimizer)
    DTensor.full_tensor = watched
    try:
        posterior.save(f"{ranks.folder}/posterior.safetensors")
    finally:
        DTensor.full_tensor = full_tensor
    posterior.save(f"{ranks.folder}/trained.safetensors", frozen=False)
    sample = posterior.sample(torch.Generator().manual_seed(4))
    cold = posterior.temper(0.25)
    loaded = bsam.load_posterior(f"{ranks.folder}/posterior.safetensors", model=model)
    with loaded.sampled(model, torch.Generator().manual_seed(4)):
        outputs = evaluated(model)
    return {
        "gathered": torch.tensor(gathered),
        "sample": {name: whole(t) for name, t in sample.items()},
        "cold": {name: whole(t) for name, t in cold.std.items()},
        "numbers": torch.stack([posterior.log_prob(sample), posterior.entropy(), posterior.kl()]),
        "outputs": outputs,
        "after": evaluated(model),
        "repr": repr(posterior),
        "no folder": said(lambda: posterior.save(f"{ranks.folder}/nowhere/posterior.safetensors")),
        "pruned": said(lambda: posterior.pruned(0.5)),
        "signal": {name: whole(t) for name, t in posterior.signal_to_noise().items()},
        "into a whole model": said(lambda: posterior.write_mean(transformer())),
    }


# ------------------------------------------------------------------ scenarios: what goes wrong


class Failing(Block):
    fails = False

    def forward(self, x):
        if self.fails:
            raise KeyError("in the second block")
        return super().forward(x)


@scenario
def failures(ranks):
    """A closure or a layer that raises on all ranks, and numbers that are not finite on one of them."""
    found = {}
    model = transformer()
    model.blocks[1].__class__ = Failing
    model = shard(model, ranks.meshes[4])
    optimizer = make("BSAM", model)
    train(model, optimizer, ranks.rank, 4, range(1))
    before = {"weights": weights_of(model), "state": state_of(optimizer)}
    calls = 0

    def late(x, y):
        nonlocal calls
        calls += 1
        loss = loss_of(model)(x, y)
        if calls == 4:
            raise KeyError("in the last pass")
        return loss

    batch = share(data(1), ranks.rank, 4, 2)
    found["closure"] = said(lambda: optimizer.step(late, *batch))
    after = [{"weights": weights_of(model), "state": state_of(optimizer)}]
    model.blocks[1].fails = True
    found["layer"] = said(lambda: optimizer.step(loss_of(model), *batch))
    model.blocks[1].fails = False
    after.append({"weights": weights_of(model), "state": state_of(optimizer)})
    bad = float("inf") if ranks.rank == 2 else 1.0
    found["not finite"] = said(lambda: optimizer.step(lambda x, y: loss_of(model)(x, y) * bad, *batch))
    after.append({"weights": weights_of(model), "state": state_of(optimizer)})
    for group in optimizer.param_groups:
        group["nonfinite"] = "skip"
    optimizer.step(lambda x, y: loss_of(model)(x, y) + (bad - 1), *batch)  # an infinite loss with a finite gradient
    after.append({"weights": weights_of(model), "state": state_of(optimizer)})
    found["skipped"] = torch.tensor(optimizer.skipped_steps)
    train(model, optimizer, ranks.rank, 4, range(1, STEPS))
    return {**found, "before": before, "after": after, "end": weights_of(model)}


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


@scenario
def buffers(ranks):
    found = {}
    for policy in ("first_split", "all", "none"):
        torch.manual_seed(0)
        model = fully_shard(Normalised().double(), mesh=ranks.meshes[4])
        optimizer = make("IVON", model, batch_norm=policy, splits=1)  # one pass: ranks do not mix
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(ranks.rank), dtype=torch.float64)
        optimizer.step(lambda x: model(x).square().mean(), x)  # noqa: B023
        found[policy] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return found


@scenario
def refusals(ranks):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, found = ranks.meshes[4], {}
    model = shard(transformer(), mesh)
    weights = weights_of(model)
    found["group"] = said(lambda: make("BSAM", model, process_group=dist.group.WORLD))
    found["vectorise"] = said(lambda: make("BSAM", model, vectorise=True))
    found["module"] = said(lambda: bsam.BSAM(model.parameters(), num_data=10))
    found["vogn"] = said(lambda: bsam.VOGN(model.parameters(), num_data=10, module=model))
    found["swag"] = said(lambda: bsam.SWAG(model))
    found["laplace"] = said(lambda: bsam.laplace(model, "categorical", data(0)[0], prior_precision=1.0))
    found["some"] = said(lambda: bsam.BSAM([model.gains], num_data=10, module=model))
    bsam.shards._OLDEST, oldest = "99", bsam.shards._OLDEST
    found["old torch"] = said(lambda: make("BSAM", model))
    bsam.shards._OLDEST = oldest
    optimizer = make("BSAM", model)
    found["train step"] = said(lambda: bsam.TrainStep(optimizer, loss_of(model), data(0)))
    posterior = quiet_posterior(optimizer)
    found["predict"] = said(lambda: bsam.predict(model, posterior, data(0)[0]))
    scaler = torch.amp.GradScaler("cpu")
    found["scaler"] = said(lambda: optimizer.probe(loss_of(model), *data(0), scaler=scaler))
    sizes = [t[: 4 + ranks.rank % 2] for t in data(0)]
    found["sizes"] = said(lambda: optimizer.step(loss_of(model), *sizes))
    some = data(0) if ranks.rank else [t[:0] for t in data(0)]
    found["empty"] = said(lambda: optimizer.step(loss_of(model), *some))
    weight = math.nan if ranks.rank == 1 else 1.0
    found["weight"] = said(lambda: optimizer.probe(loss_of(model), *data(0), weight=weight))
    for name in ("seed", "splits", "num_data"):
        other = make("BSAM", model, **{name: 1 + ranks.rank % 2})
        found[f"other {name}"] = said(lambda: other.step(loss_of(model), *data(0)))  # noqa: B023
    model.set_requires_gradient_sync(False)
    found["sync"] = said(lambda: optimizer.step(loss_of(model), *data(0)))
    model.set_requires_gradient_sync(True)
    found["unchanged"] = torch.tensor(all(torch.equal(t, weights[name]) for name, t in weights_of(model).items()))

    part = transformer()
    fully_shard(part.blocks[0], mesh=mesh)
    found["not sharded"] = said(lambda: make("BSAM", part))
    two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(two[0], mesh=mesh)
    if ranks.rank < 2:
        fully_shard(two[1], mesh=ranks.meshes[2])
        found["ranks"] = said(lambda: make("BSAM", two))
    parallel = parallelize_module(nn.Sequential(nn.Linear(4, 4)), ranks.replicas["shards"], {"0": ColwiseParallel()})
    even = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh)
    found["ddp"] = said(lambda: make("BSAM", nn.parallel.DistributedDataParallel(even, init_sync=False)))
    found["parallel"] = said(lambda: make("BSAM", parallel))
    fully_shard(parallel, mesh=ranks.replicas["replicas"])
    found["parallel and sharded"] = said(lambda: make("BSAM", parallel))
    return found
