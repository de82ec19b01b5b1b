"""Spans: calls of a hook of the application at the start and at the end of operations, for example for OpenTelemetry.

Theory of operation
===================

The hook is ``StoreConfig.on_span``. An *operation* calls the hook when it starts, and the span that the hook returned
when it ends, both in the thread and the context (``contextvars``) of the caller. So the hook finds the caller's own
span there, which is the parent, and may make its span the current one meanwhile. ``call_threads`` copies the context of
a task, so this holds for the calls of an event loop, too.

A *part* of an operation, such as a request to the metadata store, is reported to the hook of the operation that is
under way in the context; outside of an operation it is not reported. So the requests that threads of pybk make on their
own do not flood the traces, and layers below the handles need no reference to the hook.

A batch of appends begins in one thread and ends in another. Its span is reported when it has ended: both calls follow
each other, in a copy of the context of the call that began the batch.

An exception of the hook is logged, the first of its kind with its stack, and has no effect on the operation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Final, Protocol, Self, TypeAlias

logger = logging.getLogger(__name__)

SPANS: Final[Mapping[str, str]] = {
    "pybk.manager.open": "Opening a directory, with its recovery, or joining a cluster as a bookie.",
    "pybk.manager.connect": "Connecting to a cluster.",
    "pybk.manager.close": "Closing a manager.",
    "pybk.ledger.create": "Creating a ledger.",
    "pybk.ledger.open": "Opening a ledger for reading.",
    "pybk.ledger.recover": "Recovering a ledger while it is opened: fencing its writer, and closing it.",
    "pybk.ledger.append": "A batch of appends to one ledger, from staging its first entry to durable and acknowledged.",
    "pybk.ledger.force": "Making all entries of a writer durable.",
    "pybk.ledger.close": "Closing a ledger.",
    "pybk.ledger.read": "Reading a batch of entries.",
    "pybk.ledger.metadata": "Looking the metadata of a ledger up.",
    "pybk.ledger.delete": "Deleting a ledger.",
    "pybk.ledger.move": "Moving ledgers to another tier.",
    "pybk.ledger.reseal": "Checking all entries of a ledger, and sealing it.",
    "pybk.ledger.replicate": "Copying what lost bookies had of a ledger, or of all ledgers of a bookie.",
    "pybk.transaction.commit": "Committing an atomic group.",
    "pybk.store.checkpoint": "A checkpoint that was asked for.",
    "pybk.store.scrub": "A check of all entries that was asked for.",
    "pybk.store.scrub_part": "A part of the entries that was checked in the background, to its end.",
    "pybk.bookie.start": "Starting a bookie, until it is registered and serves.",
    "pybk.bookie.repair": "A repair of a ledger by a bookie's worker.",
    "pybk.cluster.drain": "Beginning to drain a bookie.",
    "pybk.cluster.remove": "Removing a bookie from the cluster.",
    "pybk.metadata.get": "A request to the metadata store, as are the following.",
    "pybk.metadata.get_many": "Several values.",
    "pybk.metadata.children": "The names below a key.",
    "pybk.metadata.create": "A new value.",
    "pybk.metadata.put": "A compare-and-set.",
    "pybk.metadata.delete": "A compare-and-delete.",
    "pybk.metadata.rename": "A value gets another key.",
}
"""The names of all spans, and the operation of each. They stay the same from one version to the next."""

AttributeValue: TypeAlias = str | int | bool

SpanAttributes: TypeAlias = Mapping[str, AttributeValue]
"""The attributes of an operation, each with ``pybk.`` before its name."""


class Span(Protocol):
    """The start of an operation, as an ``OnSpan`` hook returns it."""

    @property
    def trace_id(self) -> str:
        """The id of the trace, for lines of the log; empty for none."""

    @property
    def span_id(self) -> str:
        """The id of the span, for lines of the log; empty for none."""

    def end(self, end_ns: int, attributes: SpanAttributes, error: BaseException | None, /) -> None:
        """Note the end of the operation.

        Args:
            end_ns: The time when it ended, in nanoseconds since 1970.
            attributes: Attributes that were not known at the start, such as the number of entries read.
            error: The exception with which it ended; None if it succeeded.

        Threads: The thread and the context of the call that returned the span.
        """


class OnSpan(Protocol):
    """A hook that is called at the start of each operation: a function, or any object that can be called.

    It is called in the thread and the context of the operation's caller. For a batch of appends it is called once the
    batch has ended, in a background thread and a copy of the context of the call that began the batch. It must be fast,
    and must not call pybk. An exception of the hook is logged, and has no effect on the operation.
    """

    def __call__(self, name: str, start_ns: int, attributes: SpanAttributes, /) -> Span | None:
        """Return the span of an operation that starts; None for an operation that the hook ignores.

        Args:
            name: The operation; ``docs/howto/tracing.md`` has all names.
            start_ns: The time when it started, in nanoseconds since 1970.
            attributes: The attributes that are known at the start, a few short values; never payloads, passwords or
                keys.
        """


class Operation:
    """One operation with a hook, as a context manager."""

    __slots__ = ("_attributes", "_began_ns", "_name", "_on_span", "_span", "_start_ns", "_token", "is_over")

    def __init__(self, on_span: OnSpan, name: str, attributes: dict[str, AttributeValue]) -> None:
        self._on_span = on_span
        self._name = name
        self._attributes = attributes
        self._span: Span | None = None
        self.is_over = False
        """True if it has ended; a thread that it started may keep its context for ever."""

    @property
    def on_span(self) -> OnSpan:
        """The hook."""
        return self._on_span

    @property
    def ids(self) -> dict[str, str]:
        """The fields that lines of the log have while it is under way."""
        try:
            named = {"trace_id": self._span.trace_id, "span_id": self._span.span_id} if self._span is not None else {}
        except Exception as error:  # noqa: BLE001  # a hook must not harm what is logged
            _log_failure(self._name, error)
            return {}
        return {name: value for name, value in named.items() if value}

    def note(self, **attributes: AttributeValue) -> None:
        """Add attributes, named as for ``operation``."""
        self._attributes.update(_named(attributes))

    def __enter__(self) -> Self:
        """Report the start."""
        self._start_ns, self._began_ns = time.time_ns(), time.monotonic_ns()
        self._token: Token[Operation | None] = _CURRENT.set(self)
        self._span = _started(self._on_span, self._name, self._start_ns, self._attributes)
        self._attributes = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Report the end."""
        self.is_over = True
        _CURRENT.reset(self._token)
        _ended(self._span, self._name, self._start_ns + time.monotonic_ns() - self._began_ns, self._attributes, error)


