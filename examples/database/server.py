"""A program of ``database.py``: primary and standby in processes of their own, and clients that survive a failover.

The store is a directory that both share, or a cluster, given by the URL of its metadata::

    python server.py serve STORE PRIMARY.SOCKET
    python server.py serve STORE STANDBY.SOCKET --standby
    python server.py put PRIMARY.SOCKET,STANDBY.SOCKET KEY VALUE
    python server.py get PRIMARY.SOCKET,STANDBY.SOCKET KEY
    python server.py add PRIMARY.SOCKET,STANDBY.SOCKET KEY NUMBER    (a transaction: reads, adds and writes)
    python server.py promote STANDBY.SOCKET                          (also: status, checkpoint)
    python server.py promote STANDBY.SOCKET steal                    (in a cluster, from a primary that hangs)

The log's password comes from ``PYBK_PASSWORD``, the secret of a cluster from ``PYBK_CLUSTER_SECRET``, or each from the
file that this variable with ``_FILE`` appended names. Each request and each answer is a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import socketserver
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from database import PROMOTE_S, ConflictError, Database
from tables import Row, Writes

from pybk import LedgerManager, PybkError, Secret, UsageError

PATIENCE_S = 60.0
RETRY_S = 0.05


# ---- the server ------------------------------------------------------------------------------------------------------


def answer(database: Database, request: dict[str, Any]) -> dict[str, Any]:
    """Do what a request asks for, and return the answer."""
    began = time.perf_counter()
    try:
        match request:
            case {"read": keys, "after": after}:
                return {"rows": database.read(*keys, after=after)}
            case {"writes": writes, "expect": expect, "token": [client, number]}:
                return {"lsn": database.commit(writes, expect, (client, number))}
            case {"promote": steal}:
                return {"lsn": database.promote(steal=steal), "seconds": time.perf_counter() - began}
            case {"checkpoint": _}:
                return {"lsn": database.checkpoint()}
            case {"status": _}:
                return {"lsn": database.applied, "standby": database.standby}
    except ConflictError as error:
        return {"conflict": str(error)}
    except TypeError as error:
        return {"error": str(error), "elsewhere": False}
    except (PybkError, TimeoutError) as error:
        elsewhere = database.standby or getattr(error, "outcome_unknown", False) or getattr(error, "retryable", True)
        return {"error": f"{type(error).__name__}: {error}", "elsewhere": elsewhere}
    return {"error": f"the request is not one of this server's: {str(request)[:100]}", "elsewhere": False}


class Server(socketserver.ThreadingUnixStreamServer):
    """Serves a database on a socket of this host, each connection by a thread."""

    daemon_threads = True

    def __init__(self, path: str, database: Database) -> None:
        self.database = database
        super().__init__(path, Connection)


class Connection(socketserver.StreamRequestHandler):
    """Answers the requests of one client, one after the other."""

    server: Server  # type: ignore[mutable-override]

    def handle(self) -> None:
        """Answer until the client closes the connection."""
        for line in self.rfile:
            found = answer(self.server.database, json.loads(line))
            self.wfile.write(json.dumps(found).encode() + b"\n")


def serve(where: str, path: str, *, standby: bool, checkpoint_records: int) -> None:
    """Serve a database until SIGTERM or SIGINT."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as stack:
        store: str | LedgerManager = where
        if "://" in where:
            secret = Secret(variable="PYBK_CLUSTER_SECRET").read()
            store = stack.enter_context(LedgerManager.connect(where, cluster_secret=secret))
        database = stack.enter_context(Database(store, standby=standby, checkpoint_records=checkpoint_records))
        Path(path).unlink(missing_ok=True)  # of a server that was killed; a living one would have the store
        server = stack.enter_context(Server(path, database))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        print(f"serving on {path}, with everything up to record {database.applied}", flush=True)
        stop.wait()


# ---- the client ------------------------------------------------------------------------------------------------------


