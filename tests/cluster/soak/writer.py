"""A writer of the soak: some threads that write one ledger after the other until the process is killed.

It says on its standard output, a line each: ``ledger ID KIND`` once a ledger exists; ``pushed ID ENTRY`` before entries
up to that one are appended; ``acked ID ENTRY`` after all entries up to that one were acknowledged as durable; ``took
MICROSECONDS...`` of single appends; ``closed ID LAST``; ``read ID ENTRIES`` after it has opened and read a ledger;
``deleting ID`` and ``deleted ID``; ``error ID CLASS TEXT``; ``wrong ID TEXT`` for what must never happen.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from pybk.errors import MetadataUnreachableError, NotEnoughBookiesError, PybkError
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.manager.ledger_manager import LedgerManager
from tests.cluster.child import PASSWORD, payload
from tests.cluster.nemesis import LARGEST
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from pybk.manager.append_future import AppendFuture
    from pybk.manager.ledger_writer import LedgerWriter

SHAPES = [(3, 3, 2), (3, 2, 2), (5, 3, 2)]
DIGESTS = [DigestType.HMAC_SHA256, DigestType.CRC32C, DigestType.XXH3]
FORCED_AT = 40
"""Entries of a deferred ledger between two forces."""

PUSHED_AHEAD = 200
SAID_S = 0.1
"""Seconds between two lines about the same ledger."""


def say(*words: object) -> None:
    """Say a line at once, whole, whichever thread it is."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Kind:
    """What a ledger is like and what becomes of it, drawn at random."""

    def __init__(self, source: random.Random) -> None:
        self.shape = source.choice(SHAPES)
        self.digest = source.choice(DIGESTS)
        self.flags = source.choice((WriteFlag.NONE, WriteFlag.NONE, WriteFlag.DEFERRED_FORCE))
        self.tier = source.choice(list(StorageHint))
        self.entries = source.choice((0, 1, 20, 200, 600, 1500))
        self.window = source.choice((1, 8, 64))
        self.pause_s = source.choice((0.0, 0.002, 0.02))
        self.read = source.random() < 0.3
        self.delete = source.random() < 0.25

    @property
    def deferred(self) -> bool:
        """Whether acknowledged entries are durable only after a force."""
        return self.flags is WriteFlag.DEFERRED_FORCE

    def __str__(self) -> str:
        return f"{'/'.join(map(str, self.shape))},{self.digest.name},{self.flags.name},{self.tier}"


class Ledger:
    """One ledger while it is written, and what was said of it."""

    def __init__(self, writer: LedgerWriter, kind: Kind) -> None:
        self.writer = writer
        self.kind = kind
        self._pending: deque[AppendFuture[int]] = deque()
        self._took: list[int] = []
        self._pushed = -1
        self._acked = -1
        self._said = -1
        self._said_at = time.monotonic()

    def write(self) -> None:
        """Append all entries and close the ledger; raises what the first failure raises."""
        kind, ledger_id = self.kind, self.writer.ledger_id
        for number in range(kind.entries):
            if number > self._pushed:
                self._pushed = number + PUSHED_AHEAD
                say("pushed", ledger_id, self._pushed)
            while len(self._pending) >= kind.window:
                self._take()
            began = time.perf_counter()
            future = self.writer.append_async(payload(ledger_id, number, LARGEST))
            future.add_done_callback(partial(self._note_time, began))
            self._pending.append(future)
            if kind.deferred and number % FORCED_AT == FORCED_AT - 1:
                self._confirm(self.writer.force())
            if kind.pause_s:
                time.sleep(kind.pause_s)
        while self._pending:
            self._take()
        self.writer.close()
        if self.writer.last_add_confirmed != kind.entries - 1:
            say("wrong", ledger_id, f"closed at {self.writer.last_add_confirmed}, not {kind.entries - 1}")
        self._confirm(kind.entries - 1, now=True)
        say("closed", ledger_id, kind.entries - 1)

    def _note_time(self, began: float, _: AppendFuture[int]) -> None:
        self._took.append(int(1e6 * (time.perf_counter() - began)))

    def _take(self) -> None:
        """Wait for the oldest append."""
        entry_id = self._pending.popleft().result(WAIT_S)
        if not self.kind.deferred:
            self._confirm(entry_id)

    def _confirm(self, entry_id: int, *, now: bool = False) -> None:
        """Note what is durable, and say it unless something was said a moment ago."""
        self._acked = max(self._acked, entry_id)
        if self._acked > self._said and (now or time.monotonic() > self._said_at + SAID_S):
            self._said, self._said_at = self._acked, time.monotonic()
            say("acked", self.writer.ledger_id, self._acked)
            took, self._took = self._took, []
            if took:
                say("took", *took)


def create(client: LedgerManager, kind: Kind) -> LedgerWriter | None:
    """Create a ledger; None if there are too few bookies now, or no metadata store."""
    ensemble, write, ack = kind.shape
    try:
        return client.create_ledger(
            password=PASSWORD,
            digest_type=kind.digest,
            write_flags=kind.flags,
            storage_hints=[kind.tier],
            ensemble_size=ensemble,
            write_quorum=write,
            ack_quorum=ack,
        )
    except (NotEnoughBookiesError, MetadataUnreachableError) as error:
        say("error", -1, type(error).__name__, str(error)[:200])
        time.sleep(0.5)
        return None


def write_one(client: LedgerManager, kind: Kind) -> None:
    """Write a ledger, and read or delete it; what fails is said."""
    writer = create(client, kind)
    if writer is None:
        return
    ledger_id = writer.ledger_id
    say("ledger", ledger_id, kind)
    try:
        Ledger(writer, kind).write()
        if kind.read:
            read(client, ledger_id, kind.entries)
        if kind.delete:
            say("deleting", ledger_id)
            client.delete_ledger(ledger_id, password=PASSWORD)
            say("deleted", ledger_id)
    except PybkError as error:
        say("error", ledger_id, type(error).__name__, str(error).replace("\n", " ")[:300])


def read(client: LedgerManager, ledger_id: int, entries: int) -> None:
    """Open a ledger again and read all of it."""
    with client.open_ledger(ledger_id, password=PASSWORD) as reader:
        found = [entry.payload for entry in reader]
    if found != [payload(ledger_id, number, LARGEST) for number in range(entries)]:
        say("wrong", ledger_id, f"{len(found)} of {entries} entries were read, or others")
    say("read", ledger_id, len(found))


def main() -> int:
    """Write until the process is killed, or its standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--metadata", required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--threads", type=int, default=3)
    parsed = parser.parse_args()
    secret = os.environ.get("PYBK_CLUSTER_SECRET")
    client = LedgerManager.connect(parsed.metadata, cluster_secret=None if secret is None else secret.encode())
    ended = threading.Event()

    def write(number: int) -> None:
        source = random.Random(f"{parsed.seed}/{number}")
        while not ended.is_set():
            write_one(client, Kind(source))

    threads: list[Any] = [threading.Thread(target=write, args=(each,)) for each in range(parsed.threads)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join()
    client.close()
    say("end", 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
