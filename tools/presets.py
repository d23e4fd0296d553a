"""Makes the presets of the paper's settings: `python -m tools.presets` writes their files again.

settings.toml has the printed settings, row by row. This file adds the settings that the paper states once for all rows.
beyond.toml has the rows of ours.
"""

from __future__ import annotations

import shutil
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from bsam.experiments.config import from_mapping, to_toml
from bsam.experiments.methods import METHODS
from bsam.experiments.paper.beyond import contents
from bsam.experiments.paper.presets import FOLDER

__all__ = ["generate", "settings"]

Values = dict[str, Any]

_SPLITS = {**dict.fromkeys(("sam-sgd", "sam-adam", "bsam"), 8), "vogn": 16}
"""The paper's m, "fixed" for all data sets."""

_NAMES = {
    "mnist": "MNIST",
    "fashionmnist": "FashionMNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "tinyimagenet": "TinyImageNet",
}


def settings() -> dict[str, Any]:
    """Return the paper's settings as printed, by block."""
    return tomllib.loads((Path(__file__).parent / "settings.toml").read_text(encoding="utf-8"))


def generate() -> dict[str, str]:
    """Return the text of each preset's file, by name."""
    texts = {}
    for source, presets in {"settings.toml": _paper(), "demo.toml": _digits(), "beyond.toml": _beyond()}.items():
        for name, (title, values) in presets.items():
            origin = f"Generated from {source} by python -m tools.presets"
            texts[name] = f"# {title}\n# {origin}.\n{to_toml(from_mapping(values))}"
    return texts


def _paper() -> dict[str, tuple[str, Values]]:
    """Return title and settings of each preset of the paper."""
    presets: dict[str, tuple[str, Values]] = {}
    for block, content in settings().items():
        rows, swag = content.pop("methods"), content.pop("swag", None)
        table, network = block[len("table")], "ResNet-18" if content["model"] == "resnet18" else None
        data = ", ".join(filter(None, (_NAMES[content["dataset"]], network)))
        printed = 9 if network else 8 if content.get("augment") else 7  # the table of hyperparameters
        for method, row in rows.items():
            values = {**content, "method": method, **row}
            if method in _SPLITS:
                values["splits"] = _SPLITS[method]
            if method == "bsam":
                values["perturb_from"] = "sample"
                values |= {"augmentation_factor": 4.0} if content.get("augment") else {}
            title = (
                f"The paper's table {table}, {data}, row {METHODS[method].title}; settings: table {printed}, same row."
            )
            presets[f"{block}/{method}"] = title, values
        if swag is not None:
            title = f"The paper's table {table}, {data}, row SWAG; settings: table {printed}, row SGD, and appendix G."
            presets[f"{block}/swag"] = title, {**content, "method": "swag", **rows["sgd"], **swag}

    for block in ("table6/mnist", "table6/fashionmnist", "table1/cifar10", "table1/cifar100"):
        name = block.partition("/")[2]
        title = f"The paper's table 3, {_NAMES[name]}, row bSAM w/o Noise; settings: table 7, row bSAM."
        values = {**presets[f"{block}/bsam"][1], "sample_noise": False}
        del values["perturb_from"]  # without noise the sample is the mean
        presets[f"table3/{name}/bsam-no-noise"] = title, values
    for splits in (1, 2, 4, 8, 16):
        for method in ("bsam", "sam-sgd"):
            values = {**presets[f"table1/cifar100/{method}"][1], "splits": splits}
            row = f"{METHODS[method].title}, m = {splits}"
            title = f"The paper's table 5 (m-sharpness), {row}; settings: table 7, CIFAR-100."
            presets[f"table5/cifar100/{method}-{splits}"] = title, values
    return presets


def _digits() -> dict[str, tuple[str, Values]]:
    """Return title and settings of the demo's presets, on scikit-learn's digits."""
    shared, rows = _demo()
    return {
        f"digits/{method}": (
            f"Not in the paper: {METHODS[method].title} of `bsam demo`.",
            {**shared, "method": method, **row},
        )
        for method, row in rows.items()
    }


def _demo() -> tuple[Values, dict[str, Values]]:
    """Return the settings that all runs of the demo share, and those of each method."""
    digits = tomllib.loads((files("bsam.experiments") / "demo.toml").read_text(encoding="utf-8"))["digits"]
    rows, _ = digits.pop("methods"), digits.pop("grid")
    return digits, rows


def _beyond() -> dict[str, tuple[str, Values]]:
    """Return our rows; a row with a method of the paper starts from the paper's settings in its block."""
    presets: dict[str, tuple[str, Values]] = {}
    paper = _paper()
    for name, row in contents().items():
        if "settings" not in row:
            continue
        changes = row["settings"]
        method = changes.get("method", "bsam")
        if "table" not in row:
            presets[name] = f"Not in the paper: {METHODS[method].title} on digits.", {**_demo()[0], **changes}
            continue
        block = f"{row['table']}/{row['block']}"
        base = paper[f"{block}/{method}"][1] if f"{block}/{method}" in paper else _shared(block)
        title = f"Not in the paper: {row['label']}, beside {block}; settings: {row['about']}."
        presets[name] = "\n# ".join([title, *row.get("comment", "").splitlines()]), {**base, **changes}
    return presets


def _shared(block: str) -> Values:
    """Return the settings that all methods of a block share."""
    return {name: value for name, value in settings()[block].items() if name not in ("methods", "swag")}


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name, text in generate().items():
        path = FOLDER / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
