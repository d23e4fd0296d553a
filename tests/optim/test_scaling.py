"""Probes with a GradScaler, for every optimizer: scaled passes, true gradients, and overflows that the scaler sees."""

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from bsam.optim.scaling import Scaling
from tests.networks import assert_close
from tests.optim.contract import assert_same, batch, cross_entropy, network, snapshot, weights
from tests.optim.test_pending import everything, made, smooth
from tests.optimizers import METHODS, make

every_method = pytest.mark.parametrize("name", METHODS)


def single(name):
    return smooth(name, torch.float32)


def scaled_step(scaler, optimizer, loss_fn, *parts):
    for part in parts:
        optimizer.probe(loss_fn, *part, scaler=scaler)
    scaler.step(optimizer)
    scaler.update()


@every_method
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("vectorise", [True, False])
def test_a_scale_that_is_a_power_of_two_changes_nothing(name, splits, vectorise):
    vectorise = vectorise and not METHODS[name].per_example
    model, optimizer = made(name, single, steps=0, splits=splits, vectorise=vectorise)
    twin, plain = made(name, single, steps=0, splits=splits, vectorise=vectorise)
    scaler = GradScaler("cpu", init_scale=2.0**12)
    for seed in range(3):
        part = batch(8, seed=seed)
        loss = optimizer.probe(cross_entropy(model), *part, scaler=scaler)
        assert_same([p.grad / 2.0**12 for p in model.parameters()], gradients_of(plain, twin, part))
        scaler.step(optimizer)
        scaler.update()
        assert_same(plain.step(), loss)
        assert_same(everything(model, optimizer), everything(twin, plain))


def gradients_of(optimizer, model, part):
    optimizer.probe(cross_entropy(model), *part)
    return [p.grad for p in model.parameters()]


@every_method
def test_the_step_is_that_of_float32_to_the_rounding_of_float16(name):
    """With small gradients, which float16 alone would lose."""
    results = []
    for dtype in (None, torch.float16):
        model, optimizer = made(name, single, steps=0, vectorise=False)  # torch cannot vmap float16 on the CPU
        scaler = GradScaler("cpu", init_scale=2.0**14, enabled=dtype is not None)

        def loss_fn(x, y, model=model, dtype=dtype):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                outputs = model(x)
            return 1e-3 * nn.functional.cross_entropy(outputs.float(), y)

        for seed in range(4):
            scaled_step(scaler, optimizer, loss_fn, batch(8, seed=seed), batch(4, seed=seed + 10))
        assert optimizer.skipped_steps == 0
        results.append([weights(model), [p.grad for p in model.parameters()]])
    torch.testing.assert_close(results[0][0], results[1][0], rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0.05, atol=2e-6)
    assert not torch.equal(results[0][0][0], results[1][0][0])  # float16 was used


@every_method
def test_grad_is_scaled_until_unscale(name):
    model, optimizer = made(name, single)
    twin, plain = made(name, single, max_grad_norm=0.05)
    plain.load_state_dict({**optimizer.state_dict(), "param_groups": plain.state_dict()["param_groups"]})
    twin.load_state_dict(model.state_dict())
    scaler = GradScaler("cpu", init_scale=2.0**10)
    parts = [batch(8, seed=1), batch(4, seed=2)]
    for part in parts:
        optimizer.probe(cross_entropy(model), *part, scaler=scaler)
        plain.probe(cross_entropy(twin), *part)
        assert_close([p.grad / 2**10 for p in model.parameters()], [p.grad for p in twin.parameters()], tolerance=1e-6)
    with pytest.raises(RuntimeError, match=r"the gradients in .grad are scaled: call scaler.step\(optimizer\)"):
        optimizer.step()
    scaler.unscale_(optimizer)
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    with pytest.raises(RuntimeError, match=r"unscale_\(optimizer\) was called after a probe"):
        optimizer.probe(cross_entropy(model), *parts[0], scaler=scaler)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    scaler.step(optimizer)
    scaler.update()
    plain.step()
    torch.testing.assert_close(everything(model, optimizer), everything(twin, plain))


