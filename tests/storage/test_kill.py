"""A process that appends, moves and deletes is killed with SIGKILL, over and over on one directory; nothing is lost.

``python -m tests.storage.test_kill --rounds 1000`` does more of it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from pybk.config import StoreConfig
from pybk.errors import NoSuchLedgerError
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.manager.ledger_manager import LedgerManager
from tests.paths import ROOT
from tests.sampling import some
from tests.waiting import wait_until

_ROUNDS: Final = some(3, 6)
_LEDGER_ENTRIES: Final = 400
_LEDGERS_MAX: Final = 40
CONFIG: Final = StoreConfig(
    log_file_bytes=1 << 20,
    unchecked_tail_bytes=4 << 20,
    cold_block_bytes=8 << 10,
    ssd_block_bytes=4 << 10,
    free_bytes_low=0,
    free_bytes_ok=0,
)


def payload_of(ledger_id: int, entry_id: int) -> bytes:
    """Return the one payload that this entry may have."""
    digest = blake2b(b"%d %d" % (ledger_id, entry_id)).digest()
    return (digest * 40)[: int.from_bytes(digest[:2], "big") % 2500]


# ---- the process that is killed ----------------------------------------------------------------------------------


class Child:
    """Appends from several threads, and says on standard output what was acknowledged."""

    def __init__(self, path: str, seed: int) -> None:
        self._manager = LedgerManager.open(path, config=CONFIG)
        self._random = random.Random(seed)
        self._guard = threading.Lock()
        self._busy: dict[int, int] = {}

    def say(self, word: str, ledger_id: int, number: int = 0) -> None:
        """Write one line at once, so that it is there whole or not at all."""
        os.write(1, f"{word} {ledger_id} {number}\n".encode())

    def create(self, choice: random.Random, flags: WriteFlag = WriteFlag.NONE) -> Any:
        """Create a ledger in any tier; the one that this thread wrote before may be deleted from now on."""
        with self._guard:
            writer = self._manager.create_ledger(
                storage_hints={choice.choice(list(StorageHint))},
                digest_type=choice.choice([DigestType.CRC32C, DigestType.XXH3, DigestType.HMAC_SHA256]),
                write_flags=flags,
                insecure=True,
            )
            self._busy[threading.get_ident()] = writer.ledger_id
        self.say("created", writer.ledger_id)
        return writer

    def singles(self, choice: random.Random) -> None:
        """Append one by one, and close."""
        writer = self.create(choice)
        for number in range(_LEDGER_ENTRIES):
            self.say("acknowledged", writer.ledger_id, writer.append(payload_of(writer.ledger_id, number)))
        writer.close()
        self.say("closed", writer.ledger_id, _LEDGER_ENTRIES)

    def batches(self, choice: random.Random) -> None:
        """Append batches, and leave the ledger open."""
        writer = self.create(choice)
        first = 0
        while first < 4 * _LEDGER_ENTRIES:
            count = choice.randrange(1, 200)
            ids = writer.append_many([payload_of(writer.ledger_id, first + number) for number in range(count)])
            self.say("acknowledged", writer.ledger_id, ids[-1])
            first += count

    def futures(self, choice: random.Random) -> None:
        """Append without waiting, and wait later."""
        writer = self.create(choice)
        first = 0
        while first < 3 * _LEDGER_ENTRIES:
            pending = [
                writer.append_async(payload_of(writer.ledger_id, first + number))
                for number in range(choice.randrange(1, 64))
            ]
            first += len(pending)
            for future in pending:
                self.say("acknowledged", writer.ledger_id, future.result())

    def deferred(self, choice: random.Random) -> None:
        """Append, and force now and then."""
        writer = self.create(choice, WriteFlag.DEFERRED_FORCE)
        for number in range(2 * _LEDGER_ENTRIES):
            writer.append(payload_of(writer.ledger_id, number))
            if choice.random() < 0.05:
                self.say("acknowledged", writer.ledger_id, writer.force())
        writer.close()
        self.say("closed", writer.ledger_id, 2 * _LEDGER_ENTRIES)

    def housekeeping(self, choice: random.Random) -> None:
        """Move a ledger, and delete one when there are many."""
        ledgers = list(self._manager.list_ledgers())
        if not ledgers:
            return
        with suppress(NoSuchLedgerError):
            self._manager.move_ledger(choice.choice(ledgers), choice.choice(list(StorageHint)))
        if len(ledgers) > _LEDGERS_MAX // 2:
            with self._guard:
                ledger_id = choice.choice(sorted(set(ledgers) - set(self._busy.values())))
            self.say("deleting", ledger_id)
            self._manager.delete_ledger(ledger_id)
            self.say("deleted", ledger_id)
        if choice.random() < 0.3:
            self._manager.checkpoint()

    def run(self) -> None:
        """Work until killed."""
        jobs = [self.singles, self.singles, self.batches, self.futures, self.deferred, self.housekeeping]
        for job in jobs:
            choice = random.Random(self._random.random())
            threading.Thread(target=self._repeat, args=(job, choice), daemon=True).start()
        threading.Event().wait()

    def _repeat(self, job: Any, choice: random.Random) -> None:
        try:
            while True:
                job(choice)
        except BaseException as error:
            os.write(1, f"raised 0 {error!r}\n".encode())
            raise


def child(path: str, seed: int) -> None:
    """Body of the child process: begins when a line comes, so that its start takes no time from the parent."""
    sys.stdin.readline()
    Child(path, seed).run()


# ---- the process that kills --------------------------------------------------------------------------------------


@dataclass
class Known:
    """What is known of one ledger."""

    acknowledged: int = -1
    length: int | None = None
    deleting: bool = False
    deleted: bool = False


class Killer:
    """Kills child after child, and checks the directory each time."""

    def __init__(self, path: str, seed: int) -> None:
        self._path = path
        self._seed = seed
        self._random = random.Random(seed)
        self._known: dict[int, Known] = {}
        self._next: subprocess.Popen[bytes] | None = None
        self.rounds = 0
        self.entries = 0

    def _start(self) -> subprocess.Popen[bytes]:
        self._seed += 1
        command = [sys.executable, "-m", "tests.storage.test_kill", "--child", self._path, "--seed", str(self._seed)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)

    def round(self) -> None:
        """Let a child work for a moment, kill it, open the directory and check it."""
        victim = self._next or self._start()
        self._next = self._start()
        assert victim.stdin is not None
        assert victim.stdout is not None
        lines: list[bytes] = []
        listener = threading.Thread(target=lambda: lines.extend(victim.stdout or ()))
        listener.start()
        victim.stdin.write(b"go\n")
        victim.stdin.flush()
        wanted = self._random.choice((0, 30, 300, 600)) * self._random.random()
        wait_until(lambda: len(lines) >= wanted or victim.poll() is not None, "the child to do something")
        time.sleep(0.02 * self._random.random())
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        listener.join()
        victim.stdin.close()
        victim.stdout.close()
        self._note(lines)
        with LedgerManager.open(self._path, config=CONFIG) as manager:
            self._check(manager)
        self.rounds += 1

    def _note(self, lines: list[bytes]) -> None:
        for line in lines:
            word, ledger, rest = line.decode().split(" ", 2)
            assert word != "raised", rest
            known = self._known.setdefault(int(ledger), Known())
            if word == "acknowledged":
                assert int(rest) > known.acknowledged
                known.acknowledged = int(rest)
            elif word == "closed":
                known.length = int(rest)
            elif word == "deleting":
                known.deleting = True
            elif word == "deleted":
                known.deleted = True

    def _check(self, manager: LedgerManager) -> None:
        listed = set(manager.list_ledgers())
        for ledger_id, known in list(self._known.items()):
            if known.deleted or (known.deleting and ledger_id not in listed):
                assert ledger_id not in listed, f"deleted ledger {ledger_id} is back"
                del self._known[ledger_id]
            else:
                assert ledger_id in listed, f"ledger {ledger_id} is gone"
        for ledger_id in sorted(listed):
            # A ledger that was not reported was being created: it may exist, and its entries must be right.
            self._check_ledger(manager, ledger_id, self._known.setdefault(ledger_id, Known()))
        for ledger_id in sorted(listed)[:-_LEDGERS_MAX]:
            manager.delete_ledger(ledger_id)
            del self._known[ledger_id]

    def _check_ledger(self, manager: LedgerManager, ledger_id: int, known: Known) -> None:
        reader = manager.open_ledger(ledger_id)
        last = reader.last_add_confirmed
        assert last >= known.acknowledged, f"ledger {ledger_id} ends with {last}, {known.acknowledged} was acknowledged"
        assert known.length in (None, last + 1), f"ledger {ledger_id} has {last + 1} entries, not {known.length}"
        known.length = last + 1
        for entry in reader.read(0, last):
            assert entry.payload == payload_of(ledger_id, entry.entry_id), f"ledger {ledger_id} entry {entry.entry_id}"
        self.entries += last + 1

    def end(self) -> None:
        """Do away with the child that was not needed."""
        if self._next is not None:
            self._next.kill()
            self._next.communicate()


def test_nothing_is_lost_or_invented_by_kills(tmp_path: Path) -> None:
    killer = Killer(str(tmp_path / "store"), 1)
    try:
        while killer.rounds < _ROUNDS or killer.entries <= 1000:
            killer.round()
    finally:
        killer.end()


def main() -> None:
    """Kill as often as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.storage.test_kill", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, options.seed)
        return
    with tempfile.TemporaryDirectory() as directory:
        killer = Killer(os.path.join(directory, "store"), options.seed)
        try:
            for number in range(options.rounds):
                killer.round()
                if number % 20 == 19:
                    print(f"{killer.rounds} kills, {killer.entries} entries checked, seed {options.seed}", flush=True)  # noqa: T201
        finally:
            killer.end()


if __name__ == "__main__":
    main()
