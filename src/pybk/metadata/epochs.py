"""The metadata epoch, which shows that a metadata store was put back to an older state, or emptied.

The key ``epoch`` has a number, which only ``restore`` and ``rebuild`` raise, and ticks, which bookies raise at each
start and every ten minutes. Each bookie keeps the highest pair that it has seen in its directory. A store whose pair is
lower was put back. The bookie that finds it creates the key ``outdated``. From then on every client and bookie that
connects raises MetadataOutdatedError, until the metadata were restored or rebuilt.

A cluster of an older pybk has no epoch; its first bookie of this version creates the key. Older members ignore both.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Final, NamedTuple

from pybk.errors import MetadataExistsError, MetadataOutdatedError, MetadataVersionError
from pybk.metadata.authenticated_values import AuthenticatedValues, ValueKind
from pybk.values import INT64_MAX, decode_json, encode_json

EPOCH_KEY: Final = "epoch"
OUTDATED_KEY: Final = "outdated"

REASON_CHARS_MAX: Final = 2000
"""Characters of a reason that the key ``outdated`` keeps."""

REMEDY: Final = (
    "bring back the newest metadata store there is; or take this one as it is (`pybk metadata restore URL`), restore "
    "an export (`pybk metadata restore URL FILE --overwrite`), or make the metadata again from the directories of the "
    "bookies (`pybk metadata rebuild URL DIRECTORY...`)"
)


class MetadataEpoch(NamedTuple):
    """The age of a cluster's metadata; epochs are ordered by age.

    Attributes:
        number: 0 for a cluster that was never restored; otherwise milliseconds since 1970, and higher than any earlier
            number.
        ticks: Grows with each start of a bookie, and every ten minutes while one runs.
        limbo: Whether metadata of this epoch may name bookies that do not have the entries, because not all bookies'
            directories were read; each bookie puts all its ledgers in limbo when it first sees the epoch.
    """

    number: int
    ticks: int
    limbo: bool = False

    def __str__(self) -> str:
        """Return both numbers."""
        return f"{self.number}/{self.ticks}"

    @property
    def age(self) -> tuple[int, int]:
        """The pair that is compared; the higher one is newer."""
        return self.number, self.ticks


class MetadataEpochs(AuthenticatedValues):
    """The epoch of a cluster's metadata. Threads: any. Every method may raise MetadataUnreachableError."""

    def read_epoch(self) -> MetadataEpoch | None:
        """Return the epoch; None if the cluster has none yet.

        Raises:
            MetadataForgedError: It was not written with the cluster's secret.
            CorruptError: The key does not hold an epoch.
        """
        return self._read_epoch()[0]

    def grow_epoch(self) -> MetadataEpoch:
        """Raise the ticks by one, durably, and return the epoch; begin epoch 0 if the cluster has none.

        Cost: One read and one write of the metadata store.
        """
        while True:
            found, version = self._read_epoch()
            grown = MetadataEpoch(0, 1) if found is None else found._replace(ticks=found.ticks + 1)
            with suppress(MetadataExistsError, MetadataVersionError):  # another bookie was faster
                self._write_epoch(grown, version)
                return grown

    def begin_epoch(self, *, limbo: bool, above: int = 0) -> MetadataEpoch:
        """Begin a new epoch, durably, and return it.

        Args:
            limbo: See ``MetadataEpoch``.
            above: The highest number that a bookie has seen.
        """
        while True:
            found, version = self._read_epoch()
            before = max(above, 0 if found is None else found.number)
            begun = MetadataEpoch(max(before + 1, time.time_ns() // 1_000_000), 1, limbo)
            with suppress(MetadataExistsError, MetadataVersionError):
                self._write_epoch(begun, version)
                return begun

    def note_outdated(self, reason: str) -> None:
        """Record durably the reason why the store must not be used; an earlier reason stays."""
        with suppress(MetadataExistsError):
            self.create_value(ValueKind.OUTDATED, OUTDATED_KEY, encode_json({"reason": reason[:REASON_CHARS_MAX]}))

    def check_not_outdated(self) -> None:
        """Raise MetadataOutdatedError if a bookie found that the store was put back to an older state, or emptied."""
        node = self._store.get(OUTDATED_KEY)
        if node is not None:
            payload = self._payload_of(ValueKind.OUTDATED, OUTDATED_KEY, node.value)
            where = f"metadata key {OUTDATED_KEY!r}"
            raise outdated(decode_json(payload, lambda values: str(values["reason"]), where=where))

    def clear_outdated(self) -> None:
        """Allow the store to be used again."""
        while (node := self._store.get(OUTDATED_KEY, latest=True)) is not None:
            with suppress(MetadataVersionError):
                self._delete(OUTDATED_KEY, node.version)

    def _read_epoch(self) -> tuple[MetadataEpoch | None, int]:
        """Return the epoch and the version of its key; None and 0 without an epoch."""
        node = self._store.get(EPOCH_KEY, latest=True)
        if node is None:
            return None, 0
        payload = self._payload_of(ValueKind.EPOCH, EPOCH_KEY, node.value)
        return decode_json(payload, decode, where=f"metadata key {EPOCH_KEY!r}"), node.version

    def _write_epoch(self, epoch: MetadataEpoch, version: int) -> None:
        """Write the epoch over the value of a version; 0 creates the key."""
        if version:
            self._put(ValueKind.EPOCH, EPOCH_KEY, encode(epoch), version)
        else:
            self.create_value(ValueKind.EPOCH, EPOCH_KEY, encode(epoch))


def outdated(reason: str) -> MetadataOutdatedError:
    """Return the error for metadata that were put back, with the remedy."""
    return MetadataOutdatedError(f"the cluster's metadata were put back to an older state: {reason}; {REMEDY}")


def encode(epoch: MetadataEpoch) -> bytes:
    """Return the payload of the key ``epoch``."""
    return encode_json(epoch._asdict())


def decode(values: dict[str, Any]) -> MetadataEpoch:
    """Return the epoch in the decoded payload of a value; raises KeyError or ValueError if it is not one."""
    number, ticks, limbo = values["number"], values["ticks"], values["limbo"]
    if not all(type(each) is int and 0 <= each <= INT64_MAX for each in (number, ticks)) or type(limbo) is not bool:
        raise ValueError(f"epoch {number!r}/{ticks!r}, limbo {limbo!r}")
    return MetadataEpoch(number, ticks, limbo)
