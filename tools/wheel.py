"""Try the wheel as a newcomer does: a clean environment, what README says to install, README's code.

`python -m tools.wheel` builds the wheel, and makes an environment that has the wheel, the distributions that it
declares, those that README's `pip install` lines name, and what these need. Distributions other than bsam are not
downloaded again: they are linked from the environment that runs this tool. `pip check` says whether one is missing or
too old. Then the blocks of Python in README run there, as one program.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["code_of", "main", "needed", "said_to_install"]

_FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INSTALL = re.compile(r"^pip install (.*?)(?:#.*)?$", re.MULTILINE)


def code_of(page: str) -> str:
    """Return the blocks of Python of a page as one program."""
    return "\n".join(_FENCE.findall(page))


def said_to_install(page: str) -> list[str]:
    """Return the distributions that a page's `pip install` lines name, besides the folder itself."""
    return [name for line in _INSTALL.findall(page) for name in line.split() if name != "."]


def needed(requirements: Iterable[str]) -> list[str]:
    """Return the names of all distributions that these requirements lead to here."""
    found: dict[str, None] = {}
    waiting = [Requirement(each) for each in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[name] = None
        waiting += [Requirement(each) for each in importlib.metadata.requires(name) or ()]
    return list(found)


def _link(name: str, folder: Path) -> None:
    """Link the files of an installed distribution into another folder of packages."""
    distribution = importlib.metadata.distribution(name)
    home = Path(sysconfig.get_path("purelib"))
    for top in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        target = folder / top
        if not target.exists():
            target.symlink_to(home / top)


def main() -> int:
    """Build, install, run; the exit status is that of README's code."""
    root = Path(__file__).parent.parent
    readme = (root / "README.md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", work, root], check=True)
        (wheel,) = work.glob("bsam-*.whl")
        venv.create(work / "clean", symlinks=True)
        python = work / "clean" / "bin" / "python"
        folder = Path(sysconfig.get_path("purelib", vars={"base": str(work / "clean")}))
        pip += ["--python", str(python)]
        subprocess.run([*pip, "install", "--no-deps", wheel], check=True)
        (about,) = importlib.metadata.distributions(name="bsam", path=[str(folder)])
        for name in needed([*(about.requires or ()), *said_to_install(readme)]):
            _link(name, folder)
        subprocess.run([*pip, "check"], check=True)
        (work / "readme.py").write_text(code_of(readme), encoding="utf-8")
        where = "import bsam, sys; print(bsam.__file__); sys.exit(not bsam.__file__.startswith(sys.prefix))"
        subprocess.run([python, "-I", "-c", where], check=True, cwd=work)
        return subprocess.run([python, "-I", "readme.py"], check=False, cwd=work).returncode


if __name__ == "__main__":
    sys.exit(main())
