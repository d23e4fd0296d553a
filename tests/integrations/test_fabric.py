"""Training with Fabric equals the plain loop."""

import pytest

pytest.importorskip("lightning")

import lightning
import torch
import torch.nn.functional as F
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy

from bsam.integrations.fabric import probe, probe_with
from tests.integrations.test_lightning import assert_equal, batches, network, plain
from tests.optimizers import make

pytestmark = [pytest.mark.integrations]


def train(model, fabric, accumulate=1, max_norm=None):
    inner = make("BSAM", model.parameters())
    model, optimizer = fabric.setup(model, inner)
    dtype = next(model.parameters()).dtype
    for i, (x, y) in enumerate(batches()):
        probe(fabric, model, optimizer, lambda x, y: F.cross_entropy(model(x).double(), y), x.to(dtype), y)
        if (i + 1) % accumulate == 0:
            if max_norm is not None:
                fabric.clip_gradients(model, optimizer, max_norm=max_norm)
            optimizer.step()
    return inner


def fabric(**arguments):
    return lightning.Fabric(accelerator="cpu", devices=1, **arguments)


def test_fabric_is_the_plain_loop():
    model = network()
    train(model, fabric(), accumulate=2)
    given = batches()
    assert_equal(model, plain("BSAM", [given[i : i + 2] for i in range(0, len(given), 2)])[0])


def test_clipping_and_bfloat16():
    model = network().float()
    train(model, fabric(precision="bf16-mixed"), max_norm=0.1)
    expected = network().float()
    optimizer = make("BSAM", expected.parameters())
    for x, y in batches():
        with torch.autocast("cpu", torch.bfloat16):
            optimizer.probe(lambda x, y: F.cross_entropy(expected(x).double(), y), x.float(), y)
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        optimizer.step()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.01)  # Fabric also rounds the inputs


def test_float16_with_a_scaler():
    model, scaler = network().float(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    inner = train(model, fabric(plugins=[MixedPrecision("16-mixed", "cpu", scaler)]), max_norm=10.0)
    expected = plain("BSAM", [[batch] for batch in batches()])[0]
    assert inner.skipped_steps == 0
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("overflow", [1, 2])
def test_an_overflow_in_one_gradient_is_skipped_and_lowers_the_scale(overflow):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    own = fabric(plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    model, passes = network().float(), []
    inner = make("BSAM", model.parameters())
    before = [parameter.clone() for parameter in model.parameters()]
    wrapped, optimizer = own.setup(model, inner)

    def loss_fn(x, y):
        loss = F.cross_entropy(wrapped(x).double(), y)
        passes.append(loss)
        if len(passes) == overflow:
            loss.register_hook(lambda gradient: gradient * torch.inf)
        return loss

    for x, y in batches()[:2]:
        probe(own, wrapped, optimizer, loss_fn, x.float(), y)
        own.clip_gradients(wrapped, optimizer, max_norm=1.0, error_if_nonfinite=False)  # as the page has it
        optimizer.step()
        moved = any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        assert moved == (len(passes) > 2)
        assert scaler.get_scale() == 2.0**9
    assert inner.skipped_steps == 1


def test_a_checkpoint_of_fabric(tmp_path):
    own = fabric()
    whole = network()
    train(whole, own)
    model = network()
    wrapped, optimizer = own.setup(model, make("BSAM", model.parameters()))
    for x, y in batches()[:3]:
        probe(own, wrapped, optimizer, lambda x, y: F.cross_entropy(wrapped(x), y), x, y)
        optimizer.step()
    own.save(tmp_path / "half.ckpt", {"model": wrapped, "optimizer": optimizer})

    model = network()
    wrapped, optimizer = own.setup(model, make("BSAM", model.parameters()))
    own.load(tmp_path / "half.ckpt", {"model": wrapped, "optimizer": optimizer})
    for x, y in batches()[3:]:
        probe(own, wrapped, optimizer, lambda x, y: F.cross_entropy(wrapped(x), y), x, y)
        optimizer.step()
    assert_equal(model, whole)


@pytest.mark.filterwarnings("ignore:after 6 steps")  # so few that the precision is mostly its starting value
def test_the_posterior_is_that_of_the_plain_loop():
    model = network()
    found = train(model, fabric()).posterior(model)
    twin, optimizer, _ = plain("BSAM", [[batch] for batch in batches()])
    expected = optimizer.posterior(twin)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.std, expected.std)


def test_weights_and_joined_micro_batches():
    own = fabric()
    models, weights = [network(), network()], [3.0, 5.0]
    wrapped, optimizer = own.setup(models[0], make("BSAM", models[0].parameters()))
    expected = make("BSAM", models[1].parameters())
    for (x, y), weight, last in zip(batches(), weights, (False, True), strict=False):
        loss = probe(
            own, wrapped, optimizer, lambda x, y: F.cross_entropy(wrapped(x), y), x, y, weight=weight, last=last
        )
        other = expected.probe(lambda x, y: F.cross_entropy(models[1](x), y), x, y, weight=weight, last=last)
        assert torch.equal(loss, other)
    optimizer.step()
    expected.step()
    assert_equal(*models)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_float16_on_a_gpu():
    own = lightning.Fabric(accelerator="gpu", devices=1, precision="16-mixed")
    model, expected = network().float(), network().float().cuda()
    inner, scaler = make("BSAM", model.parameters()), torch.amp.GradScaler("cuda")
    optimizer, (wrapped, outer) = make("BSAM", expected.parameters()), own.setup(model, inner)

    def loss_fn(x, y):
        with torch.autocast("cuda", torch.float16):
            return F.cross_entropy(expected(x).double(), y)

    for x, y in batches():
        x, y = x.float().cuda(), y.cuda()
        probe(own, wrapped, outer, lambda x, y: F.cross_entropy(wrapped(x).double(), y), x, y)
        own.clip_gradients(wrapped, outer, max_norm=0.5)
        outer.step()
        optimizer.probe(loss_fn, x, y, scaler=scaler)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert own.strategy.precision.scaler.get_scale() == scaler.get_scale()
    assert inner.skipped_steps == optimizer.skipped_steps
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)  # Fabric also rounds the outputs


@pytest.mark.parametrize(("kind", "options"), [("BSAM", {"splits": 2}), ("VOGN", {})])
def test_ranks_that_an_averaging_model_would_get_wrong_are_refused(kind, options):
    model = network()
    optimizer = make(kind, model.parameters(), module=model, **options)
    with pytest.raises(ValueError, match=r"process_group=torch\.distributed\.group\.WORLD"):
        probe_with(DDPStrategy(), optimizer, lambda x, y: F.cross_entropy(model(x), y), *batches()[0], weight=None)


@pytest.mark.parametrize("strategy", [FSDPStrategy, lambda: DDPStrategy(static_graph=True)])
def test_other_strategies_are_refused(strategy):
    optimizer = make("BSAM", network().parameters())
    with pytest.raises(ValueError, match="strategy='ddp'"):
        probe_with(strategy(), optimizer, None, *batches()[0], weight=None)


def test_other_optimizers_and_iterators_are_refused():
    own, model = fabric(), network()
    wrapped, optimizer = own.setup(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(TypeError, match=r"SGD: make one optimizer of bsam"):
        probe(own, wrapped, optimizer, None, *batches()[0])
    with pytest.raises(TypeError, match="iterator"):
        probe(own, wrapped, make("BSAM", model.parameters()), None, iter(batches()))
