"""How fast the engine is on one CUDA device, as ratios measured in one run.

    python benchmarks/engine.py --out results/engine.json

Each measurement is a process of its own (`workers.py`). Peers that are not installed (ivon-opt, pytorch_optimizer, jax)
are left out, and said so in the record. `--profile` adds the kernels of each training step.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from paper_settings import BSAM as PAPER
from torch import Tensor, nn
from workers import Build, Measure, main, profiles

import bsam
from bsam.compiler.capture import Captured
from bsam.experiments.models import make_model


def milliseconds_per_call(call: Callable[[], Any], *, calls: int = 20, repeats: int = 7) -> float:
    """The median over repeats of the mean over calls, by device events."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)


# ------------------------------------------------------------------ training steps


def make_optimizer(method: str, model: nn.Module, splits: int, seed: int = 0) -> torch.optim.Optimizer:
    parameters, sgd = model.parameters(), {"lr": 0.1, "momentum": 0.9}
    match method:
        case "bsam":
            return bsam.BSAM(parameters, **PAPER, num_data=50_000, splits=splits, module=model, seed=seed)
        case "vogn":
            return bsam.VOGN(parameters, lr=0.001, num_data=50_000, splits=splits, module=model, seed=seed)
        case "sam":
            return bsam.SAM(parameters, torch.optim.SGD, rho=0.05, splits=splits, module=model, **sgd)
        case "sgd":
            return torch.optim.SGD(parameters, fused=True, **sgd)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=1e-3, fused=True, capturable=True)
    raise ValueError(f"there is no method {method!r}.")


def make_batch(network: str, batch: int, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """A network and images for it, as cuDNN likes them best."""
    model = make_model(network, num_classes=10, image_shape=(3, 32, 32), seed=seed).cuda()
    x = torch.randn(batch, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), x, torch.randint(10, (batch,), device="cuda")


def compiled_loss(model: nn.Module, precision: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Forward and backward pass compiled, as one does without us."""

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
            logits = model(x)
        return F.cross_entropy(logits.float(), y)

    compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(loss_fn, dynamic=False)
    return compiled


def plain_step(method: str, *, network: str, batch: int, precision: str) -> Measure:
    """A step of torch's optimizer without TrainStep: compiled passes, a fused update, all captured in one graph.

    cuDNN chooses its kernels by rules, or by trying them out (`torch.backends.cudnn.benchmark`); the faster one counts.
    """
    model, x, y = make_batch(network, batch)
    loss_fn = compiled_loss(model, precision)
    optimizer = make_optimizer(method, model, splits=1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss_fn(x, y))
        optimizer.step()

    captured = {}
    for benchmark in (False, True):
        with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark, allow_tf32=torch.backends.cudnn.allow_tf32):
            captured[benchmark] = Captured(step, x.device, undo=lambda: None)

    def measure() -> dict[str, Any]:
        times = {benchmark: milliseconds_per_call(call) for benchmark, call in captured.items()}
        best = min(times, key=times.__getitem__)
        return {
            "precision": precision,
            "ms": times[best],
            "cudnn_benchmark": best,
            "ms_by_cudnn_benchmark": {"off": times[False], "on": times[True]},
            "kernels": kernels_of(captured[best]),
        }

    return measure


def peer_step(name: str, *, network: str, batch: int, precision: str) -> Measure:
    """A step of another package as its own pages write it, with compiled passes: not captured, and without splits."""
    model, x, y = make_batch(network, batch)
    loss_fn = compiled_loss(model, precision)
    if name == "ivon":
        import ivon

        optimizer = ivon.IVON(model.parameters(), lr=0.1, ess=50_000)

        def step() -> None:
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                torch.autograd.backward(loss_fn(x, y))
            optimizer.step()
    else:
        from pytorch_optimizer import SAM

        optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)

        def step() -> None:
            torch.autograd.backward(loss_fn(x, y))
            optimizer.first_step(zero_grad=True)
            torch.autograd.backward(loss_fn(x, y))
            optimizer.second_step(zero_grad=True)

    for _ in range(3):
        step()
    package = {"ivon": "ivon-opt", "sam": "pytorch_optimizer"}[name]
    return lambda: {"precision": precision, "ms": milliseconds_per_call(step), package: version(package)}


def training_step(method: str, *, network: str, batch: int, splits: int, precision: str, runs: int = 1) -> Measure:
    """One captured step of `runs` runs together."""
    models = [make_model(network, num_classes=10, image_shape=(3, 32, 32), seed=k).cuda() for k in range(runs)]
    optimizers = [make_optimizer(method, model, splits, k) for k, model in enumerate(models)]
    x = torch.randn(runs, batch, 3, 32, 32, device="cuda")
    y = torch.randint(10, (runs, batch), device="cuda")
    losses = [lambda x, y, model=model: F.cross_entropy(model(x).float(), y) for model in models]
    step = bsam.TrainStep(
        optimizers,
        losses,
        (x, y),
        module=models,
        precision="bfloat16" if precision == "bfloat16" else None,
    )

    def measure() -> dict[str, Any]:
        milliseconds = milliseconds_per_call(lambda: step(x, y))
        return {
            "method": method,
            "network": network,
            "batch": batch,
            "splits": splits,
            "precision": precision,
            "runs": runs,
            "ms": milliseconds,
            "ms_per_run": milliseconds / runs,
            "kernels": kernels_of(lambda: step(x, y)),
        }

    return measure


def kernels_of(call: Callable[[], Any], calls: int = 5) -> list[tuple[float, float, str]] | None:
    """Microseconds, launches and name of the kernels of a call, the longest first; None if nobody asked."""
    if not profiles():
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.device_time_total)
    total = ("all", sum(e.device_time_total for e in events), sum(e.count for e in events))
    rows = [total, *((e.key[:100], e.device_time_total, e.count) for e in events[:40])]
    return [(round(time / calls, 1), count / calls, name) for name, time, count in rows]


# ------------------------------------------------------------------ arithmetic alone


def gpt2_shapes(width: int = 768) -> list[tuple[int, ...]]:
    """The shapes of GPT-2's parameters, 124 million of them at its own width."""
    block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,), (width,), (width,)]
    block += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50257, width), (1024, width), *(shape for _ in range(12) for shape in block), (width,), (width,)]


