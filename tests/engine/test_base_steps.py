"""Steps of torch's optimizers beside a compiled step."""

import copy

import pytest
import torch
from torch import nn

from bsam.engine.base_steps import BaseSteps, snapshot
from bsam.engine.packs import make_packs
from bsam.optim.base_step import BaseStep
from bsam.optim.checked import slots_of
from tests.engine.runs import gpu_batch, on_cuda, on_gpu
from tests.networks import assert_close


@pytest.mark.gpu
@on_cuda
@pytest.mark.usefixtures("_ieee")
@pytest.mark.parametrize("name", ["SGD", "Adam", "SAM-SGD", "SAM-Adam"])
def test_captured_steps_of_torch_follow_their_optimizer(name):
    """Learning rates, other options, a loaded state and a hook, all after the step was captured."""
    captured, plain = on_gpu(name), on_gpu(name)
    steps = [
        run.engine(gpu_batch(), compile=False, cuda_graph=graph) for run, graph in ((captured, True), (plain, False))
    ]

    def both(change=lambda optimizer: None):
        for run, step in zip((captured, plain), steps, strict=True):
            change(run.optimizer)
            for k in range(3):
                step(*gpu_batch(k))
        assert_close(captured.model.state_dict(), plain.model.state_dict(), tolerance=1e-6)

    def set_option(key, value):
        return lambda optimizer: optimizer.param_groups[0].update({key: value})

    both()
    graph = steps[0]._base_steps._captured
    both(set_option("lr", 0.03))
    assert graph is not None
    assert steps[0]._base_steps._captured is graph
    both(set_option("weight_decay", 0.1))
    assert steps[0]._base_steps._captured is not graph
    both(lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())))
    assert captured.optimizer.param_groups[0]["lr"] == 0.03
    seen = []
    base = getattr(captured.optimizer, "base_optimizer", captured.optimizer)
    base.register_step_post_hook(lambda *_: seen.append(1))
    both()
    assert len(seen) == (0 if "SAM" in name else 3)  # SAM calls none of its base optimizer's hooks


@pytest.mark.parametrize("refused", [(0.0, 0.0), (0.0, 1.0)])
def test_each_run_takes_its_own_step_unless_it_is_refused(refused):
    models = [[nn.Parameter(torch.full((2, 2), 1.0 + run)), nn.Parameter(torch.ones(3))] for run in range(2)]
    optimizers = [torch.optim.SGD(model, lr=0.1 * (run + 1), momentum=0.9) for run, model in enumerate(models)]
    packs = make_packs([slots_of(optimizer, None) for optimizer in optimizers], ["a", "b"], [False] * 2)
    gradients = [torch.ones_like(pack.weights) for pack in packs]
    steps = BaseSteps(
        [BaseStep(optimizer, hooks=True) for optimizer in optimizers],
        packs,
        gradients,
        torch.tensor(refused),
        capture=False,
    )
    before = [[p.detach().clone() for p in model] for model in models]
    steps(torch.zeros(2, 1))
    for run, (model, kept) in enumerate(zip(models, before, strict=True)):
        moved = 0.0 if refused[run] else 0.1 * (run + 1)
        torch.testing.assert_close([p.detach() for p in model], [p - moved for p in kept])


def test_a_snapshot_is_written_back_into_the_same_tensors():
    tensors = [torch.ones(2), torch.zeros(3)]
    addresses = [t.data_ptr() for t in tensors]
    undo = snapshot(tensors)
    for tensor in tensors:
        tensor.add_(5)
    undo()
    assert [t.tolist() for t in tensors] == [[1.0] * 2, [0.0] * 3]
    assert [t.data_ptr() for t in tensors] == addresses
