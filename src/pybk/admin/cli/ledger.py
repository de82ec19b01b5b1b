"""The command ``pybk ledger``: list, show, read, seal and delete ledgers of a store or a cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Final

from pybk import healing, operations, storage
from pybk.admin.cli.clusters import metadata_of, opened_manager
from pybk.admin.cli.command_parser import Verbs, is_url
from pybk.admin.cli.given_secrets import Given, given_in
from pybk.admin.cli.output import (
    FAILED,
    PARTLY,
    SOUND,
    base64,
    confirm,
    counted,
    print_json,
    print_json_line,
    print_table,
    shown_time,
)
from pybk.admin.shown_text import shown_name
from pybk.config import StoreConfig
from pybk.credentials import PASSWORD, SECRET
from pybk.errors import PybkError, ReadRangeError, UnauthorizedError, UsageError
from pybk.ledger.keys import end_is_sealed

if TYPE_CHECKING:
    from pybk.ledger.entry import Entry
    from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata
    from pybk.manager.ledger_manager import LedgerManager
    from pybk.manager.ledger_reader import LedgerReader
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.metadata.ledgers import StoredLedger
    from pybk.operations.cluster_checks import Copies
    from pybk.storage.readonly import ReadOnlyStore


# ---- list --------------------------------------------------------------------------------------------------------


def _list(parsed: argparse.Namespace) -> int:
    if parsed.bookie is not None and not is_url(parsed.path):
        raise UsageError("--bookie is for clusters; a store has no bookies")
    found = _cluster_rows(parsed) if is_url(parsed.path) else _store_rows(parsed)
    rows = list(islice(found, parsed.limit))
    if parsed.json:
        following = rows[-1]["ledger"] if rows and len(rows) == parsed.limit else None
        print_json({"ledgers": rows, "next": following})
        return SOUND
    names = ["ledger", "type", "state", "tier", "entries", "bytes", "digest", "sealed"]
    if is_url(parsed.path):
        names[3:4] = ["quorums", "copies", "bookies"]
    times = (shown_time(row["created_ns"]) for row in rows)
    shown = [(*(_cell(row, name) for name in names), time) for row, time in zip(rows, times, strict=True)]
    print_table(shown, (*names, "created (UTC)"))
    return SOUND


def _cell(row: dict[str, Any], name: str) -> Any:
    return shown_name(row[name]) if name == "type" else _shown(row[name])


def _after(parsed: argparse.Namespace) -> int:
    return -1 if parsed.after is None else int(parsed.after)


def _is_wanted(parsed: argparse.Namespace, metadata: LedgerMetadata) -> bool:
    return (
        metadata.ledger_id > _after(parsed)
        and parsed.type in (None, str(metadata.ledger_type))
        and parsed.state in (None, metadata.state.value)
        and parsed.tier in (None, metadata.tier.value)
        and (
            parsed.bookie is None
            or any(parsed.bookie == each.bookie_id for fragment in metadata.fragments for each in fragment.ensemble)
        )
    )


def _shown(value: Any) -> Any:
    """Return how a table shows a value that JSON has as null, true or false."""
    if value is None:
        return ""
    return ("no", "yes")[value] if isinstance(value, bool) else value


def _store_rows(parsed: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each ledger of a store, with its confirmed entries and their bytes."""
    store = storage.ReadOnlyStore.open(parsed.path, config=StoreConfig())
    try:
        for metadata in store.ledgers():
            if _is_wanted(parsed, metadata):
                yield _ledger_row(store, metadata)
    finally:
        store.close()


def _ledger_row(store: ReadOnlyStore, metadata: LedgerMetadata) -> dict[str, Any]:
    descriptor = store.descriptor(metadata.ledger_id)
    confirmed = descriptor.last_add_confirmed
    # The store counts the bytes of durable entries. Where some of these are not confirmed, the bytes of the others
    # are known only after reading the entries, so they are left out.
    nbytes = descriptor.length_durable if confirmed == descriptor.last_durable else None if confirmed >= 0 else 0
    return _row(metadata, confirmed + 1, nbytes)


