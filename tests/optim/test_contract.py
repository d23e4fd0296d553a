"""What every optimizer of this package promises. A new one is one entry in tests/optimizers.py.

Covers, besides our own promises, what the tests of PyTorch's test/test_optim.py ask for by name;
tests/pytorch_suite.py runs that file itself.
"""

import copy
import inspect
import io
import pickle
import warnings
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import MutableMapping
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import bsam
from tests.extragradient import Extragradient
from tests.forked import call
from tests.optim.contract import assert_same, batch, cross_entropy, network, snapshot, take_step, trained, weights
from tests.optimizers import METHODS, make
from tests.problems import holding

pytestmark = pytest.mark.parametrize("name", METHODS)


def test_every_exported_optimizer_is_here(name):
    exported = {
        value for value in vars(bsam).values() if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
    }
    here = {type(make(each, [nn.Parameter(torch.ones(1))])) for each in METHODS}
    assert exported == here - {Extragradient}


def test_it_trains(name):
    model = network(name)
    optimizer = make(name, model.parameters(), splits=2, module=model)
    x, _ = batch(48)
    y = x[:, :3].argmax(1)
    first = optimizer.step(cross_entropy(model), x, y)
    for _ in range(60):
        last = optimizer.step(cross_entropy(model), x, y)
    assert last < 0.7 * first


def test_no_step_is_taken_while_a_posterior_has_its_sample_in_the_model(name):
    model = network(name)
    optimizer = make(name, model.parameters(), module=model)
    x, y = batch()
    optimizer.step(cross_entropy(model), x, y)
    posterior = bsam.DiagonalGaussian.from_model(model, {p: torch.ones_like(p) for p in model.parameters()})
    before = snapshot(model, optimizer)
    with posterior.sampled(model, torch.Generator()), posterior.sampled(model, torch.Generator()):
        with pytest.raises(RuntimeError, match=r"cannot take a step inside posterior.sampled\(\)"):
            optimizer.step(cross_entropy(model), x, y)
        with pytest.raises(RuntimeError, match=r"cannot take the posterior inside posterior.sampled\(\)"):
            optimizer.posterior(model)
        other = network(name)
        make(name, other.parameters(), module=other).step(cross_entropy(other), x, y)
    assert_same(snapshot(model, optimizer), before)
    optimizer.step(cross_entropy(model), x, y)


# ---------------------------------------------------------------- promise 1: completes, or changes nothing


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("call", [1, 2, 3, -1])
def test_an_exception_in_the_closure_changes_nothing(name, error, call):
    call %= 3 * METHODS[name].passes + 1
    model, twin = network(name), network(name)
    optimizer, other = (make(name, m.parameters(), splits=3, module=m) for m in (model, twin))
    x, y = batch()
    for m, o in ((model, optimizer), (twin, other)):
        o.step(cross_entropy(m), x, y)
    before, grads = snapshot(model, optimizer), [p.grad for p in model.parameters()]
    count = 0

    def failing(x, y):
        nonlocal count
        count += 1
        loss = cross_entropy(model)(x, y)
        if count == call:
            raise error("stop")
        return loss

    with pytest.raises(error):
        optimizer.step(failing, x, y)
    assert count == call
    assert_same(snapshot(model, optimizer), before)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    optimizer.step(cross_entropy(model), x, y)  # and the next step is the one an undisturbed optimizer takes
    other.step(cross_entropy(twin), x, y)
    assert_same(snapshot(model, optimizer), snapshot(twin, other))


def test_a_failing_first_step_leaves_no_state(name):
    w = nn.Parameter(torch.ones(2))
    optimizer = make(name, [w])

    def failing():
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        take_step(optimizer, failing)
    assert len(optimizer.state) == 0
    assert w.grad is None


@pytest.mark.parametrize(
    ("closure", "error", "message"),
    [
        (None, TypeError, "needs a closure"),
        (lambda w: None, TypeError, "returned NoneType: it must return the loss"),
        (lambda w: w * 2, ValueError, r"shape \(3,\): it must return one number"),
        (lambda w: "loss", TypeError, "returned str"),
    ],
)
def test_closures_that_are_no_closures(name, closure, error, message):
    w = nn.Parameter(torch.ones(3))
    optimizer = make(name, [w])
    with pytest.raises(error, match=message):
        take_step(optimizer, None if closure is None else lambda: closure(w))
    assert torch.equal(w, torch.ones(3))
    assert len(optimizer.state) == 0


def test_a_loss_in_the_place_of_its_function_is_refused(name):
    w = nn.Parameter(torch.ones(3))
    optimizer = make(name, [w])
    loss = w.sum()
    for take in (optimizer.step, optimizer.probe):
        with pytest.raises(TypeError, match="is of type Tensor, which cannot be called: give the function"):
            take(loss)
    assert torch.equal(w, torch.ones(3))


def test_a_loss_without_a_graph_trains_nothing_and_says_so(name):
    model = network(name)
    optimizer = make(name, model.parameters(), module=model)
    with pytest.warns(UserWarning, match=r"no gradient reached .* So nothing is trained: loss_fn must run the model"):
        optimizer.step(lambda x, y: cross_entropy(model)(x, y).detach(), *batch())


