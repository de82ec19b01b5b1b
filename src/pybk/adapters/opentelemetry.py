"""Operations of pybk as OpenTelemetry spans: ``StoreConfig(on_span=on_span)``; needs the extra ``pybk[opentelemetry]``.

It uses only the API of OpenTelemetry: the application chooses the SDK, with its exporters and sampling.
"""

from __future__ import annotations

from typing import Final

from opentelemetry import context, trace

from pybk.spans import SpanAttributes
from pybk.version import __version__

__all__ = ["OpenTelemetrySpan", "on_span"]

_TRACER: Final = trace.get_tracer("pybk", __version__)
"""The tracer, which uses the tracer provider that is set when a span starts."""


class OpenTelemetrySpan:
    """An OpenTelemetry span that is the current one until its end; a ``pybk.Span``."""

    def __init__(self, span: trace.Span) -> None:
        """Make a span the current one."""
        self._span = span
        self._token = context.attach(trace.set_span_in_context(span))

    @property
    def trace_id(self) -> str:
        """The id of the trace in 32 hexadecimal digits; empty without an SDK."""
        ids = self._span.get_span_context()
        return trace.format_trace_id(ids.trace_id) if ids.is_valid else ""

    @property
    def span_id(self) -> str:
        """The id of the span in 16 hexadecimal digits; empty without an SDK."""
        ids = self._span.get_span_context()
        return trace.format_span_id(ids.span_id) if ids.is_valid else ""

    def end(self, end_ns: int, attributes: SpanAttributes, error: BaseException | None, /) -> None:
        """End the span; an error becomes its status, and an event with the stack."""
        context.detach(self._token)
        self._span.set_attributes(attributes)
        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")
        self._span.end(end_ns)


def on_span(name: str, start_ns: int, attributes: SpanAttributes, /) -> OpenTelemetrySpan:
    """Start an OpenTelemetry span, whose parent is the caller's current one."""
    return OpenTelemetrySpan(_TRACER.start_span(name, attributes=attributes, start_time=start_ns))
