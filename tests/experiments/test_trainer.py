"""Training in memory: every method learns, and goes on exactly where it stopped."""

import pytest
import torch

import bsam
from bsam.experiments.checkpoint import load_checkpoint, save_checkpoint
from bsam.experiments.config import override
from bsam.experiments.methods import METHODS
from bsam.experiments.trainer import Trainer
from tests.experiments.test_runs import short
from tests.optim.contract import assert_same


@pytest.mark.filterwarnings("ignore:after .* steps:UserWarning")  # IVON's run is short
@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_on_exactly_where_it_stopped(method, digits, tmp_path):
    config = short(method)
    whole = Trainer(config, digits, seed=3)
    count = sum(1 for _ in whole.steps())
    for stop in (1, count // 2, count - 2):
        first = Trainer(config, digits, seed=3)
        for done, _ in enumerate(first.steps(), start=1):
            if done == stop:
                break
        save_checkpoint(tmp_path / "c", first.state())
        torch.manual_seed(99)  # another process has another global generator
        second = Trainer(config, digits, seed=3)
        second.load_state(load_checkpoint(tmp_path / "c"))
        for _ in second.steps():
            pass
        for key in ("model", "optimizer", "collector", "epoch", "batch"):
            assert_same(second.state()[key], whole.state()[key])
        assert [e["loss"] for e in second.log] == [e["loss"] for e in whole.log]
    expected = {
        "swag": bsam.LowRankGaussian,
        "laplace": None,
        "vogn": bsam.DiagonalGaussian,
        "bsam": bsam.DiagonalGaussian,
        "ivon": bsam.DiagonalGaussian,
    }
    kind = expected.get(method, bsam.PointMass)
    posterior = whole.posterior()
    assert kind is None or type(posterior) is kind
    assert (method in expected) == bool(posterior.sampled_names)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(method, digits):
    trainer = Trainer(short(method, "epochs=6", "batch_size=50"), digits, seed=0)
    for _ in trainer.steps():
        pass
    assert trainer.log[-1]["loss"] < 0.6 * trainer.log[0]["loss"]
    assert len(trainer.log) == trainer.config.total_epochs


def test_seeds_change_weights_and_order(digits):
    weights = []
    for seed in (0, 1, 0):
        trainer = Trainer(short("sgd"), digits, seed=seed)
        for _ in trainer.steps():
            pass
        weights.append(trainer.model.state_dict())
    assert_same(weights[0], weights[2])
    assert any(not torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values(), strict=True))


def test_rates_follow_the_schedule(digits):
    trainer = Trainer(short("swag", "swag_lr=0.011", "swag_momentum=0.3", "warmup_epochs=1"), digits, seed=0)
    seen = []
    for _ in trainer.steps():
        group = trainer.optimizer.param_groups[0]
        if trainer.batch == 1:
            seen.append((group["lr"], group["momentum"]))
    assert seen == [(trainer.config.lr, 0.9), (trainer.config.lr, 0.9), (0.011, 0.3), (0.011, 0.3)]


def test_swag_goes_on_in_the_middle_of_its_collection(digits, tmp_path):
    config = short("swag", "swag_interval=3", "swag_epochs=4", "swag_rank=2")
    whole, first = (Trainer(config, digits, seed=0) for _ in range(2))
    for _ in whole.steps():
        pass
    for _ in first.steps():
        if first.collector.num_steps == 11:  # three snapshots, of which two are kept, and on the way to a fourth
            break
    assert (first.epoch, first.batch) == (config.epochs + 2, 1)
    save_checkpoint(tmp_path / "c", first.state())
    second = Trainer(config, digits, seed=0)
    second.load_state(load_checkpoint(tmp_path / "c"))
    assert second.collector.num_snapshots == 3
    for _ in second.steps():
        pass
    assert second.collector.num_snapshots == 20 // 3
    assert_same(second.collector.state_dict(), whole.collector.state_dict())


def test_bfloat16_and_channels_last_train(digits):
    config = override(short("bsam"), ["precision=bfloat16", "channels_last=true"])
    trainer = Trainer(config, digits, seed=0)
    next(trainer.steps())
    assert next(trainer.model.parameters()).dtype == torch.float32
    plain = Trainer(short("bsam"), digits, seed=0)
    next(plain.steps())
    pairs = list(zip(trainer.model.parameters(), plain.model.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in pairs)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.05)