def test_a_warning_that_is_an_error_comes_after_the_step(name):
    model = network(name)
    model.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    optimizer = make(name, model.parameters(), module=model)
    before = weights(model)
    with pytest.raises(UserWarning, match="no gradient reached unused"):  # warnings are errors here
        optimizer.step(cross_entropy(model), *batch())
    assert not torch.equal(model[0].weight, before[0])  # the step is whole
    assert len(optimizer.state) == len(before) - 1


def test_a_failing_update_restores_weights_gradients_and_buffers(name, monkeypatch):
    model = network(name)
    optimizer = make(name, model.parameters(), module=model)
    optimizer.step(cross_entropy(model), *batch())
    before = snapshot(model, optimizer)

    def failing(*arguments, **statistics):
        next(model.parameters()).add_(1)
        raise RuntimeError("out of memory")

    base = optimizer.base_optimizer
    monkeypatch.setattr(*((type(optimizer), "_update") if base is None else (type(base), "step")), failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(cross_entropy(model), *batch())
    assert_same(snapshot(model, optimizer), before)


def test_an_update_that_fails_half_way_changes_nothing(name, monkeypatch):
    """The formulas of the second group raise; those of the first are good."""
    model = network(name)
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters()}]
    optimizer = make(name, groups, module=model, **({"foreach": False} if METHODS[name].base else {}))
    update = optimizer._update

    def fails(slot, **averages):
        if slot.group is optimizer.param_groups[1]:
            raise RuntimeError("no memory")
        return update(slot, **averages)

    for steps in (0, 1):
        gaussian, with_base = METHODS[name].gaussian, METHODS[name].base
        bad = {} if gaussian else {"weight_decay" if with_base else "momentum": "heavy"}
        good = {key: optimizer.param_groups[1][key] for key in bad}
        before, addresses = (
            snapshot(model, optimizer),
            [s.data_ptr() for p in optimizer.state.values() for s in p.values()],
        )
        optimizer.param_groups[1].update(bad)
        with monkeypatch.context() as patch:
            if gaussian:
                patch.setattr(optimizer, "_update", fails)
            with pytest.raises((TypeError, RuntimeError)):
                optimizer.step(cross_entropy(model), *batch())
        optimizer.param_groups[1].update(good)
        assert_same(snapshot(model, optimizer), before)
        assert [s.data_ptr() for p in optimizer.state.values() for s in p.values()] == addresses
        assert len(optimizer.state) == 4 * steps
        optimizer.step(cross_entropy(model), *batch())


def test_gradients_of_the_rest_of_the_module_come_back_too(name):
    model = network(name)
    optimizer = make(name, model[-1].parameters(), module=model)
    with pytest.raises(FloatingPointError):
        optimizer.step(lambda x, y: cross_entropy(model)(x, y) * float("nan"), *batch())
    assert all(p.grad is None for p in model.parameters())


