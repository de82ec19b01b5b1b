"""The command ``pybk`` with repairs that wait for tenths of seconds, and bookies that say what they do.

``python -m tests.cluster.scenarios.scaled ARGUMENTS`` is ``pybk ARGUMENTS``. A bookie's standard output gets a line for
each event: ``copy LEDGER`` before a fragment is copied to it, ``copied LEDGER BYTES`` after that, and ``figures JSON``
for each line ``figures`` of its standard input. The line ``slow MS`` makes each durable write take so many milliseconds
longer, ``slow_checks MS`` each read of a check or a copy, ``used SHARE`` makes its disks so full, and ``forget LEDGER``
deletes what it has of a ledger. The option ``--used SHARE`` is that line; ``--capacity BYTES`` has it register so much
space per tier, of which two fifths are free; ``--tiers`` gives each tier a directory of its own in the bookie's;
``--debug`` logs everything to the standard error, of any command.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from dataclasses import replace
from typing import Any

from pybk.admin.cli import main
from pybk.bookie import keeper
from pybk.bookie.keeper import Keeper
from pybk.bookie.replicas import Replicas
from pybk.bookie.server import BookieServer
from pybk.client import limbo_repair
from pybk.client.backend import ClusterBackend
from pybk.client.rereplication import FragmentCopy
from pybk.errors import PybkError
from pybk.flags import StorageHint
from pybk.healing import (
    auditor,
    auditor_driver,
    chores,
    quick_audit,
    repair_worker,
    scrub,
    situation,
)
from pybk.healing.autorecovery import Autorecovery
from pybk.healing.throttle import TokenBucket
from pybk.manager import connect
from pybk.metadata import authenticated_values, lmdb_store
from pybk.metadata.registration import BookieRegistration
from pybk.operations import cluster_admin
from pybk.storage.io.filesystem import OsFile, OsFileSystem

LEASE_S = 1.0
"""The lease time of a scaled cluster on an LMDB store."""

SCALED: list[tuple[object, str, object]] = [
    (auditor_driver, "TICK_S", 0.2),
    (repair_worker, "IDLE_S", 0.3),
    (repair_worker, "PAUSE_MIN_S", 0.3),
    (repair_worker, "PAUSE_MAX_S", 2.0),
    (repair_worker, "SAMPLE_NS", 10**9),
    (chores, "LOOK_S", 0.2),
    (chores, "LEDGER_PAUSE_S", 0.0),
    (auditor, "SUSPICION_NS", 2 * 10**9),
    (quick_audit, "AGAIN_NS", 3 * 10**9),
    (scrub, "FIRST_S", 0.2),
    (scrub, "REST_S", 0.2),
    (scrub, "RECHECK_S", 0.2),
    (scrub, "QUIET_S", 0.1),
    (situation, "SESSION_NS_MIN", 10**9),
    (situation, "FLAPPING_PAUSE_NS", 10**9),
    (lmdb_store, "LMDB_LEASE_TIME_S", LEASE_S),
    (cluster_admin, "REQUESTS_SECONDS", 1.0),
    (auditor_driver, "REQUESTS_SECONDS", 1.0),
    (keeper, "STATE_SECONDS", 0.5),
    (limbo_repair, "PAUSE_MAX_SECONDS", 2.0),
    (authenticated_values, "SECRETS_AGE_SECONDS", 1.0),
]
"""What is scaled down, and by which values."""


def scale() -> None:
    """Scale down this process."""
    for owner, name, value in SCALED:
        assert hasattr(owner, name), f"{owner} has no {name}"
        setattr(owner, name, value)


def say(*words: object) -> None:
    """Write a line to the standard output, whole."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class ScaledBookie:
    """What a bookie's process is asked for; made before the bookie."""

    def __init__(self) -> None:
        self._companion: Autorecovery | None = None
        self._bookie: BookieServer | None = None
        self._slow_s = self._slow_checks_s = 0.0
        self._used = 0.0
        scale()
        self._watch_copies()
        self._watch_disk()
        self._watch_checks()

    def _watch_copies(self) -> None:
        """Say which fragments are copied, and keep hold of what repairs."""

        class SaidCopy(FragmentCopy):
            """A copy that is said."""

            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                say("copy", self.ledger.ledger_id)

            def end(self, error: PybkError | None = None) -> None:
                """Say how much was copied, and end."""
                say("copied", self.ledger.ledger_id, self.machine.copied_bytes)
                super().end(error)

        def made(backend: ClusterBackend, bookie: BookieServer) -> Autorecovery:
            self._companion, self._bookie = Autorecovery(backend, bookie), bookie
            return self._companion

        for owner, name, value in ((repair_worker, "FragmentCopy", SaidCopy), (connect, "Autorecovery", made)):
            setattr(owner, name, value)

    def _watch_disk(self) -> None:
        """Let durable writes take longer, and disks look full."""
        write = OsFile.write_durable

        def write_durable(file: OsFile, *arguments: Any) -> None:
            if self._slow_s:
                time.sleep(self._slow_s)
            write(file, *arguments)

        def free_bytes(disk: OsFileSystem, path: str) -> int:
            return int(disk.total_bytes(path) * (1 - self._used)) if self._used else free(disk, path)

        free = OsFileSystem.free_bytes
        setattr(OsFile, "write_durable", write_durable)  # noqa: B010  # a method of a class, which mypy protects
        setattr(OsFileSystem, "free_bytes", free_bytes)  # noqa: B010

    def _watch_checks(self) -> None:
        """Let reads of checks and copies take longer."""
        read = Replicas.read

        def read_slowly(replicas: Replicas, *arguments: Any, checked: bool = False, **options: Any) -> Any:
            if checked and self._slow_checks_s:
                time.sleep(self._slow_checks_s)
            return read(replicas, *arguments, checked=checked, **options)

        setattr(Replicas, "read", read_slowly)  # noqa: B010

    def obey(self, line: str) -> None:
        """Do what a line of the standard input says."""
        word, *rest = line.split()
        if word == "figures":
            say("figures", json.dumps(self._figures()))
        elif word == "slow":
            self._slow_s = float(rest[0]) / 1e3
        elif word == "slow_checks":
            self._slow_checks_s = float(rest[0]) / 1e3
        elif word == "used":
            self._used = float(rest[0])
        elif word == "forget":
            assert self._bookie is not None
            self._bookie.replicas.delete(int(rest[0]))
        else:
            orders = "figures, slow MS, slow_checks MS, used SHARE, forget LEDGER"
            raise ValueError(f"{line!r} is not an order; a scaled bookie takes {orders}")

    def _figures(self) -> dict[str, Any]:
        companion, bookie = self._companion, self._bookie
        if companion is None or bookie is None:
            return {}
        drops, pace = companion.surplus, bookie.copy_reads.pace
        assert isinstance(pace, TokenBucket)
        return {
            "pid": os.getpid(),
            "leads": companion.auditor.leads,
            "rate": pace.rate,
            "limbo": len(bookie.in_limbo()),
            "health": bookie.health().state,
            "surplus": len(drops.copies),
            "dropped": drops.dropped,
        }


