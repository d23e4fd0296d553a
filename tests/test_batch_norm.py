"""BatchNorm: which passes move the running statistics, and their recalibration."""

import pytest
import torch
from torch import nn

import bsam


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.linear(x))))


def one_step(policy, splits=3, fail=None, module=True, optimizer_class=bsam.BSAM):
    """One step; returns the model, the statistics before it, and what each pass alone would have made of them."""
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model(torch.randn(20, 3) + 1)
    x, y = torch.randn(12, 3), torch.randint(2, (12,))
    start = {k: v.clone() for k, v in model.norm.state_dict().items()}
    options = {"splits": splits, "batch_norm": policy, "module": model if module else None}
    if optimizer_class is bsam.BSAM:
        optimizer = bsam.BSAM(model.parameters(), num_data=12, **options)
    else:
        optimizer = bsam.SAM(model.parameters(), torch.optim.SGD, rho=0.1, lr=0.1, **options)
    moments = []
    model.norm.register_forward_pre_hook(
        lambda _, args: moments.append((args[0].detach().mean(0), args[0].detach().var(0)))
    )
    count = 0

    def closure(x, y):
        nonlocal count
        count += 1
        if count == fail:
            raise ValueError("stop")
        return nn.functional.cross_entropy(model(x), y)

    optimizer.step(closure, x, y)
    return model, start, moments


def moved(start, moments):
    mean, var = start["running_mean"], start["running_var"]
    for m, v in moments:
        mean, var = 0.9 * mean + 0.1 * m, 0.9 * var + 0.1 * v
    return mean, var


@pytest.mark.parametrize("optimizer_class", [bsam.BSAM, bsam.SAM])
@pytest.mark.parametrize(
    ("policy", "passes"),
    [("first_split", [0, 1]), ("first_pass", [0, 2, 4]), ("all", [0, 1, 2, 3, 4, 5]), ("none", [])],
)
def test_policies(policy, passes, optimizer_class):
    model, start, moments = one_step(policy, optimizer_class=optimizer_class)
    assert len(moments) == 6
    mean, var = moved(start, [moments[i] for i in passes])
    torch.testing.assert_close(model.norm.running_mean, mean)
    torch.testing.assert_close(model.norm.running_var, var)
    assert model.norm.num_batches_tracked == start["num_batches_tracked"] + len(passes)


def test_without_the_module_every_pass_moves_them():
    model, start, moments = one_step("none", module=False)
    torch.testing.assert_close(model.norm.running_mean, moved(start, moments)[0])


@pytest.mark.parametrize("policy", ["first_split", "first_pass", "all", "none"])
@pytest.mark.parametrize("rebinds", [False, True])
def test_a_failing_step_restores_all_buffers(policy, rebinds):
    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            if rebinds:
                self.calls = self.calls + 1
            else:
                self.calls += 1
            return super().forward(x)

    model = Counting()
    optimizer = bsam.BSAM(model.parameters(), num_data=12, splits=2, batch_norm=policy, module=model)
    x, y = torch.randn(12, 3), torch.randint(2, (12,))
    optimizer.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
    assert model.calls == 4
    before = {k: v.clone() for k, v in model.state_dict().items()}
    addresses = [b.data_ptr() for b in model.buffers()]
    count = 0

    def failing(x, y):
        nonlocal count
        count += 1
        loss = nn.functional.cross_entropy(model(x), y)
        return loss * float("nan") if count == 4 else loss

    with pytest.raises(FloatingPointError):
        optimizer.step(failing, x, y)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [b.data_ptr() for b in model.buffers()] == addresses


# ---------------------------------------------------------------- recalibration


def test_recalibration_is_the_plain_average_over_batches():
    torch.manual_seed(1)
    model = Net()
    batches = [torch.randn(10, 3) + k for k in range(4)]
    bsam.recalibrate_batch_norm(model, [(x, None) for x in batches])
    with torch.no_grad():
        inputs = [model.linear(x) for x in batches]
    torch.testing.assert_close(model.norm.running_mean, torch.stack([h.mean(0) for h in inputs]).mean(0))
    torch.testing.assert_close(model.norm.running_var, torch.stack([h.var(0) for h in inputs]).mean(0))
    assert model.norm.momentum == 0.1


