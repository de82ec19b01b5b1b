"""The index's map in memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager


class MapEnvironment:
    """The map in memory: quick enough to damage it thousands of times. Counts what is put."""

    def __init__(self, rows: dict[bytes, bytes] | None = None) -> None:
        self.rows = dict(rows or {})
        self.puts = 0
        self.reads: list[bytes] = []

    @contextmanager
    def read(self) -> Iterator[MapEnvironment]:
        self.keys = sorted(self.rows)
        yield self

    @contextmanager
    def write(self) -> Iterator[MapEnvironment]:
        before = dict(self.rows)
        self.keys = sorted(self.rows)
        try:
            yield self
        except BaseException:
            self.rows = before
            raise

    def get(self, key: bytes) -> bytes | None:
        self.reads.append(key)
        return self.rows.get(key)

    def floor(self, key: bytes) -> tuple[bytes, bytes] | None:
        at = bisect_right(self.keys, key) - 1
        if at < 0:
            return None
        self.reads.append(self.keys[at])
        return self.keys[at], self.rows[self.keys[at]]

    def items(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key in self.keys[bisect_left(self.keys, start) : bisect_left(self.keys, stop)]:
            self.reads.append(key)
            yield key, self.rows[key]

    def put(self, key: bytes, value: bytes) -> None:
        self.puts += 1
        if key not in self.rows:
            self.keys.insert(bisect_left(self.keys, key), key)
        self.rows[key] = value

    def delete(self, key: bytes) -> bool:
        if self.rows.pop(key, None) is None:
            return False
        self.keys.remove(key)
        return True

    def release_dead_readers(self) -> int:
        return 0

    def reserve(self, nbytes: int) -> None:
        """Memory is reserved by nobody."""

    def reserved_bytes(self) -> int:
        return 0

    def reusable_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass
