"""What a metadata store, a ledger and a log with standbys do, one operation at a time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from hashlib import sha256
from typing import Any, NamedTuple

from tests.linearizability.history import Operation


class Value(NamedTuple):
    """The value of a key.

    Attributes:
        value: What was written.
        version: Its version; None after a change whose outcome was not known, until it is read.
    """

    value: str
    version: int | None

    def may_be(self, version: int) -> bool:
        """Return whether it may have a version."""
        return self.version in (version, None)


class Register:
    """A key of a metadata store: ``get``, ``create``, ``put`` and ``delete``, the last two by compare-and-set.

    The state is a ``Value``, None without one. A refusal returns an empty tuple.
    """

    initial: Hashable = None

    def step(self, state: Any, operation: Operation) -> Iterable[Hashable]:
        """See ``Model.step``."""
        known = operation.returned_ns is not None
        if operation.kind == "get":
            return self._read(state, operation.result)
        effects = surely = state is None
        version = operation.result[0] if operation.result else None
        value = operation.argument
        if operation.kind != "create":
            value, expected = operation.argument
            effects = state is not None and state.may_be(expected)
            surely = effects and state.version is not None
            effects = effects and (version is None or version > expected)
        after = None if operation.kind == "delete" else Value(value, version)
        if known and not operation.result:
            return () if surely else (state,)
        return (after,) if effects else ()

    @staticmethod
    def _read(state: Value | None, result: tuple[str, int] | None) -> Iterator[Hashable]:
        if result is None and state is None:
            yield None
        elif result is not None and state is not None and state.value == result[0] and state.may_be(result[1]):
            yield Value(*result)


class Ends(NamedTuple):
    """The state of a ledger.

    Attributes:
        entries: How many entries it has.
        closed: Whether it is closed.
    """

    entries: int
    closed: bool


class LedgerEnd:
    """A ledger: ``append`` of an entry by its writer, ``recover``, and ``closed``, which read where it was closed."""

    initial: Hashable = Ends(0, False)

    def step(self, state: Any, operation: Operation) -> Iterable[Hashable]:
        """See ``Model.step``."""
        if operation.kind == "append":
            fits = not state.closed and operation.argument == state.entries
            return (Ends(state.entries + 1, False),) if fits else ()
        if operation.kind == "closed" and not state.closed:
            return ()
        ends_there = operation.returned_ns is None or operation.result == state.entries - 1
        return (Ends(state.entries, True),) if ends_there else ()


class Owned(NamedTuple):
    """The state of a log that one process owns.

    Attributes:
        owner: The promotion that has it.
        records: How many records it has.
        content: A digest of all of them.
    """

    owner: str
    records: int
    content: str


def with_record(content: str, data: str) -> str:
    """Return the digest of the records of a log, and one more."""
    return sha256(f"{content} {data}".encode()).hexdigest()[:16]


class StandbyLog:
    """A log of which processes are standbys: ``promote`` of one, with the records that it applied, and ``append``."""

    initial: Hashable = Owned("", 0, "")

    def step(self, state: Any, operation: Operation) -> Iterable[Hashable]:
        """See ``Model.step``."""
        known = operation.returned_ns is not None
        if operation.kind == "promote":
            sees_all = not known or operation.result == (state.records, state.content)
            return (state._replace(owner=operation.argument),) if sees_all else ()
        owner, data = operation.argument
        if owner != state.owner or (known and operation.result != state.records):
            return ()
        return (Owned(owner, state.records + 1, with_record(state.content, data)),)
