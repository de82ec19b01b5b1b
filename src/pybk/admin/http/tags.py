"""Tags of responses: whether a client has a response already, and knows the values that it changes (RFC 9110, 13)."""

from __future__ import annotations

import hashlib
from http import HTTPStatus

from pybk.admin.http.problems import ProblemError


def tag_of(body: bytes) -> str:
    """Return the ``ETag`` of a response: the hash of its body."""
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def has(if_none_match: str, tag: str) -> bool:
    """Return whether a client has the response with a tag already, by its ``If-None-Match``."""
    given = {each.strip().removeprefix("W/") for each in if_none_match.split(",")}
    return tag in given or "*" in given


def check_match(if_match: str, body: bytes) -> None:
    """Raise ProblemError unless a client's ``If-Match`` has the tag of a body."""
    given = {each.strip() for each in if_match.split(",")}
    if tag_of(body) not in given and "*" not in given:
        raise ProblemError(
            HTTPStatus.PRECONDITION_FAILED,
            "changed_meanwhile",
            f"If-Match is {if_match!r:.100}, and the ETag is {tag_of(body)} by now: look at it again",
        )
