"""Passes over the samples: together and in a loop, in chunks, compiled, and with recalibrated statistics."""

import gc
import math
import shutil
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bsam
from bsam.batch_norm import recalibrate_batch_norm
from bsam.posterior import DiagonalGaussian, Mixture, PointMass
from bsam.prediction import Predictions, passes, predict
from bsam.prediction.averages import average_for
from bsam.prediction.passes import _PROGRAMS, Passes
from bsam.prediction.predict import at_mean, collect
from tests.prediction.models import (
    WITH_STATISTICS_OF_THE_MEAN,
    Branching,
    ConvNet,
    CustomFunction,
    D,
    Hoarder,
    K,
    Tied,
    assert_close,
    assert_unchanged,
    classes,
    gaussian,
    images,
    literal_outputs,
    mlp,
    seeded,
    state_of,
    vectors,
)

pytestmark = [pytest.mark.usefixtures("_try_vmap"), WITH_STATISTICS_OF_THE_MEAN]


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
            chunks.append(len(stack["model.0.bias"]))
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


def sampled(model, layer):
    """A posterior of the weights of one layer."""
    return DiagonalGaussian.from_model(model, {p: torch.full_like(p, 0.1) for p in layer.parameters()})


def test_statistics_of_the_mean_are_warned_of():
    """Only if samples change what BatchNorm sees, and nobody has said what to do with its statistics."""
    model, x = seeded(ConvNet), images(6)
    with pytest.warns(UserWarning, match=r"write recalibrate=train_loader .* or recalibrate=False") as caught:
        result = predict(model, gaussian(model), x, num_samples=3)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match="the running statistics of BatchNorm belong to the posterior's mean"):
        predict(model, sampled(model, model.body[0]), x, num_samples=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(predict(model, gaussian(model), x, num_samples=3, recalibrate=False), result)
        predict(model, gaussian(model), x, num_samples=3, recalibrate=images(8))
        predict(model, gaussian(model), x, num_samples=0)
        for after in (model.body[1], model.body[3], model.head):  # BatchNorm's own scale acts after its statistics
            predict(model, sampled(model, after), x, num_samples=3)
        model.body[1] = nn.BatchNorm2d(4, track_running_stats=False).double()
        predict(model, gaussian(model), x, num_samples=3)


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


class Sharpened(nn.Module):
    """Multiplies its outputs by a Python number."""

    def __init__(self):
        super().__init__()
        self.layers, self.factor = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), 1.0

    def forward(self, x):
        return self.factor * self.layers(x)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("change", ["a number", "a layer", "a layer with buffers"])
def test_a_compiled_pass_follows_what_is_not_a_tensor(change):
    torch.manual_seed(0)
    model = Sharpened()
    q, x = gaussian(model, 0.1), torch.randn(7, 4)
    options = {"num_samples": 4, "batch_size": 4}
    before = bsam.predict(model, q, x, compile=True, **options)
    if change == "a number":
        model.factor = 10.0
    elif change == "a layer":
        model.layers[1] = nn.Tanh()
    else:
        model.layers[1] = nn.BatchNorm1d(8, affine=False)
        model.layers[1].running_var.fill_(0.01)
        q, options["recalibrate"] = gaussian(model, 0.1), False
    after = bsam.predict(model, q, x, compile=True, **options)
    assert after.computed_by == "vmap"
    assert not torch.allclose(after.probs, before.probs, atol=1e-2)
    plain = bsam.predict(model, q, x, vectorise=False, **options)
    torch.testing.assert_close(after.probs, plain.probs, rtol=0, atol=1e-6)
    assert len(_PROGRAMS[model]) == (2 if change == "a number" else 4)  # for batches of 4 and 3


def test_only_a_vmapped_pass_can_be_compiled():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="leave vectorise=False out"):
        bsam.predict(model, bsam.PointMass.from_model(model), torch.ones(1, 2), vectorise=False, compile=True)


# ---------------------------------------------------------------- mixtures


def several(make, count=3):
    models = []
    for i in range(count):
        model = seeded(make)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.mul_(1 + 0.3 * i)
        models.append(model)
    return models


