"""The tables of the suites, from records that are written by hand."""

from tests.experiments.test_doubt_table import write_all
from tools import doubt


def test_there_is_a_row_per_method_pair_and_ensemble(tmp_path):
    assert doubt.doubt_markdown(tmp_path).startswith("Not recorded yet: `bsam reproduce table1 --block cifar10")
    write_all(tmp_path / "runs")
    head, _, *lines = doubt.doubt_markdown(tmp_path).splitlines()
    assert {line.count("|") for line in (head, *lines)} == {head.count("|")}
    assert [line.split("|")[1].split("<br>")[0].strip() for line in lines] == ["SGD", "bSAM", "2 × SGD", "5 × SGD"]
    head, _, first, *_ = doubt.scores_markdown(tmp_path).splitlines()
    assert first.count("|") == head.count("|")


def test_the_worst_strength_of_a_corruption_is_shown():
    rows = [{"mean": 0.1, "largest": 1, "change": 5.0}, {"mean": 0.3, "largest": 2, "change": 9.0}]
    assert doubt.corruptions_markdown({"kinds": {"shot_noise": rows}}).splitlines()[2] == (
        "| shot noise | 0.300 | 2 | 5.0 to 9.0 |"
    )
