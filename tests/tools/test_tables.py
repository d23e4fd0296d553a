"""Tables in pages: what is between the marks comes from the records."""

import json

import pytest

from bsam.experiments.paper.results import METRICS, margins, paper_tables
from tests.experiments.reproduce.records import write_record
from tools.tables import main, render, rewrite


def test_what_is_between_the_marks_is_replaced_and_nothing_else(tmp_path):
    text = (
        "a\n<!-- table: sweep_rho -->\n| old |\n<!-- end -->\nb\n<!-- table: table4 -->\n<!-- end -->\nc <!-- end -->\n"
    )
    new = rewrite(text, tmp_path)
    assert new.startswith("a\n<!-- table: sweep_rho -->\nNot recorded yet: `bsam sweep rho`.\n<!-- end -->\nb\n")
    assert new.endswith("\n<!-- end -->\nc <!-- end -->\n")
    assert rewrite(new, tmp_path) == new
    assert rewrite("no marks\n", tmp_path) == "no marks\n"


def test_a_new_record_makes_a_page_stale(tmp_path):
    page = rewrite("<!-- table: table6 -->\n<!-- end -->\n", tmp_path)
    assert "`bsam reproduce table6 --block mnist`" in page
    for seed in range(5):
        write_record(tmp_path / "runs", "table6/mnist/bsam", seed, accuracy=0.9878 + seed / 1e4)
    new = rewrite(page, tmp_path)
    assert new != page
    assert "| bSAM<br>5 seeds, 75 epochs | **98.80 (0.02)**<br>98.78 (0.06)<br>+0.02 equal |" in new
    assert "| SGD | -<br>98.63 (0.06)<br>not run |" in new
    assert "Of 56 printed numbers: 1 equal, 0 better, 3 worse, 0 open, 52 not run." in new
    assert "--block fashionmnist" in new


def test_the_counts_of_all_tables_add_up_to_the_papers_numbers(tmp_path):
    for seed in range(5):
        write_record(tmp_path / "runs", "table6/mnist/bsam", seed, accuracy=0.9878 + seed / 1e4)
    head, _, *rows = [line.strip("| ").split(" | ") for line in render("counts", tmp_path).splitlines()]
    assert head == ["numbers", "equal", "better", "worse", "open", "reduced", "not run"]
    counts = {name: [int(count) for count in row] for name, *row in rows}
    assert counts["table 6: Small data sets"] == [56, 1, 0, 3, 0, 0, 52]
    total = counts.pop("all")
    assert total == [sum(column) for column in zip(*counts.values(), strict=True)]
    assert total[0] == sum(total[1:]) == 288


def test_the_margins_are_those_of_the_file(tmp_path):
    rows = [line.strip("| ").split(" | ") for line in render("margins", tmp_path).splitlines()[2:]]
    shown = {name: dict(zip(METRICS, map(float, numbers), strict=True)) for name, *numbers in rows}
    for table, blocks in margins().items():
        titles = {block.name: block.title for block in paper_tables()[table].blocks}
        for block, found in blocks.items():
            assert shown.pop(f"table {table[-1]}, {titles[block]}") == found
    assert shown == {}


def test_a_block_in_short_has_what_is_recorded(tmp_path):
    for seed in range(5):
        write_record(tmp_path / "runs", "table6/mnist/bsam", seed, accuracy=0.9878 + seed / 1e4)
    (row,) = render("table6/mnist", tmp_path).splitlines()[2:]
    assert row.startswith("| bSAM | **98.80 (0.02)**<br>*98.78 (0.06)* |")
    with pytest.raises(ValueError, match="table6 has no block 'digits': there are mnist, fashionmnist"):
        render("table6/digits", tmp_path)
    with pytest.raises(ValueError, match="write table6/mnist, or table6/mnist/paper"):
        render("table6/mnist/all", tmp_path)


def test_the_rows_of_the_paper_alone_are_compared_with_each_other(tmp_path):
    for seed in range(5):
        write_record(tmp_path / "runs", "table6/mnist/bsam", seed, accuracy=0.9 + seed / 1e4)
        write_record(tmp_path / "runs", "here/mnist/bsam-mean", seed, accuracy=0.95 + seed / 1e4)
    assert "| bSAM | 90.02 (0.02)<br>" in render("table6/mnist", tmp_path)
    (row,) = render("table6/mnist/paper", tmp_path).splitlines()[2:]
    assert row.startswith("| bSAM | **90.02 (0.02)**<br>")


def test_improvements_stand_below_a_block_of_table_3(tmp_path):
    for seed in range(3):
        write_record(tmp_path / "runs", "table3/mnist/bsam-no-noise", seed, accuracy=0.9867 + seed / 1e4)
        write_record(tmp_path / "runs", "table6/mnist/bsam", seed, accuracy=0.9877 + seed / 1e4)
    (row,) = [line for line in render("table3", tmp_path).splitlines() if "*improvement*" in line]
    assert row.startswith("| *improvement* | +0.10 ± 0.02<br>+0.11 | 0.000 ± 0.000<br>+0.003 |")
    assert "± half of Welch's 90% interval" in render("table3", tmp_path)


def test_studies_say_their_scale(tmp_path):
    metrics = {metric: [[0.5, None]] for metric in ("accuracy", "nll", "ece", "auroc")}
    series = [{"label": "bSAM", "x": [0.1], "metrics": metrics}]
    record = {"title": "t", "x": "ρ", "scale": "tiny", "series": series}
    (tmp_path / "sweep_rho.json").write_text(json.dumps(record))
    shown = render("sweep_rho", tmp_path)
    assert "| bSAM | 0.1 | 0.50 | 0.500 | 0.5000 | 0.500 |" in shown
    assert "embedded digits" in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: nothing -->\n<!-- end -->", "there is no table 'nothing' to fill in"),
        ("<!-- table: table1 -->\n", "the table table1 has no end"),
        ("<!-- table: table1 -->\n<!-- table: table2 -->\n<!-- end -->", "the table table1 has no end"),
    ],
)
def test_bad_marks_are_refused(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        rewrite(text, tmp_path)


def test_tables_are_checked_and_written(tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    (tmp_path / "README.md").write_text("nothing to fill in\n")
    page.write_text("before\n<!-- table: table4 -->\nold\n<!-- end -->\nafter\n")
    root = ["--root", str(tmp_path)]
    assert main(["--check", *root]) == 1
    assert capsys.readouterr().out == f"stale: {page}\n"
    assert "old" in page.read_text()
    assert main(root) == 0
    assert capsys.readouterr().out == f"written: {page}\n"
    assert "old" not in page.read_text()
    counts = "Of 20 printed numbers: 0 equal, 0 better, 0 worse, 0 open, 20 not run."
    assert page.read_text().startswith(
        f"before\n<!-- table: table4 -->\n{counts}\n\n**bSAM, ResNet-20-FRN on CIFAR-10**\n"
    )
    assert page.read_text().endswith("\n<!-- end -->\nafter\n")
    assert main(["--check", *root]) == 0