def _row(metadata: LedgerMetadata, entries: int | None, nbytes: int | None) -> dict[str, Any]:
    return {
        "ledger": metadata.ledger_id,
        "type": str(metadata.ledger_type),
        "state": metadata.state.value,
        "tier": metadata.tier.value,
        "entries": entries,
        "bytes": nbytes,
        "digest": metadata.digest_type.name,
        "sealed": end_is_sealed(metadata),
        "created_ns": metadata.creation_time_ns,
        "creation_sequence": metadata.creation_sequence,
        "storage_hints": sorted(hint.value for hint in metadata.storage_hints),
        "write_flags": int(metadata.write_flags),
        "custom_metadata": {key: base64(value) for key, value in metadata.custom_metadata.items()},
    }


def _cluster_rows(parsed: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each ledger of a cluster; an open ledger's has no end, which only its bookies know."""
    with metadata_of(parsed) as metadata:
        live = {found.bookie for found in metadata.list_bookies()}
        members = {found.bookie.bookie_id: found.bookie for found in metadata.list_cookies()}
        _check_bookie(parsed, [found.bookie.bookie_id for found in metadata.list_cookies(removed=True)])
        for ids in metadata.id_pages(after=_after(parsed)):
            found = [each for each in metadata.read_sound_ledgers(ids) if _is_wanted(parsed, each.metadata)]
            yield from _rows_of(metadata, found, live, members)


def _check_bookie(parsed: argparse.Namespace, members: Collection[str]) -> None:
    """Raise UsageError if ``--bookie`` names none that the cluster has or had."""
    if parsed.bookie is not None and parsed.bookie not in members:
        raise UsageError(
            f"the cluster has no bookie {parsed.bookie!r}, and had none: `pybk bookie list {parsed.path} --removed` "
            "lists them"
        )


def _rows_of(
    metadata: ClusterMetadata, found: list[StoredLedger], live: Collection[Bookie], members: Mapping[str, Bookie]
) -> list[dict[str, Any]]:
    """Return the rows of some ledgers of a cluster, by ascending id."""
    if not found:
        return []
    cluster = healing.ClusterMap()
    for each in found:
        cluster.apply(each.metadata.ledger_id, each.metadata, each.version)
    first, last = found[0].metadata.ledger_id, found[-1].metadata.ledger_id
    marks = list(takewhile(lambda mark: mark.ledger_id <= last, metadata.marks(after=first - 1)))
    copies = operations.Copies(cluster, live, marks)
    return [_cluster_row(each.metadata, copies, partial(_condition, live, members)) for each in found]


def _condition(live: Collection[Bookie], members: Mapping[str, Bookie], bookie: Bookie) -> str:
    """Return why a bookie has no copies now: another instance has its name, or it does not run; empty if it runs."""
    if bookie in live:
        return ""
    return "absent" if members.get(bookie.bookie_id) == bookie else "replaced"


def _cluster_row(metadata: LedgerMetadata, copies: Copies, condition: Callable[[Bookie], str]) -> dict[str, Any]:
    closed = metadata.state.value == "closed"
    row = _row(metadata, metadata.last_entry_id + 1 if closed else None, metadata.length if closed else None)
    fewest = copies.fewest(metadata.ledger_id)
    return {
        **row,
        "quorums": f"{metadata.ensemble_size}/{metadata.write_quorum}/{metadata.ack_quorum}",
        "copies": metadata.write_quorum if fewest is None else fewest,
        "bookies": ", ".join(
            f"{bookie.bookie_id} ({found})" if (found := condition(bookie)) else bookie.bookie_id
            for bookie in metadata.fragments[-1].ensemble
        ),
        "fragments": [
            {
                "first": fragment.first_entry_id,
                "bookies": [bookie.bookie_id for bookie in fragment.ensemble],
                "instances": [bookie.instance.hex() for bookie in fragment.ensemble],
                "conditions": [condition(bookie) or "runs" for bookie in fragment.ensemble],
            }
            for fragment in metadata.fragments
        ],
    }


# ---- show --------------------------------------------------------------------------------------------------------


def _show(parsed: argparse.Namespace) -> int:
    rows = _shown_of_cluster(parsed) if is_url(parsed.path) else _shown_of_store(parsed)
    if parsed.json:
        print_json({"ledgers": rows})
        return SOUND
    for place, row in enumerate(rows):
        if place:
            print()
        names = [name for name in row if name not in ("fragments", "custom_metadata", "created_ns", "bookies")]
        table = [(name.replace("_", " "), _shown(_joined(row[name]))) for name in names]
        table += [("created (UTC)", shown_time(row["created_ns"]))]
        table += [(f"custom metadata {key!r}, in base64", value) for key, value in row["custom_metadata"].items()]
        print_table(table, ())
        if "fragments" in row:
            fragments = [
                (each["first"], ", ".join(map(_with_condition, each["bookies"], each["conditions"])))
                for each in row["fragments"]
            ]
            print_table(fragments, ("fragment from entry", "bookies"))
    return SOUND


def _joined(value: Any) -> Any:
    return ", ".join(value) if isinstance(value, list) else value


def _with_condition(name: str, condition: str) -> str:
    return name if condition == "runs" else f"{name} ({condition})"


def _shown_of_store(parsed: argparse.Namespace) -> list[dict[str, Any]]:
    store = storage.ReadOnlyStore.open(parsed.path, config=StoreConfig())
    try:
        return [_ledger_row(store, store.descriptor(ledger_id).metadata) for ledger_id in parsed.ledgers]
    finally:
        store.close()


def _shown_of_cluster(parsed: argparse.Namespace) -> list[dict[str, Any]]:
    with metadata_of(parsed) as metadata:
        live = {found.bookie for found in metadata.list_bookies()}
        members = {found.bookie.bookie_id: found.bookie for found in metadata.list_cookies()}
        found = [metadata.read_ledger(ledger_id) for ledger_id in sorted(set(parsed.ledgers))]
        return _rows_of(metadata, found, live, members)


# ---- cat, reseal and delete ------------------------------------------------------------------------------------------


def _cat(parsed: argparse.Namespace) -> int:
    if parsed.recover:
        what = f"the end of ledger {parsed.ledger} is found, and its writer, if it has one, cannot append any more"
        confirm(parsed, str(parsed.ledger), what)
    recover = parsed.recover
    with (
        opened_manager(parsed, read_only=not recover) as manager,
        _open_ledger(manager, parsed, recover=recover) as reader,
    ):
        confirmed = reader.read_last_add_confirmed()
        last = confirmed if parsed.last is None else parsed.last
        try:
            entries = reader.read(parsed.first, last)
        except ReadRangeError as error:
            raise ReadRangeError(_outside(parsed, confirmed, closed=reader.is_closed)) from error
        for entry in entries:
            _print_entry(parsed, entry)
    return SOUND


def _outside(parsed: argparse.Namespace, confirmed: int, *, closed: bool) -> str:
    """Return the error for entries that a ledger does not have, which names the options that are given."""
    if parsed.last is not None and parsed.last < parsed.first:
        return f"--first {parsed.first} is after --last {parsed.last}: give the lower one as --first"
    given = [f"--first {parsed.first}"] if parsed.first else []
    if parsed.last is not None:
        given.append(f"--last {parsed.last}")
    asked = f"{' and '.join(given)} cannot be read: ledger {parsed.ledger}"
    if confirmed < 0:
        return f"{asked} {'is closed and has no entries' if closed else 'has no confirmed entries yet'}"
    return f"{asked} has the {'' if closed else 'confirmed '}entries 0 to {confirmed}{'' if closed else ' so far'}"


def _tail(parsed: argparse.Namespace) -> int:
    with opened_manager(parsed, read_only=True) as manager, _open_ledger(manager, parsed) as reader:
        last = reader.read_last_add_confirmed()
        first = max(0, last - parsed.n + 1)
        for entry in reader.follow(first) if parsed.follow else reader.read(first, last):
            _print_entry(parsed, entry)
            if parsed.follow and entry.entry_id >= last:
                sys.stdout.flush()  # the next one may take its time
    return SOUND


def _print_entry(parsed: argparse.Namespace, entry: Entry) -> None:
    if parsed.json:
        print_json_line({**entry._asdict(), "payload": base64(entry.payload)})
        return
    if parsed.headers:
        print(
            f"entry {entry.entry_id}, last add confirmed {entry.last_add_confirmed}, length {entry.length}, "
            f"{len(entry.payload)} bytes",
            flush=True,
        )
    sys.stdout.buffer.write(entry.payload + (b"\n" if parsed.lines or parsed.headers else b""))


def _reseal(parsed: argparse.Namespace) -> int:
    if not is_url(parsed.path):
        opened_manager(parsed, read_only=True).close()  # fails without a store, where an open would create one
    given = given_in(parsed)
    with opened_manager(parsed, read_only=False) as manager:
        rows = []
        for ledger_id in parsed.ledgers:
            with _password_needed(ledger_id, given):
                metadata = manager.reseal(ledger_id, **given)
            rows.append({"ledger": ledger_id, "last_entry": metadata.last_entry_id, "seal": metadata.seal.hex()})
            if not parsed.json:
                print(f"ledger {ledger_id} was checked up to entry {metadata.last_entry_id} and is sealed")
    if parsed.json:
        print_json({"ledgers": rows})
    return SOUND


def _delete(parsed: argparse.Namespace) -> int:
    if not is_url(parsed.path):
        opened_manager(parsed, read_only=True).close()  # fails without a store, where an open would create one
    given = given_in(parsed)
    ids = list(dict.fromkeys(parsed.ledgers))
    deleted, failed = [], {}
    with opened_manager(parsed, read_only=parsed.dry_run) as manager:
        sizes = {each: manager.ledger_summary(each).length for each in ids}  # raises for one that is not there
        shown = ", ".join(f"{each} ({'unknown' if size is None else size} bytes)" for each, size in sizes.items())
        if parsed.dry_run:
            if not parsed.json:
                print(f"would be deleted: {shown}")
        else:
            confirm(parsed, " ".join(map(str, ids)), f"ledgers are deleted for good: {shown}")
            for ledger_id in ids:
                try:
                    with _password_needed(ledger_id, given):
                        manager.delete_ledger(ledger_id, **given)
                    deleted.append(ledger_id)
                except PybkError as error:
                    failed[ledger_id] = " ".join(str(error).split())
                    print(f"pybk: ledger {ledger_id} is not deleted: {failed[ledger_id]}", file=sys.stderr)
    if parsed.json:
        print_json({"deleted": deleted, "failed": failed, "dry_run": parsed.dry_run})
    elif deleted:
        print(f"{counted(len(deleted), 'ledger')} deleted: {', '.join(map(str, deleted))}")
    return SOUND if not failed else PARTLY if deleted else FAILED


def _open_ledger(manager: LedgerManager, parsed: argparse.Namespace, *, recover: bool = False) -> LedgerReader:
    """Open a ledger; without ``--recover`` its writer is not fenced."""
    given = given_in(parsed)
    with _password_needed(parsed.ledger, given):
        return manager.open_ledger(parsed.ledger, **given, recover=recover)


@contextmanager
def _password_needed(ledger_id: int, given: Given) -> Iterator[None]:
    """Say in the error of a missing password how it is given; that of a wrong one says so itself."""
    try:
        yield
    except UnauthorizedError as error:
        if given["password"] or given["secret"] is not None:
            raise
        raise UnauthorizedError(
            f"no password was given for ledger {ledger_id}, and no secret, but it was created with one; give it with "
            f"--secret-file FILE, --password-file FILE, or in {SECRET} or {PASSWORD}; nothing was changed"
        ) from error


VERBS: Final[Verbs] = {
    "list": _list,
    "show": _show,
    "cat": _cat,
    "tail": _tail,
    "reseal": _reseal,
    "delete": _delete,
}
"""The verbs of ``pybk ledger``."""
