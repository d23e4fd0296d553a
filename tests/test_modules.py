"""Names, buffers, snapshots and modes of modules."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bsam.modules import (
    BufferSnapshot,
    GradientSnapshot,
    LossModule,
    OutputModel,
    all_buffers,
    call_model,
    clean_names,
    differentiable,
    evaluating,
    floating_type,
    keys_of,
    named_buffers,
    named_parameters,
    normalisation_layers,
    output_tensor,
    preserved,
    preserved_attributes,
    restored_on_failure,
    running_statistics,
    unwrapped,
)
from tests.posterior.kinds import make_net, same, snapshot


def test_unwrapped():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0] = torch.compile(model[0], backend="eager")
    for wrapped in (model, nn.DataParallel(model), torch.compile(nn.DataParallel(model), backend="eager")):
        assert unwrapped(wrapped) is model
    assert not isinstance(unwrapped(model[0]), type(model[0]))


def test_the_tensor_of_outputs():
    y = torch.ones(2)
    for outputs in (y, {"logits": y, "loss": 0}, SimpleNamespace(logits=y)):
        assert output_tensor(outputs) is y
    for outputs in (None, (y,), {"scores": y}):
        with pytest.raises(TypeError, match=r"it must return a tensor, or an object with \.logits"):
            output_tensor(outputs)


def test_some_parameters_are_preserved():
    net = make_net()
    before = snapshot(net)
    with preserved(net, ["scale"]), torch.no_grad():
        net.scale.add_(1)
        net.frozen.bias.add_(1)
        net.offset.add_(1)
    after = snapshot(net)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"frozen.bias"}


def test_the_type_of_inputs():
    assert floating_type(nn.Sequential(nn.ReLU())) is None
    assert floating_type(nn.Linear(2, 2).double()) == torch.float64
    assert floating_type(nn.BatchNorm1d(2, affine=False).half()) == torch.float16


def test_clean_names():
    assert clean_names([]) == {}
    assert clean_names(["a._orig_mod.w"]) == {"a._orig_mod.w": "a.w"}
    assert clean_names(["module.a", "head"]) == {"module.a": "module.a", "head": "head"}  # a layer, not a wrapper


def test_preserved_attributes():
    counting = nn.Module()
    counting.count, counting.seen, counting.name = torch.zeros(2), [1], "counting"
    kept = counting.seen
    with preserved_attributes([counting]):
        counting.count += 1
        counting.seen.append(2)
        counting.name = "other"
    assert torch.equal(counting.count, torch.zeros(2))
    assert (counting.seen, counting.name, kept) == ([1], "counting", [1, 2])


def test_preserved_restores_everything():
    net = make_net()
    before = snapshot(net)
    with preserved(net), torch.no_grad():
        for t in (*net.parameters(), *net.buffers()):
            t.zero_()
    assert same(before, snapshot(net))


def test_parameters_and_buffers_by_name():
    net = make_net()
    wrapped = nn.Module()
    wrapped.module = net
    assert list(named_parameters(wrapped)) == [name for name, _ in net.named_parameters()]
    assert "head.weight" not in named_parameters(wrapped)  # tied to embed.weight
    assert named_buffers(wrapped).keys() == net.state_dict().keys() - {
        name for name, _ in net.named_parameters(remove_duplicate=False)
    }
    assert "cache" not in named_buffers(wrapped)  # not persistent


def test_names_in_a_loss_module():
    net = make_net()
    names = keys_of(net, [net.scale, net.head.weight])
    assert names == ["module.scale", "module.embed.weight"]
    assert set(names) <= set(dict(LossModule(net, lambda: 0.0).named_parameters()))
    with pytest.raises(RuntimeError, match="do not belong to module="):
        keys_of(net, [nn.Parameter(torch.ones(1))])


def test_normalisation_layers_and_their_statistics():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.InstanceNorm1d(2), nn.LayerNorm(2))
    assert [name for name, _ in normalisation_layers(model)] == ["1", "2"]
    assert {(owner, name) for owner, name in running_statistics(model)} == set(all_buffers(model))
    assert {name for owner, name in running_statistics(model) if owner is model[1]} == set(
        dict(model[1].named_buffers())
    )


def test_buffers_are_restored_into_the_same_tensors():
    net = make_net()
    net.register_buffer("empty", None)
    before, addresses = snapshot(net), {name: id(b) for name, b in net.named_buffers()}
    buffers = BufferSnapshot(all_buffers(net))
    net.offset.add_(1)
    net.norm.running_mean = torch.ones(4, dtype=torch.float64)
    net.empty = torch.ones(1)
    buffers.restore()
    assert same(before, snapshot(net))
    assert {name: id(b) for name, b in net.named_buffers()} == addresses
    assert net.empty is None


@pytest.mark.parametrize("keep", [True, False])
def test_buffers_are_kept_if_the_step_was_good(keep):
    net = make_net()
    buffers = BufferSnapshot(all_buffers(net))
    before = net.offset.clone()
    net.offset.add_(1)
    buffers.restore(unless=torch.tensor(keep))
    assert torch.equal(net.offset, before + 1 if keep else before)


def test_gradients_are_restored_as_the_same_objects():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    a.grad = kept = torch.ones(1)
    grads = GradientSnapshot([a, b])
    a.grad, b.grad = torch.zeros(1), torch.zeros(1)
    grads.restore()
    assert a.grad is kept
    assert b.grad is None


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_restored_on_failure_only(error):
    a = nn.Parameter(torch.ones(1))
    module = nn.BatchNorm1d(1)

    def change():
        with restored_on_failure(GradientSnapshot([a]), BufferSnapshot(all_buffers(module))):
            a.grad = torch.ones(1)
            module.running_mean.add_(1)
            if error is not None:
                raise error

    with contextlib.nullcontext() if error is None else pytest.raises(error):
        change()
    assert (a.grad is None) == (error is not None)
    assert module.running_mean.item() == (0 if error else 1)


def test_preserved_restores_after_an_exception():
    net = make_net()
    before = snapshot(net)

    def change():
        with preserved(net):
            net.scale.data.zero_()
            net.norm.running_var = torch.zeros(4, dtype=torch.float64)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        change()
    assert same(before, snapshot(net))


def test_modes_come_back_layer_by_layer():
    net = make_net().train()
    net.norm.eval()
    modes = [module.training for module in net.modules()]
    with evaluating(net):
        assert not any(module.training for module in net.modules())
    assert [module.training for module in net.modules()] == modes


def test_differentiable_lends_the_flag():
    net = make_net()
    flags = [p.requires_grad for p in net.parameters()]
    with differentiable(list(net.parameters())):
        net(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        assert net.frozen.weight.grad is not None
    assert [p.requires_grad for p in net.parameters()] == flags
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (None, TypeError, "returned NoneType: it must return the loss"),
        (torch.ones(2), ValueError, r"shape \(2,\): it must return one number"),
    ],
)
def test_a_loss_module_returns_one_number(loss, error, message):
    model = nn.Linear(2, 1)
    x = torch.ones(3, 2)
    module = LossModule(model, lambda x: model(x).mean())
    assert {name for name, _ in module.named_parameters()} == {"module.weight", "module.bias"}
    torch.testing.assert_close(module((x,)), model(x).mean())
    assert LossModule(model, lambda x: 3)((x,)) == 3
    assert LossModule(model, lambda x: torch.ones(1, 1))((x,)).shape == ()
    with pytest.raises(error, match=message):
        LossModule(model, lambda x: loss)((x,))


class Named(nn.Module):
    def forward(self, first, second=2.0):
        return first * second


def test_inputs_become_arguments():
    x = torch.ones(2)
    for inputs, expected in ((x, 2 * x), ((x, 3.0), 3 * x), ([x], 2 * x), ({"first": x, "second": 4.0}, 4 * x)):
        assert torch.equal(call_model(Named(), inputs), expected)
        assert torch.equal(OutputModel(Named(), None)(inputs), expected)
    for wrap in (lambda y: {"logits": y}, lambda y: SimpleNamespace(logits=y)):
        assert torch.equal(OutputModel(Named(), lambda model, x, wrap=wrap: wrap(model(x)))(x), 2 * x)
    with pytest.raises(TypeError, match="the model returned tuple"):
        OutputModel(Named(), lambda model, x: (model(x),))(x)
