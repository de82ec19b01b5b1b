"""The hook for spans: what it is called for, where, with what, and that its failures harm nothing."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from pybk import ClusterAdmin, LedgerManager, StorageHint, StoreConfig, WriteAheadLog, WriteFlag
from pybk.admin import service_log
from pybk.errors import NoSuchLedgerError, SafetyCheckError, StorageFailedError, UsageError
from pybk.spans import SPANS, current_operation, operation, part, report
from pybk.storage.descriptor import StagedEntries
from pybk.storage.io.filesystem import OsFile
from pybk.testing import SECRET, TestCluster, small_config
from tests.forking import in_child
from tests.internals import store_of
from tests.paths import ROOT
from tests.waiting import WAIT_S, wait_until

REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="")
"""What the application is at; it stands for the current span of a tracing library."""


@dataclass(eq=False)
class Seen:
    """A span that the hook was called for; a ``pybk.Span``."""

    name: str
    start_ns: int
    attributes: dict[str, Any]
    request: str
    thread: int
    parent: Seen | None
    trace_id: str = "5" * 32
    span_id: str = "6" * 16
    end_ns: int = 0
    error: BaseException | None = None
    token: contextvars.Token[Seen | None] | None = field(default=None, repr=False)

    def end(self, end_ns: int, attributes: Any, error: BaseException | None, /) -> None:
        assert threading.get_ident() == self.thread, "in the thread of the start"
        assert self.token is not None
        CURRENT.reset(self.token)  # raises in another context than that of the start
        self.attributes.update(attributes)
        self.end_ns, self.error = end_ns, error


CURRENT: contextvars.ContextVar[Seen | None] = contextvars.ContextVar("current", default=None)


class Recorder:
    """A hook that keeps the spans in the order in which they start."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []

    def __call__(self, name: str, start_ns: int, attributes: Any, /) -> Seen:
        seen = Seen(name, start_ns, dict(attributes), REQUEST.get(), threading.get_ident(), CURRENT.get())
        seen.token = CURRENT.set(seen)
        self.spans.append(seen)
        return seen

    @property
    def names(self) -> list[str]:
        return [each.name.removeprefix("pybk.") for each in self.spans]

    def of(self, name: str) -> list[Seen]:
        return [each for each in self.spans if each.name == f"pybk.{name}"]

    def only(self, name: str) -> Seen:
        [seen] = self.of(name)
        return seen


def config(hook: Any, **changed: Any) -> StoreConfig:
    return replace(small_config(), on_span=hook, **changed)


@pytest.fixture
def hook() -> Recorder:
    return Recorder()


@pytest.fixture
def manager(tmp_path: Path, hook: Recorder) -> Iterator[LedgerManager]:
    with LedgerManager.open(tmp_path / "data", config=config(hook)) as manager:
        yield manager


# ---- what is reported ------------------------------------------------------------------------------------------------


def test_the_documents_have_all_spans_and_the_code_no_others() -> None:
    text = (ROOT / "docs" / "howto" / "tracing.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `(pybk\.[a-z_.]+)` \| (.+?) \|$", text, re.MULTILINE)) == SPANS
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "pybk").rglob("*.py"))
    reported = set(re.findall(r'\b(?:operation|part|report)\(\s*[\w.]*,?\s*"(pybk\.[a-z_.]+)"', code))
    requests = {f"pybk.metadata.{op}" for op in re.findall(r'_timed\("(\w+)"', code)}
    assert reported | requests == SPANS.keys()


