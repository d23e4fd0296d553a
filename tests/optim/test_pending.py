"""A step in two halves, for every optimizer: probes, what is pending between them, and the step that applies it."""

import copy
import pickle

import pytest
import torch
from torch import nn

from bsam.modules import BufferSnapshot
from bsam.optim.pending import Pending
from tests.networks import assert_close
from tests.optim.contract import assert_same, batch, cross_entropy, network, snapshot, weights
from tests.optimizers import METHODS, make

every_method = pytest.mark.parametrize("name", METHODS)


def smooth(name, dtype=torch.float64):
    """A network without BatchNorm: a batch and its halves have the same gradient."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def made(name, model=smooth, steps=2, **options):
    """A model and its optimizer after some steps, so that momenta and precisions are not at their start."""
    net = model(name)
    optimizer = make(name, net.parameters(), module=net, **options)
    for seed in range(steps):
        optimizer.step(cross_entropy(net), *batch(dtype=net[0].weight.dtype, seed=100 + seed))
    return net, optimizer


def everything(model, optimizer):
    return [weights(model), [p.grad for p in model.parameters()], optimizer.state_dict()["state"]]


@every_method
@pytest.mark.parametrize("how", ["in turn", "together"])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("sizes", [(6, 6), (7, 6), (4, 4, 4)])
def test_probes_of_the_parts_are_one_step_over_the_joined_batch(name, how, splits, sizes):
    """Micro-batches are further splits, with the same noise and the same perturbations."""
    together = how == "together" and not METHODS[name].per_example
    model, optimizer = made(name, splits=splits, steps=0, vectorise=together)
    twin, whole = made(name, splits=splits * len(sizes), steps=0, vectorise=False)
    for seed in range(3):
        x, y = batch(sum(sizes), torch.float64, seed)
        parts = zip(x.split(sizes), y.split(sizes), strict=True)
        losses = [optimizer.probe(cross_entropy(model), *part) for part in parts]
        mean, expected = optimizer.step(), whole.step(cross_entropy(twin), x, y)
        assert_close(mean, expected, tolerance=1e-12)
        assert_close(sum(n * each for n, each in zip(sizes, losses, strict=True)) / sum(sizes), mean, tolerance=1e-12)
        assert_close(everything(model, optimizer), everything(twin, whole), tolerance=1e-12)


@every_method
def test_a_single_probe_and_a_step_are_the_step_bit_for_bit(name):
    model, optimizer = made(name, network, splits=2)
    twin, whole = made(name, network, splits=2)
    for seed in range(3):
        loss = optimizer.probe(cross_entropy(model), *batch(seed=seed))
        assert_same(optimizer.step(), loss)
        assert_same(whole.step(cross_entropy(twin), *batch(seed=seed)), loss)
        assert_same(snapshot(model, optimizer), snapshot(twin, whole))


@every_method
def test_a_step_with_a_closure_after_probes_is_one_probe_more(name):
    model, optimizer = made(name)
    twin, other = made(name)
    for m, o in ((model, optimizer), (twin, other)):
        o.probe(cross_entropy(m), *batch(4, torch.float64, 1))
    optimizer.probe(cross_entropy(model), *batch(8, torch.float64, 2))
    assert_close(optimizer.step(), other.step(cross_entropy(twin), *batch(8, torch.float64, 2)))
    assert_close(everything(model, optimizer), everything(twin, other))


# ---------------------------------------------------------------- the gradient between the halves


@every_method
def test_grad_holds_the_mean_of_the_applied_gradients(name):
    model, optimizer = made(name)
    seen = []
    for seed, size in enumerate((4, 8)):
        twin, other = made(name)
        if seed:  # the second micro-batch has the noise of the second split
            other.probe(cross_entropy(twin), *batch(4, torch.float64, 0))
            first = [p.grad.clone() for p in twin.parameters()]
        other.probe(cross_entropy(twin), *batch(size, torch.float64, seed))
        seen.append([p.grad.clone() for p in twin.parameters()])
        optimizer.probe(cross_entropy(model), *batch(size, torch.float64, seed))
        assert_close([p.grad for p in model.parameters()], seen[-1])
    own = [(12 * both - 4 * one) / 8 for both, one in zip(seen[1], first, strict=True)]
    assert_close([(4 * a + 8 * b) / 12 for a, b in zip(first, own, strict=True)], seen[1])
    before = weights(model)
    optimizer.step()
    assert_close([p.grad for p in model.parameters()], seen[1])
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_from_outside_is_clipping_by_the_optimizer(name, dtype):
    model, optimizer = made(name, lambda name: smooth(name, dtype))
    twin, other = made(name, lambda name: smooth(name, dtype), max_grad_norm=0.05)
    other.load_state_dict({**optimizer.state_dict(), "param_groups": other.state_dict()["param_groups"]})
    twin.load_state_dict(model.state_dict())
    for seed in range(2):
        optimizer.probe(cross_entropy(model), *batch(seed=seed, dtype=dtype))
        other.probe(cross_entropy(twin), *batch(seed=seed, dtype=dtype))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert norm > 0.05
    optimizer.step()
    other.step()
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 0.02, "atol": 1e-3}
    for a, b in zip(everything(model, optimizer), everything(twin, other), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@every_method
@pytest.mark.parametrize("how", ["in place", "replaced", "through data"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_step_applies_what_is_in_grad(name, how, dtype):
    model, optimizer = made(name, lambda name: smooth(name, dtype))
    optimizer.probe(cross_entropy(model), *batch(dtype=dtype))
    for p in model.parameters():
        if how == "in place":
            p.grad.fill_(0.25)
        elif how == "replaced":
            p.grad = torch.full_like(p, 0.25)
        else:
            p.grad.data.fill_(0.25)
    optimizer.step()
    assert all(bool((p.grad == 0.25).all()) for p in model.parameters())
    if not METHODS[name].base and "momentum" in optimizer.state[model[3].bias]:
        twin, other = made(name, lambda name: smooth(name, dtype))
        other.probe(cross_entropy(twin), *batch(dtype=dtype))
        other.step()
        assert not torch.equal(optimizer.state[model[3].bias]["momentum"], other.state[twin[3].bias]["momentum"])


@every_method
def test_unchanged_gradients_of_16_bit_weights_are_not_rounded(name):
    results = []
    for halves in (True, False):
        model, optimizer = made(name, lambda name: smooth(name, torch.bfloat16))
        if halves:
            optimizer.probe(cross_entropy(model), *batch(dtype=torch.bfloat16))
            optimizer.step()
        else:
            optimizer.step(cross_entropy(model), *batch(dtype=torch.bfloat16))
        results.append(snapshot(model, optimizer))
    if not METHODS[name].base:  # a base optimizer gets the gradient in the type of the weights
        assert_same(*results)


@every_method
def test_a_gradient_that_is_set_to_none_is_skipped_as_torch_does(name):
    model, optimizer = made(name)
    optimizer.probe(cross_entropy(model), *batch(dtype=torch.float64))
    bias, before = model[3].bias, model[3].bias.detach().clone()
    bias.grad = None
    state = copy.deepcopy(optimizer.state[bias])
    optimizer._warned.update(range(9))  # "no gradient reached": it was taken away
    optimizer.step()
    assert torch.equal(bias, before)
    assert_same(optimizer.state[bias], state)
    assert model[3].weight.grad is not None


@every_method
def test_a_gradient_from_outside_that_is_not_finite_is_refused(name):
    model, optimizer = made(name)
    optimizer.probe(cross_entropy(model), *batch(dtype=torch.float64))
    model[3].bias.grad.fill_(torch.nan)
    before = weights(model)
    with pytest.raises(FloatingPointError, match=r"of 3.bias is not finite.*unchanged.*optimizer.discard\(\) drops"):
        optimizer.step()
    assert_same(weights(model), before)
    optimizer.discard()
    optimizer.step(cross_entropy(model), *batch(dtype=torch.float64))


# ---------------------------------------------------------------- weights of micro-batches


@every_method
def test_micro_batches_count_by_their_weight(name):
    model, optimizer = made(name)
    twin, other = made(name)
    parts = [batch(4, torch.float64, 1), batch(8, torch.float64, 2)]
    for part, weight in zip(parts, (4, torch.tensor(8.0)), strict=True):
        optimizer.probe(cross_entropy(model), *part, weight=weight)
        other.probe(cross_entropy(twin), *part)
    assert_same(optimizer.step(), other.step())
    assert_same(everything(model, optimizer), everything(twin, other))
    optimizer.probe(cross_entropy(model), *parts[0], weight=3.0)
    optimizer.probe(cross_entropy(model), *parts[1], weight=1.0)
    losses = [other.probe(cross_entropy(twin), *part) for part in parts]
    assert_close(optimizer.step(), (3 * losses[0] + losses[1]) / 4)


@every_method
def test_with_a_weight_tensors_may_differ_in_length(name):
    """As those of texts with images. Methods that differentiate each example need examples."""
    model, optimizer = made(name)
    twin, other = made(name)
    x, y = batch(4, torch.float64)
    images = torch.ones(7, 2)

    def loss_fn(x, y, images):
        return cross_entropy(model)(x, y)

    with pytest.raises(ValueError, match=r"different lengths \[4, 4, 7\].* weight=\.\.\."):
        optimizer.probe(loss_fn, x, y, images)
    if METHODS[name].per_example:
        with pytest.raises(ValueError, match="different lengths"):
            optimizer.probe(loss_fn, x, y, images, weight=4)
        return
    for _ in range(2):
        optimizer.probe(loss_fn, x, y, images, weight=4)
        other.probe(cross_entropy(twin), x, y)
    assert_same(optimizer.step(), other.step())
    assert_same(everything(model, optimizer), everything(twin, other))


@every_method
@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), torch.ones(2)])
def test_weights_that_are_no_weights(name, weight):
    model, optimizer = made(name)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="weight"):
        optimizer.probe(cross_entropy(model), *batch(dtype=torch.float64), weight=weight)
    assert_same(snapshot(model, optimizer), before)


# ---------------------------------------------------------------- failures


@every_method
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("last", [True, False])
def test_a_failing_probe_leaves_what_earlier_ones_left(name, error, last):
    model, optimizer = made(name, network)
    twin, other = made(name, network)
    for m, o in ((model, optimizer), (twin, other)):
        o.probe(cross_entropy(m), *batch(seed=1))
    for call in range(1, METHODS[name].passes + 1) if last else (1,):
        before = [weights(model), list(model.buffers()), [p.grad.clone() for p in model.parameters()]]
        before = copy.deepcopy(before)
        grads, count = [p.grad for p in model.parameters()], 0

        def failing(x, y, call=call):
            nonlocal count
            count += 1
            if count == call:
                raise error("stop")
            return cross_entropy(model)(x, y)

        with pytest.raises(error):
            optimizer.probe(failing, *batch(seed=2), last=last)
        assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
        assert_same([weights(model), list(model.buffers()), [p.grad for p in model.parameters()]], before)
    for m, o in ((model, optimizer), (twin, other)):
        o.probe(cross_entropy(m), *batch(seed=2))
        o.step()
    assert_same(snapshot(model, optimizer), snapshot(twin, other))


@every_method
def test_a_probe_that_is_not_finite_raises_and_leaves_no_trace(name):
    model, optimizer = made(name, network)
    twin, other = made(name, network)
    for m, o in ((model, optimizer), (twin, other)):
        o.probe(cross_entropy(m), *batch(seed=1))
    with pytest.raises(FloatingPointError, match="loss of pass 1 is nan"):
        optimizer.probe(lambda x, y: cross_entropy(model)(x, y) * torch.nan, *batch(seed=2))
    for m, o in ((model, optimizer), (twin, other)):
        o.probe(cross_entropy(m), *batch(seed=2))
        o.step()
    assert_same(snapshot(model, optimizer), snapshot(twin, other))


@every_method
def test_a_step_is_skipped_if_any_of_its_probes_is_not_finite(name):
    model, optimizer = made(name, network, nonfinite="skip")
    before = snapshot(model, optimizer)
    for factor in (1.0, torch.nan, 1.0):
        optimizer.probe(lambda x, y, factor=factor: cross_entropy(model)(x, y) * factor, *batch(seed=1))
    optimizer.step()
    after = snapshot(model, optimizer)
    assert_same([after["model"], after["state"]], [before["model"], before["state"]])
    assert optimizer.skipped_steps == 1
    optimizer.step(cross_entropy(model), *batch())
    assert optimizer.skipped_steps == 1


@every_method
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_a_failing_step_keeps_the_pending_probes(name, max_grad_norm, monkeypatch):
    model, optimizer = made(name, network, max_grad_norm=max_grad_norm)
    twin, other = made(name, network, max_grad_norm=max_grad_norm)
    for m, o in ((model, optimizer), (twin, other)):
        o.probe(cross_entropy(m), *batch(seed=1))
    before = copy.deepcopy([weights(model), list(model.buffers()), [p.grad for p in model.parameters()]])

    base = optimizer.base_optimizer
    update = type(optimizer)._update

    def failing(*arguments, **statistics):
        if base is not None:
            next(model.parameters()).add_(1)  # torch's optimizers write one parameter after the other
        elif arguments[1].index == 0:
            return update(*arguments, **statistics)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(*((type(optimizer), "_update") if base is None else (type(base), "step")), failing)
        for arguments in ((), (cross_entropy(model), *batch(seed=2))):  # the second: a step that is a probe too
            with pytest.raises(RuntimeError, match="out of memory"):
                optimizer.step(*arguments)
            now = [weights(model), list(model.buffers()), [p.grad for p in model.parameters()]]
            assert_same(now, before)
    optimizer.step()
    other.step()
    assert_same(snapshot(model, optimizer), snapshot(twin, other))


# ---------------------------------------------------------------- dropping, and what is refused in between


@every_method
@pytest.mark.parametrize("how", ["discard", "zero_grad", "zeros", "model.zero_grad", "load"])
@pytest.mark.parametrize("last", [True, False])
def test_pending_probes_can_be_dropped(name, how, last):
    if how == "model.zero_grad" and not last:
        pytest.skip("there are no gradients to clear")
    model, optimizer = made(name)
    twin, other = made(name)
    optimizer.zero_grad()
    state = optimizer.state_dict()
    optimizer.probe(cross_entropy(model), *batch(4, torch.float64, 1), last=last)
    drop = {
        "discard": optimizer.discard,
        "zero_grad": optimizer.zero_grad,
        "zeros": lambda: optimizer.zero_grad(set_to_none=False),
        "model.zero_grad": model.zero_grad,
        "load": lambda: optimizer.load_state_dict(state),
    }
    drop[how]()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(TypeError, match="needs a closure, or a probe before it"):
        optimizer.step()
    for m, o in ((model, optimizer), (twin, other)):
        o.step(cross_entropy(m), *batch(dtype=torch.float64, seed=2))
    assert_same(snapshot(model, optimizer), snapshot(twin, other))


@every_method
def test_nothing_is_saved_or_copied_while_probes_are_pending(name):
    model, optimizer = made(name)
    for last in (True, False):
        optimizer.probe(cross_entropy(model), *batch(dtype=torch.float64), last=last)
        for act in (optimizer.state_dict, lambda: copy.deepcopy(optimizer), lambda: pickle.dumps(optimizer)):
            with pytest.raises(RuntimeError, match=r"while probes are pending: .*step\(\), or .*discard\(\)"):
                act()
        optimizer.discard()
    optimizer.probe(cross_entropy(model), *batch(dtype=torch.float64))
    optimizer.step()
    optimizer.state_dict()


@every_method
def test_a_closure_may_clear_gradients_in_a_further_probe(name):
    """`zero_grad()` before `backward()` is torch's convention: it does not drop the earlier probes."""
    model, optimizer = made(name, vectorise=False)
    twin, other = made(name, vectorise=False)

    def closure(x, y):
        optimizer.zero_grad()
        loss = cross_entropy(model)(x, y)
        loss.backward()
        return loss

    for seed in (1, 2):
        optimizer.probe(closure, *batch(dtype=torch.float64, seed=seed))
        other.probe(cross_entropy(twin), *batch(dtype=torch.float64, seed=seed))
    optimizer.step()
    other.step()
    assert_same(everything(model, optimizer), everything(twin, other))


