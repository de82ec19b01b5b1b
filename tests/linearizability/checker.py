"""Whether a history is linearizable (Herlihy and Wing): each operation took effect at one moment of its time.

The search is that of Wing and Gong, with what Lowe added: a set of operations that were put in order, with the state
that they led to, is tried once. An operation may come next if no other one that is left returned before it was called.
An operation whose outcome is not known may come at any time after its call, or never.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from tests.linearizability.history import Operation

TRIES_MAX = 2_000_000
"""Bound on the states of one search; none of the histories here comes near."""


class Model(Protocol):
    """What operations do, one at a time."""

    @property
    def initial(self) -> Hashable:
        """The state before the first operation."""
        ...

    def step(self, state: Hashable, operation: Operation) -> Iterable[Hashable]:
        """Return the states that an operation may lead to; none if it cannot have this result in this state."""
        ...


class Verdict(NamedTuple):
    """What was found.

    Attributes:
        linearizable: Whether there is an order.
        tries: States that were looked at.
        stuck: If there is none, the operations of which none could come next, where most had been put in order.
    """

    linearizable: bool
    tries: int
    stuck: tuple[Operation, ...] = ()


def check(model: Model, history: Sequence[Operation]) -> Verdict:
    """Look for an order of a history's operations that explains their results.

    Raises:
        RuntimeError: The search was given up.
    """
    ordered = sorted(history, key=lambda each: each.called_ns)
    wanted = sum(1 << place for place, each in enumerate(ordered) if each.returned_ns is not None)
    stack = [(0, model.initial, _next(ordered, 0))]
    seen = {(0, model.initial)}
    longest = 0
    while stack:
        done, state, places = stack[-1]
        if done & wanted == wanted:
            return Verdict(True, len(seen))
        if (done & wanted).bit_count() > (longest & wanted).bit_count():
            longest = done
        place = next(places, None)
        if place is None:
            stack.pop()
            continue
        operation = ordered[place]
        for after in model.step(state, operation):
            if operation.returned_ns is None and after == state:
                continue  # as if it had never happened
            reached = done | 1 << place, after
            if reached not in seen:
                seen.add(reached)
                stack.append((*reached, _next(ordered, reached[0])))
        if len(seen) > TRIES_MAX:
            raise RuntimeError(f"no verdict on {len(ordered)} operations after {len(seen)} states")
    return Verdict(False, len(seen), tuple(ordered[place] for place in _next(ordered, longest)))


def _next(ordered: Sequence[Operation], done: int) -> Iterator[int]:
    """Yield the operations that may come next: called before any other that is left returned."""
    left = [place for place in range((~done & done + 1).bit_length() - 1, len(ordered)) if not done >> place & 1]
    before = min((ns for place in left if (ns := ordered[place].returned_ns) is not None), default=0)
    return iter([place for place in left if ordered[place].called_ns <= before])
