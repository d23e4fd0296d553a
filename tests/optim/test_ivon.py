"""IVON against the transcription of Algorithm 1, its authors' package, limits it must have, and its own options."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import bsam
from bsam.optim.ivon import hessian_estimate, new_hessian, unit_precision, update
from bsam.optim.variational import posterior_std
from tests import reference
from tests.networks import assert_close, make_batch, make_network, mean_loss
from tests.optim.test_bsam import STEPS, flat_noise, flat_state, run
from tests.problems import PROBLEMS, conv_net, logistic


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("clip_radius", [None, 0.2])
@pytest.mark.parametrize("size", [12, 10])  # 10 = 3 + 3 + 2 + 2: ragged
def test_matches_the_transcription(name, splits, clip_radius, size):
    problem = PROBLEMS[name]()
    N = 2 * len(problem.x)
    optimizer = bsam.IVON(
        problem.model.parameters(),
        lr=0.05,
        num_data=len(problem.x),
        augmentation_factor=2.0,
        prior_precision=1.5,
        betas=(0.8, 0.97),
        initial_hessian=0.7,
        splits=splits,
        clip_radius=clip_radius,
        seed=11,
    )
    minibatches = problem.minibatches(STEPS, size)
    expected = reference.ivon(
        problem.gradient,
        problem.weights(),
        minibatches,
        flat_noise(problem.model, seed=11),
        alpha=0.05,
        beta1=0.8,
        beta2=0.97,
        delta=1.5 / N,
        lambda_=N,
        h_0=0.7,
        parts=splits,
        clip=math.inf if clip_radius is None else clip_radius,
    )
    start = problem.weights()
    for (m, h, g, loss), (weights, ours) in zip(expected, run(problem, optimizer, minibatches), strict=True):
        np.testing.assert_allclose(weights, m, rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(flat_state(optimizer, "hessian"), h, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(flat_state(optimizer, "momentum"), g, rtol=1e-9, atol=1e-13)
        np.testing.assert_allclose(ours, loss, rtol=1e-10)
    assert np.abs(weights - start).max() > 0.01
    assert np.abs(h - 0.7).max() > 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_matches_the_transcription_on_cuda(nonfinite):
    problem = logistic()
    gradient, start, minibatches = problem.gradient, problem.weights(), problem.minibatches(STEPS, 12)
    problem.model.cuda()
    problem.x, problem.y = problem.x.cuda(), problem.y.cuda()
    optimizer = bsam.IVON(
        problem.model.parameters(), lr=0.05, num_data=40, betas=(0.9, 0.99), splits=4, nonfinite=nonfinite
    )
    options = {"alpha": 0.05, "beta1": 0.9, "beta2": 0.99, "delta": 25 / 40, "lambda_": 40, "h_0": 0.5, "parts": 4}
    expected = reference.ivon(gradient, start, minibatches, flat_noise(problem.model), **options)
    for (m, h, _, _), (weights, _) in zip(expected, run(problem, optimizer, minibatches), strict=True):
        np.testing.assert_allclose(weights, m, rtol=1e-9)
        np.testing.assert_allclose(flat_state(optimizer, "hessian"), h, rtol=1e-9)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("sample", [True, False])
@pytest.mark.parametrize("vectorise", [False, True])
def test_two_groups_match_the_transcription(splits, sample, vectorise):
    """Every option a group may have, in the transcription a vector with one number a weight."""
    problem = logistic()
    first, second = problem.model.parameters()
    optimizer = bsam.IVON(
        [
            {"params": [first], "lr": 0.2, "prior_precision": 5.0, "betas": (0.5, 0.9), "clip_radius": 0.1},
            {"params": [second], "sample": sample},
        ],
        lr=0.03,
        num_data=40,
        prior_precision=0.5,
        betas=(0.9, 0.99),
        initial_hessian=0.3,
        splits=splits,
        module=problem.model,
        vectorise=vectorise,
    )
    of_group = lambda a, b: np.array([a, a, a, b])  # noqa: E731
    minibatches = problem.minibatches(STEPS, 12 if vectorise else 13)
    expected = reference.ivon(
        problem.gradient,
        problem.weights(),
        minibatches,
        flat_noise(problem.model),
        alpha=of_group(0.2, 0.03),
        beta1=of_group(0.5, 0.9),
        beta2=of_group(0.9, 0.99),
        delta=of_group(5.0, 0.5) / 40,
        lambda_=40,
        h_0=0.3,
        parts=splits,
        clip=of_group(0.1, np.inf),
        sampled=of_group(1.0, float(sample)),
    )
    for (m, h, _, _), (weights, _) in zip(expected, run(problem, optimizer, minibatches), strict=True):
        np.testing.assert_allclose(weights, m, rtol=1e-10, atol=1e-13)  # clipped steps meet 0
        np.testing.assert_allclose(flat_state(optimizer, "hessian"), h, rtol=1e-10)


def test_the_pure_functions_are_the_lines_of_the_algorithm():
    h, delta = torch.tensor([0.2, 3.95]), 0.05
    s = unit_precision(h, delta)
    torch.testing.assert_close(posterior_std(s, 100.0), torch.tensor([0.2, 0.05]))
    g, theta, m = torch.tensor([3.0, -0.5]), torch.tensor([1.2, 1.95]), torch.tensor([1.0, 2.0])
    h_hat = hessian_estimate(g, theta, m, 100.0 * s)
    torch.testing.assert_close(h_hat, g * (theta - m) / posterior_std(s, 100.0) ** 2)
    new_h = 0.9 * h + 0.1 * h_hat + 0.01 * (h - h_hat) ** 2 / (2 * (h + delta))
    torch.testing.assert_close(new_hessian(h, h_hat, 0.9, delta), new_h)
    options = {"correction": torch.tensor(0.19), "alpha": 0.5, "beta1": 0.9, "beta2": 0.9, "delta": delta}
    momentum = torch.tensor([1.0, 2.0])
    new_g = 0.9 * momentum + 0.1 * g
    step = (new_g / 0.19 + delta * m) / (new_h + delta)
    expected = (m - 0.5 * step, new_g, new_h)
    torch.testing.assert_close(update(m, momentum, h, g, h_hat, **options), expected)
    radius = 0.75 * step[1].item()
    assert abs(step[0]) < radius
    clipped = m - 0.5 * torch.stack([step[0], torch.tensor(radius)])
    torch.testing.assert_close(update(m, momentum, h, g, h_hat, **options, clip_radius=radius)[0], clipped)


@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.99999])
def test_the_precision_stays_positive_whatever_the_estimate_is(beta2):
    """With u = h + delta and x = (1 - beta2) (h_hat - h) / u, line 7 says u (1 + x + x^2 / 2) >= u / 2."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(100_000, generator=generator, dtype=torch.float64).abs()
    h_hat = torch.randn(100_000, generator=generator, dtype=torch.float64) * 10.0 ** torch.arange(-3, 5).repeat(12_500)
    assert (new_hessian(h, h_hat, beta2, 0.1) + 0.1 >= 0.4999 * (h + 0.1)).all()


