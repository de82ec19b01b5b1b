"""A KeyboardInterrupt at any line of a read, an acknowledgement or a seek: the subscription stays whole, and works."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pybk import LedgerManager, Log, LogEnd
from tests.interrupting import interrupted_at
from tests.sampling import places

FILES = ("pybk/streams/subscription", "pybk/streams/cursor", "pybk/streams/deliveries")

DURABLE = {"ack": {0, 1}, "ack_async": {0, 1}, "seek": {0, 1, 2, 3, 4}}


@pytest.mark.sampled(one_in=3, group="any line")
@pytest.mark.parametrize("what", ["read", "look", "again", "ack", "ack_async", "nack", "seek"])
@pytest.mark.timeout(0)
def test_an_interrupt_at_any_line_leaves_a_subscription_that_works(tmp_path: Path, what: str) -> None:
    with LedgerManager.open(tmp_path) as manager:
        following, line, fired = places(what, 11, 3), 0, True
        while fired:
            line = next(following)
            with Log.open(manager, f"{what}/{line}", insecure=True) as log:
                log.writer().append_many([b"%d" % seq for seq in range(10)])
                subscription = log.subscribe("sub", start=LogEnd.EARLIEST)
                first = [] if what == "read" else subscription.read_many(3)
                if what == "again":
                    subscription.nack(first)
                calls: dict[str, Callable[[], object]] = {
                    "read": partial(subscription.read_many, 3),
                    "look": partial(subscription.read_many, 30, timeout=0),
                    "again": partial(subscription.read_many, 3),
                    "ack": partial(subscription.ack, first[:2]),
                    "ack_async": partial(subscription.ack_async, first[:2]),
                    "nack": partial(subscription.nack, first[:2]),
                    "seek": partial(subscription.seek, 5),
                }
                fired = interrupted_at(line, FILES, calls[what])
                subscription.rewind()
                found = {record.seq for record in subscription.read_many(10, timeout=60)}
                assert found == {seq for each in subscription.unacked_ranges() for seq in each}, f"line event {line}"
                assert subscription.read_many(1, timeout=0) == []
                subscription.ack(range(5, 9))
                assert subscription.backlog() == sum(map(len, subscription.unacked_ranges()))
                subscription.close()
                with log.subscribe("sub") as again:
                    left = {record.seq for record in again.read_many(10)}
                assert left <= found - {5, 6, 7, 8}, "an acknowledgement is lost"
                # What was interrupted may have become durable; the next acknowledgement finds that out.
                assert found - {5, 6, 7, 8} - left <= DURABLE.get(what, set())
        assert line > 20, "nothing was traced"
