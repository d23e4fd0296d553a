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
from tests.optimizers import METHODS

STEPS = 6

# The ranks are forked from a process of their own, which imports this module, and what torch imports in a first step,
# once; a fresh start of each would be most of the time.
mp.get_context("forkserver").set_forkserver_preload([__name__, "torch._dynamo"])


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
    mp.start_processes(function, arguments, nprocs=2, start_method="forkserver")


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
