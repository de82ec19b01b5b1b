"""KeyboardInterrupt at every line of a change, and after every call into C: others can still change the store."""

from __future__ import annotations

import itertools
import linecache
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from pybk.metadata.lmdb_store import LmdbMetadataStore
from tests.interrupting import CallInterrupter

_FILES = ("pybk/metadata/lmdb_store.py", "pybk/metadata/host_file.py")
_ENDS = ("HostFile.release_write_lock", "HostFile._unlock")
_NOWHERE = ("try:", "if True in taken:", "self.thread_lock.release()")
"""Where the interpreter looks for no signals before the next call into C; a trace function would."""


class Interrupter:
    """Raises KeyboardInterrupt once, at the n-th line of a change, in the thread that it is used in."""

    def __init__(self, line: int) -> None:
        self._left = line
        self.at = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith(_FILES):
            return None
        line = linecache.getline(code.co_filename, frame.f_lineno).strip()
        if event == "line" and not self.at and line not in _NOWHERE:
            self._left -= 1
            if self._left < 0:
                self.at = f"{code.co_qualname}: {line}"
                raise KeyboardInterrupt
        return self


def interrupted_at_line(line: int, call: Callable[[], object]) -> str:
    """Call with an interrupt at one line; return which it was, nothing if it did not come to that."""
    interrupter = Interrupter(line)
    sys.settrace(interrupter)
    try:
        call()
    except KeyboardInterrupt:
        assert interrupter.at
    finally:
        sys.settrace(None)
    return interrupter.at


def interrupted_at_call(number: int, call: Callable[[], object]) -> str:
    """Call with an interrupt as one call into C returns; return as ``interrupted_at_line``."""
    interrupter = CallInterrupter(number, _FILES)
    sys.setprofile(interrupter)
    try:
        call()
    except KeyboardInterrupt:
        assert interrupter.at
    finally:
        sys.setprofile(None)
    return interrupter.at


@pytest.mark.parametrize(("interrupted", "least"), [(interrupted_at_line, 30), (interrupted_at_call, 10)])
def test_an_interrupt_anywhere_in_a_change_leaves_the_write_lock_to_others(
    tmp_path: Path, interrupted: Callable[[int, Callable[[], object]], str], least: int
) -> None:
    store = LmdbMetadataStore(str(tmp_path / "m"), timeout_s=1)
    other = LmdbMetadataStore(str(tmp_path / "m"), timeout_s=1)
    store.create("key", b"v")

    def change(there: LmdbMetadataStore) -> int:
        found = there.get("key")
        assert found is not None
        return there.put("key", b"v", found.version)

    seen = set[str]()

    def interrupt_once_at_each() -> int:
        for line in itertools.count():
            at = interrupted(line, lambda: change(store))
            seen.add(at)
            change(other)  # which is as if in another process: its locks are its own
            thread = threading.Thread(target=change, args=(store,))
            thread.start()
            thread.join()
            version = change(other)
            assert change(store) == version + 1, at
            if not at:
                return line
        raise AssertionError("a change has no end")

    def all_seen() -> bool:
        return any(each.startswith(_ENDS) for each in seen) and any(
            "LmdbMetadataStore._write:" in each for each in seen
        )

    assert interrupt_once_at_each() > least
    for _ in range(20):  # a sign of life in one of the changes shifts what is the n-th call
        if not all_seen():
            interrupt_once_at_each()
    assert all_seen()
    store.close()
    other.close()
