"""Plans: which runs a table needs, and which of them are recorded."""

import dataclasses

import pytest

from bsam.experiments.comparison import TABLES
from bsam.experiments.paper.presets import preset
from bsam.experiments.reproduce.plan import Places, Wanted, find_places, make_plan, settle, wanted_by_table
from bsam.experiments.reproduce.scales import scaled
from tests.experiments.reproduce.records import write_record


@pytest.fixture
def places(tmp_path):
    return Places(tmp_path / "runs", tmp_path / "records", tmp_path)


def names(plan):
    return list(dict.fromkeys(task.name for task in plan.tasks))


@pytest.mark.parametrize(
    ("table", "count"), [("table1", 14), ("table2", 21), ("table3", 8), ("table4", 1), ("table5", 10), ("table6", 14)]
)
def test_a_table_has_its_runs(table, count, places):
    plan = make_plan(wanted_by_table(table), seeds=5, scale="full", places=places)
    assert len(plan.tasks) == 5 * count
    assert plan.recorded == ()
    assert all(task.config == preset(task.name) for task in plan.tasks)
    assert len({task.folder for task in plan.tasks}) == len({task.record for task in plan.tasks}) == 5 * count
    assert [task.seed for task in plan.tasks[:5]] == [0, 1, 2, 3, 4]


def test_all_tables_share_their_runs(places):
    wanted = [want for table in TABLES for want in wanted_by_table(table)]
    plan = make_plan(wanted, seeds=1, scale="full", places=places)
    assert len(plan.tasks) == 14 + 21 + 4 + 8 + 14
    (task,) = [task for task in plan.tasks if task.name == "table1/cifar10/bsam"]
    assert task.samples == (0, 8, 32, 64, 512, 2048)  # tables 1, 3 and 4


def test_blocks_and_methods_are_chosen(places):
    plan = make_plan(wanted_by_table("table2", "tinyimagenet", ["sgd", "bsam"]), seeds=1, scale="full", places=places)
    assert names(plan) == ["table2/tinyimagenet/sgd", "table2/tinyimagenet/bsam"]
    assert len(wanted_by_table("table2", methods=["sgd"])) == 5


def test_what_is_recorded_is_skipped(places):
    for seed in (0, 2):
        write_record(places.records, "table6/mnist/sgd", seed)
    plan = make_plan(wanted_by_table("table6", "mnist", ["sgd"]), seeds=3, scale="full", places=places)
    assert [task.seed for task in plan.tasks] == [1]
    assert [task.seed for task in plan.recorded] == [0, 2]


def test_what_lacks_an_evaluation_is_not_skipped(places):
    write_record(places.records, "table1/cifar10/bsam", 0, samples=(0, 8, 32, 64))
    assert make_plan(wanted_by_table("table1", "cifar10", ["bsam"]), seeds=1, scale="full", places=places).tasks == ()
    (task,) = make_plan(wanted_by_table("table4"), seeds=1, scale="full", places=places).tasks
    assert task.samples == (0, 8, 64, 512, 2048)


def test_a_run_of_another_table_is_skipped(places):
    write_record(places.records, "table1/cifar100/bsam", 0)
    plan = make_plan(wanted_by_table("table5", "bsam", ["bsam-8"]), seeds=1, scale="full", places=places)
    assert plan.tasks == ()
    (task,) = make_plan(wanted_by_table("table5", "bsam", ["bsam-8"]), seeds=2, scale="full", places=places).tasks
    assert (task.name, task.preset, task.seed) == ("table1/cifar100/bsam", "table1/cifar100/bsam", 1)


def test_full_runs_serve_reduced_plans_but_not_the_other_way_round(places):
    wanted = wanted_by_table("table6", "mnist", ["sgd"])
    short = scaled("table6/mnist/sgd", "reduced")
    write_record(places.records, "table6/mnist/sgd", 0, scale="reduced", config=short)
    assert len(make_plan(wanted, seeds=1, scale="full", places=places).tasks) == 1
    assert make_plan(wanted, seeds=1, scale="reduced", places=places).tasks == ()
    write_record(places.records, "table6/mnist/sgd", 0)
    assert make_plan(wanted, seeds=1, scale="full", places=places).tasks == ()
    assert make_plan(wanted, seeds=1, scale="reduced", places=places).tasks == ()
    assert len(make_plan(wanted, seeds=1, scale="tiny", places=places).tasks) == 1


def test_changes_that_change_nothing_are_the_presets_own_run():
    want = Wanted("table1/cifar100/bsam", (32,), ("rho=0.001",), "sweep/rho/bsam-0.001")
    assert settle(want, "full")[0] == "table1/cifar100/bsam"
    name, config = settle(dataclasses.replace(want, changes=("rho=0.002",)), "full")
    assert (name, config.rho) == ("sweep/rho/bsam-0.001", 0.002)


def test_unknown_names_say_what_there_is():
    with pytest.raises(ValueError, match="--block mnist: table1 has no such block, but cifar10, cifar100"):
        wanted_by_table("table1", "mnist")
    with pytest.raises(ValueError, match="--methods vogn: there is no such method here, but sgd, sam-sgd, adam"):
        wanted_by_table("table2", "cifar10", ["sgd", "vogn"])
    with pytest.raises(ValueError, match="there is no table 'one'"):
        wanted_by_table("one")


def test_each_scale_has_its_places(tmp_path):
    full, reduced, tiny = (find_places(scale) for scale in ("full", "reduced", "tiny"))
    assert len({full.runs, reduced.runs, tiny.runs}) == 3
    assert full.records == reduced.records != tiny.records
    assert tiny.records.parts[0] == "report"  # never among the committed results
    assert find_places("tiny", records=tmp_path).studies == tmp_path


# ---------------------------------------------------------------- scales


def test_another_dtype_is_part_of_the_settings_and_of_no_record(tmp_path):
    places = find_places("full", tmp_path / "runs", tmp_path / "records")
    wanted = wanted_by_table("table6", "mnist", ["bsam"])
    (task,) = make_plan(wanted, seeds=1, scale="full", places=places, dtype="bfloat16").tasks
    assert task.config.precision == "bfloat16"
    assert task.changes == ()
    assert task.record == places.records / "table6/mnist/bsam/seed0.json"
