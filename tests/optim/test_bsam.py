"""BSAM against the transcription of Algorithm 1, against limits it must have, and its own options."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import bsam
from bsam.noise import standard_normal
from bsam.optim.bsam import curvature, perturbed, update
from bsam.optim.variational import posterior_std
from tests import reference
from tests.problems import PROBLEMS, logistic, quadratic

STEPS = 50


def flat_noise(model, seed=0):
    """The noise BSAM draws, as the transcription takes it: one flat vector for step t and split k."""

    def noise(t, k):
        draws = [
            standard_normal(seed, t, k, i, p.shape, device=p.device, dtype=torch.float64).reshape(-1)
            for i, p in enumerate(model.parameters())
        ]
        return torch.cat(draws).cpu().numpy()

    return noise


def flat_state(optimizer, name):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.cat([optimizer.state[p][name].reshape(-1) for p in parameters]).cpu().numpy()


def run(problem, optimizer, minibatches):
    for minibatch in minibatches:
        index = torch.from_numpy(minibatch).to(problem.x.device)
        loss = optimizer.step(problem.loss_fn, problem.x[index], problem.y[index])
        yield problem.weights(), loss.item()


def empirical_prior(model, max_noise):
    """The precision of a prior as wide as the weights of each matrix are large, times 1 / max_noise^2.

    Vectors beside matrices have no noise: their precision is infinite.
    """
    shapes = [p.shape for p in model.parameters()]
    of_vectors = np.inf if any(len(shape) > 1 for shape in shapes) else 0.0

    def prior(omega):
        parts, start = [], 0
        for shape in shapes:
            own = omega[start : start + shape.numel()]
            start += shape.numel()
            precision = 1 / (max_noise**2 * np.mean(own**2)) if len(shape) > 1 else of_vectors
            parts.append(np.full_like(own, precision))
        return np.concatenate(parts)

    return prior


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("form", ["mean_abs", "abs_mean"])
@pytest.mark.parametrize("sample_noise", [True, False])
@pytest.mark.parametrize("size", [12, 10])  # 10 = 3 + 3 + 2 + 2: ragged
@pytest.mark.parametrize(
    ("perturb_from", "sqrt_num_data", "max_noise"),
    [("sample", True, 0.1), ("sample", False, None), ("mean", False, None), ("mean", True, 0.3)],
)
def test_matches_the_transcription(name, splits, form, sample_noise, size, perturb_from, sqrt_num_data, max_noise):
    problem = PROBLEMS[name]()
    N = 2 * len(problem.x)
    optimizer = bsam.BSAM(
        problem.model.parameters(),
        lr=0.05,
        num_data=len(problem.x),
        augmentation_factor=2.0,
        rho=0.03,
        prior_precision=1.5,
        betas=(0.8, 0.97),
        damping=0.2,
        init_precision=0.7,
        splits=splits,
        perturb_from=perturb_from,
        curvature=form,
        sqrt_num_data=sqrt_num_data,
        max_noise=max_noise,
        sample_noise=sample_noise,
        max_grad_norm=None,
        seed=11,
    )
    minibatches = problem.minibatches(STEPS, size)
    expected = reference.bsam(
        problem.gradient,
        problem.weights(),
        minibatches,
        flat_noise(problem.model, seed=11),
        alpha=0.05,
        beta1=0.8,
        beta2=0.97,
        rho=0.03,
        delta=1.5 / N,
        gamma=0.2,
        N=N,
        m=splits,
        s_0=0.7,
        mean_abs=form == "mean_abs",
        sampled=float(sample_noise),
        from_sample=perturb_from == "sample",
        sqrt_num_data=sqrt_num_data,
        **({} if max_noise is None else {"prior": empirical_prior(problem.model, max_noise)}),
    )
    start = problem.weights()
    for (omega, s, g_m, loss), (weights, ours) in zip(expected, run(problem, optimizer, minibatches), strict=True):
        np.testing.assert_allclose(weights, omega, rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(flat_state(optimizer, "unit_precision"), s, rtol=1e-10)
        np.testing.assert_allclose(flat_state(optimizer, "momentum"), g_m, rtol=1e-9, atol=1e-13)
        np.testing.assert_allclose(ours, loss, rtol=1e-10)
    assert np.abs(weights - start).max() > 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_matches_the_transcription_on_cuda(nonfinite):
    problem = logistic()
    gradient, start, minibatches = problem.gradient, problem.weights(), problem.minibatches(STEPS, 13)
    problem.model.cuda()
    problem.x, problem.y = problem.x.cuda(), problem.y.cuda()
    settings = {"lr": 0.05, "rho": 0.01, "betas": (0.9, 0.999), "damping": 0.1, "prior_precision": 25.0}
    settings |= {"max_noise": None, "max_grad_norm": None}
    optimizer = bsam.BSAM(problem.model.parameters(), **settings, num_data=40, splits=4, nonfinite=nonfinite)
    options = {"alpha": 0.05, "beta1": 0.9, "beta2": 0.999, "rho": 0.01, "delta": 25 / 40, "gamma": 0.1}
    options["sqrt_num_data"] = True
    expected = reference.bsam(gradient, start, minibatches, flat_noise(problem.model), N=40, m=4, **options)
    for (omega, s, _, _), (weights, _) in zip(expected, run(problem, optimizer, minibatches), strict=True):
        np.testing.assert_allclose(weights, omega, rtol=1e-9)
        np.testing.assert_allclose(flat_state(optimizer, "unit_precision"), s, rtol=1e-9)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("perturb_from", ["sample", "mean"])
@pytest.mark.parametrize(("perturb", "sample"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("vectorise", [False, True])
def test_two_groups_match_the_transcription(splits, perturb_from, perturb, sample, vectorise):
    """Every option a group may have, in the transcription a vector with one number a weight."""
    problem = logistic()
    first, second = problem.model.parameters()
    optimizer = bsam.BSAM(
        [
            {"params": [first], "lr": 0.2, "rho": 0.01, "prior_precision": 5.0, "betas": (0.5, 0.9), "damping": 0.5},
            {"params": [second], "perturb": perturb, "sample": sample},
        ],
        lr=0.03,
        num_data=40,
        rho=0.3,
        prior_precision=0.5,
        betas=(0.9, 0.99),
        damping=0.1,
        splits=splits,
        perturb_from=perturb_from,
        sqrt_num_data=False,
        max_noise=None,
        max_grad_norm=None,
        module=problem.model,
        vectorise=vectorise,
    )
    of_group = lambda a, b: np.array([a, a, a, b])  # noqa: E731
    minibatches = problem.minibatches(STEPS, 12 if vectorise else 13)
    expected = reference.bsam(
        problem.gradient,
        problem.weights(),
        minibatches,
        flat_noise(problem.model),
        alpha=of_group(0.2, 0.03),
        beta1=of_group(0.5, 0.9),
        beta2=of_group(0.9, 0.99),
        rho=of_group(0.01, 0.3),
        delta=of_group(5.0, 0.5) / 40,
        gamma=of_group(0.5, 0.1),
        N=40,
        m=splits,
        sampled=of_group(1.0, float(sample)),
        perturbed=of_group(1.0, float(perturb)),
        from_sample=perturb_from == "sample",
    )
    for (omega, s, _, _), (weights, _) in zip(expected, run(problem, optimizer, minibatches), strict=True):
        np.testing.assert_allclose(weights, omega, rtol=1e-10)
        np.testing.assert_allclose(flat_state(optimizer, "unit_precision"), s, rtol=1e-10)


def test_the_pure_functions_are_the_lines_of_the_algorithm():
    s, g = torch.tensor([0.25, 4.0]), torch.tensor([-3.0, 0.5])
    torch.testing.assert_close(posterior_std(s, 100.0), torch.tensor([0.2, 0.05]))
    torch.testing.assert_close(perturbed(torch.ones(2), g, s, 0.1) - 1, torch.tensor([-1.2, 0.0125]))
    torch.testing.assert_close(curvature(g.abs(), s), torch.tensor([1.5, 1.0]))
    options = {"alpha": 0.5, "beta1": 0.9, "beta2": 0.99, "delta": 0.1, "gamma": 0.2}
    omega, g_m, new_s = update(torch.ones(2), torch.zeros(2), s, g, curvature(g.abs(), s), **options)
    torch.testing.assert_close(g_m, 0.1 * (g + 0.1))
    torch.testing.assert_close(new_s, 0.99 * s + 0.01 * (torch.tensor([1.5, 1.0]) + 0.3))
    torch.testing.assert_close(omega, 1 - 0.5 * g_m / new_s)


def test_without_noise_and_perturbation_it_is_scaled_gradient_descent():
    """rho = 0, no noise, beta1 = 0, and s held at 1 by beta2 -> 1: plain gradient descent with weight decay."""
    problem, twin = logistic(), logistic()
    options = {"rho": 0.0, "sample_noise": False, "betas": (0.0, 1 - 2**-53), "prior_precision": 2.0}
    ours = bsam.BSAM(problem.model.parameters(), lr=0.3, num_data=40, **options)
    sgd = torch.optim.SGD(twin.model.parameters(), lr=0.3, weight_decay=2.0 / 40)
    for _ in range(20):
        ours.step(problem.loss_fn, problem.x, problem.y)
        sgd.zero_grad()
        twin.loss_fn(twin.x, twin.y).backward()
        sgd.step()
    np.testing.assert_allclose(problem.weights(), twin.weights(), rtol=1e-12)


def test_both_curvatures_agree_for_one_split_and_differ_for_more():
    def precision(form, splits):
        problem = logistic()
        optimizer = bsam.BSAM(problem.model.parameters(), num_data=40, curvature=form, splits=splits, max_noise=None)
        for _ in range(5):
            optimizer.step(problem.loss_fn, problem.x, problem.y)
        return flat_state(optimizer, "unit_precision")

    np.testing.assert_array_equal(precision("mean_abs", 1), precision("abs_mean", 1))
    assert np.all(precision("mean_abs", 8) > precision("abs_mean", 8))  # |mean| <= mean | |


@pytest.mark.parametrize("sqrt_num_data", [True, False])
def test_stationary_precision_on_a_quadratic(sqrt_num_data):
    """On 1/2 h w^2 with the mean held at the minimum, g = h e and e ~ N(0, 1 / (N s)), so

        E[sqrt(s) |g|] = sqrt(s) h sqrt(2 / pi) / sqrt(N s) = h sqrt(2 / (pi N))

    whatever s is. The average of line 8 is therefore delta + gamma + h sqrt(2 / (pi N)): because algorithm and code
    leave out the sqrt(N) of the derivation, not delta + gamma + h.
    """
    h = torch.tensor([0.5, 2.0, 10.0, 40.0], dtype=torch.float64).repeat(500)
    w = nn.Parameter(torch.zeros(2000, dtype=torch.float64))
    N, delta, gamma = 100, 0.03, 0.05
    optimizer = bsam.BSAM(
        [w],
        lr=0.0,
        num_data=N,
        prior_precision=delta * N,
        damping=gamma,
        betas=(0.9, 0.98),
        rho=0.01,
        sqrt_num_data=sqrt_num_data,
        seed=5,
    )
    mean_s = torch.zeros_like(h)
    for step in range(800):
        optimizer.step(lambda: 0.5 * (h * w**2).sum())
        if step >= 400:
            mean_s += optimizer.state[w]["unit_precision"] / 400
    expected = delta + gamma + h[:4] * math.sqrt(2 / (math.pi * (1 if sqrt_num_data else N)))
    torch.testing.assert_close(mean_s.view(500, 4).mean(0), expected, rtol=0.005, atol=0)


@pytest.mark.parametrize("perturb_from", ["sample", "mean"])
def test_noise_has_the_posterior_variance(perturb_from):
    """The closure sees omega + N(0, 1 / (num_data * augmentation_factor * s)); both passes have the same noise."""
    w = nn.Parameter(torch.linspace(-1, 1, 20_000, dtype=torch.float64))
    start = w.detach().clone()
    optimizer = bsam.BSAM(
        [w], num_data=50, augmentation_factor=4.0, init_precision=0.3, perturb_from=perturb_from, seed=1
    )
    seen = []

    def closure():
        seen.append((w.detach() - start) * math.sqrt(50 * 4.0 * 0.3))
        return 0.0 * w.sum()

    optimizer.step(closure)
    z = seen[0]
    assert abs(z.mean().item()) < 3 / math.sqrt(20_000)
    assert abs(z.var().item() - 1) < 3 * math.sqrt(2 / 20_000)
    assert abs((z**4).mean().item() - 3) < 3 * math.sqrt(96 / 20_000)
    assert torch.equal(seen[1], z if perturb_from == "sample" else torch.zeros_like(z))  # the gradient is 0


@pytest.mark.parametrize("vectorise", [False, True])
def test_both_gradients_of_a_split_share_one_noise_and_splits_do_not(vectorise):
    """The loss is c w: the second pass is at theta + rho c / s, so the two passes differ by a constant."""
    model = nn.Linear(30_000, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = bsam.BSAM(
        model.parameters(),
        num_data=10,
        rho=0.5,
        init_precision=0.25,
        max_noise=None,
        splits=2,
        module=model,
        vectorise=vectorise,
    )
    seen = []

    def loss_fn(x):
        if not vectorise:
            seen.append(model.weight.detach().clone())
        return (x * model.weight).mean(0).sum()

    if vectorise:  # the weights of all splits, as they are handed to the loss
        from bsam.optim.together import GradAtStack

        class Seen(GradAtStack):
            def __call__(self, weights):
                weights = list(weights)
                seen.extend(weights[0].clone().unbind())
                return super().__call__(weights)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("bsam.optim.together.GradAtStack", Seen)
            optimizer.step(loss_fn, torch.ones(4, 30_000, dtype=torch.float64))
        first, second = seen[:2], seen[2:]
    else:
        optimizer.step(loss_fn, torch.ones(4, 30_000, dtype=torch.float64))
        first, second = seen[::2], seen[1::2]
    for theta, worse in zip(first, second, strict=True):
        torch.testing.assert_close(worse - theta, torch.full_like(theta, 0.5 / 0.25))
    e_1, e_2 = (theta.flatten() * math.sqrt(10 * 0.25) for theta in first)
    assert abs((e_1 * e_2).mean().item()) < 3 / math.sqrt(30_000)
    assert abs(e_1.var().item() - 1) < 3 * math.sqrt(2 / 30_000)


@pytest.mark.parametrize("perturb_from", ["sample", "mean"])
def test_offsets_of_the_two_passes(perturb_from):
    """Line 3: theta = omega + e. Line 6: theta + rho g / s, or omega + rho g / s."""
    w = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    optimizer = bsam.BSAM([w], num_data=10, rho=0.5, init_precision=0.25, perturb_from=perturb_from)
    seen = []

    def closure():
        seen.append(w.detach().clone())
        return (w * torch.tensor([3.0, -1.0])).sum()

    optimizer.step(closure)
    e = standard_normal(0, 0, 0, 0, (2,), dtype=torch.float64) / math.sqrt(10 * 0.25)
    torch.testing.assert_close(seen[0], torch.tensor([1.0, 2.0], dtype=torch.float64) + e)
    eps = torch.tensor([0.5 * 3.0 / 0.25, -0.5 / 0.25], dtype=torch.float64)
    start = seen[0] if perturb_from == "sample" else torch.tensor([1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(seen[1], start + eps)


@pytest.mark.parametrize("perturb_from", ["sample", "mean"])
def test_without_a_perturbation_the_mean_follows_the_expected_loss_or_the_plain_one(perturb_from):
    """rho = 0: the applied gradient is the one at the sample, as in variational inference, or the one at the mean."""
    problem = logistic()
    omega = problem.weights()
    optimizer = bsam.BSAM(
        problem.model.parameters(), num_data=40, rho=0.0, perturb_from=perturb_from, max_noise=None, max_grad_norm=None
    )
    optimizer.step(problem.loss_fn, problem.x, problem.y)
    theta = omega + flat_noise(problem.model)(0, 0) / math.sqrt(40)
    _, expected = problem.gradient(theta if perturb_from == "sample" else omega, np.arange(len(problem.x)))
    applied = torch.cat([p.grad.flatten() for p in problem.model.parameters()]).numpy()
    np.testing.assert_allclose(applied, expected, rtol=1e-10)


def test_a_state_without_an_option_was_trained_as_it_was_before():
    problem = logistic()
    optimizer = bsam.BSAM(problem.model.parameters(), num_data=40)
    optimizer.step(problem.loss_fn, problem.x, problem.y)
    state = optimizer.state_dict()
    assert state["param_groups"][0].pop("perturb_from") == "sample"
    assert state["param_groups"][0].pop("sqrt_num_data")
    assert state["param_groups"][0].pop("max_noise") == 0.5
    loaded = bsam.BSAM(problem.model.parameters(), num_data=40)
    loaded.load_state_dict(state)
    assert loaded.param_groups[0]["perturb_from"] == "mean"
    assert loaded.param_groups[0]["sqrt_num_data"] is False
    assert loaded.param_groups[0]["max_noise"] is None


def test_the_noise_is_a_share_of_the_weights_at_most():
    """With one example the noise would be of size 1 and hide weights of size 0.1; the posterior has the same limit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 20)).double()
    optimizer = bsam.BSAM(model.parameters(), num_data=1, module=model, max_noise=0.5)
    with pytest.warns(UserWarning, match="after 0 steps"):
        posterior = optimizer.posterior()
    for name, weights in model.named_parameters():
        std = posterior.std[name]
        if weights.ndim == 1:
            assert not std.any()  # a point
        else:
            share = float(std.max() / weights.detach().square().mean().sqrt())
            assert 0.49 < share < 0.5
            mean = weights.detach().clone()
            with optimizer.sampled():
                moved = float((weights.detach() - mean).square().mean() / mean.square().mean()) ** 0.5
            assert 0.4 < moved < 0.6
    wide = bsam.BSAM(model.parameters(), num_data=1e9, module=model, max_noise=0.5)
    with pytest.warns(UserWarning, match="after 0 steps"):
        std = wide.posterior().std["0.weight"]
    torch.testing.assert_close(std, torch.full_like(std, 1e9**-0.5), rtol=1e-3, atol=0)  # with many data no limit


