"""A primary is killed under load, its standby takes over, and nothing is lost: ``make demo-wal``.

Clients commit the lines of files to a primary of ``server.py``, while a standby follows. The primary is killed
with SIGKILL and the standby promoted. The clients send again what was not acknowledged, and continue. Then every commit
that a client got acknowledged is looked up, at the new primary and after a restart from its newest snapshot. First the
two share a directory; then they are clients of three bookies, each in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from database import Database
from server import Client
from tables import Row

from demo.child import Child
from demo.progress import Meter, meter
from demo.source import Source
from pybk import LedgerManager, PybkError

BOOKIES = 3
CLIENTS = 8
LINES_EACH = 4
LOOKED_UP_AT_ONCE = 100
SERVER_S = 60.0


class WrongDataError(PybkError):
    """The database lacks what it acknowledged, or has something else."""


class Commit(NamedTuple):
    """An acknowledged commit: its rows, and the record that made it."""

    rows: dict[str, str]
    lsn: int


class Load:
    """Clients that commit lines, each client a few lines at a time, until they are stopped.

    Each commit also writes two rows that must always agree, and every tenth adds 1 to a row that all clients share.
    """

    def __init__(self, source: Source, sockets: list[str], bar: Meter) -> None:
        self.acknowledged: list[Commit] = []
        self.added = 0
        self.resent = 0
        self._lines = enumerate(chain.from_iterable(source.repeated()))
        self._sockets = sockets
        self._bar = bar
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._threads = [threading.Thread(target=self._run, args=(f"client {number}",)) for number in range(CLIENTS)]

    def __enter__(self) -> Load:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the clients."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Have each client end with an acknowledged commit."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, commits: int) -> None:
        """Return when so many commits are acknowledged."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.acknowledged) >= commits or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def _run(self, name: str) -> None:
        client = Client(self._sockets)
        try:
            while not self._stop.is_set():
                self._commit(client, name)
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            client.close()

    def _commit(self, client: Client, name: str) -> None:
        with self._changed:
            lines = list(islice(self._lines, LINES_EACH))
        rows = {f"line {number}": line.decode("latin-1") for number, line in lines}
        number = lines[0][0]
        lsn = client.commit({f"{name} begins": str(number), **rows, f"{name} ends": str(number)})
        adds = number // LINES_EACH % 10 == 0
        if adds:
            client.update(["sum"], lambda values: {"sum": str(int(values["sum"] or 0) + 1)})
        with self._changed:
            self.acknowledged.append(Commit(rows, lsn))
            self.added += adds
            self.resent += client.resent
            client.resent = 0
            self._bar.update(1)
            self._changed.notify_all()


class Watcher:
    """Reads at the standby, which may show what is old, and never half of a commit."""

    def __init__(self, path: str) -> None:
        self.reads = 0
        self.found: list[str] = []
        self._client = Client([path])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            for number in range(CLIENTS):
                begins, ends = self._client.read(f"client {number} begins", f"client {number} ends").values()
                self.reads += 1
                if begins != ends:
                    self.found.append(f"client {number}: {begins} and {ends}")


def check(read: Callable[..., dict[str, Row]], load: Load) -> None:
    """Look up all that was acknowledged: each row has its value, and the record that made its commit.

    Raises:
        WrongDataError: Something was lost, or is there twice.
    """
    expected = {key: Row(lsn, value) for rows, lsn in load.acknowledged for key, value in rows.items()}
    keys = iter(expected)
    lost = 0
    while some := list(islice(keys, LOOKED_UP_AT_ONCE)):
        lost += sum(row != expected[key] for key, row in read(*some).items())
    if lost:
        raise WrongDataError(f"{lost:,} of {len(expected):,} acknowledged rows are lost or differ")
    added = read("sum")["sum"].value
    if added != str(load.added):
        raise WrongDataError(f"1 was added {load.added:,} times, but the sum is {added}")


