"""The benchmark of small problems: each loads and is cut as it says, and every optimizer takes steps on each."""

import json
import math
import warnings
from pathlib import Path

import pytest
import torch

import bsam
from benchmarks import out_of_the_box, sgd_rates
from benchmarks.candidates import CANDIDATES
from benchmarks.out_of_the_box import (
    DEFAULTS,
    IMPOSSIBLE,
    OPTIMIZERS,
    Cache,
    Run,
    converted,
    parse,
    perform,
    random_settings,
    summarise,
)
from benchmarks.small_problems import CHOOSING, JUDGED, PROBLEMS, average_loss, digits, missing_data
from bsam.experiments.data.download import data_folder
from bsam.experiments.record import read_json

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "data" if (ROOT / "data").exists() else data_folder()
SIZES = {
    "digits_mlp": (600, 297, 800),
    "digits_groupnorm": (600, 297, 800),
    "fashion_1000": (1000, 1000, 2000),
    "breast_cancer": (250, 100, 219),
    "diabetes": (220, 80, 142),
    "text_transformer": (1875, 300, 300),
    "text_lora": (1000, 300, None),  # how many passages are left depends on the version of Python
    "noisy_labels": (600, 297, 800),
    "long_run": (300, 297, 800),
    "short_run": (640, 150, 215),
    "digits_batchnorm": (600, 297, 800),
    "digits_vit": (600, 297, 800),
    "digits_100": (100, 297, 800),
    "fashion_10000": (10_000, 1000, 2000),
    "wine_quality": (700, 200, 459),
    "kin8nm": (3000, 1000, 2000),
    "text_words": (1000, 300, None),
    "text_lstm": (1000, 300, None),
}


@pytest.fixture(params=PROBLEMS)
def name(request):
    if why := missing_data(request.param, FOLDER):
        pytest.skip(why)
    return request.param


def test_ten_problems_are_for_choosing_and_eight_others_are_judged():
    assert len(CHOOSING) == 10
    assert len(JUDGED) == 8
    assert len(PROBLEMS) == 18


@pytest.mark.parametrize("new", ["code_words", "code_gru"])
def test_new_problems_that_need_no_folder(new):
    data = out_of_the_box.load(new, FOLDER)
    assert [len(x) for x, _ in (data.train, data.validation)] == [1000, 300]
    assert len(data.test[0]) > 300
    assert data.num_classes == 8
    assert data.train[1].bincount().min() > 80  # every module has its share


def test_sizes(name):
    data = out_of_the_box.load(name, FOLDER)
    parts = (data.train, data.validation, data.test)
    assert all(len(x) == len(y) >= 80 for x, y in parts)
    assert [len(x) for x, _ in parts[:2]] == list(SIZES[name][:2])
    assert len(data.test[0]) == (SIZES[name][2] or len(data.test[0]))


def test_parts_do_not_overlap(name):
    data = out_of_the_box.load(name, FOLDER)
    parts = [
        {(tuple(x.flatten().tolist()), *y.flatten().tolist()) for x, y in zip(*part, strict=True)}
        for part in (data.train, data.validation, data.test)
    ]
    twice = sum(map(len, parts)) - len(set().union(*parts))
    assert twice == 0, twice