def test_vectors_have_noise_where_no_matrix_has_any():
    def noisy(settings, *groups):
        optimizer = bsam.BSAM(groups, num_data=10, **settings)
        return [optimizer._noise_precision(slot) is not None for slot in optimizer._slots()]

    matrix, vector, number = (nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (4,), ()))
    assert noisy({}, {"params": [matrix, vector, number]}) == [True, False, False]
    assert noisy({}, {"params": [matrix]}, {"params": [vector, number]}) == [True, False, False]
    assert noisy({"max_noise": None}, {"params": [matrix, vector, number]}) == [True, True, True]
    assert noisy({}, {"params": [vector, number]}) == [True, True]
    assert noisy({}, {"params": [matrix], "sample": False}, {"params": [vector]}) == [False, True]
    assert noisy({}, {"params": [vector], "sample": False}, {"params": [number]}) == [False, True]


def test_weights_that_start_at_zero_are_learned():
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    optimizer = bsam.BSAM(model.parameters(), num_data=10, module=model)
    x, y = torch.randn(10, 4), torch.arange(10) % 3
    for _ in range(3):
        loss = optimizer.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
    assert loss.isfinite()
    assert model.weight.abs().min() > 0


def test_seeds_differ_and_the_global_generator_is_not_used():
    def weights(seed, torch_seed):
        torch.manual_seed(torch_seed)
        problem = logistic()
        torch.manual_seed(torch_seed)
        optimizer = bsam.BSAM(problem.model.parameters(), num_data=40, seed=seed)
        before = torch.get_rng_state()
        for _ in range(3):
            optimizer.step(problem.loss_fn, problem.x, problem.y)
        with optimizer.sampled():
            pass
        assert torch.equal(before, torch.get_rng_state())
        return problem.weights()

    np.testing.assert_array_equal(weights(0, 1), weights(0, 2))
    assert np.abs(weights(0, 1) - weights(1, 1)).max() > 1e-6


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[(name, bad) for name in ("lr", "rho", "prior_precision", "damping") for bad in (-0.1, math.nan, math.inf)],
        *[("betas", bad) for bad in ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan), (0.9,), 0.9)],
        *[("num_data", bad) for bad in (0, -5, math.nan, math.inf)],
        *[("splits", bad) for bad in (0, -1, 1.5, True)],
        *[(name, 0.0) for name in ("init_precision", "augmentation_factor")],
        *[("curvature", "abs"), ("sample_noise", "yes"), ("nonfinite", "ignore"), ("batch_norm", "second")],
        *[("max_grad_norm", 0.0), ("max_grad_norm", math.nan), ("seed", 1.5), ("seed", 2**64)],
    ],
)
def test_bad_options_are_refused(option, value):
    w = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=option):
        bsam.BSAM([w], **{"num_data": 10, option: value})
    if option in ("lr", "rho", "prior_precision", "damping", "betas"):
        with pytest.raises(ValueError, match=option):
            bsam.BSAM([{"params": [w], option: value}], num_data=10)
        optimizer = bsam.BSAM([w], num_data=10)
        with pytest.raises(ValueError, match=option):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], option: value})
        assert len(optimizer.param_groups) == 1


