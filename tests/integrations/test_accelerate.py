"""Accelerate's loop: prepare, accumulate, clip, save and load, one process and two."""

import functools
from datetime import timedelta

import pytest

pytest.importorskip("accelerate")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradScalerKwargs, InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bsam
from bsam.integrations.accelerate import probe
from tests.integrations.devices import on_devices
from tests.integrations.two_processes import TIMEOUT, run_two_ranks

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(autouse=True)
def _fresh_state():
    """An accelerator's settings are kept for the process: forget those of the last test."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def network(dropout=0.0, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).to(dtype)


def data(num=10, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num, 4, generator=generator).to(dtype), torch.randint(3, (num,), generator=generator)


def make_bsam(model, **options):
    return bsam.BSAM(model.parameters(), lr=0.1, num_data=100, rho=0.05, module=model, **options)


def make_sam(model, **options):
    return bsam.SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9, module=model, **options)


class Run:
    """A model, an optimizer and their accelerator."""

    def __init__(
        self, make=make_bsam, dropout=0.0, dtype=torch.float64, device="cpu", accelerator=Accelerator, **options
    ):
        self.accelerator = accelerator(cpu=device == "cpu", **options)
        self.model = network(dropout, dtype).to(device)
        self.own = make(self.model)
        scheduler = torch.optim.lr_scheduler.StepLR(self.own, 1, gamma=0.9)
        loader = DataLoader(TensorDataset(*data(dtype=dtype)), batch_size=2)
        prepared = self.accelerator.prepare(self.model, self.own, loader, scheduler)
        self.prepared, self.optimizer, self.loader, self.scheduler = prepared

    def loss(self, x, y):
        return F.cross_entropy(self.prepared(x), y)

    def train(self, epochs=1, joined=False):
        losses = []
        for _ in range(epochs):
            for x, y in self.loader:
                with self.accelerator.accumulate(self.prepared):
                    last = self.accelerator.sync_gradients or not joined
                    losses.append(probe(self.accelerator, self.prepared, self.optimizer, self.loss, x, y, last=last))
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.prepared.parameters(), 0.3)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
        return losses


def train_in_a_loop(model, optimizer, steps, precision=None):
    """What Accelerate's loop must equal: all micro-batches of a step probed, clipping, a step, the scheduler."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)

    def loss_fn(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            outputs = model(x)
        return F.cross_entropy(outputs.float() if precision else outputs, y)

    for micro_batches in steps:
        for batch in micro_batches:
            optimizer.probe(loss_fn, *batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def plain_loop(make, steps, dtype=torch.float64, precision=None, device="cpu"):
    """Return a model that was trained in a loop."""
    model = network(dtype=dtype).to(device)
    train_in_a_loop(model, make(model), steps, precision)
    return model


def steps_of(x, y, size=2, accumulated=2, epochs=1):
    batches = list(zip(x.split(size), y.split(size), strict=True))
    return [batches[i : i + accumulated] for i in range(0, len(batches), accumulated)] * epochs


def assert_equal_weights(model, other, **tolerance):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, **tolerance)


@pytest.mark.parametrize("make", [make_bsam, make_sam])
def test_the_loop_equals_the_plain_loop(make):
    """Five micro-batches of two examples, two in a step: the last step has one."""
    run = Run(make, gradient_accumulation_steps=2)
    run.train(epochs=2)
    assert_equal_weights(run.model, plain_loop(make, steps_of(*data(), epochs=2)), rtol=0, atol=1e-12)


def test_bfloat16():
    run = Run(dtype=torch.float32, gradient_accumulation_steps=2, mixed_precision="bf16")
    run.train()
    other = plain_loop(make_bsam, steps_of(*data(dtype=torch.float32)), torch.float32, "bf16")
    assert_equal_weights(run.model, other, rtol=1e-5, atol=1e-6)


def test_one_perturbation_for_the_accumulated_batch():
    run = Run(make_sam, gradient_accumulation_steps=5)
    run.train(joined=True)
    assert_equal_weights(run.model, plain_loop(make_sam, steps_of(*data(), size=10)), rtol=0, atol=1e-12)


def test_resuming_equals_no_interruption(tmp_path):
    """Bit for bit, with dropout."""
    run = Run(dropout=0.5, gradient_accumulation_steps=2)
    run.train()
    run.accelerator.save_state(tmp_path)
    run.train()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    later = Run(dropout=0.5, gradient_accumulation_steps=2)
    later.accelerator.load_state(tmp_path)
    later.train()
    assert_equal_weights(run.model, later.model, rtol=0, atol=0)
    for p, q in zip(run.model.parameters(), later.model.parameters(), strict=True):
        assert all(torch.equal(value, later.own.state[q][name]) for name, value in run.own.state[p].items())


def test_the_posterior_is_that_of_the_plain_loop():
    make = functools.partial(make_bsam, betas=(0.9, 0.5))
    run = Run(make)
    run.train()
    model = network()
    optimizer = make(model)
    train_in_a_loop(model, optimizer, steps_of(*data(), accumulated=1))
    found, expected = run.own.posterior(run.accelerator.unwrap_model(run.prepared)), optimizer.posterior(model)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.std, expected.std)


