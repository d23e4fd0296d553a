"""Ray: on a cluster of three nodes every run ends with the record that it has without Ray, whatever is killed."""

import dataclasses
import functools
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from bsam.experiments.reproduce.cluster import _check_marks, check_address, connected
from bsam.experiments.reproduce.execute import execute
from bsam.experiments.reproduce.plan import Places, make_plan, wanted_by_table
from bsam.experiments.reproduce.storage import Storage, work_in_storage
from bsam.experiments.runs import RunBusyError
from bsam.files import locked
from tests.experiments.reproduce.records import results
from tools.three_nodes import NODE, three_nodes

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore:after .* steps:UserWarning"),  # the runs are short
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),  # Ray's
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]
TABLE = ["table6", "--block", "mnist", "--methods", "sgd,bsam", "--scale", "tiny", "--seeds", "2"]


def make_tasks(folder):
    """Four runs, as the command with `TABLE` plans them."""
    places = Places(folder / "runs" / "tiny", folder / "records", folder)
    return make_plan(wanted_by_table("table6", "mnist", ["sgd", "bsam"]), seeds=2, scale="tiny", places=places).tasks


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The results of the same runs without Ray."""
    folder = tmp_path_factory.mktemp("plain")
    for task in make_tasks(folder):
        execute([task], lambda share: None, device="cpu")
    found = results(folder / "records")
    assert len(found) == 4
    return found


@pytest.fixture(scope="module")
def nodes():
    """A head without cores, and two nodes with one core each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with three_nodes(port) as found:
        found.clients = f"ray://localhost:{port}"
        yield found


@pytest.fixture(scope="module")
def cluster(nodes):
    """One connection for all tests, so that workers are started once."""
    with connected(nodes.clients) as found:
        yield found


def noted(tasks, report, *, folder, storage=None, killed=()):
    """Train slowly, and note for each attempt its process, its node, and where it begins.

    The first attempt of a run in `killed` hardly moves after its middle, so that it is stopped before its end.
    """
    name = f"{tasks[0].config.method}{tasks[0].seed}"
    notes = folder / "notes" / name
    begun = []

    def slowly(share):
        if not begun:
            begun.append(share)
            with notes.open("a") as file:
                file.write(f"{os.getpid()} {ray.get_runtime_context().get_node_id()} {share}\n")
        time.sleep(0.5 if share > 0.5 and name in killed and begun[0] < 0.1 else 0.01)
        report(share)

    work = functools.partial(execute, device="cpu", save_minutes=0.001)
    if storage is None:
        work(tasks, slowly)
    else:
        work_in_storage(tasks, slowly, work=work, storage=storage)


def read_notes(folder):
    """By run, a list of (process, node, share at its beginning)."""
    found = {}
    for path in (folder / "notes").iterdir():
        lines = [line.split() for line in path.read_text().splitlines()]
        found[path.name] = [(int(process), node, float(share)) for process, node, share in lines]
    return found


def stored(tasks, report, *, storage, **options):
    """One of the runs is kept in a storage, the others in the folder that all nodes share."""
    noted(tasks, report, storage=storage if tasks[0].record.parts[-2:] == ("bsam", "seed0.json") else None, **options)


def test_lost_workers_and_a_lost_node_cost_nothing_but_time(nodes, cluster, plain, tmp_path):
    """The workers of two runs are killed, one of them kept in a storage, and the node of a third run."""
    tasks = make_tasks(tmp_path)
    names = [f"{task.config.method}{task.seed}" for task in tasks]
    (tmp_path / "notes").mkdir()
    storage = Storage(f"file://{tmp_path}/storage")
    killed, to_kill = {}, ("sgd0", "sgd1", "bsam0")

    def kill(index, share):
        name = names[index]
        if share < 0.4 or name in killed or name not in to_kill:
            return
        if name == "bsam0" and not list(tmp_path.glob("storage/**/checkpoint.safetensors")):
            return
        process, node, _ = read_notes(tmp_path)[name][-1]
        if name == "sgd1":
            (lost,) = (each for each in nodes.list_all_nodes() if each.node_id == node)
            nodes.remove_node(lost, allow_graceful=False)
            nodes.add_node(**NODE)
        else:
            os.kill(process, signal.SIGKILL)
        killed[name] = node

    def end(index, error):
        if names[index] == "bsam0":
            storage.fetch([tasks[index]])

    work = functools.partial(stored, folder=tmp_path, storage=storage, killed=to_kill)
    assert cluster.run_all([[task] for task in tasks], work, on_progress=kill, on_end=end) == {}
    assert killed.keys() == set(to_kill), "a run was over before it could be killed"
    assert results(tmp_path / "records") == plain
    attempts = read_notes(tmp_path)
    for name in killed:
        (_, _, begin), *again = attempts[name]
        assert begin < 0.1
        assert again[-1][2] > 0.1  # it went on, and did not begin again
    assert attempts["sgd1"][-1][1] != killed["sgd1"]  # on another node
    assert sum(map(len, attempts.values())) <= 4 + 3 + 1  # another run may have been on the lost node


