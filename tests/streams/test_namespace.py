"""The namespace of named logs: created, listed, renamed, deleted and watched, in a store and in a cluster."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from pybk import (
    ClosedError,
    IllegalOperationError,
    LedgerManager,
    Log,
    LogEnd,
    LogExistsError,
    LogLockedError,
    LogRecord,
    LogSealedError,
    Namespace,
    NoSuchLogError,
    NotEnoughBookiesError,
    PybkError,
    StorageFullError,
    StorageRefusedError,
    Subscription,
    UnauthorizedError,
    UsageError,
    WriteAheadLog,
)
from pybk.manager.ledger_manager import backend_of
from pybk.replication import recovery
from tests.cluster.inside import inside
from tests.internals import patient_logs
from tests.waiting import wait_until

PASSWORD = b"log"


@pytest.fixture
def logs(manager: LedgerManager) -> Iterator[Namespace]:
    with Namespace.open(manager, password=PASSWORD) as logs:
        yield logs


def filled(logs: Namespace, name: str, *data: bytes) -> None:
    with logs.log(name) as log, log.writer() as writer:
        for each in data:
            writer.append(each)


def data_of(logs: Namespace, name: str) -> list[bytes]:
    with logs.log(name, create=False) as log:
        return [record.data for record in log.reader()]


class Seen:
    """What a watch reported."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.calls: list[tuple[list[str], list[str]]] = []

    def __call__(self, added: list[str], removed: list[str]) -> None:
        self.calls.append((added, removed))
        assert self.names.isdisjoint(added), "a name is added twice"
        assert self.names.issuperset(removed), "a name is removed that was not there"
        self.names = (self.names | set(added)) - set(removed)


# ---- create, open, list, delete --------------------------------------------------------------------------------------


def test_logs_are_created_once_listed_by_prefix_and_deleted(logs: Namespace, manager: LedgerManager) -> None:
    assert logs.names() == []
    with logs.create("orders/eu") as log:
        assert len(log) == 0
    with pytest.raises(LogExistsError, match="orders/eu"):
        logs.create("orders/eu")
    filled(logs, "orders/us", b"one")
    filled(logs, "other", b"two")
    assert logs.names() == ["orders/eu", "orders/us", "other"]
    assert logs.names("orders/") == Log.names(manager, "orders/") == ["orders/eu", "orders/us"]
    assert WriteAheadLog.names(manager) == []
    assert (logs.exists("other"), logs.exists("absent")) == (True, False)
    with pytest.raises(NoSuchLogError):
        logs.log("absent", create=False)
    logs.delete("other")
    with pytest.raises(NoSuchLogError):
        logs.delete("other")
    assert logs.names() == ["orders/eu", "orders/us"]
    assert data_of(logs, "orders/us") == [b"one"]