def overflowing(model, calls):
    """A loss function that overflows in the backward pass of some of its calls, counted over all calls."""
    count = 0

    def loss_fn(x, y):
        nonlocal count
        count += 1
        loss = cross_entropy(model)(x, y)
        if count in calls:
            model[3].bias.register_hook(lambda g, now=count: g * torch.inf if now == count else g)
        return loss

    return loss_fn


@every_method
@pytest.mark.parametrize("where", [1, 2, 3])
@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_an_overflow_in_any_pass_is_seen_by_the_scaler(name, where, unscales, nonfinite):
    """In the first or the second gradient of the first micro-batch, or in the second micro-batch."""
    model, optimizer = made(name, network, nonfinite=nonfinite, vectorise=False)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    before = snapshot(model, optimizer)
    loss_fn = overflowing(model, {min(where, 2 * METHODS[name].passes)})
    for seed in (1, 2):
        loss = optimizer.probe(loss_fn, *batch(8, seed=seed), scaler=scaler)
        assert loss.isfinite()
    finite = [bool(p.grad.isfinite().all()) for p in model.parameters()]
    assert not any(finite)  # of all parameters, wherever the overflow was
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert optimizer.skipped_steps == 1
    for parameter in model.parameters():
        parameter._backward_hooks = None
    after = snapshot(model, optimizer)  # nothing is pending: the state can be saved
    assert_same(after["state"], before["state"])
    assert_same(
        [after["model"][n] for n, _ in model.named_parameters()],
        [before["model"][n] for n, _ in model.named_parameters()],
    )
    assert all(b.isfinite().all() for b in model.buffers())
    scaled_step(scaler, optimizer, cross_entropy(model), batch(8, seed=3))
    assert optimizer.skipped_steps == 1
    assert not torch.equal(model[0].weight, before["model"]["0.weight"])


@every_method
def test_a_first_gradient_that_overflows_alone_is_seen(name):
    """Without a perturbation bSAM's second gradient is finite: only the averages show the overflow."""
    options = {"rho": 0.0} if "rho" in make(name, [nn.Parameter(torch.ones(1))]).defaults else {}
    model, optimizer = made(name, single, vectorise=False, **options)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    optimizer.probe(overflowing(model, {1}), *batch(8), scaler=scaler)
    assert not any(bool(p.grad.isfinite().all()) for p in model.parameters())


@every_method
def test_a_skipped_step_is_forgotten_at_the_next_probe_or_zero_grad(name):
    for act in ("probe", "zero_grad", "before update"):
        model, optimizer = made(name, single, vectorise=False)
        twin, plain = made(name, single, vectorise=False)
        scaler = GradScaler("cpu", init_scale=2.0**10)
        optimizer.probe(lambda x, y, m=model: cross_entropy(m)(x, y) * torch.inf, *batch(8, seed=1), scaler=scaler)
        scaler.step(optimizer)
        if act == "before update":
            optimizer.state_dict()
        scaler.update()
        if act == "zero_grad":
            optimizer.zero_grad()
        scaled_step(scaler, optimizer, cross_entropy(model), batch(8, seed=2))
        assert optimizer.skipped_steps == 1
        plain.step(cross_entropy(twin), *batch(8, seed=2))
        assert_same(everything(model, optimizer), everything(twin, plain))


@every_method
def test_kept_micro_batches_are_scaled_too(name):
    model, optimizer = made(name, single)
    twin, plain = made(name, single)
    scaler = GradScaler("cpu", init_scale=2.0**8)
    x, y = batch(12)
    first = optimizer.probe(cross_entropy(model), x[:4], y[:4], last=False, scaler=scaler)
    optimizer.probe(cross_entropy(model), x[4:], y[4:], scaler=scaler)
    scaler.step(optimizer)
    assert_same(plain.probe(cross_entropy(twin), x[:4], y[:4], last=False), first)
    plain.probe(cross_entropy(twin), x[4:], y[4:])
    plain.step()
    assert_same(everything(model, optimizer), everything(twin, plain))


