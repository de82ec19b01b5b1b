"""The keys that a cluster's secret means, and the proof that somebody may write a ledger. See ``docs/wire.md``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from hmac import compare_digest
from struct import Struct
from typing import Final, Self

import zmq
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from xxhash import xxh3_128_digest
from zmq.utils import z85

from pybk.errors import UsageError

SECRET_BYTES_MIN: Final = 16
"""Shortest cluster secret that is taken; 32 random bytes are a good one."""

KEY_BYTES: Final = 32
MAC_BYTES: Final = 16
SIGNATURE_BYTES: Final = 64
LAC_PACKET_BYTES: Final = 32

Mac = Callable[[bytes | memoryview], bytes]
"""Makes the ``MAC_BYTES`` bytes that prove what they were made of."""

_pack_lac = Struct(">qq").pack
_unpack_lac = Struct(">qq").unpack_from


@dataclass(frozen=True, slots=True)
class CurvePair:
    """A CURVE key pair.

    Attributes:
        public: The public key in Z85, 40 bytes.
        secret: The secret key in Z85, 40 bytes.
    """

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def random(cls) -> Self:
        """Make a new pair."""
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True, slots=True, eq=False)
class ClusterKeys:
    """What a cluster's secret means; whoever knows the secret has the same.

    Attributes:
        client: The CURVE pair that every client of the cluster has.
        metadata_key: Key of the MACs of registrations and of ledgers' immutable metadata, ``KEY_BYTES`` bytes.
        session_key: Key that sessions' keys are made of, ``KEY_BYTES`` bytes.
    """

    client: CurvePair = field(repr=False)
    metadata_key: bytes = field(repr=False)
    session_key: bytes = field(repr=False)

    @classmethod
    def derive(cls, secret: bytes, cluster_id: bytes) -> Self:
        """Derive the keys.

        Args:
            secret: The cluster's secret, at least ``SECRET_BYTES_MIN`` random bytes; no password.
            cluster_id: Identity of the cluster, so that the same secret means other keys in another one.

        Raises:
            UsageError: The secret is no bytes or too short.

        Cost: A tenth of a millisecond.
        """
        if not isinstance(secret, bytes):
            raise UsageError(f"a cluster secret is bytes, not {type(secret).__name__}")
        if len(secret) < SECRET_BYTES_MIN:
            raise UsageError(
                f"the cluster secret has {len(secret)} bytes; it takes at least {SECRET_BYTES_MIN}: "
                "use 32 random ones, such as secrets.token_bytes(32) makes"
            )
        curve_secret = z85.encode(_expand(secret, cluster_id, b"curve-client"))
        return cls(
            CurvePair(zmq.curve_public(curve_secret), curve_secret),
            _expand(secret, cluster_id, b"metadata-mac"),
            _expand(secret, cluster_id, b"session-mac"),
        )

    def seal(self, data: bytes) -> bytes:
        """Return the MAC of a registration or of immutable metadata, ``KEY_BYTES`` bytes."""
        return hashlib.blake2b(data, key=self.metadata_key, digest_size=KEY_BYTES).digest()

    def is_sealed(self, data: bytes, mac: bytes) -> bool:
        """Tell whether somebody who knows the secret made this MAC of these bytes; in constant time."""
        return compare_digest(self.seal(data), mac)


def _expand(secret: bytes, cluster_id: bytes, purpose: bytes) -> bytes:
    """Derive the key of a purpose; parts are prefixed with their size so that no two read the same."""
    info = b"".join(len(part).to_bytes(4, "big") + part for part in (b"pybk-cluster/1", purpose))
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=cluster_id, info=info).derive(secret)


# ---- messages --------------------------------------------------------------------------------------------------------


def keyed_mac(key: bytes) -> Mac:
    """Make a MAC, keyed BLAKE2b of ``MAC_BYTES`` bytes; half a microsecond for a header."""
    start = hashlib.blake2b(key=key, digest_size=MAC_BYTES).copy

    def mac(data: bytes | memoryview) -> bytes:
        state = start()
        state.update(data)
        return state.digest()

    return mac


def greeting_mac(keys: ClusterKeys | None) -> Mac:
    """Return the MAC of messages outside sessions; without a secret, a checksum that only finds damage."""
    return xxh3_128_digest if keys is None else keyed_mac(keys.session_key)


def session_mac(keys: ClusterKeys | None, session_id: bytes, nonces: tuple[bytes, bytes], instance: bytes) -> Mac:
    """Return the MAC of one session's messages.

    Args:
        keys: The cluster's keys; None gives a checksum that only finds damage.
        session_id: The session.
        nonces: The client's and the bookie's, all of one size.
        instance: The bookie's.
    """
    if keys is None:
        return xxh3_128_digest
    scope = b"".join(len(part).to_bytes(4, "big") + part for part in (b"session", session_id, *nonces, instance))
    return keyed_mac(hashlib.blake2b(scope, key=keys.session_key, digest_size=KEY_BYTES).digest())


# ---- rights ----------------------------------------------------------------------------------------------------------


class RightsKey:
    """Proves that its holder may add to, fence and delete a ledger; made of the ledger's write-auth key.

    Args:
        seed: ``KEY_BYTES`` bytes.

    Attributes:
        public: What the proofs are checked with, ``KEY_BYTES`` bytes; the ledger's verifier.

    Raises:
        UsageError: The seed has another size.

    Threads: any.
    """

    __slots__ = ("_key", "public")

    def __init__(self, seed: bytes) -> None:
        if len(seed) != KEY_BYTES:
            raise UsageError(f"the seed of a rights key has {len(seed)} bytes; it takes {KEY_BYTES}")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public: Final = self._key.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        """Name the public half."""
        return f"<RightsKey {self.public.hex()}>"

    def sign(self, session_id: bytes, instance: bytes, ledger_id: int) -> bytes:
        """Prove the right to write a ledger, to one bookie and for one session.

        Args:
            session_id: The session.
            instance: The bookie's.
            ledger_id: The ledger.

        Returns:
            ``SIGNATURE_BYTES`` bytes.

        Cost: 50 microseconds.
        """
        return self._key.sign(_right(session_id, instance, ledger_id))

    def sign_deletion(self, ledger_id: int) -> bytes:
        """Prove the right to have a ledger deleted by all who keep it; ``SIGNATURE_BYTES`` bytes."""
        return self._key.sign(_deletion(ledger_id))


def proves_right(public: bytes, signature: bytes, session_id: bytes, instance: bytes, ledger_id: int) -> bool:
    """Tell whether a signature proves the right to write a ledger; False for anything else than a proof.

    Args:
        public: The ledger's verifier.
        signature: What ``RightsKey.sign`` made of the same.
        session_id: The session.
        instance: The bookie's.
        ledger_id: The ledger.

    Cost: 100 microseconds.
    """
    if len(public) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _right(session_id, instance, ledger_id))
    except (InvalidSignature, ValueError):
        return False
    return True


def proves_deletion(public: bytes, signature: bytes, ledger_id: int) -> bool:
    """Tell whether a signature is ``RightsKey.sign_deletion`` of a ledger; False for anything else."""
    if len(public) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _deletion(ledger_id))
    except (InvalidSignature, ValueError):
        return False
    return True


def _deletion(ledger_id: int) -> bytes:
    """Return what is signed to have a ledger deleted; a ledger is deleted once, so it may be shown again."""
    return b"pybk-deletion/1" + ledger_id.to_bytes(8, "big", signed=True)


def _right(session_id: bytes, instance: bytes, ledger_id: int) -> bytes:
    """Return what is signed; both ids have one size for ever, so that no two rights read the same."""
    return b"pybk-right/1" + session_id + instance + ledger_id.to_bytes(8, "big", signed=True)


# ---- the LAC by itself -----------------------------------------------------------------------------------------------


def prove_lac(lac_key: bytes, ledger_id: int, lac: int) -> bytes:
    """Make a LAC packet: ``ledger id | lac | MAC``, ``LAC_PACKET_BYTES`` bytes, which proves what the writer said.

    Args:
        lac_key: The ledger's lac-mac key.
        ledger_id: The ledger.
        lac: The last add confirmed.
    """
    said = _pack_lac(ledger_id, lac)
    return said + hashlib.blake2b(said, key=lac_key, digest_size=MAC_BYTES).digest()


def proven_lac(lac_key: bytes, ledger_id: int, packet: bytes | memoryview) -> int | None:
    """Return the last add confirmed that a packet proves, None if it proves nothing about this ledger."""
    if len(packet) != LAC_PACKET_BYTES:
        return None
    said_id, lac = _unpack_lac(packet)
    if said_id != ledger_id or lac < -1 or not compare_digest(prove_lac(lac_key, ledger_id, lac), bytes(packet)):
        return None
    return int(lac)
