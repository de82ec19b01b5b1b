"""How a named log ends: closed, sealed, rolled or truncated in signal handlers, after interrupts, by the collector."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pybk import ClosedError, LedgerManager, Log, LogFencedError, Namespace, StoreLockedError
from pybk.manager.local_backend import LocalWatch
from pybk.streams import log_reader
from pybk.streams.record_reader import RecordReader
from tests.dropping import drop_is_warned_of
from tests.interrupting import interrupted_at
from tests.sampling import places
from tests.storage.real_store import python
from tests.waiting import PROCESS_S, WAIT_S, wait_until

FILES = ("pybk/streams/",)

PROGRAM = """
import random, signal, sys
from pybk import LedgerManager, Log, LogEnd
from pybk.errors import ClosedError, IllegalOperationError, LogSealedError

class Leave(Exception):
    pass

def handler(*_):
    global outcome
    try:
        calls[what]()
        outcome = "done"
    except IllegalOperationError as error:
        assert "main program" in str(error), error
        outcome = "refused"
        raise Leave from None

signal.signal(signal.SIGALRM, handler)
chance = random.Random(7)
outcomes = []
with LedgerManager.open(sys.argv[1]) as manager:
    for number in range(int(sys.argv[2])):
        log = Log.open(manager, str(number), insecure=True)
        writer = log.writer(segment_bytes=1000)
        subscription = log.subscribe("sub", start=LogEnd.EARLIEST)
        calls = {
            "log.close": log.close,
            "writer.close": writer.close,
            "seal": writer.seal,
            "roll": writer.roll,
            "truncate": lambda: log.truncate(0),
            "subscription.close": subscription.close,
        }
        what = list(calls)[number % len(calls)]
        outcome, acknowledged, acked = "", 0, 0
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0001, 0.03))
        try:
            while not outcome:
                writer.append(b"%d" % acknowledged)
                acknowledged += 1
                record = subscription.read()
                subscription.ack(record)
                acked = record.seq + 1
                sum(range(20_000))
        except (Leave, ClosedError, LogSealedError):
            pass
        log.close()
        with Log.open(manager, str(number), insecure=True) as again:
            found = [record.data for record in again.reader(0)]
            assert found[:acknowledged] == [b"%d" % n for n in range(acknowledged)], (number, outcome)
            assert len(found) <= acknowledged + 1
            with again.subscribe("sub") as subscription:
                assert subscription.first_unacked() in (acked, acked + 1)
        outcomes.append(outcome)
assert set(outcomes) <= {"done", "refused"}, outcomes
print(len(outcomes), "rounds")
"""


@pytest.mark.sampled(one_in=3, group="handlers")
def test_a_call_of_a_real_signal_handler_never_hangs_and_loses_nothing(tmp_path: Path) -> None:
    process = python(PROGRAM, tmp_path, "48")
    output, _ = process.communicate(timeout=PROCESS_S)
    assert (process.returncode, output.splitlines()[-1:]) == (0, ["48 rounds"]), output


@pytest.mark.sampled(one_in=3, group="any line")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("what", ["Log.close", "LogWriter.close", "LogWriter.seal"])
def test_an_interrupted_close_is_completed_by_another(tmp_path: Path, what: str) -> None:
    with LedgerManager.open(tmp_path) as manager:
        following, line, fired = places(what, 17, 3), 0, True
        while fired:
            line = next(following)
            log = Log.open(manager, str(line), insecure=True)
            writer, reader = log.writer(), log.reader()
            writer.append(b"a")
            call: Callable[[], object] = {
                "Log.close": log.close,
                "LogWriter.close": writer.close,
                "LogWriter.seal": writer.seal,
            }[what]
            fired = interrupted_at(line, FILES, call)
            writer.close()
            log.close()
            with pytest.raises(ClosedError):
                reader.read()
            with Log.open(manager, str(line), insecure=True) as again:
                assert [record.data for record in again.reader()] == [b"a"]
                assert again.is_sealed() or what != "LogWriter.seal" or fired
                if not again.is_sealed():
                    assert all(each.closed_ns for each in again.segments()), f"line event {line}"
                    again.writer().close()
        assert line > 100, "nothing was traced"


def drop_one(log: Log) -> None:
    log.writer().append(b"a")
    gc.collect()


def test_a_dropped_writer_is_closed_with_a_warning(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager, Log.open(manager, "a", insecure=True) as log:
        with drop_is_warned_of("log 'a' was dropped without close"):
            drop_one(log)
        with log.writer(wait=WAIT_S):
            assert [bool(each.closed_ns) for each in log.segments()] == [True, False]
        assert [record.data for record in log.reader()] == [b"a"]


def test_the_collector_takes_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs inside any call, which may hold those that a cancelled watch takes."""
    cancelled: list[threading.Thread] = []
    cancel = LocalWatch.cancel

    def noted(watch: LocalWatch) -> None:
        cancel(watch)
        cancelled.append(threading.current_thread())

    with LedgerManager.open(tmp_path) as manager, Log.open(manager, "a", insecure=True) as log:
        writer = log.writer()
        monkeypatch.setattr(LocalWatch, "cancel", noted)
        del writer
        wait_until(lambda: gc.collect() >= 0 and cancelled)
        assert threading.current_thread() not in cancelled