def test_wrong_arguments_are_named(logs: Namespace, manager: LedgerManager) -> None:
    log = logs.create("log")
    for call, text in (
        (lambda: logs.names(5), "prefix is 5; it takes a string"),  # type: ignore[arg-type]
        (lambda: WriteAheadLog.names(manager, 5), "prefix is 5"),  # type: ignore[arg-type]
        (lambda: logs.watch(5), "callback is 5; it takes a function"),  # type: ignore[arg-type]
        (lambda: logs.delete("log", steal="yes"), "steal is 'yes'"),  # type: ignore[arg-type]
        (lambda: log.subscribe(5), "the name of a subscription takes a string, not int"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match=text):
            call()


def test_a_log_gets_its_password_by_its_first_writer(logs: Namespace, manager: LedgerManager) -> None:
    log = logs.create("log")
    with Namespace.open(manager, password=b"another") as others, others.log("log") as other:
        other.writer().append(b"one")
        with pytest.raises(UnauthorizedError):
            logs.log("log")
        with pytest.raises(UnauthorizedError):
            log.first()


def test_threads_that_create_one_log_make_one(logs: Namespace) -> None:
    made: list[str] = []

    def create() -> None:
        try:
            logs.create("log").close()
        except LogExistsError:
            return
        made.append("made")

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["made"]


def test_a_directory_is_its_own_and_a_reader_changes_nothing(tmp_path: Path) -> None:
    with Namespace.open(tmp_path / "store", password=PASSWORD) as logs:
        filled(logs, "log", b"one")
        with Namespace.open(tmp_path / "store", mode="r", password=PASSWORD) as reading:
            assert data_of(reading, "log") == [b"one"]
            for change in (
                lambda: reading.create("x"),
                lambda: reading.delete("log"),
                lambda: reading.rename("log", "x"),
            ):
                with pytest.raises(IllegalOperationError, match="reading"):
                    change()
        log = logs.log("log")
        writer = log.writer()
        writer.append(b"two")
    with pytest.raises(ClosedError):
        logs.names()
    with pytest.raises(ClosedError):
        log.first()
    with Namespace.open(tmp_path / "store", password=PASSWORD) as logs:
        assert data_of(logs, "log") == [b"one", b"two"]


def test_a_log_that_is_made_again_is_another(logs: Namespace) -> None:
    old = logs.create("log")
    with old.writer() as writer:
        writer.append(b"old")
    reader = old.reader()
    logs.delete("log")
    filled(logs, "log", b"new", b"newer")
    for use in (old.first, old.writer, lambda: reader.read(timeout=0)):
        with pytest.raises(NoSuchLogError):
            use()
    assert data_of(logs, "log") == [b"new", b"newer"]


def left_of(manager: LedgerManager) -> list[object]:
    """Return what there is of logs, their subscriptions and their ledgers."""
    backend = backend_of(manager)
    return [*backend.record_names("logs/"), *backend.record_names("cursors/"), *manager.list_ledgers()]


def test_a_log_in_use_is_deleted_by_force_alone(logs: Namespace, manager: LedgerManager) -> None:
    filled(logs, "log", b"one")
    with logs.log("log") as log:
        writer = log.writer()
        with pytest.raises(LogLockedError, match=r"log 'log' has a live writer.*delete the log with steal=True"):
            logs.delete("log")
        writer.append(b"two")
        writer.close()
        subscription = log.subscribe("sub", start=LogEnd.EARLIEST)
        with pytest.raises(LogLockedError, match=r"subscription 'sub' of log 'log' has a live owner"):
            logs.delete("log")
        subscription.ack(0)
        assert data_of(logs, "log") == [b"one", b"two"]
        writer = log.writer()
        logs.delete("log", steal=True)
        for use in (lambda: writer.append(b"lost"), writer.roll, lambda: subscription.ack(1), log.first):
            with pytest.raises(NoSuchLogError, match="'log'"):
                use()
        for handle in (writer, subscription):
            with pytest.raises(NoSuchLogError):
                handle.close()
    assert left_of(manager) == []


def test_what_reads_a_log_learns_that_it_was_deleted(logs: Namespace) -> None:
    filled(logs, "log", b"one")
    errors: list[str] = []
    seen: list[LogRecord] = []

    def until_it_ends(records: Iterable[LogRecord]) -> None:
        try:
            seen.extend(records)
        except PybkError as error:
            errors.append(type(error).__name__)

    def read_on(subscription: Subscription) -> Iterator[LogRecord]:
        while record := subscription.read():
            yield record

    with logs.log("log") as log:
        follower = log.reader(follow=True)
        one, other = (log.subscribe(name, start=LogEnd.EARLIEST) for name in ("one", "other"))
        readings: list[Iterable[LogRecord]] = [follower, one, read_on(other)]
        threads = [threading.Thread(target=until_it_ends, args=(each,)) for each in readings]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(seen) == 3)
        for subscription in (one, other):
            subscription.ack(0)
        logs.delete("log", steal=True)
        for thread in threads:
            thread.join(60)
        assert errors == ["NoSuchLogError"] * 3
        for subscription in (one, other):
            with pytest.raises(NoSuchLogError):
                subscription.close()


