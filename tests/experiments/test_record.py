"""Records: JSON that any reader takes, replaced in one go."""

import json
import math
import os

import pytest

from bsam.experiments.record import environment, to_json, write_json


def test_numbers_that_json_does_not_know_become_null():
    value = {"a": math.nan, "b": [math.inf, 1.5, (-math.inf, "x")], "c": {"d": True, "e": None}}
    assert json.loads(to_json(value)) == {"a": None, "b": [None, 1.5, [None, "x"]], "c": {"d": True, "e": None}}


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    write_json(path, {"first": 1})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"record.json could not be written: the disk is full"):
        write_json(path, {"second": 2})
    assert json.loads(path.read_text()) == {"first": 1}
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_copy_without_history_can_be_told_its_commit(monkeypatch):
    monkeypatch.setenv("BSAM_COMMIT", "0123456789ab")
    assert environment()["commit"] == "0123456789ab"
