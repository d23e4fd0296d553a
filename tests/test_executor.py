"""The choice between vmap and a loop: what each value of `vectorise` does, and which errors are whose."""

import pytest
import torch
from torch import nn

from bsam.executor import Executor, callers_level, quiet_vmap, refuse_under_vmap


class Ways:
    """Two ways to a result that count their calls; `errors` are raised by the first calls of the way together."""

    def __init__(self, *errors, in_loop=None):
        self.errors, self.in_loop = list(errors), in_loop
        self.calls = {"together": 0, "loop": 0}

    def together(self):
        self.calls["together"] += 1
        if self.errors:
            raise self.errors.pop(0)
        return "together"

    def loop(self):
        self.calls["loop"] += 1
        if self.in_loop is not None:
            raise self.in_loop
        return "loop"

    def run(self, executor, **options):
        return executor.run(self.together, self.loop, **{"pays": True, **options})


def executor(vectorise=None, module=None, **options):
    return Executor(vectorise, "the parts are computed in a loop", module, **options)


@pytest.mark.parametrize(
    ("vectorise", "pays", "expected"),
    [
        (True, True, "together"),
        (True, False, "together"),
        (False, True, "loop"),
        (False, False, "loop"),
        (None, True, "together"),
        (None, False, "loop"),
    ],
)
def test_what_vectorise_decides(vectorise, pays, expected):
    made = executor(vectorise)
    assert made.tries_vmap(pays) == (expected == "together")
    assert Ways().run(made, pays=pays) == expected


def test_an_obstacle_is_an_error_if_vmap_was_asked_for_and_else_one_warning():
    with pytest.raises(ValueError, match="vectorise=True is not possible here: the parts differ"):
        Ways().run(executor(True), obstacle="the parts differ")
    assert Ways().run(executor(False), obstacle="the parts differ") == "loop"
    made, ways = executor(), Ways()
    with pytest.warns(UserWarning, match="the parts are computed in a loop, because the parts differ"):
        assert ways.run(made, obstacle="the parts differ") == "loop"
    assert ways.run(made, obstacle="the parts differ") == "loop"  # no second warning: warnings are errors here
    assert ways.run(made) == "together"  # an obstacle is no failure


def test_after_two_failures_the_loop_is_taken_with_one_warning_and_vmap_is_not_tried_again():
    made, ways = executor(), Ways(RuntimeError("no rule\nfor this"), RuntimeError("no rule"))
    with pytest.warns(UserWarning, match="in a loop, because vmap failed with RuntimeError: no rule") as caught:
        assert ways.run(made) == "loop"
    assert len(caught) == 1
    assert caught[0].filename == __file__  # the line of the user, not one of ours
    assert made.failure == "vmap failed with RuntimeError: no rule"
    assert ways.calls == {"together": 2, "loop": 1}
    assert ways.run(made) == "loop"
    assert ways.calls == {"together": 2, "loop": 2}


def test_an_error_that_comes_once_is_raised_and_vmap_goes_on():
    made, ways = executor(), Ways(RuntimeError("once"))
    with pytest.raises(RuntimeError, match="once"):
        ways.run(made)
    assert made.failure is None
    assert ways.run(made) == "together"
    assert ways.calls["loop"] == 0


def test_an_error_of_another_kind_the_second_time_is_no_failure_of_vmap():
    made, ways = executor(), Ways(RuntimeError("first"), OSError("second"))
    with pytest.raises(RuntimeError, match="first"):
        ways.run(made)
    assert made.failure is None


def test_an_error_that_the_loop_raises_too_is_the_users():
    made = executor()
    with pytest.raises(RuntimeError, match="in the loop"):
        Ways(RuntimeError("a"), RuntimeError("a"), in_loop=RuntimeError("in the loop")).run(made)
    assert made.failure is None
    assert Ways().run(made) == "together"


@pytest.mark.parametrize(("vectorise", "error"), [(True, RuntimeError), (None, OSError)])
def test_errors_that_are_raised_at_once(vectorise, error):
    """If vmap was asked for, or if vmap does not cause errors of this kind."""
    ways = Ways(error("at once"))
    with pytest.raises(error, match="at once"):
        ways.run(executor(vectorise))
    assert ways.calls == {"together": 1, "loop": 0}


def test_buffers_are_restored_before_the_loop_runs():
    module = nn.BatchNorm1d(2)
    seen = []

    def together():
        seen.append(module.num_batches_tracked.item())
        module.num_batches_tracked.add_(1)
        raise RuntimeError("no rule")

    def loop():
        seen.append(module.num_batches_tracked.item())

    with pytest.warns(UserWarning, match="no rule"):
        executor(module=module).run(together, loop, pays=True)
    assert seen == [0, 0, 0]


def test_launch_bound():
    assert not Executor.launch_bound(torch.device("cpu"))
    assert Executor.launch_bound(torch.device("cuda"))


def test_quiet_vmap_is_vmap_without_hints_on_speed():
    def warn(x):
        import warnings

        warnings.warn("There is a performance drop because we have not yet implemented the batching rule for this")
        return x.sum()

    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(quiet_vmap(warn)(x), x.sum(1))
    assert torch.equal(quiet_vmap(lambda a, b: a * b, in_dims=(0, None))(x, torch.ones(3)), x)


def test_the_level_of_a_warning_is_that_of_code_outside_of_the_package():
    assert callers_level() == 1


def test_values_that_must_be_plain():
    refuse_under_vmap([torch.ones(2), 1.0, "loss"])
    with pytest.raises(RuntimeError, match="vectorise=False"):
        torch.vmap(lambda x: (refuse_under_vmap([1.0, x]), x)[1])(torch.ones(2))
