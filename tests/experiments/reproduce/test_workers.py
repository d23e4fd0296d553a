"""Workers: all work is done, also when some of them die."""

import functools
import multiprocessing
import os
import signal
import time
import warnings

import pytest

from bsam.experiments.reproduce.workers import available_cores, run_all, share_cores
from bsam.experiments.runs import RunBusyError


def write_square(item, report, *, folder):
    report(0.5)
    if item == 3:
        raise ValueError(f"{item} is too much,\n  take less")
    (folder / str(item)).write_text(str(item**2))


def die(item, report, *, folder):
    """Item 1 kills its worker the first time, item 2 every time."""
    with (folder / f"tries{item}").open("a") as file:
        file.write("x")
    if item == 1 and (folder / "tries1").read_text() == "x":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == 2:
        os._exit(3)


def wait_forever(item, report):
    while True:
        time.sleep(0.01)
        report(0.5)


def test_all_is_done_and_an_error_is_one_sentence(tmp_path):
    shares, ended = [], []
    errors = run_all(
        list(range(5)),
        functools.partial(write_square, folder=tmp_path),
        jobs=2,
        on_progress=lambda index, share: shares.append((index, share)),
        on_end=lambda index, error: ended.append((index, error)),
    )
    assert errors == {3: "3 is too much, take less"}
    assert sorted(ended) == [(index, errors.get(index)) for index in range(5)]
    assert sorted(shares) == [(index, 0.5) for index in range(5)]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "0", "1": "1", "2": "4", "4": "16"}
    assert not multiprocessing.active_children()


def test_the_item_of_a_dead_worker_is_started_again_and_given_up_at_last(tmp_path):
    errors = run_all([0, 1, 2, 3], functools.partial(die, folder=tmp_path), jobs=1)
    assert errors == {2: "given up: its worker died 3 times, with exit status 3"}
    assert [(tmp_path / f"tries{item}").read_text() for item in range(4)] == ["x", "xx", "xxx", "x"]


def test_a_signal_ends_the_workers():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_all([0], wait_forever, jobs=1, on_progress=lambda index, share: os.kill(os.getpid(), signal.SIGTERM))
    assert not multiprocessing.active_children()
    assert signal.getsignal(signal.SIGTERM) is before


def work_and_warn(item, report):
    with warnings.catch_warnings():  # after which Python shows the same warning again
        warnings.simplefilter("always")
        warnings.warn("the runs\n  are short", stacklevel=1)


def test_a_warning_of_several_items_is_one_sentence(capfd):
    assert run_all([0, 1, 2], work_and_warn, jobs=2) == {}
    assert capfd.readouterr().err == "bsam: the runs are short\n"


def test_nothing_to_do_starts_nothing():
    assert run_all([], wait_forever, jobs=2) == {}


def work_or_leave(item, report, *, folder):
    """Another process is at item 1 the first time, and at item 2 every time."""
    with (folder / "order").open("a") as file:
        file.write(str(item))
    if item == 2 or (item == 1 and (folder / "order").read_text().count("1") == 1):
        raise RunBusyError(f"{item} is busy")


def test_what_is_busy_elsewhere_is_tried_once_more_and_then_left(tmp_path):
    ended, left = [], []
    errors = run_all(
        [0, 1, 2, 3],
        functools.partial(work_or_leave, folder=tmp_path),
        jobs=1,
        on_end=lambda index, error: ended.append((index, error)),
        on_busy=lambda index, reason: left.append((index, reason)),
    )
    assert errors == {}
    assert ended == [(0, None), (3, None), (1, None)]
    assert left == [(2, "2 is busy")]
    assert (tmp_path / "order").read_text() == "012312"


# ---------------------------------------------------------------- cores


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)


def make_files(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        (None, {}, 8),
        ("0::/\n", {}, 8),
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "250000 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n"}, 1),
        ("0::/outside\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "nonsense\n"}, 8),
        ("0::/\n", {"cpu.max": "6400000 100000\n"}, 8),
        (
            "3:cpu,cpuacct:/a\n1:memory:/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "50000\n"},
            3,
        ),
        ("3:cpuacct,cpu:/a\n", {"cpu/cpu.cfs_quota_us": "500000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 5),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ("3:cpuset:/\n", {"cpuset/cpu.cfs_quota_us": "100000\n", "cpuset/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_cores_are_those_that_the_process_may_use(eight_cores, tmp_path, membership, files, cores):
    make_files(tmp_path / "cgroups", files)
    if membership is not None:
        (tmp_path / "membership").write_text(membership)
    assert available_cores(tmp_path / "cgroups", tmp_path / "membership") == cores


def test_cores_are_counted_where_there_is_no_affinity(eight_cores, tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert available_cores(tmp_path, tmp_path / "none") == 64


@pytest.mark.parametrize(
    ("variable", "jobs", "small", "shares"),
    [
        (None, None, False, (1, 8)),
        (None, 3, False, (3, 2)),
        (None, 20, False, (20, 1)),
        (None, None, True, (8, 1)),
        (None, 2, True, (2, 1)),
        ("2", None, False, (1, 2)),
        ("2", 4, False, (4, 2)),
        ("2", None, True, (4, 2)),
        ("1,4", None, True, (8, 1)),
        ("16", None, True, (1, 16)),
        ("many", None, False, (1, 8)),
    ],
)
def test_workers_share_the_cores_and_keep_to_omp_num_threads(monkeypatch, variable, jobs, small, shares):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("bsam.experiments.reproduce.workers.available_cores", lambda: 8)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert share_cores(jobs, small=small) == shares


def test_beside_an_accelerator_a_worker_has_four_threads_at_most(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("bsam.experiments.reproduce.workers.available_cores", lambda: 16)
    assert [share_cores(jobs, small=False, accelerated=True) for jobs in (None, 2, 8)] == [(1, 4), (2, 4), (8, 2)]
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    assert share_cores(None, small=False, accelerated=True) == (1, 9)  # who sets it means it
