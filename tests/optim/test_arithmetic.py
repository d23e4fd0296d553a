"""Arithmetic of the updates: with numbers and with tensors as weights it is the same, and as plain as it says."""

import pytest
import torch

from bsam.optim.arithmetic import all_finite, average, clip_gradient, plus, plus_quotient, total_norm, write


def tensors(count=3, n=5):
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(n, generator=generator, dtype=torch.float64) + 0.5 for _ in range(count)]


@pytest.mark.parametrize("as_tensor", [True, False])
def test_weighted_sums(as_tensor):
    a, b, c = tensors()
    weight = torch.tensor(0.3, dtype=torch.float64) if as_tensor else 0.3
    torch.testing.assert_close(plus(a, b, weight), a + 0.3 * b)
    torch.testing.assert_close(plus_quotient(a, b, c, weight), a + 0.3 * b / c)
    torch.testing.assert_close(average(a, b.clone(), weight), 0.3 * a + 0.7 * b)


def test_what_is_written_to():
    a, b, c = tensors()
    kept = a.clone()
    plus(a, b, 0.3)
    plus_quotient(a, b, c, 0.3)
    average(a, b.clone(), 0.3)
    assert torch.equal(a, kept)
    assert plus_quotient(a, b, c, 0.3, into_a=True) is a
    torch.testing.assert_close(a, kept + 0.3 * b / c)
    assert average(a, b, 0.3) is b


def test_total_norm():
    a, b, _ = tensors()
    torch.testing.assert_close(total_norm([a, b.view(5, 1)]), torch.cat([a, b]).norm())
    assert total_norm([]) == 0


@pytest.mark.parametrize("limit", [None, 0.5, 1e3])
def test_gradients_are_clipped_as_torch_does(limit):
    ours, parameters = tensors(), [torch.zeros(5, dtype=torch.float64) for _ in range(3)]
    for parameter, gradient in zip(parameters, ours, strict=True):
        parameter.grad = gradient.clone()
    clip_gradient(ours, limit)
    if limit is not None:
        torch.nn.utils.clip_grad_norm_(parameters, limit)
    torch.testing.assert_close(ours, [parameter.grad for parameter in parameters])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_all_finite(dtype, value):
    good = [torch.full((100,), 1e4, dtype=dtype), torch.ones(2, 3)]  # a sum of 10^6 is too large for float16
    assert all_finite(good).item() is True
    for i in range(2):
        bad = [t.clone() for t in good]
        bad[i].view(-1)[1] = value
        assert not all_finite(bad)


@pytest.mark.parametrize("accept", [None, True, False])
def test_write_keeps_address_and_type(accept):
    target, value = torch.zeros(3), torch.ones(3, dtype=torch.float64)
    address = target.data_ptr()
    write(target, value, None if accept is None else torch.tensor(accept))
    assert target.data_ptr() == address
    assert target.dtype == torch.float32
    assert target.tolist() == [0.0 if accept is False else 1.0] * 3
