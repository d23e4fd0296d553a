"""The UCI study on a small set: settings by validation, metrics in the target's units, and what is kept."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bsam.experiments.data.uci import RegressionSet, Split
from bsam.experiments.record import read_json
from bsam.experiments.regression import study
from bsam.experiments.regression.methods import METHODS
from bsam.experiments.regression.study import Extent, carry_out_uci, held_out, make_part, rate, run_method, train
from tests.experiments.data.test_uci import write_set


def small_set(n=60, scale=50.0):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    y = scale * (x[:, 0] + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)) + 1000
    rows = torch.arange(n)
    return RegressionSet("small", x, y, [Split(rows[rows % 5 != k], rows[rows % 5 == k]) for k in range(2)], "")


def test_parts_are_standardised_by_what_is_trained_on():
    data = small_set()
    part = make_part(data, data.splits[0].train, data.splits[0].test)
    x, y = part.train
    torch.testing.assert_close(x.mean(dim=0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(y.std(), torch.tensor(1.0))
    assert part.scale == pytest.approx(float(data.y[data.splits[0].train].std()))
    for whole, cut in zip(data.splits, held_out(data), strict=True):
        assert len(cut.other[1]) == len(whole.train) // 5
        assert len(cut.train[1]) + len(cut.other[1]) == len(whole.train)


def test_metrics_are_in_the_units_of_the_target():
    data = small_set()
    part = make_part(data, data.splits[0].train, data.splits[0].test)
    member = train(METHODS["adam"], [part], [study.Wanted(0, METHODS["adam"].grid[0])], 5, 20)[0]
    found = rate(METHODS["adam"], [member], part)
    member.posterior.write_mean(member.model)
    f = (member.model(part.other[0])[:, 0] * part.scale + data.y[data.splits[0].train].mean()).detach()
    y = data.y[data.splits[0].test]
    normal = torch.distributions.Normal(f, member.model.noise_std * part.scale)
    assert found["log_likelihood"] == pytest.approx(float(normal.log_prob(y).mean()), rel=1e-4)
    assert found["rmse"] == pytest.approx(float((y - f).square().mean().sqrt()), rel=1e-4)
    assert rate(METHODS["adam"], [None], part)["log_likelihood"] == -math.inf


def test_a_setting_is_chosen_for_each_split_by_its_own_validation():
    found = run_method("adam", small_set(), 30)
    grid = METHODS["adam"].grid
    assert len(found["validation"]) == len(grid)
    for k, choice in enumerate(found["choices"]):
        scores = [own[k] for own in found["validation"]]
        assert choice == grid[scores.index(max(scores))]
    assert len(found["test"]["crps"]) == 2


def test_a_run_that_diverges_does_not_take_the_others_along(monkeypatch):
    whole = study._train_stack

    def diverges(method, parts, groups, hidden, steps):
        if any(run.settings["lr"] > 1 for own in groups for run in own):
            raise FloatingPointError
        return whole(method, parts, groups, hidden, steps)

    monkeypatch.setattr(study, "_train_stack", diverges)
    parts = held_out(small_set())
    wanted = [study.Wanted(k, {"lr": lr, "prior_precision": 1.0}) for lr in (0.01, 9.0) for k in (0, 1)]
    found = train(METHODS["adam"], parts, wanted, 5, 5)
    assert [run is None for run in found] == [False, False, True, True]


def test_grids_have_one_size():
    assert {len(method.grid) for method in METHODS.values()} == {4}


@pytest.mark.filterwarnings("ignore:after .* steps .* of the precision")
def test_the_record_and_what_is_kept(tmp_path, monkeypatch):
    write_set(tmp_path, rows=60)
    extent, lines = Extent(steps=5, sets=("yacht",)), []
    places = (tmp_path, tmp_path / "runs", tmp_path / "uci.json")
    monkeypatch.setattr(study, "ProcessPoolExecutor", lambda jobs, mp_context: ThreadPoolExecutor(1))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # of a process of its own
    advanced = []
    record = carry_out_uci(extent, *places, jobs=2, say=lines.append, advance=advanced.append)
    assert sorted(advanced) == sorted(f"yacht {name}" for name in METHODS)
    assert read_json(places[2])["summary"]["yacht"].keys() == METHODS.keys()
    assert lines[len(METHODS) - 1] == "yacht ensemble is done"  # it waits for Adam's choice
    assert len(lines) == 2 * len(METHODS)
    assert record["results"]["yacht"]["ensemble"]["choices"] == record["results"]["yacht"]["adam"]["choices"]
    assert study.missing_uci(Extent(steps=6, sets=("yacht",)), *places[:2]) == [("yacht", name) for name in METHODS]
    assert study.missing_uci(extent, *places[:2]) == []
    monkeypatch.setattr(study, "run_method", None)  # nothing is run again
    assert carry_out_uci(extent, *places, say=lines.append)["summary"] == record["summary"]
    assert extent.capped(small_set()) is None
    assert Extent(num_splits=30).capped(small_set()) == (
        "small has 2 splits, and 30 are asked for: all of them are run."
    )
    with pytest.raises(ValueError, match="no method 'sgld'"):
        carry_out_uci(Extent(methods=("sgld",)), *places)


def test_large_sets_have_more_steps_and_all_splits_are_run_unless_fewer_are_wanted():
    small = small_set()
    rows = torch.arange(5000)
    large = RegressionSet("large", torch.zeros(5000, 1), torch.zeros(5000), [Split(rows, rows)] * 20, "")
    assert [Extent().of_set(data)[1] for data in (small, large)] == [1000, 1500]
    assert len(Extent().of_set(large)[0].splits) == 20
    assert len(Extent(num_splits=5).of_set(large)[0].splits) == 5
