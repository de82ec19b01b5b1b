"""The verb ``probe`` of clusters and bookies: write, read and delete a small ledger, and show the times."""

from __future__ import annotations

import argparse
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

from pybk import manager as handles
from pybk import operations
from pybk.admin.cli.clusters import url_of
from pybk.admin.cli.command_parser import secret_needed
from pybk.admin.cli.given_secrets import secret_of
from pybk.admin.cli.output import DAMAGED, SOUND, print_json, print_table
from pybk.config import StoreConfig
from pybk.credentials import Credentials
from pybk.errors import NotEnoughBookiesError, SafetyCheckError, UsageError
from pybk.feature_level import FeatureLevel

if TYPE_CHECKING:
    from pybk.manager.ledger_manager import LedgerManager

_TYPE: Final = "pybk-probe"
"""The type of ledgers of probes, so that metrics and lists show them apart."""


_BYTES_MAX: Final = 1 << 30
_ENTRY_BYTES: Final = 128
"""Memory that an entry takes beyond its payload, rounded up."""


def probe(parsed: argparse.Namespace) -> int:
    """Run the command; the ledger is deleted in any case.

    The entries of a probe of a bookie are on that bookie alone.
    """
    name = getattr(parsed, "name", None)
    config = StoreConfig()
    _check_size(parsed.entries, parsed.bytes, config.max_entry_bytes)
    with secret_needed():
        manager = handles.LedgerManager(handles.connect.connect(url_of(parsed), secret_of(parsed), config, near=name))
    with manager:
        if name is not None:
            operations.ClusterAdmin(manager).bookie(name)  # raises for a name that no bookie has
        found = _probed(manager, parsed, name)
    if parsed.json:
        print_json(found)
    else:
        rows = [(step, f"{seconds * 1e3:.1f} ms") for step, seconds in found["seconds"].items()]
        print_table(rows, ("step", "took"))
        print(f"{parsed.entries} entries of {parsed.bytes} bytes on {', '.join(found['bookies'])}: {found['result']}")
    return SOUND if found["result"] == "ok" else DAMAGED


def _check_size(entries: int, nbytes: int, most: int) -> None:
    """Raise UsageError for entries that are too long, or too many for the memory, in which a probe keeps them."""
    if nbytes > most:
        raise UsageError(f"--bytes is {nbytes}; an entry takes at most {most} bytes: probe with shorter ones")
    if entries * (nbytes + _ENTRY_BYTES) > _BYTES_MAX:
        raise UsageError(
            f"{entries} entries of {nbytes} bytes would take more than {_BYTES_MAX} bytes of memory; probe with at "
            f"most {_BYTES_MAX // (nbytes + _ENTRY_BYTES)}, or shorter ones"
        )


def _credentials(level: FeatureLevel) -> Credentials:
    """Return the secret of a ledger to try; a password if the cluster's level has no ledgers with a secret."""
    key = secrets.token_bytes(32)
    return Credentials(secret=key) if level >= FeatureLevel.SECRETS else Credentials(key)


def _takes_none(name: str) -> str:
    """Return the error for a bookie that belongs to the cluster, and is no member of a new ledger."""
    return (
        f"bookie {name} takes no entries now: it does not run, or is read-only, draining or in maintenance; look at "
        "`pybk bookie list`"
    )


def _probed(manager: LedgerManager, parsed: argparse.Namespace, name: str | None) -> dict[str, Any]:
    given = _credentials(manager.feature_level)
    payloads = [secrets.token_bytes(parsed.bytes) for _ in range(parsed.entries)]
    copies = None if name is None else 1
    began = time.monotonic()
    try:
        writer = manager.create_ledger(
            password=given.password, secret=given.secret, ledger_type=_TYPE, ensemble_size=copies
        )
    except NotEnoughBookiesError as error:
        if name is None:
            raise
        raise SafetyCheckError(_takes_none(name)) from error
    seconds = {"create": time.monotonic() - began}
    try:
        bookies = [each.bookie_id for each in writer.metadata.fragments[-1].ensemble]
        if name is not None and bookies != [name]:
            raise SafetyCheckError(_takes_none(name))
        took = []
        for payload in payloads:
            began = time.monotonic()
            writer.append(payload)
            took.append(time.monotonic() - began)
        seconds |= {"append, median": sorted(took)[len(took) // 2], "append, longest": max(took)} if took else {}
        began = time.monotonic()
        writer.close()
        seconds["close"] = time.monotonic() - began
        began = time.monotonic()
        with manager.open_ledger(writer.ledger_id, password=given.password, secret=given.secret) as reader:
            found = [entry.payload for entry in reader.read(0, len(payloads) - 1)] if payloads else []
        seconds["read all"] = time.monotonic() - began
    finally:
        writer.close()
        began = time.monotonic()
        manager.delete_ledger(writer.ledger_id, password=given.password, secret=given.secret)
        seconds["delete"] = time.monotonic() - began
    return {
        "ledger": writer.ledger_id,
        "bookies": bookies,
        "entries": len(payloads),
        "seconds": seconds,
        "result": "ok" if found == payloads else "the entries that were read differ from those that were written",
    }
