"""How many processes train on a device is counted, and the dead are not."""

import os
import subprocess
import sys
import tempfile

import torch

from bsam.experiments.sharing import neighbours


def test_processes_on_a_device_are_counted_while_they_live(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cpu = torch.device("cpu")
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with neighbours(cpu) as found:
            assert found.most == 1
            (folder,) = tmp_path.iterdir()
            (folder / str(other.pid)).touch()
            found.count()
            assert found.most == 2
        assert os.listdir(folder) == [str(other.pid)]
    finally:
        other.communicate(b"\n")
    with neighbours(cpu) as found:  # it has ended, and left its file behind
        pass
    assert found.most == 1
