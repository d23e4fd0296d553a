"""The page about scale: its record agrees with the least that must be sent, and with what the page says."""

from pathlib import Path

import pytest

from bsam.experiments.record import read_json
from tools.scale import computed_markdown, measured_markdown, memory_markdown

RECORD = read_json(Path(__file__).parents[2] / "results" / "scale.json")


def test_what_was_measured_is_what_must_be_sent():
    for row in RECORD["measured"]:
        # gloo makes a reduce-scatter of an all-reduce: four thirds of what FSDP2 must send
        factor = 4 / 3 if "sharded" in row["way"] else 1
        assert row["bytes"] == pytest.approx(factor * row["least"], rel=0.01)
        assert row["least"] > 0 or row["ranks"] == 1


def test_bsam_sends_twice_as_much_as_one_gradient():
    for ranks in (2, 4):
        sent = {row["way"]: row["bytes"] for row in RECORD["measured"] if row["ranks"] == ranks}
        for ours, theirs in (("bSAM, DDP", "AdamW, DDP"), ("bSAM, sharded", "AdamW, sharded")):
            assert sent[ours] == pytest.approx(2 * sent[theirs], rel=0.01)
        assert sent["bSAM, ranks as splits"] == pytest.approx(sent["bSAM, DDP"], rel=0.01)
        assert sent["SAM, ranks as splits"] == pytest.approx(sent["AdamW, DDP"], rel=0.01)


def test_the_tables_have_a_row_per_way():
    assert len(measured_markdown(RECORD).splitlines()) == 2 + 6
    assert len(computed_markdown(RECORD).splitlines()) == 2 + 7
    lines = memory_markdown(RECORD).splitlines()
    assert len(lines) == 2 + 3
    copies = RECORD["copies"]["bsam"]
    assert f"| bSAM | {copies:.1f} | {4 * copies * 7 / 8:.0f} GB |" in lines[-1]
