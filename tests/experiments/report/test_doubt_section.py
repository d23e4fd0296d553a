"""The report's section on doubt: curves and numbers from records, or the command that makes them."""

from bsam.experiments.report.doubt_section import doubt_section
from tests.experiments.test_doubt_table import write_all


def test_without_records_there_is_the_command(tmp_path):
    found = doubt_section(tmp_path)
    assert found["command"] == "bsam reproduce table1 --block cifar10 --seeds 5 --first-seed 5 --suite shift"
    assert found["rows"] == found["curves"] == found["histograms"] == []


def test_records_become_curves_and_rows(tmp_path):
    write_all(tmp_path)
    found = doubt_section(tmp_path)
    assert [row[0] for row in found["rows"]] == ["SGD", "bSAM", "2 × SGD", "5 × SGD"]
    assert len(found["curves"]) == 4
    assert 'aria-label="Risk against coverage"' in found["curves"][0][1]
    assert all("5 × SGD" in svg for _, svg in found["curves"])
    assert [name for name, _ in found["histograms"]] == [row[0] for row in found["rows"]]
