"""Calls of `backward()` in a block are seen, and leave gradients of their own parameters only."""

import threading

import pytest
import torch
from torch import nn

from bsam.backward import watched_backward


def parameters(count=2):
    return [nn.Parameter(torch.full((3,), float(i + 1))) for i in range(count)]


def test_others_keep_their_gradients():
    own, other = parameters()
    other.grad = kept = torch.ones(3)
    with watched_backward([own]):
        (own * other).sum().backward()
        (own * other).sum().backward()
        assert other.grad is not kept
    torch.testing.assert_close(own.grad, 2 * other.detach())
    assert other.grad is kept
    assert torch.equal(kept, torch.ones(3))


def test_torchs_function_comes_back_after_the_last_block():
    function = torch.autograd.backward

    def fail():
        with watched_backward([]):
            raise ValueError("stop")

    with watched_backward([]):
        with pytest.raises(ValueError, match="stop"):
            fail()
        assert torch.autograd.backward is not function
    assert torch.autograd.backward is function


def test_a_loss_that_is_scaled_in_a_block_is_refused():
    scaler, disabled = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    function = torch.amp.GradScaler.scale
    with watched_backward([]):
        with pytest.raises(ValueError, match=r"the closure called scaler.scale\(\).*scaler=scaler"):
            scaler.scale(torch.ones(()))
        assert disabled.scale(torch.ones(())) == 1
        found = []
        thread = threading.Thread(target=lambda: found.append(scaler.scale(torch.ones(()))))  # is in no block
        thread.start()
        thread.join()
    assert found == [scaler.get_scale()]
    assert torch.amp.GradScaler.scale is function
    assert scaler.scale(torch.ones(())) == scaler.get_scale()


@pytest.mark.parametrize(
    ("differentiated", "returned", "fits"),
    [
        (lambda loss: [loss], lambda loss: loss, True),
        (lambda loss: [], lambda loss: loss, True),
        (lambda loss: [loss / 4] * 4, lambda loss: loss.detach(), True),
        (lambda loss: [128 * loss], lambda loss: loss, False),
        (lambda loss: [loss], lambda loss: loss / 2, False),
        (lambda loss: [128 * loss], lambda loss: loss * torch.nan, True),  # refused elsewhere, as not finite
    ],
)
def test_the_loss_must_be_what_was_differentiated(differentiated, returned, fits):
    (own,) = parameters(1)
    loss = own.square().sum()
    with watched_backward([own]) as calls:
        for each in differentiated(loss):
            each.backward(retain_graph=True)
    if fits:
        calls.check(returned(loss))
    else:
        with pytest.raises(ValueError, match=r"called backward\(\) on .* and returned the loss"):
            calls.check(returned(loss))


def test_gradients_that_are_handed_in_count():
    (own,) = parameters(1)
    with watched_backward([own]) as calls:
        (2 * own).backward(torch.ones(3))
    calls.check((2 * own).sum())
    with pytest.raises(ValueError, match="returned the loss"):
        calls.check(own.sum())


def test_a_backward_that_does_not_reach_the_parameters_is_none_of_ours():
    own, other = parameters()
    with watched_backward([own]) as calls:
        (7 * other.sum()).backward()
    calls.check(own.sum())
    assert other.grad is None


def test_other_threads_are_not_watched():
    own, other = parameters()
    with watched_backward([own]):
        thread = threading.Thread(target=lambda: other.sum().backward())
        thread.start()
        thread.join()
    assert torch.equal(other.grad, torch.ones(3))


def test_gradients_that_are_changed_after_backward_are_refused():
    parameter = torch.ones(3, requires_grad=True)
    for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        parameter.grad = None
        with watched_backward([parameter]) as calls:
            loss = (parameter**2).sum()
            loss.backward()
            clip([parameter], 1e6)
        with pytest.raises(RuntimeError, match=r"changed \.grad after backward\(\).*max_grad_norm="):
            calls.check(loss)


def test_gradients_that_several_calls_and_hooks_change_are_accepted():
    parameter = torch.ones(3, requires_grad=True)

    def triple(parameter):
        parameter.grad.mul_(3)

    parameter.register_hook(lambda grad: grad * 2)
    parameter.register_post_accumulate_grad_hook(triple)
    with watched_backward([parameter]) as calls:
        losses = [(parameter**2).sum(), parameter.sum()]
        for loss in losses:
            loss.backward()
    calls.check(sum(losses))
