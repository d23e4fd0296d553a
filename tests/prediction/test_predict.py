"""`predict`: kinds of data, what it refuses, and what it leaves unchanged."""

import dataclasses
import io
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bsam
from bsam import metrics
from bsam.posterior import DiagonalGaussian, PointMass
from bsam.prediction import predict
from tests.prediction.models import (
    WITH_STATISTICS_OF_THE_MEAN,
    ConvNet,
    D,
    K,
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

# ---------------------------------------------------------------- the definition

pytestmark = [pytest.mark.usefixtures("_try_vmap"), WITH_STATISTICS_OF_THE_MEAN]


def test_seeds():
    model, x = seeded(mlp), vectors(6)
    q = gaussian(model)
    a, b = (predict(model, q, x, seed=seed).log_probs for seed in (0, 1))
    assert not torch.equal(a, b)
    assert torch.equal(a, predict(model, q, x, seed=0).log_probs)


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
        "arrays": (x.numpy(), y.numpy()),
        "arrays of small numbers": (x.numpy(), y.numpy().astype("int8")),
        "inputs and a list": (x, y.tolist()),
        "batches of arrays": [(x[:3].numpy(), y[:3].numpy()), (x[3:].numpy(), y[3:].numpy())],
        "a dictionary": {"input": x, "labels": y},
        "a dictionary of arrays": {"input": x.numpy(), "labels": y.numpy()},
        "a dictionary and labels": ({"input": x}, y),
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


def test_arrays_get_the_type_of_the_weights():
    """NumPy's numbers are float64, and a network's weights are float32."""
    model, x = seeded(mlp, torch.float32), vectors(10)
    x.numpy().flags.writeable = False  # torch would warn of it
    expected = predict(model, gaussian(model), x.float(), num_samples=3, recalibrate=x.float())
    assert_close(expected, predict(model, gaussian(model), x.numpy(), num_samples=3, recalibrate=x.numpy()))
    words = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, K))
    ids = torch.randint(5, (6, 2))
    assert_close(*(predict(words, gaussian(words), data, num_samples=3) for data in (ids, ids.numpy())))


class Lengths(nn.Module):
    """Logits of tokens, of a batch of any length."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, K)

    def forward(self, input_ids, attention_mask=None):
        return SimpleNamespace(logits=self.embed(input_ids))


def test_batches_of_different_lengths_are_padded():
    """As Hugging Face's collators have them: each batch is as long as its longest example."""
    model = seeded(Lengths)
    q = gaussian(model)
    ids = [torch.randint(10, (2, length)) for length in (5, 3)]
    labels = [torch.randint(K, i.shape) for i in ids]
    batches = [
        {"input_ids": i, "attention_mask": torch.ones_like(i), "labels": y} for i, y in zip(ids, labels, strict=True)
    ]
    result = predict(model, q, batches, num_samples=3, keep_samples=True, ignore_index=-1)
    single = [predict(model, q, [batch], num_samples=3, keep_samples=True) for batch in batches]
    assert result.log_probs.shape == (4, 5, K)
    assert result.sample_log_probs.shape == (3, 4, 5, K)
    assert torch.equal(result.labels[:2], labels[0])
    assert torch.equal(result.labels[2:, :3], labels[1])
    assert (result.labels[2:, 3:] == -1).all()
    assert result.log_probs[2:, 3:].isnan().all()
    assert_close(single[0], dataclasses.replace(result, **{n: getattr(result, n)[:2] for n in ROWS}, **NONE))
    assert_close(single[1], dataclasses.replace(result, **{n: getattr(result, n)[2:, :3] for n in ROWS}, **NONE))
    summary = metrics.summary(result, num_bootstrap=0)
    assert summary.num_examples == 16
    nll = [-s.log_probs.gather(-1, s.labels[..., None]).flatten() for s in single]
    assert summary.nll == pytest.approx(float(torch.cat(nll).mean()))


ROWS, NONE = ("log_probs", "mutual_information", "labels", "energy"), {"sample_log_probs": None}


