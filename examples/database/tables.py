"""The tables of ``database.py``, which are what the records of its log amount to.

``apply`` looks at a record and the tables alone: no clock, no chance, nothing of its process. So the primary, a restart
and a standby, which apply the same records, have the same tables and decide alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, NamedTuple

from pybk import CheckpointWriter, CorruptError, UnsupportedFormatError

FORMAT = 1
CLIENTS_MAX = 100_000  # whose last commits are known when they are sent again
Writes = Mapping[str, str | None]
"""New values by key; None deletes."""


class Row(NamedTuple):
    """A value, and the record that wrote it; version 0 and no value for a key that does not exist."""

    version: int
    value: str | None


ABSENT = Row(0, None)


class Tables:
    """What the records up to ``applied`` amount to."""

    def __init__(self) -> None:
        self.applied = 0
        self.rows: dict[str, Row] = {}
        self.sessions: dict[str, tuple[int, int]] = {}  # last number of each client and its outcome; oldest first

    def apply(self, lsn: int, data: bytes) -> int:
        """Apply one record; returns the record that made its commit, 0 if it was refused."""
        if lsn != self.applied + 1:
            raise CorruptError(f"record {lsn} comes after {self.applied}; open the database again")
        commit = json.loads(data)
        check_format(commit["format"])
        self.applied = lsn
        client, number = commit["token"]
        last, outcome = self.sessions.pop(client, (0, 0))
        if number > last or not client:  # else it was sent again, and the log has it twice
            outcome = 0
            if all(self.rows.get(key, ABSENT).version == version for key, version in commit["expect"].items()):
                outcome = lsn
                for key, value in commit["writes"].items():
                    self.rows[key] = Row(lsn, value)
                    if value is None:
                        del self.rows[key]
        if client:
            self.sessions[client] = max(number, last), outcome
        if len(self.sessions) > CLIENTS_MAX:  # depends on the log alone, as a limit in time would not
            del self.sessions[next(iter(self.sessions))]
        return outcome

    def copy(self) -> Tables:
        """Return a copy that does not change; some 10 ns a row, as rows themselves never change."""
        other = Tables()
        other.applied, other.rows, other.sessions = self.applied, self.rows.copy(), self.sessions.copy()
        return other

    def dump(self, file: CheckpointWriter) -> None:
        """Write everything to a file, a row on each line."""
        head = {"format": FORMAT, "applied": self.applied, "sessions": self.sessions}
        file.write(json.dumps(head).encode() + b"\n")
        for key, row in self.rows.items():
            file.write(json.dumps((key, *row)).encode() + b"\n")

    @classmethod
    def load(cls, file: IO[bytes]) -> Tables:
        """Read what ``dump`` wrote."""
        head, tables = json.loads(file.readline()), cls()
        check_format(head["format"])
        tables.applied = head["applied"]
        tables.sessions = {client: (number, outcome) for client, (number, outcome) in head["sessions"].items()}
        for key, version, value in map(json.loads, file):
            tables.rows[key] = Row(version, value)
        return tables


def check_format(found: object) -> None:
    """Raise UnsupportedFormatError for records and snapshots of another version of this program."""
    if found != FORMAT:
        raise UnsupportedFormatError(f"this program reads format {FORMAT}, not {found!r}; start the one that wrote it")
