"""Gradients of single examples: one by one, and all at once."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

import bsam
from bsam import gradients
from tests.optim import contract
from tests.optim.contract import cross_entropy


def network(dtype=torch.float64, seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def batch(size=10, dtype=torch.float64, seed=0):
    return contract.batch(size, dtype, seed)


def train(closure_of, steps=3, model=None, **options):
    model = network() if model is None else model
    optimizer = bsam.VOGN(model.parameters(), 0.05, module=model, num_data=100, splits=2, **options)
    losses = [optimizer.step(closure_of(model), *batch(seed=step)) for step in range(steps)]
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), torch.stack(losses)


def assert_close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_loop_is_vmap():
    assert_close(train(cross_entropy, vectorise=True), train(cross_entropy, vectorise=False))


@pytest.mark.parametrize("room", [0, 5 * 4000, 10**9])
def test_chunks_do_not_matter(room, monkeypatch):
    expected = train(cross_entropy, vectorise=True)
    monkeypatch.setattr(gradients, "_CPU_STACK_BYTES", room)
    assert_close(train(cross_entropy, vectorise=True), expected)


def test_the_loop_is_chosen_for_large_models_on_the_cpu(monkeypatch):
    calls = []
    vmap = torch.vmap
    monkeypatch.setattr(torch, "vmap", lambda *args, **kwargs: calls.append(1) or vmap(*args, **kwargs))
    train(cross_entropy)
    assert calls
    calls.clear()
    monkeypatch.setattr(gradients, "_LOOP_BYTES", 100)
    train(cross_entropy)
    assert not calls


def branching(model):
    def loss_fn(x, y):
        logits = model(x)
        return nn.functional.cross_entropy(logits if logits.sum() > 0 else 2 * logits, y)

    return loss_fn


def calls_backward(model):
    def loss_fn(x, y):
        loss = cross_entropy(model)(x, y)
        loss.backward()
        return loss

    return loss_fn


def returns_a_number(model):
    def loss_fn(x, y):
        loss = cross_entropy(model)(x, y)
        loss.backward()
        return loss.item()

    return loss_fn


def with_own_list(model):
    parameters = list(model.parameters())  # not looked up in the model when the loss is computed
    return lambda x, y: cross_entropy(model)(x, y) + 0.01 * sum((p**2).sum() for p in parameters)


def only_own_list(model):
    weight, bias = model[0].weight, model[0].bias
    model = nn.Sequential(*model[1:])
    return lambda x, y: cross_entropy(model)(x @ weight.T + bias, y)


@pytest.mark.parametrize(
    ("closure_of", "reason"),
    [
        (branching, "data-dependent control flow"),
        (calls_backward, "backward"),
        (returns_a_number, "item|backward"),
        (with_own_list, "did not look up"),
        (only_own_list, "did not look up"),
    ],
)
def test_where_vmap_fails_a_loop_gives_the_numbers(closure_of, reason):
    with pytest.warns(UserWarning, match=rf"one example at a time, because vmap failed with .*({reason})") as caught:
        weights, losses = train(closure_of)
    assert len(caught) == 1
    expected, expected_losses = train(closure_of, vectorise=False)
    assert torch.equal(weights, expected)
    torch.testing.assert_close(losses, expected_losses)
    with pytest.raises(RuntimeError, match=reason):
        train(closure_of, vectorise=True)


def test_an_own_list_has_the_gradient_it_should_have():
    def looked_up(model):
        return lambda x, y: cross_entropy(model)(x, y) + 0.01 * sum((p**2).sum() for p in model.parameters())

    assert_close(train(with_own_list, vectorise=False), train(looked_up, vectorise=True))


def test_a_failing_attempt_leaves_buffers_and_random_numbers_alone():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3, dtype=torch.float64)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.calls.add_(1)
            return nn.functional.dropout(self.layer(x), 0.5) if x.sum() < 100 else x

    def run(vectorise):
        torch.manual_seed(7)
        model = Noisy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weights, _ = train(cross_entropy, model=model, vectorise=vectorise)
        return weights, model.calls.item()

    (one, calls), (other, calls_2) = run(None), run(False)
    assert torch.equal(one, other)
    assert calls == calls_2 == 30


class Replacing(nn.Module):
    """Its forward puts another tensor in the place of a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(4, 3, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layer(x)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_buffer_that_forward_replaces_holds_a_tensor_of_torch(compiled):
    model = Replacing()
    optimizer = bsam.VOGN(model.parameters(), module=model, num_data=100, vectorise=True)
    mean = model.mean
    if compiled:
        step = bsam.TrainStep(optimizer, cross_entropy(model), batch(), compile=False)
        step(*batch())
    else:
        optimizer.step(cross_entropy(model), *batch())
        assert model.mean is mean
    assert torch.equal(copy.deepcopy(model).mean, torch.zeros(4, dtype=torch.float64))
    torch.save(model.state_dict(), io.BytesIO())


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_an_error_of_the_users_loss_is_raised_and_vmap_goes_on(call):
    """It comes once: a loop, which would get no error, must not be mistaken for the cure."""
    model = network()
    optimizer = bsam.VOGN(model.parameters(), module=model, num_data=100)
    before = [p.detach().clone() for p in model.parameters()]
    count = 0

    def failing(x, y):
        nonlocal count
        count += 1
        if count == call:
            raise RuntimeError("the file is gone")
        return cross_entropy(model)(x, y)

    if call > 3:  # the first step calls it three times: twice to look, once for all examples
        optimizer.step(failing, *batch())
        before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="the file is gone"):
        optimizer.step(failing, *batch())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    count = 100
    optimizer.step(failing, *batch())
    assert count < 100 + 12  # fewer calls than examples: it is still vmapped


