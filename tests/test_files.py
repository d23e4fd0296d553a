"""Files: damage is noticed, a kill at any moment leaves a whole one, and nobody else's files are touched."""

import contextlib
import importlib.machinery
import json
import os
import random
import subprocess
import sys
import textwrap
import types

import pytest
import torch
from safetensors.torch import load_file, save_file

import bsam
from bsam.experiments.checkpoint import load_checkpoint, save_checkpoint
from bsam.experiments.record import read_json, write_json
from bsam.files import checksum, locked, read_file, remove_leftovers, replacing, write_file, write_text
from tests.optim.contract import assert_same

NUM_FLIPS = 200


# ---------------------------------------------------------------- damage


def some_checkpoint(path):
    weights = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(4))]
    optimizer = bsam.BSAM(weights, lr=0.1, num_data=1000)
    optimizer.step(lambda: sum((w**2).sum() for w in weights))
    save_checkpoint(path, {"epoch": 3, "log": [{"loss": 0.5}], "optimizer": optimizer.state_dict()})


def some_posterior(path):
    model = torch.nn.Linear(3, 4)
    std = {name: torch.rand_like(p) for name, p in model.named_parameters()}
    mean = {name: p.detach() for name, p in model.named_parameters()}
    bsam.DiagonalGaussian(mean, std, prior_precision=2.5).save(path)


def some_predictions(path):
    log_probs = torch.randn(5, 3).log_softmax(1)
    bsam.Predictions(log_probs, torch.zeros(5), torch.tensor([0, 1, 2, 0, 1]), 4, 0, "loop").save(path)


def some_record(path):
    evaluation = {"accuracy": 0.9871, "nll": 1e-05, "reliability": [[3, 0.25, None], [7, 0.5, 0.75]], "num": 12}
    write_json(path, {"preset": "digits/bsam", "seed": 0, "evaluations": {"test": {"32": evaluation}}})


def load_posterior(path):
    groups, settings = bsam.load_posterior(path)._contents()
    return {"groups": groups, "settings": settings}


def load_predictions(path):
    return vars(bsam.Predictions.load(path))


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (some_checkpoint, load_checkpoint),
        (some_posterior, load_posterior),
        (some_predictions, load_predictions),
        (some_record, read_json),
    ],
)
def test_a_flipped_bit_is_noticed(write, read, tmp_path):
    """Anywhere in the file: it is refused by its name, or what is read is what was written."""
    path = tmp_path / "file"
    write(path)
    whole, contents = path.read_bytes(), read(path)
    rng, refused = random.Random(0), []
    for position in rng.sample(range(8 * len(whole)), NUM_FLIPS):
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            found = read(path)
        except ValueError as error:
            refused.append(str(error))
        else:
            assert_same(found, contents)
    assert len(refused) > 0.9 * NUM_FLIPS
    assert all(str(path) in message for message in refused)


def test_equal_contents_have_equal_checksums(tmp_path):
    a, b = torch.randn(3, 2), torch.ones(4, dtype=torch.bfloat16)
    for path, tensors, settings in (
        (tmp_path / "first", {"a": a, "b": b}, {"x": 1, "y": 2}),
        (tmp_path / "second", {"b": b.clone(), "a": a.T.contiguous().T}, {"y": 2, "x": 1}),
    ):
        write_file(path, tensors, format="f", kind="k", settings=settings)
    first, second = (metadata(tmp_path / name) for name in ("first", "second"))
    assert first == second
    assert len(first["sha256"]) == 64
    for others in (
        {"a": a, "c": b},
        {"a": a + 1, "b": b},
        {"a": a.view(2, 3), "b": b},
        {"a": a, "b": b.half()},
        {"a": a},
    ):
        assert checksum(others, first) != first["sha256"]
    assert checksum({"a": a, "b": b}, first | {"settings": "{}"}) != first["sha256"]


def metadata(path):
    header = path.read_bytes()
    return json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]