@every_method
def test_a_scaler_that_is_not_enabled_does_nothing(name):
    model, optimizer = made(name, single)
    twin, plain = made(name, single)
    scaled_step(GradScaler("cpu", enabled=False), optimizer, cross_entropy(model), batch(8))
    plain.step(cross_entropy(twin), *batch(8))
    assert_same(everything(model, optimizer), everything(twin, plain))


# ---------------------------------------------------------------- what is refused


@every_method
@pytest.mark.parametrize("vectorise", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_a_closure_that_scales_by_itself_is_refused(name, vectorise, given):
    model, optimizer = made(name, single, splits=2, vectorise=vectorise)
    scaler = GradScaler("cpu")
    before = snapshot(model, optimizer)

    def scales(x, y):
        return scaler.scale(cross_entropy(model)(x, y))

    with pytest.raises(ValueError, match=r"the closure called scaler.scale\(\).*probe\(loss_fn, x, y, scaler=scaler\)"):
        optimizer.probe(scales, *batch(8), scaler=scaler if given else None)
    with pytest.raises(ValueError, match=r"the closure called scaler.scale\(\)"):
        optimizer.step(scales, *batch(8))
    assert_same(snapshot(model, optimizer), before)
    assert GradScaler.scale.__module__ == "torch.amp.grad_scaler"
    scaler.scale(torch.ones(()))


@every_method
def test_a_closure_that_calls_backward_is_refused_with_a_scaler(name):
    model, optimizer = made(name, single, vectorise=False)
    before = snapshot(model, optimizer)

    def calls_backward(x, y):
        loss = cross_entropy(model)(x, y)
        loss.backward()
        return loss

    with pytest.raises(ValueError, match=r"called backward\(\) itself, on a loss that is not scaled"):
        optimizer.probe(calls_backward, *batch(8), scaler=GradScaler("cpu"))
    assert_same(snapshot(model, optimizer), before)


@every_method
def test_a_scaler_that_the_probe_did_not_get_is_refused(name):
    for unscales in (True, False):
        model, optimizer = made(name, single)
        scaler = GradScaler("cpu")
        scaler.scale(torch.ones(()))
        optimizer.probe(cross_entropy(model), *batch(8))
        before = weights(model)
        if unscales:
            scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"optimizer.probe\(loss_fn, x, y, scaler=scaler\).*bfloat16"):
            scaler.step(optimizer)
        assert_same(weights(model), before)


@every_method
def test_all_probes_of_a_step_have_the_same_scaler(name):
    model, optimizer = made(name, single)
    scaler = GradScaler("cpu")
    for first, second in ((scaler, None), (None, scaler), (scaler, GradScaler("cpu"))):
        optimizer.probe(cross_entropy(model), *batch(8), scaler=first)
        with pytest.raises(ValueError, match="all probes of a step must have the same scaler=, or none"):
            optimizer.probe(cross_entropy(model), *batch(8), scaler=second)
        optimizer.discard()


def test_what_the_scaler_has_done():
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), GradScaler("cpu", init_scale=8.0)
    assert Scaling.of(None, [parameter]) is None
    assert Scaling.of(GradScaler("cpu", enabled=False), [parameter]) is None
    scaling = Scaling.of(scaler, [parameter])
    assert scaling.scale == 8
    assert scaling.inverse(parameter.device) == 1 / 8
    assert scaling.factor(torch.tensor(True)) == 8
    assert scaling.factor(torch.tensor(False)) == torch.inf
    assert_same(scaling.unscaled([torch.tensor(2.0)]), [torch.tensor(0.25)])
    parameter.grad = torch.ones(2)
    seen = [(scaling.is_unscaled(optimizer), scaling.is_over(optimizer))]
    for act in (lambda: scaler.unscale_(optimizer), lambda: scaler.step(optimizer), scaler.update):
        act()
        seen.append((scaling.is_unscaled(optimizer), scaling.is_over(optimizer)))
    assert seen == [(False, False), (True, False), (False, True), (False, True)]
