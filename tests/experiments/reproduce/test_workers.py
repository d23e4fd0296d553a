"""Workers: all work is done, also when some of them die."""

import functools
import multiprocessing
import os
import signal
import time

import pytest

from bsam.experiments.reproduce.workers import run_all


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
    assert errors == {2: "its worker died 3 times, with exit status 3"}
    assert [(tmp_path / f"tries{item}").read_text() for item in range(4)] == ["x", "xx", "xxx", "x"]


def test_a_signal_ends_the_workers():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_all([0], wait_forever, jobs=1, on_progress=lambda index, share: os.kill(os.getpid(), signal.SIGTERM))
    assert not multiprocessing.active_children()
    assert signal.getsignal(signal.SIGTERM) is before


def test_nothing_to_do_starts_nothing():
    assert run_all([], wait_forever, jobs=2) == {}
