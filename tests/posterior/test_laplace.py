"""Laplace's approximation against closed forms, a dense Hessian, and laplace-torch."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bsam
from bsam.likelihood import hessian_root, negative_log_likelihood

N = 24


def data(outputs=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 3, generator=g, dtype=torch.float64)
    labels = {
        "categorical": torch.randint(outputs, (N,), generator=g),
        "bernoulli": torch.randint(2, (N,), generator=g).double(),
        "gaussian": torch.randn(N, outputs, generator=g, dtype=torch.float64),
    }
    return x, labels


def network(outputs, seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def precisions(posterior):
    return {name: 1 / std.square() for name, std in posterior.std.items()}


CASES = [("categorical", 3, {}), ("bernoulli", 1, {}), ("gaussian", 2, {"noise_std": 0.3})]


# ---------------------------------------------------------------- closed forms


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_linear_regression(curvature):
    """precision_j = sum_i x_ij^2 / noise_std^2 + prior_precision."""
    x, labels = data(1)
    model = nn.Linear(3, 1, dtype=torch.float64)
    options = {"prior_precision": 2.0, "noise_std": 0.5, "curvature": curvature}
    posterior = bsam.laplace(model, "gaussian", (x, labels["gaussian"]), **options)
    found = precisions(posterior)
    torch.testing.assert_close(found["weight"], x.square().sum(0)[None] / 0.25 + 2)
    torch.testing.assert_close(found["bias"], torch.tensor([N / 0.25 + 2.0], dtype=torch.float64))
    assert torch.equal(posterior.mean["weight"], model.weight)
    assert posterior.prior_precision == {"weight": 2.0, "bias": 2.0}


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_logistic_regression(curvature):
    """precision_j = sum_i p_i (1 - p_i) x_ij^2 + prior_precision."""
    x, labels = data()
    model = nn.Linear(3, 1, dtype=torch.float64)
    posterior = bsam.laplace(model, "bernoulli", (x, labels["bernoulli"]), prior_precision=0.5, curvature=curvature)
    p = model(x).sigmoid().detach()
    torch.testing.assert_close(precisions(posterior)["weight"], (p * (1 - p) * x.square()).sum(0)[None] + 0.5)
    torch.testing.assert_close(precisions(posterior)["bias"], (p * (1 - p)).sum(0) + 0.5)


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_softmax_regression(curvature):
    """precision_kj = sum_i p_ik (1 - p_ik) x_ij^2 + prior_precision."""
    x, labels = data()
    model = nn.Linear(3, 3, dtype=torch.float64)
    posterior = bsam.laplace(model, "categorical", (x, labels["categorical"]), prior_precision=0.5, curvature=curvature)
    p = model(x).softmax(1).detach()
    torch.testing.assert_close(precisions(posterior)["weight"], (p * (1 - p)).T @ x.square() + 0.5)
    torch.testing.assert_close(precisions(posterior)["bias"], (p * (1 - p)).sum(0) + 0.5)


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_arrays(curvature):
    x, labels = data()
    model = nn.Linear(3, 3, dtype=torch.float64)
    y = labels["categorical"]
    y.numpy().flags.writeable = False
    options = {"prior_precision": 0.5, "curvature": curvature}
    tensors, arrays = (bsam.laplace(model, "categorical", both, **options) for both in ((x, y), (x.numpy(), y.numpy())))
    assert torch.equal(tensors.std["weight"], arrays.std["weight"])


@pytest.mark.parametrize(("likelihood", "outputs", "options"), CASES)
def test_the_root_is_one_of_the_hessian_of_the_loss(likelihood, outputs, options):
    _, labels = data(outputs)
    f = torch.randn(N, outputs, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    rows = hessian_root(likelihood, f, options.get("noise_std"))
    for i in range(3):
        y = labels[likelihood][i : i + 1]
        hessian = torch.autograd.functional.hessian(
            lambda f, y=y: negative_log_likelihood(likelihood, f[None], y, options.get("noise_std")), f[i]
        )
        torch.testing.assert_close(rows[i].T @ rows[i], hessian)


# ---------------------------------------------------------------- a network, against dense matrices


def flat_outputs(model, x):
    """The outputs as a function of one vector of weights, and that vector."""
    parameters = dict(model.named_parameters())
    shapes = {name: p.shape for name, p in parameters.items()}

    def outputs(w):
        pieces = torch.split(w, [shape.numel() for shape in shapes.values()])
        weights = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
        return torch.func.functional_call(model, weights, (x,))

    return outputs, torch.cat([p.detach().reshape(-1) for p in parameters.values()])


def flat_precision(posterior):
    return torch.cat([p.reshape(-1) for p in precisions(posterior).values()])


@pytest.mark.parametrize(("likelihood", "outputs", "options"), CASES)
@pytest.mark.parametrize("vectorise", [True, False])
def test_ggn_is_the_diagonal_of_the_dense_matrix(likelihood, outputs, options, vectorise):
    """A literal sum over the examples of J^T Lambda J."""
    x, _ = data(outputs)
    model = network(outputs)
    posterior = bsam.laplace(model, likelihood, x, prior_precision=2.0, vectorise=vectorise, batch_size=7, **options)
    total = 0
    for i in range(N):
        function, w = flat_outputs(model, x[i : i + 1])
        J = torch.autograd.functional.jacobian(function, w)[0]
        f = function(w)[0].detach()
        if likelihood == "categorical":
            p = f.softmax(0)
            Lambda = torch.diag(p) - torch.outer(p, p)
        elif likelihood == "bernoulli":
            Lambda = torch.diag(f.sigmoid() * (1 - f.sigmoid()))
        else:
            Lambda = torch.eye(2, dtype=torch.float64) / 0.3**2
        total = total + J.T @ Lambda @ J
    torch.testing.assert_close(flat_precision(posterior), total.diagonal() + 2)


@pytest.mark.parametrize(("likelihood", "outputs", "options"), CASES)
def test_hessian_is_the_diagonal_of_the_dense_matrix(likelihood, outputs, options):
    x, labels = data(outputs)
    y = labels[likelihood]
    model = network(outputs)
    posterior = bsam.laplace(
        model, likelihood, (x, y), prior_precision=100.0, curvature="hessian", batch_size=7, **options
    )
    function, w = flat_outputs(model, x)
    losses = {
        "categorical": lambda f: -f.log_softmax(1)[range(N), y.long()].sum(),
        "bernoulli": lambda f: -torch.distributions.Bernoulli(logits=f[:, 0]).log_prob(y).sum(),
        "gaussian": lambda f: -torch.distributions.Normal(f, 0.3).log_prob(y).sum(),
    }
    dense = torch.autograd.functional.hessian(lambda w: losses[likelihood](function(w)), w)
    torch.testing.assert_close(flat_precision(posterior), dense.diagonal() + 100)
    ggn = bsam.laplace(model, likelihood, x, prior_precision=100.0, **options)
    assert not torch.allclose(flat_precision(posterior), flat_precision(ggn))


# ---------------------------------------------------------------- against another package


@pytest.fixture(scope="module")
def peer():
    """laplace-torch, which `make` installs without its dependencies (tests/requirements-no-deps.txt)."""
    return pytest.importorskip("laplace")  # with warnings ignored: it scripts functions as torch no longer likes


BACKENDS = ["CurvlinopsGGN", "BackPackGGN"]


def peer_fit(peer, model, kind, x, y, backend, **options):
    other = peer.Laplace(
        copy.deepcopy(model),  # BackPACK leaves hooks in it
        kind,
        subset_of_weights="all",
        hessian_structure="diag",
        prior_precision=2.0,
        backend=getattr(peer.curvature, backend),
        **options,
    )
    other.fit(DataLoader(TensorDataset(x, y), batch_size=7))
    return other


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # BackPACK's
@pytest.mark.parametrize("backend", BACKENDS)
def test_agrees_with_laplace_torch_on_classification(peer, backend):
    """The same precision; of the linearised predictions both draw samples, of which this many agree to 0.002."""
    x, labels = data()
    model = network(3)
    other = peer_fit(peer, model, "classification", x, labels["categorical"], backend)
    posterior = bsam.laplace(model, "categorical", x, prior_precision=2.0)
    torch.testing.assert_close(flat_precision(posterior), other.posterior_precision.detach(), rtol=1e-10, atol=0)
    torch.manual_seed(0)
    expected = other(x, pred_type="glm", link_approx="mc", n_samples=200_000).detach()
    found = bsam.predict_linearised(model, posterior, x, num_samples=200_000)
    torch.testing.assert_close(found.probs, expected, rtol=0, atol=2e-3)
    assert (found.probs - model(x).softmax(1)).abs().max() > 0.02  # what the network says is another thing


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # BackPACK's
@pytest.mark.parametrize("backend", BACKENDS)
def test_agrees_with_laplace_torch_on_regression(peer, backend):
    """The same precision, and the same Gaussian of the outputs, which has a closed form."""
    x, labels = data(2)
    model = network(2)
    other = peer_fit(peer, model, "regression", x, labels["gaussian"], backend, sigma_noise=0.5)
    posterior = bsam.laplace(model, "gaussian", x, prior_precision=2.0, noise_std=0.5)
    torch.testing.assert_close(flat_precision(posterior), other.posterior_precision.detach(), rtol=1e-10, atol=0)
    mean, covariance = (part.detach() for part in other(x, pred_type="glm"))
    found = bsam.predict_linearised(model, posterior, x, likelihood="gaussian", noise_std=0.5)
    torch.testing.assert_close(found.mean, mean, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.epistemic_variance, covariance.diagonal(dim1=1, dim2=2), rtol=1e-10, atol=0)


# ---------------------------------------------------------------- models and data


class Net(nn.Module):
    """BatchNorm, dropout, frozen and unused weights, keywords."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 3)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, features):
        return self.head(self.drop(self.frozen(torch.tanh(self.norm(self.body(features))))))


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_the_model_is_left_as_it_was(curvature):
    torch.manual_seed(0)
    model = Net().double()
    x, labels = data()
    model(x).sum().backward()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    grads = [p.grad for p in model.parameters()]
    options = {"prior_precision": 500.0, "curvature": curvature}
    first = bsam.laplace(model, "categorical", (x, labels["categorical"]), **options)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(layer.training for layer in model.modules())
    assert not model.frozen.weight.requires_grad
    assert not first.std["frozen.weight"].any()
    torch.testing.assert_close(precisions(first)["unused"], torch.full((2,), 500.0, dtype=torch.float64))
    batches = [{"features": x[:10], "labels": labels["categorical"][:10]}]
    batches += [{"features": x[10:], "labels": labels["categorical"][10:]}]
    for same in (
        batches,
        DataLoader(TensorDataset(x, labels["categorical"]), batch_size=5),
        (batch for batch in batches),
    ):
        torch.testing.assert_close(bsam.laplace(model, "categorical", same, **options).std, first.std)
    scaled = bsam.laplace(model, "categorical", (x, labels["categorical"]), forward=lambda m, x: 2 * m(x), **options)
    assert not torch.allclose(scaled.std["head.weight"], first.std["head.weight"])