def test_parameters_foreign_to_the_module_are_refused_later_too(name):
    model = network(name)
    optimizer = make(name, model.parameters(), module=model)
    with pytest.raises(ValueError, match="do not belong to module"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 1


def test_a_batch_is_never_written_to(name):
    class Shared(MutableMapping):
        def __init__(self, data):
            self.data = data

        __getitem__ = lambda self, key: self.data[key]  # noqa: E731
        __setitem__ = lambda self, key, value: self.data.__setitem__(key, value)  # noqa: E731
        __delitem__ = lambda self, key: self.data.__delitem__(key)  # noqa: E731
        __iter__ = lambda self: iter(self.data)  # noqa: E731
        __len__ = lambda self: len(self.data)  # noqa: E731

    model = network(name)
    x, y = batch()
    for mapping in (Shared({"x": x, "y": y}), MappingProxyType({"x": x, "y": y})):
        optimizer = make(name, model.parameters(), splits=2, module=model)
        optimizer.step(lambda b: cross_entropy(model)(b["x"], b["y"]), mapping)
        assert mapping["x"] is x


# ---------------------------------------------------------------- promise 2: nothing that is not finite gets in


def poisoned(model, where, value, calls):
    """A loss function that returns a loss or makes a gradient of `value` in one of its calls."""
    loss_fn, count = cross_entropy(model), 0

    def closure(x, y):
        nonlocal count
        count += 1
        loss = loss_fn(x, y)
        if count in calls:
            if where == "loss":
                return loss * value
            first = next(iter(model.parameters()))
            loss = loss + torch.where(torch.tensor(False), value * first.sum(), torch.tensor(0.0))  # 0, gradient 0
            first.register_hook(lambda g: g * value if count in calls else g)
        return loss

    return closure


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("call", [1, 2, -2, -1])
def test_nonfinite_numbers_are_refused(name, where, value, call):
    call %= 3 * METHODS[name].passes + 1
    model = network(name)
    optimizer = make(name, model.parameters(), splits=3, module=model)
    x, y = batch()
    optimizer.step(cross_entropy(model), x, y)
    before = snapshot(model, optimizer)
    with pytest.raises(FloatingPointError, match=r"Weights and state are unchanged.*nonfinite='skip'"):
        optimizer.step(poisoned(model, where, value, {call}), x, y)
    assert_same(snapshot(model, optimizer), before)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("call", [1, 2, -1])
def test_nonfinite_steps_can_be_skipped(name, where, call):
    call %= 3 * METHODS[name].passes + 1
    model = network(name)
    optimizer = make(name, model.parameters(), splits=3, module=model, nonfinite="skip")
    x, y = batch()
    optimizer.step(cross_entropy(model), x, y)
    before = snapshot(model, optimizer)
    assert optimizer.skipped_steps == 0
    optimizer.step(poisoned(model, where, float("nan"), {call}), x, y)
    after = snapshot(model, optimizer)
    assert_same({**after, "grads": None}, {**before, "grads": None})
    assert optimizer.skipped_steps == 1
    optimizer.step(poisoned(model, where, float("inf"), {call}), x, y)
    assert optimizer.skipped_steps == 2
    for p in model.parameters():
        p._backward_hooks = None
    optimizer.step(cross_entropy(model), x, y)
    assert optimizer.skipped_steps == 2
    assert all(p.isfinite().all() for p in model.parameters())
    assert not torch.equal(model[0].weight, before["model"]["0.weight"])


def test_a_first_step_that_is_skipped_leaves_no_state(name):
    model = network(name)
    optimizer = make(name, model.parameters(), module=model, nonfinite="skip")
    optimizer.step(lambda x, y: cross_entropy(model)(x, y) * float("nan"), *batch())
    assert optimizer.skipped_steps == 1
    assert len(optimizer.state) == 0
    optimizer.step(cross_entropy(model), *batch())
    assert len(optimizer.state) == 6


def test_skipping_changes_no_good_step(name):
    models = [network(name), network(name)]
    for model, mode in zip(models, ["raise", "skip"], strict=True):
        optimizer = make(name, model.parameters(), module=model, nonfinite=mode)
        for seed in range(5):
            optimizer.step(cross_entropy(model), *batch(seed=seed))
    assert_same(models[0].state_dict(), models[1].state_dict())


def test_the_message_names_the_parameter(name):
    model = network(name)
    optimizer = make(name, model.named_parameters())
    passes = iter([1.0] * (METHODS[name].passes - 1) + [float("nan")])
    hook = model[3].bias.register_hook(lambda g: g * next(passes, float("nan")))
    with pytest.raises(FloatingPointError, match=r"the gradient of 3\.bias is not finite"):
        optimizer.step(cross_entropy(model), *batch())
    hook.remove()
    with pytest.raises(
        FloatingPointError, match=r"loss of pass 1 is nan; .* of 0\.weight, 0\.bias, 1\.weight and 3 more"
    ):
        optimizer.step(lambda x, y: cross_entropy(model)(x, y) * float("nan"), *batch())


# ---------------------------------------------------------------- promise 3: resume


def train_and_save(name, path, start, stop):
    """Steps `start` to `stop`, from what is saved at `path` unless they are the first; then save there."""
    model = network(name)
    optimizer = make(name, model.parameters(), splits=2, module=model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    if start:
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    for step in range(start, stop):
        optimizer.step(cross_entropy(model), *batch(seed=step))
        scheduler.step()
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({key: part.state_dict() for key, part in parts.items()}, path)


def test_ten_steps_and_ten_in_a_new_process_are_twenty(name, tmp_path):
    train_and_save(name, tmp_path / "twenty", 0, 20)
    train_and_save(name, tmp_path / "halves", 0, 10)
    call(train_and_save, name, tmp_path / "halves", 10, 20)
    assert_same(*(torch.load(tmp_path / each, weights_only=True) for each in ("halves", "twenty")))


# ---------------------------------------------------------------- promise 5: all kinds of parameters


def test_frozen_parameters_stay(name):
    model = network(name)
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    seen = []

    def closure(x, y):
        seen.append(model[0].weight.clone())
        return cross_entropy(model)(x, y)

    optimizer = make(name, model.parameters())
    optimizer.step(closure, *batch())
    assert all(torch.equal(w, before) for w in [*seen, model[0].weight])
    assert model[0].weight not in optimizer.state
    model[0].weight.requires_grad_(True)  # thawed: taken along from now on
    optimizer.step(closure, *batch())
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_parameter_that_is_frozen_later_is_not_moved_by_its_last_gradient(name, value):
    """The gradient of a step that was skipped is still there, and none of its NaNs may reach the weights."""
    model = network(name)
    optimizer = make(name, model.parameters(), module=model, nonfinite="skip")
    optimizer.step(cross_entropy(model), *batch())
    optimizer.step(lambda x, y: cross_entropy(model)(x, y) * value, *batch())
    bias = model[3].bias.requires_grad_(False)
    before, grad = bias.clone(), bias.grad
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.step(cross_entropy(model), *batch())
    assert torch.equal(bias, before)
    assert bias.grad is grad
    resumed = network(name)
    resumed.load_state_dict(saved[0])
    resumed[3].bias.requires_grad_(False)
    other = make(name, resumed.parameters(), module=resumed, nonfinite="skip")
    other.load_state_dict(saved[1])
    other.step(cross_entropy(resumed), *batch())
    assert_same(resumed.state_dict(), model.state_dict())
    bias.requires_grad_(True)  # what an earlier step left is no reason to refuse a thawed parameter
    optimizer.step(cross_entropy(model), *batch())
    assert not torch.equal(bias, before)


def test_unused_parameters_are_left_alone_with_one_warning_that_names_them(name):
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = make(name, [("used", used), ("unused", unused)], splits=1)
    with pytest.warns(UserWarning, match="no gradient reached unused"):
        take_step(optimizer, lambda: (used**2).sum())
    take_step(optimizer, lambda: (used**2).sum())  # no second warning: warnings are errors here
    assert torch.equal(unused, torch.ones(3))
    assert unused not in optimizer.state
    assert unused.grad is None
    assert not torch.equal(used, torch.ones(2))


def test_a_gradient_missing_in_some_splits_is_zero_there(name):
    def step(closure):
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = make(name, [a, b], splits=2)
        optimizer.step(lambda x: closure(a, b, x), torch.tensor([1.0, 2.0]))
        return a, b

    missing = step(lambda a, b, x: (a**2).sum() * x.sum() + ((b**2).sum() if x.sum() > 1 else 0.0))
    zero = step(lambda a, b, x: (a**2).sum() * x.sum() + (b**2).sum() * float(x.sum() > 1))
    assert_same([p.detach() for p in missing], [p.detach() for p in zero])


def test_a_loss_without_a_graph_moves_nothing_and_warns(name):
    w = nn.Parameter(torch.ones(2))
    optimizer = make(name, [w])
    w.grad = torch.zeros(2)
    with pytest.warns(UserWarning, match="no gradient reached"):
        loss = take_step(optimizer, lambda: torch.tensor([3.0]))
    assert loss == 3.0
    assert torch.equal(w, torch.ones(2))


def test_parameters_that_all_are_frozen(name):
    w = torch.ones(2)
    optimizer = make(name, [w])
    with pytest.warns(UserWarning, match="all parameters are frozen"):
        assert take_step(optimizer, lambda: torch.tensor([1.0])) == 1.0
    assert take_step(optimizer, lambda: torch.tensor([1.0])) == 1.0  # one warning is enough
    assert torch.equal(w, torch.ones(2))


@pytest.mark.filterwarnings("ignore:after 3 steps")
def test_the_posterior_of_weights_that_were_frozen_after_training_is_refused(name):
    """Frozen weights are points, so what was learned would be gone without a word."""
    model, optimizer = trained(name)
    model.requires_grad_(False)
    if METHODS[name].gaussian:
        with pytest.raises(RuntimeError, match="take the posterior before"):
            optimizer.posterior(model)
        model.requires_grad_(True)
    assert optimizer.posterior(model).num_parameters == sum(p.numel() for p in model.parameters())


def test_options_that_are_written_into_a_group_are_checked_before_the_next_step(name):
    model, optimizer = trained(name)
    before = snapshot(model, optimizer)
    group = optimizer.param_groups[0]
    for option, bad in [("lr", float("nan")), ("splits", 0), ("nonfinite", "ignore")]:
        good, group[option] = group[option], bad
        with pytest.raises(ValueError, match=f"{option}="):
            optimizer.step(cross_entropy(model), *batch())
        group[option] = good
        assert_same(snapshot(model, optimizer), before)
    optimizer.step(cross_entropy(model), *batch())


def test_what_is_written_into_an_option_in_place_is_checked(name):
    model = network(name)
    optimizer = make(
        name, model.parameters(), lr=torch.tensor(0.1), **({"foreach": False} if METHODS[name].base else {})
    )
    optimizer.step(cross_entropy(model), *batch())
    before = snapshot(model, optimizer)
    optimizer.param_groups[0]["lr"].fill_(-1.0)
    with pytest.raises(ValueError, match=r"lr=-1.0 must be"):
        optimizer.step(cross_entropy(model), *batch())
    optimizer.param_groups[0]["lr"].fill_(0.1)
    assert_same(snapshot(model, optimizer), before)
    if METHODS[name].gaussian:
        optimizer.param_groups[0]["betas"] = [0.9, 0.99]
        optimizer.step(cross_entropy(model), *batch())
        optimizer.param_groups[0]["betas"][0] = 7.0
        with pytest.raises(ValueError, match="betas"):
            optimizer.step(cross_entropy(model), *batch())


def test_groups_that_no_longer_agree_are_refused(name):
    model = network(name)
    optimizer = make(name, [{"params": [p]} for p in model.parameters()])
    optimizer.step(cross_entropy(model), *batch())
    before = snapshot(model, optimizer)
    good, optimizer.param_groups[1]["splits"] = optimizer.param_groups[1]["splits"], 3
    with pytest.raises(ValueError, match="splits is an option of the whole optimizer"):
        optimizer.step(cross_entropy(model), *batch())
    optimizer.param_groups[1]["splits"] = good
    assert_same(snapshot(model, optimizer), before)


def test_a_parameter_that_is_twice_in_a_group_is_refused(name):
    w = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="twice in one group"):
        make(name, [w, w])


@pytest.mark.filterwarnings("ignore:gradients are computed one example at a time")
def test_an_embedding_that_shortens_its_rows_is_refused(name):
    model = nn.Sequential(nn.Embedding(4, 3, max_norm=1.0), nn.Linear(3, 2))
    loss_fn = lambda words: model(words).square().mean()  # noqa: E731
    words = torch.tensor([0, 3, 1])
    optimizer = make(name, model.parameters(), module=model)
    with pytest.raises(ValueError, match=r"0.weight.* is an embedding with max_norm"):
        optimizer.step(loss_fn, words)
    others = make(name, model[1].parameters(), module=model)
    others.step(loss_fn, words)
    others.zero_grad()
    others.add_param_group({"params": model[0].parameters()})
    with pytest.raises(ValueError, match="is an embedding with max_norm"):
        others.step(loss_fn, words)


def test_tied_weights_are_one_parameter(name):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    model = Tied()
    optimizer = make(name, model.parameters(), module=model)
    assert len(optimizer.param_groups[0]["params"]) == 1
    optimizer.step(lambda x, y: nn.functional.cross_entropy(model(x), y), *batch())
    assert model.second.weight is model.first.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(name, dtype):
    w, v = nn.Parameter(torch.ones(8, dtype=dtype)), nn.Parameter(torch.ones(8))  # mixed types in one group
    optimizer = make(name, [w, v])
    for _ in range(3):
        take_step(optimizer, lambda: (w.float() ** 2).sum() + (v**2).sum())
    assert w.dtype == dtype
    assert w.grad.dtype == dtype
    assert (w < 1).all()
    assert (v < 1).all()


def test_new_groups_midway(name):
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    known = {"module": holding([a, b]), "vectorise": False} if METHODS[name].per_example else {}
    optimizer = make(name, [a], splits=1, **known)
    take_step(optimizer, lambda: (a**2).sum() + (b**2).sum())
    assert torch.equal(b, torch.ones(2))
    optimizer.add_param_group({"params": [b], "lr": 0.0})
    take_step(optimizer, lambda: (a**2).sum() + (b**2).sum())
    assert torch.equal(b, torch.ones(2))
    optimizer.param_groups[1]["lr"] = 0.1
    take_step(optimizer, lambda: (a**2).sum() + (b**2).sum())
    assert not torch.equal(b, torch.ones(2))
    other = make(name, [{"params": [a.clone().detach().requires_grad_()]}, {"params": [nn.Parameter(torch.ones(2))]}])
    other.load_state_dict(optimizer.state_dict())


def test_a_tensor_as_learning_rate(name):
    x, y = batch()
    models = [network(name), network(name)]
    for model, lr in zip(models, [0.25, torch.tensor(0.25)], strict=True):
        optimizer = make(name, model.parameters(), lr=lr, **({"foreach": False} if METHODS[name].base else {}))
        for _ in range(3):
            optimizer.step(cross_entropy(model), x, y)
    for p, q in zip(*map(weights, models), strict=True):
        torch.testing.assert_close(p, q)
    with pytest.raises(ValueError, match="1-element"):
        make(name, network(name).parameters(), lr=torch.tensor([0.1, 0.2]))


def test_a_learning_rate_of_one_element_is_a_number_and_matrices_are_refused(name):
    with pytest.raises(ValueError, match=r"lr is a tensor of shape \(1, 1\): write a number"):
        make(name, [nn.Parameter(torch.ones(2))], lr=torch.tensor([[0.1]]))
    results = []
    for lr in (0.125, torch.tensor([0.125])):
        w, scalar = nn.Parameter(torch.ones(2)), nn.Parameter(torch.tensor(2.0))
        optimizer = make(name, [w, scalar], lr=lr, **({"foreach": False} if METHODS[name].base else {}))
        take_step(optimizer, lambda w=w, scalar=scalar: (w**2).sum() + scalar**2)
        results.append([w.detach(), scalar.detach()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_sparse_and_complex_are_refused(name):
    with pytest.raises(ValueError, match="complex"):
        make(name, [nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="layout"):
        make(name, [torch.eye(2).to_sparse().requires_grad_()])
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = make(name, table.parameters())
    before = weights(table)
    with pytest.raises(ValueError, match="sparse=True"):
        take_step(optimizer, lambda: table(torch.tensor([1, 2])).sum())
    assert_same(weights(table), before)


def test_scalar_empty_and_noncontiguous_parameters(name):
    scalar = nn.Parameter(torch.tensor(2.0))
    empty = nn.Parameter(torch.empty(0, 3))
    strided = torch.ones(4, 6)[:, ::2].detach().requires_grad_()
    transposed = torch.ones(4, 6).T.detach().requires_grad_()
    parameters = [scalar, empty, strided, transposed]
    strides = [p.stride() for p in parameters]
    optimizer = make(name, parameters)
    for _ in range(2):
        take_step(optimizer, lambda: sum((p**2).sum() for p in parameters))
    assert [p.stride() for p in parameters] == strides
    assert scalar < 2
    assert (strided < 1).all()
    assert (transposed < 1).all()


# ---------------------------------------------------------------- the step


@pytest.mark.parametrize("splits", [1, 3])
def test_the_closure_is_called_for_each_pass_of_a_split_or_once_an_example(name, splits):
    model = network(name)
    optimizer = make(name, model.parameters(), splits=splits)
    sizes = []

    def closure(x, y):
        sizes.append((len(x), len(y)))
        return cross_entropy(model)(x, y)

    optimizer.step(closure, *batch(8))
    if METHODS[name].per_example:
        assert sizes == [(1, 1)] * 8
    else:
        parts = [8] if splits == 1 else [3, 3, 2]
        assert sizes == [(size, size) for size in parts for _ in range(METHODS[name].passes)]


def test_returning_the_loss_and_calling_backward_are_the_same(name):
    def returns(model, optimizer):
        return lambda x, y: cross_entropy(model)(x, y)

    def calls_backward(model, optimizer):
        def closure(x, y):
            optimizer.zero_grad()
            loss = cross_entropy(model)(x, y)
            loss.backward()
            return loss

        return closure

    def returns_a_number(model, optimizer):
        def closure(x, y):
            loss = cross_entropy(model)(x, y)
            loss.backward()
            return loss.item()

        return closure

    results = []
    for style in (returns, calls_backward, returns_a_number):
        model = network(name, torch.float64)
        optimizer = make(name, model.parameters(), splits=2)
        losses = [optimizer.step(style(model, optimizer), *batch(dtype=torch.float64)).double() for _ in range(3)]
        results.append((torch.stack(losses), weights(model)))
    assert_same(results[0], results[1])
    assert_same(results[0][1], results[2][1])
    torch.testing.assert_close(results[0][0], results[2][0], rtol=1e-6, atol=0)


def test_a_closure_without_a_batch_is_the_whole_batch(name):
    if METHODS[name].per_example:
        pytest.skip("refuses one: see test_vogn.py")
    x, y = batch()
    models = [network(name), network(name)]
    make(name, models[0].parameters()).step(cross_entropy(models[0]), x, y)
    make(name, models[1].parameters()).step(lambda: cross_entropy(models[1])(x, y))
    assert_same(weights(models[0]), weights(models[1]))


def test_the_loss_is_the_mean_at_the_first_points_detached(name):
    model = network(name)
    optimizer = make(name, model.parameters(), splits=3)
    losses = []

    def closure(x, y):
        losses.append((cross_entropy(model)(x, y), len(x)))
        return losses[-1][0]

    loss = optimizer.step(closure, *batch(10))
    expected = sum(value * size for value, size in losses[:: METHODS[name].passes]) / 10
    torch.testing.assert_close(loss, expected.detach())
    assert not loss.requires_grad
    assert loss.shape == ()


# ---------------------------------------------------------------- gradients before the step, and of others


@pytest.mark.parametrize("calls_backward", [True, False])
@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("vectorise", [True, False])
def test_gradients_of_parameters_of_another_optimizer_are_left_alone(name, calls_backward, knows, vectorise):
    if vectorise and (calls_backward or not knows):
        pytest.skip("the splits can be computed together only if the loss is returned and the model known")
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    options = {"module": model} if knows or METHODS[name].per_example else {}
    optimizer = make(name, model[0].parameters(), splits=2, vectorise=vectorise, **options)
    x, y = batch()
    x.requires_grad_()  # a leaf that is no parameter
    head = model[2]
    head.weight.grad = kept = torch.full_like(head.weight, 0.5)

    def closure(x, y):
        loss = cross_entropy(model)(x, y)
        if calls_backward:
            loss.backward()
        return loss

    optimizer.step(closure, x, y)
    assert head.weight.grad is kept
    assert torch.equal(kept, torch.full_like(kept, 0.5))
    assert head.bias.grad is None
    assert x.grad is None
    assert model[0].weight.grad is not None


def test_backward_of_a_scaled_loss_is_refused(name):
    model = network(name)
    optimizer = make(name, model.parameters(), module=model, vectorise=False)
    x, y = batch()

    def scaled(x, y):
        loss = cross_entropy(model)(x, y)
        (128 * loss).backward()
        return loss

    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=r"called backward\(\) on .* and returned the loss .*: .* Return the tensor"):
        optimizer.step(scaled, x, y)
    assert_same(snapshot(model, optimizer), before)
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_backward_of_parts_that_add_up_to_the_loss_is_right(name):
    results = []
    for parts in (1, 3):
        model = network(name, torch.float64).eval()
        optimizer = make(name, model.parameters())

        def closure(x, y, model=model, parts=parts):
            total = 0.0
            for k in range(parts):
                loss = cross_entropy(model)(x, y) / parts
                loss.backward(retain_graph=k == 0)
                total += loss.item()
            return total

        optimizer.step(closure, *batch(dtype=torch.float64))
        results.append(weights(model))
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q)


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x, y: ({"x": x, "more": [y, "label"]},),
        lambda x, y: (OrderedDict(x=x, more=(y, None)),),
        lambda x, y: (UserDict(x=x, more=[y, torch.tensor(3.0)]),),
    ],
)
def test_nested_batches(name, wrap):
    x, y = batch(7)
    models = [network(name), network(name)]
    make(name, models[0].parameters(), splits=3).step(cross_entropy(models[0]), x, y)
    kinds = []

    def closure(b):
        kinds.append((type(b), type(b["more"][1])))
        return cross_entropy(models[1])(b["x"], b["more"][0])

    (whole,) = wrap(x, y)
    make(name, models[1].parameters(), splits=3).step(closure, whole)
    assert_same(weights(models[0]), weights(models[1]))
    assert set(kinds) == {(type(whole), type(whole["more"][1]))}
    assert len(whole["x"]) == 7  # the batch itself is not changed


def test_fewer_examples_than_splits(name):
    model = network(name)
    optimizer = make(name, model.parameters(), splits=8)
    model.eval()
    with pytest.warns(UserWarning, match="a batch of 3 examples cannot be cut into 8 parts"):
        optimizer.step(cross_entropy(model), *batch(3))
    optimizer.step(cross_entropy(model), *batch(3))  # one warning only


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "splits=4 needs a batch|needs the examples"),
        (("label",), "splits=4 needs a batch|needs the examples"),
        ((torch.ones(3, 2), torch.ones(4)), "different lengths"),
        ((torch.ones(0, 2),), "batch is empty"),
    ],
)
def test_batches_that_cannot_be_split(name, arguments, message):
    w = nn.Parameter(torch.ones(2))
    optimizer = make(name, [w], splits=4)
    with pytest.raises(ValueError, match=message):
        optimizer.step(lambda *a: (w**2).sum(), *arguments)
    assert torch.equal(w, torch.ones(2))


def test_grad_mode_and_gradients_are_as_promised(name):
    model = network(name)
    optimizer = make(name, model.parameters(), splits=2)
    with torch.no_grad():  # the closure gets gradients all the same
        optimizer.step(lambda x, y: cross_entropy(model)(x, y) if torch.is_grad_enabled() else None, *batch())
        assert not torch.is_grad_enabled()
    optimizer.step(cross_entropy(model), *batch())
    assert torch.is_grad_enabled()
    for p in model.parameters():
        assert p.is_leaf
        assert p.requires_grad
        assert p.grad is not None
        assert not p.grad.requires_grad


