from __future__ import annotations

import pytest
import zmq
from zmq.utils import z85

from pybk.errors import UsageError
from pybk.transport import cluster_keys
from pybk.transport.cluster_keys import (
    MEMBER_MAC_BYTES,
    ClusterKeys,
    MemberKey,
    RightsKey,
    mac_of,
    prove_lac,
    proven_lac,
    proves_right,
    session_key,
)
from tests.transport.wire_harness import CLUSTER, INSTANCE, KEYS, SECRET

SESSION = b"s" * 16
SEED = b"\x01" * 32


def test_the_same_secret_means_the_same_keys() -> None:
    again = ClusterKeys.derive(SECRET, CLUSTER)
    assert again.client == KEYS.client
    assert (again.metadata_key, again.session_key) == (KEYS.metadata_key, KEYS.session_key)
    assert again.recovery_key == KEYS.recovery_key
    assert zmq.curve_public(KEYS.client.secret) == KEYS.client.public


@pytest.mark.parametrize(("secret", "cluster"), [(SECRET[::-1], CLUSTER), (SECRET, b"another-cluster!")])
def test_another_secret_or_cluster_means_other_keys(secret: bytes, cluster: bytes) -> None:
    other = ClusterKeys.derive(secret, cluster)
    ours = {KEYS.client.secret, KEYS.metadata_key, KEYS.session_key, KEYS.recovery_key}
    theirs = {other.client.secret, other.metadata_key, other.session_key, other.recovery_key}
    assert len(ours | theirs) == 8


def test_keys_stay_what_they_are() -> None:
    """Another derivation would lock every running cluster out of itself."""
    assert KEYS.client.public == b":t2[MM9@ckas)S$a.p^0U9?]gNl/T?F%]J6P3pFN"
    assert KEYS.metadata_key.hex()[:16] == "babfebdf0053277b"
    assert KEYS.session_key.hex()[:16] == "d124fadefba80109"


@pytest.mark.parametrize("secret", [b"", b"fifteen bytes..", b"short"])
def test_short_secrets_are_refused(secret: bytes) -> None:
    with pytest.raises(UsageError, match=rf"has {len(secret)} bytes; it takes at least 16") as refused:
        ClusterKeys.derive(secret, CLUSTER)
    assert repr(secret) not in str(refused.value)


def test_a_secret_must_be_bytes() -> None:
    with pytest.raises(UsageError, match="not str"):
        ClusterKeys.derive("a text of more than sixteen", CLUSTER)  # type: ignore[arg-type]


def test_a_right_holds_for_one_session_bookie_and_ledger() -> None:
    key = RightsKey(SEED)
    proof = key.sign(SESSION, INSTANCE, 7)
    assert len(proof) == cluster_keys.SIGNATURE_BYTES
    assert proves_right(key.public, proof, SESSION, INSTANCE, 7)
    assert not proves_right(key.public, proof, b"t" * 16, INSTANCE, 7)
    assert not proves_right(key.public, proof, SESSION, INSTANCE[::-1], 7)
    assert not proves_right(key.public, proof, SESSION, INSTANCE, 8)
    assert not proves_right(RightsKey(SEED[:-1] + b"\x02").public, proof, SESSION, INSTANCE, 7)


def test_a_members_right_holds_for_one_session_bookie_ledger_and_cluster() -> None:
    key = MemberKey(KEYS)
    mac = key.sign(SESSION, INSTANCE, 7)
    assert len(mac) == MEMBER_MAC_BYTES
    assert MemberKey(KEYS).proves(mac, SESSION, INSTANCE, 7)
    assert not key.proves(mac, SESSION[::-1] + b"x", INSTANCE, 7)
    assert not key.proves(mac, SESSION, INSTANCE[::-1], 7)
    assert not key.proves(mac, SESSION, INSTANCE, 8)
    assert not key.proves(b"", SESSION, INSTANCE, 7)
    assert not key.proves(mac[:-1], SESSION, INSTANCE, 7)
    assert not MemberKey(ClusterKeys.derive(SECRET[::-1], CLUSTER)).proves(mac, SESSION, INSTANCE, 7)
    assert KEYS.recovery_key.hex() not in repr(key)


@pytest.mark.parametrize("public", [b"", b"\xff" * 32, b"\0" * 31])
def test_an_invalid_key_proves_nothing(public: bytes) -> None:
    proof = RightsKey(SEED).sign(SESSION, INSTANCE, 7)
    assert not proves_right(public, proof, SESSION, INSTANCE, 7)
    assert not proves_right(RightsKey(SEED).public, proof[:-1], SESSION, INSTANCE, 7)


def test_a_seed_has_one_size() -> None:
    with pytest.raises(UsageError, match="31 bytes; it takes 32"):
        RightsKey(SEED[1:])


def test_session_keys_depend_on_all_that_makes_a_session() -> None:
    nonces = (b"c" * 16, b"b" * 16)
    said = b"said"
    macs = {
        mac_of(session_key(KEYS, SESSION, nonces, INSTANCE))(said),
        mac_of(session_key(KEYS, b"t" * 16, nonces, INSTANCE))(said),
        mac_of(session_key(KEYS, SESSION, nonces[::-1], INSTANCE))(said),
        mac_of(session_key(KEYS, SESSION, nonces, INSTANCE[::-1]))(said),
        mac_of(session_key(ClusterKeys.derive(SECRET[::-1], CLUSTER), SESSION, nonces, INSTANCE))(said),
        mac_of(session_key(None, SESSION, nonces, INSTANCE))(said),
    }
    assert len(macs) == 6
    assert {len(mac) for mac in macs} == {cluster_keys.MAC_BYTES}


def test_a_lac_packet_proves_its_number_for_its_ledger() -> None:
    packet = prove_lac(b"k" * 32, 7, 41)
    assert len(packet) == cluster_keys.LAC_PACKET_BYTES
    assert proven_lac(b"k" * 32, 7, packet) == 41
    assert proven_lac(b"k" * 32, 7, memoryview(packet)) == 41
    assert proven_lac(b"l" * 32, 7, packet) is None
    assert proven_lac(b"k" * 32, 8, packet) is None
    assert proven_lac(b"k" * 32, 7, packet[:-1]) is None
    assert proven_lac(b"k" * 32, 7, packet[:15] + b"\xff" + packet[16:]) is None
    assert proven_lac(b"k" * 32, 7, prove_lac(b"k" * 32, 7, -2)) is None


def test_no_secret_is_in_a_repr() -> None:
    key = RightsKey(SEED)
    shown = "".join(map(repr, (KEYS, KEYS.client, key, cluster_keys.CurvePair.random())))
    for secret in (SECRET, SEED, KEYS.metadata_key, KEYS.session_key, KEYS.client.secret):
        assert secret.hex() not in shown
        assert repr(secret)[2:-1] not in shown
    assert z85.decode(KEYS.client.secret).hex() not in shown
