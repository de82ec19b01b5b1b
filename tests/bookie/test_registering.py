"""When a bookie registers again how it is: each registration wakes everybody who watches bookies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pybk.bookie import keeper
from pybk.bookie.advertising import is_notable
from pybk.bookie.keeper import Keeper
from pybk.errors import MetadataUnreachableError
from pybk.flags import StorageHint
from pybk.metadata.registration import BookieRegistration, RegisteredBookie
from tests.cluster.inside import inside
from tests.metadata.records import bookie, registration
from tests.waiting import wait_until

_FREE = {StorageHint.NVME: 1000, StorageHint.HDD: 0}


@pytest.mark.parametrize(
    ("change", "notable"),
    [
        ({}, False),
        ({"load": 3.9}, False),
        ({"load": 4.1}, True),
        ({"load": 1.3}, True),
        ({"tiers": {**_FREE, StorageHint.NVME: 951}}, False),
        ({"tiers": {**_FREE, StorageHint.NVME: 1051}}, True),
        ({"tiers": {**_FREE, StorageHint.NVME: 949}}, True),
        ({"tiers": {**_FREE, StorageHint.HDD: 1}}, True),
        ({"tiers": {StorageHint.NVME: 1000}}, True),
        ({"capacity": {StorageHint.NVME: 2099}}, False),
        ({"capacity": {StorageHint.NVME: 2101}}, True),
        ({"capacity": {}}, True),
        ({"read_only": True}, True),
        ({"in_limbo": 1}, True),
        ({"addresses": ("tcp://127.0.0.1:1",)}, True),
        ({"level_max": 9}, True),
        ({"version": "9"}, True),
        ({"rack": "/elsewhere"}, True),
    ],
    ids=str,
)
def test_changes_that_a_bookie_registers_at_once(change: Mapping[str, Any], notable: bool) -> None:
    known = registration(bookie(1), tiers=_FREE, capacity={StorageHint.NVME: 2000}, load=3.0)
    assert is_notable(known, replace(known, **change)) is notable


class Looks:
    """Counts how often bookies look how they are, and what they write.

    Attributes:
        count: The looks.
        written: The registrations.
        changes: What differs from how they are.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.written: list[BookieRegistration] = []
        self.changes: dict[str, Any] = {"tiers": _FREE, "load": 0.0}
        self.errors: list[MetadataUnreachableError] = []
        look, update = Keeper.registration, RegisteredBookie.update

        def count(keeper: Keeper) -> BookieRegistration:
            self.count += 1
            return replace(look(keeper), **self.changes)

        def write(registered: RegisteredBookie, registration: BookieRegistration) -> None:
            if self.errors:
                raise self.errors.pop()
            update(registered, registration)
            self.written.append(registration)

        monkeypatch.setattr(Keeper, "registration", count)
        monkeypatch.setattr(RegisteredBookie, "update", write)
        monkeypatch.setattr(keeper, "POSITION_SECONDS", 0.001)
        monkeypatch.setattr(keeper, "STATE_SECONDS", 0.001)

    def more(self) -> None:
        """Wait until some more looks are over."""
        wanted = self.count + 5
        wait_until(lambda: self.count >= wanted)


def test_a_bookie_at_rest_registers_only_what_changed_notably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    with inside(tmp_path, count=1):
        looks.more()
        assert looks.written == []
        looks.changes["tiers"] = {**_FREE, StorageHint.NVME: 900}
        wait_until(lambda: looks.written)
        looks.more()
        assert [found.tiers[StorageHint.NVME] for found in looks.written] == [900]
        looks.errors = [MetadataUnreachableError("it is away")] * 2
        looks.changes["read_only"] = True
        wait_until(lambda: len(looks.written) == 2)
        assert (looks.written[1].read_only, looks.errors) == (True, [])
        looks.more()
        assert len(looks.written) == 2


def test_a_bookie_registers_small_changes_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    monkeypatch.setattr(keeper, "REGISTER_SECONDS", 0.002)
    looks.changes["tiers"] = {**_FREE, StorageHint.NVME: 999}
    with inside(tmp_path, count=1):
        wait_until(lambda: len(looks.written) > 2)
