"""Writers outlive bookies that go away and come back: of a ledger, as long as its patience lasts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pybk.errors import NotEnoughBookiesError
from tests.cluster.inside import inside
from tests.waiting import WAIT_S, wait_until

PASSWORD = b"p"


def test_appends_wait_for_the_only_bookie_to_return(tmp_path: Path) -> None:
    with inside(tmp_path, count=1) as cluster, cluster.connect() as client:
        writer = client.create_ledger(password=PASSWORD, ensemble_size=1)
        for turn in range(3):
            first = writer.append(b"before %d" % turn)
            cluster.bookies[0].close()
            futures = [writer.append_async(b"while it is away %d" % number) for number in range(20)]
            cluster.bookies[0] = cluster.open_bookie(0)
            assert [future.result(WAIT_S) for future in futures] == list(range(first + 1, first + 21))
        writer.close()
        with client.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
            assert reader.last_add_confirmed == 3 * 21 - 1
            assert [entry.entry_id for entry in reader] == list(range(3 * 21))


def test_appends_wait_for_other_bookies_to_register(tmp_path: Path) -> None:
    with inside(tmp_path, count=3) as cluster, cluster.connect() as client:
        writer = client.create_ledger(password=PASSWORD)
        writer.append(b"before")
        for bookie in cluster.bookies:
            bookie.close()
        future = writer.append_async(b"while they are away")
        for place in range(3, 5):
            cluster.open_bookie(place)
        assert future.result(WAIT_S) == 1
        assert writer.append(b"after") == 2


def test_a_writer_whose_patience_has_passed_says_what_a_retry_would_do(tmp_path: Path) -> None:
    """The append may be there, later ones are not, and no retry helps: the ledger's end is found by its recovery."""
    with inside(tmp_path, count=1) as cluster, cluster.connect(bookie_patience_seconds=0.3) as client:
        writer = client.create_ledger(password=PASSWORD, ensemble_size=1)
        writer.append(b"before")
        cluster.bookies[0].close()
        began = time.monotonic()
        with pytest.raises(NotEnoughBookiesError, match=r"waited 0\.3 s .*recover=True .*another ledger") as failed:
            writer.append(b"while it is away")
        assert time.monotonic() - began >= 0.3
        assert (failed.value.outcome_unknown, failed.value.retryable) == (True, False)
        cluster.open_bookie(0)
        wait_until(lambda: client.bookies())
        for call in (lambda: writer.append(b"again"), writer.force, writer.close):
            with pytest.raises(NotEnoughBookiesError) as later:
                call()
            assert (later.value.outcome_unknown, later.value.retryable) == (False, False)
        with client.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
            assert reader.last_add_confirmed == 0


def test_creating_a_ledger_does_not_wait_for_bookies_and_can_be_tried_again(tmp_path: Path) -> None:
    with inside(tmp_path, count=1) as cluster, cluster.connect() as client:
        with pytest.raises(NotEnoughBookiesError) as refused:
            client.create_ledger(password=PASSWORD, ensemble_size=2)
        assert (refused.value.outcome_unknown, refused.value.retryable) == (False, True)
        cluster.open_bookie(1)
        client.create_ledger(password=PASSWORD, ensemble_size=2).close()
