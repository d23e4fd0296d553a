"""An optimizer warns of itself once, and asking it changes nothing."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import bsam


def names(found):
    return [finding.name for finding in found]


# ------------------------------------------------------------------ the warning


def wide():
    """A network whose steps are far too large, its optimizer, and what a step takes."""
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 3))
    x, y = torch.randn(32, 20), torch.randint(3, (32,))
    optimizer = bsam.BSAM(model.parameters(), lr=50.0, num_data=1000, module=model)
    return model, optimizer, lambda x, y: nn.functional.cross_entropy(model(x), y), x, y


def test_it_warns_once_and_not_again_after_loading():
    _, optimizer, *step = wide()
    for _ in range(9):
        optimizer.step(*step)
    with pytest.warns(UserWarning, match="after 10 steps: The weights are .* times as large") as given:
        optimizer.step(*step)
    assert given[0].filename == __file__
    optimizer.load_state_dict(optimizer.state_dict())
    for _ in range(100):  # warnings are errors here
        optimizer.step(*step)


def test_a_warning_that_raises_leaves_a_whole_step():
    _, optimizer, *step = wide()
    twin = copy.deepcopy(optimizer)
    for _ in range(9):
        optimizer.step(*step)
    with pytest.raises(UserWarning, match="after 10 steps"):
        optimizer.step(*step)
    assert all(int(state["step"]) == 10 for state in optimizer.state.values())
    assert not twin.state


def test_a_compiled_step_warns_too():
    _, optimizer, loss_fn, x, y = wide()
    step = bsam.TrainStep(optimizer, loss_fn, (x, y), compile=False)
    for _ in range(9):
        step(x, y)
    with pytest.warns(UserWarning, match="after 10 steps") as given:
        step(x, y)
    assert given[0].filename == __file__
    for _ in range(91):
        step(x, y)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loop_and_a_compiled_step_count_the_examples_of_a_step(compiled):
    model, x, y = nn.Linear(20, 30), torch.randn(60, 20), torch.randint(30, (60,))
    optimizer = bsam.BSAM(model.parameters(), num_data=12, splits=2, module=model)

    def loss_fn(x, y):
        return nn.functional.cross_entropy(model(x), y)

    step = bsam.TrainStep(optimizer, loss_fn, (x, y), compile=False) if compiled else None
    for k in range(10):
        with pytest.warns(UserWarning, match="num_data=12, and a step has seen 60") if k == 9 else nullcontext():
            optimizer.step(loss_fn, x, y) if step is None else step(x, y)


def test_sam_warns_of_its_steps():
    model, _, *step = wide()
    optimizer = bsam.SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=50.0, momentum=0.9)
    for _ in range(9):
        optimizer.step(*step)
    with pytest.warns(UserWarning, match="lower lr"):
        optimizer.step(*step)
    assert names(optimizer.diagnose()) == ["growth"]


def test_a_model_of_few_weights_may_be_uncertain():
    model = nn.Linear(3, 1)
    optimizer = bsam.BSAM(model.parameters(), lr=0.1, num_data=4, damping=0.1, max_noise=None)
    x, y = torch.randn(4, 3), torch.randn(4, 1)
    for _ in range(10):
        optimizer.step(lambda x, y: nn.functional.mse_loss(model(x), y), x, y)
    assert "noise" in names(optimizer.diagnose().problems)


def test_the_factor_of_many_data_is_heard():
    model = nn.Linear(20, 30)
    for num_data, sqrt_num_data, heard in ((600, True, False), (60_000, True, True), (60_000, False, False)):
        optimizer = bsam.BSAM(model.parameters(), num_data=num_data, sqrt_num_data=sqrt_num_data)
        assert ("factor" in names(optimizer.diagnose().problems)) == heard
        assert ("factor" in names(optimizer.diagnose())) == sqrt_num_data


def test_layers_that_start_at_zero_do_not_count():
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10))
    nn.init.zeros_(model[2].weight)
    optimizer = bsam.BSAM(model.parameters(), lr=0.1, num_data=50_000, module=model)
    x, y = torch.randn(32, 20), torch.randint(10, (32,))
    for _ in range(10):
        optimizer.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
    found = optimizer.diagnose()["step"]
    assert "0.weight" in found.sentence
    assert "2.weight" not in found.sentence
    nn.init.zeros_(model[0].weight)
    blank = bsam.BSAM([model[0].weight], lr=0.1, num_data=50_000)
    assert names(blank.diagnose()) == ["weight decay", "start", "factor"]


@pytest.mark.parametrize("num_data", [60, 600])
def test_before_the_first_step_only_the_start_is_known(num_data):
    optimizer = bsam.BSAM(nn.Linear(20, 30).parameters(), num_data=num_data)
    diagnosed = optimizer.diagnose()
    assert names(diagnosed) == ["step", "noise", "weight decay", "start", "factor"]
    assert names(diagnosed.problems) == ["start"]


def test_skipped_steps_are_heard():
    model, x, y = nn.Linear(20, 30), torch.randn(12, 20), torch.randint(30, (12,))
    optimizer = bsam.BSAM(model.parameters(), num_data=12, nonfinite="skip")
    for scale in (1.0, float("nan"), float("nan")):
        optimizer.step(lambda x, y, scale=scale: scale * nn.functional.cross_entropy(model(x), y), x, y)
    finding = optimizer.diagnose()["skipped"]
    assert finding.is_bad
    assert finding.sentence.startswith("2 of 3 steps were skipped, because a loss or a gradient was not finite.")


# ------------------------------------------------------------------ what is given back


def test_asking_changes_nothing():
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Dropout(), nn.Linear(30, 3))
    optimizer = bsam.BSAM(model.parameters(), lr=0.1, num_data=1000, module=model)
    x, y = torch.randn(32, 20), torch.randint(3, (32,))

    def loss_fn(x, y):
        return nn.functional.cross_entropy(model(x), y)

    optimizer.step(loss_fn, x, y)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"], torch.get_rng_state()))
    optimizer.diagnose(x, loss_fn, (x, y))
    after = model.state_dict(), optimizer.state_dict()["state"], torch.get_rng_state()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    with optimizer.sampled(), pytest.raises(RuntimeError, match="cannot diagnose the optimizer inside sampled"):
        optimizer.diagnose()


def test_without_the_module_running_statistics_are_not_put_back():
    """As `diagnose` says: an optimizer cannot restore buffers that it does not know."""
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 3))
    optimizer = bsam.BSAM(model.parameters(), num_data=1000)
    x, y = torch.randn(32, 20), torch.randint(3, (32,))
    weights, mean = copy.deepcopy(dict(model.named_parameters())), model[1].running_mean.clone()
    optimizer.diagnose(None, lambda x, y: nn.functional.cross_entropy(model(x), y), (x, y))
    torch.testing.assert_close(dict(model.named_parameters()), weights, rtol=0, atol=0)
    assert not torch.equal(model[1].running_mean, mean)
    assert "only put back if the optimizer has `module=`" in " ".join(optimizer.diagnose.__doc__.split())


def test_it_reads_as_sentences():
    _, optimizer, *step = wide()
    for _ in range(5):
        optimizer.step(*step)
    diagnosed = optimizer.diagnose(range(2000))
    lines = str(diagnosed).splitlines()
    assert len(lines) == len(diagnosed) == len(list(diagnosed))
    for line, finding in zip(lines, diagnosed, strict=True):
        assert line.split()[0] == ("problem" if finding.is_bad else "ok")
        assert line.endswith((".", "?", ")."))
    assert set(diagnosed.problems) == {finding for finding in diagnosed if finding.value > finding.limit}
    with pytest.raises(KeyError, match="there are growth, step"):
        diagnosed["sharpness"]