class _Unreported:
    """An operation without a hook."""

    __slots__ = ()

    def note(self, **attributes: AttributeValue) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


_UNREPORTED: Final = _Unreported()

_CURRENT: Final[ContextVar[Operation | None]] = ContextVar("pybk_operation", default=None)
"""The innermost operation that is under way in this context."""


def operation(on_span: OnSpan | None, name: str, **attributes: AttributeValue) -> Operation | _Unreported:
    """Return an operation, to be used with ``with``.

    Args:
        on_span: The hook; None reports nothing.
        name: One of ``SPANS``.
        attributes: The attributes that are known; hooks get ``pybk.`` before each name.
    """
    return _UNREPORTED if on_span is None else Operation(on_span, name, _named(attributes))


def part(name: str, **attributes: AttributeValue) -> Operation | _Unreported:
    """Return a part of the operation that is under way in this context; without an operation it is not reported."""
    whole = current_operation()
    return _UNREPORTED if whole is None else Operation(whole.on_span, name, _named(attributes))


def current_operation() -> Operation | None:
    """Return the innermost operation with a hook that is under way in this context."""
    found = _CURRENT.get()
    return None if found is None or found.is_over else found


def report(
    on_span: OnSpan, name: str, began_ns: int, error: BaseException | None, **attributes: AttributeValue
) -> None:
    """Report an operation that has just ended, in the present context.

    Args:
        on_span: The hook.
        name: One of ``SPANS``.
        began_ns: The time when it began, on the monotonic clock.
        error: The error with which it failed; None if it succeeded.
        attributes: As for ``operation``.
    """
    end_ns = time.time_ns()
    span = _started(on_span, name, end_ns - (time.monotonic_ns() - began_ns), _named(attributes))
    _ended(span, name, end_ns, {}, error)


def _named(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    return {f"pybk.{name}": value for name, value in attributes.items()}


def _started(on_span: OnSpan, name: str, start_ns: int, attributes: SpanAttributes) -> Span | None:
    try:
        return on_span(name, start_ns, attributes)
    except Exception as error:  # noqa: BLE001  # a hook must not harm the operation
        _log_failure(name, error)
        return None


def _ended(span: Span | None, name: str, end_ns: int, attributes: SpanAttributes, error: BaseException | None) -> None:
    if span is not None:
        try:
            span.end(end_ns, attributes, error)
        except Exception as failure:  # noqa: BLE001  # a hook must not harm the operation
            _log_failure(name, failure)


_LOGGED: Final[set[tuple[str, type[Exception]]]] = set()
"""The failures of hooks that were logged: the span, and the class of the exception."""


def _log_failure(name: str, error: Exception) -> None:
    kind = name, type(error)
    if kind not in _LOGGED:
        _LOGGED.add(kind)
        logger.warning(
            "the on_span hook failed for %s; further failures like this one are not logged", name, exc_info=error
        )
