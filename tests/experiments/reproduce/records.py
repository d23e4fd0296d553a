"""Records written by hand, to test what is made of them."""

import dataclasses
import json

from bsam.experiments.paper.presets import preset

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
