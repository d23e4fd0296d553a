"""Processes that start at once: they are forked from one that has imported the package, and done nothing else.

A fresh interpreter would spend two seconds of work on imports, which is most of the time of a short command.
"""

import os
import sys
import tempfile
from multiprocessing.util import get_temp_dir
from pathlib import Path
from subprocess import TimeoutExpired

import torch
import torch.multiprocessing as mp

__all__ = ["SERVER", "Command", "call"]

get_temp_dir()  # its folder outlives those of the tests, which name others for temporary files
SERVER = mp.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "bsam.experiments.commands",
        "bsam.experiments.evaluate",  # commands import what they need when they run
        "bsam.experiments.reproduce.carry_out",
        "tests.optimizers",
        "torch._dynamo",
    ]
)


def call(function, *arguments, timeout=120):
    """Call a function in a new process, which must end well."""
    process = SERVER.Process(target=_call, args=(function, arguments))
    process.start()
    process.join(timeout)
    assert process.exitcode == 0, process.exitcode


def _call(function, arguments):
    torch.set_num_threads(1)
    function(*arguments)


class Command:
    """`bsam` in a new process, with those methods of `subprocess.Popen` that the tests use."""

    def __init__(self, arguments, folder):
        self._files = [Path(folder, f"{os.urandom(8).hex()}.{name}") for name in ("out", "err")]
        self._process = SERVER.Process(target=_command, args=(arguments, self._files, dict(os.environ)))
        self._process.start()

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def send_signal(self, number):
        os.kill(self._process.pid, number)

    def kill(self):
        self._process.kill()
        self._process.join()

    def communicate(self, timeout):
        """Wait for the end, and return what was printed: output and errors."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired("bsam", timeout)
        return [file.read_text() for file in self._files]


def _command(arguments, files, environment):
    for file, descriptor in zip(files, (1, 2), strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the variables name another one
    sys.argv[1:] = arguments
    torch.set_num_threads(1)
    from bsam.experiments.cli import main

    try:
        main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