@every_method
def test_no_half_of_a_step_runs_inside_another(name):
    model, optimizer = made(name)
    for inner in (
        lambda x, y: optimizer.probe(cross_entropy(model), x, y),
        lambda x, y: optimizer.step(),
        lambda x, y: optimizer.discard(),
    ):
        with pytest.raises(RuntimeError, match="inside a step"):
            optimizer.probe(inner, *batch(dtype=torch.float64))
    optimizer.step(cross_entropy(model), *batch(dtype=torch.float64))


@every_method
def test_parameters_may_not_change_between_the_halves(name):
    model, optimizer = made(name)
    optimizer.probe(cross_entropy(model), *batch(dtype=torch.float64))
    model[0].weight.requires_grad_(False)
    for act in (optimizer.step, lambda: optimizer.probe(cross_entropy(model), *batch(dtype=torch.float64))):
        with pytest.raises(RuntimeError, match=r"the trained parameters changed after a probe.*discard\(\)"):
            act()
    model[0].weight.requires_grad_(True)
    optimizer.step()


@every_method
def test_gradients_from_before_the_first_probe_are_refused(name):
    model, optimizer = made(name)
    optimizer.zero_grad()
    cross_entropy(model)(*batch(dtype=torch.float64)).backward()
    with pytest.raises(RuntimeError, match=r"no step left there.*optimizer.probe\(loss_fn, x, y\)"):
        optimizer.probe(cross_entropy(model), *batch(dtype=torch.float64))


@every_method
def test_step_hooks_run_around_the_second_half(name):
    model, optimizer = made(name)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.probe(cross_entropy(model), *batch(dtype=torch.float64))
    assert calls == []
    optimizer.step()
    assert calls == ["pre", "post"]


@every_method
def test_an_unused_parameter_is_named_after_the_step(name):
    model = smooth(name)
    model.register_parameter("unused", nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    optimizer = make(name, model.parameters(), module=model)
    for seed in range(2):
        optimizer.probe(cross_entropy(model), *batch(dtype=torch.float64, seed=seed))
    assert model.unused.grad is None
    with pytest.warns(UserWarning, match="no gradient reached unused") as warned:
        optimizer.step()
    assert warned[0].filename == __file__


@every_method
def test_a_parameter_that_one_micro_batch_reaches_has_zeros_in_the_other(name):
    def closure(model):
        return lambda x, y: cross_entropy(model)(x, y) + (model.rare.sum() if bool((y == 0).all()) else 0.0)

    def net(name):
        model = smooth(name)
        model.rare = nn.Parameter(torch.ones(2, dtype=torch.float64))
        return model

    for order in (1, -1):
        model, optimizer = made(name, net, steps=0, vectorise=False)
        parts = [(x, torch.full_like(y, label)) for label, (x, y) in enumerate([batch(4, torch.float64)] * 2)][::order]
        for part in parts:
            optimizer.probe(closure(model), *part)
        assert_close(model.rare.grad, torch.full((2,), 0.5, dtype=torch.float64))
        optimizer.step()
        assert not torch.equal(model.rare, torch.ones(2, dtype=torch.float64))


# ---------------------------------------------------------------- BatchNorm


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.per_example])
@pytest.mark.parametrize("policy", ["first_split", "first_pass", "all", "none"])
@pytest.mark.parametrize("how", ["in turn", "together"])
def test_running_statistics_move_as_in_a_step_with_more_splits(name, policy, how):
    if how == "together" and policy in ("first_pass", "all"):
        pytest.skip("these policies need the loop")

    def normalised(name):
        torch.manual_seed(5)  # before BatchNorm a bias has no gradient but rounding
        return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()

    halves, whole = (
        made(name, normalised, steps=0, splits=splits, batch_norm=policy, vectorise=vectorise)
        for splits, vectorise in ((2, how == "together"), (4, False))
    )
    (model, optimizer), (twin, other) = halves, whole
    for seed in range(2):
        x, y = batch(16, torch.float64, seed)
        optimizer.probe(cross_entropy(model), x[:8], y[:8])
        optimizer.probe(cross_entropy(model), x[8:], y[8:])
        optimizer.step()
        other.step(cross_entropy(twin), x, y)
        assert_close(model.state_dict(), twin.state_dict())


