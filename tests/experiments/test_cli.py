"""The entry point: errors and warnings are one sentence."""

import subprocess
import sys


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


def test_without_the_extra_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from bsam.experiments.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "The command bsam needs typer, which is not installed. In the folder of bsam's source, write: "
        "pip install '.[experiments]'"
    )
