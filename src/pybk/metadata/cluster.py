"""One cluster in a metadata store: its identity and feature level, and all other metadata that its members share."""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Self

from pybk.errors import (
    CorruptError,
    IllegalOperationError,
    MetadataError,
    MetadataExistsError,
    MetadataForgedError,
    MetadataVersionError,
    PybkError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.feature_level import NEWEST_LEVEL, FeatureLevel
from pybk.ledger import keys
from pybk.ledger.keys import SALT_BYTES_MIN, SCRYPT_COST_MAX
from pybk.metadata.auditor_records import AuditorRecords
from pybk.metadata.authenticated_values import (
    MAC_BYTES,
    TOKEN_BYTES,
    VALUE_FORMAT_BASE,
    ValueKind,
    decode_authenticated,
    encode_authenticated,
    mac_of,
    token_of,
)
from pybk.metadata.deletions import Deletions
from pybk.metadata.durable_positions import DurablePositions
from pybk.metadata.epochs import MetadataEpochs
from pybk.metadata.locks import Locks
from pybk.metadata.lost_answers import settle
from pybk.metadata.metadata_keys import MetadataKeys
from pybk.metadata.orphan_records import OrphanRecords
from pybk.metadata.pointers import Pointers
from pybk.metadata.scrub_records import ScrubRecords
from pybk.metadata.secret_epochs import SecretEpochs
from pybk.metadata.settings import Settings
from pybk.metadata.store import MetadataStore, Node, Watch
from pybk.metadata.timed_store import TimedStore
from pybk.metadata.underreplication import UnderReplication
from pybk.metrics import Metrics
from pybk.values import decode_json, encode_json, from_base64, to_base64

logger = logging.getLogger(__name__)

CLUSTER_KEY: Final = "cluster"
CLUSTER_ID_BYTES: Final = 16

_LABEL_BASE: Final = b"pybk cluster 1\0"
_LABEL: Final = b"pybk cluster 2\0"
_LABEL_ROTATED: Final = b"pybk cluster 3\0"


@dataclass(frozen=True, slots=True)
class ClusterIdentity:
    """The parameters that a cluster gets when it is created, and that never change.

    Attributes:
        cluster_id: ``CLUSTER_ID_BYTES`` random bytes.
        salt: The scrypt salt for the passwords of its ledgers.
        cost: The scrypt cost N for the passwords of its ledgers.
    """

    cluster_id: bytes
    salt: bytes = field(repr=False)
    cost: int


KeyFor = Callable[[ClusterIdentity], Sequence[bytes]]
"""Derives the metadata keys, 32 bytes each, from the cluster secrets that this process was given, in any order."""


class _Stored(NamedTuple):
    """The decoded value of the key ``cluster``.

    Attributes:
        identity: The cluster's identity.
        level: Its feature level.
        epochs: The epochs of its secrets.
        keys: The metadata keys that this process knows; None without a secret.
        version: The value's version.
        payload: Its payload.
    """

    identity: ClusterIdentity
    level: FeatureLevel
    epochs: SecretEpochs
    keys: MetadataKeys | None
    version: int
    payload: bytes


class Upgrade(NamedTuple):
    """The result of ``ClusterMetadata.upgrade``.

    Attributes:
        level: The cluster's feature level on return.
        newest: The level that this version of pybk raises it to.
        hindrances: The reasons that prevent raising it; empty if there are none.
        absent: Names of bookies that belong to the cluster and are not running: after the level was raised they are
            refused at their start, unless they run a pybk that knows it.
    """

    level: FeatureLevel
    newest: FeatureLevel
    hindrances: tuple[str, ...]
    absent: tuple[str, ...]


class ClusterMetadata(
    Deletions,
    Locks,
    UnderReplication,
    Pointers,
    DurablePositions,
    Settings,
    MetadataEpochs,
    AuditorRecords,
    OrphanRecords,
    ScrubRecords,
):
    """A cluster's metadata. Threads: any.

    The constructor reads the key ``cluster``, or creates it; of several processes that create it at once, one succeeds,
    and the others read its value.

    Args:
        store: The store; ``close`` closes it.
        key_for: Derives the metadata keys from the cluster's secrets; None without a secret. It is called again when
            the cluster's secrets change, and may then return other keys.
        cost: The scrypt cost of a cluster that does not exist yet.
        create: Whether to create a cluster that does not exist.
        level: The feature level of a cluster that does not exist yet.
        mending: Whether to open the store even if it is outdated, to restore or rebuild its contents.
        on_keys: Called with the metadata keys before they are used, at first and after each change; in any thread, and
            while locks are held. It must neither use the metadata nor wait.

    Attributes:
        identity: The cluster's id, scrypt salt and cost.
        feature_level: The level whose formats the cluster's members write. It is watched, so it rises when a member
            raises it.
        about: The payload of the key ``cluster``, of which each bookie keeps a copy.
        secret_epochs: The epochs of the cluster's secrets.

    Raises:
        MetadataForgedError: No given secret is the one that the cluster uses, or only one side has a secret.
        MetadataUnreachableError: The store did not answer.
        UnsupportedFormatError: The cluster has a feature level that this version of pybk does not know.
        CorruptError: The value of the key ``cluster`` cannot be decoded.
        MetadataError: The cluster does not exist, and ``create`` is False.
        MetadataOutdatedError: The store was put back to an older state, or emptied (``epochs``).
    """

    def __init__(
        self,
        store: MetadataStore,
        *,
        key_for: KeyFor | None = None,
        cost: int | None = None,
        create: bool = True,
        level: FeatureLevel = NEWEST_LEVEL,
        mending: bool = False,
        on_keys: Callable[[MetadataKeys], None] | None = None,
    ) -> None:
        self._key_for = key_for
        self._timed = store = TimedStore(store)
        stored = _open_cluster(store, key_for, (cost or keys.SCRYPT_COST, level) if create else None)
        self.identity = stored.identity
        self.cluster_id = self.identity.cluster_id
        self.about = stored.payload
        self.feature_level = stored.level
        self.secret_epochs = stored.epochs
        self._on_keys = on_keys
        self._registrations = {}
        super().__init__(store, stored.keys)
        if stored.keys is not None and on_keys is not None:
            on_keys(stored.keys)
        if not mending:
            self.check_not_outdated()
        self._watch = None
        if stored.level < NEWEST_LEVEL or key_for is not None:
            self._watch = store.watch(CLUSTER_KEY, self._look_again)

    def _disable(self) -> None:
        """Forget in a forked child the ids of ledgers that the parent has reserved."""
        super()._disable()
        self._ids = range(0)

    def measure(self, metrics: Metrics) -> None:
        """Record the times of the metadata store's requests, and count ends of sessions, in these metrics."""
        self._timed.measure(metrics)

    def catch_up(self) -> None:
        """Have reads that follow see every change that took effect before the call; one round trip.

        Raises:
            MetadataUnreachableError: The store does not answer in time.
        """
        self._store.get(CLUSTER_KEY, latest=True)  # a store does not go back behind what it has shown

    def _look_again(self) -> None:
        """Adopt the feature level and the secrets if they changed; the store calls this after a change of the key."""
        try:
            self.refresh_keys()
            self.rewrite_locks()  # even if a thread that met a new value has adopted the secrets before
        except PybkError as error:
            logger.warning(
                "the key 'cluster' cannot be used now, so the feature level and the secrets read last stay: %s",
                error,
            )

    def refresh_keys(self) -> None:
        """Read the key ``cluster`` again, and adopt the feature level and the secrets if they changed.

        The secrets of this process are read again as well, which finds one that was added to its file.

        Raises:
            MetadataForgedError: The cluster uses a secret that was not given to this process, which keeps what it knew.
            MetadataUnreachableError, CorruptError, UnsupportedFormatError: The key cannot be read; the process keeps
                what it knew.
        """
        stored = _read_cluster(self._store, self._key_for)
        if stored is None:
            return
        super().refresh_keys()
        if _order_of(stored.epochs) < _order_of(self.secret_epochs):
            logger.error(
                "metadata key %r was put back to a state before the cluster's secret changed, and is not followed; "
                "check which users may write to the metadata store",
                CLUSTER_KEY,
            )
            return
        if stored.level > self.feature_level:
            logger.info("the cluster's feature level was raised to %d (%s)", stored.level, stored.level.name)
            self.feature_level = stored.level
        self.about, self.secret_epochs = stored.payload, stored.epochs
        keys = stored.keys
        if keys is None or self.keys is None or keys.epochs == self.keys.epochs:
            return
        logger.info(
            "the cluster uses secret %d; valid are %s, and this process has %s",
            keys.current,
            sorted(keys.by_epoch.keys() | keys.unknown),
            sorted(keys.held),
        )
        if self._on_keys is not None:
            self._on_keys(keys)
        self.keys = keys

    def watch_secrets(self, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after the cluster's secrets may have changed, and were adopted.

        It runs as callbacks of ``MetadataStore.watch`` do.
        """

        def changed() -> None:
            self._look_again()
            callback()

        return self._store.watch(CLUSTER_KEY, changed)

    # ---- secrets -------------------------------------------------------------------------------------------------

    def add_secret(self) -> SecretEpochs:
        """Make the secret that this process has in addition to the current one the next epoch; its values are accepted.

        A repeated call changes nothing, but makes members look again for a secret that they lack.

        Returns:
            The epochs as they are now.

        Raises:
            UsageError: This process was given no new secret, or not the current one.
            IllegalOperationError: The cluster has no secret, has two already, or its feature level is below HEALING.

        Durability: Durable on return; members adopt it within moments.
        """

        def added(stored: _Stored, given: Sequence[bytes]) -> SecretEpochs:
            keys = stored.keys
            assert keys is not None
            known = set(keys.by_epoch.values()) | set(keys.earlier.values())
            new = [key for key in given if key not in known]
            epochs = stored.epochs
            if not new and len(epochs.proofs) > 1 and epochs.newest in keys.held:
                return epochs
            if not new:
                raise UsageError(
                    "a secret is added by a process that has both: give the cluster's secret and the new one, which "
                    "was never its secret before; next to the file of the secret, FILE.next has the new one"
                )
            if len(epochs.proofs) > 1:
                raise IllegalOperationError(
                    f"the cluster has two secrets already, {min(epochs.proofs)} and {epochs.newest}, and none of them "
                    "is the new one: end that rotation first (switch, reseal, retire)"
                )
            if stored.level < FeatureLevel.HEALING:
                raise IllegalOperationError(
                    f"the cluster's feature level is {stored.level} ({stored.level.name}), at which members know one "
                    "secret only: upgrade them, and raise it with `pybk cluster upgrade URL --finalize`"
                )
            return epochs.added(stored.identity.cluster_id, keys, new[0])

        return self._change_epochs(added)

    def switch_secret(self) -> SecretEpochs:
        """Make the newest secret the current one, with which values are written and sessions begin.

        The caller checks that all members have it. A repeated call changes nothing, but makes members look again for a
        secret that they lack.

        Returns:
            What the cluster has now.

        Raises:
            IllegalOperationError: No secret was added.
            UsageError: This process was not given the newest secret.

        Durability: Durable on return; members adopt it within moments.
        """

        def switched(stored: _Stored, given: Sequence[bytes]) -> SecretEpochs:
            assert stored.keys is not None
            if stored.epochs.newest == 0:
                raise IllegalOperationError("the cluster has one secret only: add another one first")
            if stored.epochs.newest not in stored.keys.held:
                raise UsageError(
                    f"secret {stored.epochs.newest} of the cluster is not given here: give both secrets to switch"
                )
            return stored.epochs.switched()

        return self._change_epochs(switched)

    def retire_secret(self) -> SecretEpochs:
        """Refuse the secret before the current one from now on.

        The caller checks that it is no longer needed. Repeating it does nothing.

        Returns:
            What the cluster has now.

        Raises:
            IllegalOperationError: The cluster still uses the old secret, or has had one only.

        Durability: Durable on return; members adopt it within moments.
        """

        def retired(stored: _Stored, given: Sequence[bytes]) -> SecretEpochs:
            assert stored.keys is not None
            epochs = stored.epochs
            if epochs.current == 0 or epochs.current != epochs.newest:
                raise IllegalOperationError(
                    f"the cluster uses secret {epochs.current}, and there is none before it to retire: add another "
                    "one and switch to it first"
                )
            if len(epochs.proofs) == 1:
                return epochs
            return epochs.without_old(stored.identity.cluster_id, stored.keys)

        return self._change_epochs(retired)

    def _change_epochs(self, change: Callable[[_Stored, Sequence[bytes]], SecretEpochs]) -> SecretEpochs:
        """Change the secrets in the key ``cluster`` by compare-and-set.

        If nothing changes, nothing is written, unless there are two secrets: all members watch the key, and a member
        that got the file of the second one late looks for it only when the key changes.
        """
        if self._key_for is None:
            raise IllegalOperationError("the cluster has no secret; it gets one when it is created, or never")
        while True:
            stored = self._read()
            given = tuple(self._key_for(stored.identity))
            epochs = change(stored, given)
            if epochs == stored.epochs and len(epochs.proofs) == 1:
                return epochs
            assert stored.keys is not None
            known = {**stored.keys.earlier, **stored.keys.by_epoch}
            for epoch in epochs.proofs.keys() - known.keys():  # the one that was just added
                known[epoch] = _added_key(epochs, stored, given)
            with suppress(MetadataVersionError):  # another process has changed the value: read it again
                self._write_cluster(stored, stored.level, epochs, MetadataKeys(epochs.current, known))
                return epochs

    def _read(self) -> _Stored:
        """Read the key ``cluster``, which exists."""
        stored = _read_cluster(self._store, self._key_for)
        if stored is None:
            raise MetadataForgedError(f"metadata key {CLUSTER_KEY!r} was removed; nothing removes it: restore it")
        return stored

    # ---- feature level -------------------------------------------------------------------------------------------

    def upgrade(self, *, finalize: bool) -> Upgrade:
        """Raise the cluster's feature level to the newest one, or return the reasons that prevent it.

        Args:
            finalize: Whether to raise the level, unless something prevents it; it cannot be lowered.

        Returns:
            The level, and the reasons that prevent raising it.

        Durability: A raised level is durable on return; running members adopt it within moments.
        """
        while True:
            stored = self._read()
            there = {found.bookie.bookie_id: found for found in self.list_bookies()}
            hindrances = tuple(
                f"bookie {name} runs pybk {found.version or 'before 0.2'}, which knows feature levels up to "
                f"{found.level_max}: upgrade and restart it"
                for name, found in there.items()
                if found.level_max < NEWEST_LEVEL
            )
            absent = tuple(c.bookie.bookie_id for c in self.list_cookies() if c.bookie.bookie_id not in there)
            if not finalize or hindrances or stored.level == NEWEST_LEVEL:
                return Upgrade(stored.level, NEWEST_LEVEL, hindrances, absent)
            with suppress(MetadataVersionError):  # another process has changed the value: read it again
                self._write_cluster(stored, NEWEST_LEVEL, stored.epochs, stored.keys)
                return Upgrade(NEWEST_LEVEL, NEWEST_LEVEL, (), absent)

    def _write_cluster(
        self, stored: _Stored, level: FeatureLevel, epochs: SecretEpochs, keys: MetadataKeys | None
    ) -> None:
        """Write the key ``cluster`` over ``stored``; raises MetadataVersionError if the value has changed since."""
        token = secrets.token_bytes(TOKEN_BYTES)
        value = _cluster_value(stored.identity, token, keys, level, epochs)
        settle(
            self._store,
            CLUSTER_KEY,
            lambda: self._store.put(CLUSTER_KEY, value, stored.version),
            lambda node: node is not None and token_of(node.value) == token,
        )
        self._look_again()

    def close(self) -> None:
        """Close the store; the registrations and locks of this client end with its session."""
        for watch in (self._watch, self._settings_watch):
            if watch is not None:
                watch.cancel()
        self._store.close()

    def __enter__(self) -> Self:
        """Return the metadata."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def _order_of(epochs: SecretEpochs) -> tuple[int, int, int]:
    """Return an order of epochs that grows with each step of a rotation."""
    return epochs.newest, epochs.current, min(epochs.proofs)


def _added_key(epochs: SecretEpochs, stored: _Stored, given: Sequence[bytes]) -> bytes:
    """Return the metadata key of the newest epoch, which was just added: it opens the key before it."""
    for key in given:
        with suppress(ValueError):
            if epochs.unwrapped(stored.identity.cluster_id, epochs.newest, key):
                return key
    raise AssertionError("the key of the epoch that was just added is one of those that are given")


def _open_cluster(store: MetadataStore, key_for: KeyFor | None, new: tuple[int, FeatureLevel] | None) -> _Stored:
    """Read the key ``cluster``, or create it with the scrypt cost and level of ``new``, unless that is None."""
    stored = _read_cluster(store, key_for)
    if stored is not None:
        return stored
    if new is None:
        raise MetadataError("there is no cluster in this metadata store: check its URL, or start the first bookie")
    cost, level = new
    token = secrets.token_bytes(TOKEN_BYTES)
    identity = ClusterIdentity(secrets.token_bytes(CLUSTER_ID_BYTES), secrets.token_bytes(32), cost)
    given = () if key_for is None else tuple(key_for(identity))
    if len(given) > 1:
        raise UsageError("a cluster is created with one secret: give that one only, and add another one later")
    keys = MetadataKeys.first(given[0]) if given else None
    value = _cluster_value(identity, token, keys, level, SecretEpochs(proofs={0: b""}))
    with suppress(MetadataExistsError):  # another process was quicker
        settle(
            store,
            CLUSTER_KEY,
            lambda: store.create(CLUSTER_KEY, value),
            lambda node: node is not None and token_of(node.value) == token,
        )
    stored = _read_cluster(store, key_for)
    if stored is None:
        raise MetadataForgedError(f"metadata key {CLUSTER_KEY!r} was removed just now; nothing removes it: try again")
    return stored


def _read_cluster(store: MetadataStore, key_for: KeyFor | None) -> _Stored | None:
    """Read and verify the key ``cluster``; None if there is no cluster."""
    node = store.get(CLUSTER_KEY, latest=True)
    return None if node is None else _check_cluster(node, key_for)


def _check_cluster(node: Node, key_for: KeyFor | None) -> _Stored:
    # The MAC key is derived from the value's salt, so the value has no MAC. Its payload has proofs instead, which are
    # verified once the keys are derived.
    where = f"metadata key {CLUSTER_KEY!r}"
    kind, payload = decode_authenticated(CLUSTER_KEY, node.value, None)
    if kind is not ValueKind.CLUSTER:
        raise CorruptError(f"{where}: kind {kind.name} where CLUSTER belongs; restore it")
    base = node.value[0] == VALUE_FORMAT_BASE
    identity, level, epochs = decode_json(payload, from_values_base if base else from_values, where=where)
    if level > NEWEST_LEVEL:
        raise UnsupportedFormatError(
            f"cluster {identity.cluster_id.hex()} has feature level {level}; this pybk knows levels up to "
            f"{NEWEST_LEVEL}: install the version of pybk that the cluster's other members run"
        )
    if (key_for is None) != epochs.without_secret:
        raise MetadataForgedError(
            f"cluster {identity.cluster_id.hex()} has no secret, but one is given here: give none"
            if key_for is not None
            else f"cluster {identity.cluster_id.hex()} has a secret, but none is given here: give it"
        )
    level = FeatureLevel(level)
    keys = None if key_for is None else _keys_of(identity, level, epochs, tuple(key_for(identity)))
    return _Stored(identity, level, epochs, keys, node.version, payload)


def _keys_of(
    identity: ClusterIdentity, level: FeatureLevel, epochs: SecretEpochs, given: Sequence[bytes]
) -> MetadataKeys:
    """Verify the proofs of a cluster's secrets, and return the metadata keys to which the given ones lead.

    Raises:
        MetadataForgedError: None of the secrets is the one that the cluster uses, or a proof is forged.
    """

    def proves(epoch: int, key: bytes) -> bool:
        proof = proof_of(identity, key, level, epoch, epochs.claim())
        return hmac.compare_digest(epochs.proofs[epoch], proof)

    held = {epoch: key for epoch in epochs.proofs for key in given if proves(epoch, key)}
    if epochs.current not in held:
        raise MetadataForgedError(_refusal(identity, epochs, given, held))
    newest = max(held)
    try:
        known = {**epochs.unwrapped(identity.cluster_id, newest, held[newest]), **held}
    except ValueError as error:
        raise MetadataForgedError(f"metadata key {CLUSTER_KEY!r}: {error}; restore it") from error
    valid = {epoch: key for epoch, key in known.items() if epoch in epochs.proofs}
    if not all(proves(epoch, key) for epoch, key in valid.items()):
        raise MetadataForgedError(f"metadata key {CLUSTER_KEY!r}: the proof of a secret is wrong; restore it")
    earlier = {epoch: key for epoch, key in known.items() if epoch not in valid}
    return MetadataKeys(epochs.current, valid, earlier, frozenset(held), frozenset(epochs.proofs) - valid.keys())


def _refusal(identity: ClusterIdentity, epochs: SecretEpochs, given: Sequence[bytes], held: dict[int, bytes]) -> str:
    """Return the reason why the given secrets do not open a cluster."""
    cluster = f"cluster {identity.cluster_id.hex()}"
    if held:
        (epoch,) = held
        if epoch > epochs.current:
            return (
                f"{cluster} does not use secret {epoch}, which is given here, before it is switched to it: give secret "
                f"{epochs.current}, too, until then"
            )
        return f"{cluster} uses secret {epochs.current} now, and secret {epoch} alone is given here: give the new one"
    retired = epochs.retired_epoch(identity.cluster_id, given)
    if retired is not None:
        return (
            f"the secret given here is secret {retired} of {cluster}, which was retired: give secret {epochs.current}"
        )
    return (
        f"the cluster secret given here is not that of {cluster}; check which cluster this metadata store is of, and "
        "whether it has another secret by now"
    )


def check_cluster_value(value: bytes, key_for: KeyFor | None) -> tuple[ClusterIdentity, MetadataKeys | None]:
    """Return the identity in a value of the key ``cluster``, and the metadata keys; None without a secret.

    Raises as ``ClusterMetadata`` for another secret.
    """
    stored = _check_cluster(Node(value, 0), key_for)
    return stored.identity, stored.keys


def cluster_value_of(about: bytes) -> bytes:
    """Return a value of the key ``cluster`` from its payload, of which each bookie keeps a copy."""
    values = decode_json(about, dict, where="a bookie's copy of the cluster's metadata")
    level = FeatureLevel.SEALS if "level" in values else FeatureLevel.BASE
    return encode_authenticated(ValueKind.CLUSTER, CLUSTER_KEY, secrets.token_bytes(TOKEN_BYTES), about, None, level)


def age_of(about: bytes) -> tuple[int, ...]:
    """Return an order that grows with each change of the key ``cluster``: its level, and the steps of rotations."""

    def order(values: dict[str, Any]) -> tuple[int, ...]:
        if "level" not in values:
            return (0, 0, 0, 0)
        return (int(values["level"]), *_order_of(SecretEpochs.of(values)))

    return decode_json(about, order, where="a bookie's copy of the cluster's metadata")


def _cluster_value(
    identity: ClusterIdentity, token: bytes, keys: MetadataKeys | None, level: FeatureLevel, epochs: SecretEpochs
) -> bytes:
    """Return the value of the key ``cluster``, with new proofs."""
    if keys is not None:
        claim = epochs.claim()
        proofs = {epoch: proof_of(identity, keys.by_epoch[epoch], level, epoch, claim) for epoch in epochs.proofs}
        epochs = replace(epochs, proofs=proofs)
    return encode_authenticated(ValueKind.CLUSTER, CLUSTER_KEY, token, encode(identity, level, epochs), None, level)


def encode(identity: ClusterIdentity, level: FeatureLevel, epochs: SecretEpochs) -> bytes:
    """Return the payload of the key ``cluster``.

    Args:
        identity: The cluster's identity.
        level: Its feature level.
        epochs: The epochs of its secrets, with the results of ``proof_of``.
    """
    values: dict[str, Any] = {
        "cluster_id": to_base64(identity.cluster_id),
        "salt": to_base64(identity.salt),
        "cost": identity.cost,
    }
    if level < FeatureLevel.SEALS:
        return encode_json(values | {"proof": to_base64(epochs.proofs[0])})
    return encode_json(values | {"level": level} | epochs.values())


def proof_of(
    identity: ClusterIdentity, mac_key: bytes, level: FeatureLevel, epoch: int = 0, claim: bytes = b""
) -> bytes:
    """Return the MAC that proves the metadata key of an epoch, and authenticates the cluster's identity and level.

    Args:
        identity: The identity.
        mac_key: The metadata key.
        level: The level.
        epoch: The key epoch.
        claim: ``SecretEpochs.claim``, which is authenticated, too; empty before there was a second epoch.
    """
    parts = [identity.cluster_id, identity.salt, identity.cost.to_bytes(8, "big")]
    if level < FeatureLevel.SEALS:
        return mac_of(mac_key, _LABEL_BASE, *parts)
    parts += [level.to_bytes(4, "big"), epoch.to_bytes(4, "big")]
    return mac_of(mac_key, _LABEL_ROTATED, *parts, claim) if claim else mac_of(mac_key, _LABEL, *parts)


def from_values_base(values: dict[str, Any]) -> tuple[ClusterIdentity, int, SecretEpochs]:
    """Decode the payload of a value of format 1."""
    return _identity_from(values), FeatureLevel.BASE, SecretEpochs(proofs={0: _proof_from(values["proof"])})


def from_values(values: dict[str, Any]) -> tuple[ClusterIdentity, int, SecretEpochs]:
    """Return identity, level and secrets of the decoded payload of a value of format 2."""
    level = values["level"]
    if type(level) is not int or level < FeatureLevel.SEALS:
        raise ValueError(f"level {level!r}")
    # Secrets of a newer pybk are not decoded, because its level is refused.
    epochs = SecretEpochs.of(values) if level <= NEWEST_LEVEL else SecretEpochs(proofs={0: b""})
    return _identity_from(values), level, epochs


def _proof_from(text: object) -> bytes:
    proof = from_base64(text)
    if len(proof) not in (0, MAC_BYTES):
        raise ValueError(f"a proof of {len(proof)} bytes")
    return proof


def _identity_from(values: dict[str, Any]) -> ClusterIdentity:
    identity = ClusterIdentity(from_base64(values["cluster_id"]), from_base64(values["salt"]), values["cost"])
    if len(identity.cluster_id) != CLUSTER_ID_BYTES or len(identity.salt) < SALT_BYTES_MIN:
        raise ValueError("cluster id or salt have another size")
    if type(identity.cost) is not int or not 2 <= identity.cost <= SCRYPT_COST_MAX:
        raise ValueError(f"cost {identity.cost!r}")
    return identity