def test_options_of_the_whole_optimizer_must_agree():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"num_data is an option of the whole optimizer.*\[10, 20\]"):
        bsam.BSAM([{"params": [a]}, {"params": [b], "num_data": 20}], num_data=10)
    with pytest.raises(TypeError, match="num_data"):
        bsam.BSAM([a])


def test_max_grad_norm_clips_the_averaged_perturbed_gradient():
    def run(limit):
        problem = quadratic()
        optimizer = bsam.BSAM(problem.model.parameters(), num_data=30, max_grad_norm=limit, splits=3, betas=(0.0, 0.9))
        optimizer.step(problem.loss_fn, problem.x, problem.y)
        gradient = torch.cat([p.grad.reshape(-1) for p in problem.model.parameters()])
        return gradient, flat_state(optimizer, "unit_precision")

    free, s_free = run(None)
    clipped, s_clipped = run(0.5)
    assert free.norm() > 2
    torch.testing.assert_close(clipped, free * 0.5 / free.norm(), rtol=1e-5, atol=0)
    np.testing.assert_array_equal(s_free, s_clipped)  # the first gradients are not clipped
    torch.testing.assert_close(run(1e6)[0], free, rtol=0, atol=0)


# ---------------------------------------------------------------- sampled()


def test_sampled_has_the_posterior_law_and_restores():
    w = nn.Parameter(torch.linspace(-1, 1, 20_000, dtype=torch.float64))
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    point = nn.Parameter(torch.ones(3))
    optimizer = bsam.BSAM(
        [{"params": [w, frozen]}, {"params": [point], "sample": False}], num_data=50, init_precision=2.0
    )
    mean = w.detach().clone()
    with optimizer.sampled():
        z = (w.detach() - mean) * math.sqrt(50 * 2.0)
        assert torch.equal(frozen, torch.ones(3))
        assert torch.equal(point, torch.ones(3))
        assert torch.is_grad_enabled()
        assert w.requires_grad
        assert w.is_leaf
    assert abs(z.mean().item()) < 3 / math.sqrt(20_000)
    assert abs(z.var().item() - 1) < 3 * math.sqrt(2 / 20_000)
    assert torch.equal(w, mean)


