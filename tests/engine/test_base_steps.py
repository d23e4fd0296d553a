"""Steps of torch's optimizers beside a compiled step."""

import copy

import pytest

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
    graph = steps[0]._captured_steps
    both(set_option("lr", 0.03))
    assert graph is not None
    assert steps[0]._captured_steps is graph
    both(set_option("weight_decay", 0.1))
    assert steps[0]._captured_steps is not graph
    both(lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())))
    assert captured.optimizer.param_groups[0]["lr"] == 0.03
    seen = []
    base = getattr(captured.optimizer, "base_optimizer", captured.optimizer)
    base.register_step_post_hook(lambda *_: seen.append(1))
    both()
    assert len(seen) == (0 if "SAM" in name else 3)  # SAM calls none of its base optimizer's hooks