@contextmanager
def server(where: str, path: str, environment: Mapping[str, str], *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run a server in a process of its own, which is killed in the end; begins when it serves."""
    program = str(Path(__file__).with_name("server.py"))
    with subprocess.Popen(
        [sys.executable, program, "serve", where, path, "--checkpoint-records", "2000", *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,  # Ctrl-C ends the parent, and the parent this
    ) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise PybkError(f"process {process.pid} did not begin to serve; its error is above")
            yield process
        finally:
            process.kill()


def fail_over(where: str, environment: Mapping[str, str], source: Source, commits: int) -> Load:
    """Load a primary, kill it, promote its standby, load that one, and look up what was acknowledged."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pybk-"))  # paths of sockets are short
        sockets = [f"{folder}/primary", f"{folder}/standby"]
        primary = stack.enter_context(server(where, sockets[0], environment))
        standby = stack.enter_context(server(where, sockets[1], environment, "--standby"))
        control = Client(sockets[1:])
        stack.callback(control.close)
        bar = stack.enter_context(meter("committing", 2 * commits, " commits"))
        with Watcher(sockets[1]) as watcher, Load(source, sockets, bar) as load:
            began = time.monotonic()
            load.wait_for(commits)
            primary.kill()
            killed = time.monotonic()
            primary.wait()
            acknowledged, followed = len(load.acknowledged), control.request({"status": True})["lsn"]
            print(
                f"Killed primary process {primary.pid} with SIGKILL under the load of {CLIENTS} clients, after "
                f"{acknowledged:,} acknowledged commits, {acknowledged / (killed - began):,.0f} commits/s."
            )
            promoted = control.request({"promote": False})
            print(
                f"Promoted standby process {standby.pid} in {promoted['seconds']:.2f} s; it had followed up to record "
                f"{followed:,}, and applied {promoted['lsn'] - followed:,} more."
            )
            load.wait_for(len(load.acknowledged) + 1)
            print(f"Clients commit again {time.monotonic() - killed:.2f} s after the kill.")
            load.wait_for(2 * commits)
        check(control.read, load)
        if watcher.found:
            raise WrongDataError(f"the standby showed half a commit: {watcher.found[0]}")
        print(
            f"Looked up {len(load.acknowledged):,} acknowledged commits at the new primary: lost 0. {load.resent} were "
            f"sent again, and made once. {watcher.reads:,} reads at the standby never saw half a commit."
        )
        standby.terminate()
        if standby.wait(SERVER_S):
            raise PybkError(f"process {standby.pid} did not end well; its error is above")
    return load


def restart(where: str | LedgerManager, password: bytes, load: Load) -> None:
    """Open the database here, from its newest snapshot and the records after it, and look everything up again."""
    began = time.monotonic()
    with Database(where, password) as database:
        seconds = time.monotonic() - began
        newest = database.wal.latest_checkpoint()
        check(database.read, load)
        print(
            f"Restarted in {seconds:.2f} s, from the snapshot of record {newest.lsn if newest else 0:,} and "
            f"{database.applied - (newest.lsn if newest else 0):,} records after it: lost 0."
        )


def embedded(directory: str, source: Source, commits: int) -> None:
    """Primary and standby share the directory of a store."""
    password = secrets.token_hex(16)
    store = f"{directory}/store"
    load = fail_over(store, {"PYBK_PASSWORD": password}, source, commits)
    restart(store, password.encode(), load)


def cluster(directory: str, source: Source, commits: int) -> None:
    """Primary and standby are clients of bookies; each commit is on two of three when it is acknowledged."""
    password, secret, url = secrets.token_hex(16), secrets.token_hex(32), f"lmdb://{quote(directory)}/metadata"
    with ExitStack() as stack:
        bookies = [
            stack.enter_context(
                Child(
                    "demo.node",
                    {"path": f"{directory}/{name}", "name": name, "metadata": url, "secret": secret.encode().hex()},
                )
            )
            for name in (f"bookie-{number}" for number in range(1, BOOKIES + 1))
        ]
        for bookie in bookies:
            bookie.answer()
        load = fail_over(url, {"PYBK_PASSWORD": password, "PYBK_CLUSTER_SECRET": secret}, source, commits)
        with LedgerManager.connect(url, cluster_secret=secret.encode()) as manager:
            restart(manager, password.encode(), load)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", nargs="?", help="file or folder; the standard library's source files when left out")
    parser.add_argument("--directory", help="where to make the stores, which are deleted; /var/tmp when left out")
    parser.add_argument("--commits", type=int, default=5000, help="to wait for before the kill, and after it")
    arguments = parser.parse_args()
    # /tmp is often in memory, where a sync costs nothing and shows nothing.
    place = arguments.directory or ("/var/tmp" if os.path.isdir("/var/tmp") else None)
    try:
        source = Source.of(arguments.input)
        for number, act in enumerate((embedded, cluster), 1):
            print(f"== {number}. {(act.__doc__ or '').rstrip('.')}\n", flush=True)
            with tempfile.TemporaryDirectory(prefix="pybk-demo-", dir=place) as directory:
                act(directory, source, arguments.commits)
            print()
    except (PybkError, OSError) as error:
        print(f"failover: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