def test_sampled_draws_are_numbered():
    w = nn.Parameter(torch.zeros(5))
    optimizer = bsam.BSAM([w], num_data=50)

    def draw(*number):
        with optimizer.sampled(*number):
            return w.detach().clone()

    first, second = draw(), draw()
    assert not torch.equal(first, second)
    assert torch.equal(draw(0), first)
    assert torch.equal(draw(1), second)
    assert not torch.equal(draw(), second)
    optimizer.step(lambda: (w**2).sum())
    assert not torch.equal(draw(0), first)
    with pytest.raises(ValueError, match="draw=-1"):
        draw(-1)


def test_sampled_never_repeats_the_noise_of_training():
    w = nn.Parameter(torch.zeros(50))
    optimizer = bsam.BSAM([w], num_data=50, splits=1)
    seen = []
    optimizer.step(lambda: seen.append(w.detach().clone()) or (w**2).sum())
    optimizer = bsam.BSAM([w.detach().zero_().requires_grad_()], num_data=50)
    w = optimizer.param_groups[0]["params"][0]
    for number in range(5):
        with optimizer.sampled(number):
            assert not torch.equal(w, seen[0])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_sampled_restores_after_an_exception(error):
    w = nn.Parameter(torch.randn(4))
    optimizer = bsam.BSAM([w], num_data=50)
    mean = w.detach().clone()

    def interrupted():
        with optimizer.sampled():
            assert not torch.equal(w, mean)
            raise error

    with pytest.raises(error):
        interrupted()
    assert torch.equal(w, mean)
    optimizer.step(lambda: (w**2).sum())  # and steps are possible again