# ---------------------------------------------------------------- what is pending, by itself


def pending(*grads):
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    losses = [torch.tensor(1.0)]
    return Pending(parameters, BufferSnapshot(())).joined((losses, {"gradient": list(grads)}), 2.0, [True] * len(grads))


def test_joining_makes_a_new_object_and_leaves_the_old_one():
    one = pending(torch.ones(3))
    both = one.joined(([torch.tensor(4.0)], {"gradient": [torch.full((3,), 4.0)]}), 1.0, [True])
    assert both.weight == 3.0
    assert both.num_probes == 2
    assert_close(both.probed, ([torch.tensor(2.0)], {"gradient": [torch.full((3,), 2.0)]}))
    assert_same(one.probed[1]["gradient"], [torch.ones(3)])


def test_gradients_that_were_cleared():
    one = pending(torch.ones(3), torch.ones(2))
    one.parameters[0].grad = None
    assert not one.is_cleared()
    assert_same(one.as_in_grad().probed[1]["gradient"], [torch.zeros(3), torch.ones(2)])
    one.parameters[1].grad = None
    assert one.is_cleared()


def test_gradients_that_are_views_are_copied():
    whole = torch.ones(5)
    one = pending(whole[:3], torch.ones(2))
    owned = one.owned().probed[1]["gradient"]
    whole.zero_()
    assert_same(owned, [torch.ones(3), torch.ones(2)])
    assert owned[1] is one.probed[1]["gradient"][1]
