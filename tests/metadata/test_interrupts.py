"""KeyboardInterrupt at every line of a change: the turn is left to the other threads and processes."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from pybk.metadata.lmdb import LmdbTree

_ROOMS = ("pybk/metadata/lmdb.py", "pybk/metadata/hostfile.py")
_NOWHERE = ("try:", "self._turn_lock.release()")
"""Where the interpreter looks for no signals before the next call into C; a trace function would."""


class Interrupter:
    """Raises KeyboardInterrupt once, at the n-th line of a change, in the thread that it is used in."""

    def __init__(self, line: int) -> None:
        self._left = line
        self.at = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith(_ROOMS):
            return None
        line = linecache.getline(code.co_filename, frame.f_lineno).strip()
        if event == "line" and not self.at and line not in _NOWHERE:
            self._left -= 1
            if self._left < 0:
                self.at = f"{code.co_qualname}: {line}"
                raise KeyboardInterrupt
        return self


def interrupted(line: int, call: Callable[[], object]) -> str:
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


def test_an_interrupt_at_any_line_of_a_change_leaves_the_turn_to_others(tmp_path: Path) -> None:
    tree = LmdbTree(str(tmp_path / "m"), timeout_s=1)
    other = LmdbTree(str(tmp_path / "m"), timeout_s=1)
    tree.create("key", b"v")

    def change(there: LmdbTree) -> int:
        found = there.get("key")
        assert found is not None
        return there.put("key", b"v", found.version)

    at, line = "first", 0
    seen = set()
    while at:
        at = interrupted(line, lambda: change(tree))
        seen.add(at)
        change(other)  # which is as if in another process: its locks are its own
        thread = threading.Thread(target=change, args=(tree,))
        thread.start()
        thread.join()
        version = change(other)
        assert change(tree) == version + 1, at
        line += 1
    assert any("HostFile.end_turn" in each for each in seen)
    assert any("_in_turn" in each for each in seen)
    assert line > 30
    tree.close()
    other.close()
