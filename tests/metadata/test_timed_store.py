"""How long requests to the metadata store take, by operation and result, and lost sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pybk.errors import MetadataExistsError, MetadataUnreachableError, MetadataVersionError
from pybk.metadata.lmdb_store import LmdbMetadataStore
from pybk.metadata.timed_store import TimedStore
from pybk.metrics import METADATA_OP, SESSION_LOSSES, MetricKey, Metrics


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbMetadataStore]:
    store = LmdbMetadataStore(str(tmp_path / "metadata"))
    yield store
    store.close()


def counted(metrics: Metrics) -> Counter[tuple[str, str]]:
    """Return how many requests were recorded, by operation and result."""
    found: Counter[tuple[str, str]] = Counter()
    for key, histogram in metrics.snapshot().histograms.items():
        if key.name == METADATA_OP:
            found[dict(key.labels)["op"], dict(key.labels)["result"]] += histogram.count
    return found


def test_each_request_counts_with_its_result(store: LmdbMetadataStore, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, timed = Metrics(), TimedStore(store)
    timed.get("before")
    timed.measure(metrics)
    version = timed.create("keys/key", b"1")
    with pytest.raises(MetadataExistsError):
        timed.create("keys/key", b"2")
    with pytest.raises(MetadataVersionError):
        timed.put("keys/key", b"2", version + 1)
    version = timed.put("keys/key", b"2", version)
    assert [node and node.value for node in timed.get_many(["keys/key", "none"])] == [b"2", None]
    assert timed.children("keys") == ["key"]
    timed.rename("keys/key", "keys/other", b"3", version)
    assert dict(timed.walk()).keys() == {"keys/other"}
    node = timed.get("keys/other")
    assert node is not None
    timed.delete("keys/other", node.version)

    def silent(key: str, *, latest: bool = False) -> None:
        raise MetadataUnreachableError("no answer")

    monkeypatch.setattr(store, "get", silent)
    with pytest.raises(MetadataUnreachableError):
        timed.get("keys/key")
    assert counted(metrics) == {
        ("create", "ok"): 1,
        ("create", "refused"): 1,
        ("put", "ok"): 1,
        ("put", "refused"): 1,
        ("get_many", "ok"): 1,
        ("children", "ok"): 1,
        ("rename", "ok"): 1,
        ("get", "ok"): 1,
        ("delete", "ok"): 1,
        ("get", "unreachable"): 1,
    }


def test_each_lost_session_counts(store: LmdbMetadataStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(store, "on_session_end", ends.append)
    metrics, timed = Metrics(), TimedStore(store)
    timed.measure(metrics)
    lost = MetricKey(SESSION_LOSSES)
    assert metrics.snapshot().counters[lost] == 0, "there before the first one, so that an increase can be seen"
    (end,) = ends
    end()
    assert metrics.snapshot().counters[lost] == 1
