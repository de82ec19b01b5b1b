"""Keys derived from a cluster's secret, proofs of rights to ledgers, LAC packets. See ``docs/reference/wire.md``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hmac import compare_digest
from hmac import digest as hmac_digest
from struct import Struct
from typing import Final, Self

import zmq
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from xxhash import xxh3_128_digest
from zmq.utils import z85

from pybk.credentials import SECRET_BYTES_MIN
from pybk.errors import UsageError

KEY_BYTES: Final = 32
MAC_BYTES: Final = 16
SIGNATURE_BYTES: Final = 64
MEMBER_MAC_BYTES: Final = 32
LAC_PACKET_BYTES: Final = 32

Mac = Callable[[bytes | memoryview], bytes]
"""A function that returns the MAC of some bytes, ``MAC_BYTES`` bytes."""

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
    """The keys that are derived from a cluster's secret, the same for all members.

    Attributes:
        client: The CURVE key pair that all clients of the cluster share.
        metadata_key: The key of the MACs of metadata values and ledger descriptions, ``KEY_BYTES`` bytes.
        session_key: The key from which the MAC key of each session is derived, ``KEY_BYTES`` bytes.
        recovery_key: The key of the proofs by which a member recovers a ledger without its password, ``KEY_BYTES``.
    """

    client: CurvePair = field(repr=False)
    metadata_key: bytes = field(repr=False)
    session_key: bytes = field(repr=False)
    recovery_key: bytes = field(repr=False)

    @classmethod
    def derive(cls, secret: bytes, cluster_id: bytes) -> Self:
        """Derive the keys.

        Args:
            secret: The cluster's secret, at least ``SECRET_BYTES_MIN`` random bytes; a password is too weak, because
                no slow hash is applied.
            cluster_id: The cluster's id, the salt: clusters with the same secret have different keys.

        Raises:
            UsageError: The secret is not of type bytes, or too short.

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
            _expand(secret, cluster_id, b"member-recovery"),
        )


class HeldKeys:
    """The keys of the secrets that a process holds: of one secret, or of two while the cluster's secret is replaced.

    Connections look them up when they begin, so a change counts for later connections.

    Attributes:
        all: The keys of the valid secrets, those of new sessions first; empty until ``hold`` was called.

    Threads: any; a read of ``all`` returns the keys of one moment.
    """

    def __init__(self, *keys: ClusterKeys) -> None:
        self.all: tuple[ClusterKeys, ...] = keys
        self._derived: dict[bytes, ClusterKeys] = {}

    def __repr__(self) -> str:
        """Return how many secrets are held; never a key."""
        return f"<HeldKeys of {len(self.all)} secrets>"

    @property
    def current(self) -> ClusterKeys:
        """The keys with which new sessions begin."""
        return self.all[0]

    def derive(self, secret: bytes, cluster_id: bytes) -> ClusterKeys:
        """Derive the keys of a secret as ``ClusterKeys.derive`` does, and remember them for ``hold``."""
        keys = ClusterKeys.derive(secret, cluster_id)
        return self._derived.setdefault(keys.metadata_key, keys)

    def hold(self, metadata_keys: Sequence[bytes]) -> None:
        """Hold the keys that were derived together with these metadata keys, in this order."""
        self.all = tuple(self._derived[each] for each in metadata_keys)


def held_keys(keys: ClusterKeys | HeldKeys | None) -> HeldKeys | None:
    """Return keys as ``HeldKeys``; None without a secret."""
    return HeldKeys(keys) if isinstance(keys, ClusterKeys) else keys


def _expand(secret: bytes, cluster_id: bytes, purpose: bytes) -> bytes:
    """Derive the key of a purpose; each part has its size as a prefix, so that no two inputs have the same bytes."""
    info = b"".join(len(part).to_bytes(4, "big") + part for part in (b"pybk-cluster/1", purpose))
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=cluster_id, info=info).derive(secret)


# ---- messages --------------------------------------------------------------------------------------------------------


def keyed_mac(key: bytes) -> Mac:
    """Return a function that computes keyed BLAKE2b of ``MAC_BYTES`` bytes, in half a microsecond for a header."""
    start = hashlib.blake2b(key=key, digest_size=MAC_BYTES).copy

    def mac(data: bytes | memoryview) -> bytes:
        state = start()
        state.update(data)
        return state.digest()

    return mac


def greeting_mac(keys: ClusterKeys | None) -> Mac:
    """Return the MAC of messages outside of sessions; without a secret, a checksum that detects only damage."""
    return xxh3_128_digest if keys is None else keyed_mac(keys.session_key)


def mac_of(key: bytes) -> Mac:
    """Return the MAC with a key, or a checksum if the key is empty."""
    return keyed_mac(key) if key else xxh3_128_digest


def session_key(keys: ClusterKeys | None, session_id: bytes, nonces: tuple[bytes, bytes], instance: bytes) -> bytes:
    """Return the key of the MAC of one session's messages, ``KEY_BYTES`` bytes; empty without a secret.

    Args:
        keys: The cluster's keys; None without a secret, for a checksum that detects only damage.
        session_id: The session.
        nonces: The client's and the bookie's nonce, ``NONCE_BYTES`` each.
        instance: The bookie's instance.
    """
    if keys is None:
        return b""
    scope = b"".join(len(part).to_bytes(4, "big") + part for part in (b"session", session_id, *nonces, instance))
    return hashlib.blake2b(scope, key=keys.session_key, digest_size=KEY_BYTES).digest()


