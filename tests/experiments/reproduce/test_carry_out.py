"""Tasks of a plan are trained together if they differ in seeds and rates only; `--on ray` trains them on Ray."""

import dataclasses
import shutil
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bsam.experiments.commands import app
from bsam.experiments.reproduce.carry_out import stack_tasks
from bsam.experiments.reproduce.execute import execute
from bsam.experiments.reproduce.plan import Places, make_plan, wanted_by_table
from tests.experiments.reproduce.records import results
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


# ---------------------------------------------------------------- Ray

RUN = ["reproduce", "table6", "--block", "mnist", "--methods", "sgd", "--scale", "tiny", "--seeds", "1"]


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # Ray's
@pytest.mark.filterwarnings("ignore::FutureWarning:ray")
def test_the_command_on_ray_leaves_the_record_of_the_command_without(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    temporary = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # the names of Ray's sockets must be short
    monkeypatch.setenv("RAY_TMPDIR", temporary)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "src"))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, [*RUN, "--on", "ray", "--records", "records", "--storage", f"file://{tmp_path}/storage"]
    )
    shutil.rmtree(temporary, ignore_errors=True)
    assert done.exit_code == 0, done.output
    places = Places(tmp_path / "plain", tmp_path / "plain", tmp_path)
    wanted = wanted_by_table("table6", "mnist", ["sgd"])
    execute(make_plan(wanted, seeds=1, scale="tiny", places=places).tasks, lambda share: None, device="cpu")
    assert results(tmp_path / "records") == results(tmp_path / "plain")
    assert not list(tmp_path.glob("runs/**/*.safetensors"))  # they are in the storage
    assert len(list(tmp_path.glob("storage/tiny/table6/mnist/sgd/seed0/posterior.safetensors"))) == 1
    again = CliRunner().invoke(app, [*RUN, "--on", "ray", "--records", "records"])
    assert "All 1 runs are recorded" in again.output


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on", "ray://localhost:1"], "--on ray://localhost:1: nothing answers there (Connection refused). Start"),
        (["--on", "ray", "--storage", "file:///proc/runs"], "--storage file:///proc/runs/tiny cannot be written"),
        (["--on", "ray", "--storage", "nowhere://runs"], "--storage nowhere://runs/tiny: Protocol not known: nowhere"),
        (["--on", "ray", "--runs", "/proc/runs"], "/proc cannot be written"),
    ],
)
def test_bad_input_for_ray_is_one_sentence_before_anything_changes(options, message, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*RUN, *options])
    assert result.exit_code == 1
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []
