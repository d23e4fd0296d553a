"""Checkpoints: nested states round trip exactly, bad files are refused, and a failed write keeps the old one."""

import os
import pickle

import pytest
import torch
from safetensors import SafetensorError

import bsam.files
from bsam.experiments.checkpoint import load_checkpoint, save_checkpoint
from tests.optim.contract import assert_same

STATE = {
    "epoch": 3,
    "seconds": 1.5,
    "name": "run",
    "nothing": None,
    "flags": [True, False],
    "betas": (0.9, 0.999),
    "nested": {
        0: {"step": torch.tensor(7), "s": torch.randn(3, 2)},
        "b": [torch.ones(2, dtype=torch.bfloat16), (1, 2)],
    },
    "empty": {},
}


def test_states_round_trip(tmp_path):
    save_checkpoint(tmp_path / "c", STATE)
    assert_same(load_checkpoint(tmp_path / "c"), STATE)


def test_optimizer_states_round_trip(tmp_path):
    w = torch.nn.Parameter(torch.ones(3))
    for optimizer in (
        bsam.BSAM([w], num_data=10),
        bsam.SAM([w], torch.optim.Adam, rho=0.05, lr=0.1),
        torch.optim.SGD([w], lr=0.1, momentum=0.9),
    ):
        optimizer.step(lambda: (w**2).sum())
        save_checkpoint(tmp_path / "c", {"optimizer": optimizer.state_dict()})
        assert_same(load_checkpoint(tmp_path / "c")["optimizer"], optimizer.state_dict())


def test_things_that_are_not_data_are_refused_before_anything_is_written(tmp_path):
    save_checkpoint(tmp_path / "c", {"epoch": 1})
    with pytest.raises(TypeError, match="/bad is of type object"):
        save_checkpoint(tmp_path / "c", {"bad": object()})
    assert load_checkpoint(tmp_path / "c") == {"epoch": 1}


@pytest.mark.parametrize("content", [b"", b"torn", pickle.dumps({"epoch": 1})])
def test_torn_and_foreign_files_are_named(tmp_path, content):
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(ValueError, match=str(tmp_path / "c")):
        load_checkpoint(tmp_path / "c")


def test_a_half_written_file_is_refused(tmp_path):
    save_checkpoint(tmp_path / "c", STATE)
    whole = (tmp_path / "c").read_bytes()
    for size in (10, len(whole) // 2, len(whole) - 1):
        (tmp_path / "c").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="complete"):
            load_checkpoint(tmp_path / "c")


def test_a_hostile_file_runs_no_code(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    for content in (pickle.dumps(Hostile()),):
        (tmp_path / "c").write_bytes(content)
        with pytest.raises(ValueError, match="not a safetensors file"):
            load_checkpoint(tmp_path / "c")
    torch.save({"x": Hostile()}, tmp_path / "c")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_checkpoint(tmp_path / "c")
    assert not (tmp_path / "pwned").exists()


def test_contents_that_make_no_sense_are_refused(tmp_path):
    for settings in ({}, {"state": 3}, {"state": {"tensor": "absent"}}, {"state": {"what": 1}}, {"state": {"dict": 1}}):
        bsam.files.write_file(tmp_path / "c", {}, format="bsam.checkpoint", kind="run", settings=settings)
        with pytest.raises(ValueError, match=str(tmp_path / "c")):
            load_checkpoint(tmp_path / "c")


def test_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_checkpoint(tmp_path / "c")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "disk is full.*kept"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "disk is full.*kept"),
        (OSError(27, "File too large"), "larger than a file may be"),
        (OSError(30, "Read-only file system"), "read-only"),
        (OSError(13, "Permission denied"), "may not be written to.*permissions"),
        (OSError(5, "Input/output error"), "Input/output error"),
    ],
)
def test_a_failed_write_keeps_the_last_checkpoint_and_says_what_to_do(tmp_path, monkeypatch, error, message):
    save_checkpoint(tmp_path / "c", {"epoch": 1})

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(bsam.files, "save_file", fail)
    with pytest.raises(OSError, match=message):
        save_checkpoint(tmp_path / "c", {"epoch": 2})
    monkeypatch.undo()
    assert load_checkpoint(tmp_path / "c") == {"epoch": 1}
    assert os.listdir(tmp_path) == ["c"]
