"""The presets' files are those that the paper's settings give."""

from bsam.experiments.paper.presets import FOLDER
from tools.presets import generate, settings


def test_the_paper_has_45_rows_of_settings():
    blocks = settings()
    assert sum(len(block["methods"]) for block in blocks.values()) == 45
    without = [name for name, block in blocks.items() if not block.get("augment")]
    assert sum(len(blocks[name]["methods"]) for name in without) == 24
    assert sum(len(block["methods"]) for name, block in blocks.items() if "resnet18" in name) == 6


def test_the_files_of_the_presets_are_those_that_the_settings_give():
    """If not: python -m tools.presets."""
    files = {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in FOLDER.rglob("*") if path.is_file()}
    assert {name: path.read_text() for name, path in files.items()} == generate()
