"""Restores a cluster's metadata, or rebuilds them from bookies' directories; ``metadata_repair`` has the calls.

Theory of operation. ``restore_metadata`` and ``rebuild_metadata`` are one procedure, ``MetadataRestore``. It first
computes, without a change, the values that it would write. With ``write=True`` it then writes in the following order.
It may be repeated after a stop at any point, because existing keys are left or written again:

1. the key ``cluster``, from the export or from a bookie's copy;
2. the key ``outdated``, which keeps bookies and clients away until the end;
3. the keys of the export;
4. from the bookies' directories: cookies, tombstones, ledgers, corrected ensembles, and marks of entries that bookies
   lack;
5. ids above all that are known;
6. the new epoch, and last the removal of ``outdated``.

The directories are locked meanwhile, so no bookie can start. A running bookie would serve by its knowledge of the
former metadata, so nothing is written while one is registered. ``replication.held_entries`` finds the ensembles that a
ledger had. Seals are kept only in the metadata. So a ledger whose end is not in the metadata is left in recovery: the
next client that opens it with its password finds its end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple
from urllib.parse import unquote

from pybk.bookie.holdings import HeldLedger, Holdings, open_holdings
from pybk.credentials import ClusterSecret, cluster_secrets
from pybk.errors import (
    CookieError,
    CorruptError,
    LedgerExistsError,
    MetadataError,
    MetadataExistsError,
    MetadataForgedError,
    PybkError,
    SafetyCheckError,
    UsageError,
)
from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint
from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata, LedgerState
from pybk.manager.connect import key_for, open_cluster
from pybk.metadata.authenticated_values import (
    VALUE_FORMAT_RESEALED,
    ValueKind,
    decode_authenticated,
    encode_authenticated,
    epoch_of,
    token_of,
)
from pybk.metadata.cluster import (
    CLUSTER_KEY,
    ClusterMetadata,
    age_of,
    check_cluster_value,
    cluster_value_of,
)
from pybk.metadata.epochs import EPOCH_KEY, OUTDATED_KEY
from pybk.metadata.export import NOT_EXPORTED, check_export, read_export, write_export
from pybk.metadata.id_ranges import IdRange, decode_ranges, has_id
from pybk.metadata.ledger_description import LedgerDescription, description_body
from pybk.metadata.ledgers import DELETED_KEY, IDS_KEY, LEDGERS_KEY, deleted_ids_key
from pybk.metadata.metadata_check import check_values
from pybk.metadata.metadata_keys import MetadataKeys
from pybk.metadata.pointers import POINTERS_KEY
from pybk.metadata.registration import BOOKIES_KEY, COOKIES_KEY, BookieState, decode_cookie, name_in_key
from pybk.metadata.reports import MetadataCheckReport, MetadataExportReport, MetadataRestoreReport
from pybk.metadata.store import MetadataStore
from pybk.metadata.url import open_metadata
from pybk.replication.held_entries import FoundEnsembles, HeldRun, Quorums, ensembles_hold, find_ensembles
from pybk.transport.cluster_keys import proves_deletion
from pybk.values import decode_json, listed

ID_JUMP: Final = 1_000_000
"""The distance by which the ids jump above all known ones, because other ids may have been given to lost ledgers."""

ID_COUNTED_MAX: Final = 1 << 62
"""The id from which on ids were chosen by applications; they are ignored when ids are raised."""

_UNFINISHED: Final = "restoring or rebuilding them was begun and not finished: repeat it"


def export(
    url: str, path: str, secret: ClusterSecret | None, progress: Callable[[int, int], None]
) -> MetadataExportReport:
    """Export metadata as ``export_metadata`` does."""
    metadata, _ = open_cluster(url, secret, create=False, mending=True)
    metadata.close()
    store = open_metadata(url, create=False)
    try:
        return write_export(store, path, time.time_ns(), progress)
    finally:
        store.close()


def check(
    text: str, secret: ClusterSecret | None, progress: Callable[[int, int], None], *, repair: bool
) -> MetadataCheckReport:
    """Check metadata as ``check_metadata`` does."""
    derive = key_for(cluster_secrets(secret))
    repaired: list[str] = []
    if repair:
        if "://" not in text:
            raise UsageError(f"{text} is an export, which stays as it is; repair the metadata store: give its URL")
        with open_cluster(text, secret, create=False, mending=True)[0] as metadata:
            repaired = metadata.repair_deleted_ids()
    with ExitStack() as stack:
        if "://" in text:
            store = open_metadata(text, create=False)
            stack.callback(store.close)
            values: Callable[[], Iterator[tuple[str, bytes]]] = partial(_stored, store)
            node = store.get(CLUSTER_KEY, latest=True)
            found = None if node is None else node.value
        else:
            check_export(text)
            values = partial(read_export, text)
            found = dict(values()).get(CLUSTER_KEY)
        if found is None:
            raise MetadataError(f"there is no cluster in {text}: check the URL or the file")
        identity, keys = check_cluster_value(found, derive)
        return check_values(values(), identity, keys, derive, progress)._replace(repaired=tuple(repaired))


def _stored(store: MetadataStore) -> Iterator[tuple[str, bytes]]:
    return ((key, node.value) for key, node in store.walk())


class _Found(NamedTuple):
    """The findings about one ledger.

    Attributes:
        holders: The entries that each bookie holds of it.
        description: The description that they hold; None if none does.
        stored: The metadata that the store or the export has; None if it has none.
    """

    holders: dict[Bookie, HeldLedger]
    description: LedgerDescription | None
    stored: LedgerMetadata | None

    @property
    def runs(self) -> dict[Bookie, tuple[HeldRun, ...]]:
        """The entries that each bookie holds."""
        return {bookie: held.runs for bookie, held in self.holders.items()}


class _Plan:
    """The values to write and to report."""

    def __init__(self) -> None:
        self.made: dict[int, LedgerMetadata] = {}
        self.corrected: dict[int, LedgerMetadata] = {}
        self.deleted: dict[int, bytes] = {}
        self.missing: list[tuple[int, Bookie, int]] = []
        self.suspects: list[int] = []
        self.undecidable: list[int] = []
        self.incomplete: list[tuple[int, int, int]] = []
        self.not_made: list[tuple[int, str]] = []
        self.notes: list[str] = []


class MetadataRestore:
    """One run of ``restore_metadata`` or ``rebuild_metadata``; a context manager, which closes what it opened."""

    def __init__(
        self,
        url: str,
        secret: ClusterSecret | None,
        export: str | None,
        directories: Sequence[str],
        *,
        all_directories: bool,
        new_epoch: bool,
        overwrite: bool,
        write: bool,
    ) -> None:
        self._url = url
        self._secret = secret
        self._key_for = key_for(cluster_secrets(secret))
        self._export = export
        self._paths = directories
        self._all = all_directories
        self._new_epoch = new_epoch
        self._overwrite = overwrite
        self._write = write
        self._stack = ExitStack()
        self._plan = _Plan()
        self._holdings: list[Holdings] = []
        self._keys: MetadataKeys | None = None
        self._reading: MetadataKeys | None = None
        """The keys that verify the values in the export or the store."""
        self._values: dict[str, bytes] = {}
        """The values that the export or the store has."""
        self._stored: dict[int, LedgerMetadata | None] = {}
        """The ledgers in it; None for a tombstone."""
        self._folded: dict[str, list[IdRange]] = {}
        self._unreadable: set[int] = set()
        """Ledgers whose values in it are damaged."""
        self._running: list[str] = []
        """Bookies that are registered in the store."""

    def __enter__(self) -> MetadataRestore:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the directories and the store."""
        self._stack.close()

    def run(self) -> MetadataRestoreReport:
        """Compute the changes, and write them if ``write`` is set."""
        self._holdings = [self._stack.enter_context(open_holdings(os.path.abspath(path))) for path in self._paths]
        names = [held.identity.bookie_id for held in self._holdings]
        if len(set(names)) < len(names):
            raise UsageError(f"two directories are of one bookie: {sorted(names)}; leave out the one that was replaced")
        cluster_value = self._read_values()
        identity, self._keys = check_cluster_value(cluster_value, self._key_for)
        self._reading = self._keys if self._export is None or self._keys is None else self._keys.of_an_export()
        for held in self._holdings:
            if held.identity.cluster_id != identity.cluster_id:
                raise UsageError(f"{held.identity} is not of cluster {identity.cluster_id.hex()}; leave it out")
        self._check_members()
        self._decode_ledgers()
        self._find_deletions()
        for ledger_id in sorted({each for held in self._holdings for each in held.known}):
            self._judge(ledger_id)
        self._note()
        next_id = self._next_id()
        return self._report(next_id, self._do(cluster_value, next_id) if self._write else 0)

    def _report(self, next_id: int, epoch: int) -> MetadataRestoreReport:
        plan = self._plan
        return MetadataRestoreReport(
            self._write,
            len(self._values),
            sum(found is not None for found in self._stored.values()),
            tuple(plan.made),
            tuple(plan.corrected),
            tuple(plan.deleted),
            tuple(plan.suspects),
            tuple(plan.undecidable),
            tuple(plan.incomplete),
            tuple(plan.not_made),
            next_id,
            epoch,
            self._limbo,
            tuple(plan.notes),
        )

    @property
    def _limbo(self) -> bool:
        return self._new_epoch and not (self._all and self._holdings)

    # ---- finding out ---------------------------------------------------------------------------------------------

    def _read_values(self) -> bytes:
        """Read the export, or what the store has; return the value of the key ``cluster``, or a bookie's copy."""
        found = self._read_store()
        if self._export is not None:
            check_export(self._export)
            self._values = dict(read_export(self._export))
            if (
                CLUSTER_KEY in found
                and not self._overwrite
                and _UNFINISHED.encode() not in found.get(OUTDATED_KEY, b"")
            ):
                raise UsageError(
                    f"{self._url} is not empty; name an empty store, or give overwrite=True (--overwrite), which "
                    "removes what it has"
                )
        else:
            self._values = found
        value = self._values.get(CLUSTER_KEY)
        copies = [held.about for held in self._holdings if held.about]
        if value is None and (self._export is not None or not copies):
            raise MetadataError(
                f"there is no cluster in {self._export or self._url}, and no directory has a copy of its own metadata; "
                "give an export of the whole cluster, or directories of bookies that were started by pybk 0.2 or newer"
            )
        if value is None:
            return cluster_value_of(max(copies, key=age_of))
        if self._export is None or not copies:
            return value
        # The secret may have been replaced since the export. What was retired stays retired, and ledgers that were made
        # since have descriptions by the new secret.
        _, payload = decode_authenticated(CLUSTER_KEY, value, None)
        newest = max((payload, *copies), key=age_of)
        return value if newest == payload else cluster_value_of(newest)

    def _read_store(self) -> dict[str, bytes]:
        """Return what the store has, except what is leased; nothing if there is no store. Note which bookies run."""
        try:
            store = open_metadata(self._url, create=False)
        except MetadataError as error:
            if type(error) is MetadataError:
                return {}
            raise
        try:
            self._running = [unquote(name) for name in store.children(BOOKIES_KEY)]
            return {key: node.value for key, node in store.walk() if key.partition("/")[0] not in NOT_EXPORTED}
        finally:
            store.close()

    def _check_members(self) -> None:
        """Note which members are replaced; raise CookieError for a bookie that was removed: it cannot be one again."""
        for path, held in zip(self._paths, self._holdings, strict=True):
            key = f"{COOKIES_KEY}/{name_in_key(held.bookie.bookie_id)}"
            if key not in self._values:
                continue
            kind, payload = decode_authenticated(key, self._values[key], self._reading)
            if kind is not ValueKind.COOKIE:
                continue
            cookie = decode_json(payload, decode_cookie, where=f"metadata key {key!r}")
            if cookie.bookie == held.bookie and cookie.state is BookieState.REMOVED:
                raise CookieError(f"{path} is of {held.bookie}, which was removed from the cluster; leave it out")
            if cookie.bookie != held.bookie and cookie.state is not BookieState.REMOVED:
                self._plan.notes.append(
                    f"{held.bookie} of {path} becomes a member instead of {cookie.bookie}, which is then refused"
                )

    def _decode_ledgers(self) -> None:
        """Decode the ledgers that the export or the store has."""
        for key, value in self._values.items():
            if key.startswith(f"{DELETED_KEY}/"):
                self._decode_deleted_ids(key, value)
            if not key.startswith(f"{LEDGERS_KEY}/"):
                continue
            try:
                ledger_id = int(key[len(LEDGERS_KEY) :].replace("/", ""))
            except ValueError:
                continue
            try:
                kind, payload = decode_authenticated(key, value, self._reading)
                tombstone = kind is ValueKind.DELETED
                self._stored[ledger_id] = None if tombstone else LedgerMetadata.decode(payload, where=f"key {key!r}")
            except PybkError as error:
                self._unreadable.add(ledger_id)
                self._plan.not_made.append((ledger_id, str(error)))

    def _decode_deleted_ids(self, key: str, value: bytes) -> None:
        try:
            _, payload = decode_authenticated(key, value, self._reading)
            self._folded[key] = decode_json(payload, decode_ranges, where=f"key {key!r}")
        except (CorruptError, MetadataForgedError) as error:
            self._plan.notes.append(f"{error}; it is made again: its ids that no ledger has count as deleted")

    def _find(self, ledger_id: int) -> _Found:
        """Return what is known of a ledger."""
        holders = {held.bookie: held.ledger(ledger_id) for held in self._holdings if ledger_id in held.known}
        encoded = [held.description for held in holders.values() if held.description]
        description = None
        if len({description_body(each) for each in encoded}) == 1:  # the MACs may be of several secrets
            keys = None if self._keys is None else self._keys.of_descriptions
            with suppress(CorruptError, MetadataForgedError):
                where = f"ledger {ledger_id} in a bookie's directory"
                description = LedgerDescription.decode(encoded[0], keys, where=where)
        return _Found(holders, description, self._stored.get(ledger_id))

    def _find_deletions(self) -> None:
        """Plan tombstones for the ledgers whose deletion a bookie remembers, with a proof that fits the ledger."""
        proofs = {ledger_id: proof for held in self._holdings for ledger_id, proof in held.deleted.items()}
        for ledger_id, proof in sorted(proofs.items()):
            if ledger_id in self._unreadable or self._is_deleted(ledger_id):
                continue
            found = self._find(ledger_id)
            known = found.stored or found.description
            if known is None or proves_deletion(known.verifier, proof, ledger_id):
                self._plan.deleted[ledger_id] = proof

    def _is_deleted(self, ledger_id: int) -> bool:
        """Return whether the export or the store has a tombstone of a ledger, which may be folded (DT3)."""
        if self._stored.get(ledger_id, ledger_id) is None:
            return True
        return has_id(self._folded.get(deleted_ids_key(ledger_id), ()), ledger_id)

    def _judge(self, ledger_id: int) -> None:
        """Plan what is to be done about a ledger that a bookie holds."""
        if ledger_id in self._unreadable or ledger_id in self._plan.deleted or self._is_deleted(ledger_id):
            return
        found = self._find(ledger_id)
        if ledger_id not in self._stored:
            self._make(ledger_id, found)
        elif found.stored is not None and self._all:
            self._correct(found.stored, found)

    def _fillers(self) -> list[Bookie]:
        return [held.bookie for held in self._holdings] if self._all else []

    def _make(self, ledger_id: int, found: _Found) -> None:
        """Plan the metadata of a ledger that the store and the export lack."""
        described = found.description
        if described is None:
            self._plan.not_made.append((ledger_id, "no bookie holds its description, or they hold different ones"))
            return
        quorums = Quorums(described.ensemble_size, described.write_quorum, described.ack_quorum)
        ensembles = find_ensembles(quorums, found.runs, fillers=self._fillers())
        tiers = [held.tier for held in found.holders.values() if held.tier is not None]
        metadata = LedgerMetadata(
            ledger_id=ledger_id,
            state=LedgerState.IN_RECOVERY,
            ledger_type=described.ledger_type,
            storage_hints=described.storage_hints,
            write_flags=described.write_flags,
            digest_type=described.digest_type,
            ensemble_size=described.ensemble_size,
            write_quorum=described.write_quorum,
            ack_quorum=described.ack_quorum,
            creation_time_ns=described.creation_time_ns,
            creation_sequence=described.creation_sequence,
            custom_metadata=described.custom_metadata or {},
            tier=tiers[0] if tiers else next(iter(described.storage_hints), StorageHint.NVME),
            advanced=described.advanced,
            key_salt=described.key_salt,
            key_epoch=described.key_epoch,
            verifier=described.verifier,
            version=1,
            fragments=ensembles.fragments,
            key_format=described.key_format,
        )
        if LedgerDescription.of(metadata) != described:
            self._plan.not_made.append((ledger_id, "its bookies hold only the digest of its custom metadata"))
            return
        self._plan.made[ledger_id] = metadata
        if len(found.holders) < described.write_quorum:
            self._plan.suspects.append(ledger_id)
        self._tell(ledger_id, ensembles, closed=False)

    def _tell(self, ledger_id: int, ensembles: FoundEnsembles, *, closed: bool) -> None:
        """Note what the ensembles of a ledger lack."""
        self._plan.missing += [(ledger_id, bookie, first) for bookie, first in ensembles.missing]
        self._plan.incomplete += [(ledger_id, first, last) for first, last in ensembles.nowhere]
        if ensembles.undecidable and not closed:
            self._plan.undecidable.append(ledger_id)

    def _correct(self, stored: LedgerMetadata, found: _Found) -> None:
        """Plan other ensembles for a ledger, if those of its metadata do not fit what bookies hold."""
        if not stored.fragments:
            return
        closed = stored.state is LedgerState.CLOSED
        quorums = Quorums(stored.ensemble_size, stored.write_quorum, stored.ack_quorum)
        last = stored.last_entry_id if closed else None
        answering = {held.bookie for held in self._holdings}
        sound, missing = ensembles_hold(quorums, stored.fragments, found.runs, answering, last)
        if sound:
            self._plan.missing += [(stored.ledger_id, bookie, first) for bookie, first in missing]
            return
        ensembles = find_ensembles(quorums, found.runs, fillers=self._fillers(), last=last)
        state = stored.state if closed else LedgerState.IN_RECOVERY
        corrected = replace(stored, state=state, fragments=ensembles.fragments, version=stored.version + 1)
        self._plan.corrected[stored.ledger_id] = corrected
        self._tell(stored.ledger_id, ensembles, closed=closed)

    def _next_id(self) -> int:
        """Return the id from which on ids are to be given."""
        given = 0
        if IDS_KEY in self._values:
            with suppress(CorruptError, MetadataForgedError):
                _, payload = decode_authenticated(IDS_KEY, self._values[IDS_KEY], self._reading)
                given = decode_json(payload, lambda values: int(values["next"]), where=f"metadata key {IDS_KEY!r}")
        if not self._new_epoch:
            return given
        known = {*self._stored, *self._unreadable, *self._plan.deleted}
        known.update(*(held.known for held in self._holdings))
        return max(given, max((each for each in known if each < ID_COUNTED_MAX), default=-1) + 1) + ID_JUMP

    def _note(self) -> None:
        """Note what cannot be brought back, and what to do next."""
        plan, notes = self._plan, self._plan.notes
        if self._running:
            notes.append(_running_text(self._running))
        if self._export is not None and self._new_epoch:
            notes.append(
                "an export does not know what came after it: ledgers that were deleted since are back unless a bookie "
                "remembers the deletion, ledgers that were closed since are open, and pointers are as they were"
            )
        if self._export is None and not any(key.startswith(f"{POINTERS_KEY}/") for key in self._values):
            notes.append(
                "no bookie keeps pointers: the names of logs, of blobs and of other ledger lists, their truncation "
                "points and the states of sinks are lost; ledgers of their types are there, and `pybk log rebuild` "
                "makes the list of a log again"
            )
        if self._holdings:
            notes.append("a ledger that has neither entries nor a fence is known to no bookie, and is lost")
        if plan.made:
            notes.append(
                f"{len(plan.made)} ledgers are in recovery, because nothing but the metadata keeps their ends and "
                "seals: open each with its password; entries that came after the end of a closed ledger, and that a "
                "bookie still has, become part of it"
            )
        if plan.suspects:
            notes.append(
                f"{len(plan.suspects)} ledgers are on fewer bookies than they should be: those that were deleted while "
                "their bookies were away come back, as no bookie remembers it; delete them again"
            )
        if self._limbo:
            notes.append(
                "not all directories were looked at: bookies put all their ledgers in limbo when they start, and "
                "ledgers that are not closed stay in recovery until metadata are rebuilt with all directories"
            )

    # ---- doing it ------------------------------------------------------------------------------------------------

    def _do(self, cluster_value: bytes, next_id: int) -> int:
        """Write everything; return the number of the new epoch, 0 if there is none."""
        store = open_metadata(self._url)
        self._stack.callback(store.close)
        # Read again, because to look at large directories takes long, and a bookie may have started meanwhile.
        if names := [unquote(name) for name in store.children(BOOKIES_KEY)]:
            running = _running_text(names)
            raise SafetyCheckError(f"nothing was written to {self._url}: {running}", failures=(running,))
        if self._overwrite:
            for key, node in list(store.walk()):
                if key.partition("/")[0] not in NOT_EXPORTED:
                    store.delete(key, node.version)
        with suppress(MetadataExistsError):
            store.create(CLUSTER_KEY, cluster_value)
        metadata, _ = open_cluster(self._url, self._secret, create=False, mending=True)
        self._stack.callback(metadata.close)
        metadata.note_outdated(_UNFINISHED)
        if self._export is not None:
            skipped = {CLUSTER_KEY, OUTDATED_KEY, *((EPOCH_KEY,) if self._new_epoch else ())}
            for key, value in self._values.items():
                if key not in skipped:
                    with suppress(MetadataExistsError):  # a run before this one was stopped
                        store.create(key, self._as_new(key, value))
        self._write_bookies(metadata)
        metadata.repair_deleted_ids({each for held in self._holdings for each in held.known})
        self._write_ledgers(metadata)
        epoch = 0
        if self._new_epoch:
            metadata.raise_ids(next_id)
            seen = max((held.seen.epoch.number for held in self._holdings if held.seen is not None), default=0)
            epoch = metadata.begin_epoch(limbo=self._limbo, above=seen).number
        metadata.clear_outdated()
        return epoch

    def _as_new(self, key: str, value: bytes) -> bytes:
        """Return a value as it is to be stored, with another MAC if it needs one.

        A value that was resealed names versions of the store that it was in. One by a secret that was retired since
        the export would be refused.
        """
        keys = self._keys
        retired = keys is not None and bool(value) and epoch_of(value) in keys.earlier
        if value[:1] != bytes([VALUE_FORMAT_RESEALED]) and not retired:
            return value
        with suppress(PybkError):  # a damaged one is stored as it is; checks find it
            kind, payload = decode_authenticated(key, value, self._reading)
            return encode_authenticated(kind, key, token_of(value), payload, self._keys, FeatureLevel.SEALS)
        return value

    def _write_bookies(self, metadata: ClusterMetadata) -> None:
        """Make the bookies of the directories members."""
        for held in self._holdings:
            metadata.claim_cookie(held.bookie, replace=True)
            metadata.record_boot(held.bookie, held.identity.boots)

    def _write_ledgers(self, metadata: ClusterMetadata) -> None:
        """Write tombstones, ledgers, corrected ensembles and marks."""
        plan = self._plan
        for ledger_id, proof in plan.deleted.items():
            metadata.delete_anew(ledger_id, proof)
        for made in plan.made.values():
            with suppress(LedgerExistsError):  # a run before this one was stopped
                metadata.create_ledger(made)
        for corrected in plan.corrected.values():
            metadata.write_ledger(corrected, metadata.read_ledger(corrected.ledger_id).version)
        for ledger_id, bookie, first in plan.missing:
            metadata.mark_under_replicated(ledger_id, bookie, first)


def destroy(url: str, secret: ClusterSecret | None, cluster_id: str) -> int:
    """Delete all metadata of a cluster, as ``destroy_metadata`` says."""
    metadata, _ = open_cluster(url, secret, create=False, mending=True)
    with metadata:
        found = metadata.cluster_id.hex()
    if found != cluster_id:
        raise UsageError(f"{url} has cluster {found}, and not {cluster_id!r:.100}; nothing was deleted")
    deleted = 0
    with closing(open_metadata(url, create=False)) as store:
        if running := [unquote(name) for name in store.children(BOOKIES_KEY)]:
            text = _running_text(running)
            raise SafetyCheckError(f"nothing was deleted from {url}: {text}", failures=(text,))
        # The key of the cluster is the last, so that a call that was stopped can be repeated.
        for key, node in sorted(store.walk(), key=lambda each: each[0] == CLUSTER_KEY):
            store.delete(key, node.version)
            deleted += 1
    return deleted


def _running_text(names: Sequence[str]) -> str:
    return (
        f"bookies are registered there, and all must be closed first: {listed(sorted(names))}; the registration of one "
        "that was killed ends by itself within seconds"
    )
