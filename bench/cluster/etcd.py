"""etcd as a peer: three members, one ``put`` of an entry at a time over its JSON gateway."""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.cluster.appending import each_ms
from bench.cluster.bare import SERVERS
from bench.cluster.ports import free_ports
from bench.payloads import PAYLOAD

if TYPE_CHECKING:
    from bench.contest import Run, Scale

NAME: Final = "etcd, JSON gateway"
START_SECONDS: Final = 60.0


def why_not() -> str:
    """Return why it cannot be measured; "" if it can."""
    return "" if shutil.which("etcd") else "there is no etcd here (Debian, Ubuntu: apt install etcd-server)"


@contextmanager
def running(directory: Path, _: Scale) -> Iterator[Run]:
    """Three members, and a connection to their leader."""
    ports, peers = free_ports(SERVERS), free_ports(SERVERS)
    members = ",".join(f"m{number}=http://127.0.0.1:{port}" for number, port in enumerate(peers))
    with ExitStack() as stack:
        for number in range(SERVERS):
            client, peer = (f"http://127.0.0.1:{one[number]}" for one in (ports, peers))
            command = [
                *("etcd", "--name", f"m{number}", "--data-dir", str(directory / f"member-{number}")),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", members, "--initial-cluster-state", "new"),
            ]
            with (directory / f"member-{number}.log").open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            stack.enter_context(process)
            stack.callback(process.kill)
        connection = stack.enter_context(closing(http.client.HTTPConnection("127.0.0.1", _leader(ports))))
        key, value = (base64.b64encode(one).decode() for one in (b"entry", PAYLOAD))
        yield lambda seconds: each_ms(lambda: _ask(connection, "kv/put", {"key": key, "value": value}), seconds)


def _leader(ports: list[int]) -> int:
    """Wait until there is a leader; return its port."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        for port in ports:
            with suppress(OSError, KeyError), closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
                said = _ask(connection, "maintenance/status", {})
                if said["leader"] == said["header"]["member_id"]:
                    return port
        time.sleep(0.1)
    raise RuntimeError("the members of etcd had no leader in a minute")


def _ask(connection: http.client.HTTPConnection, what: str, body: dict[str, str]) -> Any:
    """Make one request, and return what is answered."""
    connection.request("POST", f"/v3/{what}", json.dumps(body))
    with connection.getresponse() as response:
        said = response.read()
        if response.status != http.client.OK:
            raise RuntimeError(f"etcd answered {response.status}: {said[:300]!r}")
    return json.loads(said)