def test_recalibration_agrees_with_torch():
    torch.manual_seed(1)
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    batches = [torch.randn(10, 3) + k for k in range(4)]
    bsam.recalibrate_batch_norm(model, batches)
    torch.optim.swa_utils.update_bn(batches, twin)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_recalibration_of_a_posterior_sample():
    torch.manual_seed(1)
    model = Net()
    optimizer = bsam.BSAM(model.parameters(), num_data=5)
    batches = [torch.randn(50, 3)]
    with optimizer.sampled():
        bsam.recalibrate_batch_norm(model, batches)
        with torch.no_grad():
            expected = model.linear(batches[0]).mean(0)
    torch.testing.assert_close(model.norm.running_mean, expected)


@pytest.mark.parametrize("kind", ["tensor", "tuple", "mapping", "forward"])
def test_recalibration_takes_any_batch(kind):
    x = torch.randn(8, 3)
    batch = {"tensor": x, "tuple": (x, 1), "mapping": {"x": x}, "forward": [1, x]}[kind]
    model = Net()
    forward = (lambda batch: model(batch[1])) if kind == "forward" else None
    bsam.recalibrate_batch_norm(model, [batch], forward=forward)
    with torch.no_grad():
        torch.testing.assert_close(model.norm.running_mean, model.linear(x).mean(0))


def test_recalibration_takes_the_batches_that_predict_takes():
    class Pair(Net):
        def forward(self, x, more=None, text=None):
            return super().forward(x if more is None else x + more["shift"])

    x, shift = torch.randn(8, 3), torch.randn(8, 3)
    nested = {"x": x, "more": {"shift": shift}, "text": ["a"] * 8, "labels": torch.zeros(8)}
    for batch, inputs in [(nested, x + shift), (((x, {"shift": shift}), torch.zeros(8)), x + shift), ([x], x)]:
        model = Pair()
        bsam.recalibrate_batch_norm(model, [batch])
        with torch.no_grad():
            torch.testing.assert_close(model.norm.running_mean, model.linear(inputs).mean(0))
        recalibrated = bsam.predict(model, bsam.PointMass.from_model(model), [batch], recalibrate=[batch])
        torch.testing.assert_close(recalibrated.log_probs, model.eval()(*_args(batch)).detach().log_softmax(-1))


def _args(batch):
    inputs = batch[0] if isinstance(batch, list | tuple) else (batch["x"], batch["more"])
    return inputs if isinstance(inputs, tuple) else (inputs,)


def test_a_batch_of_one_example_is_named_and_tensors_are_cut_so_that_there_is_none():
    model = Net()
    posterior = bsam.PointMass.from_model(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(9, 3)
    for attempt in (
        lambda: bsam.recalibrate_batch_norm(model, x.split(4)),
        lambda: bsam.predict(model, posterior, x, recalibrate=x.split(4)),
    ):
        with pytest.raises(ValueError, match=r"batch 2 has one value per channel.*drop_last"):
            attempt()
        torch.testing.assert_close(model.state_dict(), before)
    cut = bsam.predict(model, posterior, x, recalibrate=x, batch_size=4)
    bsam.recalibrate_batch_norm(model, x.split(3))
    torch.testing.assert_close(cut.log_probs, model.eval()(x).detach().log_softmax(-1))


def test_recalibration_keeps_modes_and_leaves_dropout_off():
    model = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(3)).train()
    model[0].eval()
    x = torch.randn(64, 3)
    bsam.recalibrate_batch_norm(model, [x])
    torch.testing.assert_close(model[1].running_mean, x.mean(0))
    assert model.training
    assert not model[0].training
    assert model[1].training


def test_recalibration_that_fails_changes_nothing():
    model = Net().eval()
    with torch.no_grad():
        model.norm.running_mean.fill_(3.0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for data, error in [([torch.randn(4, 3), torch.randn(4, 7)], RuntimeError), ([], ValueError)]:
        with pytest.raises(error):
            bsam.recalibrate_batch_norm(model, data)
        torch.testing.assert_close(model.state_dict(), before)
        assert model.norm.momentum == 0.1
        assert not model.norm.training


def test_recalibration_without_batch_norm_does_nothing():
    bsam.recalibrate_batch_norm(nn.Linear(2, 2), [])


def test_a_buffer_that_was_empty_is_empty_again_after_a_failing_step():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.register_buffer("scale", None)

        def forward(self, x):
            self.scale = torch.ones(1)
            return self.linear(x)

    model = Lazy()
    optimizer = bsam.BSAM(model.parameters(), num_data=12, module=model)
    with pytest.raises(FloatingPointError):
        optimizer.step(lambda x: model(x).sum() * float("nan"), torch.randn(4, 3))
    assert model.scale is None
