"""Durable positions of bookies in the metadata store: the end of each bookie's log that was known to be on disk.

A bookie whose directory was restored from an older copy cannot see this in the directory itself. The position, which is
kept elsewhere, shows it: a log that ends before the recorded position has lost acknowledged entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from pybk.errors import CorruptError, MetadataExistsError, MetadataVersionError
from pybk.ledger.ledger_metadata import INSTANCE_BYTES, Bookie
from pybk.metadata.authenticated_values import AuthenticatedValues, ValueKind
from pybk.metadata.registration import name_in_key
from pybk.values import decode_json, encode_json, from_base64, to_base64

POSITIONS_KEY: Final = "positions"

_INT_MAX: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class DurablePosition:
    """The end of a bookie's log that was on disk, and the files that had it.

    Attributes:
        bookie: The bookie.
        boots: The number of the start that recorded it.
        lsn: LSN of the last commit of the bookie's log that was known to be on disk.
        watermark_inode: Inode of the file ``watermark``; a restored copy has another.
        log_file_id: The id of the log file that was in use, 0 for none.
        log_inode: That file's inode, 0 for none.
    """

    bookie: Bookie
    boots: int
    lsn: int
    watermark_inode: int
    log_file_id: int
    log_inode: int


class DurablePositions(AuthenticatedValues):
    """The durable positions of a cluster's bookies. Threads: any.

    Every method may raise MetadataUnreachableError.
    """

    def read_position(self, bookie_id: str) -> DurablePosition | None:
        """Return the position that a bookie recorded last, None if it never did.

        Raises:
            MetadataForgedError: It was not written with the cluster's secret.
            CorruptError: The key does not hold a position of this bookie.
        """
        found = self._read_position(_key(bookie_id))
        return None if found is None else found[0]

    def record_position(self, position: DurablePosition) -> bool:
        """Record a bookie's position; durable on return. The caller is the bookie itself.

        Args:
            position: The new position. It may be before the recorded one, as after a start in limbo.

        Returns:
            False if a later start of the same bookie has recorded its position, which is kept.

        Cost: One write of the metadata store, and one read.
        """
        key = _key(position.bookie.bookie_id)
        payload = encode(position)
        while True:
            found = self._read_position(key)
            try:
                if found is None:
                    self.create_value(ValueKind.POSITION, key, payload)
                elif found[0].bookie == position.bookie and found[0].boots > position.boots:
                    return False
                else:
                    self._put(ValueKind.POSITION, key, payload, found[1])
            except (MetadataExistsError, MetadataVersionError):
                continue
            return True

    def _read_position(self, key: str) -> tuple[DurablePosition, int] | None:
        """Return a position and the version of its key, None if there is none."""
        node = self._store.get(key, latest=True)
        if node is None:
            return None
        where = f"metadata key {key!r}"
        position = decode_json(self._payload_of(ValueKind.POSITION, key, node.value), decode, where=where)
        if position.bookie.bookie_id != unquote(key.rpartition("/")[2]):
            raise CorruptError(f"{where} holds the position of {position.bookie}; remove it")
        return position, node.version


def _key(bookie_id: str) -> str:
    return f"{POSITIONS_KEY}/{name_in_key(bookie_id)}"


def encode(position: DurablePosition) -> bytes:
    """Return the payload of a position's value."""
    return encode_json(
        {
            "bookie_id": position.bookie.bookie_id,
            "instance": to_base64(position.bookie.instance),
            "boots": position.boots,
            "lsn": position.lsn,
            "watermark_inode": position.watermark_inode,
            "log_file_id": position.log_file_id,
            "log_inode": position.log_inode,
        }
    )


def decode(values: dict[str, Any]) -> DurablePosition:
    """Return the position in the decoded payload of a value; raises KeyError or ValueError if it is not one."""
    numbers = [values[name] for name in ("boots", "lsn", "watermark_inode", "log_file_id", "log_inode")]
    if not all(type(number) is int and 0 <= number <= _INT_MAX for number in numbers):
        raise ValueError(f"{numbers} are not all integers from 0 to {_INT_MAX}")
    bookie = Bookie(str(values["bookie_id"]), from_base64(values["instance"]))
    if len(bookie.instance) != INSTANCE_BYTES:
        raise ValueError(f"an instance of {len(bookie.instance)} bytes")
    return DurablePosition(bookie, *numbers)
