"""Signals at random times: no guarded call is interrupted between two lines, none hangs, and nothing is lost."""

from __future__ import annotations

import contextvars
import faulthandler
import importlib.util
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from pybk.threads import interrupts
from tests.paths import ROOT
from tests.storage.real_store import python
from tests.waiting import PROCESS_S, WAIT_S, wait_until

pytestmark = pytest.mark.timeout(0)  # its signal would be one of those that are tested

CORES: Final = ["native", "pure"]


class Strike(BaseException):  # as KeyboardInterrupt
    """What the handler of a signal raises."""


def strike(*_: object) -> None:
    raise Strike


@pytest.fixture(params=CORES)
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return ``pybk.threads.interrupts``, with the native core and without."""
    if request.param == "native":
        if type(interrupts.guarded) is type(strike):
            pytest.skip("the native core is not there: no compiler built it, or PYBK_PURE is set")
        return interrupts
    monkeypatch.setenv("PYBK_PURE", "1")
    spec = importlib.util.spec_from_file_location("pure_interrupts", ROOT / "src/pybk/threads/interrupts.py")
    assert spec is not None
    assert spec.loader is not None
    pure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pure)
    return pure


@pytest.fixture(autouse=True)
def signals_strike() -> Iterator[None]:
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
    before = [signal.signal(number, strike) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def get(number: int = signal.SIGUSR1) -> None:
    """Get a signal in this process now."""
    os.kill(os.getpid(), number)


def noting(done: list[Any], what: Any) -> Callable[[], None]:
    """Return a call that gets a signal, and then notes that it is not interrupted."""

    def call() -> None:
        get()
        done.append(what)

    return call


def struck(call: Callable[[], object]) -> bool:
    """Return whether a call ends with what a handler raises."""
    try:
        call()
    except Strike:
        return True
    return False


def test_a_guarded_call_returns_and_raises_as_any_call(module: ModuleType) -> None:
    assert module.guarded(lambda: 1) == 1
    assert module.guarded(divmod, 17, 5) == (3, 2)
    assert module.guarded(max, 1, 5, 3, 4) == 5
    with pytest.raises(ZeroDivisionError):
        module.guarded(divmod, 1, 0)
    with pytest.raises(TypeError):
        module.guarded()


def test_a_signal_interrupts_no_guarded_call(module: ModuleType) -> None:
    done: list[str] = []

    def outer() -> None:
        module.guarded(noting(done, "inner"))
        done.append("outer")

    assert struck(lambda: module.guarded(outer))
    assert done == ["inner", "outer"]
    assert not struck(lambda: module.guarded(int))


def test_a_signal_interrupts_a_guarded_call_at_its_checkpoints(module: ModuleType) -> None:
    done: list[str] = []

    def call() -> None:
        try:
            module.checkpoint()
            get()
            time.sleep(0)
            done.append("struck")
            wait_until(lambda: struck(module.checkpoint), pause_s=0.001)
            done.append("caught")
            get()
            while True:
                module.checkpoint()
        finally:
            done.append("whole")

    assert struck(lambda: module.guarded(call))
    assert done == ["struck", "caught", "whole"]
    module.checkpoint()
    assert not struck(lambda: module.guarded(int))


def test_a_signal_ends_the_wait_for_a_lock_and_the_lock_is_not_taken(module: ModuleType) -> None:
    lock = threading.Lock()
    with lock:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        assert struck(lambda: module.guarded(module.acquire, lock))
    module.guarded(module.acquire, lock)
    assert lock.locked()


def test_another_thread_is_interrupted_by_none_and_defers_none(module: ModuleType) -> None:
    seen: list[bool] = []

    def call() -> None:
        seen.append(module.is_guarded())
        module.checkpoint()

    assert not module.is_guarded()
    thread = threading.Thread(target=module.guarded, args=(call,))
    thread.start()
    thread.join()
    module.guarded(call)
    assert seen == [False, True]


def test_a_signal_that_another_thread_gets_is_deferred(module: ModuleType) -> None:
    go, got = threading.Event(), threading.Event()
    done: list[str] = []

    def other() -> None:
        go.wait(WAIT_S)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        got.set()

    def call() -> None:
        go.set()
        got.wait(WAIT_S)
        sum(range(1000))
        done.append("whole")

    thread = threading.Thread(target=other)
    thread.start()
    assert struck(lambda: module.guarded(call))
    thread.join()
    assert done == ["whole"]


def test_a_signal_that_does_not_wake_the_main_thread_interrupts_what_waits(module: ModuleType) -> None:
    """As one that another thread gets, or that the main thread gets just before it waits."""

    def call() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        wait_until(lambda: struck(module.checkpoint), pause_s=0.001)

    module.guarded(call)


def test_no_one_sees_that_signals_are_deferred(module: ModuleType) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    seen: list[object] = []
    reading, writing = os.pipe2(os.O_NONBLOCK)
    old = signal.set_wakeup_fd(writing)

    def call() -> None:
        seen.append(signal.getsignal(signal.SIGUSR1))
        get()

    try:
        assert struck(lambda: module.guarded(call))
        assert seen == [before]
        assert os.read(reading, 10) == bytes([signal.SIGUSR1])
    finally:
        signal.set_wakeup_fd(old)
        os.close(reading)
        os.close(writing)


def in_guard(module: ModuleType) -> str:
    """Return which function the main thread, which gets signals, is in while a guarded lambda runs.

    ``faulthandler`` writes a hundred threads at most, and other tests may leave as many.
    """
    return "lambda" if module is interrupts else "make_by"


def test_handlers_of_libraries_are_left_alone(module: ModuleType, tmp_path: Path) -> None:
    """As that of ``faulthandler``, which says where a process hangs, maybe in a guard."""
    with (tmp_path / "stacks").open("w+") as file:
        faulthandler.register(signal.SIGVTALRM, file=file, all_threads=False)
        try:
            module.guarded(lambda: get(signal.SIGVTALRM))
            faulthandler.unregister(signal.SIGVTALRM)
            file.seek(0)
            assert in_guard(module) in file.read()
        finally:
            faulthandler.unregister(signal.SIGVTALRM)


def test_handlers_of_libraries_are_left_alone_where_python_has_one_too(module: ModuleType, tmp_path: Path) -> None:
    """One that calls what was there before neither hides the signal from Python, nor does it come back to itself."""
    done: list[int] = []
    before = signal.signal(signal.SIGVTALRM, lambda *_: done.append(1))
    module.guarded(int)
    with (tmp_path / "stacks").open("w+") as file:
        faulthandler.register(signal.SIGVTALRM, file=file, chain=True, all_threads=False)
        try:
            for number in range(3):
                module.guarded(lambda: get(signal.SIGVTALRM))
                wait_until(partial(is_longer, done, number))
        finally:
            faulthandler.unregister(signal.SIGVTALRM)
        file.seek(0)
        assert file.read().count(in_guard(module)) >= 3
    module.guarded(lambda: get(signal.SIGVTALRM))
    wait_until(partial(is_longer, done, 3))
    signal.signal(signal.SIGVTALRM, before)
    assert len(done) == 4


def is_longer(found: list[int], than: int) -> bool:
    return len(found) > than


def test_a_handler_that_is_set_again_is_found_by_the_next_guard(module: ModuleType) -> None:
    done: list[int] = []
    for number in range(3):
        signal.signal(signal.SIGUSR1, strike)
        assert struck(partial(module.guarded, noting(done, number)))
    assert done == [0, 1, 2]


def test_a_call_sees_the_context_of_its_caller(module: ModuleType) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("the caller's")
    assert module.guarded(variable.get) == "the caller's"


def test_a_handler_may_make_guarded_calls(module: ModuleType) -> None:
    done: list[str] = []

    def handler(*_: object) -> None:
        done.append(module.guarded(lambda: "handler"))

    def has_come() -> list[str]:
        module.checkpoint()
        return done

    def call() -> None:
        get()
        wait_until(has_come, pause_s=0.001)

    signal.signal(signal.SIGUSR1, handler)
    module.guarded(call)
    assert done == ["handler"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("by", ["main", "other"])
def test_a_forked_child_has_guards_of_its_own(by: str, module: ModuleType) -> None:
    status: list[int] = []

    def child() -> int:
        """Return 0 if a signal in a guard strikes once, at its end."""
        done: list[str] = []
        fine = struck(partial(module.guarded, noting(done, "whole"))) and done == ["whole"]
        return 0 if fine and not struck(lambda: module.guarded(int)) else 1

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(child())
        status.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def other() -> None:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()

    if by == "main":
        fork()
    else:
        module.guarded(other)
    assert status == [0]


SIGNALS: Final = 300
"""The least signals that a program gets, each at a random time."""
HITS: Final = 11
"""The least of them that strike it."""

_ARMED: Final = """
import faulthandler, os, random, signal, sys, threading
from itertools import count
from pathlib import Path
from pybk.errors import IllegalOperationError, PybkError
from pybk.flags import WriteFlag

