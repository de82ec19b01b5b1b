"""A ZooKeeper server of its own, from the jars that PySpark installs."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from bench.cluster.ports import free_ports

TICK_MS: Final = 500
START_SECONDS: Final = 30.0


def _jars() -> Path | None:
    found = importlib.util.find_spec("pyspark")
    return None if found is None or found.origin is None else Path(found.origin).parent / "jars"


def is_there() -> bool:
    """Return whether there are Java, ZooKeeper's jars and its client."""
    jars = _jars()
    found = jars is not None and any(jars.glob("zookeeper-[0-9]*.jar"))
    return found and shutil.which("java") is not None and importlib.util.find_spec("kazoo") is not None


@contextmanager
def server(directory: Path) -> Iterator[str]:
    """Run a server; gives a metadata URL."""
    (port,) = free_ports(1)
    with (
        (directory / "zookeeper.log").open("wb") as log,
        subprocess.Popen(
            [
                *("java", "-Xmx256m", "-XX:+UseSerialGC", "-Dzookeeper.admin.enableServer=false"),
                *("-cp", f"{_jars()}/*", "org.apache.zookeeper.server.ZooKeeperServerMain"),
                *(str(port), str(directory / "zookeeper"), str(TICK_MS)),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            _wait(process, port, directory / "zookeeper.log")
            yield f"zk://127.0.0.1:{port}/pybk"
        finally:
            process.kill()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(b"srvr")  # the one such command that is allowed by itself
            if connection.recv(1):
                return
        time.sleep(0.1)
    raise RuntimeError(f"ZooKeeper did not start: {log.read_text(encoding='utf-8', errors='replace')[-1000:]}")
