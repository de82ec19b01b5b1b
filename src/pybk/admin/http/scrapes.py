"""The metrics for Prometheus, as ``/metrics`` returns them."""

from __future__ import annotations

import threading
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from pybk.admin.http.problems import ProblemError
from pybk.manager.ledger_manager import LedgerManager

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

AGE_SECONDS: Final = 1.0
"""The seconds after a scrape in which another one gets the same text."""


class Scrapes:
    """Answers scrapes of a manager's metrics; needs the extra ``pybk[metrics]``.

    Args:
        manager: The manager.
        store: The value of the label ``store``.

    Threads: any.
    """

    def __init__(self, manager: LedgerManager, store: str = "") -> None:
        self._manager = manager
        self._store = store
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._registry: CollectorRegistry | None = None
        """The registry; one for all scrapes, because the collector keeps the pairs that it has exported."""
        self._text = b""
        self._type = ""
        self._made = float("-inf")

    def answer(self) -> Response:
        """Return the metrics, at most ``AGE_SECONDS`` old."""
        try:
            from prometheus_client import CollectorRegistry
            from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

            from pybk.admin.metrics import ManagerCollector
        except ImportError as error:
            text = f"{error}: pip install 'pybk[metrics]'"
            raise ProblemError(HTTPStatus.NOT_IMPLEMENTED, "no_metrics", text) from error
        with self._lock:
            if time.monotonic() - self._made >= AGE_SECONDS:
                if self._registry is None:
                    self._registry = CollectorRegistry(auto_describe=False)
                    self._registry.register(ManagerCollector(self._manager, self._store))
                self._text, self._type = generate_latest(self._registry), CONTENT_TYPE_LATEST
                self._made = time.monotonic()
            return Response(self._text, media_type=self._type)
