"""IVON as the runs use it: step for step ivon-opt's own, with noise of its seed, an exact state and its posterior."""

import sys

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from bsam.experiments.commands import app
from bsam.experiments.config import override
from bsam.experiments.data import load
from bsam.experiments.ivon import Ivon
from bsam.experiments.paper.presets import preset
from bsam.experiments.trainer import Trainer, train_together
from tests.optim.test_contract import assert_same

SETTINGS = {"lr": 0.1, "num_data": 200.0, "prior_precision": 4.0, "betas": (0.9, 0.99), "initial_hessian": 0.5}


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def batches(count, size=16):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator)


def make_ivon(model, **changes):
    pytest.importorskip("ivon")
    return Ivon(model.parameters(), **{**SETTINGS, "seed": 3, **changes})


def loss_of(model):
    return lambda x, y: F.cross_entropy(model(x), y)


def test_a_step_is_that_of_the_package():
    ivon = pytest.importorskip("ivon")
    model, reference = make_model(), make_model()
    ours = make_ivon(model)
    theirs = ivon.IVON(
        reference.parameters(), lr=0.1, ess=200.0, weight_decay=0.02, beta1=0.9, beta2=0.99, hess_init=0.5
    )
    for x, y in batches(30):
        with ours.noise():  # the seed of the step that comes next
            with theirs.sampled_params(train=True):
                theirs.zero_grad()
                loss = F.cross_entropy(reference(x), y)
                loss.backward()
            theirs.step()
        assert torch.equal(ours.step(loss_of(model), x, y), loss.detach())
        assert_same(model.state_dict(), reference.state_dict())
    assert torch.equal(ours.param_groups[0]["hess"], theirs.param_groups[0]["hess"])
    assert ours.steps_taken == theirs.current_step == 30


def test_weights_and_state_stay_where_they_are():
    model = make_model()
    ivon = make_ivon(model)
    tensors = [*model.parameters(), ivon.param_groups[0]["momentum"], ivon.param_groups[0]["hess"]]
    addresses = [t.data_ptr() for t in tensors]
    for x, y in batches(2):
        ivon.step(loss_of(model), x, y)
    now = [*model.parameters(), ivon.param_groups[0]["momentum"], ivon.param_groups[0]["hess"]]
    assert [t.data_ptr() for t in now] == addresses


def test_an_exception_in_the_loss_leaves_all_as_before():
    model = make_model()
    ivon = make_ivon(model)
    (x, y), (more_x, more_y) = batches(2)
    ivon.step(loss_of(model), x, y)
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    state = {name: value.clone() if torch.is_tensor(value) else value for name, value in ivon.state_dict().items()}

    def fails(x, y):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        ivon.step(fails, x, y)
    assert_same(model.state_dict(), weights)
    assert_same(ivon.state_dict(), state)
    ivon.step(loss_of(model), more_x, more_y)


def test_noise_is_a_function_of_seed_and_step_and_the_generator_is_left_alone():
    (x, y), *_ = batches(1)
    losses = {}
    for seed in (3, 3, 4):
        model = make_model()
        ivon = make_ivon(model, seed=seed)
        torch.manual_seed(len(losses))
        before = torch.get_rng_state()
        two = [float(ivon.step(loss_of(model), x, y)) for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), before)
        assert losses.setdefault(seed, two) == two
    assert losses[3] != losses[4]


def test_the_posterior_is_what_the_package_samples_from():
    model = make_model()
    ivon = make_ivon(model)
    for x, y in batches(20):
        ivon.step(loss_of(model), x, y)
    posterior = ivon.posterior(model)
    assert_same(posterior.mean, dict(model.named_parameters()))
    assert posterior.prior_precision == dict.fromkeys(posterior.mean, 4.0)
    samples = []
    torch.manual_seed(0)
    for _ in range(4000):
        with ivon.optimizer.sampled_params():
            samples.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    found, expected = torch.stack(samples).std(0), torch.cat([std.flatten() for std in posterior.std.values()])
    assert expected.max() / expected.min() > 1.05  # it learned something about them
    torch.testing.assert_close(found, expected, rtol=0.06, atol=0)  # five standard errors


def test_what_diverged_has_no_posterior():
    model = make_model()
    ivon = make_ivon(model, lr=1e30)
    for x, y in batches(3):
        ivon.step(loss_of(model), x, y)
    with pytest.raises(FloatingPointError, match=r"diverged\. Write a lower lr"):
        ivon.posterior(model)


def test_seeds_trained_in_turn_are_seeds_alone():
    pytest.importorskip("ivon")
    config = override(preset("digits/ivon"), ["epochs=2"])
    digits = load("digits", validation=config.validation)
    together, alone = ([Trainer(config, digits, seed=seed) for seed in (0, 1)] for _ in range(2))
    for _ in train_together(together):
        pass
    for one, other in zip(alone, together, strict=True):
        for _ in one.steps():
            pass
        assert_same(one.state()["model"], other.state()["model"])
        assert_same(one.state()["optimizer"], other.state()["optimizer"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "digits/ivon", "--out", "runs"],
        ["reproduce", "table1", "--block", "cifar10", "--methods", "ivon", "--scale", "tiny"],
    ],
)
def test_without_the_package_nothing_is_written_and_it_is_said_what_to_install(arguments, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ivon", None)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert str(done.exception) == (
        "method='ivon' needs ivon-opt, which has another licence (GPL-3) and does not come with bsam: "
        "pip install ivon-opt"
    )
    assert list(tmp_path.iterdir()) == []