def sgd_path(problem, *, lr, weight_decay, steps=20):
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=lr, weight_decay=weight_decay)
    for _ in range(steps):
        optimizer.zero_grad()
        problem.loss_fn(problem.x, problem.y).backward()
        optimizer.step()
    return problem.weights()


def test_without_noise_it_is_gradient_descent_with_weight_decay():
    """beta1 = 0 and no noise: h stays at h_0, and line 9 is SGD with the learning rate alpha / (h_0 + delta)."""
    problem = logistic()
    delta = 2.0 / 40
    groups = [{"params": problem.model.parameters(), "sample": False}]
    ours = bsam.IVON(groups, lr=0.3, num_data=40, prior_precision=2.0, betas=(0.0, 0.9), initial_hessian=0.5)
    for _ in range(20):
        ours.step(problem.loss_fn, problem.x, problem.y)
    expected = sgd_path(logistic(), lr=0.3 / (0.5 + delta), weight_decay=delta)
    np.testing.assert_allclose(problem.weights(), expected, rtol=1e-12)
    assert (flat_state(ours, "hessian") == 0.5).all()


def test_with_endless_data_and_a_hessian_that_is_held_it_is_gradient_descent():
    """N -> infinity takes the noise away, beta2 -> 1 holds h; delta = prior_precision / N is given."""
    problem = logistic()
    N = 1e24
    ours = bsam.IVON(
        problem.model.parameters(),
        lr=0.3,
        num_data=N,
        prior_precision=0.05 * N,
        betas=(0.0, 1 - 2**-53),
        initial_hessian=0.5,
    )
    for _ in range(20):
        ours.step(problem.loss_fn, problem.x, problem.y)
    expected = sgd_path(logistic(), lr=0.3 / 0.55, weight_decay=0.05)
    np.testing.assert_allclose(problem.weights(), expected, rtol=1e-3)


