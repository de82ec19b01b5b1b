"""Options of reads and writes: what is taken, what is refused, and that no secret is in what is said."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pybk.credentials import CredentialSources, Secret
from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.spark.connection import StoreOrCluster
from pybk.spark.options import Positions, sink_options, source_options

STORE = {"path": "/data/store"}
CLUSTER = {"metadataUri": "lmdb:///meta"}
ONE = {**STORE, "ledger": "7"}
NAMED = {**CLUSTER, "insecure": "true", "txnAppId": "job", "txnVersion": "0"}


def lowered(options: dict[str, str]) -> dict[str, str]:
    """Return options as Spark hands them to a data source."""
    return {name.lower(): value for name, value in options.items()}


def test_a_read_with_nothing_but_what_it_needs() -> None:
    found = source_options(ONE)
    assert found.where == StoreOrCluster(path="/data/store")
    assert (found.ledgers, found.ledger_type) == (((7, 7),), None)
    assert (found.payload, found.include_metadata, found.fail_on_data_loss) == (True, False, True)
    assert not found.require_seal
    assert (found.start_entry, found.end_entry, found.max_entries) == (0, None, None)
    assert found.batch_bytes == 8 << 20
    assert found.starting == Positions()
    assert found.given.password.read() is None


def test_every_option_of_a_batch_read_by_names_in_lower_case() -> None:
    given = {
        **CLUSTER,
        "clusterSecretFile": "/s",
        "passwordFile": "/p",
        "ledgers": " 9-9, 3,5,4-6 ,7-8",
        "payload": "FALSE",
        "includeMetadata": "true",
        "startingOffsets": '{"3": 10}',
        "endingOffsets": '{"3": 20}',
        "startEntry": "1",
        "endEntry": "30",
        "maxEntries": "100",
        "entriesPerPartition": "50",
        "batchBytes": "4mb",
        "failOnDataLoss": "false",
        "requireSeal": "true",
    }
    found = source_options(lowered(given), streaming=False)
    assert found.where == StoreOrCluster(metadata_uri="lmdb:///meta", secret=Secret(None, "/s", "PYBK_CLUSTER_SECRET"))
    assert found.given == CredentialSources(Secret(file="/p"))
    assert found.ledgers == ((3, 3), (4, 6), (7, 8), (9, 9))
    assert (found.payload, found.include_metadata, found.fail_on_data_loss) == (False, True, False)
    assert found.require_seal
    assert (found.starting.entries, found.ending.entries) == ({3: 10}, {3: 20})
    assert (found.start_entry, found.end_entry, found.max_entries) == (1, 30, 100)
    assert (found.entries_per_partition, found.batch_bytes) == (50, 4 << 20)


def test_options_of_a_stream() -> None:
    given = {
        **STORE,
        "ledgerType": "events",
        "startingOffsets": "latest",
        "maxEntriesPerTrigger": "10",
        "maxBytesPerTrigger": "1g",
    }
    found = source_options(lowered(given), streaming=True)
    assert (found.ledgers, found.ledger_type, found.starting.latest) == (None, "events", True)
    assert (found.max_entries_per_trigger, found.max_bytes_per_trigger) == (10, 1 << 30)
    assert found.consumer is None
    named = source_options(lowered({**CLUSTER, "ledgerType": "events", "consumer": "audit"}), streaming=True)
    assert named.consumer == "audit"


def test_options_of_a_write() -> None:
    given = {
        **CLUSTER,
        "ledgerType": "events",
        "storageHints": "ssd, HDD",
        "ensembleSize": "3",
        "writeQuorum": "2",
        "ackQuorum": "1",
        "digestType": "crc32c",
        "txnAppId": "job",
        "txnVersion": "0",
    }
    found = sink_options(lowered(given), streaming=False)
    assert (found.ledger_type, found.storage_hints) == (
        "events",
        frozenset({StorageHint.SSD, StorageHint.HDD}),
    )
    assert (found.ensemble_size, found.write_quorum, found.ack_quorum) == (3, 2, 1)
    assert (found.digest_type, found.app_id, found.txn_app_id, found.txn_version) == (
        DigestType.CRC32C,
        None,
        "job",
        0,
    )
    assert not found.insecure
    assert (found.retain_age_s, found.retain_bytes, found.retain_read, found.retain_unread) == (None, None, True, True)
    limits = {"retainAge": "7d", "retainBytes": "10g", "retainRead": "false", "retainUnread": "false"}
    limited = sink_options(lowered({**given, **limits}), streaming=False)
    assert (limited.retain_age_s, limited.retain_bytes) == (7 * 86_400.0, 10 << 30)
    assert not limited.retain_read
    assert not limited.retain_unread
    stream = {**CLUSTER, "passwordFile": "/p", "appId": "app", "checkpointLocation": "/c", "queryName": "q"}
    assert sink_options(lowered(stream), streaming=True).app_id == "app"
    least = sink_options({**CLUSTER, "insecure": "true"}, streaming=False)
    assert least.insecure
    assert (least.ledger_type, least.storage_hints, least.ensemble_size) == ("", frozenset(), None)
    assert least.digest_type is DigestType.HMAC_SHA256


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "path"),
        ({**STORE, **CLUSTER, "ledger": "1"}, "either"),
        (STORE, "exactly one"),
        ({**ONE, "ledgerType": "x"}, "exactly one.*ledger, ledgerType"),
        ({**ONE, "clusterSecretFile": "/f"}, "metadataUri"),
        ({**ONE, "passwordVariable": "NAME", "passwordFile": "/f"}, "give one"),
        ({**ONE, "passwordVariable": "hush, hush"}, "passwordVariable is not the name of an environment variable"),
        ({**ONE, "passwort": "hush"}, "did you mean passwordFile"),
        ({**ONE, "maxEntrys": "1"}, "did you mean maxEntries"),
        ({"option.path": "/x", "owner": "me", "provider": "pybk", **ONE}, r"options of a table .* WITH \(\.\.\.\)"),
        ({**ONE, "zzz": "1"}, "there are path, metadataUri"),
        ({**ONE, "writeQuorum": "1"}, "writeQuorum is not one of a read"),
        ({**STORE, "ledger": "-1"}, "ledger is '-1'.*from 0"),
        ({**STORE, "ledger": "9223372036854775807"}, "9223372036854775806"),
        ({**STORE, "ledger": "1_0"}, "whole number"),
        ({**STORE, "ledgers": "3,,4"}, "ledgers has ''"),
        ({**STORE, "ledgers": "3, 5-"}, "ledgers has '5-'; it takes ids .* and ranges of both ends"),
        ({**STORE, "ledgers": "-5"}, "ledgers has '-5'"),
        ({**STORE, "ledgers": "3,9223372036854775807"}, "ledgers has '9223372036854775807'"),
        ({"path": "file:///data/store", "ledger": "1"}, "'file:///data/store'; it takes one plain directory"),
        ({"paths": '["/a","/b"]', "ledger": "1"}, "a read takes one plain directory"),
        ({**STORE, "ledgers": "9-7"}, "before its start"),
        ({**STORE, "ledgerType": ".metadata"}, "system"),
        ({**ONE, "payload": "yes"}, "true or false"),
        ({**ONE, "consumer": "audit"}, "option consumer: a cluster records"),
        ({**CLUSTER, "ledger": "1", "consumer": "x" * 200}, "option consumer is .* 1 to 128 bytes"),
        ({**ONE, "batchBytes": "0"}, "from 1 up"),
        ({**ONE, "batchBytes": "2g"}, "at most"),
        ({**ONE, "batchBytes": "8 parsecs"}, "8m"),
        ({**ONE, "maxEntries": "0"}, "from 1"),
        ({**ONE, "startEntry": "5", "endEntry": "4"}, "before startEntry 5"),
        ({**ONE, "startingOffsets": "first"}, "earliest, latest"),
        ({**ONE, "startingOffsets": "[1]"}, "earliest, latest"),
        ({**ONE, "startingOffsets": '{"7": -1}'}, "earliest, latest"),
        ({**ONE, "startingOffsets": '{"7": true}'}, "earliest, latest"),
        ({**ONE, "startingOffsets": "[" * 100_000}, "earliest, latest"),
        ({**ONE, "endingOffsets": "earliest"}, "leave it out"),
    ],
)
def test_invalid_read_options_are_refused_before_anything_is_done(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        source_options(lowered(options))
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("streaming", "name"),
    [(False, "maxEntriesPerTrigger"), (False, "maxBytesPerTrigger"), (True, "startEntry"), (True, "maxEntries")],
)
def test_options_of_the_other_kind_of_read_are_refused(streaming: bool, name: str) -> None:
    source_options({**ONE, name: "1"})
    with pytest.raises(UsageError, match=f"{name} is not one of a (batch|streaming) read"):
        source_options({**ONE, name: "1"}, streaming=streaming)


def test_a_batch_read_does_not_begin_at_the_end() -> None:
    with pytest.raises(UsageError, match="finds nothing"):
        source_options({**ONE, "startingOffsets": "latest"}, streaming=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({**CLUSTER, "insecure": "true", "retainAge": "7d"}, "option retainAge: a batch write without txnAppId"),
        ({**NAMED, "retainAge": "7"}, "option retainAge is '7'; it takes a time such as 30s"),
        ({**NAMED, "retainAge": "a week"}, "it takes a time such as 30s"),
        ({**NAMED, "retainAge": "11575d"}, "option retainAge is '11575d'; it takes at most 11574d: leave it out"),
        ({**NAMED, "retainBytes": "0"}, "from 1 up"),
        ({**NAMED, "retainRead": "no"}, "true or false"),
        ({**NAMED, "retainUnread": "false"}, "beyond retainAge or retainBytes: give one"),
        ({"path": "/data"}, "one process"),
        ({}, "metadataUri"),
        ({**CLUSTER, "ledger": "1"}, "ledger is not one of a batch write"),
        ({**CLUSTER, "appId": "a"}, "appId is not one of a batch write"),
        ({**CLUSTER, "txnVersion": "1"}, "together"),
        ({**CLUSTER, "txnAppId": "a"}, "together"),
        ({**CLUSTER, "insecure": "true", "txnAppId": "x" * 129, "txnVersion": "1"}, "128"),
        ({**CLUSTER, "insecure": "true", "storageHints": "tape"}, "nvme, ssd, hdd"),
        ({**CLUSTER, "digestType": "none"}, "CRC32C, HMAC_SHA256, XXH3"),
        ({**CLUSTER, "insecure": "true", "ledgerType": ".metadata"}, "system"),
        (CLUSTER, "insecure=true"),
    ],
)
def test_invalid_write_options_are_refused_before_anything_is_done(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        sink_options(lowered(options), streaming=False)


def test_a_stream_numbers_its_batches_itself() -> None:
    with pytest.raises(UsageError, match="txnAppId is not one of a streaming write"):
        sink_options(lowered({**CLUSTER, "txnAppId": "a", "txnVersion": "1"}), streaming=True)


@pytest.mark.parametrize("name", ["password", "SECRET", "clustersecret"])
@pytest.mark.parametrize("parse", [partial(source_options, streaming=True), partial(sink_options, streaming=False)])
def test_a_secret_itself_is_refused_with_what_to_do(parse: Callable[[dict[str, str]], Any], name: str) -> None:
    with pytest.raises(UsageError, match=f"(?i)option {name} is a secret itself.*give {name}File, .*{name}Variable"):
        parse({**CLUSTER, name: "hush"})


def test_secrets_come_by_file_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"from a file\r\n")
    told = source_options({**CLUSTER, "ledger": "1", "clusterSecretFile": str(file), "passwordFile": str(file)})
    assert told.where.secret.read() == told.given.password.read() == b"from a file"
    plain = source_options({**CLUSTER, "ledger": "1"})
    assert plain.where.secret.read() is None
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", "from the environment")
    assert plain.where.secret.read() == b"from the environment"
    monkeypatch.setenv("PYBK_CLUSTER_SECRET_FILE", str(file))
    assert plain.where.secret.read() == b"from a file"
    assert source_options(ONE).where.secret.read() is None
    monkeypatch.setenv("PYBK_CLUSTER_SECRET_FILE", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="cannot be read"):
        plain.where.secret.read()


def test_an_option_names_an_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**CLUSTER, "clusterSecretVariable": "OF_ALL", "passwordVariable": "ORDERS", "secretVariable": "NONE"}
    serializers = pytest.importorskip("pyspark.serializers", reason="no pyspark; install the extra spark-test")
    as_spark = serializers.CloudPickleSerializer()
    found = as_spark.loads(as_spark.dumps(sink_options(lowered(options), streaming=True)))
    monkeypatch.setenv("OF_ALL", "the cluster's")
    monkeypatch.setenv("ORDERS", "word")
    assert (found.where.secret.read(), found.given.password.read()) == (b"the cluster's", b"word")
    (tmp_path / "file").write_bytes(b"from a file\n")
    monkeypatch.setenv("ORDERS_FILE", str(tmp_path / "file"))
    assert found.given.password.read() == b"from a file"
    with pytest.raises(UsageError, match=r"variable NONE has no secret in this process: .*spark\.executorEnv\.NONE"):
        found.given.read()
