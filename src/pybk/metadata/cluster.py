"""One cluster in a metadata store: its identity and feature level, and everything else that its members share."""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

from pybk import keys
from pybk.errors import (
    CorruptError,
    MetadataError,
    MetadataExistsError,
    MetadataForgedError,
    MetadataVersionError,
    PybkError,
    UnsupportedFormatError,
)
from pybk.feature_level import NEWEST_LEVEL, FeatureLevel
from pybk.keys import SALT_BYTES_MIN, SCRYPT_COST_MAX
from pybk.metadata.auditor_records import AuditorRecords
from pybk.metadata.authenticated_values import (
    KEY_EPOCH,
    MAC_BYTES,
    TOKEN_BYTES,
    VALUE_FORMAT_BASE,
    ValueKind,
    decode_authenticated,
    decode_json,
    encode_authenticated,
    encode_json,
    from_base64,
    mac_of,
    to_base64,
    token_of,
)
from pybk.metadata.cas import settle
from pybk.metadata.deletions import Deletions
from pybk.metadata.durable_positions import DurablePositions
from pybk.metadata.epochs import MetadataEpochs
from pybk.metadata.locks import Locks
from pybk.metadata.orphan_records import OrphanRecords
from pybk.metadata.pointers import Pointers
from pybk.metadata.scrub_records import ScrubRecords
from pybk.metadata.settings import Settings
from pybk.metadata.store import MetadataStore, Node
from pybk.metadata.underreplication import UnderReplication

logger = logging.getLogger(__name__)

CLUSTER_KEY: Final = "cluster"
CLUSTER_ID_BYTES: Final = 16

_LABEL_BASE: Final = b"pybk cluster 1\0"
_LABEL: Final = b"pybk cluster 2\0"


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


