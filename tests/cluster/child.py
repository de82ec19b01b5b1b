"""What the cluster's tests run in processes of their own: bookies and writers, which end with their standard input.

``child.py bookie ARGUMENTS`` is ``pybk bookie ARGUMENTS``. ``child.py writer JSON`` writes a ledger as ``Orders`` says,
and says what it does on its standard output, a line each: ``ledger ID``, ``pushed ENTRY`` before an entry is appended,
``acked ENTRY`` after it was acknowledged, ``error CLASS`` for each append that was refused, ``closed LAST``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from pybk.admin.cli import main
from pybk.client import wire
from pybk.errors import NotEnoughBookiesError, PybkError
from pybk.ledger.ledger_metadata import Bookie
from pybk.manager.ledger_manager import LedgerManager
from pybk.transport import client_links, heartbeat
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from pybk.manager.append_future import AppendFuture
    from pybk.manager.ledger_writer import LedgerWriter

PASSWORD = b"the password of all ledgers here"
PATIENCE: list[tuple[object, str, int]] = [
    (heartbeat, "SILENCE_MS", int(WAIT_S * 1e3)),
    (wire, "TIMEOUT_NS", int(WAIT_S * 1e9)),
    (client_links, "PING_NS", int(WAIT_S * 1e9)),
]
"""What makes a client wait for bookies that a busy machine keeps from answering."""

_PUSHED_AHEAD = 50
_REFUSED_MAX = 5
_CREATED_IN_S = 20


@dataclass(frozen=True)
class Orders:
    """What a writer is to do.

    Attributes:
        url: The metadata store's.
        routes: Other addresses than those registered, by bookie.
        shape: Ensemble size, write quorum, ack quorum.
        window: Entries outstanding at most.
        entries: How many to write before closing the ledger; None writes until it is refused.
        pause_s: Seconds between two entries.
        largest: Bytes of the longest payloads.
        patient: Whether bookies that are silent for seconds are not given up, as on a machine that is busy.
    """

    url: str
    routes: dict[str, str] = field(default_factory=dict)
    shape: tuple[int, int, int] = (3, 3, 2)
    window: int = 20
    entries: int | None = None
    pause_s: float = 0.0
    largest: int = 400
    patient: bool = False

    def text(self) -> str:
        """Return the orders as an argument."""
        return json.dumps(asdict(self))


def payload(ledger_id: int, entry_id: int, largest: int = 400) -> bytes:
    """Return what every writer appends as this entry, of some length up to ``largest``."""
    name = b"%d/%d " % (ledger_id, entry_id)
    seed = blake2b(name, digest_size=64).digest()
    size = int.from_bytes(seed[:4], "big") % (largest + 1)
    return (name + seed * (size // 64 + 1))[:size]


def route(manager: LedgerManager, routes: dict[str, str]) -> None:
    """Have a client reach bookies at other addresses than those that are registered."""
    from tests.internals import cluster_backend_of  # not for the processes of bookies

    membership: Any = cluster_backend_of(manager).membership
    find = membership.find

    def through(bookie: Bookie) -> object:
        found = find(bookie)
        return found and (routes.get(bookie.bookie_id, found[0]), found[1])

    membership.find = through


def _say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def _write(writer: LedgerWriter, orders: Orders) -> None:
    """Append as ordered; raises what the first entry that fails does."""
    pending: deque[AppendFuture[int]] = deque()
    pushed = -1
    number = 0
    while orders.entries is None or number < orders.entries:
        while len(pending) >= orders.window or (pending and pending[0].done()):
            _say("acked", pending.popleft().result(WAIT_S))
        if number > pushed:
            pushed = number + _PUSHED_AHEAD  # the bound is said ahead, for one line for each entry is slow
            _say("pushed", pushed)
        pending.append(writer.append_async(payload(writer.ledger_id, number, orders.largest)))
        number += 1
        if orders.pause_s:
            time.sleep(orders.pause_s)
    for future in pending:
        _say("acked", future.result(WAIT_S))
    writer.close()
    _say("closed", writer.last_add_confirmed)


def _create(client: LedgerManager, shape: tuple[int, int, int]) -> LedgerWriter:
    """Create a ledger as soon as there are bookies enough."""
    ensemble, write, ack = shape
    for left in reversed(range(_CREATED_IN_S * 10)):
        try:
            return client.create_ledger(password=PASSWORD, ensemble_size=ensemble, write_quorum=write, ack_quorum=ack)
        except NotEnoughBookiesError:
            if not left:
                raise
            time.sleep(0.1)
    raise AssertionError("the last try either returned or raised")


def _run_writer(orders: Orders) -> None:
    if orders.patient:
        for owner, name, value in PATIENCE:
            setattr(owner, name, value)
    secret = os.environ.get("PYBK_CLUSTER_SECRET")
    client = LedgerManager.connect(orders.url, cluster_secret=None if secret is None else secret.encode())
    route(client, orders.routes)
    writer = _create(client, orders.shape)
    _say("ledger", writer.ledger_id)
    try:
        _write(writer, orders)
    except PybkError as error:
        _say("error", type(error).__name__, error)
        for _ in range(_REFUSED_MAX):
            try:
                _say("acked", writer.append(b"this must not be in the ledger"))
            except PybkError as again:
                _say("error", type(again).__name__, again)
    client.close()
    _say("end")


def _end_with_standard_input() -> None:
    def watch() -> None:
        while os.read(0, 1 << 10):
            pass
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    _end_with_standard_input()
    if sys.argv[1] == "bookie":
        sys.exit(main(sys.argv[1:]))
    values = json.loads(sys.argv[2])
    values["shape"] = tuple(values["shape"])
    _run_writer(Orders(**values))
