"""The checker itself: small histories whose verdict is known, and all orders of small ones drawn at random."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import permutations
from random import Random
from typing import Any

import pytest

from tests.linearizability.checker import Model, check
from tests.linearizability.history import Operation
from tests.linearizability.models import LedgerEnd, Register, StandbyLog, with_record

NEVER = None
"""The time of a return that never came."""


def op(kind: str, argument: Any, result: Any, called: int, returned: int | None) -> Operation:
    return Operation("key", kind, argument, result, called, returned)


def test_a_history_without_operations_is_linearizable() -> None:
    assert check(Register(), []).linearizable


CREATED = op("create", "a", (1,), 0, 1)
REGISTERS = {
    "a put that was refused": (True, [CREATED, op("put", ("b", 7), (), 2, 3), op("get", None, ("a", 1), 4, 5)]),
    "two puts of one version, of which one is refused": (
        True,
        [CREATED, op("put", ("b", 1), (2,), 2, 5), op("put", ("c", 1), (), 3, 4)],
    ),
    "two puts of one version": (False, [CREATED, op("put", ("b", 1), (2,), 2, 5), op("put", ("c", 1), (3,), 3, 4)]),
    "a put that is refused before another one began": (
        False,
        [CREATED, op("put", ("c", 1), (), 2, 3), op("put", ("b", 1), (2,), 4, 5)],
    ),
    "a stale read": (
        False,
        [CREATED, op("put", ("b", 1), (2,), 2, 3), op("get", None, ("a", 1), 4, 5)],
    ),
    "a read of a put that is under way": (
        True,
        [CREATED, op("put", ("b", 1), (2,), 2, 9), op("get", None, ("b", 2), 3, 4), op("get", None, ("b", 2), 5, 6)],
    ),
    "a read that goes back": (
        False,
        [CREATED, op("put", ("b", 1), (2,), 2, 9), op("get", None, ("b", 2), 3, 4), op("get", None, ("a", 1), 5, 6)],
    ),
    "a version that does not grow": (False, [op("create", "a", (5,), 0, 1), op("put", ("b", 5), (4,), 2, 3)]),
    "two creations": (False, [CREATED, op("create", "b", (2,), 2, 3)]),
    "a creation after a deletion": (
        True,
        [CREATED, op("delete", ("", 1), (None,), 2, 3), op("create", "b", (1,), 4, 5)],
    ),
    "a creation that was refused without a value": (False, [op("create", "b", (), 4, 5)]),
    "a lost answer, whose put is seen late": (
        True,
        [
            CREATED,
            op("put", ("b", 1), None, 2, NEVER),
            op("get", None, ("a", 1), 3, 4),
            op("get", None, ("b", 2), 5, 6),
            op("put", ("c", 2), (3,), 7, 8),
        ],
    ),
    "a lost answer, whose put is seen and gone": (
        False,
        [
            CREATED,
            op("put", ("b", 1), None, 2, NEVER),
            op("get", None, ("b", 2), 3, 4),
            op("get", None, ("a", 1), 5, 6),
        ],
    ),
    "a put that took effect twice": (
        False,
        [
            CREATED,
            op("put", ("b", 1), None, 2, NEVER),
            op("get", None, ("b", 2), 3, 4),
            op("put", ("c", 2), (3,), 5, 6),
            op("get", None, ("b", 4), 7, 8),
        ],
    ),
}


@pytest.mark.parametrize("name", REGISTERS)
def test_keys(name: str) -> None:
    linearizable, history = REGISTERS[name]
    assert check(Register(), history).linearizable == linearizable


def appended(count: int) -> list[Operation]:
    return [op("append", entry, None, 2 * entry, 2 * entry + 1) for entry in range(count)]


LEDGERS = {
    "two recoveries agree": (True, [*appended(3), op("recover", None, 2, 10, 11), op("recover", None, 2, 10, 12)]),
    "two ends": (False, [*appended(3), op("recover", None, 2, 10, 11), op("recover", None, 1, 10, 12)]),
    "an acknowledged entry is lost": (False, [*appended(3), op("recover", None, 1, 10, 11)]),
    "an entry without an answer is kept": (
        True,
        [*appended(3), op("append", 3, None, 7, NEVER), op("recover", None, 3, 10, 11)],
    ),
    "an entry without an answer is dropped": (
        True,
        [*appended(3), op("append", 3, None, 7, NEVER), op("recover", None, 2, 10, 11)],
    ),
    "an entry that nobody appended": (False, [*appended(3), op("recover", None, 3, 10, 11)]),
    "an entry is acknowledged after the close": (
        False,
        [*appended(3), op("recover", None, 3, 10, 11), op("append", 3, None, 12, 13)],
    ),
    "an entry is acknowledged beside the close": (
        True,
        [*appended(3), op("recover", None, 3, 10, 12), op("append", 3, None, 11, 13)],
    ),
    "a recovery that was killed had closed it": (
        True,
        [*appended(3), op("recover", None, None, 10, NEVER), op("closed", None, 2, 12, 13)],
    ),
    "it was closed by nobody": (False, [*appended(3), op("closed", None, 2, 12, 13)]),
    "the metadata have another end": (
        False,
        [*appended(3), op("recover", None, 2, 10, 11), op("closed", None, 1, 12, 13)],
    ),
    "entries in another order": (False, [op("append", 1, None, 0, 1), op("append", 0, None, 2, 3)]),
}


@pytest.mark.parametrize("name", LEDGERS)
def test_ledgers(name: str) -> None:
    linearizable, history = LEDGERS[name]
    assert check(LedgerEnd(), history).linearizable == linearizable


def content(*records: str) -> tuple[int, str]:
    digest = ""
    for record in records:
        digest = with_record(digest, record)
    return len(records), digest


TAKEN = op("promote", "a", content(), 0, 1)
STANDBYS = {
    "one after the other": (
        True,
        [
            TAKEN,
            op("append", ("a", "x"), 0, 2, 3),
            op("promote", "b", content("x"), 4, 5),
            op("append", ("b", "y"), 1, 6, 7),
        ],
    ),
    "a record is missing": (False, [TAKEN, op("append", ("a", "x"), 0, 2, 3), op("promote", "b", content(), 4, 5)]),
    "a record is another one": (
        False,
        [TAKEN, op("append", ("a", "x"), 0, 2, 3), op("promote", "b", content("y"), 4, 5)],
    ),
    "the owner before still appends": (
        False,
        [TAKEN, op("promote", "b", content(), 2, 3), op("append", ("a", "x"), 0, 4, 5)],
    ),
    "a number is given twice": (
        False,
        [
            TAKEN,
            op("append", ("a", "x"), 0, 2, 3),
            op("promote", "b", content("x"), 4, 5),
            op("append", ("b", "y"), 0, 6, 7),
        ],
    ),
    "a record without an answer is there": (
        True,
        [TAKEN, op("append", ("a", "x"), None, 2, NEVER), op("promote", "b", content("x"), 4, 5)],
    ),
    "a record without an answer comes after all": (
        False,
        [
            TAKEN,
            op("append", ("a", "x"), None, 2, NEVER),
            op("promote", "b", content(), 4, 5),
            op("promote", "c", content("x"), 6, 7),
        ],
    ),
    "a promotion that was killed had taken it": (
        False,
        [
            TAKEN,
            op("promote", "b", None, 2, NEVER),
            op("append", ("b", "x"), 0, 3, 4),
            op("append", ("a", "y"), 1, 5, 6),
        ],
    ),
}


@pytest.mark.parametrize("name", STANDBYS)
def test_standbys(name: str) -> None:
    linearizable, history = STANDBYS[name]
    assert check(StandbyLog(), history).linearizable == linearizable


def test_the_verdict_is_that_of_all_orders() -> None:
    source = Random(1)
    found = [0, 0]
    for _ in range(1500):
        history = [_drawn(source) for _ in range(source.randrange(1, 6))]
        verdict = check(Register(), history).linearizable
        assert verdict == _some_order_explains(Register(), history), history
        found[verdict] += 1
    assert min(found) > 200


def _drawn(source: Random) -> Operation:
    called = source.randrange(10)
    returned = called + 1 + source.randrange(6)
    value, version = source.choice("ab"), source.randrange(1, 4)
    if source.random() < 0.2:
        return op("put", (value, version), None, called, NEVER)
    return source.choice(
        (
            op("create", value, source.choice(((version,), ())), called, returned),
            op("get", None, source.choice(((value, version), None)), called, returned),
            op("put", (value, version), source.choice(((version + 1,), ())), called, returned),
            op("delete", ("", version), source.choice(((None,), ())), called, returned),
        )
    )


def _some_order_explains(model: Model, history: Sequence[Operation]) -> bool:
    """Try every order, with and without the operations of unknown outcome."""
    unknown = [each for each in history if each.returned_ns is None]
    known = [each for each in history if each.returned_ns is not None]
    for chosen in range(1 << len(unknown)):
        some = known + [each for place, each in enumerate(unknown) if chosen >> place & 1]
        for order in permutations(some):
            if _in_time(order) and _explains(model, order):
                return True
    return False


def _in_time(order: Sequence[Operation]) -> bool:
    return not any(
        later.returned_ns is not None and later.returned_ns < earlier.called_ns
        for place, earlier in enumerate(order)
        for later in order[place + 1 :]
    )


def _explains(model: Model, order: Sequence[Operation]) -> bool:
    states: set[Hashable] = {model.initial}
    for each in order:
        states = {after for state in states for after in model.step(state, each)}
    return bool(states)