def test_operations_are_reported_with_times_attributes_and_errors(tmp_path: Path, hook: Recorder) -> None:
    began_ns = time.time_ns()
    with LedgerManager.open(tmp_path / "data", config=config(hook)) as manager:
        with manager.create_ledger(password=b"secret", ledger_type="orders") as writer:
            writer.append_many([b"payload", b"b"])
            writer.force()
        with manager.open_ledger(writer.ledger_id, password=b"secret") as reader:
            assert len(list(reader.read())) == 2
        manager.ledger_metadata(writer.ledger_id)
        manager.move_ledger(writer.ledger_id, StorageHint.SSD)
        manager.reseal(writer.ledger_id, password=b"secret")
        manager.checkpoint()
        manager.scrub()
        manager.delete_ledger(writer.ledger_id)
        with pytest.raises(NoSuchLedgerError) as caught:
            manager.open_ledger(writer.ledger_id)
    # The thread that wrote a batch reports it, in its own time.
    assert hook.names.count("ledger.append") == 1
    assert [each for each in hook.names if each != "ledger.append"] == [
        *["manager.open", "ledger.create", "ledger.force", "ledger.close", "ledger.open", "ledger.recover"],
        *["ledger.read", "ledger.metadata", "ledger.move", "ledger.reseal", "ledger.open", "ledger.read"],
        *["store.checkpoint", "store.scrub", "ledger.delete", "ledger.open", "manager.close"],
    ]
    assert all(began_ns <= each.start_ns <= each.end_ns <= time.time_ns() + 10**9 for each in hook.spans)
    assert hook.only("ledger.create").attributes == {"pybk.ledger_type": "orders", "pybk.ledger_id": writer.ledger_id}
    appended = hook.only("ledger.append").attributes
    assert (appended["pybk.entries"], appended["pybk.first_entry_id"], appended["pybk.ledger_id"]) == (2, 0, 0)
    assert hook.of("ledger.read")[0].attributes["pybk.entries"] == 2
    assert hook.of("ledger.open")[-1].error is caught.value
    assert [each.error for each in hook.spans if each.name != "pybk.ledger.open"].count(None) == len(hook.spans) - 3
    assert hook.only("ledger.recover").parent is hook.of("ledger.open")[0]
    assert hook.of("ledger.open")[1].parent is hook.only("ledger.reseal")
    told = json.dumps([each.attributes for each in hook.spans])
    assert "secret" not in told
    assert "payload" not in told


def test_a_group_is_an_operation_and_its_entries_are_batches(manager: LedgerManager, hook: Recorder) -> None:
    with (
        WriteAheadLog.open(manager, "one", insecure=True) as one,
        WriteAheadLog.open(manager, "two", insecure=True) as two,
        manager.transaction() as group,
    ):
        group.append(one, b"a")
        group.append(two, b"b")
    manager.close()
    commit = hook.only("transaction.commit")
    assert commit.attributes == {"pybk.members": 2}
    of_it = [each.attributes for each in hook.of("ledger.append") if each.parent is commit]
    assert [(each["pybk.ledger_id"], each["pybk.entries"]) for each in of_it] == [(0, 1), (1, 1)]


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_each_batch_has_one_span_in_the_context_of_the_call_that_began_it(
    manager: LedgerManager, hook: Recorder
) -> None:
    with manager.create_ledger(insecure=True) as writer:
        futures = []
        for number in range(200):
            REQUEST.set(f"request {number}")
            futures.append(writer.append_async(b"x" * number))
        REQUEST.set("")
        assert [each.result() for each in futures] == list(range(200))
    wait_until(lambda: sum(each.attributes["pybk.entries"] for each in hook.of("ledger.append")) == 200)
    for batch in hook.of("ledger.append"):
        assert batch.request == f"request {batch.attributes['pybk.first_entry_id']}"
        assert batch.end_ns >= batch.start_ns
    assert all(each.request == "" for each in hook.of("ledger.close"))


def test_the_batches_of_two_ledgers_are_apart(manager: LedgerManager, hook: Recorder) -> None:
    with manager.create_ledger(insecure=True) as first, manager.create_ledger(insecure=True) as second:
        for writer in (first, second, first):
            writer.append(b"x")
    wait_until(lambda: len(hook.of("ledger.append")) == 3)
    assert [each.attributes["pybk.ledger_id"] for each in hook.of("ledger.append")] == [0, 1, 0]


def test_the_span_of_a_deferred_batch_makes_nothing_durable(tmp_path: Path, hook: Recorder) -> None:
    with LedgerManager.open(tmp_path / "data", config=config(hook, background=False)) as manager:
        writer = manager.create_ledger(insecure=True, write_flags=WriteFlag.DEFERRED_FORCE)
        writer.append(b"x")
        log = store_of(manager).log
        with log.mutex:
            assert log.forming.staged
            assert not log.forming.wanted
        assert hook.of("ledger.append") == []
        writer.force()
    assert hook.only("ledger.append").error is None


def test_a_batch_that_fails_has_its_error(
    manager: LedgerManager, hook: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "the device is gone")

    writer = manager.create_ledger(insecure=True)
    with monkeypatch.context() as broken:
        broken.setattr(OsFile, "write_durable", fail)
        with pytest.raises(StorageFailedError, match="the device is gone"):
            writer.append(b"x")
    wait_until(lambda: hook.of("ledger.append"))
    assert type(hook.only("ledger.append").error) is StorageFailedError


# ---- contexts --------------------------------------------------------------------------------------------------------


