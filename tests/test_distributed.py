"""Ranks as splits, with two real processes on the CPU."""

import copy
import os
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import bsam
from tests import optimizers
from tests.forked import SERVER
from tests.optimizers import METHODS

STEPS = 6


class Net(nn.Module):
    """Has BatchNorm, and a parameter that only the second rank's examples reach."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.linear = nn.Linear(3, 4, bias=False)  # before BatchNorm a bias has no gradient but rounding
        self.norm = norm(4)
        self.head = nn.Linear(4, 2)
        self.rare = nn.Parameter(torch.ones(2))

    def forward(self, x, with_rare):
        out = self.head(torch.tanh(self.norm(self.linear(x))))
        return out + self.rare if with_rare else out


def data(step):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(2, (24,), generator=generator)


def network(kind):
    mixes = not METHODS[kind].per_example  # VOGN refuses layers that mix examples
    return Net(nn.BatchNorm1d if mixes else nn.LayerNorm).double()


def make(kind, model, **options):
    if METHODS[kind].per_example:
        options.pop("batch_norm", None)
        options["vectorise"] = False  # in a loop: which parameters are used depends on the examples
    return optimizers.make(kind, model.parameters(), module=model, **options)


def train(kind, model, optimizer, part=slice(None)):
    losses = []
    for step in range(STEPS):
        x, y = data(step)
        second_half = torch.arange(24) >= 12

        def loss_fn(x, y, late):
            return nn.functional.cross_entropy(model(x, bool(late.all())), y)

        losses.append(optimizer.step(loss_fn, x[part], y[part], second_half[part]))
    return losses


def result(model, optimizer, losses):
    return {
        "model": {k: v.clone() for k, v in model.state_dict().items()},
        "state": dict(optimizer.state_dict()["state"]),
        "losses": torch.stack(losses),
    }


def start_ranks(function, arguments):
    """Run `function(rank, *arguments)` in two processes."""
    mp.start_processes(function, arguments, nprocs=2, start_method=SERVER.get_start_method())


def leave():
    """End this rank, whose work is saved, without the interpreter's clean-up: gloo's threads may abort in it."""
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def run_rank(rank, kind, policy, folder, sizes):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.manual_seed(rank)  # different starts: rank 0's weights are broadcast before the first step
    model = network(kind)
    optimizer = make(kind, model, splits=2, batch_norm=policy, process_group=dist.group.WORLD)
    start = sum(sizes[:rank])
    losses = train(kind, model, optimizer, slice(start, start + sizes[rank]))
    torch.save(result(model, optimizer, losses), f"{folder}/{rank}.pt")
    leave()


@pytest.mark.parametrize("kind", METHODS)
def test_two_ranks_of_two_splits_are_one_rank_of_four(kind, tmp_path):
    start_ranks(run_rank, (kind, "first_split", str(tmp_path), (12, 12)))
    torch.manual_seed(0)
    model = network(kind)
    optimizer = make(kind, model, splits=4)
    expected = result(model, optimizer, train(kind, model, optimizer))
    for rank in range(2):
        got = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert not torch.equal(model.rare, torch.ones(2, dtype=torch.float64))  # rank 0 never saw it


def test_ranks_count_by_their_examples_and_stay_equal(tmp_path):
    """9 + 15 examples: every rank ends with the same weights, and the loss is the mean over all 24."""
    start_ranks(run_rank, ("BSAM", "all", str(tmp_path), (9, 15)))
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def run_poisoned_rank(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = bsam.BSAM(model.parameters(), num_data=24, nonfinite="skip", process_group=dist.group.WORLD)
    for step in range(3):
        bad = float("nan") if (rank, step) == (1, 1) else 1.0
        optimizer.step(lambda x, y, b=bad, m=model: nn.functional.cross_entropy(m(x), y) * b, *data(step))
    torch.save({"skipped": optimizer.skipped_steps, **model.state_dict()}, f"{folder}/{rank}.pt")
    leave()


def test_a_number_that_is_not_finite_on_one_rank_skips_the_step_on_all(tmp_path):
    start_ranks(run_poisoned_rank, (str(tmp_path),))
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first["skipped"] == second["skipped"] == 1
    assert torch.equal(first["weight"], second["weight"])
    assert first["weight"].isfinite().all()


def run_ddp_rank(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)  # gradients share one buffer
    optimizer = bsam.BSAM(ddp.parameters(), num_data=24, lr=0.2)
    for step in range(STEPS):
        x, y = (t[rank::2] for t in data(step))
        optimizer.step(lambda x, y: nn.functional.cross_entropy(ddp(x), y), x, y)
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    leave()


def run_other_options(rank, folder):
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    model = nn.Linear(3, 2)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    errors = []
    for name, values in (("num_data", (50, 51)), ("seed", (0, 2**20)), ("lr", (0.1, 0.2))):
        options = {"num_data": 50, name: values[rank]}
        optimizer = bsam.BSAM(model.parameters(), process_group=dist.group.WORLD, **options)
        try:
            optimizer.step(lambda x: model(x).square().mean(), torch.ones(4, 3))
        except ValueError as error:
            errors.append(str(error))
    unchanged = all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    torch.save({"errors": errors, "unchanged": unchanged}, f"{folder}/{rank}.pt")
    leave()


def test_ranks_with_different_options_are_refused(tmp_path):
    start_ranks(run_other_options, (str(tmp_path),))
    for rank, number in enumerate((50, 51)):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert len(found["errors"]) == 3
        assert "different options, this one lr=1.0" in found["errors"][0]
        assert f"num_data={number}" in found["errors"][0]
        assert found["unchanged"]


def test_a_ddp_wrapped_model_without_a_group_is_one_big_batch(tmp_path):
    """backward() of the wrapped model averages over ranks; the noise is the same on each."""
    start_ranks(run_ddp_rank, (str(tmp_path),))
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = bsam.BSAM(model.parameters(), num_data=24, lr=0.2)
    for step in range(STEPS):
        optimizer.step(lambda x, y: nn.functional.cross_entropy(model(x), y), *data(step))
    for rank in range(2):
        got = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(got, model.state_dict(), rtol=1e-10, atol=1e-12)


@pytest.fixture
def lonely_group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_of_one_changes_nothing_and_cannot_be_copied(lonely_group):
    results = []
    for group in (None, lonely_group):
        torch.manual_seed(0)
        model = Net().double()
        optimizer = make("BSAM", model, splits=2, process_group=group)
        results.append(result(model, optimizer, train("BSAM", model, optimizer)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="state_dict"):
            copied(optimizer)


def test_a_group_and_a_wrapped_module_are_refused(lonely_group):
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="not both"):
        bsam.BSAM(ddp.parameters(), num_data=5, module=ddp, process_group=lonely_group)


# ---------------------------------------------------------------- a step in two halves


def in_micro_batches(model, optimizer, rank, wait=lambda: None):
    """Two micro-batches per rank: the blocks of a batch of four, in the order of their noise."""
    losses = []
    for step in range(STEPS):
        x, y = data(step)
        for k in range(2):
            block = slice(6 * (2 * k + rank), 6 * (2 * k + rank) + 6)
            late = torch.arange(24)[block] >= 12
            if step == 1:
                wait()
            optimizer.probe(
                lambda x, y, late: nn.functional.cross_entropy(model(x, bool(late.all())), y), x[block], y[block], late
            )
        losses.append(optimizer.step())
    return losses


def run_rank_in_halves(rank, kind, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.manual_seed(rank)
    model = network(kind)
    optimizer = make(kind, model, process_group=dist.group.WORLD)

    def wait():  # rank 1 probes when rank 0 is done with its probes: if probes communicated, both would wait for ever
        if rank == 1:
            store.wait(["rank 0 has probed"], timedelta(seconds=60))

    class Watched:
        """The optimizer, which tells when rank 0 takes its second step."""

        steps = 0

        def probe(self, *arguments):
            return optimizer.probe(*arguments)

        def step(self):
            if rank == 0 and self.steps == 1:
                store.set("rank 0 has probed", "yes")
            self.steps += 1
            return optimizer.step()

    losses = in_micro_batches(model, Watched(), rank, wait)
    torch.save(result(model, optimizer, losses), f"{folder}/{rank}.pt")
    leave()


@pytest.mark.parametrize("kind", METHODS)
def test_micro_batches_of_two_ranks_are_splits_of_one_and_probes_do_not_communicate(kind, tmp_path):
    start_ranks(run_rank_in_halves, (kind, str(tmp_path)))
    torch.manual_seed(0)
    model = network(kind)
    optimizer = make(kind, model, splits=4)
    expected = result(model, optimizer, train(kind, model, optimizer))
    for rank in range(2):
        got = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def run_rank_with_kept_micro_batches(rank, kind, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.manual_seed(rank)
    model = Net(nn.LayerNorm).double()
    optimizer = make(kind, model, process_group=dist.group.WORLD)
    losses = []
    for step in range(STEPS):
        x, y = (t[12 * rank : 12 * rank + 12] for t in data(step))
        for k, last in enumerate((False, True)):
            part = slice(8 * k, 8 * k + (4 if last else 8))
            optimizer.probe(
                lambda x, y: nn.functional.cross_entropy(model(x, rank == 1), y), x[part], y[part], last=last
            )
        losses.append(optimizer.step())
    torch.save(result(model, optimizer, losses), f"{folder}/{rank}.pt")
    leave()


@pytest.mark.parametrize("kind", ["BSAM", "SAM-SGD"])
def test_kept_micro_batches_of_two_ranks_are_one_perturbation_per_rank(kind, tmp_path):
    start_ranks(run_rank_with_kept_micro_batches, (kind, str(tmp_path)))
    torch.manual_seed(0)
    model = Net(nn.LayerNorm).double()
    optimizer = make(kind, model, splits=2)
    expected = result(model, optimizer, train(kind, model, optimizer))
    for rank in range(2):
        got = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def run_rank_that_changes_gradients(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = bsam.BSAM(
        model.parameters(), num_data=24, module=model, process_group=dist.group.WORLD, max_grad_norm=0.01
    )
    x, y = (t[rank::2] for t in data(0))

    def loss_fn(x, y):
        return nn.functional.cross_entropy(model(x), y)

    messages = []

    def note(act):
        try:
            act()
        except (RuntimeError, ValueError, FloatingPointError) as error:
            messages.append(str(error))

    optimizer.probe(loss_fn, x, y)
    own = model.weight.grad.clone()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    note(optimizer.step)
    optimizer.zero_grad()
    optimizer.probe(loss_fn, x, y)
    model.bias.grad = None
    note(optimizer.step)
    optimizer.discard()
    note(lambda: optimizer.probe(loss_fn, x, y, scaler=torch.amp.GradScaler("cpu")))
    optimizer.probe(lambda x, y: loss_fn(x, y) * (torch.nan if rank else 1.0), x, y)  # seen by all ranks in step()
    note(optimizer.step)
    pending = model.weight.grad.clone()
    optimizer.discard()
    optimizer.probe(loss_fn, x, y)
    again = model.weight.grad.clone()
    optimizer.step()
    torch.save(
        {"messages": messages, "own": own, "again": again, "pending": pending, "grad": model.weight.grad},
        f"{folder}/{rank}.pt",
    )
    leave()


def test_a_gradient_of_one_rank_must_not_be_changed(tmp_path):
    start_ranks(run_rank_that_changes_gradients, (str(tmp_path),))
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for rank, got in enumerate((first, second)):
        clipped, cleared, scaled, not_finite = got["messages"]
        assert "weight was changed between probe() and step()" in clipped
        assert "max_grad_norm=" in clipped
        assert "bias was changed" in cleared
        assert "scaler= does not go with process_group=" in scaled
        assert "is not finite" in not_finite
        assert bool(got["pending"].isfinite().all()) == (rank == 0)  # the failed step left this rank's gradient
        assert torch.equal(got["own"], got["again"])
    assert not torch.equal(first["own"], second["own"])
    assert torch.equal(first["grad"], second["grad"])


def run_ddp_rank_in_halves(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)  # gradients share one buffer
    optimizer = bsam.BSAM(ddp.parameters(), num_data=24, lr=0.2, module=ddp)
    for step in range(STEPS):
        for half in (slice(0, 12), slice(12, 24)):
            x, y = (t[half][rank::2] for t in data(step))
            optimizer.probe(lambda x, y: nn.functional.cross_entropy(ddp(x), y), x, y)
        optimizer.step()
    with ddp.no_sync(), pytest.raises(RuntimeError, match=r"a probe inside no_sync\(\) would not average"):
        optimizer.probe(lambda x, y: nn.functional.cross_entropy(ddp(x), y), x, y)
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    leave()


def test_micro_batches_of_a_ddp_wrapped_model(tmp_path):
    start_ranks(run_ddp_rank_in_halves, (str(tmp_path),))
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = bsam.BSAM(model.parameters(), num_data=24, lr=0.2, splits=2)
    for step in range(STEPS):
        optimizer.step(lambda x, y: nn.functional.cross_entropy(model(x), y), *data(step))
    for rank in range(2):
        got = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(got, model.state_dict(), rtol=1e-10, atol=1e-12)


class DDPRun:
    """A DDP-wrapped model and its optimizer, or without ranks the bare model."""

    def __init__(self, dtype=None, ranks=True):
        self.dtype = dtype
        torch.manual_seed(0)
        self.bare = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).to(
            torch.float32 if dtype else torch.double
        )
        self.model = nn.parallel.DistributedDataParallel(self.bare) if ranks else self.bare
        self.optimizer = bsam.BSAM(self.model.parameters(), num_data=24, lr=0.2, betas=(0.9, 0.5), max_grad_norm=None)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype == torch.float16)

    def loss(self, x, y):
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype is not None):
            outputs = self.model(x.to(next(self.bare.parameters()).dtype))
        return nn.functional.cross_entropy(outputs.double(), y)

    def train(self, steps, part=slice(None)):
        for step in steps:
            x, y = (t[part] for t in data(step))
            self.optimizer.probe(self.loss, x, y, scaler=self.scaler)
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
            self.scaler.step(self.optimizer)
            self.scaler.update()


def run_ddp_rank_that_clips_and_resumes(rank, dtype, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    part = slice(rank, None, 2)
    run = DDPRun(dtype)
    run.train(range(3), part)
    if rank == 0:
        states = {"model": run.bare.state_dict(), "optimizer": run.optimizer.state_dict()}
        torch.save(states, f"{folder}/checkpoint.pt")
    dist.barrier()
    later = DDPRun(dtype)
    saved = torch.load(f"{folder}/checkpoint.pt", weights_only=True)
    later.bare.load_state_dict(saved["model"])
    later.optimizer.load_state_dict(saved["optimizer"])
    for each in (run, later):
        each.train(range(3, STEPS), part)
    assert run.optimizer.skipped_steps == 0
    for p, q in zip(run.bare.parameters(), later.bare.parameters(), strict=True):
        assert torch.equal(p, q)
    later.optimizer.posterior(later.bare).save(f"{folder}/{rank}.safetensors")
    leave()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_ddp_wrapped_model_with_clipping_and_precision_is_resumed_and_has_a_posterior(dtype, tmp_path):
    start_ranks(run_ddp_rank_that_clips_and_resumes, (dtype, str(tmp_path)))
    run = DDPRun(dtype, ranks=False)
    run.train(range(STEPS))
    expected = run.optimizer.posterior(run.bare)
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype is None else {"rtol": 0.02, "atol": 0.005}
    for rank in range(2):
        found = bsam.load_posterior(tmp_path / f"{rank}.safetensors")
        torch.testing.assert_close(found.mean, expected.mean, **tolerance)
        torch.testing.assert_close(found.std, expected.std, **tolerance)