def test_an_error_that_comes_every_time_is_the_users_too():
    model = network()
    optimizer = bsam.VOGN(model.parameters(), module=model, num_data=100)

    def failing(x, y):
        raise RuntimeError("always")

    with pytest.raises(RuntimeError, match="always"):
        optimizer.step(failing, *batch())
    count = 0

    def counting(x, y):
        nonlocal count
        count += 1
        return cross_entropy(model)(x, y)

    optimizer.step(counting, *batch())
    assert count < 12


def test_dropout_differs_between_examples():
    """With the same mask for all, the squares of equal examples would be the square of their mean."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(50, 1, bias=False))
    optimizer = bsam.VOGN(model.parameters(), module=model, num_data=10, vectorise=True)
    optimizer.step(lambda x: model(x).mean(), torch.ones(16, 50))
    weight = model[1].weight
    assert (optimizer.state[weight]["curvature"] > weight.grad**2 + 0.1).any()


def test_examples_are_batches_of_one_whatever_the_batch_looks_like():
    model = network()
    shapes = []

    def loss_fn(data, scale):
        shapes.append((tuple(data["x"].shape), tuple(data["more"][0].shape), data["more"][1]))
        return scale * nn.functional.cross_entropy(model(data["x"]), data["more"][0])

    x, y = batch(6)
    optimizer = bsam.VOGN(model.parameters(), module=model, num_data=100)
    loss = optimizer.step(loss_fn, {"x": x, "more": [y, "name"]}, torch.tensor(2.0))
    assert set(shapes) == {((1, 4), (1,), "name")}
    torch.testing.assert_close(loss, 2 * cross_entropy(network())(x, y))


@pytest.mark.parametrize("vectorise", [True, False])
def test_bfloat16_autocast_inside_and_around_give_the_same_numbers(vectorise):
    def run(inside, around):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))  # vmap cannot do LayerNorm so
        optimizer = bsam.VOGN(model.parameters(), 0.05, module=model, num_data=100, splits=2, vectorise=vectorise)

        def loss_fn(x, y):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside or around):
                return cross_entropy(model)(x, y)

        for step in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
                optimizer.step(loss_fn, *batch(dtype=torch.float32, seed=step))
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    inside, around, without = run(True, False), run(False, True), run(False, False)
    assert torch.equal(inside, around)
    assert not torch.equal(inside, without)  # autocast was on
    torch.testing.assert_close(inside, without, rtol=0.1, atol=0.05)


def test_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.first = nn.Linear(4, 4, bias=False, dtype=torch.float64)
            self.second = nn.Linear(4, 4, bias=False, dtype=torch.float64)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    assert_close(*(train(cross_entropy, model=Tied(), vectorise=v) for v in (True, False)))


def test_a_weight_whose_gradient_is_zero_is_not_unused():
    """The last layer starts at zero: no gradient passes through it, yet the prior acts on the layer before."""
    model = network()
    nn.init.zeros_(model[3].weight)
    before = model[0].weight.detach().clone()
    optimizer = bsam.VOGN(model.parameters(), 0.1, module=model, num_data=100, vectorise=True)
    optimizer.step(cross_entropy(model), *batch())
    assert torch.equal(model[0].weight.grad, torch.zeros_like(before))
    torch.testing.assert_close(model[0].weight, before - 0.1 * 0.25 * before / (0.25 + 0.01))


def test_a_head_that_is_used_later_is_trained_then():
    model = nn.ModuleDict({name: nn.Linear(4, 3, dtype=torch.float64) for name in "ab"})
    optimizer = bsam.VOGN(model.parameters(), 0.1, module=model, num_data=100, vectorise=True)
    starts = {name: layer.weight.detach().clone() for name, layer in model.items()}
    with pytest.warns(UserWarning, match="no gradient reached b.weight, b.bias"):
        optimizer.step(cross_entropy(model["a"]), *batch())
    assert torch.equal(model["b"].weight, starts["b"])
    after = model["a"].weight.detach().clone()
    with pytest.warns(UserWarning, match="no gradient reached a.weight, a.bias"):
        optimizer.step(cross_entropy(model["b"]), *batch())
    assert torch.equal(model["a"].weight, after)
    assert not torch.equal(model["b"].weight, starts["b"])


def test_errors_with_another_reason_than_torch_says_have_a_note():
    model, (x, y) = network(), batch(4)
    optimizer = bsam.BSAM(model.parameters(), num_data=100)
    loss = nn.functional.cross_entropy(model(x), y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        optimizer.step(lambda: loss)
    assert "the loss function must run the model itself" in caught.value.__notes__[0]

    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    optimizer = bsam.BSAM(model.parameters(), num_data=100, splits=4)
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        optimizer.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
    assert "fewer splits, or a loader with drop_last=True" in caught.value.__notes__[0]
