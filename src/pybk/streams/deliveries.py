"""The deliveries and redeliveries of a subscription's records: pure, without input or output and without a clock.

A record is *fresh* until it is handed out for the first time, in order. Then it is *outstanding* until it is
acknowledged, however often it is handed out. It is handed out again some time after a ``nack``, or when it was not
acknowledged in time.

``max_unacked`` bounds the memory: outstanding records are kept as ranges, and records that were handed out again are
kept one by one, with their counts. Beyond that limit no fresh record is handed out. So the holes between acknowledged
ranges, and with them the state of the cursor, have a bound as well.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from pybk.streams.cursor_state import CursorState

_AT_ONCE: Final = 0.0
"""A time that is over."""

_SLACK: Final = 1024
"""Entries beyond twice as many as can be needed, from which on those that are not needed are dropped."""


class Handed(NamedTuple):
    """Records that are handed out.

    Attributes:
        first: The first of them.
        end: The one after the last.
        redeliveries: The number of times that each of them was handed out before.
        number: Identifies this delivery; later ones have greater numbers.
    """

    first: int
    end: int
    redeliveries: int
    number: int


class _Run(NamedTuple):
    """Records that were handed out together; between them are some that were acknowledged before, maybe.

    Attributes:
        number: Grows with each run.
        since: The time, seconds.
        first: The first record.
        end: The one after the last.
    """

    number: int
    since: float
    first: int
    end: int


class _Again(NamedTuple):
    """A record that is to be handed out again.

    Attributes:
        due: The time, seconds.
        seq: The record.
    """

    due: float
    seq: int


class Deliveries:
    """The deliveries of a log's records, given the state of a cursor, which its owner changes.

    Args:
        state: The cursor's.
        ack_timeout_s: Seconds after which a record that is not acknowledged is handed out again; None for never.
        max_unacked: The number of outstanding records from which no fresh one is handed out.

    Attributes:
        read_seq: The first record that is fresh.

    Threads: one at a time. Times are seconds of any clock that does not go backwards.
    """

    def __init__(self, state: CursorState, *, ack_timeout_s: float | None, max_unacked: int) -> None:
        self._state = state
        self._timeout_s = ack_timeout_s
        self._max_unacked = max_unacked
        self._number = 0
        """The number of the last delivery."""
        self.reset()

    def reset(self) -> None:
        """Begin again at the first record that is not acknowledged, as after a seek; all records are fresh then."""
        self.read_seq = self._state.first_unacked
        self._void = self._number
        """The last delivery before the last ``reset``; deliveries up to it no longer count."""
        self._runs: deque[_Run] = deque()
        """Runs in the order of time; some of their records may have been acknowledged, or handed out again."""
        self._again: list[_Again] = []
        """A heap of records that wait; an entry counts only if ``_due`` has the record with the same time."""
        self._due: dict[int, float] = {}
        """The times when waiting records are handed out again. It may have acknowledged records, as the next two
        may."""
        self._counts: dict[int, int] = {}
        """The redeliveries of each record; for a record that waits, including the one for which it waits."""
        self._last_run: dict[int, int] = {}
        """The run in which a record was handed out again last."""

    def resume(self) -> None:
        """Hand out again, in order, the records that were handed out before, as far as the state records them."""
        for first, end in self._state.unacked(self._state.first_unacked, self._state.handed_end):
            for seq in range(first, end):
                self._counts[seq], self._due[seq] = self._state.deliveries(seq), _AT_ONCE
                self._again.append(_Again(_AT_ONCE, seq))
        self.read_seq = max(self.read_seq, self._state.handed_end)

    def rewind(self) -> None:
        """Hand out again, in order, all records that are outstanding or wait for a redelivery; counted as ``nack``."""
        self._void = self._number
        self.nack(self._state.first_unacked, self.read_seq, _AT_ONCE)

    # ---- what it says --------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """The number of records that were handed out and are not acknowledged."""
        return self._state.unacked_count(self.read_seq)

    @property
    def room(self) -> int:
        """The number of fresh records that may be handed out now."""
        return max(0, self._max_unacked - self.outstanding)

    def redeliveries(self, seq: int) -> int:
        """Return the number of times that a record was handed out after the first time."""
        return self._counts.get(seq, 0) - (seq in self._due)

    def is_outstanding(self, seq: int) -> bool:
        """Return whether a record was handed out and is not acknowledged."""
        return seq < self.read_seq and not self._state.is_acked(seq)

    def next_due(self) -> float | None:
        """Return when the next record is due to be handed out again; None if none is."""
        self._drop_acked()
        times = [self._again[0].due] if self._again else []
        if self._runs and self._timeout_s is not None:
            times.append(self._runs[0].since + self._timeout_s)
        return min(times, default=None)

    # ---- handing out ---------------------------------------------------------------------------------------------

    def take_again(self, count: int, now: float, alone: int | None = None) -> list[Handed]:
        """Hand out records again that are due, the earliest first.

        Args:
            count: The most records.
            now: The time.
            alone: The number of earlier deliveries from which a record is handed out alone.
        """
        self._expire(now)
        taken: list[Handed] = []
        while self._again and self._again[0].due <= now and count:
            if not self._waits(self._again[0]):
                heapq.heappop(self._again)
                continue
            seq = self._again[0].seq
            redeliveries = self._counts[seq]
            if redeliveries == alone and taken:
                break
            heapq.heappop(self._again)
            del self._due[seq]
            count = 0 if redeliveries == alone else count - 1
            if taken and taken[-1].end == seq and taken[-1].redeliveries == redeliveries:
                taken[-1] = taken[-1]._replace(end=seq + 1)
            else:
                self._number += 1
                taken.append(Handed(seq, seq + 1, redeliveries, self._number))
        for each in taken:
            self._last_run.update(dict.fromkeys(range(each.first, each.end), each.number))
            self._runs.append(_Run(each.number, now, each.first, each.end))
        return taken

    def take_fresh(self, count: int, end: int, now: float) -> list[Handed]:
        """Hand out fresh records, in order.

        Args:
            count: The most records.
            end: The record after the last existing one.
            now: The time.

        Returns:
            The records; none if no fresh record exists, or too many are outstanding.
        """
        left = min(count, self.room)
        taken: list[Handed] = []
        for low, high in self._state.unacked(self.read_seq, end):
            if left <= 0:
                break
            stop = min(high, low + left)
            taken.append(Handed(low, stop, 0, self._number + 1))
            left -= stop - low
        if taken:
            self.read_seq = taken[-1].end
            self._number += 1
            self._runs.append(_Run(self._number, now, taken[0].first, self.read_seq))
            if len(self._runs) > 2 * self._max_unacked + _SLACK:
                self._forget()
        return taken

    def skip_acked(self) -> int:
        """Return the next fresh record that is not acknowledged, which is handed out next."""
        self.read_seq = max(self.read_seq, self._state.next_unacked(self.read_seq))
        return self.read_seq

    def nack(self, first: int, end: int, due: float) -> int:
        """Schedule the redelivery of those of some records that are outstanding; return their number.

        A record that waits already keeps the earlier time.
        """
        count = 0
        for low, high in self._state.unacked_ranges(first, min(end, self.read_seq)):
            count += high - low
            for seq in range(low, high):
                self._wait(seq, due)
        return count

    def is_held(self, seq: int, number: int) -> bool:
        """Return whether a record is outstanding, and neither was handed out since a delivery nor waits for that."""
        if number <= self._void or seq in self._due or not self.is_outstanding(seq):
            return False
        return self._last_run.get(seq, number) == number

    def give_back(self, held: Iterable[tuple[int, int]], due: float) -> int:
        """Schedule the redelivery of those of some records that are still held, as ``nack`` does.

        Args:
            held: Records, each with the number of the delivery that it is given back from.
            due: The time.

        Returns:
            The number of them that were held.
        """
        seqs = [seq for seq, number in held if self.is_held(seq, number)]
        for seq in seqs:
            self._wait(seq, due)
        return len(seqs)

    def put_back(self, handed: Handed, due: float) -> None:
        """Undo the redelivery of records that were handed out again just now, and schedule another one."""
        for first, end in self._state.unacked_ranges(handed.first, handed.end):
            for seq in range(first, end):
                self._due[seq] = due
                heapq.heappush(self._again, _Again(due, seq))

    def _wait(self, seq: int, due: float) -> None:
        if seq not in self._due:
            self._counts[seq] = self._counts.get(seq, 0) + 1
        elif self._due[seq] <= due:
            return
        self._due[seq] = due
        if max(len(self._again), len(self._counts)) > 2 * self._max_unacked + _SLACK:
            self._forget()
        heapq.heappush(self._again, _Again(due, seq))

    def _expire(self, now: float) -> None:
        """Have records that were not acknowledged in time wait to be handed out again."""
        if self._timeout_s is None:
            return
        while self._runs and self._runs[0].since + self._timeout_s <= now:
            run = self._runs.popleft()
            for first, end in self._state.unacked_ranges(run.first, run.end):
                for seq in range(first, end):
                    if self._is_of(seq, run):
                        self._wait(seq, run.since + self._timeout_s)

    # ---- forgetting ----------------------------------------------------------------------------------------------

    def _drop_acked(self) -> None:
        """Drop acknowledged records from the front of the runs and of the heap."""
        while self._runs:
            run = self._runs.popleft()
            first = self._first_of(run)
            if first is not None:
                self._runs.appendleft(run._replace(first=first))  # so that the next call does not look again
                break
        while self._again and not self._waits(self._again[0]):
            heapq.heappop(self._again)

    def _waits(self, again: _Again) -> bool:
        """Return whether a record is still to be handed out again at this time."""
        return self._due.get(again.seq) == again.due and not self._state.is_acked(again.seq)

    def _is_of(self, seq: int, run: _Run) -> bool:
        """Return whether a record of a run was neither handed out again since, nor waits for it."""
        return seq not in self._due and self._last_run.get(seq, run.number) == run.number

    def _first_of(self, run: _Run) -> int | None:
        """Return the first record of a run that is not acknowledged, nor handed out again since; None for none."""
        holes = self._state.unacked(run.first, run.end)
        return next((seq for first, end in holes for seq in range(first, end) if self._is_of(seq, run)), None)

    def _forget(self) -> None:
        """Drop everything that is acknowledged, or that stands twice."""
        self._runs = deque(run for run in self._runs if self._first_of(run) is not None)
        self._again = list(filter(self._waits, self._again))
        heapq.heapify(self._again)
        self._counts = {seq: count for seq, count in self._counts.items() if not self._state.is_acked(seq)}
        self._due = {seq: due for seq, due in self._due.items() if seq in self._counts}
        self._last_run = {seq: run for seq, run in self._last_run.items() if seq in self._counts}
