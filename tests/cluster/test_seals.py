"""Writers and recoveries seal a replicated ledger's end, all alike; what is changed in the metadata store is found."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pybk.errors import CorruptError, LedgerUnsealedError, SealMismatchError
from pybk.feature_level import FeatureLevel
from pybk.flags import WriteFlag
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.manager.ledger_manager import LedgerManager
from tests.cluster.inside import Inside, inside
from tests.internals import cluster_backend_of

PASSWORD = b"a password of the tests"
SHAPES = [(1, 1, 1), (3, 3, 2), (3, 2, 2)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("cluster"), count=3) as cluster:
        yield cluster


def rewrite(manager: LedgerManager, ledger_id: int, **changes: Any) -> LedgerMetadata:
    """Change a ledger in the metadata store, as a member of the cluster can."""
    metadata = cluster_backend_of(manager).membership.metadata
    found = metadata.read_ledger(ledger_id)
    metadata.write_ledger(replace(found.metadata, version=found.metadata.version + 1, **changes), found.version)
    return found.metadata


def write(manager: LedgerManager, entries: int, shape: tuple[int, int, int], *, close: bool, **options: Any) -> int:
    ensemble, write_quorum, ack_quorum = shape
    writer = manager.create_ledger(
        password=PASSWORD,
        insecure=True,
        ensemble_size=ensemble,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        **options,
    )
    writer.append_many(b"entry %d" % number for number in range(entries))
    if close:
        writer.close()
    else:
        writer.force()
    return writer.ledger_id


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("digest_type", [DigestType.HMAC_SHA256, DigestType.NONE])
@pytest.mark.parametrize("entries", [0, 1, 50])
@pytest.mark.parametrize("shape", SHAPES)
def test_writer_and_recoveries_make_the_same_seal(
    cluster: Inside, shape: tuple[int, int, int], entries: int, digest_type: DigestType
) -> None:
    client = cluster.connect()
    for flags in WriteFlag.NONE, WriteFlag.DEFERRED_FORCE:
        ledger_id = write(client, entries, shape, close=True, digest_type=digest_type, write_flags=flags)
        closed = client.ledger_metadata(ledger_id)
        assert (closed.sealed, closed.key_format) == (True, 1)
        again = {"last_entry_id": -1, "length": 0, "seal": b"", "last_digest": b""}
        for state in LedgerState.OPEN, LedgerState.IN_RECOVERY:
            rewrite(client, ledger_id, state=state, **again)
            with cluster.connect().open_ledger(ledger_id, password=PASSWORD, require_seal=True) as reader:
                assert len(list(reader.read(0, entries - 1))) == entries
            found = client.ledger_metadata(ledger_id)
            assert (found.seal, found.last_digest) == (closed.seal, closed.last_digest)
            assert (found.last_entry_id, found.length) == (closed.last_entry_id, closed.length)


def test_a_recovery_seals_what_its_writer_left(cluster: Inside) -> None:
    client = cluster.connect()
    ledger_id = write(client, 20, (3, 3, 2), close=False)
    with cluster.connect().open_ledger(ledger_id, password=PASSWORD, require_seal=True) as reader:
        assert reader.last_add_confirmed == 19


@pytest.mark.parametrize(
    "changes",
    [
        {"digest_type": DigestType.NONE},
        {"last_entry_id": 5, "length": 42},
        {"custom_metadata": {"schema": b"2"}},
    ],
    ids=["downgraded", "truncated", "other-custom-metadata"],
)
def test_a_ledger_changed_in_the_metadata_store_is_not_opened(cluster: Inside, changes: dict[str, Any]) -> None:
    client = cluster.connect()
    ledger_id = write(client, 20, (3, 3, 2), close=True)
    rewrite(client, ledger_id, **changes)
    for recover in True, False:
        with pytest.raises(SealMismatchError):
            client.open_ledger(ledger_id, password=PASSWORD, recover=recover)


def test_below_its_level_a_cluster_seals_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with inside(tmp_path, count=1) as one:
        client = one.connect()
        metadata = cluster_backend_of(client).membership.metadata
        metadata.feature_level = FeatureLevel.BASE
        closed, left = (write(client, 3, (1, 1, 1), close=close) for close in (True, False))
        client.open_ledger(left, password=PASSWORD).close()
        for ledger_id in closed, left:
            assert (client.ledger_metadata(ledger_id).sealed, client.ledger_metadata(ledger_id).key_format) == (
                False,
                0,
            )
        assert not [record for record in caplog.records if "without a seal" in record.getMessage()]
        metadata.feature_level = FeatureLevel.SEALS
        with caplog.at_level(logging.WARNING, "pybk"):
            client.open_ledger(closed, password=PASSWORD).close()
        assert [record for record in caplog.records if "without a seal" in record.getMessage()]
        with pytest.raises(LedgerUnsealedError):
            client.open_ledger(closed, password=PASSWORD, require_seal=True)
        assert client.reseal(closed, password=PASSWORD).sealed
        client.open_ledger(closed, password=PASSWORD, require_seal=True).close()


def test_reseal_checks_the_replicas_first(cluster: Inside) -> None:
    client = cluster.connect()
    good, bad = (write(client, 20, (3, 2, 2), close=True) for _ in range(2))
    sealed = rewrite(client, good, seal=b"", last_digest=b"")
    assert client.reseal(good, password=PASSWORD).seal == sealed.seal
    rewrite(client, bad, seal=b"", last_digest=b"", length=5)
    with pytest.raises(CorruptError, match="and 5 are recorded"):
        client.reseal(bad, password=PASSWORD)
