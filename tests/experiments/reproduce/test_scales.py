"""The scales: every preset can be run at each of them."""

import pytest

from bsam.experiments.paper.presets import preset, preset_names
from bsam.experiments.reproduce.scales import scaled


@pytest.mark.parametrize("name", [name for name in preset_names() if not name.startswith("digits")])
def test_every_preset_can_be_scaled(name):
    full = scaled(name, "full")
    assert full == preset(name)
    reduced = scaled(name, "reduced")
    assert (reduced.dataset, reduced.model, reduced.batch_size) == (full.dataset, full.model, full.batch_size)
    assert abs(reduced.total_epochs - full.total_epochs / 6) <= 1
    assert all(milestone < reduced.epochs for milestone in reduced.milestones)
    rates = [reduced.learning_rate(epoch) for epoch in range(reduced.total_epochs)]
    assert max(rates) == pytest.approx(full.lr)
    tiny = scaled(name, "tiny")
    assert (tiny.dataset, tiny.total_epochs) == ("digits", 20)
    for field in ("method", "splits", "sample_noise", "curvature"):
        assert getattr(tiny, field) == getattr(full, field)