def test_a_driver_that_is_killed_and_started_again_ends_with_the_same_records(nodes, plain, tmp_path, bsam_command):
    places = ["--runs", tmp_path / "runs", "--records", tmp_path / "records"]
    command = ["reproduce", *TABLE, "--on", nodes.clients, "--save-minutes", "0.001", *places]
    last = make_tasks(tmp_path)[-1].folder
    last.parent.mkdir(parents=True)
    with locked(last.with_name(f".{last.name}.lock")):  # so that the last run is not over when the driver is killed
        first = bsam_command(*command)
        deadline = time.monotonic() + 300
        while not (done := list(tmp_path.glob("records/**/seed*.json"))) and time.monotonic() < deadline:
            assert first.poll() is None, first.communicate(timeout=1)
            time.sleep(0.05)
        first.kill()
    assert done
    posteriors = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/**/posterior.safetensors")}
    assert len(posteriors) < 4
    second = bsam_command(*command)
    shown = second.communicate(timeout=300)
    assert second.returncode == 0, shown
    assert results(tmp_path / "records") == plain
    assert {path: path.stat().st_mtime_ns for path in posteriors} == posteriors  # none was trained twice


def test_a_signal_saves_the_runs_and_frees_them(cluster, plain, tmp_path):
    tasks = make_tasks(tmp_path)[:1]
    (tmp_path / "notes").mkdir()
    work = functools.partial(noted, folder=tmp_path, killed=["sgd0"])
    with pytest.raises(KeyboardInterrupt):
        cluster.run_all(
            [tasks], work, on_progress=lambda index, share: share > 0.2 and os.kill(os.getpid(), signal.SIGTERM)
        )
    assert 0 < 1 - tasks[0].share_left < 1
    assert cluster.run_all([tasks], work, wait=False) == {}
    ((_, _, first), (_, _, second)) = read_notes(tmp_path)["sgd0"]
    assert first < 0.1 < 0.2 < second
    assert results(tmp_path / "records").items() <= plain.items()


def trouble(item, report, *, folder):
    """Item 0 is good, 1 fails, 2 kills its worker always, 3 is busy for two attempts, 4 kills its worker once."""
    with (folder / str(item)).open("a") as file:
        file.write("x")
    attempts = len((folder / str(item)).read_text())
    if item == 1:
        raise ValueError("1 is too much,\n  take less")
    if item == 2 or (item == 4 and attempts == 1):
        os._exit(3)
    if item == 3 and attempts < 3:
        raise RunBusyError("3 is busy")


def test_what_fails_is_named_what_dies_is_given_up_and_what_is_busy_is_waited_for(cluster, tmp_path):
    (tmp_path / "first").mkdir()
    errors = cluster.run_all([0, 1, 2, 3, 4], functools.partial(trouble, folder=tmp_path / "first"), retries=1)
    assert errors.keys() == {1, 2}
    assert errors[1] == "1 is too much, take less"
    assert errors[2].startswith("given up: its worker or node was lost 2 times. The last time: The worker died")
    attempts = {path.name: path.read_text() for path in (tmp_path / "first").iterdir()}
    assert attempts == {"0": "x", "1": "x", "2": "xx", "3": "xxx", "4": "xx"}
    left = []
    work = functools.partial(trouble, folder=tmp_path)
    assert cluster.run_all([3], work, wait=False, on_busy=lambda *args: left.append(args)) == {}
    assert left == [(0, "3 is busy")]


def test_what_the_cluster_cannot_do_is_said_before_anything_changes(cluster, tmp_path):
    assert cluster.gpus == 0
    with pytest.raises(ValueError, match=r"--cores 64 --gpus 0: no node has so many\. There are nodes with 1 cores"):
        dataclasses.replace(cluster, cores=64).check_resources()
    cluster.check_folders(tmp_path / "runs", tmp_path / "records")
    cluster.check_storage(Storage(f"file://{tmp_path}/storage/deep"))
    with pytest.raises(OSError, match=r"/proc cannot be written \(.*\): choose another folder, or change it"):
        cluster.check_folders(tmp_path, Path("/proc/runs"))
    with pytest.raises(OSError, match="--storage file:///proc/runs cannot be written"):
        cluster.check_storage(Storage("file:///proc/runs"))
    with pytest.raises(OSError, match=r"the node .*: .*missing is not the same folder here: choose one that all"):
        cluster._ask_all(_check_marks, [tmp_path / "missing" / "mark"])
    assert list(tmp_path.iterdir()) == []


def meet(item, report, *, folder, patience):
    """Wait until the other item runs too, and note whether it did, and which GPU this one may see."""
    (folder / f"runs{item}").touch()
    until = time.monotonic() + patience
    while not (met := (folder / f"runs{1 - item}").exists()) and time.monotonic() < until:
        time.sleep(0.05)
    (folder / f"note{item}").write_text(f"{met} {os.environ['CUDA_VISIBLE_DEVICES']}")
    while met and not (folder / f"note{1 - item}").exists() and time.monotonic() < until:
        time.sleep(0.05)  # let the other one see it
    (folder / f"runs{item}").unlink()


@pytest.mark.parametrize(("share", "patience", "met"), [(0.5, 60, True), (1.0, 2, False)])
def test_two_items_share_a_gpu_if_each_asks_for_half_of_it(nodes, cluster, tmp_path, share, patience, met):
    """Ray counts GPUs as the node declares them: none is needed here."""
    node = nodes.add_node(**NODE | {"num_cpus": 2, "num_gpus": 1})
    try:
        sharing = dataclasses.replace(cluster, gpus=share)
        sharing.check_resources()
        assert sharing.run_all([0, 1], functools.partial(meet, folder=tmp_path, patience=patience)) == {}
    finally:
        nodes.remove_node(node)
    assert [(tmp_path / f"note{item}").read_text() for item in (0, 1)] == [f"{met} 0"] * 2


def test_without_ray_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install '.[cluster]'")):
        check_address("ray")
