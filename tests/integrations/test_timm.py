"""Models, parameter groups, schedulers, optimizers and checkpoints of timm.

timm needs torchvision, which has to fit the build of torch, so these tests are marked `gpu` and run where both are
installed. Only float16 needs the GPU itself.
"""

import math

import pytest

pytest.importorskip("timm")

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm import optim
from timm.scheduler import CosineLRScheduler
from timm.utils import CheckpointSaver, dispatch_clip_grad
from torch.nn.parallel import DistributedDataParallel

import bsam
from tests.integrations.devices import on_devices
from tests.integrations.two_processes import run_two_ranks

pytestmark = [pytest.mark.integrations, pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def vit(dtype=torch.float64):
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=3, img_size=32).to(dtype)


def data(num=8, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 3, 32, 32, generator=generator).to(dtype), torch.randint(3, (num,), generator=generator)


def groups(model):
    return optim.param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.75)


def make_bsam(model, **options):
    return bsam.BSAM(groups(model), **{"lr": 0.1, "num_data": 100, "rho": 0.05, "betas": (0.9, 0.5), **options})


def loss_of(model):
    return lambda x, y: F.cross_entropy(model(x), y)


def assert_equal_weights(model, other, **tolerance):
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def test_groups_and_schedulers():
    """`lr_scale` of a group, which timm's schedulers multiply with, and its weight decay, which is a prior."""
    model = vit()
    optimizer = make_bsam(model)
    scheduler = CosineLRScheduler(optimizer, t_initial=4, warmup_t=2, warmup_lr_init=0.01)
    rates = []
    for epoch in range(4):
        scheduler.step(epoch)
        optimizer.step(loss_of(model), *data())
        rates.append([group["lr"] / group["lr_scale"] for group in optimizer.param_groups])
    expected = [0.01, 0.055, 0.05, 0.05 * (1 + math.cos(math.pi * 3 / 4))]
    for found, rate in zip(rates, expected, strict=True):
        assert found == pytest.approx([rate] * len(found))
    given = {p: group["weight_decay"] for group in groups(model) for p in group["params"]}
    for group in optimizer.param_groups:
        assert all(group["prior_precision"] == pytest.approx(100 * given[p]) for p in group["params"])


@pytest.mark.parametrize("name", ["AdamW", "Lamb", "Lion", "SGDW", "Adan", "NAdamW", "Muon", "RMSpropTF", "Adafactor"])
def test_sam_without_a_ball_is_the_optimizer_of_timm(name):
    base, model, other = getattr(optim, name), vit(), vit()
    optimizer, plain = bsam.SAM(groups(model), base, rho=0.0, lr=0.01), base(groups(other), lr=0.01)
    for seed in range(3):
        x, y = data(seed=seed)
        optimizer.step(loss_of(model), x, y)
        plain.zero_grad()
        loss_of(other)(x, y).backward()
        plain.step()
    assert_equal_weights(model, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["norm", "value", "agc"])
def test_accumulation_and_clipping(mode):
    """Two micro-batches are a step with two splits. timm's clipping acts on the gradient that is applied."""
    model, other = vit(), vit()
    (x, y), before = data(), [p.detach().clone() for p in model.parameters()]
    optimizer, joined = make_bsam(model), make_bsam(other, splits=2)
    for k in (0, 4):
        optimizer.probe(loss_of(model), x[k : k + 4], y[k : k + 4])
    joined.probe(loss_of(other), x, y)
    unclipped = [p.grad.clone() for p in model.parameters()]
    for each in (model, other):
        dispatch_clip_grad(each.parameters(), 0.01, mode=mode)
    assert any(not torch.equal(p.grad, g) for p, g in zip(model.parameters(), unclipped, strict=True))
    optimizer.step()
    joined.step()
    assert_equal_weights(model, other, rtol=0, atol=1e-12)
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_bfloat16():
    model, other = vit(torch.float32), vit(torch.float32)
    x, y = data(dtype=torch.float32)
    optimizer, plain = make_bsam(model), make_bsam(other)
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step(loss_of(model), x, y)
        plain.step(loss_of(other), x, y)
    assert_equal_weights(model, other, rtol=0.05, atol=0.02)
    assert not torch.equal(model.head.weight, other.head.weight)


@on_devices
def test_float16_equals_float32_up_to_rounding(device):
    model, other = vit(torch.float32).to(device), vit(torch.float32).to(device)
    x, y = (tensor.to(device) for tensor in data(dtype=torch.float32))
    optimizer, plain = make_bsam(model), make_bsam(other)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)

    def loss_fn(x, y):
        with torch.autocast(device, dtype=torch.float16):
            return F.cross_entropy(model(x).float(), y)

    for _ in range(3):
        optimizer.probe(loss_fn, x, y, scaler=scaler)
        scaler.unscale_(optimizer)
        dispatch_clip_grad(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        plain.step(loss_of(other), x, y)
    assert optimizer.skipped_steps == 0
    assert_equal_weights(model, other, rtol=0.05, atol=0.02)
    assert not torch.equal(model.head.weight, other.head.weight)


def test_a_checkpoint_of_timm(tmp_path):
    """Bit for bit."""
    whole = vit()
    optimizer = make_bsam(whole)
    for seed in range(2):
        optimizer.step(loss_of(whole), *data(seed=seed))
    saver = CheckpointSaver(whole, optimizer, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path))
    saver.save_checkpoint(epoch=0, metric=1.0)
    resumed = vit()
    later = make_bsam(resumed)
    timm.models.resume_checkpoint(resumed, str(tmp_path / "last.pth.tar"), optimizer=later)
    for model, own in ((whole, optimizer), (resumed, later)):
        for seed in range(2, 4):
            own.step(loss_of(model), *data(seed=seed))
    assert_equal_weights(whole, resumed, rtol=0, atol=0)


def rank_trains(rank, folder):
    dist.init_process_group("gloo")
    bare = vit()
    model = DistributedDataParallel(bare)
    optimizer = make_bsam(bare)
    for seed in range(2):
        x, y = (tensor[4 * rank : 4 * rank + 4] for tensor in data(seed=seed))
        optimizer.step(loss_of(model), x, y)
    torch.save(bare.state_dict(), f"{folder}/{rank}.pt")


def test_two_ranks_equal_one_process(tmp_path):
    """DistributedDataParallel, as in timm's own training script."""
    run_two_ranks(rank_trains, tmp_path)
    model = vit()
    optimizer = make_bsam(model)
    for seed in range(2):
        optimizer.step(loss_of(model), *data(seed=seed))
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=0, atol=1e-10)


def test_the_posterior_of_a_network_with_batch_norm(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3).double()
    optimizer = make_bsam(model, module=model, lr=0.01)
    x, y = data()
    for _ in range(4):
        optimizer.step(loss_of(model), x, y)
    posterior = optimizer.posterior()
    posterior.save(tmp_path / "posterior.safetensors")
    again = timm.create_model("test_resnet", num_classes=3).double()
    expected = bsam.predict(model, posterior, (x, y), num_samples=3, recalibrate=[(x, y)])
    loaded = bsam.load_posterior(tmp_path / "posterior.safetensors")
    found = bsam.predict(again, loaded, (x, y), num_samples=3, recalibrate=[(x, y)])
    torch.testing.assert_close(found.log_probs, expected.log_probs)
