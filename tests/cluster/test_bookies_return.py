"""Writers outlive bookies that go away and come back: those of ledgers within their patience, those of logs always."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pybk.errors import (
    EntryUnknownError,
    LedgerRecoveryError,
    LogFencedError,
    NotEnoughBookiesError,
    TooManyRequestsError,
    UnauthorizedError,
)
from pybk.manager.ledger_manager import LedgerManager
from pybk.streams import list_writer
from pybk.streams.format import Position
from pybk.streams.log import Log
from pybk.streams.log_record import LogRecord
from pybk.streams.log_writer import LogWriter
from pybk.streams.wal import WriteAheadLog
from tests.cluster.inside import Inside, inside
from tests.internals import hold_resumption, open_ledger_of, patient_logs, performed, wait_for_loss
from tests.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.sampled(one_in=5, using="tmp_path")

PASSWORD = b"p"
PATIENCE_S = 3.0


def test_appends_wait_for_the_only_bookie_to_return(tmp_path: Path) -> None:
    with inside(tmp_path, count=1) as cluster, cluster.connect() as client:
        writer = client.create_ledger(password=PASSWORD, ensemble_size=1)
        for turn in range(3):
            first = writer.append(b"before %d" % turn)
            cluster.bookies[0].close()
            futures = [writer.append_async(b"while it is away %d" % number) for number in range(20)]
            cluster.bookies[0] = cluster.open_bookie(0)
            assert [future.result(WAIT_S) for future in futures] == list(range(first + 1, first + 21))
        writer.close()
        with client.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
            assert reader.last_add_confirmed == 3 * 21 - 1
            assert [entry.entry_id for entry in reader] == list(range(3 * 21))


def test_appends_wait_for_other_bookies_to_register(tmp_path: Path) -> None:
    with inside(tmp_path, count=3) as cluster, cluster.connect() as client:
        writer = client.create_ledger(password=PASSWORD)
        writer.append(b"before")
        for bookie in cluster.bookies:
            bookie.close()
        future = writer.append_async(b"while they are away")
        for place in range(3, 5):
            cluster.open_bookie(place)
        assert future.result(WAIT_S) == 1
        assert writer.append(b"after") == 2


def test_a_writer_whose_patience_has_passed_says_what_a_retry_would_do(tmp_path: Path) -> None:
    """The append may be there, later ones are not, and no retry helps: the ledger's end is found by its recovery."""
    with inside(tmp_path, count=1) as cluster, cluster.connect(bookie_patience_seconds=0.3) as client:
        writer = client.create_ledger(password=PASSWORD, ensemble_size=1)
        writer.append(b"before")
        cluster.bookies[0].close()
        began = time.monotonic()
        with pytest.raises(NotEnoughBookiesError, match=r"waited 0\.3 s .*recover=True .*another ledger") as failed:
            writer.append(b"while it is away")
        assert time.monotonic() - began >= 0.3
        assert (failed.value.outcome_unknown, failed.value.retryable) == (True, False)
        cluster.open_bookie(0)
        wait_until(lambda: client.bookies())
        for call in (lambda: writer.append(b"again"), writer.force, writer.close):
            with pytest.raises(NotEnoughBookiesError) as later:
                call()
            assert (later.value.outcome_unknown, later.value.retryable) == (False, False)
        with client.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
            assert reader.last_add_confirmed == 0


def test_creating_a_ledger_does_not_wait_for_bookies_and_can_be_tried_again(tmp_path: Path) -> None:
    with inside(tmp_path, count=1) as cluster, cluster.connect() as client:
        with pytest.raises(NotEnoughBookiesError) as refused:
            client.create_ledger(password=PASSWORD, ensemble_size=2)
        assert (refused.value.outcome_unknown, refused.value.retryable) == (False, True)
        cluster.open_bookie(1)
        client.create_ledger(password=PASSWORD, ensemble_size=2).close()


# ---- logs ------------------------------------------------------------------------------------------------------------


@contextmanager
def short_patience(directory: Path, count: int = 1) -> Iterator[tuple[Inside, LedgerManager]]:
    """Run a cluster, and a client whose ledgers, but not its logs, end soon when bookies do not answer."""
    with (
        inside(directory, count=count) as cluster,
        cluster.connect(bookie_patience_seconds=PATIENCE_S) as client,
        patient_logs(),
    ):
        yield cluster, client


def lose_segment(cluster: Inside, writer: LogWriter, place: int = 0) -> None:
    """Let a bookie come back only after the segment's ledger is lost."""
    wait_for_loss(writer)
    cluster.bookies[place] = cluster.open_bookie(place)


def read_all(
    client: LedgerManager, name: str, quorums: tuple[int, int, int] = (1, 1, 1)
) -> list[tuple[Position, bytes]]:
    log = Log.open(client, name, password=PASSWORD, quorums=quorums)
    with log.reader() as reader:
        return [(record.position, record.data) for record in reader]


def test_a_log_continues_in_another_segment_with_the_same_numbers(tmp_path: Path) -> None:
    """None of the records that waited is lost or doubled, and each has the position that its future says."""
    with short_patience(tmp_path) as (cluster, client):
        log = Log.open(client, "log", password=PASSWORD, quorums=(1, 1, 1))
        writer = log.writer()
        given = []
        for turn in range(3):
            given.append((writer.append(b"%d before" % turn), b"%d before" % turn))
            cluster.bookies[0].close()
            futures = [writer.append_async(b"%d.%d" % (turn, number)) for number in range(50)]
            many = writer.append_many_async([b"%d in one %d" % (turn, number) for number in range(7)])
            lose_segment(cluster, writer)
            given += [(future.result(WAIT_S), b"%d.%d" % (turn, at)) for at, future in enumerate(futures)]
            given += [(each, b"%d in one %d" % (turn, at)) for at, each in enumerate(many.result(WAIT_S))]
        given.append((writer.append(b"after"), b"after"))
        assert [position.seq for position, _ in given] == list(range(len(given)))
        assert {position.segment for position, _ in given} == {1, 2, 3, 4}
        writer.close()
        assert read_all(client, "log") == given


def test_records_that_the_recovered_segment_holds_are_not_appended_again(tmp_path: Path) -> None:
    """One bookie of two has them, and the recovery copies them to the other: they are acknowledged where they are."""
    with short_patience(tmp_path, 2) as (cluster, client):
        log = Log.open(client, "log", password=PASSWORD, quorums=(2, 2, 2))
        writer = log.writer()
        given = [(writer.append(b"before"), b"before")]
        cluster.bookies[1].close()
        futures = [writer.append_async(b"%d" % number) for number in range(20)]
        lose_segment(cluster, writer, 1)
        given += [(future.result(WAIT_S), b"%d" % at) for at, future in enumerate(futures)]
        given.append((writer.append(b"after"), b"after"))
        writer.close()
        assert read_all(client, "log", (2, 2, 2)) == given
        assert [position.segment for position, _ in given] == [1] * 21 + [2]


def test_a_transaction_that_was_cut_follows_as_a_whole(tmp_path: Path) -> None:
    """Its entries alternate between two bookies, so that the recovered segment has the first of them alone."""
    with short_patience(tmp_path, 2) as (cluster, client):
        log = Log.open(client, "log", password=PASSWORD, quorums=(2, 1, 1))
        writer = log.writer()
        given = [(writer.append(b"0"), b"0")]
        ensemble = client.ledger_metadata(open_ledger_of(log)).fragments[0].ensemble
        away = int(ensemble[1].bookie_id[-1])
        cluster.bookies[away].close()
        many = [b"%d" % number * 30_000 for number in range(12)]
        future = writer.append_many_async(many)
        lose_segment(cluster, writer, away)
        given += list(zip(future.result(WAIT_S), many, strict=True))
        writer.close()
        assert read_all(client, "log", (2, 1, 1)) == given
        assert {position.segment for position, _ in given[1:]} == {2}


def test_a_log_whose_bookies_stay_away_says_so_and_continues_with_a_later_append(tmp_path: Path) -> None:
    """What had waited may be there or not; the numbers of what is not are given again, and a retry succeeds."""
    with inside(tmp_path, count=1) as cluster, cluster.connect(bookie_patience_seconds=PATIENCE_S) as client:
        log = Log.open(client, "log", password=PASSWORD, quorums=(1, 1, 1))
        writer = log.writer()
        given = [(writer.append(b"before"), b"before")]
        cluster.bookies[0].close()
        futures = [writer.append_async(b"lost") for _ in range(3)]
        for future in futures:
            with pytest.raises(NotEnoughBookiesError, match="continues with the next append") as failed:
                future.result(WAIT_S)
            assert (failed.value.outcome_unknown, failed.value.retryable) == (True, True)
        with pytest.raises(TooManyRequestsError, match="continues in another ledger"):
            _ = writer.append_async(b"at once", wait=False)
        with pytest.raises(NotEnoughBookiesError) as refused:
            writer.append(b"again")
        assert (refused.value.outcome_unknown, refused.value.retryable) == (False, True)
        cluster.open_bookie(0)
        with patient_logs():
            given.append((writer.append(b"again"), b"again"))
        writer.close()
        assert read_all(client, "log") == given
        assert [position.seq for position, _ in given] == [0, 1]


@pytest.mark.parametrize("kind", ["log", "write-ahead log"])
def test_appends_that_never_wait_continue_after_the_patience_has_passed(tmp_path: Path, kind: str) -> None:
    """Each refused append has the bookies looked for in the background, also when that was given up before."""
    with inside(tmp_path, count=1) as cluster, cluster.connect(bookie_patience_seconds=0.5) as client:
        writer: LogWriter | WriteAheadLog
        if kind == "log":
            writer = Log.open(client, "log", password=PASSWORD, quorums=(1, 1, 1)).writer()
        else:
            writer = WriteAheadLog.open(client, "log", password=PASSWORD, quorums=(1, 1, 1))
        writer.append(b"before")
        cluster.bookies[0].close()
        with pytest.raises(NotEnoughBookiesError):
            writer.append_async(b"lost").result(WAIT_S)
        refused_until = time.monotonic() + 1.5
        while time.monotonic() < refused_until:
            with pytest.raises(TooManyRequestsError, match="continues in another ledger"):
                _ = writer.append_async(b"refused", wait=False)
            time.sleep(0.01)
        cluster.open_bookie(0)

        def goes_through() -> bool:
            try:
                future = writer.append_async(b"at once", wait=False)
            except TooManyRequestsError:
                return False
            future.result(WAIT_S)
            return True

        wait_until(goes_through)
        writer.close()


def test_a_close_appends_what_was_lost_before_it_closes_the_log(tmp_path: Path) -> None:
    with short_patience(tmp_path) as (cluster, client):
        log = Log.open(client, "log", password=PASSWORD, quorums=(1, 1, 1))
        writer = log.writer()
        writer.append(b"before")
        cluster.bookies[0].close()
        future = writer.append_async(b"while it is away")
        lose_segment(cluster, writer)
        writer.close()
        assert read_all(client, "log")[1:] == [(future.result(0), b"while it is away")]


def test_a_log_whose_lost_segment_another_client_fenced_ends(tmp_path: Path) -> None:
    """No silent zombie: a client that fences a segment ends the writer, also if the bookie comes back."""
    with short_patience(tmp_path) as (cluster, client), cluster.connect() as other:
        log = Log.open(client, "log", password=PASSWORD, quorums=(1, 1, 1))
        writer = log.writer()
        writer.append(b"before")
        cluster.bookies[0].close()
        future = writer.append_async(b"while it is away")
        with pytest.raises(LedgerRecoveryError):
            other.open_ledger(open_ledger_of(log), password=PASSWORD, recover=True)
        with pytest.raises(LogFencedError) as fenced:
            future.result(WAIT_S)
        assert fenced.value.outcome_unknown
        cluster.open_bookie(0)
        with pytest.raises(LogFencedError):
            writer.append(b"after")
        with pytest.raises(LogFencedError):
            writer.close()


def test_a_log_that_was_stolen_while_its_segment_was_lost_ends(tmp_path: Path) -> None:
    with short_patience(tmp_path) as (cluster, client), cluster.connect() as other:
        log = Log.open(client, "log", password=PASSWORD, quorums=(1, 1, 1))
        writer = log.writer()
        writer.append(b"before")
        with hold_resumption(writer):
            cluster.bookies[0].close()
            future = writer.append_async(b"while it is away")
            lose_segment(cluster, writer)
            stolen = Log.open(other, "log", password=PASSWORD, quorums=(1, 1, 1)).writer(steal=True)
        with pytest.raises(LogFencedError):
            future.result(WAIT_S)
        for _ in range(2):
            with pytest.raises(LogFencedError):
                _ = writer.append_async(b"at once", wait=False)
        assert stolen.append(b"of the new owner").seq == 1
        with pytest.raises(LogFencedError):
            writer.append(b"after")
        stolen.close()
        assert [data for _, data in read_all(client, "log")] == [b"before", b"of the new owner"]