class Client:
    """Reads and commits at the first of several servers that answers. Threads: one.

    Args:
        sockets: Paths of the sockets of the primary and its standbys.
        patience: Seconds to try for before an error is raised.
    """

    def __init__(self, sockets: Iterable[str], patience: float = PATIENCE_S) -> None:
        self.name = uuid.uuid4().hex  # of its own in each run, because the numbers begin again
        self.resent = 0  # requests that needed more than one attempt
        self._sockets = deque(sockets)
        self._patience = patience
        self._number = self._seen = 0
        self._lines: BufferedRWPair | None = None

    def read(self, *keys: str) -> dict[str, Row]:
        """Return the rows of keys as of one moment; at a standby it may be old, but has this client's commits."""
        return {key: Row(*row) for key, row in self.request({"read": keys, "after": self._seen})["rows"].items()}

    def commit(self, writes: Writes, expect: Mapping[str, int] | None = None) -> int:
        """Commit as ``Database.commit``, exactly once, also if the primary dies meanwhile."""
        self._number += 1
        found = self.request({"writes": writes, "expect": expect or {}, "token": [self.name, self._number]})
        if "conflict" in found:
            raise ConflictError(found["conflict"])
        self._seen = max(self._seen, found["lsn"])
        return self._seen

    def update(self, keys: Iterable[str], change: Callable[[dict[str, str | None]], Writes]) -> int:
        """Commit what a function makes of the values of keys, which no other commit changes meanwhile."""
        while True:
            rows = self.read(*keys)
            writes = change({key: row.value for key, row in rows.items()})
            try:
                return self.commit(writes, {key: row.version for key, row in rows.items()})
            except ConflictError:
                continue

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and to the next server if this one cannot answer; returns the answer."""
        deadline = time.monotonic() + self._patience
        failures = 0
        while True:
            try:
                found = self._send(request)
            except (OSError, ValueError) as error:  # a commit may have been made; its number makes it safe to repeat
                found = {"error": f"no answer from {self._sockets[0]}: {error}", "elsewhere": True}
            if "error" not in found:
                self.resent += failures > 0
                return found
            if not found["elsewhere"] or time.monotonic() > deadline:
                raise PybkError(found["error"], outcome_unknown=bool(found["elsewhere"]))
            self.close()
            self._sockets.rotate(-1)
            failures += 1
            time.sleep(RETRY_S)

    def _send(self, request: dict[str, Any]) -> dict[str, Any]:
        lines = self._lines
        if lines is None:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(self._sockets[0])
                lines = self._lines = connection.makefile("rwb")
        lines.write(json.dumps(request).encode() + b"\n")
        lines.flush()
        found: dict[str, Any] = json.loads(lines.readline())
        return found

    def close(self) -> None:
        """Close the connection."""
        if self._lines is not None:
            with suppress(OSError):  # what could not be sent
                self._lines.close()
            self._lines = None


# ---- the command line ------------------------------------------------------------------------------------------------


def whole(text: str) -> int:
    """Return the whole number that a text is."""
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{text!r:.50} is not a whole number, and nothing was added; `put` replaces a value") from None


def run(client: Client, command: str, operands: list[str]) -> int:
    """Run a client's command; returns the exit code."""
    match command, operands:
        case "put", [key, value]:
            print(client.commit({key: value}))
        case "add", [key, number]:
            client.update([key], lambda values: {key: str(whole(values[key] or "0") + whole(number))})
            print(client.read(key)[key].value)
        case "get", [key]:
            found = client.read(key)[key].value
            if found is None:
                return 1
            print(found)
        case "promote", ["steal"]:
            print(json.dumps(client.request({command: True})))
        case "promote", []:
            print(f"waiting up to {PROMOTE_S:.0f} s for the primary to end, or to be found dead", file=sys.stderr)
            print(json.dumps(client.request({command: False})))
        case "checkpoint" | "status", []:
            print(json.dumps(client.request({command: False})))
        case _:
            print(f"server: {command} does not take {len(operands)} operands; see --help", file=sys.stderr)
            return 2
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", help="serve a database")
    server.add_argument("where", metavar="STORE", help="directory, or URL of a cluster's metadata")
    server.add_argument("socket", metavar="SOCKET", help="path of the socket to make")
    server.add_argument("--standby", action="store_true", help="follow the primary until there is a `promote`")
    server.add_argument(
        "--checkpoint-records", type=int, default=100_000, help="commits after which to make a snapshot"
    )
    for name in ("put", "add", "get", "promote", "checkpoint", "status"):
        client = commands.add_parser(name)
        client.add_argument("sockets", metavar="SOCKET[,SOCKET]", help="sockets of the servers")
        client.add_argument("operands", nargs="*", metavar="OPERAND")
    arguments = parser.parse_args()
    try:
        if arguments.command == "serve":
            every = arguments.checkpoint_records
            serve(arguments.where, arguments.socket, standby=arguments.standby, checkpoint_records=every)
            return 0
        return run(Client(arguments.sockets.split(","), patience=5), arguments.command, arguments.operands)
    except (PybkError, OSError) as error:
        print(f"server: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
