"""The log of a service on its standard error: text for people, or a JSON object per line."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final

from pybk.admin.shown_text import shown_text
from pybk.errors import PybkError
from pybk.metrics import code_of
from pybk.spans import current_operation
from pybk.transport.logging_limit import LogLimit

LINES_MAX: Final = 10
"""The most lines of one kind in each minute; the next one has the number of dropped lines."""

_PACKAGE: Final = "pybk"


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object.

    It has ``ts``, ``level``, ``event`` and ``message``, and the fields of the event. A line without an event of
    ``pybk.log_events`` has the name of its module as event. An exception adds ``code`` and ``stack``, and an operation
    with a hook that gives them ``trace_id`` and ``span_id``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", record.name),
            "message": record.getMessage(),
        }
        under_way = current_operation()
        if under_way is not None:
            line.update(under_way.ids)
        line.update({name: value for name, value in getattr(record, "fields", {}).items() if name not in line})
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line.setdefault("code", code_of(error) if isinstance(error, PybkError) else type(error).__name__)
            line["stack"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _TextFormatter(logging.Formatter):
    """Formats a record as one line of text, with the name of its event; only a stack has more lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # as logging calls it
        """Return the line without its stack."""
        name = getattr(record, "event", "")
        record.message = shown_text(record.message)  # a name in it, which others chose, begins no line of its own
        return super().formatMessage(record) + (f" [{name}]" if name else "")


class _Limit(LogLimit):
    """Limits what is neither for debugging nor ``NOT_LIMITED``."""

    def filter(self, record: logging.LogRecord) -> bool:
        kept = record.levelno <= logging.DEBUG or getattr(record, "not_limited", False)
        return kept or super().filter(record)


def begin(log_format: str, level: str) -> None:
    """Write the log of this process to its standard error from now on, and nowhere else.

    Args:
        log_format: ``text`` or ``json``.
        level: The least level of what pybk logs; of other packages, warnings at least.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else _TextFormatter())
    handler.addFilter(_Limit(LINES_MAX))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    set_level(level)


def set_level(level: str) -> None:
    """Change the least level of what pybk logs."""
    logging.getLogger(_PACKAGE).setLevel(level.upper())
