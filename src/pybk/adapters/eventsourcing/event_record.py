"""The bytes of a stored event in its log. See ``docs/howto/eventsourcing.md``."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple, TypeAlias
from uuid import UUID

from eventsourcing.persistence import DataError, Notification, StoredEvent, Tracking

from pybk.errors import CorruptError, UnsupportedFormatError

Originator: TypeAlias = bytes | str
"""An originator id in an index: the 16 bytes of a UUID, or text."""

_FORMAT: Final = 1
_HEADER: Final = struct.Struct("<BBHHq")
"""The format, the flags, the bytes of the originator id and of the topic, and the version."""
_TRACKING: Final = struct.Struct("<Hq")
"""The bytes of the application's name, and the notification id."""


_UUID: Final = 1
"""The flag of an originator id that is a UUID."""
_TRACKED: Final = 2
"""The flag of a position in an upstream application, which comes before the state."""


class EventRecord(NamedTuple):
    """A stored event that was decoded.

    Attributes:
        originator: Its originator id, as an index has it.
        version: Its originator version.
        topic: Its topic.
        tracking: The position that was tracked in its transaction; None for none, and in all events except the first.
        state: Its state.
    """

    originator: Originator
    version: int
    topic: str
    tracking: Tracking | None
    state: bytes

    @property
    def originator_id(self) -> UUID | str:
        """The originator id, as the application gave it."""
        return UUID(bytes=self.originator) if isinstance(self.originator, bytes) else self.originator

    def stored_event(self) -> StoredEvent:
        """Return the event in the form for an aggregate's repository."""
        return StoredEvent(self.originator_id, self.version, self.topic, self.state)

    def notification(self, lsn: int) -> Notification:
        """Return the event as a notification, whose id is its log sequence number."""
        return Notification(self.originator_id, self.version, self.topic, self.state, lsn)


def originator_of(originator_id: UUID | str) -> Originator:
    """Return an originator id in the form of an index."""
    return originator_id.bytes if isinstance(originator_id, UUID) else originator_id


def encode_event(event: StoredEvent, tracking: Tracking | None = None) -> bytes:
    """Return the bytes of an event.

    Args:
        event: The event.
        tracking: The position that its transaction tracks; only for the first event of the transaction.

    Raises:
        DataError: A text or number does not fit.
    """
    originator = originator_of(event.originator_id)
    flags = 0
    if isinstance(originator, str):
        originator = originator.encode()
    else:
        flags |= _UUID
    topic = event.topic.encode()
    try:
        tracked = b""
        if tracking is not None:
            flags |= _TRACKED
            name = tracking.application_name.encode()
            tracked = _TRACKING.pack(len(name), tracking.notification_id) + name
        header = _HEADER.pack(_FORMAT, flags, len(originator), len(topic), event.originator_version)
    except struct.error:
        raise DataError(
            f"an event has an originator id, a topic or an application name of more than {0xFFFF} bytes, or a number "
            f"beyond 63 bits: {event.originator_id!r:.100} {event.originator_version!r:.30} {event.topic!r:.100}"
        ) from None
    return b"".join((header, originator, topic, tracked, event.state))


def decode_event(data: bytes) -> EventRecord:
    """Return the event of some bytes.

    Raises:
        UnsupportedFormatError: A newer pybk wrote it.
        CorruptError: It is not an event.
    """
    try:
        number, flags, originator_bytes, topic_bytes, version = _HEADER.unpack_from(data)
        if number != _FORMAT:
            raise UnsupportedFormatError(f"the event has format {number}; this version knows format {_FORMAT}")
        topic_at = _HEADER.size + originator_bytes
        at = topic_at + topic_bytes
        originator = data[_HEADER.size : topic_at]
        topic = data[topic_at:at].decode()
        tracking = None
        if flags & _TRACKED:
            name_bytes, notification_id = _TRACKING.unpack_from(data, at)
            at += _TRACKING.size + name_bytes
            tracking = Tracking(data[at - name_bytes : at].decode(), notification_id)
        return EventRecord(originator if flags & _UUID else originator.decode(), version, topic, tracking, data[at:])
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise CorruptError(f"a record of the log is not an event: {error}") from error
