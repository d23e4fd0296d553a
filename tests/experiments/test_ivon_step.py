"""IVON's step, captured: the numbers of the eager one, for every batch, rate and seed."""

import pytest
import torch
import torch.nn.functional as F

from bsam.experiments import ivon_step
from bsam.experiments.config import override
from bsam.experiments.data import load
from bsam.experiments.ivon import Ivon
from bsam.experiments.ivon_step import IvonStep
from bsam.experiments.paper.presets import preset
from bsam.experiments.trainer import Trainer, train_together
from tests.networks import assert_close

pytest.importorskip("ivon")
pytestmark = [  # the compiler's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


class Recorded:
    """Does on the CPU what a CUDA graph does: computes again, into the same tensor, and the host learns nothing."""

    def __init__(self, function, device, undo):
        for _ in range(2):
            function()
        undo()
        self.function, self.result = function, function().clone()
        undo()  # nothing is computed while a graph records

    def __call__(self):
        count = self.ivon.steps_taken
        rate = self.ivon.param_groups[0]["lr"]
        self.ivon.param_groups[0]["lr"] = self.rate
        self.result.copy_(self.function())
        self.ivon.param_groups[0]["lr"], self.ivon.steps_taken = rate, count
        return self.result


@pytest.fixture
def recorded(monkeypatch):
    """Steps that believe the CPU could capture."""

    class OnCpu(IvonStep):
        @property
        def can_be_captured(self):
            return self.ivon.momentum_correction == 1.0

        def _capture(self, x, y):
            captured = super()._capture(x, y)
            captured.ivon, captured.rate = self.ivon, self._rate
            return captured

    monkeypatch.setattr(ivon_step, "Captured", Recorded)
    return OnCpu


def make(device="cpu", beta1=0.5, seed=7):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(device)
    options = {"lr": 0.1, "num_data": 200.0, "prior_precision": 4.0, "initial_hessian": 0.5}
    ivon = Ivon(model.parameters(), betas=(beta1, 0.99), seed=seed, **options)
    return model, ivon, lambda x, y: F.cross_entropy(model(x), y)


def batch(k, size=16, device="cpu"):
    generator = torch.Generator().manual_seed(k)
    x, y = torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator)
    return x.to(device), y.to(device)


def compare(kind, device, steps, **tolerance):
    """A run with every trap: a rate that changes, and a ragged batch before and after the capture."""
    model, ivon, loss_fn = make(device)
    plain_model, plain, plain_loss_fn = make(device)
    step = kind(ivon, loss_fn, compile=device != "cpu")
    for k in range(steps):
        for group in (ivon.param_groups[0], plain.param_groups[0]):
            group["lr"] = 0.1 / (1 + k // 7)
        x, y = batch(k, 10 if k % 10 == 9 else 16, device)
        loss, expected = step(x, y), plain.step(plain_loss_fn, x, y)
        assert_close(loss, expected, **tolerance)
    assert_close(model.state_dict(), plain_model.state_dict(), **tolerance)
    assert_close(ivon.state_dict(), plain.state_dict(), **tolerance)
    assert ivon.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    return step


def test_a_recorded_step_is_the_eager_one(recorded):
    step = compare(recorded, "cpu", 80, tolerance=1e-12)
    assert isinstance(step._captured, Recorded)


def test_it_is_captured_as_soon_as_the_correction_is_one(recorded):
    _, ivon, loss_fn = make(beta1=0.5)
    step = recorded(ivon, loss_fn, compile=False)
    for k in range(60):
        step(*batch(k))
        assert (step._captured is not None) == (1.0 - 0.5 ** (k + 1) == 1.0)
    assert step._captured is not None
    assert ivon.steps_taken == 60


def test_on_the_cpu_nothing_is_captured():
    _, ivon, loss_fn = make(beta1=0.0)
    step = IvonStep(ivon, loss_fn, compile=False)
    step(*batch(0))
    assert ivon.momentum_correction == 1.0
    assert step._captured is None


def test_a_compiled_run_is_that_of_the_loop():
    config = override(preset("digits/ivon"), ["epochs=2"])
    digits = load("digits", validation=config.validation)
    compiled, plain = (Trainer(config, digits, seed=0) for _ in range(2))
    for _ in train_together([compiled], compiled=True):
        pass
    for _ in plain.steps():
        pass
    assert_close(compiled.state()["model"], plain.state()["model"], tolerance=1e-4)
    assert compiled.optimizer.steps_taken == plain.optimizer.steps_taken


@pytest.mark.gpu
@on_cuda
def test_a_captured_step_is_the_eager_one():
    step = compare(IvonStep, "cuda", 80, tolerance=1e-4)
    assert step._captured is not None


@pytest.mark.gpu
@on_cuda
def test_every_replay_has_the_noise_of_its_step():
    """Without moving (lr = 0) the losses of one batch differ by their noise alone, which is the eager step's."""
    runs = []
    for captured in (True, False):
        _, ivon, loss_fn = make("cuda", beta1=0.0)
        ivon.param_groups[0]["lr"] = 0.0
        step = IvonStep(ivon, loss_fn, compile=False) if captured else lambda x, y: ivon.step(loss_fn, x, y)  # noqa: B023
        runs.append([float(step(*batch(0, device="cuda"))) for _ in range(5)])
    assert len(set(runs[0])) == 5
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)


@pytest.mark.gpu
@on_cuda
def test_a_captured_run_goes_on_where_it_stopped():
    config = override(preset("digits/ivon"), ["epochs=3", "beta1=0.1"])
    digits = load("digits", validation=config.validation, device="cuda")

    def train(trainer, stop=None):
        for done, _ in enumerate(train_together([trainer], compiled=True), start=1):
            if done == stop:
                break
        return trainer

    whole = train(Trainer(config, digits, seed=0))
    state = train(Trainer(config, digits, seed=0), stop=25).state()
    second = Trainer(config, digits, seed=0)
    second.load_state(state)
    assert_close(train(second).state()["optimizer"], whole.state()["optimizer"], tolerance=1e-5)
    assert_close(second.state()["model"], whole.state()["model"], tolerance=1e-5)
