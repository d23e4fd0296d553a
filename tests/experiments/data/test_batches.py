"""Batches: every example once, the same for the same (seed, epoch), and augmented as the slow transcription says."""

import itertools

import pytest
import torch

from bsam.experiments.data import DATASETS, Dataset, batches, load, plain_batches, stacked_batches


def images_like(shape, num, seed=0):
    """Random images that are all different, labelled by their place."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (num, *shape), generator=generator, dtype=torch.uint8), torch.arange(num)


def dataset_of(num=37, shape=(3, 12, 10)):
    """Not square, and no multiple of the batch size."""
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
    part = images_like(shape, num)
    return Dataset(DATASETS["cifar10"], part, (part[0][:0], part[1][:0]), part, mean, std)


def epoch_batches(dataset, batch_size, *, seed, **options):
    """The batches of one run."""
    return ((x[0], y[0]) for x, y in stacked_batches(dataset, batch_size, seeds=[seed], **options))


def collect(iterator):
    xs, ys = zip(*iterator, strict=True)
    return torch.cat(xs), torch.cat(ys)


# ------------------------------------------------------------------ augmentation


def slowly(image, down, right, mirrored):
    """Pad by 4 zeros, cut a window out, mirror it: pixel by pixel."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 8, width + 8, dtype=image.dtype)
    for c, i, j in itertools.product(range(channels), range(height), range(width)):
        padded[c, i + 4, j + 4] = image[c, i, j]
    top, left = 4 + down, 4 + right
    window = torch.zeros_like(image)
    for c, i, j in itertools.product(range(channels), range(height), range(width)):
        window[c, i, j] = padded[c, top + i, left + (width - 1 - j if mirrored else j)]
    return window


def test_crop_and_flip_equals_the_slow_transcription():
    images, _ = images_like((2, 5, 7), 3)
    cases = list(itertools.product(range(3), (-4, -1, 0, 3, 4), (-4, -2, 0, 4), (0, 1)))
    index, down, right, mirrored = torch.tensor(cases).T
    fast = batches.crop_and_flip(images, index, down, right, mirrored)
    assert fast.dtype == torch.uint8
    for result, (k, d, r, m) in zip(fast, cases, strict=True):
        assert torch.equal(result, slowly(images[k], d, r, m))


