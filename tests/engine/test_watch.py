"""Skipped steps are reported soon, and once."""

import pytest
import torch

from bsam.engine.watch import Watch
from tests.engine.runs import gpu_batch, on_cuda, on_gpu, spoiled
from tests.optim.contract import assert_same


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("name", ["BSAM", "SGD"])
def test_a_captured_step_that_is_not_finite_raises_soon(name):
    run = on_gpu(name)
    good = gpu_batch()
    step = run.engine(good, compile=True)
    step(*good)
    torch.cuda.synchronize()
    step(*good)
    before = run.state()["model"]
    step(*spoiled(good))
    assert_same(run.state()["model"], before)
    with pytest.raises(FloatingPointError, match="Its step was skipped"):  # noqa: PT012
        for _ in range(3):
            torch.cuda.synchronize()
            step(*good)
    step.check()  # it has been said
    step(*spoiled(good))
    with pytest.raises(FloatingPointError, match="Its step was skipped"):
        step.check()  # also of the last step


def test_a_skipped_step_is_reported_once():
    skipped = torch.tensor([1, 0])
    watch = Watch(skipped)  # skipped before: not reported
    watch.look(skipped)
    skipped[1] += 1
    with pytest.raises(FloatingPointError, match="Its step was skipped"):
        watch.look(skipped)
    watch.look(skipped)
    watch.check()
    skipped[0] += 2
    with pytest.raises(FloatingPointError, match="nonfinite='skip'"):
        watch.look(skipped, wait=True)
