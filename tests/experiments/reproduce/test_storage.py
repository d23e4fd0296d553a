"""Storage: runs in a temporary folder, on copies of files at an fsspec address; what a kill leaves is whole."""

import functools
import pickle

import fsspec
import pytest

from bsam.experiments.record import read_json, write_json
from bsam.experiments.reproduce import storage as module
from bsam.experiments.reproduce.execute import execute
from bsam.experiments.reproduce.storage import Storage, work_in_storage
from bsam.experiments.runs import RunBusyError
from tests.experiments.reproduce.records import results
from tests.experiments.reproduce.test_execute import make_task, nothing

pytestmark = pytest.mark.filterwarnings("ignore:after .* steps:UserWarning")  # the runs are short
WORK = functools.partial(execute, device="cpu", save_minutes=0)


@pytest.fixture(params=["file", "memory"])
def storage(request, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LOOKS", 0)
    if request.param == "file":
        return Storage(f"file://{tmp_path}/storage")
    fsspec.filesystem("memory").store.clear()
    return Storage("memory://storage")


def limited(push, most):
    """Push so many files, and then die."""
    pushed = []

    def push_or_die(self, path, name):
        if len(pushed) == most:
            raise SystemExit
        pushed.append(name)
        push(self, path, name)

    return push_or_die


def test_a_run_goes_on_from_the_files_in_the_storage(storage, tmp_path, monkeypatch):
    task, shares = make_task(tmp_path / "moved"), []
    execute([make_task(tmp_path / "plain")], nothing, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "push", limited(Storage.push, 40))
        with pytest.raises(SystemExit):
            work_in_storage([task], nothing, work=WORK, storage=storage)
    assert f"{task.name}/seed0/checkpoint.safetensors" in storage.names([task])
    work_in_storage([task], shares.append, work=WORK, storage=storage)
    assert shares[0] > 0.3  # it went on, and did not begin again
    assert not task.folder.exists()
    storage.fetch([task])
    assert results(tmp_path / "moved" / "records") == results(tmp_path / "plain" / "records")
    assert sorted(path.name for path in task.folder.iterdir()) == ["config.toml", "log.jsonl", "record.json"]
    shares.clear()
    work_in_storage([task], shares.append, work=WORK, storage=storage)
    assert shares == []  # it is done


def test_the_worker_that_began_last_owns_the_run(storage, tmp_path):
    task = make_task(tmp_path)

    def overtaken(share):
        storage.take(task, b"another")

    with pytest.raises(RunBusyError, match=r"another worker has gone on with table6/mnist/bsam/seed0 in "):
        work_in_storage([task], overtaken, work=WORK, storage=storage)
    names = storage.names([task])
    assert f"{task.name}/seed0/record.json" not in names


def test_what_is_removed_is_removed_there(storage, tmp_path):
    task = make_task(tmp_path)

    def first(tasks, report):
        tasks[0].folder.mkdir(parents=True)
        for name in ("a.toml", "b.toml", ".hidden"):
            (tasks[0].folder / name).write_text(name)

    def second(tasks, report):
        (tasks[0].folder / "a.toml").unlink()
        (tasks[0].folder / "b.toml").write_text("changed")

    work_in_storage([task], nothing, work=first, storage=storage)
    work_in_storage([task], nothing, work=second, storage=storage)
    assert storage.names([task]) == [f"{task.name}/seed0/b.toml"]
    storage.fetch([task])
    assert (task.folder / "b.toml").read_text() == "changed"


def test_ensembles_are_fetched_unless_one_of_more_runs_is_there(storage, tmp_path):
    task, record = make_task(tmp_path), tmp_path / "records" / "ensemble.json"

    def work(tasks, report, *, members):
        tasks[0].record.parent.mkdir(parents=True, exist_ok=True)
        write_json(tasks[0].record.with_name("ensemble.json"), {"members": members})

    for members, kept in ((3, 3), (2, 3), (4, 4)):
        work_in_storage([task], nothing, work=functools.partial(work, members=members), storage=storage)
        storage.fetch([task])
        assert read_json(record) == {"members": kept}


def test_a_storage_is_checked_and_travels(storage):
    storage.check()
    assert pickle.loads(pickle.dumps(storage)).address == storage.address
    assert storage._files.find(storage._root) == []


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("file:///proc/runs", OSError, r"--storage file:///proc/runs cannot be written \(.*\): choose another"),
        ("nowhere://runs", ValueError, "--storage nowhere://runs: Protocol not known: nowhere"),
    ],
)
def test_a_storage_that_cannot_be_written_is_refused(address, error, message):
    with pytest.raises(error, match=message):
        Storage(address).check()