def test_grad_is_the_average_of_the_last_gradients(name):
    w = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = make(name, [w], splits=2)
    seen = []

    def closure(x):
        loss = (x.sum() * w**2).sum()
        seen.append(torch.autograd.grad(loss, w, retain_graph=True)[0])
        return loss

    optimizer.step(closure, torch.tensor([1.0, 2.0, 4.0]))  # parts [1, 2] and [4]
    last = seen[METHODS[name].passes - 1 :: METHODS[name].passes]  # of each part, or of each example
    expected = sum(last) / 3 if METHODS[name].per_example else (2 * last[0] + last[1]) / 3
    torch.testing.assert_close(w.grad, expected)


def test_addresses_stay(name):
    model = network(name)
    optimizer = make(name, model.parameters(), module=model)
    addresses = [p.data_ptr() for p in model.parameters()] + [b.data_ptr() for b in model.buffers()]
    optimizer.step(cross_entropy(model), *batch())
    state = [v.data_ptr() for s in optimizer.state.values() for v in s.values()]
    with pytest.raises(FloatingPointError):
        optimizer.step(lambda x, y: cross_entropy(model)(x, y) * float("nan"), *batch())
    optimizer.step(cross_entropy(model), *batch())
    assert [p.data_ptr() for p in model.parameters()] + [b.data_ptr() for b in model.buffers()] == addresses
    assert [v.data_ptr() for s in optimizer.state.values() for v in s.values()] == state


