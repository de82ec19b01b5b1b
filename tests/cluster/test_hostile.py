"""A bookie whose peers mean harm, or are broken: it refuses what they say, serves on, and starts again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pybk.errors import PybkError
from pybk.flags import LedgerType
from tests.cluster.inside import Inside, inside
from tests.cluster.test_mending import PASSWORD, check, fill, service_of


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path) as cluster:
        yield cluster


@pytest.mark.parametrize("kind", [LedgerType.BOOKIE, LedgerType.FENCE, LedgerType.LIMBO])
def test_a_ledger_of_a_bookies_own_type_is_refused_and_bookies_start_again(three: Inside, kind: LedgerType) -> None:
    client = three.connect()
    ledger_id = fill(client, 20)
    writer = client._create_ledger(kind, password=PASSWORD)
    with pytest.raises(PybkError):
        writer.append(b"poison")
    with pytest.raises(PybkError):
        writer.close()
    own = [service_of(manager).replicas.state(writer.ledger_id) for manager in three.bookies]
    assert own == [None, None, None]
    for manager in three.bookies:
        manager.close()
    for place in range(3):
        three.open_bookie(place)
    check(three.connect(), ledger_id, 20)


def test_a_ledger_of_the_system_s_metadata_is_taken(three: Inside) -> None:
    client = three.connect()
    with client._create_ledger(LedgerType.METADATA, password=PASSWORD) as writer:
        assert writer.append(b"manifest") == 0
