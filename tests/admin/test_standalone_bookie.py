"""A bookie's process as a service: its log, its signals, its drain, and what it reports to systemd."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pybk.admin import standalone_bookie
from pybk.admin.bookie_options import BookieSettings
from pybk.admin.http import Scope, Token
from pybk.admin.http_options import HttpSettings
from pybk.admin.standalone_bookie import serve
from pybk.bookie.server import BookieServer
from pybk.credentials import Secret
from pybk.errors import CookieError, MetadataUnreachableError, UsageError
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.registration import BookieState
from tests.admin.http.test_server import Client
from tests.bookie.test_states import become
from tests.cluster.inside import SECRET, Inside, inside
from tests.cluster.processes import Child
from tests.storage.real_store import python_path
from tests.waiting import wait_until

pytestmark = pytest.mark.sampled(one_in=4, using="tmp_path")

DRAIN = {"PYBK_BOOKIE_DRAIN_S": "600", "PYBK_BOOKIE_DRAIN_IDLE_S": "3"}
PASSWORD = b"a password that no log shows"
PAYLOAD = b"a payload that no log shows"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path / "cluster", count=2) as found:
        yield found


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket to which services report."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        yield listening


class Service:
    """A bookie's process that is configured by a file, and logs JSON."""

    def __init__(self, directory: Path, cluster: Inside, *, more: str = "", **variables: str) -> None:
        self.file = directory / "bookie.toml"
        self._log = directory / "service.log"
        self._url = cluster.url
        self._place = directory / "service"
        self.write(rack="zone-1", more=more)
        self.child = Child(
            ["bookie", "--config", str(self.file)], SECRET, self._log, module="pybk", variables=variables
        )

    def write(self, rack: str, level: str = "info", more: str = "") -> None:
        """Write the file of options, and more of it at its end."""
        self.file.write_text(
            f'[bookie]\ndirectory = "{self._place}"\nid = "service"\nlisten = ["tcp://127.0.0.1:*"]\nrack = "{rack}"\n'
            f'[tier]\nhdd = ["{self._place}-hdd"]\n[cluster]\nmetadata = "{self._url}"\n'
            f'[log]\nformat = "json"\nlevel = "{level}"\n{more}',
            encoding="utf-8",
        )

    @property
    def output(self) -> str:
        """Its standard error."""
        return self._log.read_text(encoding="utf-8")

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Return the lines of an event in its log."""
        found = []
        for line in self.output.splitlines(keepends=True):
            if line.endswith("\n"):
                with suppress(ValueError):  # stacks are no JSON
                    found.append(json.loads(line))
        return [line for line in found if line["event"] == event]

    def wait_for(self, event: str, number: int = 1) -> dict[str, Any]:
        """Wait until it has logged an event so many times, and return the last one."""
        self.child.wait_for(lambda: len(self.lines(event)) >= number)
        return self.lines(event)[number - 1]


@pytest.fixture
def begin(tmp_path: Path, cluster: Inside) -> Iterator[Callable[..., Service]]:
    """Starts services, which end with the test."""
    with ExitStack() as stack:

        def started(**arguments: str) -> Service:
            service = Service(tmp_path, cluster, **arguments)
            stack.enter_context(service.child)
            return service

        yield started


def reports(systemd: socket.socket, said: list[str]) -> list[str]:
    """Add what has arrived at the socket to what was said before, and return all of it."""
    with suppress(BlockingIOError):
        while True:
            said += systemd.recv(4096).decode().splitlines()
    return said


def ensemble(client: LedgerManager, ledger_id: int) -> set[str]:
    """Return the names of the bookies that have the newest entries of a ledger."""
    return {each.bookie_id for each in client.ledger_metadata(ledger_id).fragments[-1].ensemble}


def test_a_bookie_drains_when_it_is_stopped(
    tmp_path: Path, cluster: Inside, systemd: socket.socket, begin: Callable[..., Service]
) -> None:
    service = begin(NOTIFY_SOCKET=str(tmp_path / "notify"), PYBK_LOG_LEVEL="debug", **DRAIN)
    began = service.wait_for("bookie.started")
    assert (began["addresses"][0][:16], began["took_ms"] > 0) == ("tcp://127.0.0.1:", True)
    said: list[str] = []
    wait_until(lambda: "WATCHDOG=1" in reports(systemd, said))
    assert said[0] == "READY=1"
    assert (tmp_path / "service-hdd" / "cookie").exists()
    client = cluster.connect()
    for _ in range(20):
        writer = client.create_ledger(ensemble_size=2, password=PASSWORD)
        writer.append(PAYLOAD)
        if "service" in ensemble(client, writer.ledger_id):
            break
    else:
        raise AssertionError("20 ledgers, and none at a third of the bookies")
    service.child.signal(signal.SIGTERM)

    def has_left() -> bool:
        writer.append(PAYLOAD)
        return "service" not in ensemble(client, writer.ledger_id)

    wait_until(has_left)
    assert service.child.alive, "the writer has left before the bookie has ended"
    writer.close()
    assert service.child.join() == 0
    order = ["starting", "registered", "started", "draining", "read_only", "drained", "stopping", "stopped"]
    times = [service.wait_for(f"bookie.{name}")["ts"] for name in order]
    assert times == sorted(times)
    assert service.lines("bookie.drained")[0]["took_ms"] < 600_000
    assert service.lines("bookie.read_only")[0]["reason"] == "retired"
    assert "STOPPING=1" in reports(systemd, said)
    for hidden in (SECRET, PASSWORD, PAYLOAD):
        assert hidden.decode() not in service.output


def test_a_bookie_reloads_and_shows_its_stacks_and_closes_at_once(
    tmp_path: Path, systemd: socket.socket, begin: Callable[..., Service]
) -> None:
    service = begin(
        NOTIFY_SOCKET=str(tmp_path / "notify"),
        PYBK_BOOKIE_ADVERTISE="tcp://127.0.0.1:1",
        PYBK_BOOKIE_ADVERTISE_CHECK="false",
        PYBK_BOOKIE_DRAIN_S="3600",
        PYBK_BOOKIE_DRAIN_IDLE_S="3600",
    )
    assert service.wait_for("bookie.started")["addresses"] == ["tcp://127.0.0.1:1"]
    assert service.lines("bookie.unchecked_address")[0]["address"] == "tcp://127.0.0.1:1"
    service.write(rack="zone-2", level="warning")
    service.child.signal(signal.SIGHUP)
    changed = service.wait_for("pybk.admin.cli.bookie")
    assert changed["message"] == "bookie.rack changed, and will take effect at the next start"
    said: list[str] = []
    wait_until(lambda: reports(systemd, said).count("READY=1") == 2)
    assert "RELOADING=1" in said
    assert not service.lines("bookie.reloaded"), "the level is warning by now"
    service.write(rack="zone-2", level="loud")
    service.child.signal(signal.SIGHUP)
    failed = service.wait_for("bookie.reload_failed")
    assert (failed["code"], "level = 'loud'" in failed["message"]) == ("usage", True)
    service.child.signal(signal.SIGUSR1)
    service.child.wait_for(lambda: "most recent call first" in service.output)
    service.write(rack="zone-1")
    service.child.signal(signal.SIGHUP)
    service.wait_for("bookie.reloaded")
    service.child.signal(signal.SIGTERM)
    service.wait_for("bookie.draining")
    service.child.signal(signal.SIGINT)
    assert service.child.join() == 0
    assert not service.lines("bookie.drained")


def test_a_reload_reads_the_tokens_that_were_named_at_the_start(tmp_path: Path, begin: Callable[..., Service]) -> None:
    first, second, other = (Token.new(name, Scope.READ) for name in ("first", "second", "other"))
    (tmp_path / "tokens").write_text(first[0].line())
    (tmp_path / "others").write_text(other[0].line())

    def options(file: str) -> str:
        return f'[http]\nlisten = "127.0.0.1:0"\ntokens = "{tmp_path / file}"\n'

    service = begin(more=options("tokens"))
    service.child.wait_for(lambda: service.child.lines)
    url = service.child.lines[0].split()[-1]

    def status(token: str) -> int:
        with Client(url) as client:
            return client.ask("GET", "/api/v1/bookies/self", Authorization=f"Bearer {token}")[0]

    assert (status(first[1]), status(second[1]), status(other[1])) == (200, 401, 401)
    (tmp_path / "tokens").write_text(second[0].line())
    service.write(rack="zone-1", more=options("others"))
    service.child.signal(signal.SIGHUP)
    changed = service.wait_for("pybk.admin.cli.bookie")
    assert changed["message"] == "http.tokens changed, and will take effect at the next start"
    service.wait_for("bookie.reloaded")
    assert (status(first[1]), status(second[1]), status(other[1])) == (401, 200, 401)
    service.child.signal(signal.SIGTERM)
    assert service.child.join() == 0


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Gives this process back what a service takes over."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    handlers, interval = [signal.getsignal(number) for number in numbers], sys.getswitchinterval()
    logger = logging.getLogger("pybk")
    level = logger.level
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        sys.setswitchinterval(interval)
        logger.setLevel(level)


@pytest.mark.usefixtures("own_signals")
def test_the_start_waits_for_a_metadata_store_if_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [UsageError("the third try"), MetadataUnreachableError("second"), MetadataUnreachableError("first")]

    def join(*_: object, **__: object) -> None:
        raise errors.pop()

    monkeypatch.setattr(standalone_bookie, "join", join)
    monkeypatch.setattr(standalone_bookie, "RETRY_SECONDS", 0.01)
    settings = BookieSettings(directory="d", listen=("tcp://127.0.0.1:*",), metadata="zk://h/x", start_wait_s=60)
    with pytest.raises(UsageError, match="the third try"):
        serve(settings, ready=lambda bookie, _: None)
    errors = [MetadataUnreachableError("first")]
    with pytest.raises(MetadataUnreachableError, match="first"):
        serve(replace(settings, start_wait_s=0), ready=lambda bookie, _: None)
    errors = [MetadataUnreachableError("first")]
    monkeypatch.setattr(standalone_bookie, "RETRY_SECONDS", 30)

    def stop() -> None:
        wait_until(lambda: not errors)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop)
    stopping.start()
    assert serve(settings, ready=lambda bookie, _: None)
    stopping.join()


@pytest.mark.usefixtures("own_signals")
def test_wrong_settings_of_http_end_the_start_before_the_bookie_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone_bookie, "join", lambda *_, **__: pytest.fail("it joins"))
    (tmp_path / "wrong").write_text("no token")
    (tmp_path / "tokens").write_text(Token.new("reader", Scope.READ)[0].line())
    (tmp_path / "pem").touch(mode=0o600)
    here, there = HttpSettings(listen="127.0.0.1:0"), HttpSettings(listen="0.0.0.0:0")
    for http, error in (
        (replace(here, tokens=str(tmp_path / "wrong")), "line 1, is not a token"),
        (replace(here, certificate=str(tmp_path / "pem")), "cannot be used"),
        (replace(here, key="key.pem"), "has no certificate"),
        (replace(there, tokens=str(tmp_path / "tokens")), "tokens and a certificate are needed"),
    ):
        settings = BookieSettings(directory="d", listen=("tcp://127.0.0.1:*",), metadata="zk://h/x", http=http)
        with pytest.raises(UsageError, match=error):
            serve(settings, ready=lambda bookie, _: None)


def settings_of_b(tmp_path: Path, cluster: Inside) -> BookieSettings:
    """Return the settings of a bookie that serves in the main thread of this process."""
    return BookieSettings(
        directory=str(tmp_path / "b"),
        listen=("tcp://127.0.0.1:*",),
        metadata=cluster.url,
        secret=Secret(value=SECRET),
        bookie_id="b",
        drain_s=0,
    )


@pytest.mark.usefixtures("own_signals")
def test_a_bookie_that_fails_is_to_be_started_again_and_one_that_was_removed_is_not(
    tmp_path: Path, cluster: Inside
) -> None:
    settings = settings_of_b(tmp_path, cluster)

    def fails(timeout_ms: int) -> list[object]:
        raise RuntimeError("the serving thread fails")

    assert not serve(settings, ready=lambda bookie, _: setattr(bookie.server, "receive", fails))
    client = cluster.connect()
    removed = BookieState.DRAINING, BookieState.DRAINED, BookieState.REMOVED
    with pytest.raises(CookieError, match="was removed from the cluster"):
        serve(settings, ready=lambda bookie, _: become(client, "b", *removed))


@pytest.mark.usefixtures("own_signals")
def test_the_watchdog_hears_nothing_of_a_bookie_whose_serving_thread_is_stuck(
    tmp_path: Path, cluster: Inside, systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    said: list[str] = []
    stuck, resumes = threading.Event(), threading.Event()
    outcome: list[BaseException] = []

    def sticks(timeout_ms: int) -> list[object]:
        stuck.set()
        resumes.wait()
        return []

    def reload() -> int:
        """Have the main thread look at the watchdog, and return how often the bookie has been reported to work."""
        before = reports(systemd, said).count("READY=1")
        os.kill(os.getpid(), signal.SIGHUP)
        wait_until(lambda: reports(systemd, said).count("READY=1") > before)
        return said.count("WATCHDOG=1")

    def observe(bookie: BookieServer) -> None:
        try:
            wait_until(lambda: "WATCHDOG=1" in reports(systemd, said))
            setattr(bookie.server, "receive", sticks)  # noqa: B010
            wait_until(stuck.is_set)
            reload()  # the look after it may be the first one since the last turn
            assert reload() == reload() == reload()
        except BaseException as error:  # noqa: BLE001  # raised in the main thread
            outcome.append(error)
        finally:
            resumes.set()
            os.kill(os.getpid(), signal.SIGTERM)

    observing: list[threading.Thread] = []

    def ready(bookie: BookieServer, _: str) -> None:
        observing.append(threading.Thread(target=observe, args=(bookie,)))
        observing[0].start()

    assert serve(settings_of_b(tmp_path, cluster), ready=ready)
    observing[0].join()
    assert not outcome, outcome


HOOK = """
from pathlib import Path

class Span:
    trace_id, span_id = "t" * 32, "s" * 16

    def __init__(self, name, start_ns, attributes):
        self.name = name

    def end(self, end_ns, attributes, error):
        with open(Path(__file__).parent / "spans", "a") as file:
            file.write(f"{self.name} {attributes['pybk.bookie']} {error}\\n")
"""


def test_lines_of_the_start_have_the_ids_of_its_span(tmp_path: Path, begin: Callable[..., Service]) -> None:
    (tmp_path / "own_hook.py").write_text(HOOK, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), python_path()])
    service = begin(PYBK_TRACE_ON_SPAN="own_hook:Span", PYTHONPATH=path)
    registered = service.wait_for("bookie.registered")
    assert (registered["trace_id"], registered["span_id"]) == ("t" * 32, "s" * 16)
    assert "trace_id" not in service.wait_for("bookie.started"), "it is after the end of the span"
    assert (tmp_path / "spans").read_text(encoding="utf-8").splitlines()[0] == "pybk.bookie.start service None"
