"""An interrupt is delivered in the user's code or after the work, never within; `tests/sigint.py` sends real ones."""

import signal
import sys
import threading

import pytest
import torch
from torch import nn

import bsam
from bsam.interrupts import Restored, deferred, interruptible, reading
from tests.sigint import ACTS, attack


@pytest.fixture(autouse=True)
def _default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def interrupt():
    signal.raise_signal(signal.SIGINT)


@pytest.mark.skipif(sys.platform != "linux", reason="the timer that sends the signals is Linux's")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python drops one in a destructor
@pytest.mark.parametrize("name", ACTS)
def test_a_real_interrupt_at_any_time_leaves_nothing_half_done(name):
    (result,) = attack({name: ACTS[name]}, hits=10, seed=0).values()
    assert result["hits"] == 10
    assert result["broken"] == {}


def interrupted(block):
    """What the block notes until the interrupt comes out of it."""
    done = []
    with pytest.raises(KeyboardInterrupt):
        block(done.append)
    return done


def test_an_interrupt_is_delivered_when_the_block_ends():
    def block(note):
        with deferred():
            interrupt()
            note(1)
            interrupt()
            note(2)

    assert interrupted(block) == [1, 2]


def test_an_interrupt_is_delivered_at_once_where_it_may_be():
    def block(note):
        with deferred():
            with interruptible():
                interrupt()
                note(1)
            note(2)

    assert interrupted(block) == []


def test_one_that_waits_is_delivered_before_the_users_code_begins():
    def block(note):
        with deferred():
            interrupt()
            note(1)
            with interruptible():
                note(2)

    assert interrupted(block) == [1]


def test_clean_up_after_an_interrupt_is_not_interrupted_again():
    def block(note):
        with deferred():
            try:
                with interruptible():
                    interrupt()
            finally:
                interrupt()
                note("cleaned up")

    assert interrupted(block) == ["cleaned up"]


def test_blocks_nest():
    def block(note):
        with deferred():
            with interruptible():
                with deferred():  # a step within a closure
                    interrupt()
                    note(1)
                note(2)  # not reached: it is delivered where the inner block ends
            note(3)

    assert interrupted(block) == [1]
    with deferred(), deferred():
        pass
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_a_handler_that_raises_nothing_is_called_as_often_and_all_goes_on():
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with deferred():
            interrupt()
            assert calls == []
            with interruptible():
                assert calls == [signal.SIGINT]
                interrupt()
                interrupt()
            assert len(calls) == 3
            interrupt()
        assert len(calls) == 4
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_handler_of_python_is_left_alone(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with deferred(), interruptible():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_the_users_code_sets_stays():
    own = lambda number, frame: None  # noqa: E731
    try:
        with deferred(), interruptible():
            signal.signal(signal.SIGINT, own)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_handler_that_is_put_back_later_still_works():
    with deferred(), interruptible():
        kept = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, kept)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_exchange_nothing():
    seen = []

    def work():
        with deferred(), interruptible():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_an_interrupt_before_the_change_in_it_and_after_the_block():
    class Block(Restored):
        def __init__(self, interrupted_in):
            self.value, self._where = 0, interrupted_in

        def _change(self):
            self.value = 1
            if self._where == "change":
                interrupt()

        def _restore(self):
            if self._where == "restore":
                interrupt()
            self.value = 0

    def enter(note):
        with block:
            note(block.value)
            if where == "block":
                interrupt()

    for where in ("change", "block", "restore"):
        block = Block(where)
        assert interrupted(enter) == ([] if where == "change" else [1])
        assert block.value == 0


def test_data_is_read_interruptibly():
    def data():
        yield 1
        interrupt()
        yield 2

    def block(note):
        with deferred():
            for item in reading(data()):
                note(item)

    assert interrupted(block) == [1]
    assert list(reading([1, 2])) == [1, 2]


def test_an_interrupt_in_the_update_comes_after_the_step():
    model = nn.Linear(3, 2)
    optimizer = bsam.SAM(model.parameters(), InterruptedSGD, rho=0.05, lr=0.1)
    twin = nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    plain = bsam.SAM(twin.parameters(), torch.optim.SGD, rho=0.05, lr=0.1)
    x = torch.randn(4, 3)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(lambda x: model(x).square().mean(), x)
    plain.step(lambda x: twin(x).square().mean(), x)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p.grad, q.grad)


class InterruptedSGD(torch.optim.SGD):
    def step(self, closure=None):
        interrupt()
        super().step()
