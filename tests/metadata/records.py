"""Ledgers, bookies and clusters that the metadata tests speak of."""

from __future__ import annotations

from typing import Any

from pybk.flags import LedgerType, StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerMetadata
from pybk.metadata.cluster import ClusterIdentity, ClusterMetadata
from pybk.metadata.locks import Lease
from pybk.metadata.metadata_keys import MetadataKeys
from pybk.metadata.registration import BookieRegistration, RegisteredBookie
from pybk.metadata.store import MetadataStore

KEY = b"k" * 32
KEYS = MetadataKeys.first(KEY)


def key_for(identity: ClusterIdentity) -> list[bytes]:
    """Return the metadata key of a cluster with a secret."""
    return [KEY]


def cluster_on(store: MetadataStore) -> ClusterMetadata:
    """Return the cluster in a store."""
    return ClusterMetadata(store, key_for=key_for, cost=2)


def bookie(number: int, instance: int = 0) -> Bookie:
    """Return a bookie."""
    return Bookie(f"bookie-{number}:3181", bytes((number, instance)) * 8)


def ledger(ledger_id: int, **values: Any) -> LedgerMetadata:
    """Return the metadata of a ledger of three bookies."""
    values = {
        "ledger_type": LedgerType("events"),
        "storage_hints": frozenset({StorageHint.NVME, StorageHint.SSD}),
        "write_flags": WriteFlag.NONE,
        "digest_type": DigestType.HMAC_SHA256,
        "ensemble_size": 3,
        "write_quorum": 3,
        "ack_quorum": 2,
        "creation_time_ns": 1_700_000_000_000_000_000,
        "creation_sequence": ledger_id,
        "custom_metadata": {"name": b"\0value"},
        "tier": StorageHint.NVME,
        "key_salt": bytes(range(16)),
        "verifier": bytes(range(32)),
        "fragments": (Fragment(0, (bookie(1), bookie(2), bookie(3))),),
        **values,
    }
    return LedgerMetadata(ledger_id=ledger_id, **values)


def registration(who: Bookie, **values: Any) -> BookieRegistration:
    """Return a registration with sound values."""
    values = {
        "addresses": ("tcp://127.0.0.1:3181", "ipc:///run/bookie"),
        "public_key": bytes(range(32)),
        "tiers": {StorageHint.NVME: 1 << 40, StorageHint.HDD: 0},
        "load": 0.5,
        "rack": "/room/rack",
        "level_max": 4,
        "version": "0.2.0",
        **values,
    }
    return BookieRegistration(bookie=who, **values)


def is_held(lease: Lease | RegisteredBookie) -> bool:
    """Return whether a lock or a registration is still held."""
    return lease.held if isinstance(lease, Lease) else lease.registered