def rewritten(path, **changes):
    """The file with other metadata; None removes an entry."""
    entries = {**metadata(path), **changes}
    save_file(load_file(path), path, {key: value for key, value in entries.items() if value is not None})


@pytest.mark.parametrize(("write", "read"), [(some_checkpoint, load_checkpoint), (some_posterior, load_posterior)])
def test_files_from_before_there_were_checksums_are_read_with_a_warning(write, read, tmp_path):
    path = tmp_path / "file"
    write(path)
    contents = read(path)
    rewritten(path, version="1", sha256=None)
    with pytest.warns(UserWarning, match=f"{path} has no checksum, because an earlier version of bsam wrote it"):
        found = read(path)
    assert_same(found, contents)
    rewritten(path, version="2")  # whoever removes a checksum is noticed
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        read(path)


# ---------------------------------------------------------------- kills

KILLS = """
import os, sys
from pathlib import Path

import bsam.files
import torch
from bsam.experiments.checkpoint import Checkpoints

NAMES = ("mkdir", "fsync", "link", "replace", "unlink", "rmdir", "open", "close")
folder = Path(sys.argv[1])
checkpoints = Checkpoints(folder / "checkpoint.safetensors")
linked = sys.argv[2] == "links"


def no_links(*arguments, **options):
    raise PermissionError(1, "Operation not permitted")


def child(moment, epoch):
    '''Dies before the system is asked for the `moment`-th thing, or saves all.'''
    count = 0

    def dying(function):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if count > moment:
                os._exit(1)
            return function(*arguments, **options)

        return call

    if not linked:
        os.link = no_links
    for name in NAMES:
        setattr(os, name, dying(getattr(os, name)))
    bsam.files.save_file = dying(bsam.files.save_file)
    checkpoints.save({"epoch": epoch, "weights": torch.full((50,), float(epoch))})
    os._exit(0)


epoch, moment, survived = 0, 0, False
checkpoints.save({"epoch": 0, "weights": torch.zeros(50)})
while not survived:
    process = os.fork()
    if process == 0:
        child(moment, epoch + 1)
    survived = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    checkpoints = Checkpoints(checkpoints.path)
    state, _ = checkpoints.load()
    assert checkpoints.path.exists() or not linked
    assert state["epoch"] in (epoch, epoch + 1), (moment, state["epoch"], epoch)
    assert (state["weights"] == state["epoch"]).all()
    epoch, moment = state["epoch"], moment + 1
print(moment, sorted(path.name for path in folder.iterdir()))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("links", ["links", "no links"])
def test_a_kill_at_any_call_leaves_a_checkpoint_and_nothing_else(links, tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", KILLS, str(tmp_path), links]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    moments, _, files = done.stdout.partition(" ")
    assert int(moments) > 10
    assert files.strip() == "['checkpoint.previous.safetensors', 'checkpoint.safetensors']"


def test_leftovers_are_removed_if_they_are_ours_and_their_writer_is_dead(tmp_path):
    ours = tmp_path / ".notes.txt.0123456789abcdef.bsam-tmp"
    ours.mkdir()
    (ours / "notes.txt").write_text("torn")
    strangers = [tmp_path / name for name in (".notes.tmp", ".notes.txt.12345678.tmp", ".x.bsam-tmp", "notes.bsam-tmp")]
    for path in strangers:
        path.write_text("of somebody else")
    (tmp_path / "folder").mkdir()
    (tmp_path / ".link.0123456789abcdef.bsam-tmp").symlink_to(tmp_path / "folder")
    remove_leftovers(tmp_path, "other.txt")
    assert ours.exists()
    with replacing(tmp_path / "at-work.txt") as temporary:
        temporary.write_text("whole")
        remove_leftovers(tmp_path)
        assert temporary.exists()
    assert not ours.exists()
    assert (tmp_path / "at-work.txt").read_text() == "whole"
    assert all(path.read_text() == "of somebody else" for path in strangers)
    assert (tmp_path / ".link.0123456789abcdef.bsam-tmp").is_symlink()


def test_a_write_removes_what_an_earlier_one_left(tmp_path):
    left = tmp_path / ".a.txt.0123456789abcdef.bsam-tmp"
    left.mkdir()
    (left / "a.txt").write_text("torn")
    write_text(tmp_path / "b.txt", "b")
    assert left.exists()
    write_text(tmp_path / "a.txt", "a")
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt"]


# ---------------------------------------------------------------- places


def test_a_new_file_takes_nobodys_place(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_text(path, "first", new=True)
    with pytest.raises(FileExistsError, match=r"a.txt could not be written: there is a file of this name"):
        write_text(path, "second", new=True)

    def no_links(*arguments, **options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(FileExistsError):
        write_text(path, "second", new=True)
    assert path.read_text() == "first"
    write_text(tmp_path / "b.txt", "second", new=True)
    assert (tmp_path / "b.txt").read_text() == "second"
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt"]


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_text("of somebody else")
    (tmp_path / "a.txt").symlink_to(tmp_path / "elsewhere")
    write_text(tmp_path / "a.txt", "ours")
    assert (tmp_path / "elsewhere").read_text() == "of somebody else"
    assert not (tmp_path / "a.txt").is_symlink()
    assert (tmp_path / "a.txt").read_text() == "ours"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_folder_that_takes_no_files_is_one_error():
    with pytest.raises(FileNotFoundError, match=r"/proc/a.txt could not be written: no file can be made in this") as of:
        write_text("/proc/a.txt", "a")
    assert "earlier contents" not in str(of.value)  # there were none


# ---------------------------------------------------------------- locks


def run_python(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_lock_holds_against_other_processes_and_not_beyond_death(tmp_path):
    pytest.importorskip("fcntl")
    holding = """
    import sys
    from pathlib import Path
    from bsam.files import locked
    with locked(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
    """
    path = tmp_path / ".lock"
    with run_python(holding, path) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError), locked(path, wait=False):
            raise AssertionError
        process.kill()
    assert path.exists()  # nobody was left to remove it
    with locked(path, wait=False):
        pass
    assert not path.exists()


def test_a_counter_that_many_processes_raise(tmp_path):
    """Read, change, write: without the lock some changes are lost."""
    pytest.importorskip("fcntl")
    raising = """
    import sys
    from pathlib import Path
    from bsam.files import locked, write_text
    path = Path(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(100):
        with locked(path.with_name(".lock")):
            write_text(path, str(int(path.read_text()) + 1))
    """
    path = tmp_path / "count"
    path.write_text("0")
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(run_python(raising, path)) for _ in range(3)]
        for process in processes:
            process.stdout.readline()
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
    assert path.read_text() == "300"
    assert os.listdir(tmp_path) == ["count"]


def test_without_locks_everything_else_works(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as where the system has none
    loader = importlib.machinery.SourceFileLoader("files_without_locks", bsam.files.__file__)
    files = types.ModuleType(loader.name)
    loader.exec_module(files)
    left = tmp_path / ".a.txt.0123456789abcdef.bsam-tmp"
    left.mkdir()
    with files.locked(tmp_path / ".lock"), files.locked(tmp_path / ".lock", wait=False):
        files.write_text(tmp_path / "a.txt", "a")
    assert sorted(os.listdir(tmp_path)) == [left.name, "a.txt"]  # who knows whether its writer lives
    files.write_file(tmp_path / "b", {}, format="f", kind="k", settings={"x": 1})
    assert files.read_file(tmp_path / "b", format="f", kinds=["k"])[2] == {"x": 1}


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder: name the file in it"):
        read_file(tmp_path, format="bsam.posterior", kinds=["point"])


def test_a_type_that_the_format_does_not_have_is_named(tmp_path):
    tensors = {"wave": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(ValueError, match=r"wave is of type torch.complex128, .* persistent=False"):
        write_file(tmp_path / "a", tensors, format="f", kind="k", settings={})
    assert not list(tmp_path.iterdir())