@pytest.mark.parametrize("beta1", [0.0, 0.9, 0.999])
def test_the_first_step_has_the_whole_gradient(beta1):
    """Line 8 corrects the bias of the average."""
    w = nn.Parameter(torch.ones(3))
    optimizer = bsam.IVON(
        [{"params": [w], "sample": False}], lr=0.5, num_data=10, prior_precision=0.0, betas=(beta1, 0.9)
    )
    optimizer.step(lambda: (w * torch.tensor([1.0, 2.0, -3.0])).sum())
    torch.testing.assert_close(w.detach(), 1 - 0.5 * torch.tensor([1.0, 2.0, -3.0]) / 0.5)


def test_it_learns_the_hessian_of_a_quadratic():
    """On 1/2 H w^2 with the mean held at the minimum, h_hat = H e^2 / sigma^2: its mean is H, as Stein's identity says.

    The quadratic term of line 7 adds (1 - beta2) H^2 / (H + delta), with the variance 2 H^2 of h_hat.
    """
    H = torch.tensor([0.5, 2.0, 10.0, 40.0], dtype=torch.float64).repeat(500)
    w = nn.Parameter(torch.zeros(2000, dtype=torch.float64))
    optimizer = bsam.IVON([w], lr=0.0, num_data=100, prior_precision=3.0, betas=(0.9, 0.99), initial_hessian=1.0)
    mean_h = torch.zeros_like(H)
    for step in range(2000):
        optimizer.step(lambda: 0.5 * (H * w**2).sum())
        if step >= 800:
            mean_h += optimizer.state[w]["hessian"] / 1200
    H = H[:4]
    torch.testing.assert_close(mean_h.view(500, 4).mean(0), H + 0.01 * H**2 / (H + 0.03), rtol=0.005, atol=0)


def test_noise_has_the_posterior_variance_and_differs_between_splits():
    """The closure sees m + N(0, 1 / (num_data augmentation_factor (h + delta)))."""
    w = nn.Parameter(torch.linspace(-1, 1, 20_000, dtype=torch.float64))
    start = w.detach().clone()
    optimizer = bsam.IVON(
        [w], num_data=50, augmentation_factor=4.0, initial_hessian=0.3, prior_precision=40.0, splits=2, seed=1
    )
    seen = []

    def loss_fn(x):
        seen.append((w.detach() - start) * math.sqrt(200 * 0.3 + 40.0))
        return 0.0 * w.sum()

    optimizer.step(loss_fn, torch.ones(2))
    for z in seen:
        assert abs(z.mean().item()) < 3 / math.sqrt(20_000)
        assert abs(z.var().item() - 1) < 3 * math.sqrt(2 / 20_000)
    assert abs((seen[0] * seen[1]).mean().item()) < 3 / math.sqrt(20_000)


def test_the_posterior_has_the_precision_of_the_algorithm():
    problem = logistic()
    optimizer = bsam.IVON(
        problem.model.parameters(), num_data=40, prior_precision=2.0, betas=(0.9, 0.9), module=problem.model
    )
    for _ in range(40):
        optimizer.step(problem.loss_fn, problem.x, problem.y)
    posterior = optimizer.posterior()
    for name, p in problem.model.named_parameters():
        expected = (40 * optimizer.state[p]["hessian"] + 2.0).rsqrt()
        torch.testing.assert_close(posterior.std[name], expected)
    assert posterior.prior_precision == dict.fromkeys(posterior.mean, 2.0)


