"""Data, the command, and temporary files that no other process sees."""

import os
import subprocess
import sys
import tempfile

import pytest

from bsam.experiments.data import load
from tests.forked import Command


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(tmp_path_factory):
    """Runs count those beside them by files in the folder for temporary files; other tests' runs do not count."""
    compiled = os.path.join(tempfile.gettempdir(), "torchinductor_tests")
    with pytest.MonkeyPatch.context() as patch:
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # which is there too, and all tests share it
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", compiled)
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="module")
def digits():
    return load("digits")


@pytest.fixture
def bsam_command(tmp_path_factory):
    """Starts `bsam` in a process of its own; none outlives the test."""
    started = []

    def start(*arguments, before="", wrapper=()):
        arguments = [str(argument) for argument in arguments]
        if not before and not wrapper:
            started.append(Command(arguments, tmp_path_factory.getbasetemp()))
            return started[-1]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        code = f"{before}\nimport torch; torch.set_num_threads(1); from bsam.experiments.cli import main; main()"
        command = [*map(str, wrapper), sys.executable, "-c", code, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        if isinstance(process, subprocess.Popen):
            process.wait()
            process.stdout.close()
            process.stderr.close()
