"""Which suites fit which data, and the plan of runs that need them."""

import pytest

from bsam.experiments.data import DATASETS
from bsam.experiments.reproduce.plan import Wanted, find_places, make_plan
from bsam.experiments.suites import SUITES, choose
from tests.experiments.reproduce.records import write_record


def test_all_means_those_that_fit():
    assert choose(["shift"], "cifar10") == tuple(SUITES)
    assert choose(["shift"], "cifar100") == ("rejection", "unknown", "corruptions")
    assert choose(["shift"], "digits") == ("rejection", "unknown")
    assert choose(["unknown", "rejection"], "mnist") == ("rejection", "unknown")
    assert choose([], "cifar10") == ()
    assert all("rejection" in choose(["shift"], dataset) for dataset in DATASETS)


def test_corruptions_take_fewer_samples():
    assert SUITES["unknown"].counts([0, 32]) == (0, 32)
    assert SUITES["corruptions"].counts([0, 4, 32, 128]) == (0, 4, 8)


@pytest.mark.parametrize(
    ("suite", "dataset", "message"),
    [
        ("unknown", "moons", "there are unknown inputs for cifar10, .* only. These do: rejection;"),
        ("corruptions", "tinyimagenet", "for images of 3 x 32 x 32, and these are 3 x 64 x 64"),
        ("human", "cifar100", "people answered for cifar10 only"),
        ("rain", "cifar10", "there is no suite 'rain': choose from"),
    ],
)
def test_what_does_not_fit_is_an_error(suite, dataset, message):
    with pytest.raises(ValueError, match=message):
        choose([suite], dataset)


def test_a_recorded_run_without_the_suite_is_left_to_do(tmp_path):
    name, places = "table1/cifar10/sgd", find_places("full", tmp_path / "runs", tmp_path)
    for seed in (0, 5):
        path = write_record(tmp_path, name, seed)
    wanted = [Wanted(name, (32,))]
    plan = make_plan(wanted, seeds=2, first_seed=5, scale="full", places=places)
    assert ([t.seed for t in plan.recorded], [t.seed for t in plan.tasks]) == ([5], [6])
    plan = make_plan(wanted, seeds=2, first_seed=5, scale="full", places=places, suites=["shift"])
    assert [task.seed for task in plan.tasks] == [5, 6]
    assert plan.tasks[0].suites == tuple(SUITES)
    suites = '"suites": {"rejection": {"32": {}}, "corruptions": {"8": {}}}, "seconds"'
    path.write_text(path.read_text().replace('"seconds"', suites))
    for asked, left in ((["rejection", "corruptions"], 0), (["unknown"], 1)):
        plan = make_plan(wanted, seeds=1, first_seed=5, scale="full", places=places, suites=asked)
        assert len(plan.tasks) == left
