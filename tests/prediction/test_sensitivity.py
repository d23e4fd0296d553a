"""Sensitivities against leave-one-out: closed forms, and training again without each example."""

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import nn

from bsam import DiagonalGaussian, PointMass, laplace, sensitivity


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def linear(features, outputs, bias=False):
    return nn.Linear(features, outputs, bias=bias, dtype=torch.float64)


# ------------------------------------------------------------------ linear regression


def ridge(x, y, noise_std, delta):
    """The posterior mean of linear regression."""
    precision = x.T @ x / noise_std**2 + delta * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(precision, x.T @ y / noise_std**2)


def test_linear_regression_is_exact_up_to_leverage():
    n, noise_std, delta = 30, 0.5, 2.0
    x, _ = torch.linalg.qr(normal(n, 4))  # orthogonal features: the posterior has a diagonal covariance
    x, y = 3 * x, normal(n, seed=1)
    model = linear(4, 1)
    model.weight.data = ridge(x, y, noise_std, delta)[None]
    posterior = laplace(model, "gaussian", (x, y[:, None]), prior_precision=delta, noise_std=noise_std)
    found = sensitivity(model, posterior, (x, y[:, None]), likelihood="gaussian", noise_std=noise_std, batch_size=7)
    f = x @ model.weight[0].detach()
    for i in range(n):
        rest = torch.arange(n) != i
        without = x[i] @ ridge(x[rest], y[rest], noise_std, delta) - f[i]
        torch.testing.assert_close(found.output_change[i] / (1 - found.leverage[i]), without)
    torch.testing.assert_close(found.residual, (f - y) / noise_std**2)
    assert found.output_change.shape == (n,)
    assert torch.equal(found.prediction_change, found.output_change)
    hat = x @ torch.linalg.solve(x.T @ x + delta * noise_std**2 * torch.eye(4, dtype=x.dtype), x.T)
    torch.testing.assert_close(found.leverage, hat.diagonal())


# ------------------------------------------------------------------ logistic regression


def fit(x, y, keep, delta, classes):
    """Weights (fits, classes, features) of logistic regressions with a Gaussian prior, by Newton's method.

    `keep` (fits, n) has 1 for the examples that are trained on.
    """

    def objective(w, keep):
        log_p = (x @ w.view(classes, -1).T).log_softmax(dim=1)
        return -(keep * log_p[torch.arange(len(y)), y]).sum() + 0.5 * delta * w.square().sum()

    gradient = torch.func.vmap(torch.func.grad(objective))
    hessian = torch.func.vmap(torch.func.jacrev(torch.func.grad(objective)))
    w = torch.zeros(len(keep), classes * x.shape[1], dtype=x.dtype)
    for _ in range(8):
        w = w - torch.linalg.solve(hessian(w, keep), gradient(w, keep))
    assert gradient(w, keep).abs().max() < 1e-9
    return w.view(len(keep), classes, -1)


@pytest.fixture(scope="module")
def retrained():
    """Features, labels with some flips, the model, its Laplace posterior, and the logits with each example left out."""
    n, classes, delta = 120, 3, 1.0
    x = normal(n, 5, seed=2)
    x = torch.linalg.qr(x)[0] * n**0.5  # nearly no correlation, as a diagonal covariance assumes
    y = (x @ normal(5, classes, seed=3) + 0.5 * normal(n, classes, seed=4)).argmax(dim=1)
    flipped = torch.arange(0, n, 20)
    y[flipped] = (y[flipped] + 1) % classes
    model = linear(5, classes)
    model.weight.data = fit(x, y, torch.ones(1, n), delta, classes)[0]
    without = torch.einsum("ncd,nd->nc", fit(x, y, 1.0 - torch.eye(n), delta, classes), x)
    return x, y, model, laplace(model, "categorical", (x, y), prior_precision=delta), without


def test_logistic_regression_against_training_again(retrained):
    x, y, model, posterior, without = retrained
    found = sensitivity(model, posterior, (x, y))
    logits = model(x).detach()
    true = without - logits
    estimates = {
        "output": (found.output_change, true),
        "prediction": (found.prediction_change, without.softmax(dim=1) - logits.softmax(dim=1)),
        "loss": (
            found.loss_change,
            F.cross_entropy(without, y, reduction="none") - F.cross_entropy(logits, y, reduction="none"),
        ),
    }
    for name, (estimate, truth) in estimates.items():
        correlation = torch.corrcoef(torch.stack([estimate.flatten(), truth.flatten()]))[0, 1]
        assert correlation > 0.97, (name, correlation)
    assert set(found.ranking()[:5].tolist()) <= set(estimates["loss"][1].argsort(descending=True)[:10].tolist())


