"""Named records: small values with versions, in the log, the catalog and the index.

A named record is changed by compare-and-set. The change is a record in the log first; a checkpoint brings it into the
catalog and the index. A record's version is the LSN of the commit that wrote it, so a version is never used again, not
even after the record was removed.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.errors import IllegalOperationError, UsageError, VersionConflictError, without_frames
from pybk.feature_level import FeatureLevel
from pybk.storage.format.index_rows import NamedRow, encode_named
from pybk.storage.format.log_file import RecordKind, encode_control

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pybk.storage.index.index import Index
    from pybk.storage.log.commit import Commit, Control
    from pybk.storage.log.log import Log

logger = logging.getLogger(__name__)

NAME_BYTES_MAX: Final = 500
"""A name in UTF-8; a key of the index has at most 511 bytes."""

VALUE_BYTES_MAX: Final = 1 << 20


class NamedChange(NamedTuple):
    """The change that ``NamedRecords.compare_and_set`` has to make."""

    name: str
    expected_version: int | None
    value: bytes | None


class Earlier(NamedTuple):
    """A change of the same record that is not durable yet."""

    commit: Commit


class NamedRecords:
    """The named records of one store.

    Threads: any. A change waits for earlier changes of the same name; changes of different names share commits.

    Args:
        index: The store's index, which has them as of the last checkpoint.

    Attributes:
        log: The store's log; None for a store that is read only.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._tail: dict[str, NamedRow] = {}  # changed since the last checkpoint; without a value: removed
        self.pending: dict[str, Commit] = {}
        """The commit that changes a record, by name, until it is done."""
        self._watchers: dict[str, list[Callable[[], None]]] = {}
        self._group_watchers: dict[str, list[Callable[[str | None], None]]] = {}
        self.log: Log | None = None

    def watch(self, name: str, callback: Callable[[], None]) -> None:
        """Call ``callback`` after each durable change of a record, from some thread; it must not block."""
        with self._lock:
            self._watchers.setdefault(name, []).append(callback)

    def unwatch(self, name: str, callback: Callable[[], None]) -> None:
        """Undo ``watch``."""
        with self._lock:
            callbacks = self._watchers.get(name, [])
            if callback in callbacks:
                callbacks.remove(callback)
            if not callbacks:
                self._watchers.pop(name, None)

    def watch_group(self, group: str, callback: Callable[[str | None], None]) -> None:
        """Call ``callback`` after records of a group, ``group/name``, may have been created or removed, as ``watch``.

        Its argument is the name of the record; None for any of the group.
        """
        with self._lock:
            self._group_watchers.setdefault(group, []).append(callback)

    def unwatch_group(self, group: str, callback: Callable[[str | None], None]) -> None:
        """Undo ``watch_group``."""
        with self._lock:
            callbacks = self._group_watchers.get(group, [])
            if callback in callbacks:
                callbacks.remove(callback)
            if not callbacks:
                self._group_watchers.pop(group, None)

    @property
    def watched(self) -> bool:
        """True if any record is watched."""
        return bool(self._watchers) or bool(self._group_watchers)

    def get(self, name: str) -> NamedRow | None:
        """Return a record as of its last durable change, None if it does not exist."""
        with self._lock:
            row = self._tail.get(name)
        if row is None:
            return self._index.named(_checked(name))
        return None if row.value is None else row

    def tail_bytes(self) -> int:
        """Return the bytes of the values that changed since the last checkpoint."""
        with self._lock:
            return sum(len(row.value or b"") for row in self._tail.values())

    def all(self, prefix: str = "") -> list[NamedRow]:
        """Return the records whose names begin with ``prefix``, sorted by name."""
        with self._lock:
            tail = {name: row for name, row in self._tail.items() if name.startswith(prefix)}
        found = {row.name: row for row in self._index.all_named(prefix)} | tail
        return [row for _, row in sorted(found.items()) if row.value is not None]

    def compare_and_set(
        self, name: str, expected_version: int | None, value: bytes | None, *, level: FeatureLevel
    ) -> int:
        """Change a record if its version is the expected one; durable on return. Costs one synced write.

        Args:
            name: 1 to 500 bytes in UTF-8.
            expected_version: The version that the record must have; None if it must not exist.
            value: Its new value, at most 1 MiB; None removes it.
            level: The store's feature level.

        Returns:
            The record's new version.

        Raises:
            VersionConflictError: The record has another version.
            IllegalOperationError: The store is read only, or of a level that has no named records.
            UsageError: The name or the value is too long.
            StorageFullError: There is no space; nothing was changed.
            StorageFailedError: It may be changed or not; the store must be closed.
        """
        log = self._checked_log(level)
        change = NamedChange(name, expected_version, value)
        check_change(change)
        while isinstance(staged := self._stage(log, change), Earlier):
            log.wait(staged.commit)
        commit = staged
        log.wait(commit)
        self.complete([change], commit)
        if commit.error is not None:
            raise without_frames(commit.error)
        return commit.lsn

    def _stage(self, log: Log, change: NamedChange) -> Commit | Earlier:
        """Stage a change, and return its commit; or return an earlier change of this record that is not durable yet."""
        with self._lock:
            earlier = self._earlier([change])
            if earlier is not None:
                return earlier

            def claim(commit: Commit) -> None:
                self.pending[change.name] = commit

            commit = log.stage_control(*self._control(change), claim=claim)
            assert commit is not None, "nothing was said that might have changed"
            return commit

    def stage_group(
        self,
        changes: Sequence[NamedChange],
        stage: Callable[[list[Control], Callable[[Commit], None]], Commit | None],
    ) -> Commit | Earlier | None:
        """Stage changes of different records as a part of a group.

        Args:
            changes: Each checked by ``check_change``.
            stage: Given the changes as control records, and what to call with the commit before the group counts,
                stages the group; returns its commit, None if there is no space.

        Returns:
            What ``stage`` returns; or an earlier change of one of the records that is not durable yet: nothing was
            staged then.

        Raises:
            VersionConflictError: One of the records has another version; nothing was staged.
        """
        with self._lock:
            earlier = self._earlier(changes)
            if earlier is not None:
                return earlier

            def claim(commit: Commit) -> None:
                self.pending.update((change.name, commit) for change in changes)

            return stage([self._control(change) for change in changes], claim)

    def _earlier(self, changes: Sequence[NamedChange]) -> Earlier | None:
        """Return an earlier change of one of the records, if one is not durable yet; the caller holds the lock.

        Raises:
            VersionConflictError: One of the records has another version.
        """
        for change in changes:
            earlier = self.pending.get(change.name)
            if earlier is not None and not earlier.done:
                return Earlier(earlier)
        for change in changes:
            self._check_version(change.name, change.expected_version)
        return None

    def _control(self, change: NamedChange) -> Control:
        """Return a change as a control record."""
        rows: list[NamedRow] = []

        def encode(lsn: int) -> bytes:
            rows[:] = [NamedRow(change.name, lsn, change.value)]
            return encode_control(RecordKind.NAMED, -1, lsn, encode_named(rows[0]), lsn=lsn)

        def apply() -> None:
            self.changed(rows[0])

        return encode, apply

    def complete(self, changes: Sequence[NamedChange], commit: Commit) -> None:
        """Forget that changes are on their way, because their commit is done."""
        with self._lock:
            for change in changes:
                if self.pending.get(change.name) is commit:
                    del self.pending[change.name]

    def _checked_log(self, level: FeatureLevel) -> Log:
        if self.log is None:
            raise IllegalOperationError("the store is open read only; open it for writing to change named records")
        check_level(level, "named records")
        return self.log

    def _check_version(self, name: str, expected: int | None) -> None:
        """Raise unless a record has the expected version; the caller holds the lock."""
        row = self._tail.get(name)
        if row is None:
            row = self._index.named(name)
        version = None if row is None or row.value is None else row.version
        if version != expected:
            raise VersionConflictError(
                f"the named record {name!r} has version {version}, not {expected}; read it again, and decide anew",
                version=version,
            )

    # ---- log and checkpoint --------------------------------------------------------------------------------------

    def changed(self, row: NamedRow) -> None:
        """Take a durable change; called by the log's leader, and by replay."""
        with self._lock:
            self._tail[row.name] = row
            callbacks = list(self._watchers.get(row.name, ()))
            group = row.name.partition("/")[0] if self._group_watchers else ""
            group_callbacks = list(self._group_watchers.get(group, ()))
        _call_all([*callbacks, *(partial(each, row.name) for each in group_callbacks)])

    def tail(self) -> list[NamedRow]:
        """Return the records that changed since the last checkpoint; called while the log stands still."""
        with self._lock:
            return list(self._tail.values())

    def checkpointed(self, rows: Iterable[NamedRow]) -> None:
        """Forget changes that the index has now, except of records that changed again."""
        with self._lock:
            for row in rows:
                if self._tail.get(row.name) == row:
                    del self._tail[row.name]

    def forget(self) -> None:
        """Forget all changes: the log is read again from a newer checkpoint."""
        with self._lock:
            self._tail.clear()
            callbacks = [callback for each in self._watchers.values() for callback in each]
            group_callbacks = [callback for each in self._group_watchers.values() for callback in each]
        _call_all([*callbacks, *(partial(each, None) for each in group_callbacks)])

    def after_fork(self) -> None:
        """Replace the lock in a forked child, because a thread that does not exist there may have held it."""
        self._lock = threading.Lock()