def test_it_predicts_and_is_saved(tmp_path):
    x, _ = data()
    model = network(3)
    posterior = bsam.laplace(model, "categorical", x, prior_precision=5.0)
    posterior.save(tmp_path / "laplace.safetensors")
    loaded = bsam.load_posterior(tmp_path / "laplace.safetensors")
    one, other = (bsam.predict(model, q, x, num_samples=4) for q in (posterior, loaded))
    assert torch.equal(one.log_probs, other.log_probs)
    assert (one.mutual_information > 0).all()
    assert posterior.kl() > 0


def test_sixteen_bit_models_have_a_float32_std():
    x, _ = data()
    posterior = bsam.laplace(network(3).bfloat16(), "categorical", x.bfloat16(), prior_precision=2.0)
    assert posterior.std["0.weight"].dtype == torch.float32
    expected = bsam.laplace(network(3), "categorical", x, prior_precision=2.0).std["0.weight"].float()
    torch.testing.assert_close(posterior.std["0.weight"], expected, rtol=0.05, atol=0)


# ---------------------------------------------------------------- what is refused


def test_a_precision_that_is_not_positive():
    x, labels = data()
    model = network(3)
    with torch.no_grad():
        model[0].weight.mul_(3)
    options = {"prior_precision": 0.0, "curvature": "hessian"}
    with pytest.raises(ValueError, match=r"the precision of 0\..* must be > 0.*Raise prior_precision.*'ggn'"):
        bsam.laplace(model, "categorical", (x, labels["categorical"]), **options)
    dead = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    nn.init.constant_(dead[0].bias, -100.0)
    with pytest.raises(ValueError, match=r"precision of .* is 0 somewhere"):
        bsam.laplace(dead, "categorical", x, prior_precision=0.0)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("categorical",), {"prior_precision": -1.0}, "prior_precision=-1.0"),
        (("categorical",), {"prior_precision": math.nan}, "prior_precision=nan"),
        (("categorical",), {"curvature": "fisher"}, "curvature='fisher' must be 'ggn' or 'hessian'"),
        (("categorical",), {"noise_std": 1.0}, "noise_std=1.0 is only for"),
        (("gaussian",), {}, "noise_std=None must be"),
        (("poisson",), {}, "likelihood='poisson' must be one of"),
        (("bernoulli",), {}, 'likelihood="bernoulli" needs one logit'),
        (("categorical",), {"curvature": "hessian"}, "depends on the labels"),
    ],
)
def test_bad_arguments_are_refused(arguments, options, message):
    x, _ = data()
    with pytest.raises(ValueError, match=message):
        bsam.laplace(network(3), *arguments, x, **{"prior_precision": 1.0, **options})