def test_a_posterior_that_is_mostly_its_start_warns():
    problem = logistic()
    optimizer = bsam.IVON(problem.model.parameters(), num_data=40, module=problem.model)
    optimizer.step(problem.loss_fn, problem.x, problem.y)
    with pytest.warns(UserWarning, match="after 1 steps 100% of the precision is still its starting value"):
        optimizer.posterior()


# ---------------------------------------------------------------- the authors' package


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("clip_radius", [None, 0.2])
def test_agrees_with_the_package_of_the_authors(samples, rescale, clip_radius, monkeypatch):
    """ivon-opt, driven through its public interface. Its noise is handed to ours, a minibatch given once a sample.

    By default it multiplies the learning rate by h_0 + delta.
    """
    ivon = pytest.importorskip("ivon")
    ours, theirs = conv_net(), conv_net()
    N, delta, h_0, lr = 100.0, 0.03125, 0.5, 0.05  # exact in float32, which the package rounds some of them to
    other = ivon.IVON(
        theirs.model.parameters(),
        lr=lr,
        ess=N,
        hess_init=h_0,
        beta1=0.8,
        beta2=0.97,
        weight_decay=delta,
        mc_samples=samples,
        rescale_lr=rescale,
        clip_radius=math.inf if clip_radius is None else clip_radius,
    )
    optimizer = bsam.IVON(
        ours.model.parameters(),
        lr=lr * (h_0 + delta) if rescale else lr,
        num_data=N,
        prior_precision=N * delta,
        initial_hessian=h_0,
        betas=(0.8, 0.97),
        splits=samples,
        clip_radius=clip_radius,
    )
    noise = []
    monkeypatch.setattr("bsam.optim.variational.standard_normal", lambda *address, **kind: noise.pop(0))
    torch.manual_seed(0)
    parameters = list(theirs.model.parameters())
    (group,) = other.param_groups
    for minibatch in theirs.minibatches(STEPS, 12):
        x, y = theirs.x[minibatch], theirs.y[minibatch]
        means = [p.detach().clone() for p in parameters]
        sigmas = (group["ess"] * (group["hess"] + group["weight_decay"])).rsqrt().split([p.numel() for p in parameters])
        for _ in range(samples):
            with other.sampled_params(train=True):
                noise += [
                    (p.detach() - mean) / sigma.view(mean.shape)
                    for p, mean, sigma in zip(parameters, means, sigmas, strict=True)
                ]
                other.zero_grad()
                theirs.loss_fn(x, y).backward()
        other.step()
        optimizer.step(ours.loss_fn, torch.cat([x] * samples), torch.cat([y] * samples))
        assert not noise
        np.testing.assert_allclose(ours.weights(), theirs.weights(), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(flat_state(optimizer, "hessian"), group["hess"].numpy(), rtol=1e-8)
    assert np.abs(flat_state(optimizer, "hessian") - h_0).max() > 0.1


# ---------------------------------------------------------------- other ways to take the same step


@pytest.mark.parametrize("network", ["normalised", "convolutional", "tied", "partly frozen"])
def test_splits_together_are_those_of_the_loop(network):
    made = []
    for vectorise in (True, False):
        model = make_network(network)
        made.append(
            (model, bsam.IVON(model.parameters(), num_data=100, splits=4, module=model, vectorise=vectorise, seed=2))
        )
    for seed in range(4):
        batch = make_batch(network, 16, seed)
        assert_close(*(optimizer.step(mean_loss(model), *batch) for model, optimizer in made))
        (a, ours), (b, loop) = made
        assert_close(a.state_dict(), b.state_dict())
        assert_close(ours.state_dict()["state"], loop.state_dict()["state"])


@pytest.mark.parametrize("vectorise", [True, False])
def test_16_bit_weights_are_given_the_noise_that_their_type_cannot_hold(vectorise):
    """The estimate of line 5 uses the sample itself. The one that bfloat16 holds has another variance: by a third here,
    where the numbers that it can hold are two standard deviations apart."""
    model = nn.Linear(40_000, 1, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, 3.0)  # numbers of bfloat16 are 1 / 64 apart here
    N = 128**2 / 0.25
    optimizer = bsam.IVON(
        model.parameters(), lr=0.0, num_data=N, prior_precision=0.0, betas=(0.0, 0.0), initial_hessian=0.25, splits=2,
        module=model, vectorise=vectorise,
    )  # fmt: skip
    x = torch.randn(2, 40_000)

    def loss_fn(x):
        return (model.weight.float() - 3).square().sum() / 2 + 0.0 * x.sum()  # its Hessian is 1

    noise = torch.stack([optimizer._theta(optimizer._slots()[0], k) - 3.0 for k in range(2)])
    assert noise.dtype == torch.float32
    rounded = (noise + 3.0).bfloat16().float() - 3.0
    optimizer.step(loss_fn, x)
    h_hat = (rounded * noise).mean(0) * N * 0.25
    expected = h_hat + (0.25 - h_hat) ** 2 / (2 * 0.25)  # line 7 with beta2 = 0
    state = optimizer.state[model.weight]
    torch.testing.assert_close(state["hessian"], expected, rtol=1e-5, atol=1e-5)
    assert abs(h_hat.mean().item() - 1) < 0.03
    assert (rounded.square().mean() * N * 0.25).item() > 1.25


@pytest.mark.parametrize("network", ["mlp", "normalised"])
@pytest.mark.parametrize("options", [{}, {"clip_radius": 0.05}, {"max_grad_norm": 0.1}])
def test_a_train_step_is_that_of_the_loop(network, options):
    """On the CPU both have the same noise. The rates change between steps."""
    made = []
    for _ in range(2):
        model = make_network(network)
        made.append((model, bsam.IVON(model.parameters(), num_data=100, splits=4, module=model, seed=2, **options)))
    (a, ours), (b, loop) = made
    batches = [make_batch(network, 16, seed) for seed in range(5)]
    step = bsam.TrainStep(ours, mean_loss(a), batches[0], compile=False)
    changes = [{}, {"lr": 0.03}, {"prior_precision": 1.0}, {"betas": (0.3, 0.8)}, {}]
    for batch, change in zip(batches, changes, strict=True):
        for optimizer in (ours, loop):
            optimizer.param_groups[0].update(change)
        assert_close(step(*batch), loop.step(mean_loss(b), *batch))
        assert_close(a.state_dict(), b.state_dict())
        assert_close(ours.state_dict()["state"], loop.state_dict()["state"])


# ---------------------------------------------------------------- options and states


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("initial_hessian", 0.0),
        ("initial_hessian", -1.0),
        ("initial_hessian", math.nan),
        ("clip_radius", 0.0),
        ("clip_radius", math.inf),
        ("prior_precision", -1.0),
        ("num_data", 0),
        ("betas", (0.9, 1.0)),
        ("augmentation_factor", 0.0),
    ],
)
def test_bad_options_are_refused(option, value):
    w = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=option):
        bsam.IVON([w], **{"num_data": 10, option: value})


def test_there_is_no_damping():
    with pytest.raises(ValueError, match="'damping' is not an option of a parameter group of IVON"):
        bsam.IVON([{"params": [nn.Parameter(torch.ones(2))], "damping": 0.1}], num_data=10)


@pytest.mark.parametrize("value", [-0.2, -1.0, math.nan, math.inf])
def test_a_loaded_hessian_must_make_a_precision(value):
    """It may be negative: h + delta, here h + 0.2, may not."""
    w = nn.Parameter(torch.ones(3))
    optimizer = bsam.IVON([w], num_data=10, prior_precision=2.0)
    optimizer.step(lambda: (w**2).sum())
    state = optimizer.state_dict()
    state["state"][0]["hessian"][1] = -0.1
    optimizer.load_state_dict(state)
    state["state"][0]["hessian"][1] = value
    with pytest.raises(ValueError, match=r"the loaded '?hessian'? of parameter 0 is not (finite|above -0\.2)"):
        optimizer.load_state_dict(state)
    assert optimizer.state[w]["hessian"][1] == -0.1