def test_each_task_of_a_loop_has_its_spans_in_its_own_context(manager: LedgerManager, hook: Recorder) -> None:
    async def work(number: int) -> int:
        REQUEST.set(f"task {number}")
        async with manager.create_ledger_async(insecure=True) as writer:
            await writer.append_async(b"x")
            await writer.append_coro(b"y")
        async with manager.open_ledger_async(writer.ledger_id) as reader:
            assert [entry.payload async for entry in reader] == [b"x", b"y"]
        assert CURRENT.get() is None
        return writer.ledger_id

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*map(work, range(5)))

    ledgers = asyncio.run(all_of_them())
    wait_until(lambda: len(hook.of("ledger.append")) == 10)
    for number, ledger_id in enumerate(ledgers):
        of_it = [each for each in hook.spans if each.request == f"task {number}"]
        assert len(of_it) == 7, "create, two batches, close, open, recover, read"
        assert {each.attributes["pybk.ledger_id"] for each in of_it} == {ledger_id}


def test_after_a_part_the_whole_goes_on(hook: Recorder) -> None:
    with operation(hook, "pybk.manager.open") as whole:
        for _ in range(2):
            with part("pybk.metadata.get"):
                assert current_operation() is not whole
            assert current_operation() is whole
    assert hook.names == ["manager.open", "metadata.get", "metadata.get"]


def test_an_interrupt_ends_the_operation(hook: Recorder) -> None:
    with pytest.raises(KeyboardInterrupt), operation(hook, "pybk.ledger.create"):
        raise KeyboardInterrupt
    assert current_operation() is None
    assert type(hook.only("ledger.create").error) is KeyboardInterrupt


def test_the_outer_operation_is_the_current_one_again_after_an_inner_one(hook: Recorder) -> None:
    with operation(hook, "pybk.ledger.open") as outer:
        with operation(hook, "pybk.ledger.recover"):
            pass
        assert current_operation() is outer
        with part("pybk.metadata.get"):
            pass
    assert hook.names == ["ledger.open", "ledger.recover", "metadata.get"]


def test_a_thread_that_keeps_the_context_of_an_operation_is_no_part_of_it_once_it_is_over(hook: Recorder) -> None:
    with operation(hook, "pybk.manager.open"):
        kept = contextvars.copy_context()
        with part("pybk.metadata.get"):
            pass

    def later() -> None:
        assert current_operation() is None
        with part("pybk.metadata.get"):
            pass

    kept.run(later)
    assert hook.names == ["manager.open", "metadata.get"]


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_reports_what_it_does_itself(tmp_path: Path, manager: LedgerManager, hook: Recorder) -> None:
    manager.create_ledger(insecure=True).append(b"x")

    def work() -> None:
        hook.spans.clear()
        with LedgerManager.open(tmp_path / "other", config=config(hook)) as other:
            other.create_ledger(insecure=True).append(b"x")
        assert sorted(hook.names) == ["ledger.append", "ledger.create", "manager.close", "manager.open"]

    in_child(work)


# ---- without a hook, and with one that fails -------------------------------------------------------------------------


def test_without_a_hook_nothing_of_spans_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*_: object, **__: object) -> None:
        raise AssertionError("called without a hook")

    for owner, name in ((StagedEntries, "report_to"), (contextvars, "copy_context")):
        monkeypatch.setattr(owner, name, called)
    monkeypatch.setattr("pybk.manager.ledger_reader.operation", called)
    with LedgerManager.open(tmp_path / "data", config=small_config()) as manager:
        with manager.create_ledger(insecure=True) as writer:
            writer.append_many([b"x"] * 10)
        with manager.open_ledger(writer.ledger_id) as reader:
            assert len(list(reader.read())) == 10
    assert operation(None, "pybk.ledger.open") is operation(None, "pybk.ledger.create", ledger_id=5)