def test_the_order_of_a_network_against_training_again():
    """A diagonal covariance gives the wrong size of the changes, and nearly the right order."""
    n, delta = 40, 1.0
    x = normal(n, 2, seed=5)
    y = (x[:, 0].square() + x[:, 1] + 0.5 * normal(n, seed=6) > 0.5).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2)).double()

    def losses(w):
        hidden = (x @ w[:12].view(6, 2).T + w[12:18]).tanh()
        return F.cross_entropy(hidden @ w[18:30].view(2, 6).T + w[30:], y, reduction="none")

    def objective(w, keep):
        return keep @ losses(w) + 0.5 * delta * w.square().sum()

    w = torch.nn.utils.parameters_to_vector(model.parameters()).detach().requires_grad_()
    optimizer = torch.optim.LBFGS([w], max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = objective(w, torch.ones(n).double())
        loss.backward()
        return loss

    optimizer.step(closure)
    best = w.detach()
    torch.nn.utils.vector_to_parameters(best, model.parameters())
    gradient = torch.func.vmap(torch.func.grad(objective))
    hessian = torch.func.vmap(torch.func.jacrev(torch.func.grad(objective)))
    without, keep = best.expand(n, -1), 1.0 - torch.eye(n).double()
    for _ in range(6):  # of Newton's method
        without = without - torch.linalg.solve(hessian(without, keep), gradient(without, keep))
    assert gradient(without, keep).abs().max() < 1e-8
    true = torch.func.vmap(losses)(without).diag() - losses(best)
    found = sensitivity(model, laplace(model, "categorical", (x, y), prior_precision=delta), (x, y)).loss_change
    assert spearmanr(true, found).statistic > 0.9
    assert found.sum() > 2 * true.sum()


@pytest.mark.parametrize("vectorise", [True, False])
def test_a_network_against_a_dense_transcription(vectorise):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    x, y = normal(9, 4), torch.arange(9) % 3
    posterior = DiagonalGaussian.from_model(model, {p: 0.1 + 0.1 * torch.rand_like(p) for p in model.parameters()})
    found = sensitivity(model, posterior, (x, y), batch_size=4, vectorise=vectorise)
    assert model.training
    model.eval()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for i in range(len(x)):

        def f(w, i=i):
            return torch.func.functional_call(model, w, (x[i],))

        jacobian = torch.func.jacrev(f)(weights)
        J = torch.cat([jacobian[name].reshape(3, -1) for name in weights], dim=1)
        Sigma = torch.cat([posterior.std[name].flatten() for name in weights]).square().diag()
        p = f(weights).softmax(dim=0)
        r, Lambda, V = p - F.one_hot(y[i], 3), p.diag() - p[:, None] * p, J @ Sigma @ J.T
        torch.testing.assert_close(found.residual[i], r)
        torch.testing.assert_close(found.output_change[i], V @ r)
        torch.testing.assert_close(found.prediction_change[i], Lambda @ V @ r)
        torch.testing.assert_close(found.loss_change[i], r @ V @ r)
        torch.testing.assert_close(found.leverage[i], (Lambda @ V).trace())


def test_bernoulli_is_categorical_with_two_classes():
    x, y = normal(10, 4), torch.arange(10) % 2
    one, two = linear(4, 1), linear(4, 2)
    two.weight.data = torch.cat([torch.zeros(1, 4, dtype=x.dtype), one.weight.data])
    std = torch.rand(1, 4, generator=generator(5), dtype=x.dtype)
    narrow = DiagonalGaussian.from_model(one, {one.weight: std})
    wide = DiagonalGaussian.from_model(two, {two.weight: torch.cat([torch.zeros_like(std), std])})
    bernoulli = sensitivity(one, narrow, (x, y), likelihood="bernoulli")
    categorical = sensitivity(two, wide, (x, y))
    torch.testing.assert_close(bernoulli.output_change, categorical.output_change[:, 1])
    torch.testing.assert_close(bernoulli.prediction_change, categorical.prediction_change[:, 1])
    torch.testing.assert_close(bernoulli.loss_change, categorical.loss_change)
    torch.testing.assert_close(bernoulli.leverage, categorical.leverage)


def test_what_cannot_be_right_is_refused():
    model = linear(4, 3)
    x, y = normal(6, 4), torch.arange(6) % 3
    posterior = DiagonalGaussian.from_model(model, {model.weight: torch.full_like(model.weight, 0.1)})
    with pytest.raises(TypeError, match="only a DiagonalGaussian"):
        sensitivity(model, PointMass.from_model(model), (x, y))
    with pytest.raises(ValueError, match="without variances, every sensitivity would be 0"):
        sensitivity(model, DiagonalGaussian.from_model(model, {}), (x, y))
    with pytest.raises(ValueError, match="no labels, and a residual needs them"):
        sensitivity(model, posterior, x)
    with pytest.raises(ValueError, match="class numbers from 0 to 2, not 3"):
        sensitivity(model, posterior, (x, y + 1))
    with pytest.raises(ValueError, match="class numbers from 0 to 2, not -100"):
        sensitivity(model, posterior, (x, torch.full((6,), -100)))
    with pytest.raises(ValueError, match="finite numbers, not nan"):
        sensitivity(model, posterior, (x, torch.full((6, 3), torch.nan)), likelihood="gaussian", noise_std=1.0)
    with pytest.raises(ValueError, match=r"labels of shape \(6, 2\) came with outputs of shape \(6, 3\)"):
        sensitivity(model, posterior, (x, torch.zeros(6, 2, dtype=torch.long)))
    with pytest.raises(ValueError, match="noise_std=None must be a finite number"):
        sensitivity(model, posterior, (x, y), likelihood="gaussian")
    with pytest.raises(ValueError, match="must be finite; look for inf or NaN in the inputs"):
        sensitivity(model, posterior, (torch.full_like(x, torch.nan), y))
    with pytest.raises(ValueError, match="is empty"):
        sensitivity(model, posterior, (x[:0], y[:0]))
