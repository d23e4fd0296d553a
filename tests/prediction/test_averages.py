"""Averages over samples against their definitions: classes, two classes, and regression."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bsam.prediction import predict
from tests.prediction.models import D, K, assert_close, classes, gaussian, images, literal_outputs, mlp, seeded, vectors

pytestmark = pytest.mark.usefixtures("_try_vmap")


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


@pytest.mark.parametrize(
    ("likelihood", "shape", "message"),
    [
        ("categorical", (5, 1), 'one number per example.*likelihood="bernoulli"'),
        ("categorical", (5,), 'one number per example.*likelihood="bernoulli"'),
        ("categorical", (5, 2, 1), r"\(5, 2, 1\), with 1 classes in dimension 2.*class_dim=.*bernoulli"),
        ("categorical", (5, 1, 2, 3), r"\(5, 1, 2, 3\), with 1 classes in dimension 1.*class_dim=.*bernoulli"),
        ("gaussian", (5, 2, 2), r"needs \(n,\) or \(n, D\)\. Write forward="),
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


@pytest.mark.parametrize("vectorise", [True, False])
def test_several_yes_no_questions_are_as_one_at_a_time(vectorise):
    model, x, y = seeded(lambda: mlp(3)), vectors(6), torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]]).repeat(2, 1)
    q = gaussian(model)
    with pytest.raises(ValueError, match=r"a single 1.*several \(multi-label\).*likelihood=\"bernoulli\""):
        predict(model, q, (x, y), num_samples=5)
    options = {"num_samples": 5, "likelihood": "bernoulli", "vectorise": vectorise}
    together = predict(model, q, (x, y), **options)
    assert together.log_probs.shape == (6, 3, 2)
    assert torch.equal(together.labels, y)
    assert torch.equal(predict(model, q, (x, y.double()), **options).labels, y)  # as BCEWithLogitsLoss has them
    outputs = literal_outputs(model, q, x)
    for k in range(3):
        result = predict(model, q, (x, y[:, k]), forward=lambda model, inputs, k=k: model(inputs)[:, k], **options)
        torch.testing.assert_close(result.probs[:, 1], outputs[..., k].sigmoid().mean(0), rtol=1e-12, atol=1e-12)
        assert torch.equal(result.labels, y[:, k])
        torch.testing.assert_close(together.log_probs[:, k], result.log_probs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(together.mutual_information[:, k], result.mutual_information, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match=r"labels of shape \(6,\) came with outputs of shape \(6, 3\).*yes/no"):
        predict(model, q, (x, y[:, 0]), **options)


def per_position(model, posterior, x, move):
    """Mean and mutual information of the probabilities, the classes moved to the end by `move`."""
    p = move(literal_outputs(model, posterior, x)).softmax(-1)
    mean = p.mean(0)
    entropy = -(mean * mean.log()).sum(-1)
    return mean, entropy - (-(p * p.log()).sum(-1)).mean(0)


class Tokens(nn.Module):
    """(n, T) token numbers to (n, T, K) logits, or with the classes in dimension 1 as convolutions have them."""

    def __init__(self, class_dim=2):
        super().__init__()
        self.embed, self.head, self.class_dim = nn.Embedding(10, D), nn.Linear(D, K), class_dim

    def forward(self, ids):
        return self.head(self.embed(ids).cumsum(1)).movedim(2, self.class_dim)


class Pixels(nn.Module):
    def __init__(self, outputs=K):
        super().__init__()
        self.layer = nn.Conv2d(1, outputs, 3, padding=1)

    def forward(self, x):
        return self.layer(x)


def tokens(n=4, length=7):
    return torch.randint(10, (n, length), generator=torch.Generator().manual_seed(1))


def positions(*shape, k=K):
    return torch.randint(k, shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("vectorise", [True, False])
@pytest.mark.parametrize("class_dim", [None, 2, -1, 1])
def test_tokens(class_dim, vectorise):
    model, x, y = seeded(lambda: Tokens(1 if class_dim == 1 else 2)), tokens(), positions(4, 7)
    y[0, 4:] = -100
    q = gaussian(model)
    result = predict(model, q, (x, y), num_samples=5, class_dim=class_dim, vectorise=vectorise, batch_size=3)
    mean, information = per_position(model, q, x, lambda f: f.movedim(2, 3) if class_dim == 1 else f)
    torch.testing.assert_close(result.probs, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.mutual_information, information, rtol=1e-9, atol=1e-12)
    assert result.entropy.shape == result.classes.shape == (4, 7)
    assert torch.equal(result.labels, y)
    assert len(result) == 4


@pytest.mark.parametrize("vectorise", [True, False])
def test_pixels(vectorise):
    model, x, y = seeded(Pixels), images(4), positions(4, 6, 6)
    q = gaussian(model)
    result = predict(model, q, (x, y), num_samples=5, vectorise=vectorise)
    mean, information = per_position(model, q, x, lambda f: f.movedim(2, -1))
    torch.testing.assert_close(result.probs, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.mutual_information, information, rtol=1e-9, atol=1e-12)
    assert torch.equal(result.labels, y)
    last = predict(
        model, q, (x, y), num_samples=5, class_dim=-1, forward=lambda model, x: model(x).movedim(1, -1), vectorise=False
    )
    torch.testing.assert_close(last.log_probs, result.log_probs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("channel", [True, False])
def test_masks_of_two_classes(channel):
    """One logit per pixel, and masks with or without a dimension for the channel."""
    model, x, y = seeded(lambda: Pixels(1)), images(4), positions(4, 6, 6, k=2)
    q = gaussian(model)
    data = (x, y[:, None].float() if channel else y)
    result = predict(model, q, data, num_samples=5, likelihood="bernoulli")
    torch.testing.assert_close(result.probs[..., 1], literal_outputs(model, q, x)[:, :, 0].sigmoid().mean(0))
    assert result.log_probs.shape == (4, 6, 6, 2)
    assert torch.equal(result.labels, y)


def test_labels_of_positions_that_do_not_fit():
    model, x = seeded(Tokens), tokens()
    q = gaussian(model)
    calls = []

    def forward(model, x):
        calls.append(1)
        return model(x)

    def attempt(labels, **options):
        calls.clear()
        predict(model, q, (x, labels), num_samples=5, forward=forward, vectorise=False, **options)

    with pytest.raises(ValueError, match=r"\(4, 3\) came with outputs of shape \(4, 7, 3\).*Write class_dim=1"):
        attempt(positions(4, 3))
    with pytest.raises(ValueError, match=r"labels must have shape \(4, 7\), one class number per position"):
        attempt(positions(4, 6))
    with pytest.raises(ValueError, match=r"must have shape \(4, 7\).*argmax"):
        attempt(positions(4, 7, 3, k=2))
    assert len(calls) == 1  # the first outputs show it
    for bad in (0, 3, -3, 1.0):
        with pytest.raises(ValueError, match=rf"class_dim={bad} must be the dimension of the classes.*from 1 to 2"):
            attempt(positions(4, 7), class_dim=bad)
    with pytest.raises(ValueError, match="class_dim=1 is only for"):
        attempt(positions(4, 7), class_dim=1, likelihood="bernoulli")


# ---------------------------------------------------------------- every sample


@pytest.mark.parametrize(("vectorise", "chunk"), [(True, None), (True, 2), (False, None)])
def test_kept_samples(vectorise, chunk):
    model, x = seeded(Tokens), tokens()
    q = gaussian(model)
    options = {"num_samples": 5, "vectorise": vectorise, "chunk": chunk, "batch_size": 3}
    result = predict(model, q, x, keep_samples=True, **options)
    p = literal_outputs(model, q, x).softmax(-1)
    torch.testing.assert_close(result.sample_probs, p, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.sample_probs.mean(0), result.probs, rtol=1e-12, atol=1e-12)
    without = predict(model, q, x, **options)
    assert without.sample_log_probs is without.sample_probs is None
    assert torch.equal(without.log_probs, result.log_probs)
    mean = predict(model, q, x, keep_samples=True, num_samples=0)
    assert torch.equal(mean.sample_log_probs, mean.log_probs[None])


def test_kept_samples_of_regression():
    model, x = seeded(lambda: mlp(2)), vectors(7)
    q = gaussian(model)
    options = {"num_samples": 5, "likelihood": "gaussian", "noise_std": 0.5, "batch_size": 3}
    result = predict(model, q, x, keep_samples=True, **options)
    torch.testing.assert_close(result.sample_means, literal_outputs(model, q, x), rtol=1e-12, atol=1e-12)
    assert predict(model, q, x, **options).sample_means is None


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
    below = torch.distributions.Normal(f, 0.3).cdf(y).mean(0)
    torch.testing.assert_close(result.cdf, below.reshape(shape), **close)
    assert torch.equal(result.targets, y.reshape(shape))
    assert (len(result), result.noise_std) == (13, 0.3)

    without = predict(model, q, x, vectorise=vectorise, chunk=chunk, **options)
    assert without.targets is without.log_density is without.cdf is None
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