def bsam_arithmetic(width: int = 768) -> Measure:
    """Sampling, perturbation and update of bSAM on packed parameters, gradients given: three passes over memory."""
    from bsam.compiler.tracing import compile_function
    from bsam.engine.packs import make_packs
    from bsam.engine.sampling_triton import block_table, sample_posterior
    from bsam.optim.probing import Slot, Tally

    parameters = [nn.Parameter(torch.randn(shape, device="cuda") * 0.02) for shape in gpt2_shapes(width)]
    optimizer = bsam.BSAM(parameters, **PAPER, num_data=1e6)
    slots = optimizer._slots()
    packs = make_packs([slots], [str(i) for i in range(len(slots))])
    first = [torch.randn_like(pack.weights[0]) for pack in packs]
    second = [torch.randn_like(pack.weights[0]) for pack in packs]
    theta = [torch.zeros_like(pack.weights)[:, None] for pack in packs]
    magnitude = [torch.zeros_like(pack.weights[0]) for pack in packs]
    tables = [block_table([s.index for s in p.runs[0]], p.offsets, p.sizes, torch.device("cuda")) for p in packs]
    seeds = torch.zeros(1, dtype=torch.int64, device="cuda")
    count = len(packs)
    names = list(packs[0].state)
    state = [pack.state[name][0] for pack in packs for name in names]
    weights = [pack.weights[0] for pack in packs]

    def packed(flat: tuple[Tensor, ...]) -> list[Slot]:
        states = [dict(zip(names, flat[count + i * len(names) :], strict=False)) for i in range(count)]
        group = optimizer.param_groups[0]
        return [Slot(0, w, group, w.clone(), own) for w, own in zip(flat[:count], states, strict=True)]

    class Given:
        """Hands out the first gradient, and writes the perturbed weights where a model would read them."""

        def __init__(self, gradients: list[Tensor], targets: list[Tensor]) -> None:
            self.gradients, self.targets, self.calls = gradients, targets, 0

        def __call__(self, wanted: Any) -> list[Tensor]:
            self.calls += 1
            if self.calls == 2:
                for target, w in zip(self.targets, wanted, strict=True):
                    target.copy_(w)
            return self.gradients

        def with_weights(self, wanted: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            return self(wanted), wanted

    def perturb(*flat: Tensor) -> list[Tensor]:
        rest = flat[count + len(state) :]
        gradients, targets, sums = rest[:count], rest[count : 2 * count], rest[2 * count :]
        tally = Tally()
        optimizer._probe(packed(flat), targets, Given(list(gradients), list(targets)), tally)
        for to, value in zip(sums, tally.means["first_gradient"], strict=True):
            to.copy_(value)
        return []

    def update(*flat: Tensor) -> list[Tensor]:
        rest = flat[count + len(state) :]
        statistics = {"gradient": list(rest[:count]), "first_gradient": list(rest[count:])}
        optimizer._apply(packed(flat), statistics, None)
        return []

    flat_theta = [t[0, 0] for t in theta]
    perturb_inputs = [*weights, *state, *first, *flat_theta, *magnitude]
    update_inputs = [*weights, *state, *second, *magnitude]
    compiled_perturb = compile_function(perturb, perturb_inputs)
    compiled_update = compile_function(update, update_inputs)

    def sample() -> None:
        for pack, to, table in zip(packs, theta, tables, strict=True):
            s, steps = pack.state["unit_precision"], pack.state["step"]
            sample_posterior(to, pack.weights, s, table, steps, seeds, 1e6)

    def whole() -> None:
        sample()
        compiled_perturb(*perturb_inputs)
        compiled_update(*update_inputs)

    device = torch.device("cuda")
    run = Captured(whole, device, undo=lambda: None)
    parts = {
        "sample": Captured(sample, device, undo=lambda: None),
        "perturb": Captured(lambda: compiled_perturb(*perturb_inputs), device, undo=lambda: None),
        "update": Captured(lambda: compiled_update(*update_inputs), device, undo=lambda: None),
    }
    numel = sum(p.numel() for p in parameters)

    def measure() -> dict[str, Any]:
        source = torch.empty(2**28, device="cuda")
        target = torch.empty_like(source)
        copy = milliseconds_per_call(lambda: target.copy_(source))
        bandwidth = 2 * source.numel() * 4 / copy / 1e9
        return {
            "parameters": numel,
            "packs": count,
            "ms": milliseconds_per_call(run),
            "parts_ms": {name: milliseconds_per_call(part) for name, part in parts.items()},
            "copy_TB_per_s": bandwidth,
            "floor_16_passes_ms": 16 * numel * 4 / bandwidth / 1e9,
        }

    return measure


def adamw_arithmetic() -> Measure:
    parameters = [nn.Parameter(torch.randn(shape, device="cuda") * 0.02) for shape in gpt2_shapes()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    for p in parameters:
        p.grad = torch.randn_like(p)
    return lambda: {"ms": milliseconds_per_call(optimizer.step)}


def ivon_arithmetic() -> Measure:
    import ivon

    parameters = [nn.Parameter(torch.randn(shape, device="cuda") * 0.02) for shape in gpt2_shapes()]
    optimizer = ivon.IVON(parameters, lr=0.1, ess=1e6)
    gradients = [torch.randn_like(p) for p in parameters]

    def step() -> None:
        with optimizer.sampled_params(train=True):
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g
        optimizer.step()

    return lambda: {"ms": milliseconds_per_call(step, calls=5)}


# ------------------------------------------------------------------ memory, prediction


def memory(vectorise: bool, tensors: int = 32, width: int = 1024) -> Measure:
    """Peak memory of `optimizer.step` beyond weights and state, in copies of the parameters; 8 splits.

    What is beyond whole copies are temporaries of one tensor, and activations: more and smaller tensors have less.
    """

    def measure() -> dict[str, Any]:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(tensors))).cuda()
        optimizer = bsam.BSAM(model.parameters(), **PAPER, num_data=1e4, splits=8, module=model, vectorise=vectorise)
        x = torch.randn(8, width, device="cuda")
        optimizer.step(lambda x: model(x).square().mean(), x)
        optimizer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step(lambda x: model(x).square().mean(), x)
        copies = (torch.cuda.max_memory_allocated() - before) / sum(4 * p.numel() for p in model.parameters())
        activations = len(x) * width * tensors / sum(p.numel() for p in model.parameters())
        return {"copies": copies, "vectorise": vectorise, "tensors": tensors, "copies_of_activations": activations}

    return measure


