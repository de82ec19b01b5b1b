"""Checks all values in a metadata store or an export: their MACs, their contents, and dangling references."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final
from urllib.parse import unquote

from pybk.errors import CorruptError, MetadataForgedError, PybkError
from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata, LedgerState
from pybk.metadata import durable_positions, epochs
from pybk.metadata.authenticated_values import ValueKind, decode_authenticated
from pybk.metadata.cluster import CLUSTER_KEY, ClusterIdentity, KeyFor, check_cluster_value
from pybk.metadata.deletions import DELETION_HEAD_KEY, DELETION_POSITIONS_KEY, DELETIONS_KEY
from pybk.metadata.durable_positions import POSITIONS_KEY
from pybk.metadata.epochs import EPOCH_KEY, OUTDATED_KEY
from pybk.metadata.export import NOT_EXPORTED
from pybk.metadata.id_ranges import count_ids, decode_ranges
from pybk.metadata.ledgers import DELETED_IDS_REMEDY, DELETED_KEY, IDS_KEY, LEDGERS_KEY, ledger_path
from pybk.metadata.metadata_keys import MetadataKeys
from pybk.metadata.pointers import POINTERS_KEY
from pybk.metadata.registration import COOKIES_KEY
from pybk.metadata.reports import MetadataCheckReport, MetadataProblem
from pybk.metadata.settings import SETTINGS_KEY
from pybk.metadata.underreplication import NEWS_KEY, UNDER_REPLICATED_KEY, decode_record, missing_key
from pybk.values import decode_json, from_base64

_KINDS: Final = {
    CLUSTER_KEY: (ValueKind.CLUSTER,),
    IDS_KEY: (ValueKind.IDS,),
    LEDGERS_KEY: (ValueKind.LEDGER, ValueKind.DELETED),
    DELETED_KEY: (ValueKind.DELETED_IDS,),
    COOKIES_KEY: (ValueKind.COOKIE,),
    POSITIONS_KEY: (ValueKind.POSITION,),
    UNDER_REPLICATED_KEY: (ValueKind.UNDER_REPLICATED,),
    NEWS_KEY: (ValueKind.NEWS,),
    POINTERS_KEY: (ValueKind.POINTER,),
    SETTINGS_KEY: (ValueKind.SETTINGS,),
    DELETIONS_KEY: (ValueKind.DELETIONS,),
    DELETION_HEAD_KEY: (ValueKind.DELETION_HEAD,),
    DELETION_POSITIONS_KEY: (ValueKind.DELETION_POSITION,),
    EPOCH_KEY: (ValueKind.EPOCH,),
    OUTDATED_KEY: (ValueKind.OUTDATED,),
}
"""The kinds of values by the first name of their keys; other keys are counted, and not checked."""


def check_values(
    values: Iterable[tuple[str, bytes]],
    identity: ClusterIdentity,
    keys: MetadataKeys | None,
    key_for: KeyFor | None,
    progress: Callable[[int, int], None],
) -> MetadataCheckReport:
    """Check the values of a cluster.

    Args:
        values: All keys and values.
        identity: The cluster's identity, from its value.
        keys: The cluster's metadata keys, None without a secret.
        key_for: As for ``ClusterMetadata``.
        progress: Called with the number of values checked, as both arguments, because the total is not known.
    """
    check = _Check(identity, keys, key_for)
    for number, (key, value) in enumerate(values, start=1):
        check.take(key, value)
        if number % 1000 == 0:
            progress(number, number)
    return check.report()


class _Check:
    """The state of a check."""

    def __init__(
        self,
        identity: ClusterIdentity,
        keys: MetadataKeys | None,
        key_for: KeyFor | None,
    ) -> None:
        self._identity = identity
        self._keys = keys
        self._key_for = key_for
        self._counts: Counter[str] = Counter()
        self._problems: list[MetadataProblem] = []
        self._live: set[int] = set()
        self._highest = -1
        self._cookies: dict[str, bytes] = {}
        self._named: Counter[Bookie] = Counter()
        self._marks: list[tuple[str, int]] = []
        self._positions: list[tuple[str, Bookie]] = []
        self._next_id = 0
        self._epoch = ""
        self._by_kind: dict[ValueKind, Callable[[str, bytes], None]] = {
            ValueKind.IDS: self._ids,
            ValueKind.LEDGER: self._ledger,
            ValueKind.DELETED: self._deleted,
            ValueKind.DELETED_IDS: self._deleted_ids,
            ValueKind.COOKIE: self._cookie,
            ValueKind.POSITION: self._position,
            ValueKind.UNDER_REPLICATED: self._mark,
            ValueKind.EPOCH: self._take_epoch,
            ValueKind.OUTDATED: self._outdated,
        }

    def take(self, key: str, value: bytes) -> None:
        """Check one value."""
        first = key.partition("/")[0]
        if first in NOT_EXPORTED:
            return
        self._counts["values"] += 1
        if first not in _KINDS:
            self._counts["unknown"] += 1
            return
        try:
            if key == CLUSTER_KEY:
                check_cluster_value(value, self._key_for)
                return
            kind, payload = decode_authenticated(key, value, self._keys)
            if kind not in _KINDS[first]:
                raise CorruptError(f"metadata key {key!r}: kind {kind.name} does not belong there; restore it")
            if kind in self._by_kind:
                self._by_kind[kind](key, payload)
        except PybkError as error:
            damaged_ids = first == DELETED_KEY and isinstance(error, CorruptError | MetadataForgedError)
            self._problem(key, f"{error}; {DELETED_IDS_REMEDY}" if damaged_ids else str(error))

    def _problem(self, key: str, problem: str) -> None:
        self._problems.append(MetadataProblem(key, problem))

    # ---- kinds ---------------------------------------------------------------------------------------------------

    def _ids(self, key: str, payload: bytes) -> None:
        self._next_id = decode_json(payload, lambda values: int(values["next"]), where=f"metadata key {key!r}")

    def _ledger(self, key: str, payload: bytes) -> None:
        metadata = LedgerMetadata.decode(payload, where=f"metadata key {key!r}")
        self._at(key, metadata.ledger_id)
        self._live.add(metadata.ledger_id)
        self._named.update({bookie for fragment in metadata.fragments for bookie in fragment.ensemble})
        closed = metadata.state is LedgerState.CLOSED
        self._counts["not_closed"] += not closed
        if not metadata.fragments:
            raise CorruptError(f"ledger {metadata.ledger_id} names no bookies; restore its metadata, or rebuild them")
        if closed and metadata.fragments[-1].first_entry_id > max(metadata.last_entry_id, 0):
            raise CorruptError(
                f"ledger {metadata.ledger_id} ends with entry {metadata.last_entry_id}, before its last fragment from "
                f"entry {metadata.fragments[-1].first_entry_id} on; restore its metadata, or rebuild them"
            )

    def _at(self, key: str, ledger_id: int) -> None:
        """Check that a ledger's value is where it belongs, and note its id."""
        self._highest = max(self._highest, ledger_id)
        if key != f"{LEDGERS_KEY}/{ledger_path(ledger_id)}":
            raise CorruptError(f"metadata key {key!r} holds ledger {ledger_id}; restore it")

    def _deleted(self, key: str, payload: bytes) -> None:
        if not key.startswith(f"{LEDGERS_KEY}/"):
            return
        self._counts["tombstones"] += 1
        where = f"metadata key {key!r}"
        self._at(key, decode_json(payload, lambda values: int(values["ledger_id"]), where=where))
        decode_json(payload, lambda values: from_base64(values["proof"]), where=where)

    def _deleted_ids(self, key: str, payload: bytes) -> None:
        self._counts["tombstones"] += count_ids(decode_json(payload, decode_ranges, where=f"metadata key {key!r}"))

    def _cookie(self, key: str, payload: bytes) -> None:
        def make(values: dict[str, Any]) -> tuple[Bookie, bytes]:
            bookie = Bookie(str(values["bookie_id"]), from_base64(values["instance"]))
            return bookie, from_base64(values["cluster_id"])

        bookie, cluster_id = decode_json(payload, make, where=f"metadata key {key!r}")
        self._cookies[bookie.bookie_id] = bookie.instance
        if bookie.bookie_id != unquote(key.rpartition("/")[2]):
            self._problem(key, f"it is the cookie of {bookie}; restore it")
        if cluster_id != self._identity.cluster_id:
            self._problem(key, f"{bookie} is of cluster {cluster_id.hex()}; restore it")

    def _position(self, key: str, payload: bytes) -> None:
        position = decode_json(payload, durable_positions.decode, where=f"metadata key {key!r}")
        self._positions.append((key, position.bookie))

    def _mark(self, key: str, payload: bytes) -> None:
        record = decode_json(payload, decode_record, where=f"metadata key {key!r}")
        if missing_key(record.ledger_id, record.bookie) != key:
            self._problem(key, f"it is a mark of ledger {record.ledger_id}, {record.bookie}; remove it")
        self._marks.append((key, record.ledger_id))

    def _take_epoch(self, key: str, payload: bytes) -> None:
        self._epoch = str(decode_json(payload, epochs.decode, where=f"metadata key {key!r}"))

    def _outdated(self, key: str, payload: bytes) -> None:
        reason = decode_json(payload, lambda values: str(values["reason"]), where=f"metadata key {key!r}")
        self._problem(key, f"the metadata were put back to an older state: {reason}; {epochs.REMEDY}")

    # ---- dangling references -------------------------------------------------------------------------------------

    def report(self) -> MetadataCheckReport:
        """Make the checks that need all values, and return the result."""
        for key, ledger_id in self._marks:
            if ledger_id not in self._live:
                self._problem(key, f"ledger {ledger_id} does not exist; remove the mark")
        for key, bookie in self._positions:
            if self._cookies.get(bookie.bookie_id) != bookie.instance:
                self._problem(key, f"{bookie} does not belong to the cluster; remove the position")
        notes = []
        if self._highest >= self._next_id:
            notes.append(
                f"there is a ledger {self._highest}, and the next id that is given is {self._next_id}: unless an "
                "application chose that id, restore these metadata with a new epoch, which raises the ids"
            )
        for bookie, count in sorted(self._named.items()):
            if self._cookies.get(bookie.bookie_id) != bookie.instance:
                notes.append(f"{count} ledgers name {bookie}, which does not belong to the cluster: replicate them")
        if not self._epoch:
            notes.append("the cluster has no epoch yet: a bookie of this pybk begins it when it starts")
        return MetadataCheckReport(
            self._counts["values"],
            len(self._live),
            self._counts["not_closed"],
            self._counts["tombstones"],
            len(self._cookies),
            self._counts["unknown"],
            self._next_id,
            self._epoch,
            tuple(self._problems),
            tuple(notes),
            (),
        )