def test_a_dropped_log_with_its_own_store_is_closed(tmp_path: Path) -> None:
    with drop_is_warned_of():
        drop_one(Log.open(tmp_path, "a", insecure=True))
    gc.collect()

    def reopened() -> Log | None:
        with suppress(StoreLockedError):
            return Log.open(tmp_path, "a", insecure=True)
        return None

    again = wait_until(reopened)
    assert again is not None
    with again as log:
        assert [record.data for record in log.reader()] == [b"a"]


def test_a_writer_that_was_closed_is_dropped_in_silence(tmp_path: Path) -> None:
    with Log.open(tmp_path, "a", insecure=True) as log, warnings.catch_warnings():
        warnings.simplefilter("error")
        log.writer().close()
        log.seal()
        gc.collect()


def test_a_writer_that_comes_too_late_is_closed(tmp_path: Path) -> None:
    """It waited for a live one to let go of the log, which was closed here meanwhile."""
    with LedgerManager.open(tmp_path) as manager, Log.open(manager, "a", insecure=True) as other:
        log, first = Log.open(manager, "a", insecure=True), other.writer()
        ended: list[BaseException] = []

        def wait_for_writer() -> None:
            try:
                log.writer(wait=WAIT_S)
            except ClosedError as error:
                ended.append(error)

        thread = threading.Thread(target=wait_for_writer)
        thread.start()
        log.close()
        first.close()
        thread.join(WAIT_S)
        assert len(ended) == 1
        other.writer().close()


def test_a_reader_that_is_closed_while_it_skips_stays_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Log.open(tmp_path, "a", insecure=True) as log, log.writer() as writer, log.reader() as reader:
        writer.append(b"a")
        writer.roll()
        writer.append(b"b")
        log.truncate(1)

        def opened_late(*arguments: Any) -> RecordReader:
            found = RecordReader(*arguments)
            reader.close()
            return found

        monkeypatch.setattr(log_reader, "RecordReader", opened_late)
        with pytest.raises(ClosedError):
            reader.read()


def test_a_fenced_writer_does_not_keep_the_others_open(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager:
        log = Log.open(manager, "a", insecure=True)
        first = log.writer()
        second = log.writer(steal=True)
        with pytest.raises(LogFencedError):
            first.append(b"x")
        with pytest.raises(LogFencedError):
            log.close()
        log.close()
        with pytest.raises(ClosedError):
            second.append(b"y")
        with Log.open(manager, "a", insecure=True) as again:
            again.writer().close()


def test_a_namespace_closes_its_logs_again_after_an_interrupt(tmp_path: Path) -> None:
    line, fired = 0, True
    files = tuple(f"pybk/streams/{name}" for name in ("namespace", "named_list", "log"))
    with LedgerManager.open(tmp_path) as manager:
        while fired:
            namespace = Namespace.open(manager, insecure=True)
            log = namespace.log("a")
            writer = log.writer(wait=WAIT_S)
            fired = interrupted_at(line, files, namespace.close)
            namespace.close()
            with pytest.raises(ClosedError):
                writer.append(b"x")
            line += 1
    assert line > 5, "nothing was traced"
