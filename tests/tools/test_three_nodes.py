"""The example of three nodes runs by the two commands of its page."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tools import three_nodes

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]


def test_the_two_commands_of_the_page(tmp_path):
    """On another port, and with the files in `tmp_path`."""
    pytest.importorskip("ray")
    page = (ROOT / "docs" / "cluster.md").read_text().split("<!-- commands -->")[1].split("<!-- end -->")[0]
    nodes, command = (each.replace("\\\n", " ") for each in re.findall(r"```bash\n(.*?)\n```", page, re.DOTALL))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    assert nodes.startswith("python -m ")
    first = subprocess.Popen(
        [sys.executable, *shlex.split(nodes)[1:], "--port", port],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        shown = [first.stdout.readline() for _ in range(3)]
        assert f"write --on ray://localhost:{port} in another terminal" in shown[0]
        assert all(re.fullmatch(r"To lose a node, write: kill -9 \d+\n", line) for line in shown[1:])
        assert command.startswith("bsam ")
        code = "from bsam.experiments.cli import main; main()"
        arguments = shlex.split(command.replace("10001", port))[1:]
        second = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert second.returncode == 0, second.stderr
        assert "Records: report/tiny" in second.stdout
        assert len(list(tmp_path.glob("report/tiny/table6/mnist/*/seed*.json"))) == 4
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=60)
    assert first.returncode == 0


def test_a_port_that_is_taken_is_named(monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["three_nodes", "--port", str(port)])
        with pytest.raises(SystemExit):
            three_nodes.main()
    assert f"port {port} cannot be used (Address already in use): write a free one, --port" in capsys.readouterr().err
