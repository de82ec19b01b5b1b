"""NATS JetStream as a peer: three servers, a stream in files on all of them, each message synced before its answer."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.cluster.bare import SERVERS, median_ms
from bench.cluster.ports import free_ports
from bench.payloads import PAYLOAD

if TYPE_CHECKING:
    from bench.contest import Run, Scale

NAME: Final = "NATS JetStream"
START_SECONDS: Final = 60.0
OLDEST: Final = 2, 10
"""The first version of a server that can sync each message."""


def why_not() -> str:
    """Return why it cannot be measured; "" if it can."""
    if shutil.which("nats-server") is None:
        return "there is no nats-server here (https://nats.io)"
    told = subprocess.run(["nats-server", "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"v(\d+)\.(\d+)", told)
    if found is None or tuple(map(int, found.groups())) < OLDEST:
        return f"nats-server is older than {OLDEST[0]}.{OLDEST[1]}, and cannot sync each message ({told.strip()})"
    return "" if importlib.util.find_spec("nats") else "its client is missing (pip install nats-py)"


@contextmanager
def running(directory: Path, _: Scale) -> Iterator[Run]:
    """Three servers, and a client in this process."""
    ports, routes = free_ports(SERVERS), free_ports(SERVERS)
    with ExitStack() as stack:
        for number in range(SERVERS):
            place = directory / f"server-{number}"
            place.mkdir()
            others = ", ".join(f"nats://127.0.0.1:{port}" for port in routes)
            configuration = place / "server.conf"
            configuration.write_text(
                f"server_name: s{number}\nlisten: 127.0.0.1:{ports[number]}\n"
                f'jetstream {{ store_dir: "{place}", sync_interval: always }}\n'
                f"cluster {{ name: bench, listen: 127.0.0.1:{routes[number]}, routes: [{others}] }}\n",
                encoding="utf-8",
            )
            with (place / "server.log").open("wb") as log:
                command = ["nats-server", "--config", str(configuration)]
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            stack.enter_context(process)
            stack.callback(process.kill)
        loop = stack.enter_context(asyncio.Runner())
        client, stream = loop.run(_connect(ports))
        stack.callback(lambda: loop.run(client.close()))
        yield lambda seconds: median_ms(loop.run(_publish(stream, seconds)))


async def _connect(ports: list[int]) -> tuple[Any, Any]:
    """Connect, and make the stream once the servers have found each other."""
    import nats
    from nats.errors import Error
    from nats.js.api import StorageType, StreamConfig

    wanted = StreamConfig(name="bench", subjects=["bench"], num_replicas=SERVERS, storage=StorageType.FILE)
    end = time.monotonic() + START_SECONDS
    while True:
        with suppress(Error, OSError):
            client = await nats.connect([f"nats://127.0.0.1:{port}" for port in ports])
            stream = client.jetstream()
            try:
                await stream.add_stream(wanted)
                return client, stream
            except Error:
                await client.close()
        if time.monotonic() > end:
            raise RuntimeError("the servers of NATS made no stream in a minute")
        await asyncio.sleep(0.2)


async def _publish(stream: Any, seconds: float) -> list[float]:
    """Publish one message at a time; return the seconds of each."""
    publish = partial(stream.publish, "bench", PAYLOAD)
    latencies = []
    now = time.perf_counter()
    end = now + seconds
    while now < end:
        begin = now
        await publish()
        now = time.perf_counter()
        latencies.append(now - begin)
    return latencies
