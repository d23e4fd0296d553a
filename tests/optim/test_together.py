"""Splits probed together under vmap: the numbers of the loop, or a reason why not."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from bsam.executor import Executor
from bsam.optim import together
from tests.networks import assert_close, make_batch, make_network, mean_loss
from tests.optim.contract import assert_same, snapshot
from tests.optimizers import METHODS, make

TOGETHER = [name for name, method in METHODS.items() if not method.per_example]  # the others have no splits to stack
every_optimizer = pytest.mark.parametrize("name", TOGETHER)


def pair(name, network, params=nn.Module.parameters, *, splits=4, **options):
    """The same model and optimizer twice: splits together, and in a loop."""
    made = []
    for vectorise in (True, False):
        model = make_network(network) if isinstance(network, str) else network()
        made.append((model, make(name, params(model), vectorise=vectorise, module=model, splits=splits, **options)))
    return made


def train(made, batches, loss_of=mean_loss, tolerance=1e-10):
    """Step all of them with the same batches, and compare them after each."""
    for batch in batches:
        losses = [optimizer.step(loss_of(model), *batch) for model, optimizer in made]
        assert_close(*losses, tolerance=tolerance)
        (a, ours), (b, loop) = made
        assert_close(a.state_dict(), b.state_dict(), tolerance=tolerance)
        assert_close(ours.state_dict()["state"], loop.state_dict()["state"], tolerance=tolerance)
        assert_close([p.grad for p in a.parameters()], [p.grad for p in b.parameters()], tolerance=tolerance)


def batches_of(network, count=5, size=16):
    return [make_batch(network, size, seed) for seed in range(count)]


@pytest.fixture
def _no_loop(monkeypatch):
    """Fails the test if the splits are probed in turn by an optimizer that was asked to probe them together."""
    in_turn = bsam.optim.base.ProbingOptimizer._probe_in_turn

    def watched(self, *arguments):
        assert not self.vectorise
        return in_turn(self, *arguments)

    monkeypatch.setattr(bsam.optim.base.ProbingOptimizer, "_probe_in_turn", watched)


@pytest.fixture
def _no_device_check(monkeypatch):
    """Lets vectorise=None try vmap on the CPU too, as it does on a GPU."""
    monkeypatch.setattr(Executor, "launch_bound", lambda device: True)


@every_optimizer
@pytest.mark.parametrize("network", ["mlp", "convolutional", "normalised", "tied", "partly frozen"])
@pytest.mark.usefixtures("_no_loop")
def test_splits_together_give_the_numbers_of_the_loop(name, network):
    made = pair(name, network)
    start = copy.deepcopy(made[0][0].state_dict())
    train(made, batches_of(network))
    moved = {key for key, value in made[0][0].state_dict().items() if not torch.equal(value, start[key])}
    frozen = {"0.weight"} if network == "partly frozen" else set()
    assert moved == start.keys() - frozen


@pytest.mark.usefixtures("_no_loop")
def test_resnet_20_gives_the_numbers_of_the_loop():
    train(pair("BSAM", "resnet20_frn", splits=2), batches_of("resnet20_frn", count=2, size=4))


@every_optimizer
@pytest.mark.usefixtures("_no_loop")
def test_batch_norm_does_not_move_where_it_must_not(name):
    made = pair(name, "normalised", batch_norm="none")
    before = copy.deepcopy(dict(made[0][0].named_buffers()))
    train(made, batches_of("normalised"))
    assert_same(dict(made[0][0].named_buffers()), before)


@every_optimizer
@pytest.mark.parametrize("policy", ["all", "first_pass"])
@pytest.mark.usefixtures("_no_device_check")
def test_policies_that_go_from_split_to_split_need_the_loop(name, policy):
    model = make_network("normalised")
    options = {"module": model, "splits": 4, "batch_norm": policy}
    asked = make(name, model.parameters(), vectorise=True, **options)
    before = snapshot(model, asked)
    with pytest.raises(
        ValueError, match=rf"vectorise=True is not possible here: batch_norm='{policy}' moves running stat"
    ):
        asked.step(mean_loss(model), *make_batch("normalised", 16))
    assert_same(snapshot(model, asked), before)

    other = make_network("normalised")
    free = make(name, other.parameters(), **{**options, "module": other})
    loop = make(name, model.parameters(), vectorise=False, **options)
    first, second = batches_of("normalised", count=2)
    with pytest.warns(UserWarning, match=f"computed in a loop, because batch_norm='{policy}' moves") as warned:
        free.step(mean_loss(other), *first)
    assert warned[0].filename == __file__
    free.step(mean_loss(other), *second)  # once: warnings are errors
    for batch in (first, second):
        loop.step(mean_loss(model), *batch)
    assert_same(other.state_dict(), model.state_dict())


def test_a_policy_does_not_matter_in_evaluation_mode():
    made = pair("BSAM", "normalised", batch_norm="all")
    for model, _ in made:
        model.eval()
    train(made, batches_of("normalised", count=2))


@pytest.mark.parametrize("option", ["perturb", "sample"])
@pytest.mark.usefixtures("_no_loop")
def test_groups_have_their_own_options(option):
    def groups(model, known):
        rho = [{"rho": value} if "rho" in known else {} for value in (0.3, 0.2)]
        return [
            {"params": model[0].parameters(), option: False, **rho[0]},
            {"params": model[2].parameters(), "lr": 0.02, **rho[1]},
        ]

    for name in TOGETHER:
        known = make(name, make_network("mlp").parameters()).defaults
        if option in known:
            train(pair(name, "mlp", lambda model, known=known: groups(model, known)), batches_of("mlp"))


@every_optimizer
@pytest.mark.usefixtures("_no_loop")
def test_gradients_are_clipped(name):
    made = pair(name, "mlp", max_grad_norm=0.05)
    train(made, batches_of("mlp"))
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in made[0][0].parameters()]))
    assert 0.049 < norm < 0.051  # all clip: gradients of this problem are longer


@pytest.mark.parametrize("curvature", ["mean_abs", "abs_mean"])
@pytest.mark.parametrize("sample_noise", [True, False])
@pytest.mark.parametrize("perturb_from", ["sample", "mean"])
@pytest.mark.usefixtures("_no_loop")
def test_options_of_bsam(curvature, sample_noise, perturb_from):
    options = {"curvature": curvature, "sample_noise": sample_noise, "perturb_from": perturb_from}
    train(pair("BSAM", "mlp", **options), batches_of("mlp", count=3))


class Unused(nn.Module):
    """Two heads, of which a loss uses one."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.heads = nn.ModuleDict({"a": nn.Linear(12, 4), "b": nn.Linear(12, 4)}).double()

    def forward(self, x, head):
        return self.heads[head](x)


