"""Options of writes to logs: what is taken, and what is refused before anything is done."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.credentials import CredentialSources, Secret
from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.spark.connection import StoreOrCluster
from pybk.spark.log_sink.log_sink_options import log_sink_options
from pybk.spark.options import source_options, writes_logs
from pybk.streams.log_settings import LogSettings
from tests.spark.log_sink.writes import sent

CLUSTER = {"metadataUri": "lmdb:///meta"}
ONE = {**CLUSTER, "topic": "orders", "passwordFile": "/p"}


def lowered(options: dict[str, str]) -> dict[str, str]:
    """Return options as Spark hands them to a data source."""
    return {name.lower(): value for name, value in options.items()}


def test_a_write_with_nothing_but_what_it_needs() -> None:
    found = log_sink_options(lowered(ONE), streaming=False)
    assert found.where == StoreOrCluster(metadata_uri="lmdb:///meta", secret=Secret(variable="PYBK_CLUSTER_SECRET"))
    assert found.given == CredentialSources(Secret(file="/p"))
    assert (found.topic, found.create, found.asked, found.insecure) == ("orders", False, LogSettings(), False)
    assert (found.app_id, found.txn_app_id, found.txn_version) == (None, None, None)
    assert sent(found) == found


def test_every_option_of_a_write() -> None:
    given = {
        **ONE,
        "createTopics": "true",
        "includeHeaders": "true",
        "ensembleSize": "3",
        "writeQuorum": "2",
        "ackQuorum": "1",
        "digestType": "xxh3",
        "storageHints": "ssd",
        "insecure": "true",
    }
    batch = log_sink_options(lowered({**given, "txnAppId": "jobs/daily", "txnVersion": "7"}), streaming=False)
    settings = LogSettings(quorums=(3, 2, 1), digest_type=DigestType.XXH3, storage_hints=frozenset({StorageHint.SSD}))
    assert (batch.create, batch.asked, batch.insecure) == (True, settings, True)
    assert (batch.txn_app_id, batch.txn_version) == ("jobs/daily", 7)
    stream = log_sink_options(lowered({**given, "appId": "app", "checkpointLocation": "/c"}), streaming=True)
    assert stream.app_id == "app"


def test_an_option_or_a_column_names_the_log() -> None:
    assert writes_logs({"TOPIC": "orders"}, ["value"])
    assert writes_logs({}, ["key", "value", "Topic"])
    assert not writes_logs({"ledgerType": "orders"}, ["payload"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topic": "orders", "passwordFile": "/p"}, "metadataUri"),
        ({**ONE, "path": "/data"}, "one process that holds it"),
        ({**CLUSTER, "topic": "orders"}, "give secretFile or passwordFile, or insecure=true"),
        ({**ONE, "topic": "a//b"}, "option topic: the name 'a//b' has an empty part"),
        ({**ONE, "kafka.bootstrap.servers": "h:9092"}, "does not apply to a log of pybk: give metadataUri"),
        ({**ONE, "kafka.acks": "all"}, "give ackQuorum"),
        ({**ONE, "kafka.enable.idempotence": "true"}, "each record is written once"),
        ({**ONE, "kafka.compression.type": "lz4"}, "a setting of Kafka's client"),
        ({**ONE, "ledgerType": "orders"}, "of writes to ledgers of their own"),
        ({**ONE, "retainAge": "7d"}, "of writes to ledgers of their own; give the log a retention"),
        ({**ONE, "subscribe": "orders"}, "of reads; a write takes topic"),
        ({**ONE, "log": "orders"}, "of reads; a write takes topic"),
        ({**ONE, "createTopic": "true"}, "did you mean createTopics"),
        ({**ONE, "createTopics": "yes"}, "true or false"),
        ({**ONE, "includeHeaders": "yes"}, "true or false"),
        ({**ONE, "batchBytes": "8m"}, "batchBytes is not one of a batch write to logs"),
        ({**ONE, "appId": "a"}, "appId is not one of a batch write to logs"),
        ({**ONE, "txnVersion": "1"}, "together"),
        ({**ONE, "txnAppId": ".a", "txnVersion": "1"}, "option txnAppId: the name '.a'"),
        ({**ONE, "writeQuorum": "5", "ensembleSize": "3"}, "none larger than"),
        ({**ONE, "digestType": "md5"}, "takes CRC32C"),
        ({**ONE, "storageHints": "tape"}, "nvme, ssd, hdd"),
        ({**ONE, "password": "hush"}, "option password is a secret itself.*give passwordFile"),
        ({**ONE, "pass_word": "hush"}, "did you mean passwordFile"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_done(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        log_sink_options(lowered(options), streaming=False)
    assert "hush" not in str(refused.value)


def test_a_stream_numbers_its_batches_itself() -> None:
    with pytest.raises(UsageError, match="txnAppId is not one of a streaming write to logs"):
        log_sink_options({**ONE, "txnAppId": "a", "txnVersion": "1"}, streaming=True)


def test_a_long_name_of_a_stream_is_refused() -> None:
    assert log_sink_options({**ONE, "appId": "a" * 80}, streaming=True).app_id == "a" * 80
    with pytest.raises(UsageError, match=r"option appId: .* has 81 bytes in UTF-8; it takes 1 to 80"):
        log_sink_options({**ONE, "appId": "a" * 81}, streaming=True)


def test_a_read_with_a_topic_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"one of subscribe, .*a view to write to declares its columns"):
        source_options(lowered(ONE))
