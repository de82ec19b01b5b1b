"""What processes did, and when: each operation with the times of its call and of its return.

Every process writes a file of its own, a line for each call and one for each return, so that what it did is known when
it is killed. All times are of the clock of the host that never goes back.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Operation(NamedTuple):
    """One call.

    Attributes:
        key: What it is about; operations on different keys have nothing to do with each other.
        kind: Its name.
        argument: What it was called with.
        result: What it returned; nothing if its outcome is not known.
        called_ns: When it was called.
        returned_ns: When it returned; None if its outcome is not known: it took effect at any time after the call, or
            never.
    """

    key: str
    kind: str
    argument: Any
    result: Any
    called_ns: int
    returned_ns: int | None


class Recorder:
    """Writes the history of one process; any of its threads may use it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._lock = threading.Lock()
        self._calls = 0

    def call(self, key: str, kind: str, argument: Any = None) -> int:
        """Note that an operation begins; return its number."""
        with self._lock:
            self._calls += 1
            number = self._calls
        self._write({"call": number, "at": time.monotonic_ns(), "what": [key, kind, argument]})
        return number

    def returned(self, number: int, result: Any = None) -> None:
        """Note what an operation returned."""
        self._write({"return": number, "at": time.monotonic_ns(), "result": result})

    def refused(self, number: int) -> None:
        """Note that an operation surely had no effect and returned nothing, so that it does not count."""
        self._write({"refused": number})

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


def read_histories(paths: Iterable[Path]) -> dict[str, list[Operation]]:
    """Return the operations of some processes, by key."""
    found: dict[str, list[Operation]] = defaultdict(list)
    for path in paths:
        for operation in _operations(path):
            found[operation.key].append(operation)
    return dict(found)


def _operations(path: Path) -> Iterable[Operation]:
    calls: dict[int, Operation] = {}
    for line in path.read_bytes().splitlines():
        noted = json.loads(line)
        if "call" in noted:
            key, kind, argument = noted["what"]
            calls[noted["call"]] = Operation(key, kind, _frozen(argument), None, noted["at"], None)
        elif "return" in noted:
            number = noted["return"]
            calls[number] = calls[number]._replace(result=_frozen(noted["result"]), returned_ns=noted["at"])
        else:
            del calls[noted["refused"]]
    return calls.values()


def _frozen(value: Any) -> Any:
    """Return what was written as JSON with tuples in the place of lists."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
