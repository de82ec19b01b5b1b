"""The floor of a repair: a bare loop that copies as many bytes between processes, with the same checks and syncs.

``python -m bench.healing.floor source ADDRESS FILE`` answers each request with the file's bytes, after their CRC was
computed; ``target ADDRESS FILE COUNT`` asks, compares the checksum of the message, and writes and syncs the bytes. As
with ledgers, each copy is one request, and one sync. There is a pair of such processes for each of two cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import zmq
from crc32c import crc32c
from xxhash import xxh3_64_digest

PAIRS: Final = 2


def measure(directory: Path, size: int, count: int) -> tuple[float, float]:
    """Return the megabytes per second that bare loops copy, and the seconds of processor time per GB.

    Args:
        directory: On the disk to measure.
        size: Bytes of a copy.
        count: How many copies each pair makes.
    """
    (directory / "source").write_bytes(os.urandom(size))
    command = [sys.executable, "-m", "bench.healing.floor"]
    sources, targets = [], []
    for number in range(PAIRS):
        address = f"tcp://127.0.0.1:{_free_port()}"
        sources.append(subprocess.Popen([*command, "source", address, str(directory / "source")]))
        arguments = ["target", address, str(directory / f"target-{number}"), str(count)]
        targets.append(subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True))
    took, cpu = 0.0, 0.0
    for target in targets:
        seconds, spent = map(float, target.communicate()[0].split())
        took, cpu = max(took, seconds), cpu + spent
    for source in sources:
        source.wait()
    copied = PAIRS * count * size
    return copied / 1e6 / took, cpu / copied * 1e9


def _free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        return socket.bind_to_random_port("tcp://127.0.0.1")


def _source(address: str, name: str) -> None:
    """Answer requests until an empty one comes, which is answered with the processor time."""
    with zmq.Context() as context, context.socket(zmq.REP) as socket, open(name, "rb") as file:
        socket.bind(address)
        began = time.process_time()
        while socket.recv():
            file.seek(0)
            data = file.read()
            crc32c(data)
            socket.send_multipart([xxh3_64_digest(data), data], copy=False)
        socket.send_string(str(time.process_time() - began))


def _target(address: str, name: str, count: int) -> None:
    """Ask for copies, write them, and print the seconds and the processor time of both processes."""
    with zmq.Context() as context, context.socket(zmq.REQ) as socket, open(name, "wb", buffering=0) as file:
        socket.connect(address)
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            socket.send(b"next")
            checksum, data = socket.recv_multipart(copy=False)
            if xxh3_64_digest(data.buffer) != checksum.bytes:
                raise RuntimeError("a message was damaged on its way")
            crc32c(data.buffer)
            file.write(data.buffer)
            os.fdatasync(file.fileno())
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        socket.send(b"")
        print(took, cpu + float(socket.recv_string()))


if __name__ == "__main__":
    if sys.argv[1] == "source":
        _source(*sys.argv[2:4])
    else:
        _target(sys.argv[2], sys.argv[3], int(sys.argv[4]))