class _Stored(NamedTuple):
    """The decoded value of the key ``cluster``: identity and feature level, and the value's version and payload."""

    identity: ClusterIdentity
    level: FeatureLevel
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
        key_for: Derives the metadata key, 32 bytes, from the cluster secret; None without a secret.
        cost: The scrypt cost of a cluster that does not exist yet.
        create: Create the cluster if there is none.
        level: The feature level of a cluster that does not exist yet.
        mending: Open the store even if it is outdated, to restore or rebuild its contents.

    Attributes:
        identity: The cluster's id, scrypt salt and cost.
        feature_level: The level whose formats the cluster's members write. It is watched, so it rises when a member
            raises it.
        about: The payload of the key ``cluster``, of which each bookie keeps a copy.

    Raises:
        MetadataForgedError: The secret is not that of the cluster, or one side has a secret and the other none.
        MetadataUnreachableError: The store did not answer.
        UnsupportedFormatError: The cluster has a feature level that this version of pybk does not know.
        CorruptError: The value of the key ``cluster`` cannot be decoded.
        MetadataError: There is no cluster, and ``create`` is False.
        MetadataOutdatedError: The store was put back to an older state, or emptied (``epochs``).
    """

    def __init__(
        self,
        store: MetadataStore,
        *,
        key_for: Callable[[ClusterIdentity], bytes] | None = None,
        cost: int | None = None,
        create: bool = True,
        level: FeatureLevel = NEWEST_LEVEL,
        mending: bool = False,
    ) -> None:
        self._key_for = key_for
        stored = _open_cluster(store, key_for, (cost or keys.SCRYPT_COST, level) if create else None)
        self.identity = stored.identity
        self.cluster_id = self.identity.cluster_id
        self.about = stored.payload
        self.feature_level = stored.level
        self._registrations = {}
        super().__init__(store, None if key_for is None else key_for(self.identity))
        if not mending:
            self.check_not_outdated()
        self._watch = None
        if stored.level < NEWEST_LEVEL:
            self._watch = store.watch(CLUSTER_KEY, self._look_again)

    def _look_again(self) -> None:
        """Adopt the feature level if it was raised; the store calls this after a change of the key ``cluster``."""
        try:
            stored = _read_cluster(self._store, self._key_for)
        except PybkError as error:
            logger.warning(
                "the feature level of the cluster cannot be read now, so %r stays: %s", self.feature_level, error
            )
            return
        if stored is not None and stored.level > self.feature_level:
            logger.info("the cluster's feature level was raised to %d (%s)", stored.level, stored.level.name)
            self.about, self.feature_level = stored.payload, stored.level

    def upgrade(self, *, finalize: bool) -> Upgrade:
        """Raise the cluster's feature level to the newest, or return what prevents that.

        Args:
            finalize: False changes nothing. True raises the level, unless something prevents it. It cannot be lowered.

        Returns:
            The level, and what prevents raising it.

        Durability: A raised level is durable on return; running members adopt it within moments.
        """
        while True:
            stored = _read_cluster(self._store, self._key_for)
            if stored is None:
                raise MetadataForgedError(f"metadata key {CLUSTER_KEY!r} was removed; nothing removes it: restore it")
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
                self._raise_level(stored)
                return Upgrade(NEWEST_LEVEL, NEWEST_LEVEL, (), absent)

    def _raise_level(self, stored: _Stored) -> None:
        """Write the newest level over ``stored``; raises MetadataVersionError if the value has changed since."""
        token = secrets.token_bytes(TOKEN_BYTES)
        value = _cluster_value(stored.identity, token, self._key_for, NEWEST_LEVEL)
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
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def _open_cluster(
    store: MetadataStore, key_for: Callable[[ClusterIdentity], bytes] | None, new: tuple[int, FeatureLevel] | None
) -> _Stored:
    """Read the key ``cluster``, or create it with the scrypt cost and level of ``new``, unless that is None."""
    stored = _read_cluster(store, key_for)
    if stored is not None:
        return stored
    if new is None:
        raise MetadataError("there is no cluster in this metadata store: check its URL, or start the first bookie")
    cost, level = new
    token = secrets.token_bytes(TOKEN_BYTES)
    identity = ClusterIdentity(secrets.token_bytes(CLUSTER_ID_BYTES), secrets.token_bytes(32), cost)
    value = _cluster_value(identity, token, key_for, level)
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


def _read_cluster(store: MetadataStore, key_for: Callable[[ClusterIdentity], bytes] | None) -> _Stored | None:
    """Read and verify the key ``cluster``; None if there is no cluster."""
    node = store.get(CLUSTER_KEY, latest=True)
    return None if node is None else _check_cluster(node, key_for)


def _check_cluster(node: Node, key_for: Callable[[ClusterIdentity], bytes] | None) -> _Stored:
    # The MAC key is derived from the value's salt, so the value has no MAC. Its payload has a proof instead, which is
    # verified once the key is derived.
    where = f"metadata key {CLUSTER_KEY!r}"
    kind, payload = decode_authenticated(CLUSTER_KEY, node.value, None)
    if kind is not ValueKind.CLUSTER:
        raise CorruptError(f"{where}: kind {kind.name} where CLUSTER belongs; restore it")
    base = node.value[0] == VALUE_FORMAT_BASE
    identity, level, proof = decode_json(payload, from_values_base if base else from_values, where=where)
    if level > NEWEST_LEVEL:
        raise UnsupportedFormatError(
            f"cluster {identity.cluster_id.hex()} has feature level {level}; this pybk knows levels up to "
            f"{NEWEST_LEVEL}: install the version of pybk that the cluster's other members run"
        )
    if (key_for is None) != (proof == b""):
        raise MetadataForgedError(
            f"cluster {identity.cluster_id.hex()} has no secret, but one is given here: give none"
            if proof == b""
            else f"cluster {identity.cluster_id.hex()} has a secret, but none is given here: give it"
        )
    level = FeatureLevel(level)
    if key_for is not None and not hmac.compare_digest(proof, proof_of(identity, key_for(identity), level)):
        raise MetadataForgedError(
            f"the cluster secret given here is not that of cluster {identity.cluster_id.hex()}; check which "
            "cluster this metadata store is of"
        )
    return _Stored(identity, level, node.version, payload)


def check_cluster_value(value: bytes, key_for: Callable[[ClusterIdentity], bytes] | None) -> ClusterIdentity:
    """Return the identity in a value of the key ``cluster``; raises as ``ClusterMetadata`` for another secret."""
    return _check_cluster(Node(value, 0), key_for).identity


def cluster_value_of(about: bytes) -> bytes:
    """Return a value of the key ``cluster`` from its payload, of which each bookie keeps a copy."""
    values = decode_json(about, dict, where="a bookie's copy of the cluster's metadata")
    level = FeatureLevel.SEALS if "level" in values else FeatureLevel.BASE
    return encode_authenticated(ValueKind.CLUSTER, CLUSTER_KEY, secrets.token_bytes(TOKEN_BYTES), about, None, level)


def _cluster_value(
    identity: ClusterIdentity,
    token: bytes,
    key_for: Callable[[ClusterIdentity], bytes] | None,
    level: FeatureLevel,
) -> bytes:
    proof = "" if key_for is None else to_base64(proof_of(identity, key_for(identity), level))
    return encode_authenticated(ValueKind.CLUSTER, CLUSTER_KEY, token, encode(identity, level, proof), None, level)


def encode(identity: ClusterIdentity, level: FeatureLevel, proof: str) -> bytes:
    """Return the payload of the key ``cluster``.

    Args:
        identity: The cluster's identity.
        level: Its feature level.
        proof: Base64 of the result of ``proof_of``, empty without a secret.
    """
    values: dict[str, Any] = {
        "cluster_id": to_base64(identity.cluster_id),
        "salt": to_base64(identity.salt),
        "cost": identity.cost,
    }
    if level < FeatureLevel.SEALS:
        return encode_json(values | {"proof": proof})
    return encode_json(values | {"level": level, "key_epoch": KEY_EPOCH, "proofs": {str(KEY_EPOCH): proof}})


def proof_of(identity: ClusterIdentity, mac_key: bytes, level: FeatureLevel) -> bytes:
    """Return the MAC that proves which metadata key a cluster has, and authenticates its identity and level."""
    parts = [identity.cluster_id, identity.salt, identity.cost.to_bytes(8, "big")]
    if level < FeatureLevel.SEALS:
        return mac_of(mac_key, _LABEL_BASE, *parts)
    return mac_of(mac_key, _LABEL, *parts, level.to_bytes(4, "big"), KEY_EPOCH.to_bytes(4, "big"))


def from_values_base(values: dict[str, Any]) -> tuple[ClusterIdentity, int, bytes]:
    """Decode the payload of a value of format 1."""
    return _identity_from(values), FeatureLevel.BASE, _proof_from(values["proof"])


def from_values(values: dict[str, Any]) -> tuple[ClusterIdentity, int, bytes]:
    """Return identity, level and proof of the decoded payload of a value of format 2."""
    level = values["level"]
    if type(level) is not int or level < FeatureLevel.SEALS:
        raise ValueError(f"level {level!r}")
    if level <= NEWEST_LEVEL and (values["key_epoch"] != KEY_EPOCH or set(values["proofs"]) != {str(KEY_EPOCH)}):
        raise ValueError(f"key epoch {values['key_epoch']!r} with proofs for {sorted(values['proofs'])}")
    return _identity_from(values), level, _proof_from(values["proofs"].get(str(KEY_EPOCH), ""))


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
