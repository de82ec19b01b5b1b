"""The answer to a client for an error: a problem document, as in RFC 9457, with a stable code."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, Final

from starlette.responses import Response

from pybk.errors import (
    ClosedError,
    IllegalOperationError,
    MetadataUnreachableError,
    NoSuchBookieError,
    NoSuchLedgerError,
    PybkError,
    SafetyCheckError,
    UnauthorizedError,
    UsageError,
)

JSON: Final = "application/json"
PROBLEM: Final = "application/problem+json"
TEXT: Final = "text/plain; charset=utf-8"

NO_STORE: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
"""Headers of what shows data."""

_STATUSES: Final[tuple[tuple[type[PybkError], HTTPStatus], ...]] = (
    (SafetyCheckError, HTTPStatus.CONFLICT),
    (NoSuchBookieError, HTTPStatus.NOT_FOUND),
    (NoSuchLedgerError, HTTPStatus.NOT_FOUND),
    (MetadataUnreachableError, HTTPStatus.SERVICE_UNAVAILABLE),
    (ClosedError, HTTPStatus.SERVICE_UNAVAILABLE),
    (UnauthorizedError, HTTPStatus.FORBIDDEN),
    (IllegalOperationError, HTTPStatus.CONFLICT),
    (UsageError, HTTPStatus.BAD_REQUEST),
)
"""The status of each class of error, the first that fits; 500 for others."""


class ProblemError(Exception):
    """An error of a request.

    Args:
        status: The status of the response.
        code: A stable name, for programs.
        detail: What is wrong, and what to do, for people.
        retryable: Whether the same request may succeed later.
        extra: Further members of the document.
        headers: Headers of the response.
    """

    def __init__(
        self,
        status: HTTPStatus,
        code: str,
        detail: str,
        *,
        retryable: bool = False,
        extra: dict[str, Any] | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.retryable = retryable
        self.extra = extra or {}
        self.headers = headers

    def response(self) -> Response:
        """Return the response."""
        document = {
            "type": "about:blank",
            "title": self.status.phrase,
            "status": int(self.status),
            "code": self.code,
            "detail": self.detail,
            "retryable": self.retryable,
            **self.extra,
        }
        return Response(json.dumps(document), self.status, {**dict(self.headers), **NO_STORE}, PROBLEM)


def problem_of(error: PybkError) -> ProblemError:
    """Return the problem that an error of pybk is to a client; its code is the name of the class."""
    status = next((found for kind, found in _STATUSES if isinstance(error, kind)), HTTPStatus.INTERNAL_SERVER_ERROR)
    extra: dict[str, Any] = {}
    retryable = bool(error.retryable) or status is HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(error, SafetyCheckError):
        extra = {"failures": list(error.failures), "passing": error.passing}
    return ProblemError(status, type(error).__name__, str(error), retryable=retryable, extra=extra)
