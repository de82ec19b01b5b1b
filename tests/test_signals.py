"""A close from a signal handler, a callback or a finaliser never waits for what it interrupted, and loses nothing."""

from __future__ import annotations

import gc
import logging
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

from pybk.errors import ClosedError, IllegalOperationError
from pybk.flags import WriteFlag
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from tests.interrupting import APPEND_PATH, takes_no_interrupt, traced_guards
from tests.paths import ROOT
from tests.simdisk import SimFileSystem
from tests.storage.live_files import contents_below
from tests.storage.real_store import contents, numbered, open_quick, python, stop_syncing
from tests.storage.store_harness import open_store
from tests.waiting import PROCESS_S, WAIT_S, wait_until

_LOOKS = ("where_called", "_module")  # many lines that hold and change nothing


def append_some(writer: LedgerWriter, name: bytes, done: dict[bytes, int]) -> None:
    for number in range(3):
        payload = b"%s %d" % (name, number)
        done[payload] = writer.append(payload)


class Handler:
    """Calls something once, at the n-th traced line of some files, on top of the thread that it is used in."""

    def __init__(self, line: int, files: tuple[str, ...], call: Callable[[], object]) -> None:
        self._left = line
        self._files = files
        self._call = call
        self.fired = False
        self.raised: BaseException | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self._files) or frame.f_code.co_name in _LOOKS:
            return None
        if event == "line" and not self.fired and not takes_no_interrupt(frame):
            self._left -= 1
            if self._left < 0:
                self.fired = True
                try:
                    self._call()
                except IllegalOperationError as error:
                    self.raised = error
        return self


def handled(line: int, files: tuple[str, ...], work: Callable[[], object], call: Callable[[], object]) -> Handler:
    """Do some work, and have ``call`` made on top of one of its lines."""
    traced_guards()
    handler = Handler(line, files, call)
    sys.settrace(handler)
    try:
        work()
    finally:
        sys.settrace(None)
    return handler


@pytest.mark.sampled(one_in=3, group="any line")
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("what", "step"), [("manager", 3), ("writer", 7)])
def test_a_close_on_top_of_any_line_of_an_append_says_at_once_what_to_do(what: str, step: int) -> None:
    manager = open_store(SimFileSystem(1))
    line = 0
    while True:
        writer = manager.create_ledger(insecure=True)
        done: dict[bytes, int] = {}
        close = manager.close if what == "manager" else writer.close

        def work(writer: LedgerWriter = writer, done: dict[bytes, int] = done) -> None:
            append_some(writer, b"main", done)
            done[b"future"] = writer.append_async(b"future").result()

        handler = handled(line, APPEND_PATH, work, close)
        assert list(done.values()) == [0, 1, 2, 3], "the append was not finished after the handler returned"
        if not handler.fired:
            break
        assert handler.raised is not None, f"closed on top of line {line} of an append"
        assert "signal handler" in str(handler.raised)
        assert "SystemExit" in str(handler.raised)
        line += step
    assert line > 100, "the commit path was not traced"
    manager.close()
    with pytest.raises(ClosedError):
        writer.append(b"x")


@pytest.mark.sampled(one_in=3, group="any line")
@pytest.mark.timeout(0)
def test_a_close_on_top_of_any_line_of_a_close_raises_and_the_first_continues() -> None:
    line = 0
    while True:
        fs = SimFileSystem(line)
        manager = open_store(fs)
        writer = manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)
        writer.append_many(numbered(3))
        handler = handled(
            line, ("pybk/manager/ledger_manager.py", "pybk/manager/handle.py"), manager.close, manager.close
        )
        again = open_store(fs)
        assert contents(again, 0, recover=True) == numbered(3)
        again.close()
        if not handler.fired:
            break
        assert handler.raised is not None
        line += 1
    assert line > 10, "the close was not traced"