def test_max_grad_norm(name):
    w = nn.Parameter(torch.ones(4))
    optimizer = make(name, [w], max_grad_norm=0.1)
    take_step(optimizer, lambda: 100 * (w**2).sum())
    torch.testing.assert_close(w.grad.norm(), torch.tensor(0.1), rtol=1e-4, atol=0)


def test_activation_checkpointing_trains_all_layers(name):
    from torch.utils.checkpoint import checkpoint

    def plain():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    models = [plain(), plain()]
    x, y = batch(dtype=torch.float64)
    x.requires_grad_()  # what the reentrant form needs
    for model, reentrant in zip(models, [True, False], strict=True):
        optimizer = make(name, model.parameters())
        optimizer.step(
            lambda x, y, m=model, r=reentrant: nn.functional.cross_entropy(checkpoint(m, x, use_reentrant=r), y), x, y
        )
    for p, q, start in zip(*map(weights, models), weights(plain()), strict=True):
        torch.testing.assert_close(p, q)
        assert not torch.equal(p, start)


@pytest.mark.parametrize("splits", [1, 2])
def test_bfloat16_autocast_inside_and_around_give_the_same_numbers(name, splits):
    def inside(model, optimizer, x, y):
        def closure(x, y):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return cross_entropy(model)(x, y)

        return optimizer.step(closure, x, y)

    def around(model, optimizer, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return optimizer.step(cross_entropy(model), x, y)

    def plain(model, optimizer, x, y):
        return optimizer.step(cross_entropy(model), x, y)

    results = []
    for way in (inside, around, plain):
        model = network(name)
        optimizer = make(name, model.parameters(), splits=splits)
        losses = [way(model, optimizer, *batch(seed=seed)) for seed in range(4)]
        results.append(([loss.float() for loss in losses], weights(model)))
    assert_same(results[0], results[1])
    for p, q in zip(results[0][1], results[2][1], strict=True):
        assert not torch.equal(p, q)  # autocast was on
        torch.testing.assert_close(p, q, rtol=0.1, atol=0.05)


def test_grad_scaler_is_refused_with_advice(name):
    model = network(name)
    optimizer = make(name, model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    x, y = batch()
    before = weights(model)
    scaler.scale(cross_entropy(model)(x, y)).backward()
    with pytest.raises(RuntimeError, match="bfloat16"):
        scaler.step(optimizer, lambda: cross_entropy(model)(x, y))
    assert_same(weights(model), before)


# ---------------------------------------------------------------- torch.optim's ordinary behaviours


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.CosineAnnealingLR(o, 3)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.ConstantLR(o, 0.5, 2)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=2),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_attach_directly(name, scheduler):
    model = network(name)
    optimizer = make(name, model.parameters())
    schedule = SCHEDULERS[scheduler](optimizer)
    rates = []
    for _ in range(5):
        optimizer.step(cross_entropy(model), *batch())
        schedule.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))
        rates.append(float(optimizer.param_groups[0]["lr"]))
    assert len(set(rates)) > 1
    state = schedule.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: SequentialLR steps its parts when it is made
        fresh = SCHEDULERS[scheduler](make(name, network(name).parameters()))
    fresh.load_state_dict(state)


