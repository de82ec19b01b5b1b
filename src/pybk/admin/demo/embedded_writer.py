"""The writer process of the demonstration, which is killed half-way.

Reads its task as a line of JSON from the standard input, so that the password stands in no process list, and writes a
line of JSON for each chunk that was acknowledged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pybk.admin.demo.source import Source
from pybk.admin.demo.writing import KINDS, Progress, write_lines
from pybk.manager import LedgerManager


@contextmanager
def spawned(
    store: str, source: Source, password: bytes
) -> Iterator[tuple[subprocess.Popen[bytes], Iterator[Progress]]]:
    """Start a writer process; yields it and what it reports, which ends when it has nothing more to write.

    It is killed, if it still runs, when the context is left.
    """
    # A session of its own: Ctrl-C is for the parent, which then ends the child.
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    with process:
        try:
            task = {"store": store, "files": source.files, "bytes": source.file_bytes, "password": password.hex()}
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.flush()
            yield process, _reports(process)
        finally:
            process.kill()


def _reports(process: subprocess.Popen[bytes]) -> Iterator[Progress]:
    assert process.stdout is not None
    for line in process.stdout:
        # The kill may have cut the last line off; what it would have said was not heard by anyone.
        if line.endswith(b"\n"):
            yield Progress(*json.loads(line))


def main() -> None:
    """Write the whole input, then wait for the parent's end: this process is here to be killed."""
    task = json.loads(sys.stdin.buffer.readline())

    def report(progress: Progress) -> None:
        sys.stdout.write(json.dumps(progress) + "\n")
        sys.stdout.flush()

    with LedgerManager.open(task["store"]) as manager:
        source = Source(tuple(task["files"]), task["bytes"])
        write_lines(manager, source, bytes.fromhex(task["password"]), [0] * len(KINDS), report)
        os.close(sys.stdout.fileno())
        sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
