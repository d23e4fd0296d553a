"""The rooms of the package import only what the table of docs/architecture.md allows, and tests mirror them."""

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


# ---------------------------------------------------------------- tests mirror the package, file for file

MIRRORED_ELSEWHERE = {
    "bsam/api.py": "test_init.py",
    "bsam/engine/sampling_triton.py": "engine/test_drawing.py",
    "bsam/experiments/corruptions/blur.py": "experiments/corruptions/test_corrupt.py",
    "bsam/experiments/corruptions/digital.py": "experiments/corruptions/test_corrupt.py",
    "bsam/experiments/corruptions/draw.py": "experiments/corruptions/test_corrupt.py",
    "bsam/experiments/corruptions/filters.py": "experiments/corruptions/test_corrupt.py",
    "bsam/experiments/corruptions/noise.py": "experiments/corruptions/test_corrupt.py",
    "bsam/experiments/corruptions/weather.py": "experiments/corruptions/test_corrupt.py",
    "bsam/experiments/choices.py": "experiments/test_options.py",
    "bsam/experiments/data/embedded.py": "experiments/data/test_loading.py",
    "bsam/experiments/data/progress.py": "experiments/data/test_download.py",
    "bsam/experiments/data/table.py": "experiments/data/test_download.py",
    "bsam/experiments/figures/moving.py": "experiments/test_commands.py",
    "bsam/experiments/figures/threads.py": "experiments/figures/test_logistic.py",
    "bsam/experiments/metric_columns.py": "experiments/test_comparison.py",
    "bsam/experiments/models/layers.py": "experiments/models/test_init.py",
    "bsam/experiments/models/lenet5.py": "experiments/models/test_init.py",
    "bsam/experiments/report/demo_doubt.py": "experiments/report/test_demo_page.py",
    "bsam/experiments/report/diagrams.py": "experiments/report/test_paper_page.py",
    "bsam/experiments/report/gallery.py": "experiments/report/test_paper_page.py",
    "bsam/experiments/report/page.py": "experiments/report/test_demo_page.py",
    "bsam/experiments/reproduce/machines.py": "experiments/reproduce/test_carry_out.py",
    "bsam/experiments/reproduce/show.py": "experiments/reproduce/test_batch_commands.py",
    "bsam/experiments/suites/ratings.py": "experiments/suites/test_of_runs.py",
    "bsam/experiments/suites/show.py": "experiments/suites/test_of_runs.py",
    "bsam/experiments/style.py": "experiments/figures/test_init.py",
    "bsam/kernels/convolution_triton.py": "kernels/test_convolution.py",
    "bsam/kernels/filter_response_triton.py": "kernels/test_filter_response.py",
    "bsam/metrics/bootstrap.py": "metrics/test_classes.py",
    "bsam/metrics/inputs.py": "metrics/test_classes.py",
    "bsam/noise_cuda.py": "test_noise.py",
    "bsam/optim/sharding.py": "test_shards.py",
    "bsam/optim/slotted.py": "optim/test_contract.py",
    "bsam/posterior/__init__.py": "posterior/test_base.py",
    "tools/markdown.py": "experiments/reproduce/test_studies.py",
    "tools/theory.py": "experiments/figures/test_numbers.py",
}
"""Source files without a file of tests of their own, and the file whose tests run them."""


def defines_something(path):
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in body)


def mirrors():
    """Of each source file, the place of its tests; an `__init__.py` that only imports has none."""
    found = {}
    for top in (SOURCE, ROOT / "tools"):
        for path in sorted(top.rglob("*.py")):
            if path.name != "__init__.py" or defines_something(path):
                folder = path.relative_to(SOURCE if top == SOURCE else ROOT).parent
                name = f"{top.name}/{path.relative_to(top).as_posix()}"
                found[name] = ROOT / "tests" / folder / f"test_{path.stem.strip('_')}.py"
    return found


def test_every_source_file_has_its_tests():
    without = {name for name, tests in mirrors().items() if not tests.is_file()}
    assert without == set(MIRRORED_ELSEWHERE)  # and a file that has tests of its own is not in the list
    for tests in MIRRORED_ELSEWHERE.values():
        assert (ROOT / "tests" / tests).is_file(), tests
