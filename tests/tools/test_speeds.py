"""The table of the performance notes has the numbers of the records."""

import json

import pytest

from tools import speeds


@pytest.fixture
def results(tmp_path):
    """Records of a device on which all is round."""
    times = {"r20 bsam m=8 bfloat16": 3.0, "r20 sgd m=1 bfloat16": 1.5, "r20 bsam m=8 jax": 36.0}
    engine = {
        **{name: {"ms": ms} for name, ms in times.items()},
        "r20 bsam m=8 tf32": {"ms": 6.0},
        "predict bfloat16": {"predict_s": 0.3, "plain_s": 0.4},
        "predict tf32": {"predict_s": 0.5, "plain_s": 0.4},
        "memory loop": {"copies": 4.0},
        "memory vmap": {"copies": 18.5},
        "r18 bsam m=8": {"error": "out of memory"},
        "r18 sgd plain": {"ms": 7.0},
    }
    ratios = {"BSAM, compiled (TrainStep)": {"median": 2.25, "quartiles": [2.0, 2.5]}}
    times = {"BSAM, compiled (TrainStep)": 9.0, "Adam, compiled (TrainStep)": 4.5}
    (tmp_path / "engine.json").write_text(json.dumps({"measurements": engine}))
    earlier = [{"what": "a sweep"}, {"measurements": {"r20 bsam m=8 jax": {"ms": 18.0}}}, {"measurements": {}}]
    (tmp_path / "engine_development.json").write_text(json.dumps({"runs": earlier}))
    (tmp_path / "cpu.json").write_text(json.dumps({"ratio_to_adam": ratios, "ms": times}))
    (tmp_path / "one_run.json").write_text(json.dumps({"seconds": 125.6}))
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "bSAM with m = 8 / SGD, both captured, our convolutions in both | 2.00 (3.00 / 1.50 ms) | 2.15 |",
        "the step of bSAM, absolute | 3.00 ms; 6.00 in TF32 | 4.0 ms |",
        "JAX code (TF32) / ours | 6.0 to 12.0 (18.0 to 36.0 ms); 3.0 to 6.0 against our TF32 | 5 |",
        "32 plain compiled passes | 0.75 (0.300 / 0.400 s); 1.25 (0.500 / 0.400 s) in TF32 | 1.1 |",
        "in copies of the parameters: loop / vmap | 4.00 / 18.50 | 4 / 18 |",
        "compilation cached | 126 s | 300 s |",
        "compiled bSAM / Adam | 2.25 (quartiles 2.00, 2.50); 2.00 with Adam compiled too | 2.5 |",
    ],
)
def test_numbers_are_those_of_the_records(results, line):
    assert sum(found.endswith(line) for found in speeds.markdown(results).splitlines()) == 1


def test_what_failed_or_is_not_there_is_said_to_be_missing(results):
    lines = speeds.markdown(results).splitlines()
    assert any(line.startswith("| ResNet-18") and "| not measured yet | 2.4 |" in line for line in lines)
    assert len(lines) == 2 + len(speeds.ROWS)
