"""A worker of the recipe for several processes: ``worker_child.py KIND NAME DIRECTORY`` appends until its input ends.

KIND is ``app``, which calls the application of the page ``docs/howto/forking.md`` as its server does, or ``log``, a
worker with a log of its own. It says ``acked THREAD NUMBER`` after each record that was acknowledged, and
``stopped`` once it has closed everything without an error.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from io import BytesIO
from typing import Any

from pybk import LedgerManager, Log, Secret

THREADS = 2
PASSWORD = b"from a file"


def record(name: str, thread: int, number: int) -> bytes:
    """Return what a thread of a worker appends as its record of a number."""
    return f"{name} {thread} {number}".encode()


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def _append_until(ended: threading.Event, name: str, thread: int, append: Callable[[bytes], object]) -> None:
    number = 0
    while not ended.is_set():
        append(record(name, thread, number))
        _say(f"acked {thread} {number}")
        number += 1


def _work(name: str, append: Callable[[bytes], object]) -> None:
    """Append in threads until the input ends; raises what one of them did."""
    ended = threading.Event()
    errors: list[BaseException] = []

    def run(thread: int) -> None:
        try:
            _append_until(ended, name, thread, append)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(THREADS)]
    for each in threads:
        each.start()
    sys.stdin.read()
    ended.set()
    for each in threads:
        each.join()
    if errors:
        raise errors[0]


def _run_app(name: str) -> None:
    sys.path.insert(0, os.getcwd())
    app: Any = importlib.import_module("app")

    def post(payload: bytes) -> None:
        statuses: list[str] = []
        app.application({"wsgi.input": BytesIO(payload)}, lambda status, headers: statuses.append(status))
        assert statuses == ["201 Created"]

    app.start()
    _work(name, post)
    app.stop()


def _run_log(name: str) -> None:
    secret = Secret(file="cluster-secret")
    with LedgerManager.connect(f"lmdb://{os.getcwd()}/metadata", cluster_secret=secret) as manager:
        log = Log.open(manager, f"requests/{name}", password=PASSWORD, quorums=(1, 1, 1))
        with log.writer() as writer:
            _work(name, writer.append)


if __name__ == "__main__":
    kind, name, directory = sys.argv[1:]
    os.chdir(directory)
    {"app": _run_app, "log": _run_log}[kind](name)
    _say("stopped")
