"""Groups, options and states are checked before anything changes, for every optimizer."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.optim.contract import assert_same, batch, cross_entropy, network, snapshot, take_step, trained, weights
from tests.optimizers import METHODS, make
from tests.problems import holding

pytestmark = pytest.mark.parametrize("name", METHODS)


def test_load_refuses_other_shapes_before_it_touches_anything(name):
    model, optimizer = trained(name)
    before = snapshot(model, optimizer)
    for change, message in [
        (lambda s: s["state"][0].update({k: v.T for k, v in s["state"][0].items() if v.dim()}), "another model"),
        (lambda s: s["param_groups"][0]["params"].pop(), "parameter groups"),
        (lambda s: s["param_groups"].append(s["param_groups"][0]), "parameter groups"),
        (lambda s: s["param_groups"][0].update(lr=-1.0), "lr=-1.0"),
        (lambda s: s["state"][0].update({k: v.sum() for k, v in s["state"][0].items() if v.dim()}), "of parameter 0"),
    ]:
        state = optimizer.state_dict()
        state["param_groups"][0]["rho"] = 0.77
        change(state)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
        assert_same(snapshot(model, optimizer), before)


def test_state_dict_neither_aliases_nor_is_changed_by_loading(name):
    model, optimizer = trained(name)
    state = optimizer.state_dict()
    kept = copy.deepcopy(state)
    optimizer.step(cross_entropy(model), *batch())
    assert_same(state, kept)
    optimizer.load_state_dict(state)
    optimizer.step(cross_entropy(model), *batch())
    assert_same(state, kept)


def test_load_restores_state_and_options(name):
    _, optimizer = trained(name, splits=2)
    other = make(name, network(name).parameters(), lr=0.5)
    other.load_state_dict(optimizer.state_dict())
    assert_same(other.state_dict(), optimizer.state_dict())
    assert other.param_groups[0]["splits"] == 2


def test_older_state_dicts_load(name):
    """Options that a saved state does not know get the value the optimizer was made with; steps may be numbers."""
    model, optimizer = trained(name)
    state = optimizer.state_dict()
    for option in ("nonfinite", "max_grad_norm", "batch_norm", "perturb"):
        state["param_groups"][0].pop(option, None)
    for each in state["state"].values():
        if "step" in each:
            each["step"] = each["step"].item()
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["nonfinite"] == "raise"
    optimizer.step(cross_entropy(model), *batch())


def test_hooks_on_state_dict_and_load(name):
    _, optimizer = trained(name)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append("state_dict pre"))
    optimizer.register_state_dict_post_hook(lambda opt, state: calls.append("state_dict post"))
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: calls.append("load pre"))
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("load post"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["state_dict pre", "state_dict post", "load pre", "load post"]

    def shrink(opt, state):
        return {**state, "param_groups": [{**g, "lr": g["lr"] / 2} for g in state["param_groups"]]}

    optimizer.register_load_state_dict_pre_hook(shrink)
    lr = optimizer.param_groups[0]["lr"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == lr / 2


def test_groups_are_checked_as_torch_does(name):
    a = nn.Parameter(torch.ones(2))
    optimizer = make(name, [a])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [a]})
    with pytest.raises(TypeError, match="dict"):
        optimizer.add_param_group([a])
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": {nn.Parameter(torch.ones(1))}})
    with pytest.raises(ValueError, match="non-leaf"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1)) * 2]})
    with pytest.raises(ValueError, match="empty parameter list"):
        make(name, [])
    with pytest.raises(TypeError, match="iterable of Tensors"):
        make(name, a)
    assert len(optimizer.param_groups) == 1


def test_a_weight_decay_that_is_written_into_a_group_is_not_ignored(name):
    if not METHODS[name].gaussian:
        pytest.skip("has no prior")
    a = nn.Parameter(torch.ones(2))
    optimizer = make(name, [a], **({"module": holding([a])} if METHODS[name].per_example else {}))
    optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(ValueError, match=r"weight_decay=0\.1 was written into a parameter group, and would be ignored"):
        optimizer.step(lambda x: (a * x).sum(), torch.ones(2, 2))


@pytest.mark.parametrize("key", ["pertub", "momentumm", "weight_decay", "betas2", "splitz"])
def test_options_of_a_group_that_nobody_reads_are_refused(name, key):
    if key == "weight_decay" and (METHODS[name].base or METHODS[name].gaussian):
        pytest.skip("an option of its base optimizer, or another name of its prior")
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=f"{key!r} is not an option of a parameter group of .*would be ignored.*knows"):
        make(name, [{"params": [a], key: 0.5}])
    optimizer = make(name, [a], **({"module": holding([a, b])} if METHODS[name].per_example else {}))
    with pytest.raises(ValueError, match=f"{key!r} is not an option"):
        optimizer.add_param_group({"params": [b], key: 0.5})
    assert len(optimizer.param_groups) == 1


def test_a_misspelt_option_is_named(name):
    with pytest.raises(ValueError, match=r"'spilts' is not an option .*Did you mean 'splits'\?"):
        make(name, [{"params": [nn.Parameter(torch.ones(2))], "spilts": 2}])


def test_what_schedulers_and_trainers_write_into_a_group_passes(name):
    a = nn.Parameter(torch.ones(2))
    extra = dict.fromkeys(
        ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "lr_scale"), 0.1
    )
    optimizer = make(name, [{"params": [a], "name": "head", **extra}])
    optimizer.param_groups[0]["something_later"] = 1
    take_step(optimizer, lambda: (a**2).sum())
    optimizer.load_state_dict(optimizer.state_dict())


# ---------------------------------------------------------------- torch.distributed.checkpoint

CHECKPOINTS = {
    "by name": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_distributed_checkpoints_are_loaded_into_fresh_and_used_optimizers(name, kind, used, tmp_path):
    model, optimizer = trained(name)
    saved = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=CHECKPOINTS[kind]),
    }
    other = network(name)
    resumed = make(name, other.parameters())
    if used:
        resumed.step(cross_entropy(other), *batch(seed=9))
    other.load_state_dict(saved["model"])
    set_optimizer_state_dict(other, resumed, saved["optimizer"], options=CHECKPOINTS[kind])
    for m, o in ((model, optimizer), (other, resumed)):
        o.step(cross_entropy(m), *batch(seed=5))
    assert_same([weights(other), resumed.state_dict()["state"]], [weights(model), optimizer.state_dict()["state"]])
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_comes_back_from_its_files(name, tmp_path):
    model, optimizer = trained(name)
    checkpoint.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    other = network(name)
    other.load_state_dict(model.state_dict())
    resumed = make(name, other.parameters())
    found = {"optimizer": get_optimizer_state_dict(other, resumed)}  # of the fresh optimizer, to be filled
    checkpoint.load(found, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other, resumed, found["optimizer"])
    for m, o in ((model, optimizer), (other, resumed)):
        o.step(cross_entropy(m), *batch(seed=5))
    assert_same([weights(other), resumed.state_dict()["state"]], [weights(model), optimizer.state_dict()["state"]])


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}])
def test_asking_a_fresh_optimizer_for_its_state_is_no_step(name, options):
    if options and not (METHODS[name].base or METHODS[name].gaussian):
        pytest.skip("has no weight decay")
    known = {"prior_precision": None} if options and METHODS[name].gaussian else {}
    model, twin = network(name), network(name)
    optimizer, other = (make(name, m.parameters(), module=m, **options, **known) for m in (model, twin))
    before = weights(model)
    get_optimizer_state_dict(model, optimizer)
    assert_same(weights(model), before)
    assert all(p.grad is None for p in model.parameters())
    for seed in range(3):
        optimizer.step(cross_entropy(model), *batch(seed=seed))
        other.step(cross_entropy(twin), *batch(seed=seed))
    assert_same(snapshot(model, optimizer), snapshot(twin, other))


def test_a_step_without_a_closure_is_refused_unless_a_state_is_asked_for(name):
    model = network(name)
    optimizer = make(name, model.parameters())
    for lr, grad in ((0.0, None), (0.1, 0.0), (0.0, 1.0)):
        optimizer.param_groups[0]["lr"] = lr
        for parameter in model.parameters():
            parameter.grad = None if grad is None else torch.full_like(parameter, grad)
        with pytest.raises(TypeError, match="needs a closure, or a probe before it"):
            optimizer.step()
        assert len(optimizer.state) == 0
