"""Training with Fabric equals the plain loop."""

import pytest

pytest.importorskip("lightning")

import lightning
import torch
import torch.nn.functional as F
from lightning.fabric.plugins import MixedPrecision

from bsam.integrations.fabric import probe
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


@pytest.mark.parametrize(("options", "has_weight"), [({"splits": 2}, False), ({}, True)])
def test_ranks_that_an_averaging_model_would_get_wrong_are_refused(options, has_weight):
    optimizer = make("BSAM", network().parameters(), **options)
    with pytest.raises(ValueError, match=r"process_group=torch\.distributed\.group\.WORLD"):
        averages_gradients(optimizer, 2, has_weight=has_weight)
    assert not averages_gradients(optimizer, 1, has_weight=has_weight)
