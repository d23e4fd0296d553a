"""How the cost of the engine grows on one CUDA device: with splits, seeds, batch, parameters and samples.

    python benchmarks/growth.py --out results/engine_growth.json
    python benchmarks/growth_figure.py results/engine_growth.json --out docs/images/performance/growth.svg

ResNet-20-FRN in bfloat16, one of m = 8 splits, one seed and 128 images varied at a time; the arithmetic of bSAM alone,
for GPT-2 of several widths; and predictions for 10,000 images with more and more samples.
"""

from __future__ import annotations

from functools import partial

from engine import bsam_arithmetic, prediction, training_step
from workers import Build, main

SPLITS, SEEDS, BATCHES = (1, 2, 4, 8, 16), (2, 4, 8), (64, 256, 512, 1024)
WIDTHS = (16, 64, 192, 512, 768, 1152)
"""Of GPT-2: 1, 4, 15, 64, 124 and 250 million parameters."""
SAMPLES = (1, 8, 32, 64, 128)


def bsam_step(*, splits: int = 8, runs: int = 1, batch: int = 128) -> Build:
    return partial(
        training_step,
        "bsam",
        network="resnet20_frn",
        precision="bfloat16",
        splits=splits,
        runs=runs,
        batch=batch,
    )


MEASUREMENTS: dict[str, Build] = {
    **{f"splits {m}": bsam_step(splits=m) for m in SPLITS},
    **{f"seeds {runs}": bsam_step(runs=runs) for runs in SEEDS},
    **{f"batch {batch}": bsam_step(batch=batch) for batch in BATCHES},
    **{f"arithmetic width {width}": partial(bsam_arithmetic, width) for width in WIDTHS},
    **{f"predict {samples}": partial(prediction, "bfloat16", samples) for samples in SAMPLES},
}


if __name__ == "__main__":
    main(MEASUREMENTS, description=__doc__, out="engine_growth.json")