def test_the_network_fits_the_data(name):
    data = out_of_the_box.load(name, FOLDER)
    x, y = (tensor[:8] for tensor in data.train)
    model = PROBLEMS[name].network(data)
    assert model(x).numel() == y.numel() * (data.num_classes or 1)
    assert math.isfinite(average_loss(model, data, x, y).item())
    assert (data.noise_std is None) == (data.num_classes > 0)
    assert data.failure_threshold > data.chance[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_steps(name, optimizer, monkeypatch):
    monkeypatch.setattr(out_of_the_box, "NUM_SAMPLES", 2)
    found = perform(Run(name, optimizer, "defaults", DEFAULTS[optimizer], 0, "validation", 2), FOLDER)
    if (name, optimizer) in IMPOSSIBLE:
        assert "BatchNorm2d that uses means over the minibatch" in found["error"]
        assert found["failure"] == "raised"
    else:
        assert found["error"] is None
        has_classes = out_of_the_box.load(name, FOLDER).num_classes > 0
        assert set(found["averaged"]) == set(found["mean"]) == {"accuracy", "nll", *(["ece"] if has_classes else [])}


def test_a_run_can_be_repeated():
    run = Run("digits_mlp", "BSAM", "defaults", {}, 3, "test", 5)
    first, second = (perform(run, FOLDER) for _ in range(2))
    assert first["averaged"] == second["averaged"]
    assert first["averaged"] != perform(Run("digits_mlp", "BSAM", "defaults", {}, 4, "test", 5), FOLDER)["averaged"]


def test_a_fifth_of_the_noisy_labels_is_drawn_at_random():
    noisy, clean = (digits(600, seed=13, noisy=share)(FOLDER) for share in (0.2, 0.0))
    assert noisy.shuffled == 120 + 59
    assert 85 <= (noisy.train[1] != clean.train[1]).sum() <= 120  # a tenth of them is drawn as it was
    assert torch.equal(noisy.test[1], clean.test[1])


def test_the_short_run_has_200_steps():
    assert PROBLEMS["short_run"].epochs * SIZES["short_run"][0] // PROBLEMS["short_run"].batch_size == 200


def test_only_adapters_and_the_head_of_the_adapted_transformer_are_trained():
    model = PROBLEMS["text_lora"].network(out_of_the_box.load("text_lora", FOLDER))
    trained = {name.split(".")[-1] for name, p in model.named_parameters() if p.requires_grad and "head" not in name}
    assert trained == {"up", "down"}


def test_bsam_is_converted_by_the_package():
    model = torch.nn.Linear(3, 1)
    for source, line in (("sgd", out_of_the_box.SGD_LINE), ("adamw", out_of_the_box.ADAMW_LINE)):
        settings = json.loads(json.dumps(converted("BSAM", **{source: line})))  # as a record keeps them
        made = out_of_the_box.make_optimizer("BSAM", model, settings, num_data=50, seed=1)
        expected = getattr(bsam.BSAM, f"from_{source}")(model.parameters(), **line, num_data=50, module=model, seed=1)
        assert made.param_groups == expected.param_groups


def test_the_factor_of_the_curvature_can_have_a_limit():
    model = torch.nn.Linear(3, 1)
    for limit, expected in ((9, 9), (100, 50)):
        made = out_of_the_box.make_optimizer("BSAM", model, {"max_curvature_data": limit}, num_data=50, seed=0)
        assert made._curvature_num_data == expected


def candidate(name, parameter, **settings):
    return CANDIDATES[name]([parameter], num_data=50, max_noise=None, **settings)


def test_a_debiased_precision_begins_as_a_mean():
    weights = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = candidate(
        "debiased", weights, sample_noise=False, rho=0.0, max_grad_norm=None, weight_decay=0.0, damping=0.1
    )
    seen, s = [torch.ones(3, 2)], torch.ones(3, 2)
    for _ in range(4):
        optimizer.step(lambda: 0.3 * weights.sum())
        seen.append((50 * s).sqrt() * 0.3 + 0.1)
        s = torch.stack(seen).mean(0)
        torch.testing.assert_close(optimizer.state[weights]["unit_precision"], s)


def test_the_prior_of_empirical_bayes_is_a_fixed_point_of_mackay():
    """It starts without a prior, so that all six parameters are effective."""
    weights = torch.nn.Parameter(torch.full((3, 2), 2.0))
    optimizer = candidate("empirical_bayes", weights, lr=0.0, init_precision=0.2, damping=0.2, weight_decay=0.0)
    optimizer.step(lambda: 0.0 * weights.sum())
    variance = 1 / (50 * 0.2)
    assert optimizer.param_groups[0]["prior_precision"] == pytest.approx(6 / (6 * 4.0 + 6 * variance))


def test_the_unbiased_curvature_finds_the_hessian():
    hessian = torch.tensor([[0.5, 2.0]]).repeat(200, 1)
    weights = torch.nn.Parameter(torch.zeros(200, 2))
    settings = {"lr": 0.0, "rho": 0.0, "damping": 0.0, "weight_decay": 0.0, "betas": (0.9, 0.99)}
    optimizer = candidate("unbiased", weights, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the noise is larger than weights of zero
        for _ in range(1200):
            optimizer.step(lambda: 0.5 * (hessian * weights.square()).sum())
    found = optimizer.state[weights]["unit_precision"].mean(0)
    torch.testing.assert_close(found, hessian[0], rtol=0.05, atol=0)


def test_clipping_can_end_after_100_steps():
    weights = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = candidate("first_clipped", weights, lr=1e-3)
    clipped = []
    for _ in range(102):
        optimizer.step(lambda: weights.sum())
        clipped.append(optimizer.param_groups[0]["max_grad_norm"])
    assert clipped == [1.0] * 100 + [None] * 2


def test_biases_with_noise_and_a_damping_by_data():
    model = torch.nn.Linear(3, 2)
    for name, c, damping in ((None, 5.0, 0.1), ("noisy_vectors", 20.0, 0.4), ("scaled_vectors", 80.0, 1.0)):
        settings = {"damping_by_data": c, **({} if name is None else {"candidate": name})}
        given = dict(settings)
        made = out_of_the_box.make_optimizer("BSAM", model, settings, num_data=50, seed=0)
        assert made.param_groups[0]["damping"] == pytest.approx(damping)
        noisy = [made._noise_precision(slot) is not None for slot in made._slots()]
        assert noisy == [True, name is not None]
        assert settings == given  # a run's own


def test_rules_from_sgd():
    found = sgd_rates.rules({"lr": 0.4, "momentum": 0.9, "weight_decay": 0.01})
    assert found["bSAM, exponent 0.5"] == {"lr": pytest.approx(2.0), "weight_decay": 0.01}
    assert found["bSAM, exponent 0, weight decay 0.0005"] == {"lr": 1.0}
    assert found["bSAM, algebra"]["lr"] == pytest.approx(4.0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_random_settings_are_eight_and_always_the_same(optimizer):
    settings = random_settings(optimizer)
    assert settings == random_settings(optimizer)
    assert len({str(each) for each in settings}) == 8
    for each in settings:
        out_of_the_box.make_optimizer(optimizer, torch.nn.Linear(1, 1), each, num_data=10, seed=0)


def test_what_a_run_depends_on_is_in_its_key(monkeypatch):
    run = Run("digits_mlp", "BSAM", "defaults", {}, 0, "test")
    assert run.key == Run("digits_mlp", "BSAM", "another name of it", {}, 0, "test").key
    others = [
        Run("digits_mlp", "BSAM", "defaults", {"lr": 0.2}, 0, "test"),
        Run("digits_mlp", "BSAM", "defaults", {"weight_decay_as_prior": 0.1}, 0, "test"),
        Run("digits_mlp", "BSAM", "defaults", {}, 1, "test"),
        Run("digits_mlp", "BSAM", "defaults", {}, 0, "validation"),
        Run("diabetes", "BSAM", "defaults", {}, 0, "test"),
    ]
    assert len({run.key, *(other.key for other in others)}) == 6
    monkeypatch.setitem(bsam.BSAM.__init__.__kwdefaults__, "rho", 0.3)  # another default of the package
    assert Run("digits_mlp", "BSAM", "defaults", {}, 0, "test").key != run.key


def test_variants_are_refused_on_problems_that_are_judged(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no cache is
    with pytest.raises(SystemExit):
        parse(["--set", "judged", "--variant", 'a={"lr": 1.0}'])
    assert "nothing is chosen" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--problems", "kin8nm"])
    assert "not of the set" in capsys.readouterr().err


def test_regret_is_the_distance_from_the_best_row_and_a_failure_counts_as_chance():
    def run(optimizer, accuracy, nll, failure=None):
        averaged = {"accuracy": accuracy, "nll": nll, "ece": 0.1}
        known = {"problem": "p", "optimizer": optimizer, "kind": "defaults", "cpu_seconds": 1.0}
        return {**known, "averaged": averaged, "failure": failure}

    runs = [run("A", 0.9, 0.3), run("A", 0.7, 0.5), run("B", 0.6, 0.2), run("C", -5.0, 99.0, "at chance")]
    table = summarise(runs, {"p": (0.1, 2.3)})["p"]
    rows = {row[0]: (cell["accuracy_regret"], cell["nll_regret"], cell["failures"]) for row, cell in table.items()}
    assert rows["A"] == pytest.approx((0, 0.2, 0))
    assert rows["B"] == pytest.approx((0.2, 0, 0))
    assert rows["C"] == pytest.approx((0.7, 2.1, 1))
    assert table["C", "defaults"]["ece"] is None


def test_the_command_writes_a_record_and_goes_on_from_its_cache(tmp_path, capsys):
    command = ["--data", str(FOLDER), "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "record.json")]
    command += ["--problems", "diabetes", "--optimizers", "SGD", "BSAM", "--kinds", "defaults", "--seeds", "1"]
    command += ["--max-steps", "2", "--workers", "1", "--variant", 'a={"lr": 0.5, "weight_decay_as_prior": 0.01}']
    out_of_the_box.main(command)
    assert "3 runs, 3 of them new" in capsys.readouterr().out
    record = read_json(tmp_path / "record.json")
    assert [(run["optimizer"], run["kind"]) for run in record["runs"]] == [
        ("SGD", "defaults"),
        ("BSAM", "defaults"),
        ("BSAM", "variant:a"),
    ]
    assert record["runs"][2]["settings"]["prior_precision"] == pytest.approx(2.2)
    assert record["runs"][2]["settings"]["lr"] == 0.5
    assert record["problems"]["diabetes"]["sha256"]
    with pytest.raises(SystemExit):
        out_of_the_box.main(command)
    assert "write --resume" in capsys.readouterr().err
    out_of_the_box.main([*command, "--resume"])
    assert "3 runs, 0 of them new" in capsys.readouterr().out
    left = Cache(tmp_path / "cache", resume=True, again=["BSAM"]).runs.values()
    assert [run["optimizer"] for run in left] == ["SGD"]


def test_a_missing_data_folder_is_said(tmp_path):
    assert "is not there" in missing_data("kin8nm", tmp_path)
    assert missing_data("digits_mlp", tmp_path) is None