def test_a_log_that_is_deleted_in_part_is_no_sealed_one_and_is_deleted_again(
    logs: Namespace, manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(logs, "log", b"one")
    log = logs.log("log")
    reader = log.reader()
    reader.read()
    with monkeypatch.context() as patch:

        def refuse(ledger_id: int, **_: object) -> None:
            raise StorageFullError(f"no space to note that ledger {ledger_id} was deleted")

        patch.setattr(manager, "delete_ledger", refuse)
        with pytest.raises(StorageRefusedError, match="delete it again"):
            logs.delete("log")
    for use in (
        lambda: reader.read(timeout=0),
        log.writer,
        lambda: log.subscribe("sub"),
        lambda: logs.log("log"),
        lambda: logs.rename("log", "other"),
    ):
        with pytest.raises(NoSuchLogError, match="delete it again"):
            use()
    logs.delete("log")
    assert left_of(manager) == []


def test_a_deletion_that_was_interrupted_anywhere_is_completed_by_the_next(
    logs: Namespace, manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_of(manager)
    interrupted = 0
    while True:
        filled(logs, "log", b"one")
        with logs.log("log") as log, log.subscribe("sub", start=LogEnd.EARLIEST) as subscription:
            subscription.ack(0)
        calls = iter(range(interrupted))
        with monkeypatch.context() as patch:
            for owner, name in ((backend, "write_record"), (manager, "delete_ledger")):
                patch.setattr(owner, name, partial(until_interrupted, calls, getattr(owner, name)))
            with suppress(KeyboardInterrupt):
                logs.delete("log")
                break
        logs.delete("log")
        assert left_of(manager) == []
        interrupted += 1
    assert interrupted >= 6
    assert left_of(manager) == []


def until_interrupted(
    calls: Iterator[int], call: Callable[..., object], *arguments: object, **options: object
) -> object:
    if next(calls, None) is None:
        raise KeyboardInterrupt
    return call(*arguments, **options)


def test_a_wrong_password_deletes_nothing_of_a_log_that_gets_its_first_writer_meanwhile(
    logs: Namespace, manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.create("log").close()
    backend = backend_of(manager)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "try_lock", once_before(lambda: filled(logs, "log", b"one"), backend.try_lock))
        with pytest.raises(UnauthorizedError):
            Log.delete(manager, "log", password=b"wrong")
    assert data_of(logs, "log") == [b"one"]


def test_a_wrong_password_of_a_subscription_deletes_nothing_of_its_log(logs: Namespace, manager: LedgerManager) -> None:
    with logs.create("log") as log:
        log.subscribe("sub").close()
    with Namespace.open(manager, password=b"another") as others:
        filled(others, "log", b"one")
        with pytest.raises(UnauthorizedError):
            others.delete("log")
        assert data_of(others, "log") == [b"one"]


def test_a_log_that_gets_a_subscription_while_it_is_deleted_stays(
    logs: Namespace, manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(logs, "log", b"one")
    backend, late = backend_of(manager), list[Subscription]()
    with logs.log("log") as log:

        def subscribe() -> None:
            late.append(log.subscribe("late", start=LogEnd.EARLIEST))

        with monkeypatch.context() as patch:
            patch.setattr(backend, "write_record", once_before(subscribe, backend.write_record))
            with pytest.raises(LogLockedError, match="subscription 'late' of log 'log' has a live owner"):
                logs.delete("log")
        with late[0] as subscription:
            assert [record.data for record in subscription.read_many(1)] == [b"one"]
            subscription.ack(0)
    logs.delete("log")
    assert left_of(manager) == []


def test_a_subscription_that_is_made_while_its_log_is_deleted_leaves_nothing(
    logs: Namespace, manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(logs, "log", b"one")
    backend = backend_of(manager)
    write = backend.write_record
    delete = once_before(lambda: logs.delete("log"), write)

    def stalled(name: str, value: bytes | None, version: int | None) -> object:
        return (delete if name.startswith("cursors/") else write)(name, value, version)

    with logs.log("log") as log, monkeypatch.context() as patch:
        patch.setattr(backend, "write_record", stalled)
        with pytest.raises(NoSuchLogError):
            log.subscribe("late")
    assert left_of(manager) == []


@pytest.mark.parametrize("what", ["sweep", "delete"])
def test_a_subscription_whose_deletion_was_interrupted_anywhere_leaves_nothing(
    logs: Namespace, manager: LedgerManager, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    backend = backend_of(manager)
    interrupted, done = 0, False
    while not done:
        filled(logs, "log", b"one")
        with logs.log("log") as log:
            kept, other = (log.subscribe(name, start=LogEnd.EARLIEST) for name in ("kept", "other"))
            calls = iter(range(interrupted))
            with monkeypatch.context() as patch:
                for owner, name in ((backend, "write_record"), (manager, "delete_ledger")):
                    patch.setattr(owner, name, partial(until_interrupted, calls, getattr(owner, name)))
                with suppress(KeyboardInterrupt):
                    other.delete()
                    done = True
            with suppress(PybkError):
                other.close()
            if what == "sweep":
                Log.sweep(manager, password=b"wrong")
                Log.sweep(manager, password=PASSWORD)
                listed = sorted(f"cursors/log@{each}" for each in log.subscriptions())
                assert backend.record_names("cursors/") == listed
            kept.ack(0)
            kept.close()
        logs.delete("log")
        assert left_of(manager) == []
        interrupted += 1
    assert interrupted >= 4


def test_a_deletion_spares_the_subscriptions_of_logs_with_longer_names(logs: Namespace, manager: LedgerManager) -> None:
    for name in ("log", "log@eu"):
        filled(logs, name, b"one")
        with logs.log(name) as log:
            log.subscribe("sub", start=LogEnd.EARLIEST).close()
    assert Log.sweep(manager, password=PASSWORD) == []
    logs.delete("log")
    assert backend_of(manager).record_names("cursors/") == ["cursors/log@eu@sub"]


def once_before(action: Callable[[], object], call: Callable[..., object]) -> Callable[..., object]:
    """Return ``call``, before the first call of which ``action`` happens in another thread."""
    left = [action]

    def with_action(*arguments: object, **options: object) -> object:
        if left:
            thread = threading.Thread(target=left.pop())
            thread.start()
            thread.join()
        return call(*arguments, **options)

    return with_action


# ---- rename ----------------------------------------------------------------------------------------------------------


def test_a_renamed_log_has_its_records_and_continues(logs: Namespace) -> None:
    filled(logs, "old", b"one")
    open_log = logs.log("old")
    logs.rename("old", "new/name")
    assert logs.names() == ["new/name"]
    with pytest.raises(NoSuchLogError, match="renamed"):
        open_log.first()
    filled(logs, "new/name", b"two")
    assert data_of(logs, "new/name") == [b"one", b"two"]
    filled(logs, "old", b"another")
    assert data_of(logs, "old") == [b"another"]
    with pytest.raises(LogExistsError, match="new/name"):
        logs.rename("old", "new/name")
    assert (data_of(logs, "old"), data_of(logs, "new/name")) == ([b"another"], [b"one", b"two"])
    logs.delete("old")
    assert data_of(logs, "new/name") == [b"one", b"two"]


def test_a_rename_that_cannot_be_is_refused(logs: Namespace) -> None:
    with pytest.raises(NoSuchLogError):
        logs.rename("absent", "new")
    filled(logs, "log", b"one")
    with pytest.raises(UsageError):
        logs.rename("log", "a//b")
    with pytest.raises(LogExistsError, match="has that name already"):
        logs.rename("log", "log")
    with logs.log("log") as log, log.writer() as writer:
        with pytest.raises(LogLockedError, match=r"live writer.*close it there before it is renamed$"):
            logs.rename("log", "new")
        with pytest.raises(LogLockedError, match=r"live writer.*seal it there"):
            log.seal()
        writer.append(b"two")
    with logs.log("log") as log:
        log.subscribe("sub").close()
        with pytest.raises(IllegalOperationError, match="'sub'"):
            logs.rename("log", "new")
        log.delete_subscription("sub")
    logs.rename("log", "new")
    assert data_of(logs, "new") == [b"one", b"two"]


def test_a_sealed_log_is_renamed_and_stays_sealed(logs: Namespace) -> None:
    filled(logs, "log", b"one")
    with logs.log("log") as log:
        log.seal()
    logs.rename("log", "new")
    with logs.log("new") as log:
        assert log.is_sealed()
        with pytest.raises(LogSealedError):
            log.writer()


def test_a_rename_with_another_password_is_refused(logs: Namespace, manager: LedgerManager) -> None:
    filled(logs, "log", b"one")
    with Namespace.open(manager, password=b"wrong") as others, pytest.raises(UnauthorizedError):
        others.rename("log", "new")
    assert logs.names() == ["log"]


def test_a_writer_that_was_robbed_and_renamed_away_does_no_harm(logs: Namespace) -> None:
    log = logs.create("log")
    robbed = log.writer()
    robbed.append(b"one")
    log.writer(steal=True).close()
    logs.rename("log", "new")
    filled(logs, "log", b"another")  # of the same epoch as the writer that was robbed
    for change in (lambda: robbed.append(b"lost"), robbed.roll, robbed.close):
        with pytest.raises(NoSuchLogError, match="renamed"):
            change()
    assert (data_of(logs, "new"), data_of(logs, "log")) == ([b"one"], [b"another"])


def test_a_log_that_was_renamed_takes_nothing_from_the_next_one_of_its_name(logs: Namespace) -> None:
    old = logs.create("log")
    logs.rename("log", "new")
    with logs.create("log").writer() as live:
        live.append(b"one")
        for take in (old.writer, lambda: old.writer(wait=60), lambda: old.writer(steal=True), old.seal):
            with pytest.raises(NoSuchLogError, match="renamed"):
                take()
        with logs.log("log") as same, pytest.raises(LogLockedError):
            same.writer()
        live.append(b"two")
    assert data_of(logs, "log") == [b"one", b"two"]


def test_renames_that_compete_move_a_log_once(logs: Namespace) -> None:
    filled(logs, "log", b"one")
    moved: list[str] = []

    def rename(target: str) -> None:
        try:
            logs.rename("log", target)
        except (NoSuchLogError, LogLockedError):
            return
        moved.append(target)

    threads = [threading.Thread(target=rename, args=(f"new {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert logs.names() == moved
    assert data_of(logs, moved[0]) == [b"one"]


def test_the_record_of_a_renamed_log_is_made_again_once(logs: Namespace, manager: LedgerManager) -> None:
    filled(logs, "old", b"one")
    logs.rename("old", "new")
    with pytest.raises(IllegalOperationError, match="'new'"):
        Log.rebuild(manager, "old", password=PASSWORD)
    filled(logs, "new", b"two")
    backend = backend_of(manager)
    record = backend.read_record("logs/new")
    assert record is not None
    backend.write_record("logs/new", None, record.version)
    Log.rebuild(manager, "new", password=PASSWORD)
    assert data_of(logs, "new") == [b"one", b"two"]


# ---- watch -----------------------------------------------------------------------------------------------------------


def test_a_watch_reports_what_comes_and_goes(logs: Namespace) -> None:
    logs.create("before").close()
    seen = Seen()
    seen.names = set(logs.names())
    watch = logs.watch(seen)
    filled(logs, "one", b"data")
    wait_until(lambda: seen.names == {"before", "one"})
    logs.rename("one", "two")
    wait_until(lambda: seen.names == {"before", "two"})
    logs.delete("before")
    wait_until(lambda: seen.names == {"two"})
    watch.cancel()
    calls = len(seen.calls)
    logs.create("three").close()
    with logs.log("three") as log, log.writer() as writer:
        writer.append(b"later")
    assert len(seen.calls) == calls


def test_a_callback_that_fails_is_called_again(logs: Namespace) -> None:
    seen = Seen()

    def fail(added: list[str], removed: list[str]) -> None:
        seen(added, removed)
        raise RuntimeError("the callback fails")

    watch = logs.watch(fail)
    logs.create("one").close()
    wait_until(lambda: seen.names == {"one"})
    logs.create("two").close()
    wait_until(lambda: seen.names == {"one", "two"})
    watch.cancel()


def test_a_read_only_store_reports_them_too(tmp_path: Path) -> None:
    with (
        Namespace.open(tmp_path / "store", password=PASSWORD) as logs,
        Namespace.open(tmp_path / "store", mode="r", password=PASSWORD) as reading,
    ):
        seen = Seen()
        watch = reading.watch(seen)
        for number in range(20):
            logs.create(f"log {number}").close()
        wait_until(lambda: len(seen.names) == 20)
        logs.delete("log 7")
        wait_until(lambda: len(seen.names) == 19)
        watch.cancel()


def test_everything_has_a_form_for_event_loops(tmp_path: Path) -> None:
    async def run() -> None:
        async with Namespace.open_async(tmp_path / "store", password=PASSWORD) as logs:
            seen = Seen()
            watch = await logs.watch_async(seen)
            async with logs.create_async("one"):
                pass
            async with logs.log_async("two") as log, log.writer_async() as writer:
                await writer.append_coro(b"data")
            assert await logs.names_async() == ["one", "two"]
            await logs.rename_async("two", "three")
            assert await logs.exists_async("three")
            await logs.delete_async("one", steal=True)
            assert await logs.names_async() == ["three"]
            await asyncio.to_thread(wait_until, lambda: seen.names == {"three"})
            watch.cancel()

    asyncio.run(run())


def test_a_log_that_had_too_few_bookies_continues_once_there_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inside(tmp_path) as cluster, cluster.connect(bookie_patience_seconds=0.3) as manager:
        log = Log.open(manager, "log", password=PASSWORD, quorums=(3, 3, 2))
        writer = log.writer()
        writer.append(b"one")
        for place in (1, 2):
            cluster.bookies[place].close()
        with monkeypatch.context() as hasty:
            hasty.setattr(recovery, "RETRY_FOR_NS", recovery.RETRY_NS)  # the two that are gone cannot answer meanwhile
            for outcome_unknown in (True, False):
                with pytest.raises(
                    NotEnoughBookiesError, match=r"^log 'log': .*continues with the next append"
                ) as failed:
                    writer.append(b"two")
                assert (failed.value.outcome_unknown, failed.value.retryable) == (outcome_unknown, True)
        for place in (1, 2):
            cluster.open_bookie(place)
        with patient_logs():
            writer.append(b"three")
        writer.close()
        assert log.first() is not None
        log.close()
