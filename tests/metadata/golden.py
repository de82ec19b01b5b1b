"""The bytes of every kind of value in the metadata store; ``python -m tests.metadata.golden`` writes them down.

That is for a new format only: what was written once must be read for ever.
"""

from __future__ import annotations

import json
from dataclasses import replace

from pybk.feature_level import FeatureLevel
from pybk.healing.auditor import Judged, SavedAbsence, SavedState, encode_state
from pybk.healing.situation import MarkKey
from pybk.metadata import durable_positions, epochs, lmdb_rows
from pybk.metadata.authenticated_values import ValueKind, encode_authenticated
from pybk.metadata.cluster import ClusterIdentity, encode, proof_of
from pybk.metadata.durable_positions import DurablePosition
from pybk.metadata.epochs import MetadataEpoch
from pybk.metadata.ledger_description import LedgerDescription
from pybk.metadata.ledgers import ledger_path
from pybk.metadata.metadata_keys import MetadataKeys
from pybk.metadata.pointers import pointer_key
from pybk.metadata.registration import BookieCookie, BookieState, encode_cookie, encode_registration
from pybk.metadata.secret_epochs import SecretEpochs
from pybk.metadata.settings import ClusterSettings, RepairSettings, encode_settings
from pybk.metadata.underreplication import UnderReplicatedLedger, missing_key, record_json
from pybk.values import encode_json, to_base64
from tests.metadata.records import KEY, KEYS, bookie, ledger, registration
from tests.paths import GOLDEN
from tests.storage.memory_environment import MapEnvironment

SETTINGS = ClusterSettings(
    repair=RepairSettings(least_bytes_per_second=512 << 10),  # the default when the bytes were kept
    changed_by="ops",
    changed_ns=5,
)
GOLDEN_METADATA = GOLDEN / "metadata.json"
"""The values of format 1, made by the first released version."""

GOLDEN_SEALS = GOLDEN_METADATA.with_name("metadata-seals.json")
"""Those of feature level SEALS."""

GOLDEN_HEALING = GOLDEN_METADATA.with_name("metadata-healing.json")
"""Those of feature level HEALING."""

GOLDEN_STREAMS = GOLDEN_METADATA.with_name("metadata-streams.json")
"""Those of feature level STREAMS."""

GOLDEN_SECRETS = GOLDEN_METADATA.with_name("metadata-secrets.json")
"""Those of feature level SECRETS."""

GOLDEN_ROTATED = GOLDEN_METADATA.with_name("metadata-rotated.json")
"""Those of a cluster whose secret is replaced: what it says of itself after each step, and what was resealed."""

TOKEN = bytes(range(16))
CLUSTER = ClusterIdentity(bytes(range(16)), bytes(range(32)), 1 << 14)


def identity_json(level: FeatureLevel) -> bytes:
    """Return what a cluster with a secret says of itself."""
    return encode(CLUSTER, level, SecretEpochs(proofs={0: proof_of(CLUSTER, KEY, level)}))


def values(level: FeatureLevel = FeatureLevel.SEALS) -> dict[str, tuple[str, bytes]]:
    """Return a key and a value of every kind."""
    cookie = BookieCookie(bookie(1), CLUSTER.cluster_id, 3)
    if level >= FeatureLevel.HEALING:
        cookie = replace(cookie, state=BookieState.MAINTENANCE, state_since_ns=5, until_ns=6, location="zone/rack")
    payloads: dict[ValueKind, tuple[str, bytes]] = {
        ValueKind.CLUSTER: ("cluster", identity_json(level)),
        ValueKind.IDS: ("ids", encode_json({"next": 2000})),
        ValueKind.LEDGER: (f"ledgers/{ledger_path(7)}", ledger(7).encode()),
        ValueKind.DELETED: (f"ledgers/{ledger_path(8)}", encode_json({"ledger_id": 8, "proof": to_base64(bytes(64))})),
        ValueKind.COOKIE: ("cookies/bookie-1%3A3181", encode_cookie(cookie)),
        ValueKind.BOOKIE: (
            "bookies/bookie-1%3A3181",
            encode_registration(registration(bookie(1), level_max=max(level, 1)), "ab" * 16),
        ),
        ValueKind.LOCK: ("locks/auditor", encode_json({"by": "cd" * 16, "owner": "bookie-1:3181"})),
        ValueKind.UNDER_REPLICATED: (missing_key(7, bookie(1)), record_json(UnderReplicatedLedger(7, bookie(1), 5))),
        ValueKind.NEWS: ("underreplicated-news", b""),
        ValueKind.POINTER: (pointer_key("sinks", "query/1"), encode_json({"manifest": 7})),
        ValueKind.POSITION: (
            "positions/bookie-1%3A3181",
            durable_positions.encode(DurablePosition(bookie(1), 3, 258, 77, 5, 78)),
        ),
        ValueKind.DELETIONS: ("deletions/0000000000000003", encode_json({"ledger_ids": [7, 8]})),
        ValueKind.DELETION_HEAD: ("deletion-head", encode_json({"last": 3})),
        ValueKind.DELETION_POSITION: (
            "deletion-positions/bookie-1%3A3181",
            encode_json({"bookie_id": "bookie-1:3181", "instance": to_base64(bookie(1).instance), "page": 3}),
        ),
        ValueKind.SETTINGS: ("settings", encode_settings(SETTINGS, {})),
    }
    payloads[ValueKind.EPOCH] = ("epoch", epochs.encode(MetadataEpoch(1_700_000_000_000, 7, limbo=True)))
    payloads[ValueKind.OUTDATED] = ("outdated", encode_json({"reason": "its epoch is 0/3"}))
    absence = SavedAbsence(3, 5_000_000_000, (9_000_000_000,))
    judged = {MarkKey(7, bookie(1)): Judged(bytes(16), 5)}
    state = SavedState({bookie(1): absence}, 60_000_000_000, judged)
    payloads[ValueKind.AUDITOR] = ("auditor", encode_json(encode_state(state)))
    payloads[ValueKind.AUDITOR_REPORT] = ("auditor-report", encode_json({"auditor": "bookie-1:3181"}))
    payloads[ValueKind.SCRUB] = ("scrub/bookie-1%3A3181", encode_json({"instance": to_base64(bookie(1).instance)}))
    orphans = {"bookie_id": "bookie-1:3181", "count": 1, "instance": to_base64(bookie(1).instance), "ledger_ids": [7]}
    payloads[ValueKind.ORPHANS] = ("orphans/bookie-1%3A3181", encode_json(orphans))
    payloads[ValueKind.DELETED_IDS] = ("deleted/000/0000/0000/0000", encode_json({"ranges": [[3, 3], [5, 9]]}))
    assert set(payloads) == set(ValueKind)
    made = {}
    for kind, (key, payload) in payloads.items():
        made[kind.name] = (
            key,
            encode_authenticated(kind, key, TOKEN, payload, None if kind is ValueKind.CLUSTER else KEYS, level),
        )
    key, payload = payloads[ValueKind.LEDGER]
    made["LEDGER without a secret"] = (key, encode_authenticated(ValueKind.LEDGER, key, TOKEN, payload, None, level))
    made["description"] = ("", LedgerDescription.of(ledger(7)).encode(KEY))
    made["description of key format 1"] = ("", LedgerDescription.of(ledger(7, key_format=1)).encode(KEY))
    made["description without a secret"] = ("", LedgerDescription.of(ledger(7)).encode(None))
    return made


