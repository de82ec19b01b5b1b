"""Settings that are kept with a log: all who open it make its ledgers alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pybk import (
    CorruptError,
    DigestType,
    LedgerManager,
    Log,
    LogEnd,
    LogSettings,
    Namespace,
    NotEnoughBookiesError,
    StorageHint,
    UsageError,
    WriteAheadLog,
)
from pybk.manager.ledger_manager import backend_of
from pybk.streams.log_settings import SETTINGS_PROPERTY
from tests.cluster.inside import inside
from tests.waiting import WAIT_S, wait_until

PASSWORD = b"settings"
ONE = (1, 1, 1)


def quorums_of(manager: LedgerManager) -> dict[str, set[tuple[int, int, int]]]:
    """Return the quorums of all ledgers, by ledger type."""
    found: dict[str, set[tuple[int, int, int]]] = {}
    for each in backend_of(manager).ledgers():
        quorums = each.ensemble_size, each.write_quorum, each.ack_quorum
        found.setdefault(each.ledger_type, set()).add(quorums)
    return found


def test_all_who_open_a_log_use_the_quorums_that_it_was_made_with(tmp_path: Path) -> None:
    with inside(tmp_path, count=1) as cluster, cluster.connect() as first, cluster.connect() as second:
        Log.open(first, "log", password=PASSWORD, quorums=ONE).close()
        with Log.open(second, "log", password=PASSWORD) as log:
            assert log.settings() == LogSettings(quorums=ONE)
            with log.writer() as writer, log.subscribe("all", start=LogEnd.EARLIEST) as subscription:
                writer.append(b"one")
                record = subscription.read(timeout=WAIT_S)
                assert record is not None
                subscription.ack(record)
        assert quorums_of(second) == {"log": {ONE}, "cursor": {ONE}}


def test_a_write_ahead_log_keeps_its_quorums(tmp_path: Path) -> None:
    with inside(tmp_path, count=1) as cluster, cluster.connect() as first, cluster.connect() as second:
        with WriteAheadLog.open(first, password=PASSWORD, quorums=ONE, segment_bytes=7) as wal:
            wal.append(b"one")
        with WriteAheadLog.open(second, password=PASSWORD) as wal:
            wal.append(b"two")
            assert wal.settings() == LogSettings(quorums=ONE, segment_bytes=7)
        assert quorums_of(second) == {"wal": {ONE}}


def test_settings_are_changed_for_all(tmp_path: Path) -> None:
    with inside(tmp_path, count=1) as cluster, cluster.connect() as first, cluster.connect() as second:
        log = Log.open(first, "log", password=PASSWORD)
        with pytest.raises(NotEnoughBookiesError):
            log.writer()
        with Log.open(second, "log", password=PASSWORD) as other:
            other.set_settings(LogSettings(quorums=ONE))
        with log.writer() as writer:  # which was opened before the change
            writer.append(b"one")
        log.close()
        assert quorums_of(first) == {"log": {ONE}}


def test_a_cursor_that_is_open_uses_changed_settings_for_its_next_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pybk.streams.cursor.CURSOR_SEGMENT_BYTES", 1)
    with inside(tmp_path, count=2) as cluster, cluster.connect() as manager, ExitStack() as open_ones:
        Log.open(manager, "log", password=PASSWORD, quorums=(2, 2, 2)).close()
        log = open_ones.enter_context(Log.open(manager, "log", password=PASSWORD))
        writer = open_ones.enter_context(log.writer())
        subscription = open_ones.enter_context(log.subscribe("all", start=LogEnd.EARLIEST))
        assert quorums_of(manager)["cursor"] == {(2, 2, 2)}
        log.set_settings(LogSettings(quorums=ONE))

        def is_made_anew() -> bool:
            subscription.ack(writer.append(b"record"))
            return ONE in quorums_of(manager)["cursor"]

        wait_until(is_made_anew, "a ledger of the cursor with the changed quorums")


def test_an_argument_replaces_what_is_kept_for_one_opening(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster, cluster.connect() as manager:
        Log.open(manager, "log", password=PASSWORD, quorums=ONE).close()
        with Log.open(manager, "log", password=PASSWORD, quorums=(2, 2, 2)) as log, log.writer() as writer:
            writer.append(b"one")
            assert log.settings().quorums == ONE
        assert quorums_of(manager) == {"log": {(2, 2, 2)}}


def test_too_few_bookies_for_a_log_names_the_argument_of_a_log(tmp_path: Path) -> None:
    with inside(tmp_path, count=1) as cluster, cluster.connect() as manager:
        with Log.open(manager, "log", password=PASSWORD) as log, pytest.raises(NotEnoughBookiesError) as caught:
            log.writer()
        assert "quorums=(1, 1, 1)" in str(caught.value)


def closed_ones(log: Log) -> int:
    """Return how many segments of a log are closed."""
    return sum(each.last_seq is not None for each in log.segments())


def test_a_writer_rolls_by_the_settings_of_its_log(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path / "store") as manager, Log.open(manager, "log", password=PASSWORD) as log:
        log.set_settings(LogSettings(segment_records=1, storage_hints=frozenset({StorageHint.SSD})))
        with log.writer() as writer:
            for count in range(2, 5):
                writer.append(b"record")
                # A segment is listed before the writer switches to it, and the one before is closed after that.
                wait_until(lambda count=count: closed_ones(log) == count - 1)  # type: ignore[misc]
        assert {each.storage_hints for each in backend_of(manager).ledgers()} == {frozenset({StorageHint.SSD})}


def test_a_namespace_makes_logs_with_its_settings(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path / "store") as manager:
        with Namespace.open(manager, password=PASSWORD, digest_type=DigestType.XXH3) as logs:
            logs.log("log").close()
        with Log.open(manager, "log", password=PASSWORD) as log, log.writer() as writer:
            writer.append(b"one")
        assert {each.digest_type for each in backend_of(manager).ledgers()} == {DigestType.XXH3}


def test_settings_are_no_property_of_the_application(tmp_path: Path) -> None:
    with Log.open(tmp_path / "store", "log", password=PASSWORD) as log:
        assert dict(log.properties()) == {}
        log.set_settings(LogSettings(segment_bytes=1))
        log.set_properties({"mine": "1"})
        assert log.settings() == LogSettings(segment_bytes=1)
        with pytest.raises(UsageError, match="set_settings"):
            log.set_properties({SETTINGS_PROPERTY: "{}"})
        asyncio.run(log.set_settings_async(LogSettings()))
        assert dict(log.properties()) == {"mine": "1"}


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: LogSettings(quorums=3), "quorums is 3"),  # type: ignore[arg-type]
        (lambda: LogSettings(quorums=(1, 2, 3)), r"\(1, 2, 3\).*none larger than the one before.*\(3, 2, 2\)"),
        (lambda: LogSettings(quorums=(3, 0, None)), r"\(3, 0, None\).*at least 1"),
        (lambda: LogSettings(quorums=(None, 4, None)), r"\(None, 4, None\).*None stands for 3/3/2"),
        (lambda: LogSettings(quorums=(None, None, 4)), r"\(None, None, 4\).*none larger than the one before"),
        (lambda: LogSettings(quorums=(2, None, 3)), r"\(2, None, 3\).*none larger than the one before"),
        (lambda: LogSettings(segment_bytes=0), "segment_bytes"),
        (lambda: LogSettings(segment_age_s=0), "segment_age_s is 0"),
        (lambda: LogSettings(segment_records=0), "segment_records"),
        (lambda: LogSettings(digest_type="sha"), "digest_type"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_be_are_refused(make: Callable[[], Any], shown: str) -> None:
    with pytest.raises(UsageError, match=shown):
        make()


def test_impossible_quorums_that_an_older_version_kept_do_not_keep_a_log_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = LogSettings(quorums=(3, 2, 1), segment_records=7).as_properties()[SETTINGS_PROPERTY]
    properties = {SETTINGS_PROPERTY: kept.replace("3, 2, 1", "1, 2, 3").replace("3,2,1", "1,2,3")}
    assert properties[SETTINGS_PROPERTY] != kept
    assert LogSettings.kept_in(properties, "log") == LogSettings(segment_records=7)
    assert "'log' keeps the quorums (1, 2, 3), which are not valid" in caplog.text


def test_settings_come_back_from_their_property() -> None:
    full = LogSettings(
        quorums=(3, 3, 2),
        digest_type=DigestType.CRC32C,
        storage_hints=frozenset({StorageHint.HDD}),
        segment_bytes=1,
        segment_age_s=2.5,
        segment_records=3,
    )
    assert LogSettings.kept_in(full.as_properties(), "log") == full
    assert replace(full, quorums=ONE).over(LogSettings(segment_bytes=9)).segment_bytes == 1
    assert LogSettings(quorums=ONE).over(full) == replace(full, quorums=ONE)
    with pytest.raises(CorruptError, match="settings of log 'log'"):
        LogSettings.kept_in({SETTINGS_PROPERTY: '{"quorums": 1}'}, "log")