def _obey(bookie: ScaledBookie) -> None:
    """Do what the standard input says, and end with it."""
    for line in sys.stdin:
        bookie.obey(line)
    os._exit(3)


def _run(arguments: list[str]) -> int:
    """Take out the options that ``pybk`` does not know, and run the rest."""
    bookie = ScaledBookie()
    if "--debug" in arguments:
        arguments.remove("--debug")
        logging.basicConfig(level=logging.DEBUG)
        os.environ["PYBK_LOG_LEVEL"] = "debug"
    if "--used" in arguments:
        at = arguments.index("--used")
        bookie.obey(f"used {arguments[at + 1]}")
        del arguments[at : at + 2]
    if "--capacity" in arguments:
        at = arguments.index("--capacity")
        _register_capacity(int(arguments[at + 1]))
        del arguments[at : at + 2]
    if "--tiers" in arguments:
        arguments.remove("--tiers")
        arguments += [f"--tier-{tier}={arguments[1]}/{tier}" for tier in (StorageHint.SSD, StorageHint.HDD)]
    threading.Thread(target=_obey, args=(bookie,), daemon=True).start()
    return main(arguments)


def _register_capacity(size_bytes: int) -> None:
    registration = Keeper.registration

    def small(keeper: Keeper) -> BookieRegistration:
        found = registration(keeper)
        free = dict.fromkeys(found.tiers, size_bytes * 2 // 5)
        return replace(found, capacity=dict.fromkeys(found.tiers, size_bytes), tiers=free)

    setattr(Keeper, "registration", small)  # noqa: B010


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