def test_sampled_nests_around_the_mean():
    w = nn.Parameter(torch.full((3,), 100.0))
    optimizer = bsam.BSAM([w], num_data=50)
    with optimizer.sampled(0):
        outer = w.detach().clone()
        with optimizer.sampled(1):
            inner = w.detach().clone()
        assert torch.equal(w, outer)
    assert torch.equal(w, torch.full((3,), 100.0))
    with optimizer.sampled(1):
        assert torch.equal(w, inner)  # centred at the mean, not at the outer sample


def test_no_step_and_no_new_group_inside_sampled():
    w = nn.Parameter(torch.zeros(3))
    optimizer = bsam.BSAM([w], num_data=50)
    with optimizer.sampled():
        sample = w.detach().clone()
        with pytest.raises(RuntimeError, match="inside sampled"):
            optimizer.step(lambda: (w**2).sum())
        with pytest.raises(RuntimeError, match="inside sampled"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        assert torch.equal(w, sample)
    assert not optimizer.state


def test_no_step_or_sample_inside_a_step():
    w = nn.Parameter(torch.zeros(3))
    optimizer = bsam.BSAM([w], num_data=50)

    def sampling():
        with optimizer.sampled():
            return (w**2).sum()

    for closure in (lambda: optimizer.step(lambda: (w**2).sum()), sampling):
        with pytest.raises(RuntimeError, match="inside a step"):
            optimizer.step(closure)
        assert torch.equal(w, torch.zeros(3))


# ---------------------------------------------------------------- state


def test_state_is_float32_for_16_bit_weights_and_stays_so_on_load():
    w = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = bsam.BSAM([w], num_data=1000)
    for _ in range(3):
        optimizer.step(lambda: (w.float() ** 2).sum())
    twin = nn.Parameter(w.detach().clone())
    other = bsam.BSAM([twin], num_data=1000)
    other.load_state_dict(optimizer.state_dict())
    for name in ("momentum", "unit_precision"):
        value = other.state[twin][name]
        assert value.dtype == torch.float32
        assert torch.equal(value, optimizer.state[w][name])
        assert not torch.equal(value, value.bfloat16().float())  # it would have been rounded
    assert w.dtype == torch.bfloat16
    assert w.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_load_refuses_precisions_that_are_not_positive(bad):
    w = nn.Parameter(torch.ones(4))
    optimizer = bsam.BSAM([w], lr=0.1, num_data=1000)
    optimizer.step(lambda: (w**2).sum())
    before = optimizer.state_dict()
    state = optimizer.state_dict()
    state["state"][0]["unit_precision"][2] = bad
    state["param_groups"][0]["lr"] = 77.0
    with pytest.raises(ValueError, match="unit_precision of parameter 0"):
        optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[w]["unit_precision"], before["state"][0]["unit_precision"])
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_load_refuses_the_state_of_another_optimizer():
    w = nn.Parameter(torch.ones(4))
    adam = torch.optim.Adam([w])
    (w**2).sum().backward()
    adam.step()
    optimizer = bsam.BSAM([w], num_data=1000)
    with pytest.raises(ValueError, match="has no 'momentum'"):
        optimizer.load_state_dict(adam.state_dict())


