"""Changes of a file are noticed without looking at it all the time."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from pybk.metadata import changes
from pybk.metadata.changes import REST_S, ChangeSignal
from pybk.metadata.lmdb import LmdbTree
from tests.metadata.worlds import wait_for


def test_a_write_and_a_call_end_the_wait(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"1")
    signal = ChangeSignal(str(path))
    signal.wait(None, changes=True)  # begins to watch
    path.write_bytes(b"2")
    signal.wait(None, changes=True)
    signal.set()
    signal.wait(None, changes=True)
    signal.set()
    signal.wait(None, changes=False)
    before = time.monotonic()
    signal.wait(0.05, changes=True)
    assert time.monotonic() - before >= 0.04
    signal.close()
    signal.set()


def test_where_files_cannot_be_watched_they_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_watch", lambda path: -1)
    signal = ChangeSignal(str(tmp_path / "data"))
    before = time.monotonic()
    signal.wait(None, changes=True)
    assert time.monotonic() - before >= REST_S / 2
    signal.close()


def test_a_file_that_is_not_there_is_not_watched(tmp_path: Path) -> None:
    assert changes._watch(str(tmp_path / "none")) == -1


def test_who_watches_at_rest_looks_at_nothing(tmp_path: Path) -> None:
    tree = LmdbTree(str(tmp_path / "metadata"))
    tree.create("key", b"v")
    told = threading.Event()
    tree.watch("key", told.set)
    polls: list[float] = []
    original = tree._poll
    tree._poll = lambda: (polls.append(time.monotonic()), original())[1]  # type: ignore[method-assign, func-returns-value]
    assert wait_for(lambda: len(polls) >= 2)
    spacing = [later - earlier for earlier, later in pairwise(polls[1:])]
    assert all(gap > 10 * REST_S for gap in spacing)
    other = LmdbTree(str(tmp_path / "metadata"))
    node = other.get("key")
    assert node is not None
    other.put("key", b"w", node.version)
    assert told.wait(10)
    other.close()
    tree.close()
