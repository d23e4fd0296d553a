"""Sharded models: four processes run the scenarios of tests/sharded.py once; each test reads what one of them found."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # FSDP makes offloaded parameters by them

import bsam
from bsam import shards
from tests import sharded
from tests.sharded import METHODS, SCENARIOS, STEPS, WORLDS

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(torch.__version__ < shards._OLDEST, reason=f"needs torch {shards._OLDEST} or newer"),
]

# The ranks are forked from a process of their own, which imports this module, and what torch imports in a first step,
# once; a fresh start of each would be most of the time.
mp.get_context("forkserver").set_forkserver_preload(["tests.sharded", "torch._dynamo"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run all scenarios; return the folder of what they found and wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(sharded.run, (str(folder), list(SCENARIOS)), nprocs=4, start_method="forkserver")
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """`found(name)` returns what a scenario found: one dictionary per rank."""

    @functools.cache
    def read(name):
        results = []
        for rank in range(4):
            path = folder / f"{name}.{rank}.pt"
            assert path.exists(), f"rank {rank} did not get to {name}: an earlier scenario failed"
            results.append(torch.load(path, weights_only=True))
            assert "error" not in results[-1], results[-1]["error"]
        return results

    return read


@pytest.fixture(scope="module")
def expected():
    """`expected(kind)` returns the result of a model that is not sharded."""
    known = {}

    def train(kind):
        if kind not in known:
            model = sharded.transformer()
            optimizer = sharded.make(kind, model)
            sharded.train(model, optimizer)
            known[kind] = sharded.result(model, optimizer)
        return known[kind]

    return train


def assert_close(got, expected, tolerance=1e-10):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def assert_equal(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


# ---------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("kind", METHODS)
def test_on_1_2_and_4_ranks_a_sharded_model_trains_as_one_that_is_not_sharded(found, expected, kind):
    """Weights, state, gradients, samples of optimizer and posterior, outputs and diagnosis."""
    results = found("training")
    for world in WORLDS:
        for rank in range(world):
            assert_close(results[rank][f"{kind} {world}"], expected(kind))
    assert [bool(result["empty"]) for result in results] == [False, False, False, True]
    assert all(result["sharded state"] for result in results)


@pytest.mark.parametrize("kind", ["BSAM", "SAM-SGD"])
@pytest.mark.parametrize("mesh", ["replicas", "mixed"])
def test_norms_are_the_same_with_replicas_and_over_mixed_meshes(found, expected, kind, mesh):
    for result in found("meshes"):
        assert_close(result[f"{kind} {mesh}"], expected(kind))


def test_no_pass_uses_weights_that_were_gathered_earlier(found):
    model = sharded.transformer()
    outputs = sharded.looks(model, sharded.make("BSAM", model))
    assert len({round(float(output.sum()), 6) for output in outputs}) == 5  # the mean, three samples, the mean later
    for result in found("gathered_root"):
        assert_close(result["outputs"], outputs)


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32(found):
    model = sharded.transformer(torch.float32)
    optimizer = sharded.make("BSAM", model)
    sharded.train(model, optimizer)
    results = found("precision")
    for result in results:
        assert_equal(result["weights"], results[0]["weights"])
        assert {t.dtype for t in result["weights"].values()} == {torch.float32}
        assert {t.dtype for t in result["state"].values()} == {torch.float32, torch.int64}
        assert result["outputs"].dtype == torch.bfloat16
    moved = sharded.weights_of(sharded.transformer(torch.float32))
    for name, exact in sharded.weights_of(model).items():
        step = (exact - moved[name]).norm()
        assert (results[0]["weights"][name] - exact).norm() <= 0.1 * step, name


@pytest.mark.parametrize("kind", ["BSAM", "SAM-AdamW"])
def test_weights_and_state_may_be_offloaded_to_the_cpu(found, kind):
    for rank, result in enumerate(found("offload")):
        assert_equal(result[kind], found("training")[rank][f"{kind} 4"])


def test_a_step_in_halves_clipped_joined_and_weighted(found):
    model = sharded.transformer()
    optimizer = sharded.make("BSAM", model, splits=1, max_grad_norm=None)
    norm = sharded.in_halves(model, optimizer, [2.5, 5.5])
    assert norm > 0.05  # it was clipped
    for result in found("halves"):
        assert_close(result, {"norm": norm, **sharded.result(model, optimizer)})


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("kind", ["BSAM", "SAM-AdamW", "IVON"])
def test_a_checkpoint_of_four_ranks_loads_on_4_2_and_1(found, kind):
    model = sharded.transformer()
    optimizer = sharded.make(kind, model)
    sharded.train(model, optimizer, steps=range(STEPS + 2))
    later = {"weights": sharded.weights_of(model), "state": sharded.state_of(optimizer)}
    results = found("checkpoints")
    for world in WORLDS:
        for rank in range(world):
            assert_equal(results[rank][f"{kind} loaded {world}"], results[0][f"{kind} saved"])
            assert_close(results[rank][f"{kind} {world}"], later)


@pytest.mark.parametrize("kind", ["BSAM", "SAM-AdamW"])
def test_a_state_of_a_whole_model_is_cut_when_it_is_loaded(found, kind):
    model = sharded.transformer()
    optimizer = sharded.make(kind, model)
    sharded.train(model, optimizer, steps=range(STEPS + 1))
    later = {"weights": sharded.weights_of(model), "state": sharded.state_of(optimizer)}
    for result in found("whole_states"):
        assert_close(result[kind], later)


def test_a_posterior_becomes_one_file_and_no_rank_holds_the_model(found, folder):
    posterior = bsam.load_posterior(folder / "posterior.safetensors")  # as in any process
    model = sharded.transformer()
    posterior.check_fits(model)
    sample = posterior.sample(torch.Generator().manual_seed(4))
    with posterior.sampled(model, torch.Generator().manual_seed(4)):
        outputs = sharded.evaluated(model)
    posterior.write_mean(model)
    numbers = torch.stack([posterior.log_prob(sample), posterior.entropy(), posterior.kl()])
    largest = max(p.numel() for p in model.parameters())
    for result in found("one_file"):
        assert_equal(result["sample"], sample)
        assert_close(result["cold"], {name: std / 2 for name, std in posterior.std.items()})
        assert_close(result["numbers"], numbers)
        assert_close(result["outputs"], outputs)
        assert_close(result["after"], sharded.evaluated(model))
        # One tensor at a time: a mean and a std per parameter, and none is larger than the largest parameter.
        assert result["gathered"].max() == largest < posterior.num_parameters / 3
        assert len(result["gathered"]) == 2 * len(posterior.mean)
        assert "sharded over 4 ranks" in result["repr"]
        assert_close(result["signal"], posterior.signal_to_noise())
        assert "prune it there" in result["pruned"]
    trained = bsam.load_posterior(folder / "trained.safetensors", model=model)
    assert set(posterior.mean) - set(trained.mean) == {"places"}
    assert trained.base["places"].are_those_of(model.places)


def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(found):
    first, *others = [result["no folder"] for result in found("one_file")]
    assert "FileNotFoundError" in first
    assert "there is no folder" in first
    assert all("the first rank of the mesh has raised an error" in other for other in others)


def test_a_sharded_posterior_is_not_written_into_a_whole_model(found):
    for result in found("one_file"):
        assert "sharded otherwise than its parameter" in result["into a whole model"]


# ---------------------------------------------------------------- what goes wrong


def test_a_step_that_raises_changes_nothing_and_the_next_one_works(found):
    model = sharded.transformer()
    optimizer = sharded.make("BSAM", model)
    sharded.train(model, optimizer)
    for rank, result in enumerate(found("failures")):
        assert "in the last pass" in result["closure"]
        assert "in the second block" in result["layer"]
        what = "loss of pass 1 is inf" if rank == 2 else "not finite"
        assert "FloatingPointError" in result["not finite"]
        assert what in result["not finite"]
        assert result["skipped"] == 1
        assert len(result["after"]) == 4
        for after in result["after"]:
            assert_equal(after, result["before"])
        assert_close(result["end"], sharded.weights_of(model))


def test_running_statistics_are_equal_on_all_ranks(found):
    """Those of rank 0 by default, the mean over ranks by the policy "all", and the first ones by "none"."""
    results = found("buffers")
    own = []
    for rank in range(4):
        torch.manual_seed(0)
        model = sharded.Normalised().double()
        optimizer = sharded.make("IVON", model, splits=1)
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        optimizer.step(lambda x, m=model: m(x).square().mean(), x)
        own.append(model.norm.running_mean)
    for result in results:
        assert_close(result["first_split"]["norm.running_mean"], own[0])
        assert_close(result["all"], results[0]["all"])
        assert not torch.equal(result["all"]["norm.running_mean"], own[0])
        assert not result["none"]["norm.running_mean"].any()


REFUSED = {
    "group": "leave process_group= out",
    "vectorise": "Leave vectorise= out",
    "module": "make it with module=model",
    "vogn": "use bsam.BSAM or bsam.IVON",
    "swag": "use the posterior of bsam.BSAM",
    "laplace": "use the posterior of bsam.BSAM",
    "some": "tokens.weight of the sharded model requires a gradient.*freeze it",
    "old torch": "sharded models need torch 99 or newer, and this is torch",
    "train step": "TrainStep is not possible.*module= is sharded",
    "predict": "load it with bsam.load_posterior",
    "scaler": "use bfloat16 without a scaler",
    "sizes": "splits=2 all ranks must have the same number of examples",
    "other seed": "the ranks have optimizers with different options, this one .*seed=[12]: give the optimizers of all",
    "other splits": "the ranks have optimizers with different options, this one .*splits=[12],",
    "other num_data": "the ranks have optimizers with different options, this one .*num_data=[12],",
    "sync": "set_requires_gradient_sync.*leave it out",
    "not sharded": "is not sharded, but other parameters are",
    "ddp": "DistributedDataParallel does not go with a sharded model",
    "ranks": r"on the ranks \[0, 1\], and others are on \[0, 1, 2, 3\]",
    "parallel": "tensor parallelism is not supported",
    "parallel and sharded": "tensor parallelism is not supported",
}


@pytest.mark.parametrize(("what", "where"), [("empty", 0), ("weight", 1)])
def test_a_batch_that_one_rank_refuses_is_an_error_on_all(found, what, where):
    """Otherwise the other ranks would wait for this one."""
    for rank, result in enumerate(found("refusals")):
        own = {"empty": "empty|no example", "weight": "weight=nan"}[what]
        assert re.search(own if rank == where else "another rank has refused its batch.*at least one", result[what])
        assert result["unchanged"]


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_go_with_shards_is_refused_with_a_sentence(found, what):
    for rank, result in enumerate(found("refusals")):
        if what in result or rank < 2:
            assert re.search(REFUSED[what], result[what]), result[what]
        assert result["unchanged"]


@pytest.mark.parametrize("kind", ["BSAM", "SAM-AdamW"])
def test_an_optimizer_made_before_sharding_is_refused(found, kind):
    for result in found("whole_states"):
        assert "call fully_shard(model) first" in result[f"{kind} made before"]


def test_what_is_offloaded_to_the_cpu_stays_there(tmp_path):
    """A tensor like an offloaded parameter, which is on the CPU although the mesh is one of GPUs."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        if torch.cuda.is_available():
            torch.cuda.init()  # the mesh warns if CUDA is not in use yet
        mesh, weights = dist.init_device_mesh("cuda", (1,)), torch.randn(4, 3)
        meta = TensorMeta(weights.shape, weights.stride(), weights.dtype)
        parameter = torch.nn.Parameter(DTensor(weights, DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False))
        for part in (torch.randn(4, 3), torch.randn(4, 3, dtype=torch.float64)):
            found = shards.like(parameter, part)
            assert (found.placements, found.device_mesh, found.dtype) == (parameter.placements, mesh, part.dtype)
            torch.testing.assert_close(found.to_local(), part, rtol=0, atol=0)  # on the CPU, too
        parameter.grad = shards.like(parameter, torch.ones(4, 3))
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("offload", [False, True])
def test_one_rank_on_a_gpu_trains_as_a_model_that_is_not_sharded(tmp_path, kind, offload):
    """With the weights on the CPU their noise is the CPU's: this must run, and agrees for methods without noise.

    These then compute in float64: AdamW divides by the size of a gradient, and one of them (of the bias of the keys) is
    rounding alone.
    """
    dtype = torch.float64 if offload else torch.float32
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        plain = sharded.transformer(dtype).cuda()
        mesh = dist.init_device_mesh("cuda", (1,))  # it warns if CUDA is not in use yet
        options = {"offload_policy": sharded.CPUOffloadPolicy()} if offload else {}
        model = sharded.shard(sharded.transformer(dtype).cuda(), mesh, **options)
        for each in (plain, model):
            optimizer = sharded.make(kind, each, splits=1)
            for step in range(STEPS):
                x, y = (t.cuda() for t in sharded.data(step))
                optimizer.step(sharded.loss_of(each), x, y)
        got = {name: t.cuda() for name, t in sharded.weights_of(model).items()}
        if offload and hasattr(optimizer, "sampled"):
            assert all(t.isfinite().all() for t in got.values())
        else:
            assert_close(got, sharded.weights_of(plain), 1e-4)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("part", "expected"),
    [(None, 5), (shards.Part(1, 2, 2), 5), (shards.Part(0, 4, 3), 1), (shards.Part(0, 0, 4), None)],
)
def test_a_row_is_found_on_the_rank_that_has_it(monkeypatch, part, expected):
    monkeypatch.setattr(shards, "part_of", lambda tensor: part)
    assert shards.row_here(torch.zeros(7, 4), 5) == expected
    assert shards.row_here(torch.zeros(7, 4), None) is None