# ---------------------------------------------------------------- posterior()


def test_posterior_is_the_gaussian_of_line_10_with_the_prior_of_each_group():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    optimizer = bsam.BSAM(
        [{"params": model[0].parameters(), "prior_precision": 3.0}, {"params": model[1].parameters(), "sample": False}],
        num_data=50,
        augmentation_factor=4.0,
        betas=(0.9, 0.5),
        max_noise=None,
        module=model,
    )
    for _ in range(5):
        optimizer.step(lambda: model(torch.ones(4, 3)).pow(2).mean())
    posterior = optimizer.posterior()
    s = optimizer.state[model[0].weight]["unit_precision"]
    torch.testing.assert_close(posterior.std["0.weight"], 1 / (50 * 4 * s).sqrt())
    assert not posterior.std["1.weight"].any()
    assert posterior.prior_precision == {"0.weight": 3.0, "0.bias": 3.0}
    prior = torch.distributions.Normal(0.0, 3.0**-0.5)
    q = [torch.distributions.Normal(posterior.mean[n], posterior.std[n]) for n in ("0.weight", "0.bias")]
    expected = sum(torch.distributions.kl_divergence(each, prior).sum() for each in q)
    torch.testing.assert_close(posterior.kl().float(), expected)


def test_posterior_warns_while_the_precision_is_its_starting_value():
    model = nn.Linear(3, 2)
    optimizer = bsam.BSAM(model.parameters(), num_data=50, betas=(0.9, 0.9))
    for _ in range(21):  # 0.9^21 = 0.109
        optimizer.step(lambda: model(torch.ones(4, 3)).pow(2).mean())
    with pytest.warns(UserWarning, match="after 21 steps 11% of the precision"):
        optimizer.posterior(model)
    optimizer.step(lambda: model(torch.ones(4, 3)).pow(2).mean())
    optimizer.posterior(model)  # 0.098: no warning