SECRETS = {0: KEY, 1: b"n" * 32, 2: b"t" * 32}
"""The metadata keys of the secrets of a cluster, by epoch."""

SINCE = 258
"""The version from which on a resealed value has had its payload."""


def steps() -> dict[str, SecretEpochs]:
    """Return what a cluster says of its secrets after each step of two rotations, with proofs."""
    found = {"created": SecretEpochs(proofs={0: proof_of(CLUSTER, KEY, FeatureLevel.HEALING)})}
    for epoch in (1, 2):
        keys = MetadataKeys(epoch - 1, {number: SECRETS[number] for number in range(epoch)})
        *_, last = found.values()
        added = last.added(CLUSTER.cluster_id, keys, SECRETS[epoch])
        switched = added.switched()
        retired = switched.without_old(CLUSTER.cluster_id, keys)
        for name, step in (("added", added), ("switched", switched), ("retired", retired)):
            found[f"{name} {epoch}"] = replace(
                step,
                proofs={
                    number: proof_of(CLUSTER, SECRETS[number], FeatureLevel.HEALING, number, step.claim())
                    for number in step.proofs
                },
            )
    return found


def rotated() -> dict[str, tuple[str, bytes]]:
    """Return a key and a value for each step, and values that were resealed in the first rotation."""
    level, made = FeatureLevel.HEALING, {}
    for name, step in steps().items():
        payload = encode(CLUSTER, level, step)
        made[name] = ("cluster", encode_authenticated(ValueKind.CLUSTER, "cluster", TOKEN, payload, None, level))
    keys = MetadataKeys(1, {0: KEY, 1: SECRETS[1]})
    for kind, (key, payload) in {
        ValueKind.LEDGER: (f"ledgers/{ledger_path(7)}", ledger(7).encode()),
        ValueKind.POINTER: (pointer_key("sinks", "query/1"), encode_json({"manifest": 7})),
    }.items():
        made[f"{kind.name} resealed"] = (key, encode_authenticated(kind, key, TOKEN, payload, keys, level, SINCE))
    key, bookies = "bookies/bookie-1%3A3181", registration(bookie(1), level_max=level)
    payload = encode_registration(replace(bookies, key_epochs=(0, 1), key_epoch=1, old_sessions=2), "ab" * 16)
    made["BOOKIE"] = (key, encode_authenticated(ValueKind.BOOKIE, key, TOKEN, payload, keys, level))
    return made


def golden_rotated() -> dict[str, list[str]]:
    """Return what ``rotated`` does, as it is written down."""
    return {name: [key, value.hex()] for name, (key, value) in rotated().items()}


def lmdb_golden() -> dict[str, str]:
    """Return the rows of a small store in LMDB."""
    environment = MapEnvironment()
    with environment.write() as transaction:
        lmdb_rows.put(transaction, lmdb_rows.FORMAT_NAME, b"\x01")
        lmdb_rows.put_last_number(transaction, 258)
        lmdb_rows.put_session(transaction, lmdb_rows.Session(257, 2, 5000))
        name = lmdb_rows.node_name("a/b")
        lmdb_rows.put_value(transaction, name, lmdb_rows.StoredValue(256, 258, 257, b"value"))
    return {name.hex(): value.hex() for name, value in environment.rows.items()}


def golden(level: FeatureLevel) -> dict[str, dict[str, object]]:
    """Return everything, as it is written down."""
    return {
        "values": {name: [key, value.hex()] for name, (key, value) in values(level).items()},
        "lmdb": dict(lmdb_golden()),
    }


if __name__ == "__main__":
    GOLDEN_SECRETS.write_text(json.dumps(golden(FeatureLevel.SECRETS), indent=1) + "\n")
