"""Owners of a subscription in the world of ledger lists: they subscribe, take over, acknowledge, seek, delete and die.

The cursor's own ledger list is modelled by what it guarantees: an epoch for each owner, and changes of its present
owner alone, which are durable one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

from pybk.errors import LogFencedError, NoSuchLogError
from pybk.streams import ledger_list
from pybk.streams.ledger_list import Steps
from pybk.streams.list_record import Bounds, CursorBound, ListRecord, bound_of

CURSOR: Final = "subscription"
SUBSCRIBERS: Final = 2


class ModelCursor:
    """What the cursor's ledger list has."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.epoch = 0
        self.first_unacked: int | None = None


class Subscriber:
    """A process that owns the subscription, or tries to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.owned: CursorBound | None = None
        """What it listed last as the owner."""
        self.raised = 0
        """The bound that it tried to list last."""
        self.steps: Steps[Any] | None = None
        self.what = ""
        self.answer: Any = None
        self.error: Exception | None = None


class Subscribers:
    """All owners of one subscription of a log, and its cursor.

    Args:
        log: The log's name.
        random: Decides what happens.
        fail: Have changes of bounds fail, too.
    """

    def __init__(self, log: str, random: Random, *, fail: bool) -> None:
        self._log = log
        self._random = random
        self._fail = fail
        self.processes = [Subscriber(f"subscriber {number}") for number in range(SUBSCRIBERS)]
        self.cursor: ModelCursor | None = None
        self._uids = 0

    def event(self, first: int, end: int, perform: Callable[[Subscriber, Any], Any]) -> str:
        """Let one thing happen.

        Args:
            first: The first record that was not truncated.
            end: The record after the last one that is acknowledged.
            perform: Performs a step.

        Returns:
            The operation that came to its end; empty for none.
        """
        process = self._random.choice(self.processes)
        if self._random.random() < 0.02:
            self.crash(process)
            return ""
        if process.steps is None:
            return self._begin(process, first, end)
        if self._fail and process.owned is not None and self._random.random() < 0.02:
            process.steps = None  # what is under way fails, and may have been done or be done yet
            return "failed change"
        steps = process.steps
        try:
            if process.error is not None:
                error, process.error = process.error, None
                step = steps.throw(error)
            else:
                step = steps.send(process.answer)
        except StopIteration as stop:
            return self._completed(process, stop.value)
        except (LogFencedError, NoSuchLogError):
            self.crash(process)
            return "fenced"
        try:
            process.answer = perform(process, step)
        except LogFencedError as fenced:
            process.error = fenced
        return ""

    def crash(self, process: Subscriber) -> None:
        """End a process and start another in its place."""
        process.owned = process.steps = process.answer = process.error = None

    def _begin(self, process: Subscriber, first: int, end: int) -> str:
        owned = process.owned
        if owned is None and self._random.random() < 0.7:
            return ""
        if owned is None:
            self._uids += 1
            wanted = CursorBound(CURSOR, self._random.randint(0, end), str(self._uids))
            self._operate(process, "subscribe", ledger_list.add_cursor(self._log, wanted))
            return ""
        cursor = self.cursor
        if cursor is None or (cursor.uid, cursor.epoch) != (owned.uid, owned.epoch):
            self.crash(process)  # its list is fenced, as the next append to it shows
            return "fenced"
        assert cursor.first_unacked is not None
        what = self._random.choices(("ack", "raise", "seek", "delete"), (10, 8, 3, 0.5))[0]
        if what == "ack":
            cursor.first_unacked = max(cursor.first_unacked, self._random.randint(0, end))
            return what
        if what == "delete":
            self._operate(process, what, ledger_list.remove_cursor(self._log, CURSOR, owned.uid))
            return ""
        seq = cursor.first_unacked if what == "raise" else self._random.randint(0, end)
        if what == "seek" and seq >= max(owned.seq, process.raised):
            cursor.first_unacked = max(seq, first)
            return what
        if what == "raise":
            process.raised = seq
        change = ledger_list.raise_cursor if what == "raise" else ledger_list.lower_cursor
        self._operate(process, what, change(self._log, owned._replace(seq=seq)))
        return ""

    def _operate(self, process: Subscriber, what: str, steps: Steps[Any]) -> None:
        process.steps, process.what, process.answer, process.error = steps, what, None, None

    def _completed(self, process: Subscriber, result: Any) -> str:
        what, process.steps = process.what, None
        if what == "subscribe":
            if self.cursor is None or self.cursor.uid != result.uid:
                self.cursor = ModelCursor(result.uid)
            self.cursor.epoch += 1
            epoch = self.cursor.epoch
            self._operate(process, "claim", ledger_list.claim_cursor(self._log, CURSOR, result.uid, epoch))
            return what
        owned = result if what == "claim" else process.owned
        assert owned is not None
        cursor = self.cursor
        if cursor is None or (cursor.uid, cursor.epoch) != (owned.uid, owned.epoch):
            self.crash(process)
            return "fenced"
        process.owned = owned
        if what in ("claim", "raise", "seek"):
            process.owned = owned._replace(seq=owned.seq if what == "claim" else result)
            process.raised = process.owned.seq
        if what == "claim" and cursor.first_unacked is None:
            cursor.first_unacked = owned.seq
        elif what == "seek":
            cursor.first_unacked = result
        elif what == "delete":
            self.cursor = process.owned = None
        return what

    def check_cut(self, bounds: Bounds) -> None:
        """Check that no record is dropped that may be acknowledged, because its number is given again."""
        cursor = self.cursor
        found = bound_of(bounds, CURSOR)
        if found is not None and cursor is not None and found.uid == cursor.uid:
            assert cursor.first_unacked is None, "a log with subscriptions was cut"

    def check(self, record: ListRecord, bounds: Bounds) -> None:
        """Check that the log has all that the subscription has not acknowledged."""
        found, cursor = bound_of(bounds, CURSOR), self.cursor
        if found is None or cursor is None or found.uid != cursor.uid or cursor.first_unacked is None:
            return
        assert found.seq <= cursor.first_unacked, f"the bound {found.seq} passes the cursor, {cursor.first_unacked}"
        assert record.first_seq <= cursor.first_unacked, "records that are not acknowledged were dropped"
