"""A real ZooKeeper server for tests, from the jars that PySpark installs.

``from tests.zookeeper_server import zookeeper_server`` makes the fixture ``zookeeper_server`` known to a test module.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.spark import archive
from tests.waiting import stop

TICK_MS = 250
START_S = 120.0

SHORT_SESSION_S = 5.0
LONG_SESSION_S = 60.0
"""The longest session that a server gives: short where its end is what is tested, as no busy machine may end others."""

LEASE_TIME_S = 30.0
"""The lease time that the test's own process asks the fixture's server for, unless a test says another one."""


def missing() -> str | None:
    """Say what is missing for a server, None if nothing is."""
    if shutil.which("java") is None:
        return "no java; install Java 17 or newer to test ZooKeeper"
    if importlib.util.find_spec("kazoo") is None:
        return 'no kazoo; pip install "pybk[zookeeper]" to test ZooKeeper'
    if not jars():
        return 'no ZooKeeper jars; pip install "pybk[spark-test]" to test ZooKeeper'
    return None


def jars() -> list[Path]:
    """Return the ZooKeeper jars of PySpark."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        return []
    return sorted((Path(found.origin).parent / "jars").glob("zookeeper-[0-9]*.jar"))


class ZooKeeperServer:
    """One server in a process of its own. Sessions last half a second at least.

    Args:
        longest_session_s: The longest lease time that it grants, seconds.
        certificate: A file with a certificate of the server and its key: the server has a port for TLS, too, where
            clients need certificates, which are identities.
        authority: A file with the certificate of the authority of the clients' certificates.

    Attributes:
        host: ``host:port``.
        tls_host: ``host:port`` for TLS.
    """

    def __init__(
        self,
        certificate: Path | None = None,
        authority: Path | None = None,
        *,
        longest_session_s: float = SHORT_SESSION_S,
    ) -> None:
        self._directory = tempfile.mkdtemp(prefix="pybk-zookeeper-")
        self._port, tls_port = free_ports(2)
        self.host = f"127.0.0.1:{self._port}"
        self.tls_host = f"127.0.0.1:{tls_port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._paths = 0
        settings = {
            "clientPort": self._port,
            "dataDir": os.path.join(self._directory, "data"),
            "tickTime": TICK_MS,
            "maxSessionTimeout": round(longest_session_s * 1000),
            "maxClientCnxns": 0,
        }
        if certificate is not None and authority is not None:
            settings |= {
                "secureClientPort": tls_port,
                "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
                "authProvider.x509": "org.apache.zookeeper.server.auth.X509AuthenticationProvider",
                "ssl.keyStore.location": certificate,
                "ssl.trustStore.location": authority,
                "ssl.clientAuth": "need",
            }
        self._settings = os.path.join(self._directory, "settings")
        Path(self._settings).write_text("".join(f"{name}={value}\n" for name, value in settings.items()))

    def path(self) -> str:
        """Return the path of a metadata URL that nobody else uses."""
        self._paths += 1
        return f"/pybk/test-{self._paths}"

    def url(self) -> str:
        """Return a metadata URL that nobody else uses."""
        return f"zk://{self.host}{self.path()}"

    def start(self) -> None:
        """Start the server, on what it kept if it ran before, and wait until it answers."""
        directory = jars()[0].parent
        with open(os.path.join(self._directory, "log"), "ab") as log:
            self._process = subprocess.Popen(
                [
                    *("java", "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", *archive.mapping(directory)),
                    *("-Dzookeeper.admin.enableServer=false", "-Dzookeeper.4lw.commands.whitelist=srvr"),
                    "-Dzookeeper.forceSync=no",  # tests kill the process alone: what it wrote stays without a sync
                    *("-cp", archive.class_path(directory), "org.apache.zookeeper.server.ZooKeeperServerMain"),
                    self._settings,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1) as connection:
                connection.sendall(b"srvr")
                answer = b""
                while data := connection.recv(4096):
                    answer += data
                if b"Mode:" in answer:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"ZooKeeper did not start: {Path(self._directory, 'log').read_text()[-2000:]}")

    def kill(self) -> None:
        """Kill the server; what it acknowledged is on disk."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """Stop the server's process, which keeps its connections."""
        assert self._process is not None
        stop(self._process.pid)

    def resume(self) -> None:
        """Let a stopped server continue."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the server and forget what it kept."""
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


@pytest.fixture(scope="session")
def zookeeper_server() -> Iterator[ZooKeeperServer]:
    """A running ZooKeeper server for the whole run; skips where it cannot be had."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    from pybk.metadata import zookeeper_store

    server = ZooKeeperServer(longest_session_s=LONG_SESSION_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zookeeper_store, "ZOOKEEPER_LEASE_TIME_S", LEASE_TIME_S)
        try:
            server.start()
            yield server
        finally:
            server.close()
