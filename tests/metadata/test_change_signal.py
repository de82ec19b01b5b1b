"""Changes of a file are noticed without looking at it all the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from pybk.metadata import change_signal, lmdb_store
from pybk.metadata.change_signal import REST_S, ChangeSignal
from pybk.metadata.lmdb_store import LmdbMetadataStore
from tests.metadata.harness import wait_for
from tests.waiting import WAIT_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(b"1")
    return path


@pytest.fixture
def signal(path: Path) -> Iterator[ChangeSignal]:
    """A signal that has reported the first change of its file."""
    signal = ChangeSignal(str(path))
    signal.wait(None, changes=True)  # begins to watch
    path.write_bytes(b"2")
    signal.wait(None, changes=True)
    yield signal
    signal.close()


def test_a_write_and_a_call_end_the_wait(path: Path, signal: ChangeSignal) -> None:
    path.write_bytes(b"3")
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


def test_a_call_ends_the_rest_between_two_changes(path: Path, signal: ChangeSignal) -> None:
    path.write_bytes(b"3")
    signal.set()
    before = time.monotonic()
    signal.wait(None, changes=True, rest_s=2 * WAIT_S)
    assert time.monotonic() - before < WAIT_S


def test_changes_do_not_prolong_a_wait_for_calls_alone(path: Path, signal: ChangeSignal) -> None:
    """Else a process that watches nothing would give no sign of life while others write."""
    ended = threading.Event()

    def wait() -> None:
        assert not signal.wait(0.05, changes=False)
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    end_at = time.monotonic() + WAIT_S
    while not ended.wait(0.001) and time.monotonic() < end_at:
        path.write_bytes(b"3")
    came_to_its_end = ended.is_set()
    signal.set()
    waiting.join()
    assert came_to_its_end


def test_where_files_cannot_be_watched_they_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_signal, "watch_file", lambda path: -1)
    signal = ChangeSignal(str(tmp_path / "data"))
    before = time.monotonic()
    signal.wait(None, changes=True)
    assert time.monotonic() - before >= REST_S / 2
    signal.close()


def test_a_file_that_is_not_there_is_not_watched(tmp_path: Path) -> None:
    assert change_signal.watch_file(str(tmp_path / "none")) == -1


def test_a_process_at_rest_polls_nothing_for_its_watches(tmp_path: Path) -> None:
    store = LmdbMetadataStore(str(tmp_path / "metadata"))
    store.create("key", b"v")
    told = threading.Event()
    store.watch("key", told.set)
    polls: list[float] = []
    original = store.poll
    store.poll = lambda: (polls.append(time.monotonic()), original())[1]  # type: ignore[method-assign, func-returns-value]
    assert wait_for(lambda: len(polls) >= 2)
    spacing = [later - earlier for earlier, later in pairwise(polls[1:])]
    assert all(gap > 10 * REST_S for gap in spacing)
    other = LmdbMetadataStore(str(tmp_path / "metadata"))
    node = other.get("key")
    assert node is not None
    other.put("key", b"w", node.version)
    assert told.wait(WAIT_S)
    other.close()
    store.close()


class Minute:
    """A minute of the thread that keeps a store's session alive and its watches informed, by a clock of the test.

    Attributes:
        now: The time.
        waits: How often the thread slept.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: LmdbMetadataStore) -> None:
        self.now = time.monotonic() + 60
        self.waits = 0
        self._store = store
        self._end = self.now + 60
        monkeypatch.setattr(lmdb_store, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=time.sleep))
        monkeypatch.setattr(store.change_signal, "wait", self._wait)

    def run(self) -> None:
        self._store.keep()

    def _wait(self, timeout_s: float | None, *, changes: bool, rest_s: float) -> bool:
        assert timeout_s is not None
        self.waits += 1
        self.now += timeout_s
        self._store.closed = self.now >= self._end
        return False


@pytest.fixture
def resting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LmdbMetadataStore]:
    monkeypatch.setattr(LmdbMetadataStore, "start_keeper", lambda store: None)
    store = LmdbMetadataStore(str(tmp_path / "metadata"))
    store.create("key", b"v", leased=True)
    store.watch("key", lambda: None)
    yield store
    monkeypatch.undo()
    store.closed = False
    store.close()


def test_one_of_many_processes_at_rest_wakes_once_a_second(
    resting: LmdbMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = dict.fromkeys(("heartbeat", "poll", "dead"), 0)

    def count(name: str) -> None:
        original = getattr(resting, name)

        def counted() -> object:
            counts[name] += 1
            found = original()
            resting.sessions_seen = 20  # as many bookies share the look for dead sessions
            return found

        monkeypatch.setattr(resting, name, counted)

    for name in counts:
        count(name)
    minute = Minute(monkeypatch, resting)
    minute.run()
    assert 55 <= minute.waits <= 65
    assert 55 <= counts["heartbeat"] <= 65
    assert 28 <= counts["poll"] <= 35
    assert 28 <= counts["dead"] <= 35
    assert resting.session_id, "nothing ended it"


def test_a_process_alone_looks_for_dead_sessions_four_times_a_second(
    resting: LmdbMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    minute = Minute(monkeypatch, resting)
    minute.run()
    assert 230 <= minute.waits <= 250


def test_a_process_without_a_session_wakes_every_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resting: LmdbMetadataStore
) -> None:
    watching = LmdbMetadataStore(str(tmp_path / "metadata"))
    watching.watch("key", lambda: None)
    minute = Minute(monkeypatch, watching)
    minute.run()
    assert 28 <= minute.waits <= 35
    monkeypatch.undo()
    watching.closed = False
    watching.close()


def test_looks_become_less_frequent_while_only_keys_change_that_are_not_watched(
    resting: LmdbMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    watched = {4, 5}

    def wait(timeout_s: float | None, *, changes: bool, rest_s: float) -> bool:
        rests.append(rest_s)
        if len(rests) in watched:
            node = resting.get("key")
            assert node is not None
            resting.put("key", b"w", node.version)
        else:
            resting.create(f"other{len(rests)}", b"v")
        resting.closed = len(rests) == 8
        return len(rests) != 7

    monkeypatch.setattr(resting.change_signal, "wait", wait)
    resting.keep()
    assert rests == [0.01, 0.02, 0.04, 0.04, 0.01, 0.01, 0.02, 0.02]


def test_failures_at_rest_are_tried_again_without_haste(
    resting: LmdbMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(5, "injected")

    monkeypatch.setattr(resting, "heartbeat", fail)
    minute = Minute(monkeypatch, resting)
    minute.run()
    assert 230 <= minute.waits <= 250
