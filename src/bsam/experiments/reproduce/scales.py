"""Scales: a preset in full, with a sixth of its epochs, or as a tiny run on digits."""

from __future__ import annotations

from dataclasses import replace

from bsam.experiments.choices import Scale
from bsam.experiments.config import Config
from bsam.experiments.paper.presets import preset

__all__ = ["REDUCTION", "scaled", "shrunk"]

REDUCTION = 6
"""The preset's epochs are divided by this number in a reduced run, and so is its schedule."""
_TINY_EPOCHS, _TINY_SWAG = 20, (15, 5)


def scaled(name: str, scale: Scale) -> Config:
    """Return the settings of a preset at a scale.

    At the tiny scale, data, network and hyperparameters are those of the demo, for all data sets of the paper. Only the
    settings that a row of a table is about stay: method, splits, noise, the point of the second gradient, curvature and
    bias correction.
    """
    config = preset(name)
    match scale:
        case "full":
            return config
        case "reduced":
            return shrunk(config, REDUCTION)
        case "tiny":
            epochs, swag_epochs = _TINY_SWAG if config.swag_epochs else (_TINY_EPOCHS, 0)
            return replace(
                preset(f"digits/{config.method}"),
                epochs=epochs,
                swag_epochs=swag_epochs,
                splits=config.splits,
                sample_noise=config.sample_noise,
                perturb_from=config.perturb_from,
                curvature=config.curvature,
                bias_correction=config.bias_correction,
            )


def shrunk(config: Config, factor: float) -> Config:
    """Divide the epochs by `factor`, and the schedule with them."""

    def fewer(count: int) -> int:
        return max(1, round(count / factor))

    return replace(
        config,
        epochs=fewer(config.epochs),
        milestones=tuple(fewer(milestone) for milestone in config.milestones),
        warmup_epochs=fewer(config.warmup_epochs) if config.warmup_epochs else 0,
        swag_epochs=fewer(config.swag_epochs) if config.swag_epochs else 0,
        swag_interval=fewer(config.swag_interval),
    )
