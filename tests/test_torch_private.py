"""Each private name of torch does what it stands for: an upgrade of torch that changes one is noticed here."""

import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bsam import torch_private
from bsam.torch_private import (
    AnyBatchNorm,
    NormBase,
    compile_graph,
    foreach_add_,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    graph_break,
    has_step_hooks,
    is_transformed,
    is_view,
    mark_as_stepped,
    own_buffers,
    own_layers,
    own_parameters,
    pytree,
    reduces_gradients,
    reset_after_failure,
    scaler_round,
    scaler_stage,
    scan_stack,
    trace_graph,
    transient_buffers,
    version_of,
)


def test_every_name_is_tested_here():
    assert set(torch_private.__all__) <= set(globals())


def test_normalisation_layers():
    norms = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm1d]
    assert all(issubclass(kind, AnyBatchNorm) and issubclass(kind, NormBase) for kind in norms)
    assert issubclass(nn.InstanceNorm2d, NormBase)
    assert not issubclass(nn.InstanceNorm2d, AnyBatchNorm)
    assert not issubclass(nn.LayerNorm, NormBase)


def test_many_tensors_in_one_launch():
    a, b = [torch.ones(2), torch.ones(3)], [torch.full((2,), 2.0), torch.full((3,), 4.0)]
    foreach_add_(a, b)
    assert [t.tolist() for t in a] == [[3.0] * 2, [5.0] * 3]
    foreach_mul_(a, b)
    assert [t.tolist() for t in a] == [[6.0] * 2, [20.0] * 3]
    assert [float(norm) for norm in foreach_norm([torch.tensor([3.0, 4.0]), torch.ones(2, 2)])] == [5.0, 2.0]
    foreach_copy_(a, b)
    assert all(torch.equal(x, y) and x is not y for x, y in zip(a, b, strict=True))


def test_buffers_of_a_module():
    module = nn.Sequential(nn.BatchNorm1d(2))
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("empty", None)
    module.register_buffer("cache", torch.zeros(1), persistent=False)
    assert set(own_buffers(module)) == {"kept", "empty", "cache"}
    assert own_buffers(module)["empty"] is None
    assert transient_buffers(module) == {"cache"}
    own_buffers(module)["kept"] = replaced = torch.ones(1)
    assert module.kept is replaced


def test_versions_count_writes_in_place():
    tensor = torch.zeros(2)
    before = version_of(tensor)
    assert version_of(tensor + 1) == version_of(torch.ones(2))
    tensor.add_(1)
    assert version_of(tensor) == before + 1


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_a_step(register):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert not has_step_hooks(optimizer)
    handle = getattr(optimizer, register)(lambda *_: None)
    assert has_step_hooks(optimizer)
    handle.remove()
    assert not has_step_hooks(optimizer)


def test_a_scheduler_believes_that_the_optimizer_has_stepped():
    def scheduled():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    _, scheduler = scheduled()
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step\(\)"):
        scheduler.step()
    optimizer, scheduler = scheduled()
    mark_as_stepped(optimizer)
    scheduler.step()  # no warning: warnings are errors here


def test_trees_of_tensors():
    tree = {"a": [1, (2, 3)], "b": {"c": 4}}
    leaves, spec = pytree.tree_flatten(tree)
    assert leaves == pytree.tree_leaves(tree) == [1, 2, 3, 4]
    assert pytree.tree_unflatten(leaves, spec) == tree
    assert pytree.tree_map(lambda x: 2 * x, tree) == {"a": [2, (4, 6)], "b": {"c": 8}}


def test_a_function_is_traced_with_operators_replaced():
    x = torch.tensor([1.0, 2.0])

    def double_cosine(x):
        return 2 * torch.cos(x)

    graph = trace_graph(lambda x: [torch.sin(x) + 1], [x], {torch.ops.aten.sin.default: double_cosine})
    targets = {node.target for node in graph.graph.nodes}
    assert torch.ops.aten.cos.default in targets
    assert torch.ops.aten.sin.default not in targets
    torch.testing.assert_close(graph(x)[0], double_cosine(x) + 1)


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_graph_is_compiled():
    x = torch.tensor([1.0, 2.0])
    compiled = compile_graph(trace_graph(lambda x: [x.sin() + 1], [x], {}), [x], {})
    torch.testing.assert_close(compiled(3 * x)[0], (3 * x).sin() + 1)


