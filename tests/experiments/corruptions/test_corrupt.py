"""The corruptions equal a slow transcription with the same random numbers, and depend on their seed only."""

import numpy as np
import pytest
import torch
from scipy import ndimage

from bsam.experiments.corruptions import KINDS, STRENGTHS, corrupt
from tests.experiments.corruptions import reference
from tests.experiments.corruptions.reference import Recording

CPU = torch.device("cpu")
ALLOWED = {
    "glass_blur": (0.1, 1),  # a blurred flat area is a whole number or a little less, which is rounded down
    "jpeg_compression": (1.0, 40),  # a coefficient at half a step is rounded up or down; libjpeg computes in integers
}
"""Mean and largest difference in levels of 0 to 255, if not 0.01 and 1."""


@pytest.fixture(scope="module")
def images():
    """Smooth random images with some black and some white, like photographs."""
    rng = np.random.default_rng(0)
    smooth = ndimage.gaussian_filter(rng.normal(size=(2, 3, 32, 32)), (0, 0, 2, 2))
    smooth = np.clip(128 + 90 * smooth / smooth.std(), 0, 255)
    smooth[0, :, :4, :4], smooth[1, :, -4:] = 0, 255
    return torch.from_numpy(smooth.astype(np.uint8))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "frost"])
def test_a_corruption_is_its_transcription(kind, images):
    usual, most = ALLOWED.get(kind, (0.01, 1))
    for strength in STRENGTHS:
        draw = Recording(0, kind, strength, device=CPU)
        found = corrupt(images, kind, strength, draw=draw).permute(0, 2, 3, 1).numpy()
        wanted = []
        for k, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
            drawn = iter([values[:, k] if kind == "glass_blur" else values[k] for values in draw.drawn])
            result = getattr(reference, kind)(image.copy(), *KINDS[kind].constants[strength - 1], drawn=drawn)
            wanted.append(np.uint8(np.clip(result, 0, 1) * 255 + 1e-3))
        difference = np.abs(found.astype(int) - np.stack(wanted))
        assert difference.max() <= most, strength
        assert difference.mean() <= usual, strength


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_every_device_sees_the_same_images(kind, images):
    usual, most = ALLOWED.get(kind, (0.01, 1))
    for strength in STRENGTHS:
        found = corrupt(images.cuda(), kind, strength).cpu().int()
        difference = (found - corrupt(images, kind, strength).int()).abs()
        assert difference.max() <= most, strength
        assert difference.double().mean() <= usual, strength


def test_shot_noise_has_the_variance_of_counts():
    gray = torch.full((20, 3, 32, 32), 102, dtype=torch.uint8)
    values = corrupt(gray, "shot_noise", 3).double() / 255
    assert values.mean() == pytest.approx(0.4, abs=0.004)  # rounded down: half a level less
    assert values.var() == pytest.approx(0.4 / 100, rel=0.05)


def test_ice_has_the_statistics_of_the_photographs():
    black = torch.zeros(500, 3, 32, 32, dtype=torch.uint8)
    ice = corrupt(black, "frost", 1).double() / 255 / 0.2
    photographs = torch.tensor([0.565, 0.647, 0.694], dtype=torch.float64)  # mean of all windows of the five
    torch.testing.assert_close(ice.mean(dim=(0, 2, 3)), photographs, atol=0.03, rtol=0)
    within = ice.std(dim=(2, 3)).mean(dim=0)
    wanted = torch.tensor([0.0926, 0.0862, 0.0866], dtype=torch.float64)
    torch.testing.assert_close(within, wanted, atol=0.01, rtol=0)
    gray = ice.mean(dim=1)
    gray = gray - gray.mean(dim=(1, 2), keepdim=True)
    beside = (gray[..., 1:] * gray[..., :-1]).mean() / gray.square().mean()
    assert 0.2 < beside < 0.5  # the photographs: 0.23 to 0.51


@pytest.mark.parametrize("kind", ["gaussian_noise", "glass_blur", "frost"])
def test_the_seed_decides(kind, images):
    assert torch.equal(corrupt(images, kind, 3, seed=1), corrupt(images, kind, 3, seed=1))
    assert not torch.equal(corrupt(images, kind, 3, seed=1), corrupt(images, kind, 3, seed=2))


def test_a_larger_strength_changes_more(images):
    for kind in set(KINDS) - {"elastic_transform"}:  # its first strength moves the corners most
        change = [(corrupt(images, kind, s).double() - images).square().mean() for s in (1, 5)]
        assert change[0] < change[1], kind


def test_bad_input_is_refused(images):
    with pytest.raises(ValueError, match="no corruption 'rain': choose one of gaussian_noise, "):
        corrupt(images, "rain", 1)
    with pytest.raises(ValueError, match="strength=6 must be an integer from 1 to 5"):
        corrupt(images, "fog", 6)
    with pytest.raises(ValueError, match=r"must be uint8 .* got torch.float32"):
        corrupt(images.float(), "fog", 1)
    with pytest.raises(ValueError, match="for images of 3 x 32 x 32, and these are 1 x 28 x 28"):
        corrupt(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), "fog", 1)