def test_batches_of_different_outputs_are_refused():
    def forward(model, x):
        return model(x)[:, : len(x)]

    model = seeded(mlp)
    with pytest.raises(ValueError, match=r"log_probs of batch 0 has shape \(3, 3\), of batch 1 \(2, 2\)"):
        predict(model, gaussian(model), [vectors(3), vectors(2)], num_samples=2, forward=forward)
    with pytest.raises(ValueError, match=r"mean of batch 0 has shape \(3, 3\), of batch 1 \(2, 2\)"):
        predict(
            model,
            gaussian(model),
            [vectors(3), vectors(2)],
            num_samples=2,
            forward=forward,
            likelihood="gaussian",
            noise_std=1.0,
        )


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
        ({"input": vectors(5), "other": vectors(4)}, TypeError, r"input: 5, other: 4.*write \[data\]"),
        ({"name": "no tensor"}, TypeError, r"no tensors.*write \[data\]"),
        (({"input": vectors(5)}, classes(4)), ValueError, "5 inputs and 4 labels"),
        (vectors(0).numpy(), ValueError, "data is empty"),
        (torch.tensor(1.0), ValueError, "data is a single number"),
        (SimpleNamespace(to_numpy=lambda: None), TypeError, r"SimpleNamespace: write \.to_numpy\(\)"),
        ((SimpleNamespace(to_numpy=lambda: None), classes(5)), TypeError, r"write \.to_numpy\(\)"),
        ({"text": vectors(5)}, TypeError, r"dictionary of text, as keywords: .*Write forward="),
        ([{"input": vectors(5), "index": classes(5)}], TypeError, "unexpected keyword argument 'index'"),
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
        ({"ignore_index": 0.5}, "ignore_index=0.5"),
    ],
)
def test_options_that_are_refused(options, message):
    model = seeded(mlp)
    with pytest.raises(ValueError, match=message):
        predict(model, gaussian(model), vectors(5), **options)


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


def test_learned_noise_is_that_of_the_posterior():
    x, y = torch.randn(8, D, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)
    models = [bsam.LearnedNoise(nn.Linear(D, 1, dtype=torch.float64), noise_std=std) for std in (0.3, 0.5)]
    q = [gaussian(model) for model in models]
    q = [type(p)(p.mean, {**p.std, "log_noise_std": torch.zeros(())}) for p in q]
    for model in models:  # the model may hold other weights
        found = predict(model, q[0], (x, y), likelihood="gaussian")
        assert found.noise_std == pytest.approx(0.3)
    known = predict(models[0], q[0], (x, y), likelihood="gaussian", noise_std=0.3)
    torch.testing.assert_close(known.log_density, found.log_density)
    linear = bsam.predict_linearised(models[0], q[1], (x, y), likelihood="gaussian")
    assert linear.noise_std == bsam.Predictor(models[0], q[1], likelihood="gaussian").noise_std == pytest.approx(0.5)
    mixture = predict(models[0], bsam.Mixture(q, [3.0, 1.0]), (x, y), likelihood="gaussian")
    assert mixture.noise_std == pytest.approx((0.75 * 0.09 + 0.25 * 0.25) ** 0.5)


@pytest.mark.parametrize("wrong", ["optimizer", "model"])
def test_what_is_no_posterior_is_refused(wrong):
    model = seeded(mlp)
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "model": model}[wrong]
    for call in (predict, bsam.Predictor):
        with pytest.raises(TypeError, match=r"posterior is of type \w+: write .*optimizer.posterior\(model\)"):
            call(model, given, vectors(3)) if call is predict else call(model, given)


def test_probabilities_in_the_place_of_logits_are_warned_of():
    model = nn.Sequential(seeded(mlp), nn.Softmax(dim=-1))
    with pytest.warns(UserWarning, match="the outputs of the model are probabilities, but logits are needed"):
        predict(model, PointMass.from_model(model), vectors(4))
    log = nn.Sequential(seeded(mlp), nn.LogSoftmax(dim=-1))  # logits as good as any
    expected = predict(log, PointMass.from_model(log), vectors(4))
    found = predict(model, PointMass.from_model(model), vectors(4), forward=lambda model, x: model(x).log())
    torch.testing.assert_close(found.log_probs, expected.log_probs)


@pytest.mark.parametrize("vectorise", [True, False])
def test_samples_that_change_nothing_are_warned_of(vectorise):
    """As where the weights of an adapter are merged into others."""
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "merged": nn.Linear(3, 2)})
    model.requires_grad_(True)
    q = DiagonalGaussian.from_model(model, {p: torch.full_like(p, 0.1) for p in model["merged"].parameters()})
    run = lambda m, x: m["used"](x)  # noqa: E731
    with pytest.warns(UserWarning, match="all samples of the posterior have the same outputs"):
        bsam.predict(model, q, torch.ones(5, 3), forward=run, batch_size=2, num_samples=4, vectorise=vectorise)
    bsam.predict(model, q, torch.ones(5, 3), forward=run, num_samples=1, vectorise=vectorise)
    both = lambda m, x: m["used"](x) + m["merged"](x)  # noqa: E731
    bsam.predict(model, q, torch.ones(5, 3), forward=both, num_samples=4, vectorise=vectorise)