def test_a_zero_learning_rate_moves_nothing(name):
    model = network(name)
    before = weights(model)
    optimizer = make(name, model.parameters(), lr=0.0)
    optimizer.step(cross_entropy(model), *batch())
    assert_same(weights(model), before)


def test_step_hooks_run_in_order(name):
    w = nn.Parameter(torch.ones(2))
    optimizer = make(name, [w])
    calls = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append("pre"))
    handle = optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append("post"))

    def closure():
        calls.append("closure")
        return (w**2).sum()

    take_step(optimizer, closure)
    assert calls == ["pre", *["closure"] * METHODS[name].passes, "post"]
    handle.remove()
    calls.clear()
    take_step(optimizer, closure)
    assert calls == ["pre", *["closure"] * METHODS[name].passes]


def test_named_parameters(name):
    model = network(name)
    optimizer = make(name, model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == [n for n, _ in model.named_parameters()]
    optimizer.step(cross_entropy(model), *batch())
    unnamed = make(name, network(name).parameters())
    unnamed.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_go_on_alone(name, way):
    model = network(name)
    optimizer = make(name, model.parameters(), module=model, splits=2)
    optimizer.step(cross_entropy(model), *batch())
    pair = (model, optimizer)
    if way == "deepcopy":
        model_2, optimizer_2 = copy.deepcopy(pair)
    elif way == "pickle":
        model_2, optimizer_2 = pickle.loads(pickle.dumps(pair))
    else:
        buffer = io.BytesIO()
        torch.save(pair, buffer)
        buffer.seek(0)
        model_2, optimizer_2 = torch.load(buffer, weights_only=False)
    assert optimizer_2.module is model_2
    assert optimizer_2.param_groups[0]["params"][0] is next(model_2.parameters())
    before = snapshot(model, optimizer)
    optimizer_2.step(cross_entropy(model_2), *batch())
    assert_same(snapshot(model, optimizer), before)
    optimizer.step(cross_entropy(model), *batch())
    assert_same(snapshot(model, optimizer), snapshot(model_2, optimizer_2))
    public = lambda o: {key for key in vars(o) if not key.startswith("_")}  # noqa: E731
    assert public(optimizer) == public(optimizer_2)


def test_repr_shows_the_options(name):
    text = repr(make(name, [nn.Parameter(torch.ones(1))], splits=3))
    assert "splits: 3" in text
    assert "lr: " in text


def test_module_must_hold_the_parameters(name):
    with pytest.raises(ValueError, match="do not belong to module"):
        make(name, network(name).parameters(), module=network(name))


def test_repeated_runs_are_equal(name):
    results = []
    for _ in range(2):
        model = network(name)
        optimizer = make(name, model.parameters(), splits=2)
        for seed in range(4):
            optimizer.step(cross_entropy(model), *batch(seed=seed))
        results.append(weights(model))
    assert_same(*results)


def test_a_compiled_function_may_take_steps(name):
    """The step is a graph break: torch.compile does not look into it."""
    model, twin = network(name), network(name)
    optimizer, other = (make(name, m.parameters(), module=m, splits=2) for m in (model, twin))

    def whole(x, y):
        return optimizer.step(cross_entropy(model), 2 * x, y) + 1

    def halves(x, y):
        loss = optimizer.probe(cross_entropy(model), 2 * x, y) + 1
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for function in (whole, halves):
        torch.compiler.reset()
        compiled = torch.compile(function, backend="eager")
        for seed in range(2):
            x, y = batch(seed=seed)
            assert_same(compiled(x, y), other.step(cross_entropy(twin), 2 * x, y) + 1)
            assert_same(weights(model), weights(twin))


# ---------------------------------------------------------------- after training


def test_the_posterior_is_around_the_weights_and_predicts(name, tmp_path):
    model = network(name)
    model[3].bias.requires_grad_(False)
    optimizer = make(
        name, model.parameters(), module=model, **({"betas": (0.9, 0.5)} if METHODS[name].gaussian else {})
    )
    x, y = batch(24)
    for _ in range(5):
        optimizer.step(cross_entropy(model), x, y)
    posterior = optimizer.posterior()
    assert_same(posterior.mean, {k: p.detach() for k, p in model.named_parameters()})
    assert_same(posterior.buffers, dict(model.named_buffers()))
    assert not posterior.std["3.bias"].any()
    assert repr(optimizer.posterior(model)) == repr(posterior)
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = bsam.load_posterior(tmp_path / "posterior.safetensors")
    before = weights(model)
    options = {"num_samples": 4, "recalibrate": False}
    predictions = bsam.predict(network(name), loaded, (x, y), **options)
    assert_same(bsam.predict(model, posterior, (x, y), **options).log_probs, predictions.log_probs)
    assert_same(weights(model), before)
    assert bsam.metrics.summary(predictions, num_bootstrap=0).num_examples == 24
    next(model.parameters()).data.add_(1)  # a copy: what happens to the model later does not reach it
    assert not torch.equal(posterior.mean["0.weight"], model[0].weight)


def test_the_posterior_needs_the_model(name):
    if METHODS[name].per_example:
        pytest.skip("always knows its model")
    model = network(name)
    with pytest.raises(TypeError, match="needs the model"):
        make(name, model.parameters()).posterior()
