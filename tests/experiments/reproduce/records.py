"""Records written by hand, to test what is made of them, and what two trainings of a run must have in common."""

import dataclasses
import json

from bsam.experiments.paper.presets import preset
from bsam.experiments.record import read_json

VALUES = {"accuracy": 0.9, "nll": 0.3, "ece": 0.02, "auroc": 0.9}


def write_record(
    folder,
    name,
    seed,
    *,
    preset_name=None,
    scale="full",
    changes=(),
    samples=(32,),
    config=None,
    device="CPU, x",
    **metrics,
):
    """The record of a run; metrics as fractions."""
    content = {
        "preset": preset_name or name,
        "seed": seed,
        "config": dataclasses.asdict(config or preset(preset_name or name)),
        "seconds": 10.0 + seed,
        "environment": {"device": device},
        "evaluations": {"test": {str(count): {**VALUES, **metrics} for count in samples}},
    }
    if changes:
        content["changes"] = list(changes)
    if scale is not None:
        content["scale"] = scale
    path = folder / name / f"seed{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def results(folder):
    """By run: what its record says of training and test, without hashes of files, times and the machine."""
    found = {}
    for path in sorted(folder.glob("**/seed*.json")):
        record = read_json(path)
        test = {
            samples: {name: value for name, value in metrics.items() if not name.endswith("sha256")}
            for samples, metrics in record["evaluations"]["test"].items()
        }
        found[str(path.relative_to(folder))] = record["config"], record["final_loss"], test
    return found
