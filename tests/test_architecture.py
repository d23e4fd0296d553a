"""The rooms of the package import only what the table of docs/architecture.md allows."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "bsam"


def allowed_arrows():
    """Of each room, the rooms that it may import."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("<!-- arrows -->")[1].split("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    return {room.strip("`"): set(re.findall(r"`(\w+)`", arrows)) for room, _, arrows in rows}


def room_of(path):
    first = path.relative_to(SOURCE).with_suffix("").parts[0]
    return "bsam" if first == "__init__" else first


def imported_rooms(path):
    """The rooms that a file imports anywhere, also inside of functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    parts = [name.split(".") for name in names]
    rooms = {part[1] if len(part) > 1 else "bsam" for part in parts if part[0] == "bsam"}
    return {room if (SOURCE / room).is_dir() or (SOURCE / f"{room}.py").exists() else "bsam" for room in rooms}


FILES = sorted(SOURCE.rglob("*.py"))


def test_the_table_has_every_room():
    assert {room_of(path) for path in FILES} == set(allowed_arrows())


def test_there_is_no_cycle():
    list(TopologicalSorter(allowed_arrows()).static_order())  # raises if there is one


@pytest.mark.parametrize("room", sorted({room_of(path) for path in FILES}))
def test_a_room_imports_what_its_row_says(room):
    found = set().union(*(imported_rooms(path) for path in FILES if room_of(path) == room)) - {room}
    assert found == allowed_arrows()[room]  # and a row has no arrow that nobody needs


@pytest.mark.parametrize("room", ["engine", "compiler"])
def test_no_method_is_named(room):
    """Neither in an isinstance nor elsewhere in the code: what it needs to know, a method declares."""
    methods = {"BSAM", "SAM", "ASAM", "VOGN", "IVON", "SWAG", "GaussianOptimizer"}
    for path in (SOURCE / room).rglob("*.py"):
        names = {
            node.id for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Name)
        }
        assert not names & methods, path


def test_private_names_of_torch_are_in_one_file():
    private = re.compile(r"\btorch(\.\w+)*\._[a-z]\w*|from torch[\w.]* import .*\b_\w+")
    for path in FILES:
        if path.name != "torch_private.py":
            lines = path.read_text(encoding="utf-8").splitlines()
            assert not [line for line in lines if private.search(line) and not line.lstrip().startswith(("#", '"'))], (
                path
            )