def prediction(precision: str, samples: int = 32) -> Measure:
    """Samples of ResNet-20 on 10,000 images, against as many compiled passes over them with fixed weights."""
    model, plain_model = (
        make_model("resnet20_frn", num_classes=10, image_shape=(3, 32, 32), seed=0).cuda() for _ in range(2)
    )
    optimizer = bsam.BSAM(model.parameters(), **{**PAPER, "betas": (0.9, 0.5)}, num_data=50_000, module=model)
    x = torch.randn(10_000, 3, 32, 32, device="cuda")
    y = torch.randint(10, (10_000,), device="cuda")
    for _ in range(5):
        optimizer.step(lambda x, y: F.cross_entropy(model(x), y), x[:64], y[:64])
    posterior = optimizer.posterior()

    def forward(model: nn.Module, inputs: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
            return model(inputs).float()

    def predict() -> bsam.Predictions:
        options = {"num_samples": samples, "batch_size": 500, "forward": forward, "progress": False}
        return bsam.predict(model, posterior, (x, y), vectorise=True, compile=True, **options)  # no loop in its place

    # What cuDNN likes best; a batch is copied to where the captured pass reads it, as it is in `predict`.
    plain_model = plain_model.to(memory_format=torch.channels_last).eval()
    plain_x = x.to(memory_format=torch.channels_last)
    plain = torch.compile(lambda inputs: forward(plain_model, inputs), mode="reduce-overhead", dynamic=False)

    @torch.no_grad()
    def passes(batch: int, count: int = samples) -> None:
        for _ in range(count):
            for part in plain_x.split(batch):
                plain(part)

    computed_by = predict().computed_by
    for batch in PLAIN_BATCHES:
        passes(batch, count=1)  # 2 and more calls: the first compiles, the second captures

    def measure() -> dict[str, Any]:
        plain_seconds = {batch: wall_clock_seconds(lambda batch=batch: passes(batch)) for batch in PLAIN_BATCHES}
        best = min(plain_seconds, key=plain_seconds.__getitem__)
        return {
            "precision": precision,
            "images": len(x),
            "samples": samples,
            "computed_by": computed_by,
            "predict_s": wall_clock_seconds(predict),
            "plain_s": plain_seconds[best],
            "plain_batch": best,
        }

    return measure


PLAIN_BATCHES = (1000, 5000)
"""Images of a plain pass; what counts is the quicker."""


def wall_clock_seconds(call: Callable[[], Any], *, repeats: int = 7) -> float:
    """The median over repeats, each with all the device has to do, after a call to warm up."""
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def jax_structure() -> Measure:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    from jax_structure import build

    return build(8)  # type: ignore[no-any-return]


# ------------------------------------------------------------------ all of them

R20 = {"network": "resnet20_frn", "batch": 128}
R18 = {"network": "resnet18", "batch": 200, "precision": "bfloat16"}
MEASUREMENTS: dict[str, Build] = {
    **{
        f"r20 {method} m={splits} {precision}{' x4' if runs == 4 else ''}": functools.partial(
            training_step, method, splits=splits, precision=precision, runs=runs, **R20
        )
        for precision in ("bfloat16", "tf32")
        for method, splits, runs in (("bsam", 8, 1), ("bsam", 8, 4), ("sgd", 1, 1))
    },
    **{
        f"r20 {method} plain {precision}": functools.partial(plain_step, method, precision=precision, **R20)
        for precision in ("bfloat16", "tf32")
        for method in ("sgd", "adamw")
    },
    "r20 sam m=8 bfloat16": lambda: training_step("sam", splits=8, precision="bfloat16", **R20),
    "r20 vogn m=16 bfloat16": lambda: training_step("vogn", splits=16, precision="bfloat16", **R20),
    "r20 ivon bfloat16": lambda: peer_step("ivon", precision="bfloat16", **R20),
    "r20 sam of pytorch_optimizer bfloat16": lambda: peer_step("sam", precision="bfloat16", **R20),
    "r18 bsam m=8": lambda: training_step("bsam", splits=8, **R18),
    "r18 sgd m=1": lambda: training_step("sgd", splits=1, **R18),
    "r18 sgd plain": lambda: plain_step("sgd", **R18),
    "r20 bsam m=8 jax": jax_structure,
    "arithmetic bsam": bsam_arithmetic,
    "arithmetic adamw": adamw_arithmetic,
    "arithmetic ivon": ivon_arithmetic,
    "memory loop": lambda: memory(False),
    "memory vmap": lambda: memory(True),
    "memory loop, smaller tensors": lambda: memory(False, tensors=256, width=512),
    "memory vmap, smaller tensors": lambda: memory(True, tensors=256, width=512),
    "predict bfloat16": lambda: prediction("bfloat16"),
    "predict tf32": lambda: prediction("tf32"),
}


if __name__ == "__main__":
    main(MEASUREMENTS, description=__doc__, out="engine.json")