def loss_of_head(model):
    return lambda x, y, head: F.cross_entropy(model(x, head), y)


@every_optimizer
@pytest.mark.usefixtures("_no_loop")
def test_an_unused_parameter_is_named_and_left_alone(name):
    made = pair(name, Unused)
    x, y = make_batch("mlp", 16)
    before = copy.deepcopy(made[0][0].heads["b"].state_dict())
    with pytest.warns(UserWarning, match=r"no gradient reached heads.b.weight, heads.b.bias: not part of the loss"):
        train(made, [(x, y, "a")], loss_of_head)
    train(made, [(x, y, "a")] * 2, loss_of_head)  # warned once
    assert_same(made[0][0].heads["b"].state_dict(), before)
    assert made[0][0].heads["b"].weight.grad is None


@every_optimizer
@pytest.mark.usefixtures("_no_loop")
def test_parameters_may_come_and_go_from_step_to_step(name):
    made = pair(name, Unused)
    x, y = make_batch("mlp", 16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no gradient reached")
        train(made, [(x, y, head) for head in "aabba"], loss_of_head)


class Counting(nn.Module):
    """Replaces its buffer in the forward pass, instead of writing into it."""

    def __init__(self):
        super().__init__()
        self.layer = make_network("mlp")
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.total = self.total + 1 + x.detach().mean()
        return self.layer(x)


@pytest.mark.usefixtures("_no_loop")
def test_a_buffer_that_is_replaced_is_kept_too():
    made = [
        (model, bsam.BSAM(model.parameters(), lr=0.1, num_data=100, splits=2, module=model, vectorise=vectorise))
        for model, vectorise in ((Counting(), True), (Counting(), False))
    ]
    x, y = make_batch("mlp", 16)
    for model, optimizer in made:
        optimizer.step(mean_loss(model), x, y)
    # No policy speaks of it. In the loop it sees both splits, together those of the first.
    first, second = x.split(8)
    assert_close(made[0][0].total, 2 * (1 + first.mean()))
    assert_close(made[1][0].total, 2 * (1 + first.mean()) + 2 * (1 + second.mean()))


@every_optimizer
@pytest.mark.usefixtures("_no_loop")
def test_dropout_differs_from_split_to_split(name):
    layer = nn.Linear(64, 1, bias=False)
    model = nn.Sequential(nn.Dropout(0.5), layer)
    optimizer = make(name, model.parameters(), splits=2, module=model, vectorise=True)
    optimizer.step(lambda x: model(x).mean(), torch.ones(2, 64))
    # The gradient of a split is its mask: 0 or 2 in each place, and 1 on average where the masks differ.
    assert set(layer.weight.grad.unique().tolist()) == {0.0, 1.0, 2.0}


@every_optimizer
@pytest.mark.usefixtures("_no_loop")
def test_a_step_that_is_not_finite_is_left_out(name):
    made = pair(name, "normalised", nonfinite="skip")
    batches = batches_of("normalised", count=2)
    train(made, batches[:1])
    befores = [snapshot(model, optimizer) for model, optimizer in made]
    x, y = batches[1]
    for (model, optimizer), before in zip(made, befores, strict=True):
        loss = optimizer.step(
            mean_loss(model), torch.where(torch.arange(16)[:, None, None, None] == 9, torch.inf, x), y
        )
        assert not loss.isfinite()
        after = snapshot(model, optimizer)
        assert_same([after["model"], after["state"]], [before["model"], before["state"]])
        assert optimizer.skipped_steps == 1
    train(made, batches[1:])


@every_optimizer
@pytest.mark.usefixtures("_no_loop")
def test_a_step_that_is_not_finite_raises(name):
    (model, optimizer), _ = pair(name, "normalised")
    x, y = make_batch("normalised", 16)
    optimizer.step(mean_loss(model), x, y)
    before = snapshot(model, optimizer)
    with pytest.raises(FloatingPointError, match="the loss of pass 1 is nan"):
        optimizer.step(mean_loss(model), x * torch.nan, y)
    assert_same(snapshot(model, optimizer), before)


@every_optimizer
def test_a_ragged_batch_goes_through_the_loop(name):
    train(pair(name, "normalised"), [make_batch("normalised", size, size) for size in (16, 18, 16)])


def test_a_single_split_needs_no_vmap():
    train(pair("BSAM", "normalised", splits=1), batches_of("normalised", count=2))


def test_the_model_must_be_known():
    model = make_network("mlp")
    optimizer = bsam.BSAM(model.parameters(), num_data=100, splits=2, vectorise=True)
    with pytest.raises(ValueError, match="vectorise=True needs the model: make the optimizer with module=model"):
        optimizer.step(mean_loss(model), *make_batch("mlp", 8))


# ---------------------------------------------------------------------- loss functions that torch.func cannot take


def calls_backward(model):
    def closure(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def holds_parameters(model):
    weight = model[0].weight
    return lambda x, y: F.cross_entropy(model(x), y) + 0.1 * weight.square().sum()


def looks_at_values(model):
    def closure(x, y):
        loss = F.cross_entropy(model(x), y)
        return 2 * loss if loss > 1 else loss

    return closure


def reads_numbers(model):
    return lambda x, y: F.cross_entropy(model(x), y) * (1 + abs(x.sum().item()))


IMPOSSIBLE = {
    "calls_backward": (calls_backward, r"the loss function calls backward\(\) itself"),
    "holds_parameters": (holds_parameters, "uses parameters of module= that it did not look up"),
    "looks_at_values": (looks_at_values, "data-dependent control flow"),
    "reads_numbers": (reads_numbers, r"calling .item\(\) on a Tensor"),
}


@every_optimizer
@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_vmap_cannot_do_is_an_error_if_it_was_asked_for(name, case):
    loss_of, message = IMPOSSIBLE[case]
    (model, optimizer), _ = pair(name, "mlp")
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step(loss_of(model), *make_batch("mlp", 16))
    assert_same(snapshot(model, optimizer), before)


@every_optimizer
@pytest.mark.parametrize("case", IMPOSSIBLE)
@pytest.mark.usefixtures("_no_device_check")
def test_what_vmap_cannot_do_is_done_by_the_loop_after_one_warning(name, case):
    loss_of, message = IMPOSSIBLE[case]
    made = pair(name, "mlp")
    made[0][1].vectorise = None
    batches = batches_of("mlp", count=3)
    with pytest.warns(UserWarning, match=f"the splits are computed in a loop, because vmap failed with .*{message}"):
        train(made, batches[:1], loss_of)
    train(made, batches[1:], loss_of)  # no second warning: it would be an error
    assert_same(made[0][0].state_dict(), made[1][0].state_dict())


class Recurrent(nn.Module):
    """An LSTM in float32: torch has no rule to compute it by vmap over its weights."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.lstm, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


@every_optimizer
@pytest.mark.usefixtures("_no_device_check")
def test_an_lstm_goes_through_the_loop(name):
    made = pair(name, Recurrent)
    made[0][1].vectorise = None
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 6, 3, generator=generator), torch.randint(4, (16,), generator=generator)
    with pytest.warns(UserWarning, match="the splits are computed in a loop, because vmap failed"):
        train(made, [(x, y)])
    train(made, [(x, y)] * 2)  # one warning only
    assert_same(made[0][0].state_dict(), made[1][0].state_dict())


@every_optimizer
@pytest.mark.usefixtures("_no_device_check")
def test_an_error_of_the_users_loss_is_raised_and_vmap_goes_on(name, monkeypatch):
    """It comes once: a loop, which would get no error, must not be mistaken for the cure."""
    (model, optimizer), _ = pair(name, "mlp")
    optimizer.vectorise = None
    before, count = snapshot(model, optimizer), 0

    def failing(x, y):
        nonlocal count
        count += 1
        if count == 2:
            raise RuntimeError("the file is gone")
        return mean_loss(model)(x, y)

    with pytest.raises(RuntimeError, match="the file is gone"):
        optimizer.step(failing, *make_batch("mlp", 16))
    assert_same(snapshot(model, optimizer), before)
    probe, calls = together.probe_stack, []
    monkeypatch.setattr(together, "probe_stack", lambda *arguments: calls.append(1) or probe(*arguments))
    optimizer.step(failing, *make_batch("mlp", 16))
    assert calls


@pytest.mark.usefixtures("_no_device_check")
def test_none_vectorises_where_it_pays(monkeypatch):
    made = pair("BSAM", "mlp")
    made[0][1].vectorise = None
    probe, calls = together.probe_stack, []
    monkeypatch.setattr(together, "probe_stack", lambda *arguments: calls.append(1) or probe(*arguments))
    train(made, batches_of("mlp", count=2))
    assert len(calls) == 2


def test_none_is_the_loop_on_the_cpu(monkeypatch):
    monkeypatch.setattr(together, "probe_stack", lambda *arguments: pytest.fail("vmapped on the CPU"))
    model = make_network("mlp")
    optimizer = bsam.BSAM(model.parameters(), num_data=100, splits=2, module=model)
    optimizer.step(mean_loss(model), *make_batch("mlp", 8))


@every_optimizer
def test_copies_keep_the_choice(name):
    for vectorise in (True, False, None):
        model = make_network("mlp")
        optimizer = make(name, model.parameters(), splits=2, module=model, vectorise=vectorise)
        for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert copied.vectorise is vectorise
            copied.step(mean_loss(copied.module), *make_batch("mlp", 8))


def test_there_is_no_fourth_choice():
    model = make_network("mlp")
    with pytest.raises(ValueError, match="vectorise='yes' must be one of"):
        bsam.BSAM(model.parameters(), num_data=100, module=model, vectorise="yes")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_optimizer
@pytest.mark.parametrize("network", ["mlp", "convolutional", "normalised"])
def test_splits_together_give_the_numbers_of_the_loop_on_cuda(name, network):
    made = [(model.cuda(), None) for model in (make_network(network), make_network(network))]
    made = [
        (model, make(name, model.parameters(), splits=4, module=model, vectorise=vectorise))
        for (model, _), vectorise in zip(made, (None, False), strict=True)
    ]
    train(made, [(x.cuda(), y.cuda()) for x, y in batches_of(network)])