# ---- rights ----------------------------------------------------------------------------------------------------------


class RightsKey:
    """An Ed25519 key whose signatures prove that the signer may add to, fence and delete a ledger.

    Args:
        seed: The ledger's write-auth key, ``KEY_BYTES`` bytes.

    Attributes:
        public: The public key, ``KEY_BYTES`` bytes, which is the ledger's verifier.

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
        """Return the public key only."""
        return f"<RightsKey {self.public.hex()}>"

    def sign(self, session_id: bytes, instance: bytes, ledger_id: int) -> bytes:
        """Return a proof of the right to write a ledger, valid for one bookie and one session.

        Args:
            session_id: The session.
            instance: The bookie's instance.
            ledger_id: The ledger.

        Returns:
            A signature of ``SIGNATURE_BYTES`` bytes.

        Cost: 50 microseconds.
        """
        return self._key.sign(_right(session_id, instance, ledger_id))

    def sign_deletion(self, ledger_id: int) -> bytes:
        """Return a proof of the right to delete a ledger, valid for all bookies; ``SIGNATURE_BYTES`` bytes."""
        return self._key.sign(_deletion(ledger_id))


class MemberKey:
    """A cluster's key whose MACs prove that the client is a member, which may recover a ledger without its password.

    Args:
        keys: The cluster's keys.

    Threads: any.
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: ClusterKeys | HeldKeys) -> None:
        self._keys = HeldKeys(keys) if isinstance(keys, ClusterKeys) else keys

    def __repr__(self) -> str:
        """Return no key."""
        return "<MemberKey>"

    def sign(self, session_id: bytes, instance: bytes, ledger_id: int) -> bytes:
        """Return a proof of a member's right to recover a ledger, valid for one bookie and one session.

        Args:
            session_id: The session.
            instance: The bookie's instance.
            ledger_id: The ledger.

        Returns:
            A MAC of ``MEMBER_MAC_BYTES`` bytes.
        """
        return _member_mac(self._keys.current, session_id, instance, ledger_id)

    def proves(self, mac: bytes, session_id: bytes, instance: bytes, ledger_id: int) -> bool:
        """Return whether a MAC is the result of ``sign`` with a valid secret; False for any other bytes."""
        return any(compare_digest(_member_mac(each, session_id, instance, ledger_id), mac) for each in self._keys.all)


def _member_mac(keys: ClusterKeys, session_id: bytes, instance: bytes, ledger_id: int) -> bytes:
    claim = b"pybk-member-right/1" + session_id + instance + ledger_id.to_bytes(8, "big", signed=True)
    return hmac_digest(keys.recovery_key, claim, "sha256")


def proves_right(public: bytes, signature: bytes, session_id: bytes, instance: bytes, ledger_id: int) -> bool:
    """Return whether a signature proves the right to write a ledger; False for any other bytes.

    Args:
        public: The ledger's verifier.
        signature: The result of ``RightsKey.sign``.
        session_id: The session.
        instance: The bookie's instance.
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
    """Return whether a signature is that of ``RightsKey.sign_deletion`` for a ledger; False for any other bytes."""
    if len(public) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _deletion(ledger_id))
    except (InvalidSignature, ValueError):
        return False
    return True


def _deletion(ledger_id: int) -> bytes:
    """Return the bytes that are signed to delete a ledger; a replay does no harm, because a ledger is deleted once."""
    return b"pybk-deletion/1" + ledger_id.to_bytes(8, "big", signed=True)


def _right(session_id: bytes, instance: bytes, ledger_id: int) -> bytes:
    """Return the bytes that are signed for a right; each part has a fixed size, so no two rights have equal bytes."""
    return b"pybk-right/1" + session_id + instance + ledger_id.to_bytes(8, "big", signed=True)


# ---- LAC packets -----------------------------------------------------------------------------------------------------


def prove_lac(lac_key: bytes, ledger_id: int, lac: int) -> bytes:
    """Return a LAC packet, which proves the writer's LAC: ``ledger id | lac | MAC``, ``LAC_PACKET_BYTES`` bytes.

    Args:
        lac_key: The ledger's lac-mac key.
        ledger_id: The ledger.
        lac: The last add confirmed.
    """
    claim = _pack_lac(ledger_id, lac)
    return claim + hashlib.blake2b(claim, key=lac_key, digest_size=MAC_BYTES).digest()


def proven_lac(lac_key: bytes, ledger_id: int, packet: bytes | memoryview) -> int | None:
    """Return the last add confirmed that a packet proves; None if it is not a valid packet of this ledger."""
    if len(packet) != LAC_PACKET_BYTES:
        return None
    claimed_id, lac = _unpack_lac(packet)
    if claimed_id != ledger_id or lac < -1 or not compare_digest(prove_lac(lac_key, ledger_id, lac), bytes(packet)):
        return None
    return int(lac)
