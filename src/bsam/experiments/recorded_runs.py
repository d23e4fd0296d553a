"""The records of finished, evaluated runs in a folder: `PRESET/seedK.json` is a copy of a run's `record.json`.

The copy also has the `scale` of the run and, for a sweep or an ablation, its `changes`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from bsam.experiments.choices import SCALES, Scale
from bsam.experiments.config import Config, from_mapping, override
from bsam.experiments.paper.beyond import beyond, own_dtype
from bsam.experiments.paper.presets import preset, preset_names
from bsam.experiments.record import read_json

__all__ = ["Recorded", "read_record", "recorded", "same_run"]


@dataclass(frozen=True)
class Recorded:
    """The contents of a run's record."""

    path: Path
    preset: str
    seed: int
    scale: Scale
    config: Config
    seconds: float
    test: dict[str, dict[str, Any]]
    """Metrics on the test part, by number of samples."""
    device: str
    suites: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Numbers of suites, by suite and number of samples."""
    processes: int = 1
    """The most processes that trained on the device at a time."""


@cache
def same_run(name: str) -> tuple[str, ...]:
    """Return all presets with the same settings: m = 8 in table 5 is a run of table 1. The first one has the records.

    A row of ours is always a run of its own: it may differ from a row of the paper in the dtype only.
    """
    if name in beyond():
        return (name,)
    config = preset(name)
    return tuple(other for other in preset_names() if other not in beyond() and preset(other) == config)


def read_record(path: Path) -> Recorded:
    """Read the record of a run; an error names the file and the problem."""
    try:
        content = read_json(path)
    except ValueError as error:
        reason = str(error).removeprefix(str(path)).partition(". ")[0]
        raise ValueError(f"{path} is not a run's record: it{reason}. Remove it.") from error
    try:
        config, name = from_mapping(content["config"]), content["preset"]
        scale = content.get("scale", "full")
        if scale not in SCALES:
            raise ValueError(f"scale {scale!r} is not one of {', '.join(SCALES)}")
        expected = override(preset(name), content.get("changes", ()))
        dtype = own_dtype(name) or config.precision
        expected = replace(expected, precision=dtype, channels_last=config.channels_last)
        if scale == "full" and config != expected:
            scale = "reduced"  # even if the record says "full"
        test = content["evaluations"].get("test", {})
        device = content["environment"]["device"]
        seed, seconds, suites = content["seed"], content["seconds"], content.get("suites", {})
        processes = content.get("engine", {}).get("processes_on_device", 1)
        return Recorded(path, name, seed, scale, config, seconds, test, device, suites, processes)
    except KeyError as error:
        raise ValueError(f"{path} is not a run's record: {error} is missing. Remove it.") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a run's record: {str(error).rstrip('.')}. Remove it.") from error


def recorded(records: Path, name: str, scale: Scale | None = None) -> dict[int, Recorded]:
    """Return the records under a name by seed: those of `scale`, or by default those of the largest recorded scale."""
    found = [record for path in _files(records, name) if (record := read_record(path)).scale == (scale or record.scale)]
    fullest = min((SCALES.index(record.scale) for record in found), default=0)
    by_seed: dict[int, Recorded] = {}
    for record in found:
        if record.scale == SCALES[fullest]:
            by_seed.setdefault(record.seed, record)
    return dict(sorted(by_seed.items()))


def _files(records: Path, name: str) -> Iterator[Path]:
    for folder in same_run(name) if name in preset_names() else (name,):
        paths = [path for path in (records / folder).glob("seed*.json") if re.fullmatch(r"seed\d+", path.stem)]
        yield from sorted(paths, key=lambda path: int(path.stem[4:]))