def test_every_augmented_image_is_a_shifted_or_mirrored_one_with_the_right_frequency():
    shape, num = (1, 6, 6), 4000
    part = images_like(shape, num)
    dataset = Dataset(DATASETS["mnist"], part, part, part, torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    x, y = collect(epoch_batches(dataset, 500, seed=3, epoch=2, augment=True))
    x = (x * 255).round().to(torch.uint8)
    cases = list(itertools.product(range(-4, 5), range(-4, 5), (0, 1)))
    matches = torch.zeros(len(cases), num, dtype=torch.bool)
    for k, case in enumerate(cases):
        settings = (torch.full((num,), value) for value in case)
        matches[k] = (batches.crop_and_flip(part[0], y, *settings) == x).flatten(1).all(1)
    assert matches.any(0).all()
    unique = matches[:, matches.sum(0) == 1]
    assert unique.shape[1] > 0.9 * num
    share = unique.double().mean(1).view(9, 9, 2)
    assert share.sum((0, 1))[1] == pytest.approx(0.5, abs=0.04)  # five standard deviations
    for axes in ((1, 2), (0, 2)):
        assert share.sum(axes)[1:-1] == pytest.approx(1 / 9, abs=0.025)
    assert (share > 0).all()


def test_padding_is_black_before_normalisation():
    dataset = dataset_of()
    x, _ = collect(epoch_batches(dataset, 37, seed=0, epoch=0, augment=True))
    black = (-dataset.mean / dataset.std).expand_as(x[0])
    assert (x == black).any()
    assert ((x == black) | (x > black)).all()  # the images have no black pixel of their own


def test_only_images_can_be_augmented():
    with pytest.raises(ValueError, match="moons cannot be augmented"):
        epoch_batches(load("moons"), 10, seed=0, epoch=0, augment=True)


# ------------------------------------------------------------------ order


@pytest.mark.parametrize("augment", [False, True])
def test_every_example_comes_once(augment):
    dataset = dataset_of()
    sizes = [len(y) for _, y in epoch_batches(dataset, 8, seed=0, epoch=0, augment=augment)]
    assert sizes == [8, 8, 8, 8, 5]
    x, y = collect(epoch_batches(dataset, 8, seed=0, epoch=0, augment=augment))
    assert sorted(y.tolist()) == list(range(37))
    assert y.tolist() != list(range(37))
    if not augment:
        assert torch.equal(x, dataset.normalise(dataset.train[0][y]))


def test_drop_last():
    dataset = dataset_of()
    kept = list(epoch_batches(dataset, 8, seed=0, epoch=0, drop_last=True))
    whole = list(epoch_batches(dataset, 8, seed=0, epoch=0))
    assert len(kept) == 4
    for (x, y), (x_whole, y_whole) in zip(kept, whole[:4], strict=True):
        assert torch.equal(x, x_whole)
        assert torch.equal(y, y_whole)
    assert len(list(epoch_batches(dataset_of(32), 8, seed=0, epoch=0, drop_last=True))) == 4


def test_order_and_augmentation_are_functions_of_seed_and_epoch():
    dataset = dataset_of()

    def run(seed, epoch, augment=True):
        return collect(epoch_batches(dataset, 8, seed=seed, epoch=epoch, augment=augment))

    x, y = run(1, 2)
    torch.manual_seed(5)
    assert torch.equal(run(1, 2)[0], x)
    for seed, epoch in ((1, 3), (2, 2), (2, 1), (-1, 2)):
        assert run(seed, epoch)[1].tolist() != y.tolist()
    assert torch.equal(run(1, 2, augment=False)[1], y)
    by_image, other = x[y.argsort()], run(1, 3)
    assert not torch.equal(by_image, other[0][other[1].argsort()])  # crops change from epoch to epoch


def test_the_batch_size_does_not_change_what_is_drawn():
    dataset = dataset_of()
    x, y = collect(epoch_batches(dataset, 8, seed=0, epoch=0, augment=True))
    x_other, y_other = collect(epoch_batches(dataset, 5, seed=0, epoch=0, augment=True))
    assert torch.equal(x, x_other)
    assert torch.equal(y, y_other)


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("start", range(6))
def test_going_on_in_the_middle_of_an_epoch(augment, start):
    dataset = dataset_of()
    whole = list(epoch_batches(dataset, 8, seed=4, epoch=1, augment=augment))
    rest = list(epoch_batches(dataset, 8, seed=4, epoch=1, augment=augment, start_batch=start))
    assert len(rest) == 5 - start
    for (x, y), (x_whole, y_whole) in zip(rest, whole[start:], strict=True):
        assert torch.equal(x, x_whole)
        assert torch.equal(y, y_whole)


@pytest.mark.parametrize("options", [{}, {"augment": True}, {"drop_last": True}, {"start_batch": 2, "augment": True}])
def test_batches_of_several_seeds_are_those_of_each(options):
    dataset, seeds = dataset_of(), [4, 0, 9]
    together = list(stacked_batches(dataset, 8, seeds=seeds, epoch=2, **options))
    for i, seed in enumerate(seeds):
        alone = list(epoch_batches(dataset, 8, seed=seed, epoch=2, **options))
        assert len(alone) == len(together)
        for (x, y), (xs, ys) in zip(alone, together, strict=True):
            assert torch.equal(xs[i], x)
            assert torch.equal(ys[i], y)


def test_the_global_generator_is_not_touched():
    before = torch.get_rng_state()
    list(epoch_batches(dataset_of(), 8, seed=0, epoch=0, augment=True))
    list(plain_batches(dataset_of()))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"batch_size": 38, "drop_last": True}, "batch_size=38 with drop_last leaves no batch of 37 examples"),
        ({"batch_size": 8, "start_batch": 6}, "start_batch=6 must be from 0 to 5"),
        ({"batch_size": 8, "start_batch": -1}, "start_batch=-1 must be from 0 to 5"),
    ],
)
def test_wrong_arguments_are_refused_at_once(options, says):
    with pytest.raises(ValueError, match=says):
        epoch_batches(dataset_of(), seed=0, epoch=0, **options)


# ------------------------------------------------------------------ plain


def test_plain_batches_are_in_order():
    dataset = dataset_of()
    assert [len(y) for _, y in plain_batches(dataset, "test", 8)] == [8, 8, 8, 8, 5]
    x, y = collect(plain_batches(dataset))
    assert torch.equal(x, dataset.normalise(dataset.test[0]))
    assert torch.equal(y, dataset.test[1])


def test_plain_batches_of_every_part():
    dataset = load("digits", validation=10)
    assert [sum(len(y) for _, y in plain_batches(dataset, part)) for part in ("train", "validation", "test")] == [
        987,
        10,
        800,
    ]


def test_plain_batches_refuse_at_once():
    dataset = dataset_of()
    with pytest.raises(ValueError, match="part='tset' must be one of train, validation, test"):
        plain_batches(dataset, "tset")
    with pytest.raises(ValueError, match="the validation part of cifar10 is empty"):
        plain_batches(dataset, "validation")
    with pytest.raises(ValueError, match="batch_size=-1"):
        plain_batches(dataset, "test", -1)
