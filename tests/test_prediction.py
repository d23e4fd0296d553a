import gc
import io
import math
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bsam
from bsam import metrics
from bsam.batch_norm import recalibrate_batch_norm
from bsam.executor import Executor
from bsam.files import write_file
from bsam.posterior import DiagonalGaussian, PointMass
from bsam.prediction import GaussianPredictions, Predictions, passes, predict
from bsam.prediction.averages import average_for
from bsam.prediction.passes import _PROGRAMS, Passes
from bsam.prediction.predict import at_mean, collect

D, K = 4, 3


@pytest.fixture(autouse=True)
def try_vmap(monkeypatch):
    """Choose as on an accelerator, where vmap is tried first."""
    monkeypatch.setattr(Executor, "launch_bound", lambda device: True)


def seeded(make, dtype=torch.float64, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().to(dtype)
        model.train()
        return model


def mlp(outputs=K):
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, outputs))


class ConvNet(nn.Module):
    """Convolutions and BatchNorm with statistics that are not the initial ones."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.Flatten())
        self.head = nn.Linear(4 * 9, K)
        self.body[1].running_mean.normal_()
        self.body[1].running_var.uniform_(0.5, 2)

    def forward(self, x):
        return self.head(self.body(x))


class Branching(nn.Module):
    """Control flow that depends on the weights: vmap refuses it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, K)

    def forward(self, x):
        y = self.layer(x)
        return y if y.sum() > 0 else 2 * y


class NoBatchingRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g


class CustomFunction(nn.Linear):
    def forward(self, x):
        return NoBatchingRule.apply(super().forward(x))


