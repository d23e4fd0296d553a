"""Slow, literal transcriptions of the algorithms in NumPy, float64, on one flat vector of weights.

`gradient(weights, examples) -> (loss, gradient)` is the mean loss over some examples. Hyperparameters may be
vectors, one number a weight, which is what parameter groups are. Nothing here is shared with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

Gradient = Callable[[np.ndarray, np.ndarray], tuple[float, np.ndarray]]


def parts_of(minibatch, m):
    """Equally partition a minibatch; sizes differ by at most one, the longer ones first."""
    return np.array_split(minibatch, min(m, len(minibatch)))


def bsam(
    gradient: Gradient,
    omega: np.ndarray,
    minibatches: Iterable[np.ndarray],
    noise: Callable[[int, int], np.ndarray],
    *,
    alpha,
    beta1,
    beta2,
    rho,
    delta,
    gamma,
    N: float,
    m: int = 1,
    s_0: float = 1.0,
    mean_abs: bool = True,
    sampled=1.0,
    perturbed=1.0,
    from_sample: bool = True,
    sqrt_num_data: bool = False,
    prior: Callable[[np.ndarray], np.ndarray] = lambda omega: np.zeros_like(omega),
):
    """Algorithm 1, red boxes, with lines 3 to 6 replaced by the m-sharpness listing, rho restored in its line 5. Its
    line 6 is at theta_k + epsilon_k, or at omega + epsilon_k, as Algorithm 1 prints it; its line 8 may have the
    derivation's sqrt(N). Its line 3 may have a precision prior(omega) on top of N s. Yields (omega, s, g_m, loss) after
    each step; noise(t, k) is standard normal."""
    omega = omega.copy()
    s = np.full_like(omega, s_0)  # line 1
    g_m = np.zeros_like(omega)
    for t, minibatch in enumerate(minibatches):
        B = len(minibatch)
        g = np.zeros_like(omega)
        g_eps = np.zeros_like(omega)
        abs_g = np.zeros_like(omega)
        loss = 0.0
        for k, part in enumerate(parts_of(minibatch, m)):
            sigma = np.sqrt(1.0 / (N * s + prior(omega)))
            theta = omega + sampled * sigma * noise(t, k)  # line 3
            loss_k, g_k = gradient(theta, part)  # line 4
            eps_k = perturbed * rho * g_k / s  # line 5
            _, g_eps_k = gradient((theta if from_sample else omega) + eps_k, part)  # line 6
            g += len(part) / B * g_k
            abs_g += len(part) / B * np.abs(g_k)
            g_eps += len(part) / B * g_eps_k
            loss += len(part) / B * loss_k
        g_m = beta1 * g_m + (1 - beta1) * (g_eps + delta * omega)  # line 7
        h = (np.sqrt(N) if sqrt_num_data else 1.0) * np.sqrt(s) * (abs_g if mean_abs else np.abs(g))
        s = beta2 * s + (1 - beta2) * (h + delta + gamma)  # line 8
        omega = omega - alpha * g_m / s  # line 9
        yield omega.copy(), s.copy(), g_m.copy(), loss


def sam_gradient(gradient: Gradient, omega, minibatch, *, rho, m: int):
    """Lines 3 to 6, blue boxes, a perturbation for each of the m parts."""
    B = len(minibatch)
    g_eps, loss = np.zeros_like(omega), 0.0
    for part in parts_of(minibatch, m):
        loss_k, g_k = gradient(omega, part)  # lines 3, 4
        norm = np.sqrt(np.sum(g_k**2))
        eps_k = rho * g_k / norm if norm > 0 else np.zeros_like(g_k)  # line 5
        g_eps += len(part) / B * gradient(omega + eps_k, part)[1]  # line 6
        loss += len(part) / B * loss_k
    return g_eps, loss


def asam_sgd(
    gradient: Gradient, omega: np.ndarray, minibatches, *, alpha, beta1, rho, eta, delta, m: int = 1, perturbed=1.0
):
    """Kwon et al. (2021), Algorithm 1 with T = |w| + eta and p = 2, in SGD with a heavy ball. Yields (omega, loss)."""
    omega = omega.copy()
    g_m = np.zeros_like(omega)
    for minibatch in minibatches:
        g_eps, loss = np.zeros_like(omega), 0.0
        T = np.abs(omega) + eta
        for part in parts_of(minibatch, m):
            loss_k, g_k = gradient(omega, part)
            norm = np.sqrt(np.sum((perturbed * T * g_k) ** 2))
            eps_k = perturbed * rho * T**2 * g_k / norm if norm > 0 else np.zeros_like(g_k)
            g_eps += len(part) / len(minibatch) * gradient(omega + eps_k, part)[1]
            loss += len(part) / len(minibatch) * loss_k
        g_m = beta1 * g_m + g_eps + delta * omega
        omega = omega - alpha * g_m
        yield omega.copy(), loss


def sam_adam(
    gradient: Gradient,
    omega: np.ndarray,
    minibatches: Iterable[np.ndarray],
    *,
    alpha,
    beta1,
    beta2,
    rho,
    delta,
    gamma=1e-8,
    m: int = 1,
    bias_correction: bool = False,
):
    """Algorithm 1, blue boxes. As printed it has no bias correction; Adam (Kingma and Ba, 2015) has."""
    omega = omega.copy()
    s, g_m = np.zeros_like(omega), np.zeros_like(omega)  # line 1
    for t, minibatch in enumerate(minibatches, start=1):
        g_eps, loss = sam_gradient(gradient, omega, minibatch, rho=rho, m=m)
        g_m = beta1 * g_m + (1 - beta1) * (g_eps + delta * omega)  # line 7
        s = beta2 * s + (1 - beta2) * (g_eps + delta * omega) ** 2  # line 8
        first, second = (1 - beta1**t, 1 - beta2**t) if bias_correction else (1.0, 1.0)
        omega = omega - alpha * (g_m / first) / (np.sqrt(s / second) + gamma)  # line 9
        yield omega.copy(), loss


def sam_sgd(gradient: Gradient, omega: np.ndarray, minibatches, *, alpha, beta1, rho, delta, m: int = 1):
    """The same perturbed gradient in SGD with a heavy ball: g_m = beta1 g_m + g_eps + delta omega."""
    omega = omega.copy()
    g_m = np.zeros_like(omega)
    for minibatch in minibatches:
        g_eps, loss = sam_gradient(gradient, omega, minibatch, rho=rho, m=m)
        g_m = beta1 * g_m + g_eps + delta * omega
        omega = omega - alpha * g_m
        yield omega.copy(), loss


def vogn(
    gradient: Gradient,
    mu: np.ndarray,
    minibatches: Iterable[np.ndarray],
    noise: Callable[[int, int], np.ndarray],
    *,
    alpha,
    beta1,
    beta2,
    delta,
    gamma,
    N: float,
    m: int = 1,
    latest: bool = False,
    sampled=1.0,
):
    """Osawa et al. (2019), Algorithm 1, one weight sample for each of m parts, one example after another. Yields
    (mu, s, momentum, loss) after each step. The first step is not sampled, and its squares are the first s."""
    mu = mu.copy()
    momentum, s = np.zeros_like(mu), None
    for t, minibatch in enumerate(minibatches):
        gradients, losses = [], []
        for k, part in enumerate(parts_of(minibatch, m)):
            w = mu.copy()
            if s is not None:
                sigma = np.sqrt(1.0 / (N * (s + delta + gamma)))
                w = w + sampled * sigma * noise(t, k)
            for example in part:
                loss_i, g_i = gradient(w, np.array([example]))
                gradients.append(g_i)
                losses.append(loss_i)
        g_hat = sum(gradients) / len(minibatch)
        h_hat = sum(g_i**2 for g_i in gradients) / len(minibatch)
        momentum = beta1 * momentum + g_hat + delta * mu
        if s is None:
            s = h_hat
        elif latest:
            s = (1 - beta2) * s + beta2 * h_hat
        else:
            s = beta2 * s + (1 - beta2) * h_hat
        mu = mu - alpha * momentum / (s + delta + gamma)
        yield mu.copy(), s.copy(), momentum.copy(), sum(losses) / len(minibatch)


def ivon(
    gradient: Gradient,
    m: np.ndarray,
    minibatches: Iterable[np.ndarray],
    noise: Callable[[int, int], np.ndarray],
    *,
    alpha,
    beta1,
    beta2,
    delta,
    lambda_: float,
    h_0: float,
    parts: int = 1,
    clip=np.inf,
    sampled=1.0,
):
    """Shen et al. (2024), Algorithm 1, one weight sample for each of the parts. Yields (m, h, g, loss) after each step;
    noise(t, k) is standard normal, t from 0. Weights that are not sampled say nothing about h, which stays."""
    m = m.copy()
    g, h = np.zeros_like(m), np.full_like(m, h_0)
    for t, minibatch in enumerate(minibatches, start=1):
        g_hat, h_hat, loss = np.zeros_like(m), np.zeros_like(m), 0.0
        for k, part in enumerate(parts_of(minibatch, parts)):
            share = len(part) / len(minibatch)
            sigma = 1.0 / np.sqrt(lambda_ * (h + delta))
            theta = m + sampled * sigma * noise(t - 1, k)
            loss_k, g_k = gradient(theta, part)
            g_hat += share * g_k
            h_hat += share * g_k * (theta - m) / sigma**2
            loss += share * loss_k
        g = beta1 * g + (1 - beta1) * g_hat
        new_h = beta2 * h + (1 - beta2) * h_hat + (1 - beta2) ** 2 * (h - h_hat) ** 2 / (2 * (h + delta))
        h = np.where(sampled, new_h, h)
        g_bar = g / (1 - beta1**t)
        m = m - alpha * np.clip((g_bar + delta * m) / (h + delta), -clip, clip)
        yield m.copy(), h.copy(), g.copy(), loss