def test_bad_data_and_models_are_refused(monkeypatch):
    x, _ = data()
    with pytest.raises(ValueError, match="no batches"):
        bsam.laplace(network(3), "categorical", [], prior_precision=1.0)
    with pytest.raises(ValueError, match="nothing to approximate"):
        bsam.laplace(network(3).requires_grad_(False), "categorical", x, prior_precision=1.0)
    with pytest.raises(ValueError, match=r"labels of shape \(5,\) came with outputs of shape \(24, 3\)"):
        bsam.laplace(network(3), "categorical", [(x, torch.ones(5))], prior_precision=1.0, curvature="hessian")
    large = nn.Linear(1000, 101)
    with pytest.raises(ValueError, match=r"each of the 101,101 weights.*'ggn'"):
        bsam.laplace(large, "categorical", torch.ones(1, 1000), prior_precision=1.0, curvature="hessian")


def test_learned_noise_is_a_point():
    x, labels = data(2)
    model = bsam.LearnedNoise(network(2), noise_std=0.4)
    found = bsam.laplace(model, "gaussian", (x, labels["gaussian"]), prior_precision=2.0)
    expected = bsam.laplace(model.network, "gaussian", (x, labels["gaussian"]), prior_precision=2.0, noise_std=0.4)
    assert found.std["log_noise_std"] == 0
    for name, std in expected.std.items():
        torch.testing.assert_close(found.std[f"network.{name}"], std)