def test_no_posterior_inside_sampled():
    model = nn.Linear(3, 2)
    optimizer = bsam.BSAM(model.parameters(), num_data=50)
    with optimizer.sampled(), pytest.raises(RuntimeError, match="inside sampled"):
        optimizer.posterior(model)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("momentum", torch.tensor(0.0), r"'momentum' of parameter 0"),
        ("momentum", 0.0, "is float: it must be"),
        ("step", torch.tensor([1, 2]), r"'step' of parameter 0"),
        ("step", -5, "must be >= 0"),
    ],
)
def test_load_refuses_state_of_other_kinds(name, value, message):
    w = nn.Parameter(torch.ones(4))
    optimizer = bsam.BSAM([w], num_data=1000)
    optimizer.step(lambda: (w**2).sum())
    state = optimizer.state_dict()
    state["state"][0][name] = value
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)


def test_posterior_warns_for_groups_added_late():
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    optimizer = bsam.BSAM(model[0].parameters(), num_data=50, betas=(0.9, 0.5))
    loss = lambda: sum(layer(torch.ones(4, 3)).pow(2).mean() for layer in model)  # noqa: E731
    for _ in range(5):
        optimizer.step(loss)
    optimizer.add_param_group({"params": model[1].parameters()})
    optimizer.step(loss)
    with pytest.warns(UserWarning, match="after 1 steps 50%"):
        optimizer.posterior(model)


def test_numbers_of_numpy_and_numbers_too_large():
    w = nn.Parameter(torch.ones(2))
    assert bsam.BSAM([w], num_data=np.int64(50)).effective_num_data == 50
    with pytest.raises(ValueError, match="num_data"):
        bsam.BSAM([w], num_data=10**400)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_the_algebra_of_sgd_gives_its_steps_where_there_is_no_curvature(momentum, weight_decay):
    problem, twin = logistic(), logistic()
    still = {"rho": 0.0, "sample_noise": False, "sqrt_num_data": False, "max_grad_norm": None}
    ours = bsam.BSAM(
        problem.model.parameters(),
        lr=0.1 / (1 - momentum),
        num_data=40,
        weight_decay=weight_decay,
        betas=(momentum, 1 - 1e-15),  # s stays at 1
        damping=1 - weight_decay,
        **still,
    )
    sgd = torch.optim.SGD(twin.model.parameters(), 0.1, momentum, weight_decay=weight_decay)
    for _ in range(20):
        ours.step(problem.loss_fn, problem.x, problem.y)
        sgd.zero_grad()
        twin.loss_fn(twin.x, twin.y).backward()
        sgd.step()
    np.testing.assert_allclose(problem.weights(), twin.weights(), rtol=1e-10)


@pytest.mark.parametrize(
    ("num_data", "factor", "gamma"), [(20, 1, 1.0), (30, 1, 1.0), (120, 1, 0.25), (120, 2, 0.125), (5000, 1, 0.1)]
)
def test_the_default_damping_is_larger_with_few_data(num_data, factor, gamma):
    model = nn.Linear(2, 1)
    options = {"num_data": num_data, "augmentation_factor": factor, "weight_decay": 0.0, "max_noise": None}
    optimizer = bsam.BSAM(model.parameters(), betas=(0.9, 0.5), **options)
    assert optimizer.param_groups[0]["damping"] == pytest.approx(gamma)
    for _ in range(60):
        optimizer.step(lambda: 0.0 * model(torch.ones(1, 2)).sum())  # a flat loss: s falls to the damping
    sigma = optimizer.posterior(model).std["weight"]
    torch.testing.assert_close(sigma, torch.full_like(sigma, (num_data * factor * gamma) ** -0.5))
    assert sigma.max() <= 30**-0.5 * (1 + 1e-5) or num_data < 30
    given = bsam.BSAM(model.parameters(), damping=0.3, **options)
    assert given.param_groups[0]["damping"] == 0.3


