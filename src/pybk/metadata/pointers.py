"""Pointers in the metadata store: small named values that applications change by compare-and-set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple
from urllib.parse import unquote

from pybk.errors import MetadataExistsError, MetadataVersionError, UsageError
from pybk.metadata.authenticated_values import AuthenticatedValues, ValueKind
from pybk.metadata.registration import name_in_key
from pybk.metadata.store import Watch

POINTERS_KEY: Final = "pointers"
POINTER_BYTES_MAX: Final = 448 << 10


class Pointer(NamedTuple):
    """A pointer's value and version.

    Attributes:
        value: The value.
        version: The version that the next compare-and-set names.
    """

    value: bytes
    version: int


class Pointers(AuthenticatedValues):
    """The pointers of a cluster. Threads: any.

    Every method may raise MetadataUnreachableError.
    """

    def read_pointer(self, group: str, name: str) -> Pointer | None:
        """Return a pointer, with every change that took effect before the call; None if it does not exist.

        Args:
            group: The purpose of the pointer, such as ``"sinks"``.
            name: Its name in the group.

        Raises:
            MetadataForgedError: It was not written with the cluster's secret.
            CorruptError: The key does not hold a pointer.
        """
        key = pointer_key(group, name)
        node = self._store.get(key, latest=True)
        return None if node is None else Pointer(self._payload_of(ValueKind.POINTER, key, node.value), node.version)

    def read_pointers(self, group: str, names: Sequence[str]) -> list[Pointer | None]:
        """Return some pointers of a group, as ``read_pointer`` does for each, in few round trips.

        They may be stale, but not older than those that this process has read before.
        """
        keys = [pointer_key(group, each) for each in names]
        return [
            None if node is None else Pointer(self._payload_of(ValueKind.POINTER, key, node.value), node.version)
            for key, node in zip(keys, self._store.get_many(keys), strict=True)
        ]

    def write_pointer(self, group: str, name: str, value: bytes, version: int | None) -> int:
        """Replace or create a pointer's value, durably.

        Args:
            group: As for ``read_pointer``.
            name: As for ``read_pointer``.
            value: At most ``POINTER_BYTES_MAX`` bytes.
            version: The version of the value that is replaced; None creates the pointer.

        Returns:
            The new version.

        Raises:
            MetadataVersionError: Another process changed or created it: read it again. With ``outcome_unknown`` this
                change may have taken effect before.
        """
        key = pointer_key(group, name)
        value = _checked_value(key, value)
        if version is not None:
            return self._put(ValueKind.POINTER, key, value, version, reused=True)
        try:
            return self.create_value(ValueKind.POINTER, key, value)
        except MetadataExistsError as error:
            raise MetadataVersionError(
                f"pointer {group}/{name} was created by another process; read it again",
                outcome_unknown=error.outcome_unknown,
            ) from error

    def delete_pointer(self, group: str, name: str, version: int) -> None:
        """Remove a pointer, durably.

        Raises:
            MetadataVersionError: It has another version, or does not exist.
        """
        self._delete(pointer_key(group, name), version, reused=True)

    def rename_pointer(self, group: str, name: str, target: str, value: bytes, version: int) -> None:
        """Give a pointer another name and value as one change, durably.

        Args:
            group: As for ``read_pointer``.
            name: Its name.
            target: Its new name in the same group.
            value: Its new value, at most ``POINTER_BYTES_MAX`` bytes.
            version: The version of the value that is replaced.

        Raises:
            MetadataVersionError: It has another version, or does not exist. With ``outcome_unknown`` this change may
                have taken effect before.
            MetadataExistsError: A pointer has the new name; ``outcome_unknown`` as before.
        """
        key, target_key = pointer_key(group, name), pointer_key(group, target)
        self._rename(ValueKind.POINTER, key, target_key, _checked_value(target_key, value), version)

    def pointer_names(self, group: str) -> list[str]:
        """Return the names of the pointers of a group, in no particular order, as ``list_pointers`` does."""
        return [unquote(child) for child in self._store.children(f"{POINTERS_KEY}/{name_in_key(group)}")]

    def watch_pointers(self, group: str, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after pointers of a group were created or removed, as ``MetadataStore.watch`` does."""
        return self._store.watch(f"{POINTERS_KEY}/{name_in_key(group)}", callback)

    def feed_pointers(self, group: str, callback: Callable[[frozenset[str] | None], None]) -> Watch:
        """Call ``callback`` with the names of pointers of a group that were created, changed or removed.

        As ``MetadataStore.watch_below`` does; None means that changes may have been missed.
        """

        def changed(keys: frozenset[str] | None) -> None:
            callback(None if keys is None else frozenset(unquote(key.rpartition("/")[2]) for key in keys))

        return self._store.watch_below(f"{POINTERS_KEY}/{name_in_key(group)}", changed)

    def list_pointers(self, group: str) -> list[tuple[str, Pointer]]:
        """Return the pointers of a group with their names, in no particular order.

        A pointer that is created or removed meanwhile may be among them or not.

        Raises:
            MetadataForgedError, CorruptError: As ``read_pointer``.
        """
        root = f"{POINTERS_KEY}/{name_in_key(group)}"
        keys = [f"{root}/{child}" for child in self._store.children(root)]
        found = []
        for key, node in zip(keys, self._store.get_many(keys), strict=True):
            if node is not None:
                value = self._payload_of(ValueKind.POINTER, key, node.value)
                found.append((unquote(key.rpartition("/")[2]), Pointer(value, node.version)))
        return found

    def watch_pointer(self, group: str, name: str, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after changes of a pointer, as ``MetadataStore.watch`` does."""
        return self._store.watch(pointer_key(group, name), callback)


def _checked_value(key: str, value: bytes) -> bytes:
    if type(value) is not bytes or len(value) > POINTER_BYTES_MAX:
        size = f"{len(value)} bytes" if type(value) is bytes else type(value).__name__
        raise UsageError(f"{key}: value of {size}; it takes at most {POINTER_BYTES_MAX} bytes")
    return value


def pointer_key(group: str, name: str) -> str:
    """Return the key of a pointer."""
    return f"{POINTERS_KEY}/{name_in_key(group)}/{name_in_key(name)}"
