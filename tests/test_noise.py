"""Noise: the normal law, independence of every part of its address, and the CUDA generator's cipher."""

import itertools
import math

import numpy as np
import pytest
import torch

from bsam.noise import standard_normal

SIZE = 40_000


def draw(seed=0, step=0, split=0, parameter=0, **options):
    return standard_normal(seed, step, split, parameter, (SIZE,), dtype=torch.float64, **options)


def test_it_is_standard_normal():
    z = draw(seed=3)
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((z**power).mean().item() - moment) < 3.5 * math.sqrt(variance / SIZE)
    inside = (z.abs() < 1).double().mean().item()
    assert abs(inside - 0.6826895) < 3.5 * math.sqrt(0.6826895 * 0.3173105 / SIZE)


@pytest.mark.parametrize("part", ["seed", "step", "split", "parameter"])
def test_each_part_of_the_address_gives_independent_noise(part):
    draws = [draw(**{part: value}) for value in (0, 1, 2, -1)]
    for a, b in itertools.combinations(draws, 2):
        correlation = (a * b).mean().item()
        assert abs(correlation) < 4 / math.sqrt(SIZE)
        assert abs((a**2 * b**2).mean().item() - 1) < 4 * math.sqrt(8 / SIZE)


def test_it_is_a_function_and_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    assert torch.equal(draw(step=5), draw(step=torch.tensor(5)))
    assert torch.equal(state, torch.get_rng_state())


def test_the_numbers_on_the_cpu_stay_as_they_were():
    """A run that is resumed by a later version draws the noise of the version that began it."""
    found = standard_normal(0x1234567890, 7, 3, 11, (2, 3), dtype=torch.float64)
    first = [[0.429112995789, 0.055897664074, 1.834175671949], [-0.305764469661, -0.996615117565, 0.192556704241]]
    torch.testing.assert_close(found, torch.tensor(first, dtype=torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_and_types(shape, dtype):
    z = standard_normal(0, 0, 0, 0, shape, dtype=dtype)
    assert z.shape == shape
    assert z.dtype == dtype


def philox_4x32_10(counter, key):
    """Salmon et al. (2011), section 3.3, ten rounds."""
    c, k, mask = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & mask, (p0 >> 32) ^ c[3] ^ k[1], p0 & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def test_the_transcription_of_philox_gives_the_published_numbers():
    """Known answers distributed with Random123."""
    assert philox_4x32_10([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert philox_4x32_10([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_noise_is_philox_and_box_muller():
    seed, step, split, parameter = 0x1234567890, 7, 3, 11
    ours = standard_normal(seed, step, split, parameter, (4 * 5 - 1,), device="cuda").cpu().double().numpy()
    expected = []
    for block in range(5):
        words = philox_4x32_10([block, step, split, parameter], [seed & 0xFFFFFFFF, seed >> 32])
        signed = np.array(words, np.uint32).view(np.int32).tolist()
        u = [(-w - 1 if w < 0 else w) / 2**31 for w in signed]
        for u1, u2 in (u[:2], u[2:]):
            radius = math.sqrt(-2 * math.log(max(u1, 1.0e-7)))
            expected += [radius * math.cos(2 * math.pi * u2), radius * math.sin(2 * math.pi * u2)]
    np.testing.assert_allclose(ours, expected[:-1], rtol=1e-3, atol=1e-5)


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(7, 5), (64, 4), (9,), (3, 8, 2), (5000, 3)])
def test_the_noise_of_a_part_is_that_part_of_the_noise(shape, device):
    """Also of an empty part, and of parts that begin inside of a block of four elements."""
    whole = standard_normal(5, 2, 1, 3, shape, device=device, dtype=torch.float64)
    for dim, size in enumerate(shape):
        for start, length in [
            (0, size),
            (0, 1),
            (1, size - 1),
            (size // 2, size - size // 2),
            (size, 0),
            (size - 1, 1),
        ]:
            part = standard_normal(5, 2, 1, 3, shape, device=device, dtype=torch.float64, part=(dim, start, length))
            assert torch.equal(part, whole.narrow(dim, start, length))
            assert part.is_contiguous()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_noise_is_standard_normal_and_fresh_in_a_captured_graph():
    z = draw(seed=3, device="cuda").cpu()
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((z**power).mean().item() - moment) < 3.5 * math.sqrt(variance / SIZE)
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    standard_normal(0, step, 0, 0, (100,), device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = standard_normal(0, step, 0, 0, (100,), device="cuda")
        step += 1
    for t in range(3):
        graph.replay()
        assert torch.equal(out, standard_normal(0, t, 0, 0, (100,), device="cuda"))