class Hoarder(nn.Module):
    """Keeps its weight in a list, where torch.func.functional_call does not find it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, K, bias=False)
        self.weights = [self.layer.weight]

    def forward(self, x):
        return x @ self.weights[0].T


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, K)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(self.b(self.a(x).tanh()))


def images(n):
    return torch.randn(n, 1, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def vectors(n):
    return torch.randn(n, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def classes(n, k=K):
    return torch.randint(k, (n,), generator=torch.Generator().manual_seed(2))


def gaussian(model, std=0.3):
    return DiagonalGaussian.from_model(model, {p: torch.full_like(p, std) for p in model.parameters()})


def literal_outputs(model, posterior, x, num_samples=5, seed=0):
    """What the definition says: draw, write, run, one sample after another."""
    generator = torch.Generator().manual_seed(seed)
    model = model.eval()
    outputs = []
    for _ in range(num_samples):
        with posterior.sampled(model, generator), torch.no_grad():
            outputs.append(model(x))
    model.train()
    return torch.stack(outputs)


def state_of(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: t.detach().clone() for name, t in tensors.items()}, [m.training for m in model.modules()]


def assert_unchanged(before, model):
    after = state_of(model)
    assert before[1] == after[1]
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])


def assert_close(a, b, tolerance=1e-12):
    for name in ("log_probs", "mutual_information", "entropy"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- the definition


def test_average_against_a_literal_transcription():
    model, x = seeded(mlp), vectors(20)
    q = gaussian(model)
    p = literal_outputs(model, q, x).softmax(-1)
    mean = p.mean(0)
    entropy = -(mean * mean.log()).sum(-1)
    information = entropy - (-(p * p.log()).sum(-1)).mean(0)

    result = predict(model, q, (x, classes(20)), num_samples=5)
    torch.testing.assert_close(result.log_probs, mean.log(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.probs, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.entropy, entropy, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.mutual_information, information, rtol=1e-10, atol=1e-12)
    assert torch.equal(result.classes, mean.argmax(-1))
    assert torch.equal(result.labels, classes(20))
    assert (len(result), result.num_samples, result.seed) == (20, 5, 0)
    assert result.computed_by == "vmap"


def test_seeds():
    model, x = seeded(mlp), vectors(6)
    q = gaussian(model)
    a, b = (predict(model, q, x, seed=seed).log_probs for seed in (0, 1))
    assert not torch.equal(a, b)
    assert torch.equal(a, predict(model, q, x, seed=0).log_probs)


def test_average_in_log_space_survives_extreme_logits():
    layer = seeded(lambda: nn.Linear(D, K), torch.float32)
    x = 1e4 * vectors(50).float()
    for vectorise in (True, False):
        result = predict(layer, gaussian(layer), x, num_samples=8, vectorise=vectorise)
        assert result.log_probs.isfinite().all()
        assert (result.log_probs < -200).any()  # exp() of which is 0 in float32
        torch.testing.assert_close(result.log_probs.logsumexp(1), torch.zeros(50), rtol=0, atol=1e-5)
        assert (result.mutual_information >= 0).all()
        literal = literal_outputs(layer, gaussian(layer), x, 8).double().log_softmax(-1).logsumexp(0) - math.log(8)
        torch.testing.assert_close(result.log_probs, literal.float(), rtol=1e-5, atol=1e-4)


def test_minus_infinity_is_a_logit():
    layer = seeded(lambda: nn.Linear(D, K))
    masked = predict(
        layer,
        gaussian(layer),
        vectors(5),
        num_samples=4,
        forward=lambda model, x: model(x).index_fill(-1, torch.tensor([1]), -math.inf),
    )
    assert (masked.probs[:, 1] == 0).all()
    assert masked.entropy.isfinite().all()
    assert masked.mutual_information.isfinite().all()


@pytest.mark.parametrize("num_samples", [0, 32])
def test_point_and_mean(num_samples):
    model, x = seeded(mlp), vectors(9)
    q = PointMass.from_model(model) if num_samples else gaussian(model)
    result = predict(model, q, x, num_samples=num_samples)
    model.eval()
    assert torch.equal(result.log_probs, model(x).log_softmax(-1))
    assert (result.mutual_information == 0).all()
    assert result.computed_by == "mean"
    assert result.num_samples == num_samples
    assert result.labels is None


def test_model_may_hold_other_weights():
    model, other, x = seeded(mlp), seeded(mlp, seed=1), vectors(9)
    q = gaussian(model)
    before = state_of(other)
    for vectorise in (True, False):
        assert_close(predict(model, q, x, num_samples=3), predict(other, q, x, num_samples=3, vectorise=vectorise))
    assert_unchanged(before, other)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.floats(0.0, 3.0), st.integers(0, 1000))
def test_mutual_information(num_samples, std, seed):
    model = seeded(mlp, seed=seed)
    result = predict(model, gaussian(model, std), vectors(7), num_samples=num_samples, seed=seed)
    assert (result.mutual_information >= 0).all()
    assert (result.mutual_information <= result.entropy + 1e-12).all()
    assert (result.mutual_information <= math.log(num_samples) + 1e-12).all()  # so many bits a choice of sample has
    assert (result.entropy <= math.log(K) + 1e-12).all()
    if num_samples == 1 or std == 0:
        assert (result.mutual_information <= 1e-14).all()


# ---------------------------------------------------------------- loop and vmap


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("make", "data"), [(mlp, vectors), (ConvNet, images), (Tied, vectors)])
def test_loop_is_vmap(make, data, dtype, tolerance):
    model, x = seeded(make, dtype), data(30).to(dtype)
    q = gaussian(model, 0.1)
    loop = predict(model, q, x, num_samples=6, vectorise=False)
    vmap = predict(model, q, x, num_samples=6, vectorise=True)
    assert (loop.computed_by, vmap.computed_by) == ("loop", "vmap")
    assert loop.log_probs.dtype == vmap.log_probs.dtype == dtype
    assert_close(loop, vmap, tolerance)
    literal = literal_outputs(model, q, x, 6).softmax(-1).mean(0).log()
    torch.testing.assert_close(loop.log_probs, literal, rtol=tolerance, atol=tolerance)
    assert predict(model, q, x, num_samples=6).computed_by == "vmap"


def test_loop_on_the_cpu_unless_asked(monkeypatch):
    monkeypatch.undo()
    model = seeded(mlp)
    computed_by = [predict(model, gaussian(model), vectors(3), vectorise=v).computed_by for v in (None, True, False)]
    assert computed_by == ["loop", "vmap", "loop"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda():
    model, x, y = seeded(ConvNet), images(30), classes(30)
    q = gaussian(model, 0.1)  # on the CPU, as a loaded one
    model.cuda()
    vmap, loop = (predict(model, q, (x, y), num_samples=6, batch_size=7, chunk=4, vectorise=v) for v in (None, False))
    assert (vmap.computed_by, loop.computed_by) == ("vmap", "loop")
    assert_close(vmap, loop, 1e-10)
    assert vmap.log_probs.device.type == vmap.labels.device.type == "cpu"
    mean = predict(model, q, x, num_samples=0)
    assert_close(mean, predict(model.cpu(), q, x, num_samples=0), 1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_compiled_on_cuda():
    """Captured passes, samples of another posterior in the second call, and a last batch that is smaller."""
    model, x, y = seeded(ConvNet).cuda(), images(30), classes(30)
    for std in (0.1, 0.3):
        q = gaussian(model, std)
        options = {"num_samples": 6, "batch_size": 8, "chunk": 4}
        compiled = predict(model, q, (x, y), vectorise=True, compile=True, **options)
        assert compiled.computed_by == "vmap"
        assert_close(compiled, predict(model, q, (x, y), vectorise=False, **options), 1e-10)


@pytest.mark.parametrize(("batch_size", "chunk"), [(1, None), (7, 1), (7, 3), (512, 4), (30, 6), (30, 100)])
@pytest.mark.parametrize("vectorise", [True, False])
def test_batch_size_and_chunk_do_not_matter(batch_size, chunk, vectorise):
    model, x = seeded(ConvNet), images(30)
    q = gaussian(model, 0.1)
    result = predict(model, q, x, num_samples=6, batch_size=batch_size, chunk=chunk, vectorise=vectorise)
    assert_close(predict(model, q, x, num_samples=6), result)


def watch_chunks(monkeypatch, too_large=lambda chunks: False):
    """The sizes of the chunks that are tried from now on; those that `too_large` says find no memory."""
    chunks = []
    vmap = torch.vmap

    def watched(function):
        def run(stack):
            chunks.append(len(stack["0.bias"]))
            if too_large(chunks):
                raise torch.OutOfMemoryError("no room")
            return vmap(function)(stack)

        return run

    monkeypatch.setattr(torch, "vmap", watched)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return chunks


def predict_within(room, model, posterior, batches, **options):
    """As `predict` with vectorise=True, where the weights and outputs of one chunk may take `room` bytes."""
    settings = {"forward": None, "seed": 0, "chunk": None, "recalibrate": None} | options
    with at_mean(model, posterior) as device:
        run = Passes(model, posterior, vectorise=True, device=device, room=room, **settings)
        start = average_for("categorical", None)
        rows = collect(batches, device, lambda inputs, labels: run.average(inputs, lambda: start(labels)))
    return Predictions(**rows, num_samples=options["num_samples"], seed=0, computed_by=run.computed_by)


def test_chunk_is_chosen_by_memory(monkeypatch):
    model, x = seeded(mlp), vectors(5)
    q = gaussian(model)
    everything = predict(model, q, x, num_samples=5)
    sizes = []
    hooks = [layer.register_forward_hook(lambda _, x, y: sizes.append(y.numel() * 8)) for layer in model]
    model(x)
    for hook in hooks:
        hook.remove()
    size = sum(p.numel() * 8 for p in model.parameters()) + 4 * max(sizes)
    seen = watch_chunks(monkeypatch)
    for room, chunks in ((5 * size, [5]), (3 * size - 1, [2, 2, 1]), (0, [1] * 5)):
        seen.clear()
        assert_close(everything, predict_within(room, model, q, [x], num_samples=5))
        assert seen == chunks


@pytest.mark.parametrize(("room", "draws"), [(10**6, 100), (0, 300)])
def test_samples_in_several_chunks_are_drawn_once_if_there_is_room_for_them(room, draws, monkeypatch):
    """The 1,200 vectors are three batches, and a pass over one needs much of the room."""
    model, x = seeded(mlp), vectors(1200)
    q = gaussian(model)
    expected = predict(model, q, x, num_samples=100, vectorise=False)
    drawn = []
    sample = q.sample
    monkeypatch.setattr(q, "sample", lambda generator: drawn.append(1) or sample(generator))
    seen = watch_chunks(monkeypatch)
    assert_close(expected, predict_within(room, model, q, x.split(400), num_samples=100))
    assert max(seen) < 100
    assert sum(seen) == 300
    assert len(drawn) == draws


@pytest.mark.parametrize(
    ("num_samples", "most", "chunk"), [(32, 99, 32), (2048, 244, 128), (64, 63, 32), (7, 6, 6), (5, 1, 1)]
)
def test_chunks_of_one_size_where_there_are_such(num_samples, most, chunk):
    assert passes._choose_chunk(num_samples, most) == chunk


def test_a_chunk_that_does_not_fit_is_halved(monkeypatch):
    model, x = seeded(mlp), vectors(5)
    q = gaussian(model)
    everything = predict(model, q, x, num_samples=8)
    tried = watch_chunks(monkeypatch, too_large=lambda chunks: chunks[-1] > 2)
    result = predict(model, q, x, num_samples=8, vectorise=True)
    assert result.computed_by == "vmap"
    assert tried == [8, 4, 2, 2, 2, 2]
    assert_close(everything, result)


def test_samples_that_were_kept_make_room_before_it_gives_up(monkeypatch):
    model, x = seeded(mlp), vectors(500)
    q = gaussian(model)
    everything = predict(model, q, x, num_samples=3)
    tried = watch_chunks(monkeypatch, too_large=lambda chunks: len(chunks) == 1)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    result = predict_within(6 * weights, model, q, [x], num_samples=3)  # room for three samples, and one pass
    assert result.computed_by == "vmap"
    assert tried == [1, 1, 1, 1]
    assert_close(everything, result)


@pytest.mark.parametrize("make", [Branching, lambda: CustomFunction(D, K), Hoarder])
def test_models_that_vmap_refuses(make):
    model, x = seeded(make), vectors(12)
    q = gaussian(model)
    before = state_of(model)
    with pytest.warns(
        UserWarning, match="computed in a loop over the samples, because vmap failed with Runt"
    ) as warned:
        result = predict(model, q, x, num_samples=6, batch_size=5)
    assert len(warned) == 1
    assert result.computed_by.startswith("loop, because vmap failed with RuntimeError: ")
    literal = literal_outputs(model, q, x[:5], 6).softmax(-1).mean(0).log()
    torch.testing.assert_close(result.log_probs[:5], literal, rtol=1e-12, atol=1e-12)
    assert (result.mutual_information > 1e-6).all()
    assert_unchanged(before, model)
    if make is not Hoarder:
        with pytest.raises(RuntimeError):
            predict(model, q, x, vectorise=True)
        assert_unchanged(before, model)


def test_fallback_in_a_later_batch():
    layer, x = seeded(lambda: nn.Linear(D, K)), vectors(12)

    def forward(model, x):
        y = model(x)
        return y if len(x) == 5 or y.sum() > math.inf else 1 * y  # vmap fails at the last batch, of 2

    with pytest.warns(UserWarning, match="computed in a loop over the samples, because vmap failed"):
        result = predict(layer, gaussian(layer), x, num_samples=4, batch_size=5, forward=forward)
    assert result.computed_by.startswith("loop, because vmap failed")
    assert_close(predict(layer, gaussian(layer), x, num_samples=4), result)


def test_fixed_layers_run_once():
    model, x = seeded(mlp), vectors(8)
    head = list(model[3].parameters())
    q = DiagonalGaussian.from_model(model, {p: torch.full_like(p, 0.2) for p in head})
    shapes = []
    model[0].register_forward_hook(lambda module, args, output: shapes.append(torch.is_tensor(output)))
    vmap = predict(model, q, x, num_samples=6, vectorise=True, chunk=6)  # to choose one takes a pass more
    assert len(shapes) == 1
    assert_close(vmap, predict(model, q, x, num_samples=6, vectorise=False))
    assert len(shapes) == 7


def test_sixteen_bit_model_predicts_in_float32():
    model, x = seeded(mlp, torch.bfloat16), vectors(8).bfloat16()
    q = gaussian(model)
    results = [predict(model, q, x, num_samples=4, vectorise=v) for v in (True, False)]
    assert {r.log_probs.dtype for r in results} == {torch.float32}
    assert_close(*results, tolerance=5e-2)
    literal = literal_outputs(model, q, x, 4).float().softmax(-1).mean(0).log()
    torch.testing.assert_close(results[1].log_probs, literal, rtol=1e-5, atol=1e-5)


def test_posterior_of_another_dtype_than_the_model():
    model, x = seeded(mlp, torch.float32), vectors(8)
    q = gaussian(model)
    double = seeded(mlp, torch.float64)
    for vectorise in (None, False):
        result = predict(double, q, x, num_samples=4, vectorise=vectorise)
        torch.testing.assert_close(
            result.log_probs.float(), predict(model, q, x.float(), num_samples=4).log_probs, rtol=1e-4, atol=1e-5
        )


def test_under_autocast():
    model, x = seeded(mlp, torch.float32), vectors(8).float()
    q = gaussian(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)  # fills autocast's cache with the mean
        loop, vmap = (predict(model, q, x, num_samples=4, vectorise=v) for v in (False, True))
    assert loop.log_probs.dtype == torch.float32
    assert_close(loop, vmap, 5e-2)
    assert_close(loop, predict(model, q, x, num_samples=4), 5e-2)
    assert (loop.mutual_information > 1e-3).any()


def test_transformer_layers():
    """Their fused inference kernel has no rule for vmap: it must not warn, nor be wrong."""
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(24, K)]
    model = seeded(lambda: nn.Sequential(*layers))
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q = gaussian(model, 0.05)
    assert_close(predict(model, q, x, num_samples=4), predict(model, q, x, num_samples=4, vectorise=False), 1e-10)


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")], ids=["DataParallel", "compile"]
)
def test_wrapped_model(wrap):
    model, x = seeded(mlp), vectors(8)
    q = gaussian(model)
    expected = predict(model, q, x, num_samples=4)
    before = state_of(model)
    for vectorise in (True, False):
        assert_close(expected, predict(wrap(model), q, x, num_samples=4, vectorise=vectorise))
    assert_close(expected, predict(model, gaussian(wrap(model)), x, num_samples=4))
    assert_unchanged(before, model)


@pytest.mark.parametrize("vectorise", [True, False])
@pytest.mark.parametrize("chunk", [None, 2])
def test_recalibrated_statistics_are_those_of_each_sample(vectorise, chunk):
    model, x, train = seeded(ConvNet), images(9), images(40)
    q = gaussian(model, 0.1)
    before = state_of(model)
    loader = DataLoader(TensorDataset(train, classes(40)), batch_size=16)
    result = predict(model, q, x, num_samples=5, recalibrate=loader, vectorise=vectorise, chunk=chunk)
    assert_unchanged(before, model)
    generator = torch.Generator().manual_seed(0)
    outputs = []
    for _ in range(5):
        with q.sampled(model, generator), torch.no_grad():
            recalibrate_batch_norm(model, loader)
            outputs.append(model.eval()(x))
            model.train()
    torch.testing.assert_close(result.log_probs, torch.stack(outputs).softmax(-1).mean(0).log(), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(result.log_probs, predict(model, q, x, num_samples=5).log_probs, atol=1e-3)


def test_recalibration_at_the_mean_and_without_batch_norm():
    model, x, train = seeded(ConvNet), images(9), images(40)
    result = predict(model, gaussian(model), x, num_samples=0, recalibrate=train)
    recalibrate_batch_norm(model, [train])
    assert torch.equal(result.log_probs, model.eval()(x).log_softmax(-1))
    plain = seeded(mlp)
    q = gaussian(plain)
    assert_close(predict(plain, q, vectors(5), recalibrate=vectors(8)), predict(plain, q, vectors(5)))
    with pytest.raises(TypeError, match="recalibrate is a generator"):
        predict(model, gaussian(model), x, recalibrate=(t for t in [train]))


# ---------------------------------------------------------------- data


def test_kinds_of_data():
    model, x, y = seeded(mlp), vectors(10), classes(10)
    q = gaussian(model)
    expected = predict(model, q, (x, y), num_samples=3)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    cases = {
        "loader": loader,
        "generator": (batch for batch in loader),
        "pairs": [(x[:3], y[:3]), (x[3:], y[3:])],
        "keywords": [{"input": x[:3], "labels": y[:3]}, {"input": x[3:], "labels": y[3:]}],
        "label": [{"input": x, "label": y}],
        "pair with keywords": [({"input": x}, y)],
        "pair with arguments": [((x,), y)],
        "column of labels": [(x, y[:, None])],
        "labels as a list": [(x, y.tolist())],
        "float labels": (x, y.double()),
    }
    for name, data in cases.items():
        result = predict(model, q, data, num_samples=3)
        assert torch.equal(result.labels, y), name
        assert result.labels.dtype == torch.int64
        assert_close(expected, result)
    for data in (x, [x[:4], x[4:]], DataLoader(TensorDataset(x), batch_size=3), DataLoader(x, batch_size=3)):
        result = predict(model, q, data, num_samples=3)
        assert result.labels is None
        assert_close(expected, result)


def test_data_is_read_once():
    reads = []

    class Once:
        def __iter__(self):
            reads.append(1)
            return iter([vectors(4), vectors(4)])

    model = seeded(mlp)
    assert len(predict(model, gaussian(model), Once(), num_samples=4)) == 8
    assert reads == [1]


class Keywords(nn.Module):
    """As a transformers model: keywords in, an object with logits out."""

    def __init__(self, out):
        super().__init__()
        self.layer, self.out = nn.Linear(D, K), out

    def forward(self, *, features, scale=1.0):
        return self.out(self.layer(features) * scale)


@pytest.mark.parametrize("out", [lambda y: SimpleNamespace(logits=y), lambda y: {"logits": y}, lambda y: y])
def test_outputs_with_logits(out):
    model, x, y = seeded(lambda: Keywords(out)), vectors(6), classes(6)
    q = gaussian(model)
    batches = [{"features": x, "scale": 2.0, "labels": y}]
    results = [predict(model, q, batches, num_samples=3, vectorise=v) for v in (True, False)]
    assert_close(*results)
    expected = literal_outputs(model.layer, DiagonalGaussian.from_model(model.layer, {}), x, 1)[0]
    mean = predict(model, q, batches, num_samples=0)
    assert torch.equal(mean.log_probs, (2 * expected).log_softmax(-1))


def test_forward_hook():
    model, x = seeded(mlp), vectors(6)
    q = gaussian(model)
    data = [{"x": x[:4]}, {"x": x[4:]}]
    for vectorise in (True, False):
        result = predict(
            model,
            q,
            data,
            num_samples=3,
            vectorise=vectorise,
            forward=lambda model, inputs: model[3](model[:3](inputs["x"])),
        )
        assert_close(predict(model, q, x, num_samples=3), result)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], ValueError, "no batches"),
        (iter(()), ValueError, "no batches"),
        (torch.zeros(0, D), ValueError, "data is empty"),
        ((torch.zeros(0, D), torch.zeros(0)), ValueError, "data is empty"),
        ((vectors(5), classes(4)), ValueError, "5 inputs and 4 labels"),
        ({"input": vectors(5)}, TypeError, r"write \[data\]"),
        (TensorDataset(vectors(5)), TypeError, "DataLoader"),
        (3, TypeError, "data is of type int"),
        ([(vectors(5), classes(5)), vectors(5)], ValueError, "batch 1 has no labels, unlike earlier batches"),
        ([vectors(5), (vectors(5), classes(5))], ValueError, "batch 1 has labels, unlike earlier batches"),
        ([(vectors(5), vectors(5), classes(5))], ValueError, "a batch has 3 parts"),
        ([(vectors(5), classes(4))], ValueError, r"labels of shape \(4,\) came with outputs for 5 examples"),
        ([(vectors(5), F.one_hot(classes(5)))], ValueError, "argmax"),
        ([(vectors(5), classes(5) + 0.5)], ValueError, "labels must be class numbers"),
        (vectors(5)[:, :2], RuntimeError, "shapes cannot be multiplied"),
    ],
)
def test_data_that_is_refused(data, error, message):
    model = seeded(mlp)
    before = state_of(model)
    with pytest.raises(error, match=message):
        predict(model, gaussian(model), data, num_samples=2)
    assert_unchanged(before, model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": -1}, "num_samples=-1 must be an integer >= 0"),
        ({"num_samples": 1.0}, "num_samples=1.0"),
        ({"chunk": 0}, "chunk=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"likelihood": "poisson"}, "likelihood='poisson' must be one of"),
        ({"likelihood": "gaussian"}, "noise_std=None must be"),
        ({"likelihood": "gaussian", "noise_std": 0.0}, "noise_std=0.0 must be"),
        ({"noise_std": 1.0}, "leave it out"),
    ],
)
def test_options_that_are_refused(options, message):
    model = seeded(mlp)
    with pytest.raises(ValueError, match=message):
        predict(model, gaussian(model), vectors(5), **options)


@pytest.mark.parametrize(
    ("likelihood", "shape", "message"),
    [
        ("categorical", (5, 1), 'one number per example.*likelihood="bernoulli"'),
        ("categorical", (5,), 'one number per example.*likelihood="bernoulli"'),
        ("categorical", (5, 2, 3), r"\(5, 2, 3\).*needs \(n, K\)"),
        ("bernoulli", (5, 3), 'needs one logit per example.*likelihood="categorical" if each example has one of K'),
        ("bernoulli", (5, 3), r"multi-label.*forward=lambda model, inputs: model\(inputs\)\[:, 0\]"),
        ("gaussian", (5, 2, 2), r"needs \(n,\) or \(n, D\)"),
    ],
)
def test_outputs_of_wrong_rank(likelihood, shape, message):
    layer = nn.Linear(1, math.prod(shape[1:])).double()
    noise = {"noise_std": 1.0} if likelihood == "gaussian" else {}
    for vectorise in (None, True, False):
        with pytest.raises(ValueError, match=message):
            predict(
                layer,
                gaussian(layer),
                vectors(5)[:, :1],
                num_samples=2,
                likelihood=likelihood,
                vectorise=vectorise,
                forward=lambda model, x: model(x).reshape(shape),
                **noise,
            )


def test_outputs_that_are_no_tensor():
    model = seeded(lambda: Keywords(lambda y: (y,)))
    with pytest.raises(TypeError, match="the model returned tuple"):
        predict(model, gaussian(model), [{"features": vectors(3)}])


# ---------------------------------------------------------------- what stays as it was


def test_everything_is_restored():
    model = seeded(ConvNet)
    model.body[1].eval()  # a frozen layer in a model in training mode
    q = gaussian(model)
    with torch.no_grad():
        model.head.weight.add_(1)
        model.body[1].running_mean.add_(1)
    before = state_of(model)
    addresses = [p.data_ptr() for p in model.parameters()]
    for vectorise in (True, False):
        predict(model, q, images(5), num_samples=3, vectorise=vectorise)
        assert_unchanged(before, model)
    assert addresses == [p.data_ptr() for p in model.parameters()]
    assert all(p.is_leaf and p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("vectorise", [None, True, False])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_everything_is_restored_after_a_failure(vectorise, error):
    model = seeded(ConvNet)
    q = gaussian(model)
    with torch.no_grad():
        model.head.weight.add_(1)
    before = state_of(model)

    def batches():
        yield images(4)
        raise error

    def forward(model, x):
        model(x)
        raise error

    with pytest.raises(error):
        predict(model, q, batches(), num_samples=3, vectorise=vectorise)
    assert_unchanged(before, model)
    with pytest.raises(error):
        predict(model, q, images(4), num_samples=3, vectorise=vectorise, forward=forward)
    assert_unchanged(before, model)


def test_posterior_of_another_model():
    model = seeded(mlp)
    before = state_of(model)
    reads = []
    with pytest.raises(ValueError, match="does not fit the model"):
        predict(model, gaussian(seeded(ConvNet)), (reads.append(1) for _ in range(1)))
    assert_unchanged(before, model)
    assert not reads


def test_global_generator_is_untouched():
    model = seeded(mlp)
    loader = DataLoader(TensorDataset(vectors(6)), batch_size=2)  # draws a seed for its workers
    state = torch.get_rng_state()
    for vectorise in (True, False):
        predict(model, gaussian(model), loader, vectorise=vectorise)
    assert torch.equal(state, torch.get_rng_state())


def test_predictions_carry_no_graph():
    model = seeded(mlp)
    x = vectors(4).requires_grad_()
    for result in (predict(model, gaussian(model), x, vectorise=v) for v in (True, False)):
        assert not result.log_probs.requires_grad
        assert not result.log_probs.is_inference()


def test_inside_inference_mode():
    model, x = seeded(mlp), vectors(4)
    expected = predict(model, gaussian(model), x)
    with torch.inference_mode():
        for vectorise in (None, False):
            assert_close(expected, predict(model, gaussian(model), x, vectorise=vectorise))


# ---------------------------------------------------------------- two classes, and regression


def test_several_yes_no_questions_are_predicted_one_at_a_time():
    """As the errors say that meet outputs and labels of all questions at once."""
    model, x, y = seeded(lambda: mlp(3)), vectors(6), torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]]).repeat(2, 1)
    q = gaussian(model)
    with pytest.raises(ValueError, match=r"a single 1.*several \(multi-label\).*likelihood=\"bernoulli\""):
        predict(model, q, (x, y), num_samples=5)
    with pytest.raises(ValueError, match=r"multi-label"):
        predict(model, q, (x, y), num_samples=5, likelihood="bernoulli")
    outputs = literal_outputs(model, q, x)
    for k in range(3):
        question = {"likelihood": "bernoulli", "forward": lambda model, inputs, k=k: model(inputs)[:, k]}
        result = predict(model, q, (x, y[:, k]), num_samples=5, **question)
        torch.testing.assert_close(result.probs[:, 1], outputs[..., k].sigmoid().mean(0), rtol=1e-12, atol=1e-12)
        assert torch.equal(result.labels, y[:, k])


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
@pytest.mark.parametrize("vectorise", [True, False])
def test_bernoulli(shape, vectorise):
    model, x, y = seeded(lambda: mlp(1)), vectors(11), classes(11, 2)
    q = gaussian(model)
    result = predict(
        model,
        q,
        (x, y.double().reshape(shape)),
        num_samples=5,
        likelihood="bernoulli",
        vectorise=vectorise,
        forward=lambda model, x: model(x).reshape(shape),
    )
    p = literal_outputs(model, q, x).sigmoid().mean(0)
    torch.testing.assert_close(result.probs, torch.cat([1 - p, p], 1), rtol=1e-12, atol=1e-12)
    assert torch.equal(result.labels, y)
    as_softmax = predict(
        model, q, x, num_samples=5, forward=lambda model, x: torch.cat([torch.zeros_like(model(x)), model(x)], 1)
    )
    assert_close(as_softmax, result)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(("vectorise", "chunk"), [(True, None), (True, 2), (True, 1), (False, None)])
def test_regression_against_a_literal_transcription(outputs, vectorise, chunk):
    model, x = seeded(lambda: mlp(outputs)), vectors(13)
    q = gaussian(model)
    y = x[:, :outputs].sin()
    f = literal_outputs(model, q, x)
    options = {"num_samples": 5, "likelihood": "gaussian", "noise_std": 0.3, "batch_size": 4}
    result = predict(model, q, (x, y), vectorise=vectorise, chunk=chunk, **options)
    density = torch.distributions.Normal(f, 0.3).log_prob(y).sum(-1).exp().mean(0).log()

    shape = (13,) if outputs == 1 else (13, 2)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(result.mean, f.mean(0).reshape(shape), **close)
    torch.testing.assert_close(result.epistemic_variance, f.var(0, correction=0).reshape(shape), **close)
    torch.testing.assert_close(result.variance, f.var(0, correction=0).reshape(shape) + 0.09, **close)
    torch.testing.assert_close(result.log_density, density, **close)
    assert torch.equal(result.targets, y.reshape(shape))
    assert (len(result), result.noise_std) == (13, 0.3)

    without = predict(model, q, x, vectorise=vectorise, chunk=chunk, **options)
    assert without.targets is without.log_density is None
    assert torch.equal(without.mean, result.mean)


def test_regression_at_the_mean():
    model, x = seeded(lambda: mlp(1)), vectors(5)
    result = predict(model, gaussian(model), (x, x[:, 0]), num_samples=0, likelihood="gaussian", noise_std=2.0)
    model.eval()
    assert torch.equal(result.mean, model(x)[:, 0])
    assert (result.epistemic_variance == 0).all()
    expected = torch.distributions.Normal(result.mean, 2.0).log_prob(x[:, 0])
    torch.testing.assert_close(result.log_density, expected, rtol=1e-12, atol=1e-12)


def test_targets_of_another_shape():
    model, x = seeded(lambda: mlp(2)), vectors(5)
    with pytest.raises(ValueError, match=r"targets of shape \(5,\) came with outputs of shape \(5, 2\)"):
        predict(model, gaussian(model), (x, x[:, 0]), likelihood="gaussian", noise_std=1.0)


# ---------------------------------------------------------------- results


def some_predictions(kind, labelled):
    model, x = seeded(lambda: mlp(K if kind is Predictions else 1)), vectors(6)
    data = (x, classes(6)) if labelled else x
    options = {} if kind is Predictions else {"likelihood": "gaussian", "noise_std": 0.1}
    return predict(model, gaussian(model), data, num_samples=3, seed=4, **options)


@pytest.mark.parametrize("kind", [Predictions, GaussianPredictions])
@pytest.mark.parametrize("labelled", [True, False])
def test_save_and_load(kind, labelled, tmp_path):
    result = some_predictions(kind, labelled)
    result.save(tmp_path / "p.safetensors")
    loaded = kind.load(tmp_path / "p.safetensors")
    assert os.listdir(tmp_path) == ["p.safetensors"]
    assert repr(loaded) == repr(result)
    for name, value in vars(result).items():
        other = getattr(loaded, name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


def test_load_refuses(tmp_path):
    path = tmp_path / "p"
    some_predictions(Predictions, True).save(path)
    with pytest.raises(ValueError, match="kind='classes': expected 'gaussian'"):
        GaussianPredictions.load(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="not a complete one"):
        Predictions.load(path)
    path.write_bytes(whole.replace(b"num_samples", b"num_sbmples"))
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        Predictions.load(path)
    settings = {"num_sbmples": 3, "seed": 0}  # of a file that is whole
    write_file(path, {"log_probs": torch.zeros(3, 2)}, format="bsam.predictions", kind="classes", settings=settings)
    with pytest.raises(ValueError, match="num_sbmples") as caught:
        Predictions.load(path)
    assert str(path) in str(caught.value)
    model = seeded(mlp)
    gaussian(model).save(path)
    with pytest.raises(ValueError, match=r"format='bsam\.posterior': expected 'bsam\.predictions'"):
        Predictions.load(path)


def test_shapes_of_results_are_checked():
    good = {"log_probs": torch.zeros(3, 2), "mutual_information": torch.zeros(3), "labels": torch.zeros(3)}
    Predictions(**good, num_samples=1, seed=0)
    for name, bad in (("log_probs", torch.zeros(3)), ("mutual_information", torch.zeros(2)), ("labels", 3)):
        with pytest.raises((ValueError, TypeError), match=name):
            Predictions(**{**good, name: bad}, num_samples=1, seed=0)
    real = {"mean": torch.zeros(3), "epistemic_variance": torch.zeros(3), "targets": None, "log_density": None}
    GaussianPredictions(**real, noise_std=1.0, num_samples=1, seed=0)
    for name, bad in (("mean", None), ("epistemic_variance", torch.zeros(3, 1)), ("log_density", torch.zeros(2))):
        with pytest.raises((ValueError, TypeError), match=name):
            GaussianPredictions(**{**real, name: bad}, noise_std=1.0, num_samples=1, seed=0)


def test_repr():
    assert repr(some_predictions(Predictions, True)) == (
        "Predictions(6 examples, 3 classes, with labels, num_samples=3, seed=4, computed_by='vmap')"
    )
    assert repr(some_predictions(GaussianPredictions, False)) == (
        "GaussianPredictions(6 examples, no targets, noise_std=0.1, num_samples=3, seed=4, computed_by='vmap')"
    )


def test_metrics_take_predictions():
    assert metrics.summary(some_predictions(Predictions, True), num_bootstrap=0).num_examples == 6


# ---------------------------------------------------------------- progress


def test_progress(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    model = seeded(mlp)

    def run(progress):
        return predict(model, gaussian(model), iter([vectors(2)] * 3), num_samples=0, progress=progress)

    for stream, progress, shown in (
        (Terminal, True, True),
        (Terminal, None, False),  # done before two seconds
        (Terminal, False, False),
        (io.StringIO, None, False),
    ):
        monkeypatch.setattr(sys, "stderr", stream())
        assert len(run(progress)) == 6
        assert bool(sys.stderr.getvalue()) == shown
    monkeypatch.setitem(sys.modules, "rich", None)  # not installed
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert len(run(True)) == 6
    assert not sys.stderr.getvalue()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_compiled_pass_is_kept_with_its_model_and_follows_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = bsam.BSAM(model.parameters(), num_data=10, module=model, betas=(0.9, 0.5))
    x = torch.randn(20, 4)
    for count in (1, 1):
        for _ in range(5):
            optimizer.step(lambda x, model=model: model(x).square().mean(), x)  # moves weights and statistics
        posterior = optimizer.posterior()
        compiled = bsam.predict(model, posterior, x, batch_size=10, compile=True)
        plain = bsam.predict(model, posterior, x, batch_size=10, vectorise=False)
        torch.testing.assert_close(compiled.probs, plain.probs, rtol=0, atol=1e-6)
        assert len(_PROGRAMS[model]) == count
    before = len(_PROGRAMS)
    del model, optimizer, posterior
    gc.collect()
    assert len(_PROGRAMS) == before - 1


def test_only_a_vmapped_pass_can_be_compiled():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="leave vectorise=False out"):
        bsam.predict(model, bsam.PointMass.from_model(model), torch.ones(1, 2), vectorise=False, compile=True)