def test_from_sgd_has_the_defaults_and_the_momentum():
    parameter = nn.Parameter(torch.ones(2))
    (expected,) = bsam.BSAM([parameter], num_data=1000, betas=(0.8, 0.99)).param_groups
    for lr, weight_decay in ((0.1, 5e-4), (0.003, 0.01)):
        (found,) = bsam.BSAM.from_sgd([parameter], lr, 0.8, weight_decay, num_data=1000).param_groups
        assert found == expected
    with pytest.raises(ValueError, match=r"momentum=1\.0 must lie in"):
        bsam.BSAM.from_sgd([parameter], 0.1, 1.0, num_data=1000)
    with pytest.raises(ValueError, match=r"lr=0 must be a finite number > 0"):
        bsam.BSAM.from_sgd([parameter], 0, num_data=1000)


def test_a_conversion_reads_sgd_as_torch_does():
    parameter = nn.Parameter(torch.ones(2))
    (line,) = torch.optim.SGD([parameter]).param_groups
    (found,) = bsam.BSAM.from_sgd([parameter], line["lr"], num_data=1000).param_groups
    assert found["betas"][0] == line["momentum"] == bsam.suggest(sgd={}, num_data=1000).settings["betas"][0]
    with pytest.raises(TypeError, match="params argument"):
        bsam.BSAM.from_sgd(parameter, 0.1, num_data=1000)


@pytest.mark.parametrize("convert", [bsam.BSAM.from_sgd, bsam.BSAM.from_adamw])
def test_a_conversion_takes_no_prior(convert):
    parameter = nn.Parameter(torch.ones(2))
    for params, further in (
        ([{"params": [parameter], "prior_precision": 7.0}], {}),
        ([parameter], {"prior_precision": 7.0}),
    ):
        with pytest.raises(ValueError, match="the conversion sets it"):
            convert(params, 0.1, num_data=100, **further)


def test_from_sgd_converts_the_rates_of_groups():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    groups = [{"params": [first], "lr": 0.01, "weight_decay": 0.0}, {"params": [second]}]
    optimizer = bsam.BSAM.from_sgd(groups, 0.1, 0.9, 1e-4, num_data=1000, rho=0.02)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 1.0])
    assert [group["prior_precision"] for group in optimizer.param_groups] == pytest.approx([0.0, 0.5])
    assert optimizer.defaults["rho"] == 0.02
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert optimizer.param_groups[2]["lr"] == pytest.approx(1.0)


def test_the_defaults_of_adamw_become_the_defaults():
    parameter = nn.Parameter(torch.ones(2))
    (line,) = torch.optim.AdamW([parameter]).param_groups
    given = {name: line[name] for name in ("lr", "betas", "weight_decay")}
    (expected,) = bsam.BSAM([parameter], num_data=1000).param_groups
    for optimizer in (
        bsam.BSAM.from_adamw([parameter], num_data=1000),
        bsam.BSAM.from_adamw([parameter], **given, num_data=1000),
    ):
        (found,) = optimizer.param_groups
        assert found.keys() == expected.keys()
        assert found["prior_precision"] == pytest.approx(expected["prior_precision"])
        assert all(found[name] == expected[name] for name in found if name != "prior_precision")


@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3, dtype=torch.float64)])
def test_from_adamw_converts_groups(lr):
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    groups = [{"params": [first], "weight_decay": 0.0, "lr": 16e-3}, {"params": [second]}]
    optimizer = bsam.BSAM.from_adamw(groups, lr, (0.8, 0.95), 0.1, num_data=1000, rho=0.02)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([2.0, 1.0])
    assert [group["prior_precision"] for group in optimizer.param_groups] == pytest.approx([0.0, 0.5])
    assert optimizer.defaults["betas"] == (0.8, 0.99)
    assert optimizer.defaults["rho"] == 0.02
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert float(optimizer.param_groups[2]["lr"]) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["BSAM", "VOGN", "IVON"])
def test_the_prior_may_be_given_as_weight_decay(name):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def make(groups, **given):
        options = {"num_data": 200, "augmentation_factor": 2.0, "module": model, **given}
        return getattr(bsam, name)(groups, **options)

    assert make(model.parameters(), weight_decay=0.01).param_groups[0]["prior_precision"] == pytest.approx(4.0)
    default = 5e-4 * 400 if name == "BSAM" else 25.0
    assert make(model.parameters()).param_groups[0]["prior_precision"] == pytest.approx(default)
    groups = [{"params": model[0].parameters(), "weight_decay": 0.0}, {"params": model[1].parameters()}]
    priors = [group["prior_precision"] for group in make(groups, weight_decay=0.01).param_groups]
    assert priors == pytest.approx([0.0, 4.0])
    assert "weight_decay" in groups[0]  # the user's own dictionary
    with pytest.raises(ValueError, match="say the same thing"):
        make(model.parameters(), weight_decay=0.01, prior_precision=4.0)
    with pytest.raises(ValueError, match="weight_decay=-1"):
        make([{"params": model.parameters(), "weight_decay": -1.0}])