def test_weights_of_micro_batches():
    run = Run(make_sam, gradient_accumulation_steps=2)
    (x, y), other = data(4), network()
    optimizer = make_sam(other)
    for batch, weight in (((x[:2], y[:2]), 7.0), ((x[2:], y[2:]), 3.0)):
        with run.accelerator.accumulate(run.prepared):
            probe(run.accelerator, run.prepared, run.optimizer, run.loss, *batch, weight=weight)
            run.optimizer.step()
        optimizer.probe(lambda x, y: F.cross_entropy(other(x), y), *batch, weight=weight)
    optimizer.step()
    assert_equal_weights(run.model, other, rtol=0, atol=1e-12)


class WithScaler(Accelerator):
    """Trains in float16. On the CPU Accelerate makes no scaler, so that it is given torch's."""

    def __init__(self, **options):
        settings = GradScalerKwargs(init_scale=2.0**10)
        super().__init__(mixed_precision="fp16", kwargs_handlers=[settings], **options)
        if self.scaler is None:
            self.scaler, self.native_amp = torch.amp.GradScaler("cpu", **settings.to_kwargs()), True


@on_devices
def test_float16_with_the_scaler(device):
    run = Run(dtype=torch.float32, device=device, accelerator=WithScaler, gradient_accumulation_steps=2)
    run.train()
    steps = steps_of(*(tensor.to(device) for tensor in data(dtype=torch.float32)))
    other = plain_loop(make_bsam, steps, torch.float32, device=device)
    assert_equal_weights(run.model, other, rtol=2e-2, atol=2e-3)
    assert run.accelerator.scaler.get_scale() == 2.0**10
    assert run.own.skipped_steps == 0


@on_devices
@pytest.mark.parametrize("make", [make_bsam, make_sam])
@pytest.mark.parametrize("overflow", [1, 2])
def test_an_overflow_in_one_gradient_is_skipped_and_lowers_the_scale(overflow, make, device):
    """In the first gradient alone, and in the second alone."""
    run = Run(make, dtype=torch.float32, device=device, accelerator=WithScaler)
    before = [p.clone() for p in run.model.parameters()]
    num_passes = 0

    def loss_fn(x, y):
        nonlocal num_passes
        num_passes += 1
        outputs = run.prepared(x)
        if num_passes == overflow:
            outputs.register_hook(lambda gradient: gradient * torch.inf)
        return F.cross_entropy(outputs, y)

    x, y = (tensor.to(device) for tensor in data(2, torch.float32))
    with run.accelerator.accumulate(run.prepared):
        loss = probe(run.accelerator, run.prepared, run.optimizer, loss_fn, x, y)
        run.accelerator.clip_grad_norm_(run.prepared.parameters(), 0.3)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert loss.isfinite()
    assert num_passes == 2
    assert run.accelerator.optimizer_step_was_skipped
    assert run.own.skipped_steps == 1
    assert run.accelerator.scaler.get_scale() == 2.0**9
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), before, strict=True))
    run.train()
    assert not run.accelerator.optimizer_step_was_skipped
    assert run.own.skipped_steps == 1


