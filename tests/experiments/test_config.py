"""Configurations and presets: the paper's settings as data, typed, and no key that nobody reads."""

import dataclasses
import math

import pytest

from bsam.experiments.config import FIELDS, Config, explanations, from_file, from_mapping, override, to_toml
from bsam.experiments.paper.presets import preset, preset_names

SMALL = {
    "dataset": "digits",
    "model": "mlp",
    "method": "bsam",
    "epochs": 10,
    "batch_size": 8,
    "lr": 0.1,
    "beta1": 0.9,
    "prior_precision": 1.0,
}


# ---------------------------------------------------------------- settings


def test_every_setting_is_explained_in_one_line():
    assert list(explanations()) == list(FIELDS)
    for text in explanations().values():
        assert 5 < len(text) <= 80
        assert "\n" not in text


def test_what_is_shown_explained_can_be_read_again(tmp_path):
    for name in preset_names():
        text = to_toml(preset(name), explained=True)
        assert f"# {explanations()['lr']}" in text
        (tmp_path / "my.toml").write_text(text)
        assert from_file(tmp_path / "my.toml") == preset(name)


def test_bad_files_are_named(tmp_path):
    path = tmp_path / "my.toml"
    with pytest.raises(FileNotFoundError, match=r"there is no file .*my.toml. Write one with"):
        from_file(path)
    for content, message in [(b"lr = ", "Invalid"), (b"lrr = 1", "did you mean 'lr'"), (b"\xff", "decode")]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path}: .*{message}"):
            from_file(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("epoch=1", "unknown setting 'epoch': did you mean 'epochs'.*dataset, model, method"),
        ("zzz=1", "unknown setting 'zzz'. There are: dataset, model, method"),
        ("lr=fast", r"lr='fast' must be a finite number, like 0.1 \(lr is: alpha: learning rate"),
        ("epochs=1.5", r"epochs=1.5 must be a whole number, like 180 \(epochs is: passes over the training data\)"),
        ("epochs=true", "epochs=True must be a whole number"),
        ("augment=1", r"augment=1 must be true or false \(augment is: random crops"),
        ("dataset=3", "dataset=3 must be text"),
        ("max_grad_norm=big", "max_grad_norm='big' must be a finite number, like 0.1, or null"),
        ("epochs=0", "epochs=0 must be at least 1"),
        ("validation=-1", "must not be negative"),
        ("method=sgdd", "must be one of sgd, sam-sgd"),
        ("milestones=3", "must be a list of whole numbers"),
        ("milestones=[1.5]", r"milestones=\[1.5\] must be a list of whole numbers, like \[100, 120\]"),
        ("schedule=steps", "needs milestones"),
        ("swag_epochs=3", "does not go with method='bsam'"),
        ("lr", "not of the form key=value"),
        ("lr=NaN", "must be a finite number"),
        (f"lr=1{'0' * 400}", "must be a finite number"),
    ],
)
def test_bad_changes_stop_with_the_reason(change, message):
    with pytest.raises(ValueError, match=message):
        override(from_mapping(SMALL), [change])


def test_good_changes():
    config = override(from_mapping(SMALL), ["lr=1", "milestones=[3, 5]", "max_grad_norm=null", "augment=true"])
    assert dataclasses.replace(from_mapping(SMALL), lr=1.0, milestones=(3, 5), augment=True) == config
    assert isinstance(config.lr, float)
    assert override(config, ["lr=.25"]).lr == 0.25
    assert override(config, ["dataset='mnist'"]).dataset == "mnist"


def test_missing_settings_are_named():
    with pytest.raises(ValueError, match="'lr' is missing"):
        from_mapping({key: value for key, value in SMALL.items() if key != "lr"})


def test_schedules_by_epoch():
    make = lambda **options: Config(**{**SMALL, "lr": 1.0, **options})  # noqa: E731
    cosine = make(epochs=10)
    assert [cosine.learning_rate(e) for e in (0, 5)] == pytest.approx([1.0, 0.5])
    assert cosine.learning_rate(9) == pytest.approx(0.5 * (1 + math.cos(0.9 * math.pi)))
    steps = make(schedule="steps", milestones=(3, 5), epochs=8)
    assert [steps.learning_rate(e) for e in (2, 3, 4, 5)] == pytest.approx([1.0, 0.1, 0.1, 0.01])
    warm = make(warmup_epochs=5, epochs=15)
    assert [warm.learning_rate(e) for e in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    swag = make(method="swag", swag_epochs=2, swag_lr=0.03)
    assert swag.learning_rate(10) == swag.learning_rate(11) == 0.03
    assert swag.total_epochs == 12
