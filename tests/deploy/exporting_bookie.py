"""A bookie that shows its metrics to Prometheus, and repairs that wait for tenths of seconds.

``python -m tests.deploy.exporting_bookie DIRECTORY METADATA NAME`` says ``metrics PORT`` once it serves, and ends with
its standard input.
"""

from __future__ import annotations

import os
import sys

from prometheus_client import start_http_server

from pybk import LedgerManager
from pybk.admin.metrics import register
from tests.cluster.scenarios.scaled import say, scale


def serve(directory: str, url: str, name: str) -> None:
    """Serve until the standard input ends."""
    scale()
    secret = os.environ["PYBK_CLUSTER_SECRET"].encode()
    manager = LedgerManager.open(
        directory, listen="tcp://127.0.0.1:*", metadata=url, cluster_secret=secret, bookie_id=name
    )
    register(manager, name)
    server, _ = start_http_server(0, addr="127.0.0.1")
    say("metrics", server.server_port)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    serve(*sys.argv[1:])
