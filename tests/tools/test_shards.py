"""The table of what a step of a sharded model costs."""

from tools import shards


def test_rows_have_time_and_memory():
    record = {
        "ranks": 1,
        "parameters": 1009475584,
        "size": {"batch": 8, "length": 1024},
        "methods": {
            "AdamW": {"seconds": 0.2, "held": 4.0, "peak": 6.04},
            "BSAM": {"seconds": 0.45, "held": None, "peak": None},
        },
        "environment": {"device": "NVIDIA H200", "packages": {"torch": "2.11.0"}},
    }
    header, _, adamw, ours, _, below = shards.markdown(record).splitlines()
    assert header.count("|") == adamw.count("|") == ours.count("|")
    assert adamw == "| AdamW | 0.200 | 1.00 | 4.0 | 6.0 |"
    assert ours == "| bSAM | 0.450 | 2.25 |  |  |"
    assert below == "1,009,475,584 parameters, 1 rank, 8 sequences of 1024 tokens per rank; NVIDIA H200, torch 2.11.0."