faulthandler.dump_traceback_later(400, exit=True)  # a hang
place, seed = Path(sys.argv[1]), int(sys.argv[2])
chance = random.Random(seed)
armed, hits, ended = False, 0, []
struck = os.open(f"{place}.hits", os.O_WRONLY | os.O_CREAT)

class Strike(BaseException):
    pass

def handler(*_):
    global armed, hits
    if armed:  # else this program itself would be interrupted
        armed = False
        hits += 1
        os.write(struck, b".")
        raise Strike

for number in (signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, handler)

def attempt(call, *arguments):
    "Return the result of a call, and None if a signal interrupted it."
    global armed
    try:
        armed = True
        result = call(*arguments)
        armed = False
        return result
    except Strike:
        return None
    finally:
        armed = False

def wait_for_end():
    sys.stdin.readline()
    ended.append(True)

threading.Thread(target=wait_for_end, daemon=True).start()
"""

_STORE: Final = """
from tests.storage.real_store import contents, open_quick

manager = open_quick(place)
plain, deferred, shared = (
    manager.create_ledger(insecure=True),
    manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True),
    manager.create_ledger(insecure=True),
)
acknowledged = {plain: {}, deferred: {}, shared: {}}

def append_there(name):
    for number in count():
        if ended:
            return
        payload = b"%s %d" % (name, number)
        acknowledged[shared][shared.append(payload)] = payload