def test_a_replacement_that_fails_is_not_begun_again_by_each_append_that_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_perform: object, _step: object) -> None:
        raise UnauthorizedError("refused")

    def failures() -> int:
        return sum("cannot continue in another ledger" in each.getMessage() for each in caplog.records)

    with short_patience(tmp_path) as (cluster, client):
        log = Log.open(client, "log", password=PASSWORD, quorums=(1, 1, 1))
        writer = log.writer()
        writer.append(b"before")
        cluster.bookies[0].close()
        with performed(refuse), monkeypatch.context() as patched:
            patched.setattr(list_writer, "REPAIR_SECONDS", 1000 * WAIT_S)
            future = writer.append_async(b"while it is away")
            with pytest.raises(UnauthorizedError):
                future.result(WAIT_S)
            wait_until(failures)
            for _ in range(20):
                with pytest.raises(TooManyRequestsError, match="continues in another ledger"):
                    _ = writer.append_async(b"at once", wait=False)
                time.sleep(0.01)
            assert failures() == 1
        cluster.open_bookie(0)
        assert writer.append(b"after").seq == 1
        writer.close()


def test_a_write_ahead_log_and_a_subscription_continue(tmp_path: Path) -> None:
    with (
        short_patience(tmp_path) as (cluster, client),
        WriteAheadLog.open(client, "wal", password=PASSWORD, quorums=(1, 1, 1)) as wal,
    ):
        log = Log.open(client, "log", password=PASSWORD, quorums=(1, 1, 1))
        writer = log.writer()
        writer.append_many([b"%d" % number for number in range(10)])
        with log.subscribe("s", start=0) as subscription:
            assert None not in [subscription.read(WAIT_S) for _ in range(6)]
            first = wal.append(b"before")
            cluster.bookies[0].close()
            futures = [wal.append_async(b"while it is away"), subscription.ack_async(range(5))]
            time.sleep(1.5 * PATIENCE_S)
            cluster.open_bookie(0)
            assert [future.result(WAIT_S) for future in futures] == [first + 1, 5]
            assert wal.append(b"after") == first + 2
            subscription.ack(5)
        with log.subscribe("s") as again:
            found = again.read(WAIT_S)
            assert found is not None
            assert found.data == b"6"


def test_an_acknowledgement_that_waits_for_bookies_keeps_no_other_call_waiting(tmp_path: Path) -> None:
    with short_patience(tmp_path) as (cluster, client):
        log = Log.open(client, "log", password=PASSWORD, quorums=(1, 1, 1))
        log.writer().append_many([b"%d" % number for number in range(10)])
        with log.subscribe("s", start=0) as subscription:
            assert len(subscription.read_many(6, WAIT_S)) == 6
            cluster.bookies[0].close()
            lost = subscription.ack_async(0)
            wait_for_loss(subscription)
            waiting = threading.Thread(target=subscription.ack, args=(1,))
            waiting.start()
            time.sleep(0.5)  # so that it has begun to look for the bookies
            assert subscription.nack(range(2, 5)) == 3
            assert waiting.is_alive()
            cluster.open_bookie(0)
            waiting.join(WAIT_S)
            assert lost.result(WAIT_S) == 1
            assert subscription.first_unacked() == 2


@pytest.mark.parametrize("form", ["sync", "async"])
def test_a_read_with_a_timeout_waits_for_bookies(tmp_path: Path, form: str) -> None:
    with inside(tmp_path, count=1) as cluster, cluster.connect() as client:
        log = Log.open(client, "log", password=PASSWORD, quorums=(1, 1, 1))
        log.writer().append_many([b"%d" % number for number in range(10)])
        with log.subscribe("s", start=0) as subscription:

            def read(timeout: float | None) -> LogRecord | None:
                if form == "sync":
                    return subscription.read(timeout)
                return asyncio.run(subscription.read_async(timeout))

            cluster.bookies[0].close()
            for timeout in (None, 0.0, 2.0):
                began = time.monotonic()
                with pytest.raises((EntryUnknownError, LedgerRecoveryError)) as away:
                    read(timeout)
                assert away.value.retryable
                assert time.monotonic() - began >= (timeout or 0.0) / 2  # another look may not have ended in time
            back = threading.Timer(1.0, cluster.open_bookie, (0,))
            back.start()
            found = read(WAIT_S)
            back.join()
            assert found is not None
            assert found.data == b"0"
