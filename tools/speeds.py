"""The table of the performance notes, from the records of the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bsam.experiments.record import read_json

__all__ = ["markdown"]

MISSING = "not measured yet"


class Measured:
    """The records of `benchmarks/engine.py` and `benchmarks/cpu.py`, and of one run that was alone on the device."""

    def __init__(self, results: Path) -> None:
        def read(name: str) -> dict[str, Any]:
            return read_json(results / name)

        self._engine = read("engine.json")["measurements"]
        self._earlier = [
            run["measurements"] for run in read("engine_development.json")["runs"] if "measurements" in run
        ]
        cpu = read("cpu.json")
        self._cpu, self._cpu_ms = cpu["ratio_to_adam"], cpu["ms"]
        self.run_seconds: float = read("one_run.json")["seconds"]

    def of(self, name: str, key: str = "ms") -> float:
        """Return a number of the GPU's record; a KeyError if it is not measured."""
        return float(self._engine[name][key])

    def range_of(self, name: str) -> tuple[float, float]:
        """Return the shortest and the longest time of all measurements, for times that depend on the host."""
        times = [float(each[name]["ms"]) for each in (self._engine, *self._earlier) if "ms" in each.get(name, {})]
        return min(times), max(times)

    def ratio(self, name: str, other: str) -> str:
        """Return the ratio of two steps, with their times."""
        a, b = self.of(name), self.of(other)
        return f"{a / b:.2f} ({a:.2f} / {b:.2f} ms)"

    def prediction(self, dtype: str) -> str:
        """Return the ratio of sampled to plain passes, with their times."""
        a, b = (self.of(f"predict {dtype}", key) for key in ("predict_s", "plain_s"))
        return f"{a / b:.2f} ({a:.3f} / {b:.3f} s)"

    def cpu(self, name: str, *, quartiles: bool = False) -> str:
        """Return the ratio of a step to Adam's on the CPU."""
        found = self._cpu[name]
        spread = " (quartiles {:.2f}, {:.2f})".format(*found["quartiles"]) if quartiles else ""
        return f"{found['median']:.2f}{spread}"

    def cpu_ratio(self, name: str, other: str) -> str:
        """Return the ratio of two steps on the CPU."""
        return f"{self._cpu_ms[name] / self._cpu_ms[other]:.2f}"


BSAM, TF32, JAX = "r20 bsam m=8 bfloat16", "r20 bsam m=8 tf32", "r20 bsam m=8 jax"
ROWS: list[tuple[str, Callable[[Measured], str], str]] = [
    (
        "ResNet-20-FRN, batch 128, bfloat16: bSAM with m = 8 / SGD, both captured, our convolutions in both",
        lambda m: m.ratio(BSAM, "r20 sgd m=1 bfloat16"),
        "2.15",
    ),
    ("the same in TF32", lambda m: m.ratio(TF32, "r20 sgd m=1 tf32"), "2.15"),
    ("bSAM / SGD with torch's compiler and cuDNN, captured", lambda m: m.ratio(BSAM, "r20 sgd plain bfloat16"), ""),
    ("the same in TF32", lambda m: m.ratio(TF32, "r20 sgd plain tf32"), ""),
    ("the step of bSAM, absolute", lambda m: f"{m.of(BSAM):.2f} ms; {m.of(TF32):.2f} in TF32", "4.0 ms"),
    (
        "a step with the structure of the authors' JAX code (TF32) / ours",
        lambda m: "{:.1f} to {:.1f} ({:.1f} to {:.1f} ms); {:.1f} to {:.1f} against our TF32".format(
            *(t / m.of(BSAM) for t in m.range_of(JAX)),
            *m.range_of(JAX),
            *(t / m.of(TF32) for t in m.range_of(JAX)),
        ),
        "5",
    ),
    (
        "4 seeds together, per seed",
        lambda m: f"{m.of(f'{BSAM} x4', 'ms_per_run'):.2f} ms; {m.of(f'{TF32} x4', 'ms_per_run'):.2f} in TF32",
        "2.7 ms",
    ),
    (
        "the same network: SAM with m = 8, VOGN with 16 parts",
        lambda m: f"{m.of('r20 sam m=8 bfloat16'):.2f} ms, {m.of('r20 vogn m=16 bfloat16'):.2f} ms",
        "",
    ),
    ("fused AdamW, captured", lambda m: f"{m.of('r20 adamw plain bfloat16'):.2f} ms", ""),
    (
        "IVON, and SAM of pytorch_optimizer, compiled but not captured",
        lambda m: f"{m.of('r20 ivon bfloat16'):.2f} ms, {m.of('r20 sam of pytorch_optimizer bfloat16'):.2f} ms",
        "",
    ),
    (
        "arithmetic of bSAM alone, 124 million parameters",
        lambda m: (
            f"{m.of('arithmetic bsam'):.2f} ms; 16 passes at the speed of a copy are "
            f"{m.of('arithmetic bsam', 'floor_16_passes_ms'):.2f}"
        ),
        "2.5 ms",
    ),
    (
        "the same / IVON's",
        lambda m: f"{m.ratio('arithmetic bsam', 'arithmetic ivon')}; fused AdamW: {m.of('arithmetic adamw'):.2f} ms",
        "0.25",
    ),
    (
        "peak memory beyond weights and state, m = 8, in copies of the parameters: loop / vmap",
        lambda m: f"{m.of('memory loop', 'copies'):.2f} / {m.of('memory vmap', 'copies'):.2f}",
        "4 / 18",
    ),
    (
        "the same with more and smaller tensors",
        lambda m: (
            f"{m.of('memory loop, smaller tensors', 'copies'):.2f} / "
            f"{m.of('memory vmap, smaller tensors', 'copies'):.2f}"
        ),
        "4 / 18",
    ),
    (
        "32 samples for 10,000 CIFAR images / 32 plain compiled passes",
        lambda m: f"{m.prediction('bfloat16')}; {m.prediction('tf32')} in TF32",
        "1.1",
    ),
    (
        "a run of 180 epochs on CIFAR-10, ResNet-20, bfloat16, compilation cached",
        lambda m: f"{m.run_seconds:.0f} s",
        "300 s",
    ),
    (
        "ResNet-18, batch 200, bfloat16: bSAM with m = 8 / SGD with torch's compiler and cuDNN, captured",
        lambda m: m.ratio("r18 bsam m=8", "r18 sgd plain"),
        "2.4",
    ),
    ("the same / SGD with our convolutions", lambda m: m.ratio("r18 bsam m=8", "r18 sgd m=1"), "2.4"),
    (
        "CPU, MNIST MLP, batch 128: compiled bSAM / Adam",
        lambda m: (
            f"{m.cpu('BSAM, compiled (TrainStep)', quartiles=True)}; "
            f"{m.cpu_ratio('BSAM, compiled (TrainStep)', 'Adam, compiled (TrainStep)')} with Adam compiled too"
        ),
        "2.5",
    ),
    (
        "the same, not compiled; IVON; SAM of pytorch_optimizer",
        lambda m: "; ".join(m.cpu(name) for name in ("BSAM", "IVON (ivon-opt)", "SAM (pytorch_optimizer)")),
        "",
    ),
]
"""Per row: what is measured, how it is read from the records, and the goal."""


def markdown(results: Path) -> str:
    """Write the table from the records in a folder."""
    measured = Measured(results)
    lines = ["| what | measured | goal |", "|---|---|---|"]
    for what, read, goal in ROWS:
        try:
            found = read(measured)
        except KeyError:
            found = MISSING
        lines.append(f"| {what} | {found} | {goal} |")
    return "\n".join(lines)
