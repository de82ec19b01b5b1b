"""``TimedStore``: a metadata store whose requests are timed, and reported as parts of operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from pybk.errors import MetadataExistsError, MetadataUnreachableError, MetadataVersionError
from pybk.metrics import METADATA_OP, SESSION_LOSSES
from pybk.spans import current_operation, part

if TYPE_CHECKING:
    from pybk.metadata.store import MetadataStore, Node, Watch
    from pybk.metrics import Metrics, MetricsScope

R = TypeVar("R")


class TimedStore:
    """Passes each request to a store, and records how long the store took, by operation and result.

    A request is also reported as part of the operation that makes it, if the operation has a hook (``pybk.spans``).
    Nothing is recorded before ``measure``. ``walk`` is not timed, because its caller works between the items, nor is
    ``recall``, which seldom makes a request. Implements ``MetadataStore``, which documents the methods.

    Args:
        store: The store.
    """

    def __init__(self, store: MetadataStore) -> None:
        self._store: Final = store
        self._metrics: Metrics | None = None
        self._scopes: dict[tuple[str, str], MetricsScope] = {}
        self._losses: Watch | None = None
        self.recall: Final = store.recall
        self.session: Final = store.session
        self.alive: Final = store.alive
        self.watch: Final = store.watch
        self.watch_below: Final = store.watch_below
        self.on_session_end: Final = store.on_session_end

    def measure(self, metrics: Metrics) -> None:
        """Record requests in these metrics from now on, and count ends of sessions there."""
        self._metrics = metrics
        metrics.add(SESSION_LOSSES, 0)
        if self._losses is None:
            self._losses = self._store.on_session_end(lambda: metrics.add(SESSION_LOSSES))

    def _timed(self, op: str, ask: Callable[[], R]) -> R:
        if current_operation() is None:
            return self._measured(op, ask)
        with part(f"pybk.metadata.{op}"):
            return self._measured(op, ask)

    def _measured(self, op: str, ask: Callable[[], R]) -> R:
        result, began_ns = "error", time.monotonic_ns()
        try:
            answer = ask()
            result = "ok"
            return answer
        except (MetadataVersionError, MetadataExistsError):
            result = "refused"
            raise
        except MetadataUnreachableError:
            result = "unreachable"
            raise
        finally:
            if self._metrics is not None:
                scope = self._scopes.get((op, result))
                if scope is None:
                    scope = self._metrics.scope(labels=(("op", op), ("result", result)))
                    self._scopes[op, result] = scope
                scope.collect(METADATA_OP, time.monotonic_ns() - began_ns)

    def get(self, key: str, *, latest: bool = False) -> Node | None:
        """See ``MetadataStore.get``."""
        return self._timed("get", lambda: self._store.get(key, latest=latest))

    def get_many(self, keys: Sequence[str], *, latest: bool = False) -> list[Node | None]:
        """See ``MetadataStore.get_many``."""
        return self._timed("get_many", lambda: self._store.get_many(keys, latest=latest))

    def children(self, key: str) -> list[str]:
        """See ``MetadataStore.children``."""
        return self._timed("children", lambda: self._store.children(key))

    def walk(self) -> Iterator[tuple[str, Node]]:
        """See ``MetadataStore.walk``."""
        return self._store.walk()

    def create(self, key: str, value: bytes, *, leased: bool = False) -> int:
        """See ``MetadataStore.create``."""
        return self._timed("create", lambda: self._store.create(key, value, leased=leased))

    def put(self, key: str, value: bytes, version: int, *, reused: bool = False) -> int:
        """See ``MetadataStore.put``."""
        return self._timed("put", lambda: self._store.put(key, value, version, reused=reused))

    def delete(self, key: str, version: int, *, reused: bool = False) -> None:
        """See ``MetadataStore.delete``."""
        self._timed("delete", lambda: self._store.delete(key, version, reused=reused))

    def rename(self, key: str, target: str, value: bytes, version: int) -> None:
        """See ``MetadataStore.rename``."""
        self._timed("rename", lambda: self._store.rename(key, target, value, version))

    def close(self) -> None:
        """See ``MetadataStore.close``."""
        self._store.close()
