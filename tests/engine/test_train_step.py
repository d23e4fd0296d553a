"""`TrainStep` takes the steps of the plain loop, one run or several, and leaves model and optimizer their own."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from bsam import TrainStep
from bsam.compiler import layers
from bsam.experiments.models import make_model
from bsam.kernels.convolution import Convolution
from tests.engine.runs import (
    GAUSSIAN,
    PROBING,
    SPLITS,
    Run,
    batches_of,
    every_optimizer,
    gpu_batch,
    make_optimizer,
    needs_compiler,
    network_of,
    on_cuda,
    on_gpu,
    refuses,
    spoiled,
    stack,
    stacked,
)
from tests.networks import assert_close, make_batch, make_network, mean_loss
from tests.optim.contract import assert_same

# ---------------------------------------------------------------------- the numbers of the loop


@every_optimizer
def test_ten_steps_are_those_of_the_loop(name):
    network = network_of(name)
    ours, plain = Run(name, network), Run(name, network)
    batches = batches_of(network, 10)
    step = ours.engine(batches[0])
    for batch in batches:
        assert_close(step(*batch), plain.loop(*batch))
        assert_close(ours.state(), plain.state())


@pytest.mark.parametrize("name", ["BSAM", "SAM-SGD"])
@pytest.mark.parametrize("network", ["tied", "partly frozen"])
def test_unusual_networks(name, network):
    ours, plain = Run(name, network), Run(name, network)
    batches = batches_of(network, 4)
    step = ours.engine(batches[0])
    for batch in batches:
        assert_close(step(*batch), plain.loop(*batch))
    assert_close(ours.state(), plain.state())


def two_groups(model, known):
    """Groups with other options, of those that the optimizer knows."""
    options = [
        {"lr": 0.02, "rho": 0.3, "weight_decay": 0.1, "prior_precision": 3.0},
        {"lr": 0.05, "rho": 0.1, "betas": (0.5, 0.9), "damping": 0.4},
    ]
    return [
        {"params": layer.parameters(), **{key: value for key, value in each.items() if key in known}}
        for layer, each in zip((model[0], model[2]), options, strict=True)
    ]


@pytest.mark.parametrize("name", PROBING)
@pytest.mark.parametrize("special", [{}, {"perturb": False}, {"sample": False}])
def test_groups_have_their_own_options(name, special):
    known = Run(name).optimizer.defaults
    if not special.keys() <= known.keys():
        pytest.skip("has no such option")

    def groups(model):
        first, second = two_groups(model, known)
        return [{**first, **special}, second]

    ours, plain = (Run(name, params=groups) for _ in range(2))
    batches = batches_of("mlp", 5)
    step = ours.engine(batches[0])
    for batch in batches:
        assert_close(step(*batch), plain.loop(*batch))
    assert_close(ours.state(), plain.state())


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.05},
        {"perturb_from": "mean"},
        {"curvature": "abs_mean"},
        {"sample_noise": False},
        {"batch_norm": "none"},
    ],
)
def test_options_of_the_whole_optimizer(options):
    ours, plain = (Run("BSAM", "normalised", **options) for _ in range(2))
    batches = batches_of("normalised", 4)
    step = ours.engine(batches[0])
    for batch in batches:
        assert_close(step(*batch), plain.loop(*batch))
    assert_close(ours.state(), plain.state())


@every_optimizer
def test_a_ragged_batch_goes_through_the_loop(name):
    network = network_of(name)
    ours, plain = Run(name, network), Run(name, network)
    batches = [make_batch(network, size, i) for i, size in enumerate((16, 16, 10, 16, 9, 16))]
    step = ours.engine(batches[0])
    addresses = ours.addresses()
    for batch in batches:
        assert_close(step(*batch), plain.loop(*batch))
    assert_close(ours.state(), plain.state())
    assert ours.addresses() == addresses


def test_a_model_in_another_mode_goes_through_the_loop():
    ours, plain = Run("BSAM", "normalised"), Run("BSAM", "normalised")
    batches = batches_of("normalised", 6)
    step = ours.engine(batches[0])
    for i, batch in enumerate(batches):
        for run in (ours, plain):
            run.model[1].train(i not in (1, 2))
            run.model[5].bias.requires_grad_(i != 3)
        assert_close(step(*batch), plain.loop(*batch))
    assert_close(ours.state(), plain.state())


def test_batches_may_be_nested():
    ours, plain = Run("BSAM"), Run("BSAM")
    x, y = make_batch("mlp", 16)
    for run in (ours, plain):
        run.loss_fn = lambda batch, scale, run=run: (
            scale * F.cross_entropy(run.model(batch["inputs"]["x"]), batch["labels"][0], reduction=batch["reduction"])
        )
    batch = ({"inputs": {"x": x}, "labels": [y], "reduction": "mean"}, torch.tensor(0.5))
    step = ours.engine(batch)
    for _ in range(3):
        assert_close(step(*batch), plain.loop(*batch))
    for other in (({**batch[0], "reduction": "sum"}, batch[1]), (batch[0], torch.tensor(2.0))):  # not compiled in
        assert_close(step(*other), plain.loop(*other))
    assert_close(ours.state(), plain.state())


@pytest.mark.parametrize("name", ["BSAM", "SAM-SGD", "SGD"])
def test_bfloat16_is_autocast(name):
    ours, plain = Run(name, "convolutional"), Run(name, "convolutional")
    for run in (ours, plain):
        run.model.float()
    batches = [(x.float(), y) for x, y in batches_of("convolutional", 3)]
    step = ours.engine(batches[0], precision="bfloat16")
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            expected = plain.loop(*batch)
        assert_close(step(*batch), expected, tolerance=2e-2)
    assert_close(ours.state(), plain.state(), tolerance=2e-2)
    exact = Run(name, "convolutional")
    exact.model.float()
    assert not torch.equal(exact.loop(*batches[0]), step(*batches[0]))


@pytest.mark.parametrize(("name", "options"), [("BSAM", {"sample_noise": False}), ("VOGN", {})])
def test_16_bit_weights_keep_a_state_of_32(name, options):
    runs = [Run(name, **options) for _ in range(2)]
    for run in runs:
        run.model.bfloat16()
    ours, plain = runs
    batches = [(x.bfloat16(), y) for x, y in batches_of("mlp", 3)]
    step = ours.engine(batches[0])
    for batch in batches:
        assert_close(step(*batch), plain.loop(*batch).float(), tolerance=2e-2)
    assert_close(ours.state(), plain.state(), tolerance=2e-2)
    state = ours.optimizer.state[ours.model[0].weight]
    assert {t.dtype for t in state.values()} == {torch.float32, torch.int64}
    if name == "VOGN":  # its squares are not of 16 bits either
        assert (state["curvature"] != state["curvature"].bfloat16()).any()


@needs_compiler
@pytest.mark.parametrize("splits", [SPLITS, 8])  # means over 8 would not be a part of other kernels by themselves
def test_a_compiled_step_is_that_of_the_loop(splits):
    ours, plain = (Run("BSAM", splits=splits) for _ in range(2))
    batches = batches_of("mlp", 5)
    step = ours.engine(batches[0], compile=True)
    for batch in batches:
        assert_close(step(*batch), plain.loop(*batch))
    ours.optimizer.param_groups[0]["lr"] = plain.optimizer.param_groups[0]["lr"] = 0.01
    for batch in batches:
        assert_close(step(*batch), plain.loop(*batch))
    assert_close(ours.state(), plain.state())


@needs_compiler
@pytest.mark.parametrize("name", ["SAM-SGD", "VOGN"])
def test_compiled_runs_together_are_each_alone(name):
    """The network is compiled once for all runs; SAM calls it twice a step, for each run under vmap."""
    network = network_of(name)
    together, alone = ([Run(name, network, seed=seed) for seed in (0, 1)] for _ in range(2))
    batches = batches_of(network, 2)
    step = stacked(together, batches, compile=True)
    for _ in range(3):
        losses = step(*stack(batches))
        for run, batch, loss in zip(alone, batches, losses, strict=True):
            assert_close(loss, run.loop(*batch))
    for one, other in zip(together, alone, strict=True):
        assert_close(one.state(), other.state())


# ---------------------------------------------------------------------- weights and state stay the model's


@every_optimizer
def test_saved_in_the_middle_it_goes_on_as_if_nothing_had_happened(name):
    network = network_of(name)
    batches = batches_of(network, 10)
    whole, first, second = (Run(name, network) for _ in range(3))
    step = whole.engine(batches[0])
    for batch in batches:
        step(*batch)
    step = first.engine(batches[0])
    for batch in batches[:5]:
        step(*batch)
    saved = first.state()
    second.model.load_state_dict(saved["model"])
    second.optimizer.load_state_dict(saved["optimizer"])
    step = second.engine(batches[0])
    for batch in batches[5:]:
        step(*batch)
    assert_same(second.state(), whole.state())


@every_optimizer
def test_a_state_may_be_loaded_between_steps(name):
    network = network_of(name)
    batches = batches_of(network, 8)
    run, plain = Run(name, network), Run(name, network)
    step = run.engine(batches[0])
    addresses = run.addresses()
    for batch in batches[:4]:
        step(*batch)
        plain.loop(*batch)
    saved = plain.state()
    for batch in batches[4:]:
        step(*batch)
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    for each in (run, plain):
        each.optimizer.param_groups[0]["lr"] *= 0.5  # in a group that loading has replaced
    for batch in batches[4:]:
        assert_close(step(*batch), plain.loop(*batch))
    assert_close(run.state(), plain.state())
    assert run.addresses() == addresses


def test_weights_and_buffers_that_were_replaced_are_taken_over():
    run, plain = Run("BSAM", "normalised"), Run("BSAM", "normalised")
    batch = make_batch("normalised", 16)
    step = run.engine(batch)
    for each in (run, plain):
        with torch.no_grad():
            each.model[0].weight.data = each.model[0].weight * 2
        each.model[1].running_mean = torch.full((4,), 0.3, dtype=torch.float64)
    for _ in range(2):
        assert_close(step(*batch), plain.loop(*batch))
    assert_close(run.state(), plain.state())


@pytest.mark.parametrize("name", GAUSSIAN)
def test_the_posterior_is_that_of_the_loop(name):
    ours, plain = (Run(name, "mlp", betas=(0.9, 0.5)) for _ in range(2))
    batches = batches_of("mlp", 6)
    step = ours.engine(batches[0])
    for batch in batches:
        step(*batch)
        plain.loop(*batch)
    a, b = ours.optimizer.posterior(), plain.optimizer.posterior()
    samples = [posterior.sample(torch.Generator().manual_seed(1)) for posterior in (a, b)]
    assert_close(dict(samples[0]), dict(samples[1]))


def test_no_step_is_taken_while_the_model_holds_a_sample():
    run = Run("BSAM")
    batch = make_batch("mlp", 16)
    step = run.engine(batch)
    step(*batch)
    before = run.state()
    with run.optimizer.sampled(), pytest.raises(RuntimeError, match=r"cannot take a step inside sampled\(\)"):
        step(*batch)
    assert_same(run.state(), before)


# ---------------------------------------------------------------------- several runs


@every_optimizer
def test_runs_together_are_each_alone(name):
    network = network_of(name)
    together, alone = ([Run(name, network, seed=seed) for seed in (3, 5, 8)] for _ in range(2))
    start = [make_batch(network, 16, seed) for seed in (0, 10, 20)]
    step = stacked(together, start)
    engines = [run.engine(batch) for run, batch in zip(alone, start, strict=True)]
    for k, size in enumerate((16, 16, 10, 16)):
        batches = [make_batch(network, size, seed + k) for seed in (0, 10, 20)]
        losses = step(*stack(batches))
        assert_close(list(losses), [each(*batch) for each, batch in zip(engines, batches, strict=True)])
    for one, other in zip(together, alone, strict=True):
        assert_close(one.state(), other.state())
    weights = [run.model.state_dict()["0.weight"] for run in together]
    assert not torch.equal(weights[0], weights[1])


def test_each_run_is_left_out_by_itself():
    runs, plain = ([Run("BSAM", "normalised", seed=seed, nonfinite="skip") for seed in (0, 1)] for _ in range(2))
    batch = make_batch("normalised", 16)
    step = stacked(runs, [batch] * 2)
    bad = (batch[0] * torch.nan, batch[1])
    for batches in ([batch, bad], [batch, batch]):
        step(*stack(batches))
        for run, each in zip(plain, batches, strict=True):
            run.loop(*each)
    assert [run.optimizer.skipped_steps for run in runs] == [0, 1]
    assert_close([run.state() for run in runs], [run.state() for run in plain])


def test_a_ragged_step_that_is_not_finite_is_taken_by_the_other_runs():
    runs, plain = ([Run("BSAM", seed=seed) for seed in (0, 1)] for _ in range(2))
    step = stacked(runs, [make_batch("mlp", 16)] * 2)
    x, y = make_batch("mlp", 10)
    with pytest.raises(FloatingPointError, match="the loss of pass 1 is nan"):
        step(*stack([(x * torch.nan, y), (x, y)]))
    plain[1].loop(x, y)
    assert_same(runs[0].model.state_dict(), plain[0].model.state_dict())
    assert_close(runs[1].state(), plain[1].state())


# ---------------------------------------------------------------------- numbers that are not finite


@pytest.mark.parametrize("name", PROBING)
def test_a_step_that_is_not_finite_is_left_out(name):
    network = network_of(name)
    run, plain = (Run(name, network, nonfinite="skip") for _ in range(2))
    good, bad = make_batch(network, 16), spoiled(make_batch(network, 16))
    step = run.engine(good)
    for batch in (bad, good, bad, bad, good):
        before = run.state()
        loss = step(*batch)
        assert_close(loss.nan_to_num(), plain.loop(*batch).nan_to_num())
        if batch is bad:
            assert not loss.isfinite()
            assert_same(run.state(), before)
    assert run.optimizer.skipped_steps == plain.optimizer.skipped_steps == 3
    assert_close(run.state(), plain.state())


@every_optimizer
@pytest.mark.parametrize("size", [16, 10])
def test_a_step_that_is_not_finite_raises(name, size):
    network = network_of(name)
    run = Run(name, network)
    good = make_batch(network, 16)
    step = run.engine(good)
    step(*good)
    before = run.state()
    x, y = make_batch(network, size)
    with pytest.raises(FloatingPointError, match=r"not finite|is nan"):
        step(x * torch.nan, y)
    assert_same(run.state(), before)
    step(*good)  # and it goes on


# ---------------------------------------------------------------------- what cannot be done is refused at once


def test_the_model_must_be_known():
    run = Run("SGD")
    refuses([run], lambda: run.engine(make_batch("mlp", 16), module=None), ValueError, "TrainStep needs the model: mak")
    other = make_network("mlp")
    refuses([run], lambda: run.engine(make_batch("mlp", 16), module=other), RuntimeError, "do not belong to module=")


def test_runs_need_one_of_each():
    runs = [Run("BSAM", seed=seed) for seed in (0, 1)]
    batch = stack([make_batch("mlp", 16)] * 2)
    optimizers = [run.optimizer for run in runs]
    refuses(
        runs,
        lambda: TrainStep(optimizers, [runs[0].loss_fn], batch, compile=False),
        ValueError,
        "2 optimizers, 1 loss functions and 2 modules: give one of each per run",
    )


@pytest.mark.parametrize(("size", "message"), [(18, "have different sizes"), (3, "cannot be cut into 4 parts")])
def test_the_example_must_be_cut_evenly(size, message):
    run = Run("BSAM")
    refuses([run], lambda: run.engine(make_batch("mlp", size)), ValueError, f"TrainStep is not possible.*{message}")


def test_what_the_optimizer_refuses_is_refused():
    run = Run("VOGN", "normalised")
    refuses([run], lambda: run.engine(make_batch("normalised", 16)), ValueError, "layer 1 is a BatchNorm2d that uses")
    run = Run("BSAM", "normalised", batch_norm="all")
    refuses([run], lambda: run.engine(make_batch("normalised", 16)), ValueError, "batch_norm='all' moves running stat")


def test_loss_functions_must_look_weights_up_in_the_module():
    run = Run("BSAM")
    batch = make_batch("mlp", 16)
    run.loss_fn = lambda x, y: x.mean()
    refuses([run], lambda: run.engine(batch), ValueError, "no gradient reaches any parameter of the optimizer: does")
    weight = run.model[0].weight
    run.loss_fn = lambda x, y: mean_loss(run.model)(x, y) + weight.square().sum()
    refuses([run], lambda: run.engine(batch), RuntimeError, "uses parameters of module= that it did not look up")


def test_other_arguments_are_checked():
    run = Run("BSAM")
    batch = make_batch("mlp", 16)
    refuses([run], lambda: run.engine(batch, precision="float16"), ValueError, "precision='float16' must be None")
    refuses([run], lambda: run.engine(batch, cuda_graph=True), ValueError, "cuda_graph=True needs parameters on a CUDA")


def test_process_groups_are_refused():
    run = Run("BSAM")
    run.optimizer.process_group = object()
    make = lambda: TrainStep(run.optimizer, run.loss_fn, make_batch("mlp", 16), compile=False)  # noqa: E731
    with pytest.raises(ValueError, match=r"process_group= goes with optimizer.step: TrainStep trains on one device"):
        make()


@pytest.mark.parametrize("name", PROBING)
def test_pending_probes_are_refused(name):
    run = Run(name)
    batch = make_batch("mlp", 16)
    step = run.engine(batch)
    step(*batch)
    run.optimizer.zero_grad()
    run.optimizer.probe(run.loss_fn, *batch)
    weights = [p.detach().clone() for p in run.model.parameters()]
    for act in (lambda: step(*batch), lambda: run.engine(batch)):
        with pytest.raises(RuntimeError, match=r"cannot .* while probes are pending: .*step\(\), or .*discard\(\)"):
            act()
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), weights, strict=True))
    run.optimizer.step()
    step(*batch)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = make_network("mlp"), nn.Linear(12, 4).double()

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("name", ["BSAM", "SAM-SGD", "SGD"])
def test_an_unused_parameter_is_named_and_left_alone(name):
    model = TwoHeads()
    optimizer = make_optimizer(name, model.parameters(), model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # left over from something else
    before = copy.deepcopy(model.unused.state_dict())
    batch = make_batch("mlp", 16)
    warned = pytest.warns(UserWarning, match="no gradient reached unused.weight, unused.bias: not part of the loss")
    with warnings.catch_warnings() if name == "SGD" else warned:
        step = TrainStep(optimizer, mean_loss(model), batch, module=model, compile=False)
    for size in (16, 10):
        step(*make_batch("mlp", size))
    assert_same(model.unused.state_dict(), before)


@pytest.mark.parametrize("name", ["SAM-SGD", "SGD"])
def test_a_frozen_parameter_is_not_moved_by_a_gradient_that_it_has(name):
    model = make_network("mlp")
    optimizer = make_optimizer(name, model.parameters(), model)
    frozen = next(model.parameters()).requires_grad_(False)
    batch = make_batch("mlp", 16)
    step = TrainStep(optimizer, mean_loss(model), batch, module=model, compile=False)
    before = frozen.clone()
    for size in (16, 10):  # compiled, and in the loop
        frozen.grad = torch.full_like(frozen, torch.nan)
        step(*make_batch("mlp", size))
        assert torch.equal(frozen, before)


# ---------------------------------------------------------------------- layers exchanged, as on a GPU


@pytest.fixture
def exchanged(monkeypatch):
    """Layers are exchanged on the CPU too; lists the convolutions that are."""
    seen = []
    call = Convolution.__call__
    monkeypatch.setattr(layers, "better_on", lambda device: True)
    monkeypatch.setattr(Convolution, "__call__", lambda self: seen.append(self.w.shape) or call(self))
    return seen


@pytest.mark.parametrize("name", ["BSAM", "SAM-SGD", "VOGN", "SGD"])
def test_a_step_with_exchanged_layers_is_that_of_the_loop(name, exchanged):
    run = on_gpu(name, device="cpu")
    plain = on_gpu(name, device="cpu", **{"vectorise": False} if name in PROBING else {})
    step = run.engine(gpu_batch(device="cpu"))
    for k in range(2):
        batch = gpu_batch(k, device="cpu")
        exchanged.clear()
        loss = step(*batch)
        assert len(exchanged) >= 2
        exchanged.clear()
        assert_close(loss, plain.loop(*batch), tolerance=1e-5)
        assert not exchanged
    for ours, theirs in zip(run.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_runs_together_with_exchanged_layers_are_each_alone(exchanged):
    together, alone = ([on_gpu("BSAM", seed, device="cpu") for seed in range(2)] for _ in range(2))
    batches = [gpu_batch(k, device="cpu") for k in range(2)]
    losses = stacked(together, batches, compile=False)(*stack(batches))
    for run, plain, loss, batch in zip(together, alone, losses, batches, strict=True):
        assert_close(loss, plain.engine(batch)(*batch), tolerance=1e-5)
        for ours, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@on_cuda
@pytest.mark.usefixtures("_ieee")
@pytest.mark.parametrize("name", ["BSAM", "SAM-SGD", "SAM-Adam", "VOGN", "SGD", "Adam"])
def test_a_captured_step_is_that_of_the_loop(name):
    run = on_gpu(name)
    step = run.engine(gpu_batch(), compile=True)
    addresses = run.addresses()
    for k, size in enumerate((16, 16, 10, 16)):
        plain = on_gpu(name, vectorise=False) if name in PROBING else on_gpu(name)
        plain.load(run.state())  # each step from the same state: rounding would grow from step to step
        batch = gpu_batch(k, size)
        assert_close(step(*batch), plain.loop(*batch), tolerance=1e-5)
        # Adam's first steps are the sign of the gradient, where it is rounding too: as long as the rate.
        for key, value in run.model.state_dict().items():
            difference = (value - plain.model.state_dict()[key]).abs()
            assert difference.double().mean() < 1e-5, key
            assert (difference > 1e-4).double().mean() < (1e-2 if "Adam" in name else 1e-9), key
    assert run.addresses() == addresses


@pytest.mark.gpu
@on_cuda
def test_a_captured_step_is_that_of_the_loop_in_float64():
    ours, plain = on_gpu("BSAM", dtype=torch.float64), on_gpu("BSAM", dtype=torch.float64, vectorise=False)
    batches = [gpu_batch(k, dtype=torch.float64) for k in range(3)]
    step = ours.engine(batches[0], compile=True)
    for batch in batches:
        assert_close(step(*batch), plain.loop(*batch))
    assert_close(ours.model.state_dict(), plain.model.state_dict())


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("name", ["BSAM", "SAM-SGD", "Adam"])
def test_a_captured_run_goes_on_where_it_was_saved(name):
    batches = [gpu_batch(k) for k in range(6)]
    whole, first, second = (on_gpu(name) for _ in range(3))
    step = whole.engine(batches[0], compile=True)
    for batch in batches:
        step(*batch)
    step = first.engine(batches[0], compile=True)
    for batch in batches[:3]:
        step(*batch)
    saved = first.state()
    second.model.load_state_dict(saved["model"])
    second.optimizer.load_state_dict(saved["optimizer"])
    step = second.engine(batches[0], compile=True)
    for batch in batches[3:]:
        step(*batch)
    assert_close(second.model.state_dict(), whole.model.state_dict(), tolerance=1e-6)


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("name", ["BSAM", "SAM-SGD", "SAM-Adam"])
def test_a_captured_step_that_is_not_finite_is_left_out(name):
    run = on_gpu(name, nonfinite="skip")
    good, bad = gpu_batch(), spoiled(gpu_batch())
    step = run.engine(good, compile=True)
    before = run.state()["model"]
    step(*bad)  # also the first one, when SGD has no momenta yet
    assert_same(run.state()["model"], before)
    step(*good)
    moved = run.state()["model"]
    assert all(v.isfinite().all() for v in moved.values())
    step(*bad)
    assert_same(run.state()["model"], moved)
    step(*gpu_batch(1, 10))  # a ragged batch after a refused one is taken
    assert not torch.equal(run.model.layers[0].weight, moved["layers.0.weight"])
    assert run.optimizer.skipped_steps == 2


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize(("network", "least"), [("resnet20_frn", 0.99), ("resnet18", 0.98)])
def test_a_captured_step_of_the_tables_is_that_of_the_loop(network, least):
    """Networks in bfloat16, as they are trained: all of our kernels in one step, against torch's in the loop."""
    runs = []
    for options in ({}, {"vectorise": False}):
        model = make_model(network, num_classes=10, image_shape=(3, 32, 32), seed=0).cuda()
        tables = {"lr": 0.1, "rho": 0.01, "prior_precision": 25.0, "sqrt_num_data": False, "max_grad_norm": None}
        options = {**tables, "betas": (0.9, 0.5), "splits": 4, "module": model, **options}
        runs.append((model, bsam.BSAM(model.parameters(), num_data=100, **options)))
    (ours, optimizer), (plain, loop) = runs
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 3, 32, 32, generator=generator).cuda()
    y = torch.randint(10, (32,), generator=generator).cuda()

    def loss_of(model):
        return lambda x, y: F.cross_entropy(model(x).float(), y)

    def in_bfloat16(x, y):
        with torch.autocast("cuda", torch.bfloat16):
            return loss_of(plain)(x, y)

    step = TrainStep(optimizer, loss_of(ours), (x, y), precision="bfloat16")
    assert_close(step(x, y), loop.step(in_bfloat16, x, y), tolerance=1e-2)
    for name in ("momentum", "unit_precision"):
        one, other = (
            torch.cat([o.state[p][name].flatten() for p in m.parameters()])
            for m, o in ((ours, optimizer), (plain, loop))
        )
        one, other = one - one.mean(), other - other.mean()
        assert F.cosine_similarity(one, other, dim=0) > least
        assert 0.97 < one.norm() / other.norm() < 1.03


@pytest.mark.gpu
@on_cuda
@pytest.mark.usefixtures("_ieee")
@pytest.mark.parametrize("name", ["BSAM", "VOGN"])
def test_captured_runs_together_are_each_alone(name):
    together, alone = ([on_gpu(name, seed=seed) for seed in (0, 1)] for _ in range(2))
    batches = [gpu_batch(0), gpu_batch(1)]
    step = stacked(together, batches, compile=True)
    for _ in range(3):
        for one, other in zip(together, alone, strict=True):
            # Each step from one state: after three, an input of a ReLU that is 0 up to rounding is on its other side.
            other.load(one.state())
        losses = step(*stack(batches))
        for one, other, batch, loss in zip(together, alone, batches, losses, strict=True):
            assert_close(loss, other.loop(*batch), tolerance=1e-4)
            assert_close(one.state(), other.state(), tolerance=1e-4)
