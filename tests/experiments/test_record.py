"""Records: JSON that any reader takes, replaced in one go."""

import json
import math
import os
import subprocess

import pytest
import torch

from bsam.experiments import record
from bsam.experiments.record import environment, read_json, to_json, write_json


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
    assert read_json(path) == {"first": 1}
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_copy_without_history_can_be_told_its_commit(monkeypatch):
    monkeypatch.setenv("BSAM_COMMIT", "0123456789ab")
    found = environment()
    assert (found["commit"], found["changed"]) == ("0123456789ab", False)
    monkeypatch.setenv("BSAM_COMMIT", "0123456789ab+")
    found = environment()
    assert (found["commit"], found["changed"]) == ("0123456789ab", True)


def test_the_commit_of_a_checkout_is_named_in_full_and_whether_files_differ(tmp_path, monkeypatch):
    monkeypatch.delenv("BSAM_COMMIT", raising=False)

    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    (tmp_path / "code.py").write_text("a = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    monkeypatch.setattr(record, "__file__", str(tmp_path / "code.py"))
    assert (environment()["commit"], environment()["changed"]) == (git("rev-parse", "HEAD"), False)
    assert len(environment()["commit"]) == 40
    (tmp_path / "code.py").write_text("a = 2\n")
    assert environment()["changed"] is True


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_libraries_and_the_precision_of_products_are_named():
    found = environment(torch.device("cuda"))
    assert found["cuda"] == torch.version.cuda
    assert found["cudnn"] == torch.backends.cudnn.version()
    assert found["packages"]["triton"]
    assert found["tf32"] == {"products": False, "convolutions": True}  # torch's defaults


def test_a_record_is_read_as_it_was_written_and_notices_changes(tmp_path):
    path = tmp_path / "record.json"
    record = {"seed": 0, "config": {"milestones": [1, 2], "lr": 1e-05}, "loss": None}
    write_json(path, {**record, "loss": math.inf, "config": {"milestones": (1, 2), "lr": 1e-05}})
    assert read_json(path) == record
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(whole.items()))))  # other white space and order: the same contents
    assert read_json(path) == record
    for changed in (whole | {"seed": 1}, whole | {"more": 1}, {key: whole[key] for key in whole if key != "sha256"}):
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=f"{path} is damaged"):
            read_json(path)
    write_json(path, whole | {"seed": 1})  # whoever writes it again gives it a new checksum
    assert read_json(path) == record | {"seed": 1}


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000])
def test_what_is_no_record_is_named(tmp_path, text):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path} is not a record"):
        read_json(path)


def test_records_from_before_there_were_checksums_are_read(tmp_path):
    (tmp_path / "record.json").write_text('{"seed": 0}')
    assert read_json(tmp_path / "record.json") == {"seed": 0}


@pytest.mark.parametrize(("count", "words"), [(1, "1 thread"), (2, "2 threads")])
def test_one_thread_is_no_threads(monkeypatch, count, words):
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    assert environment(torch.device("cpu"))["device"].endswith(f", {words}")
