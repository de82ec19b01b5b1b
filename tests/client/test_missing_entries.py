"""What bookies miss is recorded in the end, whatever fails meanwhile (C13)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from pybk.client import missing_entries
from pybk.client.missing_entries import PendingReports, Unrecorded
from pybk.client.remote_ledger import RemoteLedger
from pybk.errors import MetadataUnreachableError
from pybk.replication.messages import UnderReplicated
from tests.client.test_client_parts import remote
from tests.replication.driving import LEDGER, bookie
from tests.waiting import WAIT_S, wait_until

MISSING = UnderReplicated(bookie(1), 3)


class Store:
    """Records reports, but not those of the ledgers that fail."""

    def __init__(self) -> None:
        self.failing: set[Unrecorded] = set()
        self.tries = 0
        self.fails = 0
        self.recorded: list[tuple[RemoteLedger, UnderReplicated]] = []

    def record(self, ledger: RemoteLedger, report: UnderReplicated) -> None:
        self.tries += 1
        if self.fails or any(each.ledger is ledger for each in self.failing):
            self.fails -= bool(self.fails)
            raise MetadataUnreachableError("not now")
        self.recorded.append((ledger, report))


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def reporting(store: Store) -> Iterator[PendingReports]:
    found = PendingReports(store.record)
    yield found
    found.close(0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what failed wait longer than the test."""
    for name in ("_PAUSE_SECONDS", "_PAUSE_SECONDS_MAX"):
        monkeypatch.setattr(missing_entries, name, 3600.0)


def test_reports_of_a_ledger_are_recorded_in_order(store: Store, reporting: PendingReports) -> None:
    unrecorded = Unrecorded(remote())
    missing = [UnderReplicated(bookie(number), number) for number in range(50)]
    for each in missing:
        reporting.add(unrecorded, each)
    wait_until(lambda: not unrecorded and not reporting.waiting)
    assert [report for _, report in store.recorded] == missing


def test_failed_reports_are_tried_again_after_pauses_that_grow(
    store: Store, reporting: PendingReports, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []

    class News(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0)
            return False

    reporting.news = News()
    store.fails = 7
    unrecorded = Unrecorded(remote())
    reporting.add(unrecorded, MISSING)
    wait_until(lambda: not unrecorded and not reporting.waiting)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert store.recorded == [(unrecorded.ledger, MISSING)]
    assert [record.getMessage() for record in caplog.records] == [
        f"ledger {LEDGER}: what bookies miss is not recorded yet: not now"
    ]


@pytest.mark.usefixtures("patient")
def test_a_report_that_fails_does_not_hold_up_those_of_other_ledgers(store: Store, reporting: PendingReports) -> None:
    bad, good = Unrecorded(remote()), Unrecorded(remote())
    store.failing.add(bad)
    reporting.add(bad, MISSING)
    wait_until(lambda: store.tries)
    reporting.add(good, MISSING)
    wait_until(lambda: not good)
    assert store.recorded == [(good.ledger, MISSING)]
    assert len(bad) == 1


@pytest.mark.usefixtures("patient")
def test_closing_tries_failed_reports_at_once(store: Store, reporting: PendingReports) -> None:
    unrecorded = Unrecorded(remote())
    store.failing.add(unrecorded)
    reporting.add(unrecorded, MISSING)
    wait_until(lambda: store.tries)
    store.failing.clear()
    reporting.close(WAIT_S)
    assert store.recorded == [(unrecorded.ledger, MISSING)]


@pytest.mark.parametrize("hangs", [False, True])
def test_closing_says_how_much_is_not_recorded_and_ends_the_thread(
    store: Store, hangs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    goes_on = threading.Event()

    def record(ledger: RemoteLedger, report: UnderReplicated) -> None:
        if hangs:
            goes_on.wait()
        store.record(ledger, report)

    reporting = PendingReports(record)
    store.fails = 1 << 30
    for _ in range(2):
        reporting.add(Unrecorded(remote()), MISSING)
    reporting.close(0.3)
    assert "of 2 ledgers it may not be recorded" in caplog.text
    goes_on.set()
    (thread,) = reporting.thread.threads
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_before_metadata_are_written_a_report_is_tried_a_few_times(store: Store, reporting: PendingReports) -> None:
    pauses: list[float | None] = []

    class Closed(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return False

    reporting.closed = Closed()
    unrecorded = Unrecorded(remote())
    unrecorded.add(MISSING)
    store.fails = 2
    reporting.record_before_write(unrecorded)
    assert store.recorded == [(unrecorded.ledger, MISSING)]
    assert pauses == [0.1, 0.3]
    unrecorded.add(MISSING)
    store.fails = 3
    with pytest.raises(MetadataUnreachableError):
        reporting.record_before_write(unrecorded)
    assert len(unrecorded) == 1


def test_an_error_that_is_a_mistake_is_logged_with_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    mistakes = [ValueError("a mistake")]

    def record(_ledger: RemoteLedger, _report: UnderReplicated) -> None:
        if mistakes:
            raise mistakes.pop()

    reporting = PendingReports(record)
    unrecorded = Unrecorded(remote())
    reporting.add(unrecorded, MISSING)
    wait_until(lambda: not unrecorded)
    reporting.close(WAIT_S)
    assert "Traceback" in caplog.text
    assert "a mistake" in caplog.text