others = [threading.Thread(target=append_there, args=(name,)) for name in (b"one", b"two")]
for thread in others:
    thread.start()
print("ready", flush=True)

def one(writer, payload):
    return {writer.append(payload): payload}

def later(writer, payload):
    return {writer.append_async(payload).result(): payload}

def many(writer, payload):
    payloads = [b"%s of %d" % (payload, each) for each in range(chance.choice((2, 40)))]
    return dict(zip(writer.append_many(payloads), payloads))

for number in count():
    if ended:
        break
    writer, way = chance.choice(list(acknowledged)), chance.choice((one, one, later, many))
    acknowledged[writer].update(attempt(way, writer, b"main %d" % number) or {})
    if number % 50 == 0:
        attempt(manager.checkpoint)
    if number % 20 == 0:
        reader = manager.open_ledger(plain.ledger_id, recover=False)
        attempt(lambda: reader.read(0, min(10, reader.last_add_confirmed)))
for thread in others:
    thread.join()
for writer, payloads in acknowledged.items():
    payloads[writer.append(b"the last")] = b"the last"
    writer.close()
assert manager.health().state == "ok", manager.health()
manager.close()
with open_quick(place) as manager:
    for writer, payloads in acknowledged.items():
        found = contents(manager, writer.ledger_id)
        assert all(found[entry] == payload for entry, payload in payloads.items()), writer
        assert len(set(found)) == len(found), "an entry was written twice"
"""

_LOG: Final = """
from pybk import WriteAheadLog
from tests.storage.real_store import open_quick

manager = open_quick(place)
log = WriteAheadLog.open(manager, "log", insecure=True)
acknowledged = {}
print("ready", flush=True)
for number in count():
    if ended:
        break
    payload = b"record %d" % number
    way = chance.choice((lambda: log.append(payload), lambda: log.append_async(payload).result()))
    seq = attempt(way)
    if seq is not None:
        acknowledged[seq] = payload
acknowledged[log.append(b"the last")] = b"the last"
log.close()
with WriteAheadLog.open(manager, "log", insecure=True) as log:
    found = {record.lsn: record.data for record in log.replay()}