PROGRAM = """
import os, random, signal, sys
from pybk.errors import ClosedError, IllegalOperationError
from pybk.flags import WriteFlag
from tests.paths import ROOT
from tests.storage.real_store import contents, open_quick

class Leave(Exception):
    pass

def handler(*_):
    global outcome
    try:
        manager.close()
        outcome = "closed"
    except IllegalOperationError:
        outcome = "refused"
        raise Leave from None

signal.signal(signal.SIGALRM, handler)
outcomes = []
chance = random.Random(7)
for number in range(int(sys.argv[2])):
    path = os.path.join(sys.argv[1], str(number))
    outcome = ""
    acknowledged, deferred, asynchronous = [], [], []
    with open_quick(path) as manager:
        plain = manager.create_ledger(insecure=True)
        buffered = manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0001, 0.02))
        try:
            while not outcome:
                acknowledged.append(plain.append(b"plain %d" % len(acknowledged)))
                deferred.append(buffered.append(b"deferred %d" % len(deferred)))
                asynchronous = plain.append_async(b"plain %d" % len(acknowledged))
                acknowledged.append(asynchronous.result(5 if number % 2 else None))
                sum(range(300))
        except (Leave, ClosedError):
            pass
    with open_quick(path) as again:
        found = contents(again, 0, recover=True)
        assert found[: len(acknowledged)] == [b"plain %d" % n for n in range(len(acknowledged))], (number, outcome)
        found = contents(again, 1, recover=True)
        assert found[: len(deferred)] == [b"deferred %d" % n for n in range(len(deferred))], (number, outcome)
    outcomes.append(outcome)
assert set(outcomes) <= {"closed", "refused"}
print(len(outcomes), "rounds")
"""


@pytest.mark.sampled(one_in=3, group="handlers")
def test_closing_in_a_real_handler_never_hangs_and_loses_nothing(tmp_path: Path) -> None:
    process = python(PROGRAM, tmp_path, "24")
    output, _ = process.communicate(timeout=PROCESS_S)
    # Python reports what a handler raises in the middle of a callback of the collector, and continues.
    assert (process.returncode, output.splitlines()[-1]) == (0, "24 rounds")


class LateError(TimeoutError):
    """What a program raises to cut a call short; an OSError by birth."""


@pytest.mark.timeout(0)
def test_an_error_that_a_handler_raises_does_not_fail_the_log() -> None:
    traced_guards()

    def late(*_: object) -> None:
        raise LateError

    old = signal.signal(signal.SIGUSR1, late)
    try:
        manager = open_store(SimFileSystem(1))
        writer = manager.create_ledger(insecure=True)
        deferred = manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)
        done: dict[bytes, int] = {}
        line, fired, count = 0, True, 0
        while fired:
            deferred.append(b"entry %d" % count)
            count += 1
            called = Handler(line, APPEND_PATH, lambda: signal.raise_signal(signal.SIGUSR1))
            sys.settrace(called)
            try:
                done[b"%d" % line] = writer.append(b"%d" % line)
            except LateError:
                pass
            finally:
                sys.settrace(None)
            fired = called.fired
            line += 4
        assert line > 40
        assert manager.health().state == "ok"
        found = contents(manager, 0, recover=True)
        assert all(found[entry_id] == payload for payload, entry_id in done.items())
        assert deferred.force() == count - 1
        manager.close()
    finally:
        signal.signal(signal.SIGUSR1, old)


@pytest.mark.sampled(one_in=3, group="handlers")
def test_the_documented_recipe_loses_no_entry(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "concepts" / "lifecycle.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    process = python(program, tmp_path)
    wait_until(
        lambda: any(b"an entry" in content for path, content in contents_below(tmp_path) if path.suffix == ".log")
    )
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PROCESS_S)
    assert process.returncode == 0, output
    with LedgerManager.open(tmp_path) as manager:
        reader = manager.open_ledger(0, password=b"s3cret", recover=False)
        assert reader.is_closed
        assert f"{reader.last_add_confirmed + 1} entries\n" == output
        assert [entry.payload for entry in reader.read(0, 9)] == [b"an entry"] * 10


