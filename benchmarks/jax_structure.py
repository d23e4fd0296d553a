"""A bSAM step with the structure of the authors' release, in JAX: one jitted step, vmap over the splits, loss read by
the host after every step. Written for this benchmark; ResNet-20-FRN, batch 128."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def conv(x: Any, p: dict[str, Any], stride: int) -> Any:
    y = lax.conv_general_dilated(x, p["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    y = y + p["b"]
    y = y * lax.rsqrt(jnp.mean(y**2, axis=(1, 2), keepdims=True) + 1e-6)
    return jnp.maximum(p["gamma"] * y + p["beta"], p["tau"])


def make_conv(key: Any, size: int, inputs: int, outputs: int) -> dict[str, Any]:
    w = jax.random.normal(key, (size, size, inputs, outputs)) * (2 / (size * size * inputs)) ** 0.5
    return {"w": w, "gamma": jnp.ones(outputs), **{name: jnp.zeros(outputs) for name in ("b", "beta", "tau")}}


def init(key: Any) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 64))
    params: dict[str, Any] = {"stem": make_conv(next(keys), 3, 3, 16)}
    for stage, (inputs, outputs) in enumerate(((16, 16), (16, 32), (32, 64))):
        for block in range(3):
            first = inputs if block == 0 else outputs
            params[f"{stage}{block}a"] = make_conv(next(keys), 3, first, outputs)
            params[f"{stage}{block}b"] = make_conv(next(keys), 3, outputs, outputs)
            if first != outputs:
                params[f"{stage}{block}s"] = make_conv(next(keys), 1, first, outputs)
    params["head"] = {"w": jax.random.normal(next(keys), (64, 9)) * 0.1, "b": jnp.zeros(9)}
    return params


def network(params: dict[str, Any], x: Any) -> Any:
    x = conv(x, params["stem"], 1)
    for stage in range(3):
        for block in range(3):
            stride = 2 if stage and not block else 1
            y = conv(conv(x, params[f"{stage}{block}a"], stride), params[f"{stage}{block}b"], 1)
            key = f"{stage}{block}s"
            x = y + (conv(x, params[key], stride) if key in params else x)
    logits = x.mean(axis=(1, 2)) @ params["head"]["w"] + params["head"]["b"]
    return jnp.pad(logits, ((0, 0), (0, 1)))


def loss(params: dict[str, Any], x: Any, y: Any) -> Any:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(network(params, x)), y[:, None], axis=1))


def make_step(splits: int, N: float = 50_000.0, lr: float = 0.1, rho: float = 0.01, delta: float = 5e-4) -> Any:
    tree = jax.tree_util.tree_map

    def step(state: Any, x: Any, y: Any) -> Any:
        omega, g_m, s, key = state
        key, *keys = jax.random.split(key, splits + 1)

        def one(key: Any, x: Any, y: Any) -> Any:
            leaves, structure = jax.tree_util.tree_flatten(omega)
            noises = jax.tree_util.tree_unflatten(structure, list(jax.random.split(key, len(leaves))))
            theta = tree(lambda w, p, k: w + jax.random.normal(k, w.shape) / jnp.sqrt(N * p), omega, s, noises)
            value, g = jax.value_and_grad(loss)(theta, x, y)
            g_eps = jax.grad(loss)(tree(lambda w, g, p: w + rho * g / p, omega, g, s), x, y)
            return value, g_eps, tree(lambda g, p: jnp.sqrt(p) * jnp.abs(g), g, s)

        parts = x.reshape(splits, -1, *x.shape[1:]), y.reshape(splits, -1)
        value, g_eps, h = tree(lambda t: t.mean(0), jax.vmap(one)(jnp.stack(keys), *parts))
        g_m = tree(lambda m, g, w: 0.9 * m + 0.1 * (g + delta * w), g_m, g_eps, omega)
        omega = tree(lambda w, m, p: w - lr * m / p, omega, g_m, s)
        s = tree(lambda p, h: 0.999 * p + 0.001 * (h + delta + 0.1), s, h)
        return (omega, g_m, s, key), value

    return jax.jit(step, donate_argnums=0)


def build(splits: int) -> Any:
    """A function that measures milliseconds a step, compiled."""
    tree = jax.tree_util.tree_map
    omega = init(jax.random.PRNGKey(0))
    state = omega, tree(jnp.zeros_like, omega), tree(jnp.ones_like, omega), jax.random.PRNGKey(1)
    x = jax.random.normal(jax.random.PRNGKey(2), (128, 32, 32, 3))
    y = jax.random.randint(jax.random.PRNGKey(3), (128,), 0, 10)
    step = make_step(splits)
    state, value = step(state, x, y)
    value.block_until_ready()
    held = [state]

    def milliseconds(read_loss: bool) -> float:
        begin = time.perf_counter()
        for _ in range(20):
            held[0], value = step(held[0], x, y)
            if read_loss:
                float(value)
        value.block_until_ready()
        return (time.perf_counter() - begin) / 20 * 1000

    def measure() -> dict[str, Any]:
        milliseconds(True)
        return {
            "splits": splits,
            "jax": jax.__version__,
            "device": str(jax.devices()[0]),
            "ms": min(milliseconds(False) for _ in range(3)),
            "ms_with_loss_read": min(milliseconds(True) for _ in range(3)),
        }

    return measure
