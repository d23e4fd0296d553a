"""Presets: a configuration for each run of the paper, made of its tables of settings.

`table1/cifar10/bsam` is the row "bSAM" of the block CIFAR-10 in the paper's first table of results. Table 3 (without
noise) and 5 (m-sharpness) are rows of their own; table 4 evaluates runs of table 1. `digits/...` needs no download.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from bsam.experiments.config import Config, from_mapping

__all__ = ["preset", "preset_names"]

_ADVERSARIAL = ("sam-sgd", "sam-adam", "bsam")
_SPLITS = {**dict.fromkeys(_ADVERSARIAL, 8), "vogn": 16}
"""The paper's m, "fixed" for all data sets."""


def settings() -> dict[str, Any]:
    """The paper's settings as printed, by block."""
    return tomllib.loads((files("bsam.experiments.paper") / "settings.toml").read_text())


@cache
def _presets() -> dict[str, dict[str, Any]]:
    presets: dict[str, dict[str, Any]] = {}
    for block, content in settings().items():
        rows, swag = content.pop("methods"), content.pop("swag", None)
        for method, row in rows.items():
            values = {**content, "method": method, **row}
            if method in _SPLITS:
                values["splits"] = _SPLITS[method]
            if method == "bsam" and content.get("augment"):
                values["augmentation_factor"] = 4.0
            presets[f"{block}/{method}"] = values
        if swag is not None:
            presets[f"{block}/swag"] = {**content, "method": "swag", **rows["sgd"], **swag}

    for block in ("table6/mnist", "table6/fashionmnist", "table1/cifar10", "table1/cifar100"):
        name = block.partition("/")[2]
        presets[f"table3/{name}/bsam-no-noise"] = {**presets[f"{block}/bsam"], "sample_noise": False}
    for splits in (1, 2, 4, 8, 16):
        for method in ("bsam", "sam-sgd"):
            presets[f"table5/cifar100/{method}-{splits}"] = {**presets[f"table1/cifar100/{method}"], "splits": splits}
    # The paper prints N delta = 10 and 2 for the augmented runs, the authors' later code has four times as much.
    for name in ("cifar10", "cifar100", "cifar10-resnet18", "cifar100-resnet18"):
        values = presets[f"table2/{name}/bsam"]
        presets[f"table2/{name}/bsam-prior-x4"] = {**values, "prior_precision": 4 * values["prior_precision"]}
    return presets | _embedded()


def _embedded() -> dict[str, dict[str, Any]]:
    """Runs on data that comes with scikit-learn: those of the demo."""
    digits = tomllib.loads((files("bsam.experiments") / "demo.toml").read_text())["digits"]
    rows, _ = digits.pop("methods"), digits.pop("grid")
    return {f"digits/{method}": {**digits, "method": method, **row} for method, row in rows.items()}


def preset_names() -> list[str]:
    """All presets."""
    return list(_presets())


def preset(name: str) -> Config:
    """The configuration of a preset."""
    if name not in _presets():
        near = [known for known in _presets() if name.split("/")[-1] in known or known.startswith(name)]
        hint = ", ".join(near[:6]) or ", ".join(sorted({known.rpartition("/")[0] for known in _presets()}))
        raise ValueError(f"there is no preset {name!r}. Near it: {hint}. `bsam configs` lists all.")
    return from_mapping(_presets()[name])
