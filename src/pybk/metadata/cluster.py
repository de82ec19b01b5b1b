"""One cluster in a metadata store: who it is, and everything that its members share."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self

from pybk.digest import SALT_BYTES_MIN, SCRYPT_COST, SCRYPT_COST_MAX
from pybk.errors import CorruptError, MetadataError, MetadataExistsError, MetadataForgedError
from pybk.feature_level import FeatureLevel
from pybk.metadata.bookies import Bookies
from pybk.metadata.ledgers import Ledgers
from pybk.metadata.locks import Locks
from pybk.metadata.pointers import Pointers
from pybk.metadata.positions import Positions
from pybk.metadata.settle import settle
from pybk.metadata.tree import MetadataTree
from pybk.metadata.values import (
    MAC_BYTES,
    TOKEN_BYTES,
    Kind,
    decode_json,
    encode_json,
    from_base64,
    mac_of,
    seal,
    to_base64,
    token_of,
    unseal,
)

CLUSTER_KEY: Final = "cluster"
CLUSTER_ID_BYTES: Final = 16

_LABEL: Final = b"pybk cluster 1\0"


@dataclass(frozen=True, slots=True)
class ClusterIdentity:
    """What a cluster got when it was made, and keeps.

    Attributes:
        cluster_id: ``CLUSTER_ID_BYTES`` random bytes.
        salt: The scrypt salt of its ledgers' passwords.
        cost: scrypt's cost.
    """

    cluster_id: bytes
    salt: bytes = field(repr=False)
    cost: int


class ClusterMetadata(Ledgers, Bookies, Locks, Pointers, Positions):
    """A cluster's metadata. Threads: any.

    Args:
        tree: The store; closed with this.
        key_for: Derives the metadata key, 32 bytes, from the cluster secret; None without one.
        cost: scrypt's cost, for a cluster that does not exist yet.
        create: Make the cluster if there is none.

    Attributes:
        identity: Who the cluster is.

    Raises:
        MetadataForgedError: The secret is not that of the cluster, or one side has a secret and the other none.
        MetadataUnreachableError: The store did not answer.
        CorruptError, UnsupportedFormatError: The store does not say who the cluster is.
        MetadataError: There is no cluster, and none is to be made.

    Whoever comes first makes the cluster; of several at once, one.
    """

    def __init__(
        self,
        tree: MetadataTree,
        *,
        key_for: Callable[[ClusterIdentity], bytes] | None = None,
        cost: int = SCRYPT_COST,
        create: bool = True,
    ) -> None:
        self.identity = _identity(tree, key_for, cost if create else None)
        self.cluster_id = self.identity.cluster_id
        self.feature_level = FeatureLevel.BASE
        """The level whose formats the cluster's members write."""
        super().__init__(tree, None if key_for is None else key_for(self.identity))

    def close(self) -> None:
        """Close the store: registrations and locks of this one end."""
        self._tree.close()

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def _identity(
    tree: MetadataTree, key_for: Callable[[ClusterIdentity], bytes] | None, cost: int | None
) -> ClusterIdentity:
    """Read who the cluster is, or make it, unless ``cost`` is None."""
    node = tree.get(CLUSTER_KEY, latest=True)
    if node is None and cost is None:
        raise MetadataError("there is no cluster in this metadata store: check its URL, or start the first bookie")
    if node is None:
        assert cost is not None
        token = secrets.token_bytes(TOKEN_BYTES)
        value = _sealed(
            ClusterIdentity(secrets.token_bytes(CLUSTER_ID_BYTES), secrets.token_bytes(32), cost), token, key_for
        )
        with suppress(MetadataExistsError):  # somebody was quicker
            settle(
                tree,
                CLUSTER_KEY,
                lambda: tree.create(CLUSTER_KEY, value),
                lambda node: node is not None and token_of(node.value) == token,
            )
        node = tree.get(CLUSTER_KEY, latest=True)
        if node is None:
            raise MetadataForgedError(
                f"metadata key {CLUSTER_KEY!r} was removed just now; nothing removes it: try again"
            )
    # The key depends on what is read, so the proof is in what is read, and checked once the key is derived.
    kind, payload = unseal(CLUSTER_KEY, node.value, None)
    if kind is not Kind.CLUSTER:
        raise CorruptError(f"metadata key {CLUSTER_KEY!r}: kind {kind.name} where CLUSTER belongs; restore it")
    identity, proof = decode_json(payload, _from_values, where=f"metadata key {CLUSTER_KEY!r}")
    if (key_for is None) != (proof == b""):
        raise MetadataForgedError(
            f"cluster {identity.cluster_id.hex()} has no secret, but one is given here: give none"
            if proof == b""
            else f"cluster {identity.cluster_id.hex()} has a secret, but none is given here: give it"
        )
    if key_for is not None and not hmac.compare_digest(proof, _proof(identity, key_for(identity))):
        raise MetadataForgedError(
            f"the cluster secret given here is not that of cluster {identity.cluster_id.hex()}; check which "
            "cluster this metadata store is of"
        )
    return identity


def _sealed(identity: ClusterIdentity, token: bytes, key_for: Callable[[ClusterIdentity], bytes] | None) -> bytes:
    values = {
        "cluster_id": to_base64(identity.cluster_id),
        "salt": to_base64(identity.salt),
        "cost": identity.cost,
        "proof": "" if key_for is None else to_base64(_proof(identity, key_for(identity))),
    }
    return seal(Kind.CLUSTER, CLUSTER_KEY, token, encode_json(values), None)


def _proof(identity: ClusterIdentity, mac_key: bytes) -> bytes:
    return mac_of(mac_key, _LABEL, identity.cluster_id, identity.salt, identity.cost.to_bytes(8, "big"))


def _from_values(values: dict[str, Any]) -> tuple[ClusterIdentity, bytes]:
    identity = ClusterIdentity(from_base64(values["cluster_id"]), from_base64(values["salt"]), values["cost"])
    proof = from_base64(values["proof"])
    if (
        len(identity.cluster_id) != CLUSTER_ID_BYTES
        or len(identity.salt) < SALT_BYTES_MIN
        or len(proof) not in (0, MAC_BYTES)
    ):
        raise ValueError("cluster id, salt or proof have another size")
    if type(identity.cost) is not int or not 2 <= identity.cost <= SCRYPT_COST_MAX:
        raise ValueError(f"cost {identity.cost!r}")
    return identity, proof