def test_tensors_that_share_their_memory():
    whole = torch.ones(4)
    assert is_view(whole[:2])
    assert is_view(whole.view(2, 2))
    assert not is_view(whole)
    assert not is_view(whole[:2].clone())


def test_tensors_of_transforms():
    seen = []
    torch.vmap(lambda x: (seen.append(is_transformed(x)), x)[1])(torch.ones(2))
    torch.func.grad(lambda x: (seen.append(is_transformed(x * 2)), x.sum())[1])(torch.ones(2))
    assert seen == [True, True]
    assert not is_transformed(torch.ones(2))


def test_the_compiler_does_not_look_into_a_graph_break():
    seen = []

    @graph_break
    def look(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    torch.compiler.reset()
    assert torch.compile(lambda x: 2 * look(x), backend="eager")(torch.ones(())) == 4
    assert look(torch.ones(())) == 2
    assert seen == [False, False]


def test_what_a_scaler_has_done_with_the_gradients():
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), torch.amp.GradScaler("cpu")
    rounds = []
    for _ in range(2):
        rounds.append(scaler_round(scaler))
        assert scaler_stage(scaler, optimizer) == "READY"
        scaler.scale(parameter.sum()).backward()
        assert scaler_stage(scaler, optimizer) == "READY"
        scaler.unscale_(optimizer)
        assert scaler_stage(scaler, optimizer) == "UNSCALED"
        scaler.step(optimizer)
        assert scaler_stage(scaler, optimizer) == "STEPPED"
        assert scaler_round(scaler) is rounds[-1]
        scaler.update()
        optimizer.zero_grad()
    assert rounds[0] is not rounds[1]


def test_the_state_of_a_sharded_model(tmp_path):
    from torch.distributed.fsdp import fully_shard

    class Layer(nn.Linear):
        fails = False

        def forward(self, x):
            if self.fails:
                raise KeyError("in the forward pass")
            return super().forward(x)

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = nn.Sequential(Layer(3, 2), Layer(2, 2))
        mesh = dist.init_device_mesh("cpu", (1,))
        for part in (model[0], model[1], model):
            fully_shard(part, mesh=mesh)
        assert all(reduces_gradients(part) for part in (model[0], model[1], model))
        model[0].set_requires_gradient_sync(False)
        assert not reduces_gradients(model[0])
        assert reduces_gradients(model[1])
        model[0].set_requires_gradient_sync(True)
        model[1].fails = True
        with pytest.raises(KeyError):
            model(torch.ones(1, 3))
        model[1].fails = False
        for part in (model, model[0], model[1]):  # only the root can be reset
            reset_after_failure(part)
        model(torch.ones(1, 3)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        dist.destroy_process_group()


def test_a_loop_over_stacks_is_one_operator_of_an_exported_program():
    class Loop(nn.Module):
        def forward(self, x, a, b):
            return scan_stack(lambda slices: x * slices[0] + slices[1], [a, b])

    x, a, b = torch.ones(3), torch.arange(4.0), torch.arange(4.0) * 10
    program = torch.export.export(Loop(), (x, a, b))
    assert torch.equal(program.module()(x, a, b), (11 * a)[:, None].expand(4, 3))
    assert sum(node.op == "call_function" and "scan" in str(node.target) for node in program.graph.nodes) == 1


def test_the_layers_of_a_module():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    assert own_layers(module) == dict(module.named_children())
    module[0] = replaced = nn.Tanh()
    assert own_layers(module)["0"] is replaced
    assert own_parameters(nn.Linear(2, 2, bias=False)).keys() == {"weight", "bias"}
