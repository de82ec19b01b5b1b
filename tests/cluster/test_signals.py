"""A cluster's client that is closed by a signal handler, at the end of the program, or in a forked child."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.inside import SECRET, Inside, inside
from tests.internals import cluster_backend_of
from tests.paths import ROOT
from tests.storage.real_store import contents, python
from tests.test_signals import handled
from tests.waiting import PROCESS_S

_FILES = ("client/", "replication/", "transport/client_links", "pybk/manager/ledger_writer.py")

_BEGIN = """
import os, random, signal, sys
from pybk.errors import ClosedError, IllegalOperationError, PybkError
from pybk.flags import WriteFlag
from pybk.manager.ledger_manager import LedgerManager
url, secret = sys.argv[1], bytes.fromhex(sys.argv[2])
"""


@pytest.mark.sampled(one_in=3, group="any line")
def test_a_close_on_top_of_any_line_of_the_client_says_at_once_what_to_do(tmp_path: Path) -> None:
    files = tuple(
        str(path) for path in (ROOT / "src" / "pybk").rglob("*.py") if any(part in str(path) for part in _FILES)
    )
    with inside(tmp_path) as cluster:
        client = cluster.connect()
        line, reached = 0, True
        while reached:
            writer = client.create_ledger(insecure=True)
            handler = handled(line, files, lambda writer=writer: writer.append(b"x"), client.close)  # type: ignore[misc]  # bound now
            assert (handler.raised is not None) is handler.fired
            assert writer.append(b"y") == 1
            reached = handler.fired
            line += 17
        assert line > 50, "the client was not traced"


_HANDLER = """
class Leave(BaseException):
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
chance = random.Random(3)
for number in range(12):
    outcome, acknowledged = "", 0
    with LedgerManager.connect(url, cluster_secret=secret) as manager:
        writer = manager.create_ledger(insecure=True)
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.001, 0.3))
        try:
            while not outcome:
                acknowledged = writer.append(b"entry %d" % (writer.last_add_pushed + 1)) + 1
                sum(range(300))
        except (Leave, ClosedError):
            pass
    assert outcome in ("closed", "refused")
    print(writer.ledger_id, acknowledged, flush=True)
"""


def run(program: str, cluster: Inside) -> list[list[int]]:
    """Run a client in a process of its own; return the numbers of each line that it printed."""
    process = python(_BEGIN + program, cluster.url, SECRET.hex())
    output, _ = process.communicate(timeout=PROCESS_S)
    assert process.returncode == 0, output
    # Python reports on standard error what a handler raises in the middle of a callback of the collector.
    said = re.findall(r"^(\d+) (\d+)$", output, re.MULTILINE)
    return [[int(word) for word in words] for words in said]


@pytest.mark.sampled(one_in=3, group="handlers")
def test_closing_in_a_real_handler_never_hangs_and_loses_nothing(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster, cluster.connect() as client:
        found = run(_HANDLER, cluster)
        assert len(found) == 12
        for ledger_id, acknowledged in found:
            entries = contents(client, ledger_id, recover=True)
            assert entries[:acknowledged] == [b"entry %d" % number for number in range(acknowledged)]


_FORGOTTEN = """
manager = LedgerManager.connect(url, cluster_secret=secret)
plain = manager.create_ledger(insecure=True)
deferred = manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)
for number in range(100):
    deferred.append(b"entry %d" % number)
future = plain.append_async(b"entry 0")
print(plain.ledger_id, 1)
print(deferred.ledger_id, 100)
"""


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("how", ["", "import atexit; atexit.register(lambda: (plain.close(), manager.close()))"])
def test_a_client_without_a_close_is_closed_at_the_end_of_the_program(tmp_path: Path, how: str) -> None:
    with inside(tmp_path) as cluster, cluster.connect() as client:
        for ledger_id, count in run(_FORGOTTEN + how, cluster):
            assert contents(client, ledger_id, recover=True) == [b"entry %d" % number for number in range(count)]


_FORKED = """
manager = LedgerManager.connect(url, cluster_secret=secret)
writer = manager.create_ledger(insecure=True)
writer.append(b"entry 0")
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    manager.close()
    del writer, manager
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
writer.append(b"entry 1")
manager.close()
print(writer.ledger_id, 2)
"""


def test_a_forked_child_ends_at_once_and_its_parent_continues(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster, cluster.connect() as client:
        ((ledger_id, count),) = run(_FORKED, cluster)
        assert contents(client, ledger_id, recover=True) == [b"entry %d" % number for number in range(count)]


_FORKED_AMID_WORK = """
import warnings
from pybk.manager.ledger_reader import woken_by
from tests.forking import all_locks_held
warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which is the point
manager = LedgerManager.connect(url, cluster_secret=secret)
writer = manager.create_ledger(insecure=True)
writer.append(b"entry 0")
reader = manager.open_ledger(writer.ledger_id, recover=False)
with woken_by(reader, lambda: None):  # which watches the ledger
    pass
sys.stdout.flush()
with all_locks_held():
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
manager.close()
print(writer.ledger_id, 1)
"""


def test_a_forked_child_ends_whatever_threads_of_its_parent_were_doing(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster, cluster.connect() as client:
        ((ledger_id, count),) = run(_FORKED_AMID_WORK, cluster)
        assert contents(client, ledger_id, recover=True) == [b"entry %d" % number for number in range(count)]


def test_a_bookie_without_a_close_is_closed_at_the_end_of_the_program(tmp_path: Path) -> None:
    program = """
manager = LedgerManager.open(sys.argv[3], listen="tcp://127.0.0.1:*", metadata=url, cluster_secret=secret)
writer = manager.create_ledger(ensemble_size=1, write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)
for number in range(10):
    writer.append(b"entry %d" % number)
"""
    with inside(tmp_path, count=0) as cluster:
        process = python(_BEGIN + program, cluster.url, SECRET.hex(), str(tmp_path / "mine"))
        output, _ = process.communicate(timeout=PROCESS_S)
        assert (process.returncode, output) == (0, "")
        with cluster.connect() as client:
            assert not cluster_backend_of(client).membership.bookies, "the bookie is registered still"