def test_padding_of_an_embedding_is_a_point():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=1), nn.Flatten(), nn.Linear(6, 2))
    data = torch.tensor([[0, 2], [3, 4], [0, 1]]), torch.tensor([0, 1, 1])
    std = bsam.laplace(model, "categorical", data, prior_precision=4.0).std["0.weight"]
    assert not std[1].any()
    assert (std[[0, 2, 3, 4]] > 0).all()


def test_padding_that_a_model_uses_as_a_class_is_none():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(4, 3, padding_idx=1)

        def forward(self, words):
            return nn.functional.linear(self.words(words).sum(1), self.words.weight)

    torch.manual_seed(0)
    data = torch.tensor([[0, 2], [3, 2], [0, 1]]), torch.tensor([0, 1, 1])
    assert (bsam.laplace(Tied(), "categorical", data, prior_precision=4.0).std["words.weight"] > 0).all()


def test_an_empty_batch_is_refused():
    batches = [(torch.ones(2, 3), torch.tensor([0, 1])), (torch.ones(0, 3), torch.tensor([], dtype=torch.long))]
    with pytest.raises(ValueError, match="a batch of data is empty"):
        bsam.laplace(nn.Linear(3, 2), "categorical", batches, prior_precision=1.0)


@pytest.mark.filterwarnings("ignore")
def test_the_learned_noise_of_a_compiled_model_is_a_point_too():
    torch.manual_seed(0)
    model = bsam.LearnedNoise(nn.Linear(3, 1))
    data = torch.randn(20, 3), torch.randn(20, 1)
    wrapped = torch.compile(model, backend="eager")
    plain, compiled = (bsam.laplace(each, "gaussian", data, prior_precision=4.0) for each in (model, wrapped))
    assert compiled.std["log_noise_std"] == plain.std["log_noise_std"] == 0
    a, b = (bsam.predict(each, plain, data[0], likelihood="gaussian") for each in (model, wrapped))
    assert a.noise_std == b.noise_std
