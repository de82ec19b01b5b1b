"""The answer to a client for an error: a problem document, as in RFC 9457, with a stable code."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pybk.errors import (
    ClosedError,
    IllegalOperationError,
    MetadataUnreachableError,
    NoSuchBookieError,
    NoSuchLedgerError,
    NoSuchLogError,
    PybkError,
    SafetyCheckError,
    UnauthorizedError,
    UsageError,
)

JSON: Final = "application/json"
PROBLEM: Final = "application/problem+json"
TEXT: Final = "text/plain; charset=utf-8"

NO_STORE: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
"""The headers of responses with data."""

_STATUSES: Final[tuple[tuple[type[PybkError], HTTPStatus], ...]] = (
    (SafetyCheckError, HTTPStatus.CONFLICT),
    (NoSuchBookieError, HTTPStatus.NOT_FOUND),
    (NoSuchLedgerError, HTTPStatus.NOT_FOUND),
    (NoSuchLogError, HTTPStatus.NOT_FOUND),
    (MetadataUnreachableError, HTTPStatus.SERVICE_UNAVAILABLE),
    (ClosedError, HTTPStatus.SERVICE_UNAVAILABLE),
    (UnauthorizedError, HTTPStatus.FORBIDDEN),
    (IllegalOperationError, HTTPStatus.CONFLICT),
    (UsageError, HTTPStatus.BAD_REQUEST),
)
"""The status of each class of error, the first that fits; 500 for others."""

OPENAPI: Final = "/api/v1/openapi.json"

_OF_THE_ROUTER: Final = {
    HTTPStatus.NOT_FOUND: ("no_such_route", "nothing has this path"),
    HTTPStatus.METHOD_NOT_ALLOWED: ("other_method", "the path takes the methods in the header Allow"),
}
"""Code and text of what Starlette's router refuses, by status."""


class Problem(msgspec.Struct, kw_only=True):
    """An error (RFC 9457).

    Attributes:
        type: The kind of problem.
        title: The phrase of the status.
        status: The status of the response.
        code: A stable name of the error.
        detail: The cause and the remedy.
        retryable: Whether the same request may succeed later.
        failures: The safety checks that failed.
        passing: Whether these checks pass by themselves within a minute.
    """

    type: str
    title: str
    status: int
    code: str
    detail: str
    retryable: bool
    failures: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    passing: bool | msgspec.UnsetType = msgspec.UNSET


class ProblemError(HTTPException):
    """An error of a request.

    Args:
        status: The status of the response.
        code: A stable name, for programs.
        detail: The cause and the remedy, for people.
        headers: Headers of the response.
        retryable: Whether the same request may succeed later.
        **checks: ``failures`` and ``passing``, as the document has them.
    """

    def __init__(
        self,
        status: HTTPStatus,
        code: str,
        detail: str,
        headers: Mapping[str, str] | None = None,
        *,
        retryable: bool = False,
        **checks: Any,
    ) -> None:
        super().__init__(status, detail, headers)
        self.problem: Final = Problem(
            type="about:blank",
            title=status.phrase,
            status=int(status),
            code=code,
            detail=detail,
            retryable=retryable,
            **checks,
        )

    def response(self) -> Response:
        """Return the response."""
        headers = {**(self.headers or {}), **NO_STORE}
        return Response(msgspec.json.encode(self.problem), self.status_code, headers, PROBLEM)


def problem_of(error: HTTPException | PybkError) -> ProblemError:
    """Return the problem document for an error of pybk or of the router; its code is the name of the class."""
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, HTTPException):
        status = HTTPStatus(error.status_code)
        code, said = _OF_THE_ROUTER[status]
        return ProblemError(status, code, f"{said}: see {OPENAPI}", error.headers)
    status = next((found for kind, found in _STATUSES if isinstance(error, kind)), HTTPStatus.INTERNAL_SERVER_ERROR)
    retryable = bool(error.retryable) or status is HTTPStatus.SERVICE_UNAVAILABLE
    checks: dict[str, Any] = {}
    if isinstance(error, SafetyCheckError):
        checks = {"failures": error.failures, "passing": error.passing}
    return ProblemError(status, type(error).__name__, str(error), retryable=retryable, **checks)
