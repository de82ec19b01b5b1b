"""How a write-ahead log ends: closed or sealed in signal handlers, after interrupts, by the collector; and promoted."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest

from pybk import LedgerManager, UsageError, WriteAheadLog
from pybk.errors import IllegalOperationError, LogLockedError
from pybk.manager.ledger_manager import create_when_full
from pybk.streams import log_settings
from tests.dropping import drop_is_warned_of
from tests.interrupting import interrupted_at
from tests.sampling import places
from tests.storage.real_store import python
from tests.waiting import PROCESS_S, wait_until

FILES = ("pybk/streams/",)

PROGRAM = """
import random, signal, sys
from pybk import LedgerManager, WriteAheadLog
from pybk.errors import ClosedError, IllegalOperationError

class Leave(Exception):
    pass

def handler(*_):
    global outcome
    try:
        getattr(wal, what)()
        outcome = "done"
    except IllegalOperationError as error:
        assert "main program" in str(error), error
        outcome = "refused"
        raise Leave from None

signal.signal(signal.SIGALRM, handler)
outcomes = []
chance = random.Random(7)
with LedgerManager.open(sys.argv[1]) as manager:
    for number in range(int(sys.argv[2])):
        what = ("close", "seal", "roll")[number % 3]
        outcome = ""
        acknowledged = 0
        wal = WriteAheadLog.open(manager, str(number), insecure=True, segment_bytes=1000)
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0001, 0.02))
        try:
            while not outcome:
                acknowledged = wal.append(b"%d" % (acknowledged + 1))
                sum(range(20_000))
        except (Leave, ClosedError):
            pass
        wal.close()
        with WriteAheadLog.open(manager, str(number), mode="r", insecure=True) as again:
            found = [record.data for record in again.replay()]
        assert found[:acknowledged] == [b"%d" % n for n in range(1, acknowledged + 1)], (number, outcome)
        assert len(found) <= acknowledged + 1
        outcomes.append(outcome)
assert set(outcomes) <= {"done", "refused"}, outcomes
print(len(outcomes), "rounds")
"""


@pytest.mark.sampled(one_in=3, group="handlers")
def test_a_call_of_a_real_signal_handler_never_hangs_and_loses_nothing(tmp_path: Path) -> None:
    process = python(PROGRAM, tmp_path, "30")
    output, _ = process.communicate(timeout=PROCESS_S)
    assert (process.returncode, output.splitlines()[-1:]) == (0, ["30 rounds"]), output


@pytest.mark.sampled(one_in=3, group="any line")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("what", ["close", "seal"])
def test_an_interrupted_close_is_completed_by_another(tmp_path: Path, what: str) -> None:
    with LedgerManager.open(tmp_path) as manager:
        following, line, fired = places(what, 11, 3), 0, True
        while fired:
            line = next(following)
            wal = WriteAheadLog.open(manager, str(line), insecure=True)
            wal.append(b"a")
            fired = interrupted_at(line, FILES, getattr(wal, what))
            wal.close()
            with WriteAheadLog.open(manager, str(line), mode="r", insecure=True) as reader:
                assert [record.data for record in reader.replay()] == [b"a"]
            if what == "close":
                with WriteAheadLog.open(manager, str(line), insecure=True) as again:
                    assert again.recovery is not None
                    assert not again.recovery.unclean, f"line event {line}"
        assert line > 100, "nothing was traced"


def drop_one(manager: LedgerManager) -> None:
    WriteAheadLog.open(manager, "a", insecure=True).append(b"a")
    gc.collect()


def test_a_dropped_log_is_closed_with_a_warning(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager:
        with drop_is_warned_of():
            drop_one(manager)
        with WriteAheadLog.open(manager, "a", insecure=True, wait=60) as wal:
            assert wal.recovery is not None
            assert not wal.recovery.unclean
            assert [record.data for record in wal.replay()] == [b"a"]


def test_a_log_that_was_closed_is_dropped_in_silence(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager, warnings.catch_warnings():
        warnings.simplefilter("error")
        WriteAheadLog.open(manager, "a", insecure=True).close()
        gc.collect()


def test_a_promotion_whose_application_fails_is_continued(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager:
        with WriteAheadLog.open(manager, "a", insecure=True) as primary:
            primary.append_many([b"1", b"2", b"3", b"4"])
        standby = WriteAheadLog.open(manager, "a", mode="r", insecure=True)
        applied: list[bytes] = []

        def fail_at_3(record: object) -> None:
            data = getattr(record, "data", b"")
            if data == b"3" and len(applied) == 2:
                applied.append(b"failed")
                raise ZeroDivisionError
            applied.append(data)

        with pytest.raises(ZeroDivisionError):
            standby.promote(fail_at_3)
        assert standby.append(b"5") == 5, "it is the writer already"
        standby.promote(fail_at_3)
        assert applied == [b"1", b"2", b"failed", b"3", b"4"]
        with pytest.raises(IllegalOperationError):
            standby.promote()
        standby.close()


def test_a_promotion_that_is_refused_is_repeated(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager:
        primary = WriteAheadLog.open(manager, "a", insecure=True)
        primary.append_many([b"1", b"2"])
        standby = WriteAheadLog.open(manager, "a", mode="r", insecure=True)
        for applied in ((0, 3), (1, 2), (0, 1 << 62), (0,), 5, (0, -1), (True, 1), "ab"):
            with pytest.raises(UsageError):
                standby.promote(applied=applied)  # type: ignore[arg-type]
        with pytest.raises(LogLockedError):
            standby.promote(applied=(0, 1))
        assert primary.append(b"3") == 3, "nothing was fenced"
        primary.close()
        found: list[int] = []
        standby.promote(lambda record: found.append(record.lsn), applied=(0, 1))
        assert found == [2, 3]
        standby.close()


def test_a_roll_that_fails_is_tried_again_without_traffic(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LedgerManager.open(tmp_path) as manager:
        wal = WriteAheadLog.open(manager, "a", insecure=True, segment_bytes=100)
        failures = [OSError("no space"), OSError("no space")]

        def create(*arguments: Any, **options: Any) -> object:
            if failures:
                raise failures.pop()
            return create_when_full(*arguments, **options)

        monkeypatch.setattr(log_settings, "create_when_full", create)
        wal.append(bytes(200))
        wait_until(lambda: len(wal.ledgers()) == 2 and not failures)
        assert caplog.text.count("could not roll") == 2
        assert wal.append(b"b") == 2
        wal.close()