@pytest.mark.parametrize("at", ["start", "end"])
def test_a_hook_that_raises_harms_nothing_and_is_logged_once(
    at: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenError(Exception):
        """Of this test alone, because a failure is logged once in a process."""

    class Span:
        trace_id = span_id = ""

        def end(self, *_: object) -> None:
            raise BrokenError

    def hook(name: str, *_: object) -> Span:
        if at == "start":
            raise BrokenError
        return Span()

    with LedgerManager.open(tmp_path / "data", config=config(hook)) as manager:
        with manager.create_ledger(insecure=True) as writer:
            assert [writer.append(b"x") for _ in range(3)] == [0, 1, 2]
        with manager.open_ledger(writer.ledger_id) as reader:
            assert [len(reader.read_batch(0)) for _ in range(3)] == [3, 3, 3]
    logged = [each.getMessage() for each in caplog.records if each.name == "pybk.spans"]
    failed = {text.split(" for ")[1].split(";")[0].removeprefix("pybk.") for text in logged}
    assert failed >= {"manager.open", "ledger.create", "ledger.append", "ledger.read", "manager.close"}
    assert len(logged) == len(set(logged))


def test_ids_that_cannot_be_had_are_left_out_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Span:
        span_id = "1"

        def end(self, *_: object) -> None:
            pass

    record = logging.LogRecord("pybk.x", logging.WARNING, "", 1, "a line", None, None)
    with operation(lambda *_: Span(), "pybk.store.scrub"):  # type: ignore[arg-type]
        line = json.loads(service_log.JsonFormatter().format(record))
    assert line["message"] == "a line"
    assert "span_id" not in line
    assert [each.exc_info[0] for each in caplog.records if each.exc_info] == [AttributeError]


def test_a_hook_may_have_no_interest(tmp_path: Path) -> None:
    asked: list[str] = []

    def hook(name: str, *_: object) -> None:
        asked.append(name)

    with (
        LedgerManager.open(tmp_path / "data", config=config(hook)) as manager,
        manager.create_ledger(insecure=True) as writer,
    ):
        writer.append(b"x")
    assert set(asked) == {
        f"pybk.{each}" for each in ("manager.open", "ledger.create", "ledger.append", "ledger.close", "manager.close")
    }


def test_a_hook_can_be_called() -> None:
    with pytest.raises(UsageError, match=r"on_span is 5; it takes a function"):
        StoreConfig(on_span=5)  # type: ignore[arg-type]


# ---- clusters and lines of logs --------------------------------------------------------------------------------------


def test_requests_to_the_metadata_store_are_parts_of_operations(tmp_path: Path, hook: Recorder) -> None:
    with TestCluster(tmp_path) as cluster:
        client = cluster.connect(config(hook))
        REQUEST.set("request")
        with client.create_ledger(password=b"p") as writer:
            writer.append_many([b"x"] * 10)
        with client.open_ledger(writer.ledger_id, password=b"p") as reader:
            assert len(list(reader.read())) == 10
        client.delete_ledger(writer.ledger_id, password=b"p")
        ClusterAdmin(client).bookies()
        ClusterAdmin(client).drain("b1")
        with pytest.raises(SafetyCheckError):
            ClusterAdmin(client).remove("b2")
        REQUEST.set("")
        wait_until(lambda: len(hook.of("ledger.append")) == 1)
    assert hook.only("manager.connect").attributes == {"pybk.location": cluster.url}
    assert hook.only("ledger.append").request == "request"
    requests = [each for each in hook.spans if each.name.startswith("pybk.metadata.")]
    assert {each.parent.name for each in requests if each.parent} >= {
        *("pybk.manager.connect", "pybk.ledger.create", "pybk.ledger.open", "pybk.ledger.delete", "pybk.cluster.drain")
    }
    assert all(each.parent is not None for each in requests)
    assert hook.only("cluster.drain").attributes == {"pybk.bookie": "b1"}
    assert type(hook.only("cluster.remove").error) is SafetyCheckError
    assert "metadata.create" in {each.name.removeprefix("pybk.") for each in requests}


def test_the_store_of_a_bookie_reports_no_batches(tmp_path: Path, hook: Recorder) -> None:
    with (
        TestCluster(tmp_path, bookies=2) as cluster,
        LedgerManager.open(
            tmp_path / "b3",
            metadata=cluster.url,
            listen="tcp://127.0.0.1:*",
            cluster_secret=SECRET,
            autorecovery=False,
            config=config(hook),
        ) as bookie,
    ):
        with cluster.connect().create_ledger(password=b"p") as writer:
            writer.append(b"x")
        assert hook.of("ledger.append") == []
        with bookie.create_ledger(password=b"p") as own:
            own.append(b"x")
        wait_until(lambda: hook.of("ledger.append"))
    assert hook.only("ledger.append").attributes["pybk.ledger_id"] == own.ledger_id


def test_lines_in_json_have_the_ids_of_the_operation(hook: Recorder) -> None:
    formatter = service_log.JsonFormatter()
    record = logging.LogRecord("pybk.x", logging.WARNING, "", 1, "a line", None, None)
    with operation(hook, "pybk.ledger.open"):
        line = json.loads(formatter.format(record))
    assert (line["trace_id"], line["span_id"]) == ("5" * 32, "6" * 16)
    assert "trace_id" not in json.loads(formatter.format(record))
    with operation(lambda *_: None, "pybk.ledger.open"):
        assert "trace_id" not in json.loads(formatter.format(record))


def test_a_report_has_the_time_that_went_by(hook: Recorder) -> None:
    report(hook, "pybk.ledger.append", time.monotonic_ns() - 5_000_000, None, entries=1)
    assert 5_000_000 <= hook.only("ledger.append").end_ns - hook.only("ledger.append").start_ns < WAIT_S * 10**9
