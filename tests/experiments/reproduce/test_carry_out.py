"""Tasks of a plan are trained together if they differ in seeds and rates only."""

import dataclasses

import pytest

from bsam.experiments.reproduce.carry_out import stack_tasks
from tests.experiments.test_mixed_stacks import make_tasks, start

pytestmark = pytest.mark.filterwarnings("ignore:after .* steps:UserWarning")  # the runs are short


def test_tasks_are_put_together_by_what_may_differ(tmp_path):
    def names(groups):
        return [[task.folder.relative_to(tmp_path).as_posix() for task in group] for group in groups]

    tasks = make_tasks(tmp_path / "a")
    one, two = ["a/first/seed0", "a/first/seed4"], ["a/second/seed0"]
    assert names(stack_tasks(tasks, 3)) == [one + two]
    assert names(stack_tasks(tasks, 2)) == names(stack_tasks(tasks, 1)) == [one, two]
    other = make_tasks(tmp_path / "b", augmentation_factor=2.0)
    assert len(stack_tasks([*tasks, *other], 100)) == 2
    uneven = make_tasks(tmp_path / "c", batch_size=50, splits=4)
    assert [len(group) for group in stack_tasks(uneven, 100)] == [1, 1, 1]
    start(tmp_path / "a")
    assert names(stack_tasks(tasks, 1)) == [one + two]  # begun together
    extra = dataclasses.replace(tasks[0], seed=7, folder=tasks[0].folder.with_name("seed7"))
    assert names(stack_tasks([*tasks, extra], 1)) == [
        one + two + ["a/first/seed7"]
    ]  # whose stack is in the same folder
