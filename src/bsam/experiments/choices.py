"""Choices that several commands offer. They need no import, so that the help of a command does not wait for torch."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["ALL_SUITES", "SCALES", "SUITE_NAMES", "DtypeName", "Scale"]

DtypeName = Literal["float32", "bfloat16"]
"""Type of matrix products and convolutions."""
Scale = Literal["full", "reduced", "tiny"]
"""`full`: the preset as it is. `reduced`: fewer epochs on the same data. `tiny`: on the embedded digits."""
SCALES: tuple[Scale, ...] = get_args(Scale)
"""The largest scale first."""
SUITE_NAMES = ("rejection", "unknown", "corruptions", "human")
"""What `bsam.experiments.suites` can evaluate."""
ALL_SUITES = "shift"
"""Stands for all suites that fit a data set."""
