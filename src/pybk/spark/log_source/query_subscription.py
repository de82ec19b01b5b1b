"""The durable subscription of a query in each log that it reads.

The query acknowledges what its checkpoint has. So the page, ``pybk log subscriptions`` and the metrics show its lag as
that of any other consumer, and retention keeps what it has not read. The position of the query is in its checkpoint
alone: a subscription that is behind or ahead of it changes nothing that is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from pybk.deferral import LateModule
from pybk.errors import PybkError
from pybk.spark.connection import connection

if TYPE_CHECKING:
    from pybk.spark.log_source.log_offsets import LogPlace
    from pybk.spark.log_source.log_options import LogOptions
    from pybk.streams import log as logs
    from pybk.streams.log import Log
    from pybk.streams.subscription import Subscription
else:
    logs = LateModule("pybk.streams.log")

OWNER_SECONDS: Final = 60.0
"""The seconds to wait for the process of an earlier run, which may have been killed, to lose the subscription."""

logger = logging.getLogger(__name__)


class QuerySubscription:
    """Subscribes to logs and acknowledges records, in the driver.

    Args:
        options: The options of the read.
        name: The name of the subscription, in each log.

    Threads: one.
    """

    def __init__(self, options: LogOptions, name: str) -> None:
        self._options = options
        self._name: Final = name
        self._logs: dict[str, tuple[Log, Subscription]] = {}
        self._uids: dict[str, str] = {}
        """The uids of the logs at the last call of ``follow``."""

    def follow(self, positions: Mapping[str, LogPlace]) -> None:
        """Subscribe to the logs that are new, or were deleted and made again.

        Args:
            positions: The next record to read of each log that exists, at which a new subscription begins.

        Raises:
            LogLockedError: Another live query or consumer has the subscription.
            PybkError: The metadata store or bookies cannot be written to.
        """
        for name, place in positions.items():
            if self._uids.get(name, place.uid) != place.uid:
                self._close(name)
            self._of(name, place.seq)
            self._uids[name] = place.uid

    def acknowledge(self, positions: Mapping[str, int]) -> None:
        """Acknowledge the records before positions; what fails is logged, and made up for by a later call."""
        for name, seq in positions.items():
            try:
                subscription = self._of(name, seq)
                if subscription.first_unacked() < seq:
                    subscription.ack_through(seq - 1)
            except PybkError as error:
                logger.warning("subscription %r of log %r is as of before: %s", self._name, name, error)
                self._close(name)

    def close(self) -> None:
        """Release the subscriptions, which stay."""
        for name in list(self._logs):
            self._close(name)

    def _of(self, name: str, seq: int) -> Subscription:
        """Return the subscription of a log; it begins at a record if it does not exist."""
        if name not in self._logs:
            given = self._options.given.read()
            manager = connection(self._options.where).manager
            log = logs.Log.open(
                manager, name, password=given.password, secret=given.secret, insecure=True, create=False
            )
            try:
                self._logs[name] = log, log.subscribe(self._name, start=seq, wait=OWNER_SECONDS)
            except BaseException:
                log.close()
                raise
        return self._logs[name][1]

    def _close(self, name: str) -> None:
        """Release the subscription of a log, if it is open; a later call takes it again."""
        if name in self._logs:
            try:
                self._logs.pop(name)[0].close()
            except PybkError as error:
                logger.warning("subscription %r of log %r was not released: %s", self._name, name, error)
