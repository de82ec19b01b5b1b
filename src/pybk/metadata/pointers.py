"""Pointers in the metadata store: small named records that move by compare-and-set."""

from __future__ import annotations

from typing import Final, NamedTuple

from pybk.errors import MetadataExistsError, MetadataVersionError, UsageError
from pybk.metadata.authenticated_values import AuthenticatedValues, ValueKind
from pybk.metadata.registration import name_in_key

POINTERS_KEY: Final = "pointers"
POINTER_BYTES_MAX: Final = 64 << 10


class Pointer(NamedTuple):
    """What a pointer says.

    Attributes:
        value: Its bytes.
        version: For the next compare-and-set.
    """

    value: bytes
    version: int


class Pointers(AuthenticatedValues):
    """The pointers of a cluster. Threads: any. Every method raises MetadataUnreachableError, too."""

    def read_pointer(self, group: str, name: str) -> Pointer | None:
        """Return what a pointer says now, None if there is none: every change that took effect before is seen.

        Args:
            group: What it is for, such as ``"sinks"``.
            name: Its name in the group.

        Raises:
            MetadataForgedError: It was not written with the cluster's secret.
            CorruptError: What is there is no pointer.
        """
        key = _key(group, name)
        node = self._store.get(key, latest=True)
        return None if node is None else Pointer(self._payload_of(ValueKind.POINTER, key, node.value), node.version)

    def write_pointer(self, group: str, name: str, value: bytes, version: int | None) -> int:
        """Have a pointer say something else, durably.

        Args:
            group: As for ``read_pointer``.
            name: As for ``read_pointer``.
            value: At most ``POINTER_BYTES_MAX`` bytes.
            version: Of what it said so far; None makes the pointer.

        Returns:
            The new version.

        Raises:
            MetadataVersionError: Somebody else changed or made it: read it again. With ``outcome_unknown`` this change
                may have been made before that.
        """
        key = _key(group, name)
        if type(value) is not bytes or len(value) > POINTER_BYTES_MAX:
            size = f"{len(value)} bytes" if type(value) is bytes else type(value).__name__
            raise UsageError(f"pointer {group}/{name} to {size}; it takes at most {POINTER_BYTES_MAX} bytes")
        if version is not None:
            return self._put(ValueKind.POINTER, key, value, version)
        try:
            return self._create(ValueKind.POINTER, key, value)
        except MetadataExistsError as error:
            raise MetadataVersionError(
                f"pointer {group}/{name} was made by somebody else; read it again",
                outcome_unknown=error.outcome_unknown,
            ) from error


def _key(group: str, name: str) -> str:
    return f"{POINTERS_KEY}/{name_in_key(group)}/{name_in_key(name)}"