def test_the_documented_recipe_takes_a_signal_that_comes_while_the_program_starts(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "concepts" / "lifecycle.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    process = python(_SIGNAL_AT_IMPORT + program, tmp_path)
    output, _ = process.communicate(timeout=PROCESS_S)
    assert (process.returncode, output) == (0, "0 entries\n")


_SIGNAL_AT_IMPORT: Final = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "pybk":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Finder())
"""


def test_a_handler_may_close_while_the_main_program_does_something_else(tmp_path: Path) -> None:
    manager = open_quick(tmp_path)
    writer = manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)
    writer.append_many(numbered(5))
    old = signal.signal(signal.SIGUSR1, lambda *_: manager.close())
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, old)
    with pytest.raises(ClosedError):
        writer.append(b"x")
    with open_quick(tmp_path) as manager:
        assert contents(manager, 0, recover=True) == numbered(5)


def test_an_interrupt_ends_the_wait_for_a_close_and_not_the_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = open_quick(tmp_path)
    writer = manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)
    writer.append_many(numbered(5))
    go = stop_syncing(monkeypatch)

    def leave(*_: object) -> None:
        raise SystemExit(3)

    old = signal.signal(signal.SIGALRM, leave)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(SystemExit):
            manager.close()
    finally:
        signal.signal(signal.SIGALRM, old)
    go.set()
    manager.close()
    with open_quick(tmp_path) as manager:
        assert contents(manager, 0, recover=True) == numbered(5)


def test_a_callback_may_close_even_while_another_thread_does(tmp_path: Path) -> None:
    for others in range(3):
        manager = open_quick(tmp_path / str(others))
        closed = threading.Event()

        def close(_: object, manager: LedgerManager = manager, closed: threading.Event = closed) -> None:
            manager.close()
            closed.set()

        manager.create_ledger(insecure=True).append_async(b"x").add_done_callback(close)
        for _ in range(others):
            manager.close()
        assert closed.wait(WAIT_S), "a close in a callback waits for the thread that it runs in"
        with open_quick(tmp_path / str(others)) as manager:
            assert contents(manager, 0, recover=True) == [b"x"]


class Service:
    """Closes its manager when it is collected, as many programs do."""

    def __init__(self, manager: LedgerManager, outcomes: list[str]) -> None:
        self.manager = manager
        self.outcomes = outcomes
        self.itself = self

    def __del__(self) -> None:
        try:
            self.manager.close()
            self.outcomes.append("closed")
        except IllegalOperationError:
            self.outcomes.append("refused")


def test_a_finaliser_may_close_and_says_so_where_it_cannot(tmp_path: Path) -> None:
    outcomes: list[str] = []
    manager = open_quick(tmp_path)
    writer = manager.create_ledger(insecure=True)
    Service(manager, outcomes)
    handler = handled(10, APPEND_PATH, lambda: writer.append(b"x"), gc.collect)
    assert handler.fired
    assert outcomes == ["refused"]
    Service(manager, outcomes)
    wait_until(lambda: gc.collect() >= 0 and outcomes == ["refused", "closed"])
    with open_quick(tmp_path) as manager:
        assert contents(manager, 0, recover=True) == [b"x"]


class LedgerHandler(logging.Handler):
    """Logs into a ledger."""

    def __init__(self, manager: LedgerManager) -> None:
        super().__init__()
        self.manager = manager
        self.writer = manager.create_ledger(insecure=True)

    def emit(self, record: logging.LogRecord) -> None:
        self.writer.append(record.getMessage().encode())

    def close(self) -> None:
        logging.getLogger("pybk").addHandler(self)
        self.manager.close()
        logging.getLogger("pybk").removeHandler(self)
        super().close()


def test_a_handler_of_logging_may_close_its_manager_when_logging_shuts_down(tmp_path: Path) -> None:
    handler = LedgerHandler(open_quick(tmp_path))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("a message")
    logging.shutdown([weakref.ref(handler)])
    with open_quick(tmp_path) as manager:
        assert contents(manager, 0, recover=True) == [b"a message"]


def test_a_close_on_top_of_the_standard_library_where_that_holds_locks_is_refused(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager, ThreadPoolExecutor(1) as executor:
        handler = handled(0, ("threading.py",), lambda: threading.Thread(target=int).start(), manager.close)
        assert handler.raised is None or "threading" in str(handler.raised)
        with open_quick(tmp_path / "other") as other:
            handler = handled(1, ("concurrent/futures/thread.py",), lambda: executor.submit(int), other.close)
            assert "concurrent.futures.thread.submit" in str(handler.raised)


@pytest.fixture(autouse=True)
def no_trace_is_left() -> Iterator[None]:
    before = sys.gettrace()
    yield
    sys.settrace(before)


def test_a_close_that_an_application_wraps_is_taken_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between ``__exit__`` and ``close`` stands a function of the application, as where it counts or logs."""
    close = LedgerWriter.close
    wrapped: list[LedgerWriter] = []

    def counted(writer: LedgerWriter) -> None:
        wrapped.append(writer)
        close(writer)

    monkeypatch.setattr(LedgerWriter, "close", counted)
    with open_quick(tmp_path) as manager, manager.create_ledger(password=b"password") as writer:
        writer.append(b"entry")
    assert wrapped == [writer]
