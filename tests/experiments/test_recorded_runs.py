"""The records of runs in a folder: scales, and files that are no records."""

import dataclasses

import pytest

from bsam.experiments.comparison import compare
from bsam.experiments.paper.presets import preset
from bsam.experiments.record import read_json, write_json
from bsam.experiments.recorded_runs import read_record, recorded
from tests.experiments.reproduce.records import write_record
from tests.experiments.test_comparison import SGD, cell_of, row_of, write_seeds


def test_a_record_without_a_scale_is_full_if_it_has_the_presets_settings(tmp_path):
    write_seeds(tmp_path, [0.9863] * 5, scale=None, config=dataclasses.replace(preset(SGD), precision="bfloat16"))
    assert row_of(tmp_path).scale == "full"


def test_the_fullest_scale_is_taken(tmp_path):
    write_record(tmp_path, SGD, 0, accuracy=0.7)
    for seed in (1, 2):
        write_record(tmp_path, SGD, seed, scale="reduced", config=dataclasses.replace(preset(SGD), epochs=12))
    assert cell_of(tmp_path, "accuracy").values == (70.0,)
    assert list(recorded(tmp_path, SGD, "reduced")) == [1, 2]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"config": {}}'])
def test_a_record_that_is_none_is_named(text, tmp_path):
    path = write_record(tmp_path, SGD, 0)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"seed0.json is not a run's record: .* Remove it"):
        compare("table6", tmp_path)


def test_a_damaged_record_is_named_once_with_one_piece_of_advice(tmp_path):
    path = write_record(tmp_path, SGD, 0)
    write_json(path, read_json(path))  # with a checksum
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(ValueError, match="it is damaged") as damage:
        read_record(path)
    assert str(damage.value) == (
        f"{path} is not a run's record: it is damaged: its contents do not have the checksum that they were written "
        "with. Remove it."
    )


def test_an_unknown_scale_is_refused(tmp_path):
    path = write_record(tmp_path, SGD, 0, scale="huge")
    with pytest.raises(ValueError, match="'huge' is not one of full, reduced, tiny"):
        read_record(path)


def test_other_files_are_left_alone(tmp_path):
    write_record(tmp_path, SGD, 0)
    (tmp_path / SGD / "seed-notes.json").write_text("hello")
    assert list(recorded(tmp_path, SGD)) == [0]
