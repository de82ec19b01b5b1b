"""A running bookie's own cookie: its state, and its location."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from pybk.log_events import log_event
from pybk.metadata.registration import BookieState
from pybk.version import __version__

if TYPE_CHECKING:
    from pybk.feature_level import FeatureLevel
    from pybk.ledger.ledger_metadata import Bookie
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.metadata.store import Watch

logger = logging.getLogger(__name__)


class OwnCookie:
    """Follows the state in a running bookie's cookie, which people and the auditor change.

    A cookie that was removed, or is of another instance, changes nothing here: the registration shows that.

    Args:
        metadata: The cluster's metadata.
        bookie: The bookie.
        location: Its location, as ``Location`` writes it.

    Attributes:
        state: The state, as of the last notification from the store.

    Raises:
        PybkError: The cookie cannot be read.

    Threads: ``record_place`` is called by one thread; the store calls ``_look`` in its own.
    """

    def __init__(self, metadata: ClusterMetadata, bookie: Bookie, location: str) -> None:
        self._metadata = metadata
        self._bookie = bookie
        self._location = location
        self._watch: Watch | None = None
        self._on_change: Callable[[], None] | None = None
        self._recorded = False
        self.state = BookieState.ACTIVE
        self._look()

    def follow(self, on_change: Callable[[], None]) -> None:
        """Call ``on_change`` after each change of the state, in a thread of the store; at once if it has changed."""
        self._on_change = on_change
        self._watch = self._metadata.watch_cookie(self._bookie.bookie_id, self._look)
        self._look()

    def record_place(self, level_max: FeatureLevel) -> None:
        """Record the bookie's location and version, once the cluster's feature level allows it.

        Cost: None after it was recorded, and none below that level.
        """
        if not self._recorded:
            self._recorded = self._metadata.record_place(
                self._bookie, location=self._location, level_max=level_max, version=__version__
            )

    def _look(self) -> None:
        found = self._metadata.read_cookie(self._bookie.bookie_id)
        if found is None or found.bookie != self._bookie or found.state is self.state:
            return
        logger.info(
            "bookie %s is %s now",
            self._bookie,
            found.state,
            extra=log_event("bookie.state", bookie=str(self._bookie), state=found.state.value),
        )
        self.state = found.state
        if self._on_change is not None:
            self._on_change()

    def close(self) -> None:
        """Stop following the cookie; may be repeated."""
        if self._watch is not None:
            self._watch.cancel()
