"""Three nodes of Ray on this machine, to try `--on ray://localhost:10001`, and to lose a node.

python -m tools.three_nodes [--port 10001]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["NODE", "main", "three_nodes"]

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000}
"""A node of one core. Runs exchange files, and not objects of Ray."""
_QUICK = {"worker_niceness": 0, "health_check_period_ms": 500, "health_check_timeout_ms": 2000}
"""Workers have the priority of other processes, and a node that is lost is noticed in seconds."""


@contextmanager
def three_nodes(port: int) -> Iterator[Any]:
    """Start a head without cores, which listens to clients at `port`, and two nodes with one core each."""
    from ray.cluster_utils import Cluster

    temporary = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # the names of Ray's sockets must be short
    source = Path(__file__).parent.parent
    before = {name: os.environ.get(name) for name in ("RAY_TMPDIR", "PYTHONPATH")}
    os.environ["RAY_TMPDIR"] = temporary
    os.environ["PYTHONPATH"] = os.pathsep.join([str(source / "src"), str(source)])  # the nodes run this checkout
    try:
        head = {**NODE, "num_cpus": 0, "ray_client_server_port": port, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": _QUICK})
        try:
            for _ in range(2):
                cluster.add_node(**NODE)
            yield cluster
        finally:
            cluster.shutdown()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def main() -> None:
    """Start the nodes, say how to use them, and stop them at Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description="Start three nodes of Ray on this machine.")
    parser.add_argument("--port", type=int, default=10001, help="port for clients")
    port = parser.parse_args().port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just left is free
        try:
            probe.bind(("", port))
        except OSError as error:
            parser.error(f"port {port} cannot be used ({error.strerror}): write a free one, --port {port + 76}.")
    signals = {signal.SIGINT, signal.SIGTERM}
    with three_nodes(port) as cluster:
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # not before: the processes of Ray would inherit it
        print(f"Three nodes: write --on ray://localhost:{port} in another terminal. Ctrl-C here stops them.")
        for node in cluster.worker_nodes:
            print(f"To lose a node, write: kill -9 {node.all_processes['raylet'][0].process.pid}", flush=True)
        signal.sigwait(signals)


if __name__ == "__main__":
    main()