def _call_all(callbacks: Sequence[Callable[[], None]]) -> None:
    """Make calls of watches, which are the application's code: what one raises concerns neither the log nor others."""
    for callback in callbacks:
        try:
            callback()
        except Exception:
            logger.exception("the callback of a watch of a named record failed; the change itself is done")


def check_level(level: FeatureLevel, what: str) -> None:
    """Raise IllegalOperationError for a store whose level does not have something."""
    if level < FeatureLevel.SEALS:
        raise IllegalOperationError(
            f"the store has feature level {int(level)} ({level.name}), which has no {what}; raise it with "
            "`pybk store upgrade PATH --finalize`"
        )


def check_change(change: NamedChange) -> None:
    """Raise UsageError for a change whose name or value is too long."""
    _checked(change.name)
    if change.value is not None and len(change.value) > VALUE_BYTES_MAX:
        raise UsageError(
            f"the value of {change.name!r:.50} has {len(change.value)} bytes; it takes at most {VALUE_BYTES_MAX}"
        )


def _checked(name: str) -> str:
    """Return a name; UsageError if it cannot be one."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"the name {name!r:.50} is not text that UTF-8 can encode: {error}") from error
    if not 1 <= size <= NAME_BYTES_MAX:
        raise UsageError(f"the name {name!r:.50} has {size} bytes in UTF-8; it takes 1 to {NAME_BYTES_MAX}")
    return name