assert all(found[seq] == payload for seq, payload in acknowledged.items())
assert len(set(found.values())) == len(found), "a record was written twice"
manager.close()
"""

_CLUSTER: Final = """
from tests.cluster.inside import inside

with inside(place) as cluster, cluster.connect() as client:
    writer, shared = client.create_ledger(insecure=True), client.create_ledger(insecure=True)
    acknowledged = {writer: {}, shared: {}}

    def append_there():
        for number in count():
            if ended:
                return
            payload = b"other %d" % number
            acknowledged[shared][shared.append(payload)] = payload

    other = threading.Thread(target=append_there)
    other.start()
    print("ready", flush=True)
    for number in count():
        if ended:
            break
        payload = b"main %d" % number
        entry = attempt(chance.choice((writer, shared)).append, payload) if chance.random() < 0.5 else None
        entry = attempt(writer.append, payload + b" again")
        if entry is not None:
            acknowledged[writer][entry] = payload + b" again"
        if number % 10 == 0:
            with client.open_ledger(writer.ledger_id, recover=False) as reader:
                attempt(lambda: reader.read(0, min(3, reader.last_add_confirmed)))
    other.join()
    for each, payloads in acknowledged.items():
        payloads[each.append(b"the last")] = b"the last"
        each.close()
    for each, payloads in acknowledged.items():
        with client.open_ledger(each.ledger_id) as reader:
            found = [entry.payload for entry in reader.read(0, reader.last_add_confirmed)]
        assert all(found[entry] == payload for entry, payload in payloads.items())
        assert len(set(found)) == len(found), "an entry was written twice"
"""

_END: Final = """
print(hits, "interrupts")
"""


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("what", ["store", "log", "cluster"])
def test_signals_at_random_times_lose_nothing_and_strand_no_thread(
    what: str, core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYBK_PURE", "1" if core == "pure" else "0")
    programs = {"store": _STORE, "log": _LOG, "cluster": _CLUSTER}
    seed = random.randrange(1 << 32)
    process = python(_ARMED + programs[what] + _END, tmp_path / "place", str(seed))
    assert process.stdout is not None
    said = [process.stdout.readline()]
    while said[-1] not in ("ready\n", ""):
        said.append(process.stdout.readline())
    chance: Any = random.Random(seed)
    sent, hits = 0, tmp_path / "place.hits"
    while process.poll() is None and (sent < SIGNALS or hits.stat().st_size < HITS):  # some that come together are one
        sent += 1
        process.send_signal(chance.choice((signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1)))
        time.sleep(chance.uniform(0, 0.006))
    output, _ = process.communicate("end\n", timeout=PROCESS_S)
    assert process.returncode == 0, (seed, said, output)
    assert output.endswith("interrupts\n"), (seed, said, output)


def test_what_no_guard_defers_fails_the_log_as_a_failed_write_does(tmp_path: Path) -> None:
    process = python(_RAISED_IN_A_STEP, tmp_path)
    output, _ = process.communicate(timeout=PROCESS_S)
    assert (process.returncode, output.splitlines()[-1]) == (0, "failed, and whole after the next open")


_RAISED_IN_A_STEP: Final = """
import sys, threading
from pybk.errors import StorageFailedError
from pybk.storage.io.filesystem import OsFile
from tests.storage.real_store import contents, open_quick

manager = open_quick(sys.argv[1])
writer = manager.create_ledger(insecure=True)
writer.append(b"before")
write_durable = OsFile.write_durable

def interrupted(*arguments):
    write_durable(*arguments)
    raise KeyboardInterrupt  # as after _thread.interrupt_main()

OsFile.write_durable = interrupted
try:
    writer.append(b"interrupted")
    raise SystemExit("not interrupted")
except KeyboardInterrupt:
    pass
OsFile.write_durable = write_durable
try:
    writer.append(b"after")
    raise SystemExit("the log has not failed")
except StorageFailedError:
    pass
try:
    manager.close()
except StorageFailedError:
    pass
with open_quick(sys.argv[1]) as manager:
    assert contents(manager, writer.ledger_id, recover=True)[0] == b"before"
print("failed, and whole after the next open")
"""