# ---------------------------------------------------------------- errors


def test_an_optimizer_that_was_not_prepared():
    run = Run()
    with pytest.raises(TypeError, match=r"write model, optimizer = accelerator\.prepare\(model, optimizer\)"):
        probe(run.accelerator, run.prepared, run.own, run.loss, *data(2))


def test_an_optimizer_of_torch():
    run = Run(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="SGD has no probe: make an optimizer of bsam"):
        probe(run.accelerator, run.prepared, run.optimizer, run.loss, *data(2))


def test_sharded_models_are_refused():
    run = Run()
    run.accelerator.state.distributed_type = DistributedType.FSDP
    with pytest.raises(ValueError, match=r"FSDP keeps weights .* Start one process per device"):
        probe(run.accelerator, run.prepared, run.optimizer, run.loss, *data(2))


def test_backward_in_place_of_probe():
    run = Run()
    run.accelerator.backward(run.loss(*data(2)))
    with pytest.raises(TypeError, match=r"optimizer\.probe\(loss_fn, x, y\).*bsam\.integrations"):
        run.optimizer.step()


def test_saving_between_micro_batches(tmp_path):
    run = Run(gradient_accumulation_steps=2)
    with run.accelerator.accumulate(run.prepared):
        probe(run.accelerator, run.prepared, run.optimizer, run.loss, *data(2))
    with pytest.raises(RuntimeError, match=r"step\(\)"):
        run.accelerator.save_state(tmp_path)


# ---------------------------------------------------------------- two processes


def rank_trains(rank, folder):
    """Train, see what is refused, and save the weights: without splits, and with two of them."""
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=TIMEOUT))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[timeout])
    x, y = data(12)
    parts = {1: [slice(6 * k, 6 * k + 4) if rank == 0 else slice(6 * k + 4, 6 * k + 6) for k in range(2)]}
    parts[2] = [slice(6 * k + 3 * rank, 6 * k + 3 * rank + 3) for k in range(2)]
    for splits in (1, 2):
        bare = network()
        model, optimizer = accelerator.prepare(bare, make_bsam(bare, splits=splits))

        def loss_fn(x, y, model=model):
            return F.cross_entropy(model(x), y)

        for part in parts[splits]:
            with accelerator.accumulate(model):
                probe(accelerator, model, optimizer, loss_fn, x[part], y[part])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
        torch.save([p.detach() for p in bare.parameters()], f"{folder}/{splits}-{rank}.pt")

    with pytest.raises(ValueError, match=r"the ranks have \[4, 2\] examples.* write drop_last=True"):
        probe(accelerator, model, optimizer, loss_fn, x[parts[1][0]], y[parts[1][0]])
    grouped = network()
    grouped_optimizer = bsam.BSAM(grouped.parameters(), num_data=100, process_group=dist.group.WORLD)
    grouped_model, prepared = accelerator.prepare(grouped, grouped_optimizer)
    with pytest.raises(ValueError, match="make the optimizer without process_group="):
        probe(accelerator, grouped_model, prepared, lambda x, y: F.cross_entropy(grouped_model(x), y), x, y)
    with pytest.raises(ValueError, match=r"over the 2 ranks: write model, optimizer = accelerator\.prepare"):
        probe(accelerator, bare, optimizer, lambda x, y: F.cross_entropy(bare(x), y), x, y)


def test_two_ranks_equal_one_process(tmp_path):
    """Micro-batches of 6: 4 examples on one rank and 2 on the other, or 3 on each, of which 2 are in the first part."""
    run_two_ranks(rank_trains, tmp_path)
    x, y = data(12)
    first, second = [0, 1, 3, 4], [2, 5]
    cut = [[(x[i:][part], y[i:][part]) for i in (0, 6) for part in (first, second)]]
    for splits, steps in ((1, steps_of(x, y, size=6)), (2, cut)):
        expected = list(plain_loop(make_bsam, steps).parameters())
        for rank in range(2):
            weights = torch.load(tmp_path / f"{splits}-{rank}.pt", weights_only=True)
            for p, q in zip(weights, expected, strict=True):
                torch.testing.assert_close(p, q.detach(), rtol=0, atol=1e-12)
