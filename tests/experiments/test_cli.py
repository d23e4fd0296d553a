"""The entry point: errors and warnings are one sentence."""

import contextlib
import inspect
import os
import pty
import re
import subprocess
import sys

from bsam import __version__
from bsam.experiments.commands import app
from bsam.experiments.reproduce.studies import ABLATIONS
from bsam.experiments.reproduce.tuning import TUNINGS


def test_errors_are_one_sentence_and_a_traceback_only_on_demand(bsam_command):
    process = bsam_command("train", "digits/bsmam")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors.startswith("bsam: there is no preset 'digits/bsmam'")
    assert "Traceback" not in errors
    process = bsam_command("--debug", "train", "digits/bsmam")
    _, errors = process.communicate(timeout=120)
    assert "Traceback" in errors


def test_warnings_are_one_sentence_too(bsam_command, tmp_path):
    changes = ["--epochs", "1", "--set", "beta2=0.999", "--device", "cpu"]
    process = bsam_command("train", "digits/bsam", "--out", tmp_path, *changes)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "\nbsam: after 12 steps 99% of the precision is still its starting value" in f"\n{errors}"
    assert "UserWarning" not in errors


def test_an_error_of_the_disk_says_what_to_do(bsam_command, tmp_path):
    (tmp_path / "file").touch()
    process = bsam_command("train", "digits/sgd", "--device", "cpu", "--out", tmp_path / "file")
    _, errors = process.communicate(timeout=120)
    assert errors.startswith(f"bsam: {tmp_path}/file/seed0")
    assert errors.endswith(": a part of this path is a file, and must be a folder. Choose another folder.\n")


def test_help_and_version_do_not_wait_for_torch():
    code = """
import sys
from typer.testing import CliRunner
from bsam.experiments.commands import app
for arguments in (["--help"], ["--version"], *([name, "--help"] for name in sys.argv[1:])):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    print(result.output)
print(sorted({"torch", "matplotlib", "scipy", "sklearn"} & set(sys.modules)))
"""
    commands = ["train", "figure", "report", "demo", "reproduce", "sweep", "ablate", "tune"]
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, check=True)
    assert f"bsam {__version__}\n" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
    shown = " ".join(done.stdout.split())
    assert all(name in shown for name in ABLATIONS)  # their names are written out in the help
    assert all(name in shown for name in TUNINGS)


def test_no_line_of_a_help_is_broken_again_in_a_terminal_of_80_columns():
    """Lines of a paragraph keep their breaks, so a line that is too long would leave a word or two alone below it."""
    long = []
    for command in app.registered_commands:
        for paragraph in inspect.getdoc(command.callback).split("\n\n"):
            lines = re.sub(r"\[/?bold\]", "", paragraph).split("\n")
            long += [line for line in lines if len(lines) > 1 and len(line) > 78]
    assert long == []


def test_names_of_files_do_not_stand_behind_the_line_that_moves(tmp_path):
    """In a terminal the line is erased before a name is written."""
    ours, theirs = pty.openpty()
    code = "from bsam.experiments.cli import main; main()"
    command = [sys.executable, "-c", code, "figure", "sam-vs-bayes", "--out", tmp_path / "a.svg"]
    terminal = {**os.environ, "TERM": "xterm", "COLUMNS": "400"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=terminal) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the end, when the process has closed its side
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    assert process.returncode == 0
    pieces = re.split(r"\r|\n|\x1b\[[0-9;?]*[A-Za-z]", shown.decode())
    assert str(tmp_path / "a.svg") in pieces


def test_without_the_extra_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from bsam.experiments.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "The command bsam needs typer, which is not installed. In the folder of bsam's source, write: "
        "pip install '.[experiments]'"
    )