@pytest.mark.parametrize("vectorise", [True, False])
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("num_samples", [0, 1, 32])
def test_a_mixture_of_points_has_one_pass_per_part(vectorise, chunk, num_samples):
    models, x = several(ConvNet), images(5)  # BatchNorm: each part has statistics of its own
    q = Mixture([PointMass.from_model(model) for model in models], [1, 2, 5])
    before = state_of(models[0])
    found = predict(models[0], q, x, num_samples=num_samples, vectorise=vectorise, chunk=chunk, keep_samples=True)
    assert_unchanged(before, models[0])
    logits = torch.stack([model.eval()(x) for model in models]).detach()
    weights = torch.tensor(q.weights, dtype=torch.float64)
    assert_rows(found.sample_log_probs, logits.log_softmax(-1))
    assert_rows(found.probs, torch.einsum("s,snk->nk", weights, logits.softmax(-1)))
    assert_rows(found.energy, -torch.einsum("s,sn->n", weights, logits.logsumexp(-1)))
    information = found.entropy - torch.einsum("s,sn->n", weights, torch.special.entr(logits.softmax(-1)).sum(-1))
    assert_rows(found.mutual_information, information)
    assert_rows(found.sample_weights.double(), weights)
    assert found.num_samples == (3 if num_samples else 0)
    assert found.computed_by == ("vmap" if vectorise else "loop")


def assert_rows(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"likelihood": "gaussian", "noise_std": 0.3}], ids=["classes", "gaussian"])
@pytest.mark.parametrize("vectorise", [True, False])
def test_a_mixture_predicts_the_average_of_its_parts(options, vectorise):
    models, x = several(lambda: mlp(1 if options else K)), vectors(6)
    q = Mixture([gaussian(model, 0.2) for model in models], [1, 1, 2])
    y = torch.zeros(6) if options else classes(6)
    found = predict(models[0], q, (x, y), num_samples=9, seed=3, vectorise=vectorise, **options)
    generator = torch.Generator().manual_seed(3)  # the draws, in the order of the parts
    outputs, weights = [], []
    for part, count in zip(q.parts, q.num_draws(9), strict=True):
        for _ in range(count):
            with part.sampled(models[0], generator):
                outputs.append(models[0].eval()(x).detach())
            weights.append(q.weights[q.parts.index(part)] / count)
    w, f = torch.tensor(weights, dtype=torch.float64), torch.stack(outputs)
    assert q.num_draws(9) == (2, 2, 5)
    if not options:
        assert_rows(found.probs, torch.einsum("s,snk->nk", w, f.softmax(-1)))
        return
    f = f[..., 0]
    mean = (w[:, None] * f).sum(0)
    assert_rows(found.mean, mean)
    assert_rows(found.epistemic_variance, (w[:, None] * (f - mean).square()).sum(0))
    normal = torch.distributions.Normal(f, 0.3)
    assert_rows(found.log_density, (w[:, None] * normal.log_prob(torch.zeros(6)).exp()).sum(0).log())
    assert_rows(found.cdf, (w[:, None] * normal.cdf(torch.zeros(6))).sum(0))


def test_statistics_of_the_parts_of_a_mixture():
    models, x = several(ConvNet), images(5)
    points = Mixture([PointMass.from_model(model) for model in models])
    wide = Mixture([gaussian(model) for model in models])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(models[0], points, x)  # each point has the right ones
        predict(models[0], wide, x, num_samples=0)
    with pytest.warns(UserWarning, match="write recalibrate=train_loader"):
        predict(models[0], wide, x, num_samples=3)
    data, found = images(20), []
    for model in models:
        bsam.recalibrate_batch_norm(model, [data])
        found.append(model.eval()(x).softmax(-1).detach())
    again = predict(models[0], points, x, recalibrate=data)
    assert_rows(again.probs, torch.stack(found).mean(0))
    same_weights = Mixture(  # only buffers differ
        [PointMass(points.parts[0].mean, buffers=part.buffers) for part in points.parts]
    )
    kept = predict(models[0], same_weights, x, keep_samples=True)
    assert kept.sample_log_probs.shape[0] == 3
    assert not torch.equal(kept.sample_log_probs[0], kept.sample_log_probs[1])


def test_a_mixture_of_equal_points_is_the_point():
    model, x = seeded(mlp), vectors(5)
    point = PointMass.from_model(model)
    found = predict(model, Mixture([point, point], [1, 2]), x)
    assert torch.equal(found.log_probs, predict(model, point, x).log_probs)
    assert found.computed_by == "mean"


def test_too_few_samples_for_a_mixture_are_refused():
    model = seeded(mlp)
    before = state_of(model)
    with pytest.raises(ValueError, match="num_samples=1 is fewer than the 2 parts"):
        predict(model, Mixture([gaussian(model), gaussian(model)]), vectors(5), num_samples=1)
    assert_unchanged(before, model)
